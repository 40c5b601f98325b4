"""A model card in Markdown: what a trained model is, what made it, and how good it is."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from onnxfit.callbacks.history import History
from onnxfit.callbacks.progress.line import number_text
from onnxfit.checks import shortened
from onnxfit.data.optional import import_optional
from onnxfit.drawing.labels import clean
from onnxfit.errors import InstallationError, SettingError
from onnxfit.files import require_suffix, write_atomically
from onnxfit.load.facts import license_of
from onnxfit.training.lineage import is_change
from onnxfit.training.summary import summary
from onnxfit.training.training import Training

MAX_EPOCHS = 20  # rows of the table of figures, the last ones
VALIDATION = "val_"  # the beginning of the names of validation metrics
DIGITS = 16  # of a hash in the table of data


def card(training: Training, path: str | os.PathLike[str] | None, fields: Mapping[str, Any]) -> str:
    """Return the model card, and write it; see `Trainer.card`."""
    if path is not None:
        require_suffix(path, "a model card", ".md")
    model = training.trainable.file.proto
    name = str(fields.get("model_name") or model.graph.name or "model")
    lineage = training.lineage.as_json(training)
    front = {"library_name": "onnxfit", "tags": ["onnx"], **_license(model), **fields}
    results = _results(training.history, lineage, front)
    if results and "model-index" not in front:
        front["model-index"] = [{"name": name, "results": results}]
    picture = _write_plot(training, path)
    parts = [
        "---",
        *(f"{key}: {_yaml(key, value)}" for key, value in front.items()),
        "---",
        f"\n# {clean(name)}\n",
        "An ONNX model, trained by onnxfit.",
        "\n## Model\n",
        f"```text\n{summary(training, 1)}\n```",
        *_figures(training.history, lineage, picture),
        *_data(lineage),
        *_fits(lineage),
        *_origin(lineage),
    ]
    text = "\n".join(parts) + "\n"
    if path is not None and training.world.is_main:
        write_atomically(path, lambda file: file.write(text.encode()))
    return text


def _yaml(key: str, value: Any) -> str:
    """Return a value as JSON, which YAML contains. SettingError: JSON has no such value."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise SettingError(
            f"The field {key} of a model card must be text, numbers, or lists and dicts of them,"
            f" got {shortened(value)}: {error}."
        ) from None


def _license(model: onnx.ModelProto) -> dict[str, str]:
    """Return the fields for the license in a model's metadata; none without one."""
    found = license_of(model)
    if found is None:
        return {}
    if re.fullmatch(r"[A-Za-z0-9.+-]+", found):
        return {"license": found.lower()}
    return {"license": "other", "license_name": found}


