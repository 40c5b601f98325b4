"""A training in a folder that needs no Python, and back."""

from __future__ import annotations

import json
import mmap
import os
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import onnx

from onnxfit.data.order import checked_batch_size
from onnxfit.environment import versions
from onnxfit.errors import SettingError, UnknownNameError, UnsupportedError, listed_names
from onnxfit.files import require_path
from onnxfit.folders import FileContents, write_folder
from onnxfit.graph import names
from onnxfit.graph.tensors import write_safetensors
from onnxfit.load.constant_nodes import lower_constants, spread_names
from onnxfit.load.model_file import write_message
from onnxfit.load.training_form import to_inference_form
from onnxfit.step.batch_specs import fixed_rows
from onnxfit.step.rewrites.replacement import nodes_of_type
from onnxfit.training.position import PendingFit
from onnxfit.training.setting_values import encode_setting
from onnxfit.training.training import Training
from onnxfit.training_folder import description
from onnxfit.training_folder.json_numbers import with_finite_floats
from onnxfit.training_folder.manifest import (
    EVALUATE,
    EXPORT,
    FORMAT,
    GRAPHS,
    MANIFEST,
    MODEL,
    SCALARS,
    STATE,
    TRAIN,
    VERSION,
    earlier_graphs,
    graph_file,
)
from onnxfit.training_folder.message import bytes_to_run, refer_to_constants
from onnxfit.training_folder.step_graphs import TARGETS, step_graphs
from onnxfit.training_folder.tensors import (
    StateEntry,
    read_state,
    state_arrays,
    state_entries,
)


def export_training(
    training: Training,
    folder: str | os.PathLike[str],
    *,
    batch_size: int | None = None,
    target: str = "onnxruntime",
    include: Sequence[str] = GRAPHS,
    sample_weight: bool = False,
) -> Path:
    """Write a folder with which programs in other languages train; see
    `Trainer.export_training`.
    """
    require_path(folder)
    graphs_to_write = _checked_graphs(include)
    if target not in TARGETS:
        raise UnknownNameError("target", target, TARGETS)
    rows = None if batch_size is None else checked_batch_size(batch_size)
    _require_exportable(training, target)
    if target == "npu" and rows is None:
        rows = fixed_rows(training.recipe)
    if training.state.first_step:
        raise UnsupportedError(
            f"export_training cannot tell a host that the optimizer's slots began after update"
            f" {training.state.first_step}, when another optimizer was loaded. Export the model,"
            " and create a new Trainer from it."
        )
    training.require_equal_ranks("export_training")
    if not training.world.is_main:
        return Path(folder)
    fused = training.backend.fused
    graphs = step_graphs(training.recipe, target, graphs_to_write, rows, sample_weight, fused)
    batch = {"rows": rows, "sample_weight": sample_weight}
    with training.backend.lock:
        files = _files(training, graphs, {"target": target, "batch": batch})
        return write_folder(folder, files, stale=earlier_graphs(folder))


def _files(
    training: Training, graphs: Mapping[str, onnx.ModelProto], entry: Mapping[str, Any]
) -> dict[str, FileContents]:
    """Return functions that write the files from the memory of the training.

    - `entry`: entries of the manifest.
    """
    state = training.state.get(copy=False)
    entries = state_entries(training.recipe, state)
    exported = training.trainable.frozen_base(state["weights"])
    model = exported.proto
    to_inference_form(model, training.recipe.batch_norm)
    initializers = {tensor.name for tensor in model.graph.initializer}
    computed = description.computed_tensors(graphs.get(EXPORT), initializers)
    own = initializers.intersection(training.recipe.state) - computed.keys()
    trained = {entry.name: entry for entry in entries if entry.name in own}
    source = description.source_hash(model, list(trained))
    # A host overwrites the bytes of one tensor for each weight.
    lower_constants(model, (own | computed.keys()).intersection(spread_names(model)))

    def write_deployable(folder: Path, file: BinaryIO) -> None:
        write_message(file, exported.proto)

    def write_graph(name: str, folder: Path, file: BinaryIO) -> None:
        with _mapped(folder / MODEL) as data:
            refer_to_constants(graphs[name], MODEL, data, training.recipe.state)
        file.write(bytes_to_run(graphs[name]))

    def write_state(folder: Path, file: BinaryIO) -> None:
        write_safetensors(file, state_arrays(entries, state))

    def write_manifest(folder: Path, file: BinaryIO) -> None:
        with _mapped(folder / MODEL) as data:
            places = description.described_model(MODEL, data, trained, computed)
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "producer": f"onnxfit {versions().get('onnxfit', '')}".rstrip(),
            "target": entry["target"],
            "files": {name: _described_file(folder / name) for name in files if name != MANIFEST},
            "source": {"sha256": source},
            **_description(training, graphs, entries),
            "model": places,
            "batch": entry["batch"],
        }
        file.write(json.dumps(manifest, indent=1, allow_nan=False).encode())

    files: dict[str, FileContents] = {MODEL: write_deployable}
    files |= {graph_file(name): partial(write_graph, name) for name in graphs}
    files |= {STATE: write_state, MANIFEST: write_manifest}
    return files


