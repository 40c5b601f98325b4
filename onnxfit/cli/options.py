"""Options that several commands have, and the printing of results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np

from onnxfit.files import json_float

EXISTING_FILE = click.Path(exists=True, dir_okay=False)
DATA_FILE = click.Path(exists=True, dir_okay=False, allow_dash=True)
NEW_FILE = click.Path(dir_okay=False, path_type=Path)

data = click.option(
    "-d",
    "--data",
    multiple=True,
    required=True,
    type=DATA_FILE,
    help=(
        "The data: a .npz whose arrays have the names of the model's inputs and outputs, or X and"
        " y, and optionally sample_weight; a .csv whose first line has the names, or a .jsonl with"
        " an object on each line; or, by repeating this option, a .npy for each array, X.npy before"
        " y.npy. A .npy may be larger than memory. - reads one of these files from standard input."
    ),
)
label = click.option(
    "--label",
    multiple=True,
    metavar="COLUMN",
    help=(
        "The column of a .csv or .jsonl with the labels; may be repeated. By default the column"
        " with the name of the model's output, or y or label."
    ),
)
loss = click.option(
    "-l",
    "--loss",
    multiple=True,
    metavar="[OUTPUT=]NAME",
    help=(
        "The loss: cross_entropy, mean_squared_error, huber:delta=0.5, ... (an unknown name lists"
        " all); for a model with several outputs, OUTPUT=NAME once for each. By default the"
        " model's own scalar output `loss`."
    ),
)
metrics = click.option(
    "-m",
    "--metrics",
    multiple=True,
    metavar="[OUTPUT=]NAME",
    help=(
        "A metric to report: accuracy, top_k_accuracy:k=3, r2, ... (an unknown name lists all); may"
        " be repeated."
    ),
)
batch_size = click.option(
    "-b",
    "--batch-size",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    metavar="ROWS",
    help="The number of rows in a batch, 1 or more.",
)
device = click.option(
    "--device",
    default="cpu",
    show_default=True,
    metavar="NAME",
    help="The device that computes: cpu, cuda, cuda:N, webgpu, openvino, ..., if the installed"
    " onnxruntime supports it.",
)
fixed_input = click.option(
    "--fixed-input",
    "fixed_inputs",
    multiple=True,
    metavar="NAME=VALUE",
    help=(
        "Give the input NAME of the model the same VALUE in all batches: a number that fills its"
        " shape, a [list] or a .npy file. The data then needs no such input. May be repeated."
    ),
)
batch_axis = click.option(
    "--batch-axis",
    "batch_axes",
    multiple=True,
    metavar="NAME=AXIS",
    help=(
        "The axis of the batch of the input or output NAME, such as y=1, or none if it has no"
        " batch; for models that do not name it. May be repeated."
    ),
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


def print_figures(figures: Mapping[str, Any], as_json: bool) -> None:
    """Print loss and metrics, one per line, or as one JSON object."""
    if as_json:
        click.echo(json.dumps(plain(figures), indent=2))
        return
    width = max(map(len, figures), default=0)
    for name, value in figures.items():
        if isinstance(value, str):
            click.echo(f"{name:<{width}}  {value}")
            continue
        array = np.asarray(value)
        if array.ndim:
            rows = ["  " + "  ".join(map(str, row)) for row in np.atleast_2d(array)]
            text = "\n" + "\n".join(rows)
        else:
            text = f"{value:.6g}"
        click.echo(f"{name:<{width}}  {text}")


def plain(value: Any) -> Any:
    """Return nested figures as JSON values.

    Floats that are not finite become the strings NaN, Infinity and -Infinity.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    return json_float(value) if isinstance(value, float) else value