def _results(
    history: History, lineage: Mapping[str, Any], front: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the validation metrics as results of a model index.

    There are none without the task and the data set, which a model index needs, or if the weights
    are not those of the last epoch.
    """
    if _restored(lineage) is not None or any(map(is_change, lineage["not_reproducible"])):
        return []
    task, datasets = front.get("pipeline_tag"), front.get("datasets")
    metrics = [
        {"type": name.removeprefix(VALIDATION), "value": values[-1]}
        for name, values in history.history.items()
        if name.startswith(VALIDATION) and values and math.isfinite(values[-1])
    ]
    if not (task and datasets and metrics):
        return []
    data = datasets if isinstance(datasets, str) else datasets[0]
    dataset = {"type": data, "name": data, "split": "validation"}
    return [{"task": {"type": task}, "dataset": dataset, "metrics": metrics}]


def _restored(lineage: Mapping[str, Any]) -> int | None:
    """Return the batch whose weights the last fit ended with, if it is not the last batch."""
    fit = lineage["fits"][-1] if lineage["fits"] else None
    if fit is None or not fit["changes"]:
        return None
    batches, _, name, value = fit["changes"][-1]
    at_end = name == "weights" and batches == fit["end"][0]
    return value[0] if at_end and value[0] != batches else None


def _write_plot(training: Training, path: str | os.PathLike[str] | None) -> str | None:
    """Write a picture of the metrics beside the card, and return its name.

    None without a path, without epochs or without matplotlib.
    """
    if path is None or not training.history.epoch or not training.world.is_main:
        return None
    try:
        plt = import_optional("matplotlib.pyplot", "notebook", "matplotlib")
    except InstallationError:
        return None
    figure = training.history.plot()[0].figure
    picture = Path(path).with_name(f"{Path(path).stem}_figures.png")
    write_atomically(picture, lambda file: figure.savefig(file, format="png", dpi=100))
    plt.close(figure)
    return picture.name


def _figures(history: History, lineage: Mapping[str, Any], picture: str | None) -> list[str]:
    """Return the metrics of the last epochs as a table."""
    if not history.epoch:
        return []
    names = [*history.history]
    values = {
        name: dict(zip(history.epochs_by_name.get(name, history.epoch), history.history[name]))
        for name in names
    }
    rows = [
        [str(epoch + 1), *(_number(values[name].get(epoch)) for name in names)]
        for epoch in history.epoch[-MAX_EPOCHS:]
    ]
    lines = ["\n## Figures\n", *_table(["epoch", *names], rows)]
    if len(history.epoch) > MAX_EPOCHS:
        lines.append(f"\nThe last {MAX_EPOCHS} of {len(history.epoch)} epochs.")
    batch = _restored(lineage)
    if batch is not None:
        lines.append(
            f"\nA callback restored the weights after batch {batch}, so the last row is not about"
            " this model."
        )
    return lines if picture is None else [*lines, f"\n![The metrics over the epochs]({picture})"]


def _data(lineage: Mapping[str, Any]) -> list[str]:
    """Return the arrays of the training data, with their hashes."""
    rows = [
        [name.removeprefix("y_true/"), array["type"], str(array["shape"]), array["sha256"][:DIGITS]]
        for content in lineage["data"].values()
        for name, array in content.items()
    ]
    head = ["array", "type", "shape", "SHA-256"]
    return ["\n## Training data\n", *_table(head, rows)] if rows else []


def _fits(lineage: Mapping[str, Any]) -> list[str]:
    """Return each call of `fit` as a row of a table."""
    rows = []
    for fit in lineage["fits"]:
        source, begin, end = fit["source"], fit["begin"], fit["end"]
        numbers = [end[2] - begin[2], source["rows"], source["batch_size"], end[0] - begin[0]]
        rows.append([*map(str, numbers), str(end[1] - begin[1])])
    head = ["epochs", "rows", "batch size", "batches", "updates"]
    return ["\n## Training\n", *_table(head, rows)] if rows else []


def _origin(lineage: Mapping[str, Any]) -> list[str]:
    """Return what made the weights, and how to check it."""
    if not lineage["fits"] and not lineage["not_reproducible"]:
        return []
    lines = ["\n## Origin\n", f"- parent: SHA-256 `{lineage['parent']}` of its nodes and weights"]
    lines.append(f"- seed: {lineage['settings']['seed']}")
    for one in lineage["environments"]:
        lines.append("- " + ", ".join(f"{name} {value}" for name, value in one.items()))
    for reason in lineage["not_reproducible"]:
        lines.append(f"- {reason}")
    if not lineage["not_reproducible"]:
        command = "onnxfit verify MODEL.onnx --parent PARENT.onnx --data DATA"
        lines.append(f"\nTo train it again and compare every bit:\n\n    {command}")
    return lines


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    cells = ([clean(cell).replace("|", "\\|") for cell in row] for row in (head, *rows))
    first, *others = (f"| {' | '.join(row)} |" for row in cells)
    return [first, "|" + "---|" * len(head), *others]


def _number(value: Any) -> str:
    return "" if value is None else number_text(value)