def _mapped(path: Path) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _described_file(path: Path) -> dict[str, Any]:
    """Return the SHA-256 and the size of a file."""
    checksum = description.Checksum()
    with open(path, "rb") as file:
        shutil.copyfileobj(file, checksum)
    return {"sha256": checksum.digest.hexdigest(), "bytes": path.stat().st_size}


def import_state(training: Training, path: str | os.PathLike[str]) -> None:
    """Load the state that another program wrote; see `Trainer.import_state`."""
    if training.is_fitting:
        raise SettingError("import_state cannot be called during fit. Call it before or after.")
    state = read_state(path, state_entries(training.recipe, training.state.get(copy=False)))
    training.set_state(state)
    training.fit_state = None
    training.pending_fit = PendingFit()


def _description(
    training: Training, graphs: Mapping[str, onnx.ModelProto], entries: Sequence[StateEntry]
) -> dict[str, Any]:
    """Return the parts of the manifest that describe the training."""
    recipe = training.recipe
    step = [graphs[name] for name in (TRAIN, SCALARS, EVALUATE) if name in graphs]
    outputs = {value.name for graph in step for value in graph.graph.output}
    inputs = {value.name for graph in step for value in graph.graph.input}
    schedule = None
    if training.state.fixed_rate is None:
        schedule = description.described_object(recipe.optimizer.learning_rate)
    settings = {name: encode_setting(value) for name, value in training.settings.items()}
    return {
        "graphs": {
            name: description.described_graph(recipe, name, graph_file(name), graph)
            for name, graph in graphs.items()
        },
        "state": description.described_state(entries, outputs),
        "losses": description.described_losses(recipe, outputs),
        "penalty": names.PENALTY if names.PENALTY in outputs else None,
        "metrics": description.described_metrics(recipe),
        "optimizer": description.described_object(recipe.optimizer),
        "learning_rate": {
            "value": training.state.learning_rate,
            "schedule": schedule,
            "max": recipe.max_learning_rate,
        },
        "random": {"seed": training.random_seed, "draws": names.SEED in inputs},
        "order": {"function": "lowbias32", "seed": training.seed},
        "settings": with_finite_floats(settings),
    }


def _require_exportable(training: Training, target: str) -> None:
    """Raise SettingError for a training that the graphs of a folder cannot compute."""
    problem = None
    frozen = training.state.frozen.weights
    without = [
        spec.name for spec in training.recipe.data_inputs if spec.shape and not spec.has_rows
    ]
    if not training.recipe.loss_outputs:
        problem = "has no loss. Pass a loss: Trainer(..., loss='mean_squared_error')"
    elif training.backend.accumulator.enabled:
        problem = (
            "accumulates gradients. Create the trainer with accumulate=1, and use larger batches"
        )
    elif frozen:
        problem = f"has frozen tensors ({listed_names(frozen)}). Leave them out of weights="
    elif training.trainable.why_python_only is not None:
        problem = f"{training.trainable.why_python_only}. Train plain adapters or float weights"
    elif target == "webgpu" and nodes_of_type(training.recipe.model.graph, "QuantizeLinear"):
        problem = "rounds to integers, for which WebGPU has no kernels. Use target='web'"
    elif training.recipe.precision.half is not None:
        problem = (
            f"has precision={training.recipe.precision.name!r}, for which other programs have no"
            " kernels. Train with precision='float32'"
        )
    elif training.recipe.state_outputs:
        problem = "carries states between batches, which hosts do not. Remove state_outputs="
    elif without:
        problem = (
            f"has inputs without a batch axis ({listed_names(without)}), which hosts would"
            " divide into rows. Give them a value with fixed_inputs="
        )
    elif training.recipe.large:
        problem = "has more than 2 GB of tensors, the limit of one ONNX file"
    if problem is not None:
        raise SettingError(f"export_training cannot export this trainer: it {problem}.")


def _checked_graphs(include: Sequence[str]) -> tuple[str, ...]:
    """Return the names of graphs, in their order.

    UnknownNameError: no graph has one of the names. SettingError: `include` is empty.
    """
    wanted = [include] if isinstance(include, str) else list(include)
    for name in wanted:
        if name not in GRAPHS:
            raise UnknownNameError("graph", name, GRAPHS)
    if not wanted:
        raise SettingError(
            f"include must name at least one of {', '.join(GRAPHS)}, got an empty list."
        )
    return tuple(name for name in GRAPHS if name in wanted)
