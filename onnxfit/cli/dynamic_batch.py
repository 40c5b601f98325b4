"""`onnxfit dynamic-batch`: allow any batch size in a model."""

from __future__ import annotations

from pathlib import Path

import click

from onnxfit.cli import options, settings
from onnxfit.errors import SettingError
from onnxfit.load.model_file import write_model
from onnxfit.tools.editing.dynamic_batch import dynamic_batch as with_dynamic_batch

__all__ = ["dynamic_batch"]


@click.command(name="dynamic-batch", short_help="Allow any batch size in a model.")
@click.argument("model", type=options.EXISTING_FILE)
@click.argument("output", type=options.NEW_FILE)
@click.option(
    "--axis",
    multiple=True,
    metavar="INPUT=AXIS",
    help=(
        "The batch axis of an input, or INPUT=none for an input without a batch; may be repeated."
        " By default axis 0, and axis 1 for the initial state of a recurrent layer."
    ),
)
@click.option("--name", default="batch", show_default=True, help="The name of the batch dimension.")
@click.option(
    "--fixed-input",
    "fixed_inputs",
    multiple=True,
    metavar="NAME=VALUE",
    help=(
        "Replace the input NAME by a constant, a number that fills its shape, a [list] or a .npy"
        " file, so that an If that depends on it becomes one branch. May be repeated."
    ),
)
def dynamic_batch(
    model: str, output: Path, axis: tuple[str, ...], name: str, fixed_inputs: tuple[str, ...]
) -> None:
    """Write MODEL, which has a fixed batch size, to OUTPUT with a dynamic batch size.

    The result is compared with MODEL, row by row. If a node prevents another batch size, the
    command names the node and exits with 1.

    \b
    onnxfit dynamic-batch model.onnx any-batch.onnx
    onnxfit dynamic-batch model.onnx any-batch.onnx --axis states=1 \\
        --axis table=none
    onnxfit dynamic-batch vad.onnx any-batch.onnx --fixed-input sr=16000
    """
    fixed = settings.parse_fixed_inputs(fixed_inputs)
    changed = with_dynamic_batch(model, axes=_axes(axis), name=name, fixed_inputs=fixed)
    write_model(output, changed)
    click.echo(f"{model} -> {output}")


def _axes(texts: tuple[str, ...]) -> dict[str, int | None]:
    """Return a dict input -> batch axis from texts INPUT=AXIS."""
    axes: dict[str, int | None] = {}
    for text in texts:
        name, equals, axis = text.rpartition("=")
        try:
            axes[name] = None if axis.lower() == "none" else int(axis)
        except ValueError:
            equals = ""
        if not equals:
            raise SettingError(
                f"--axis must be INPUT=AXIS with a whole number, or INPUT=none, got {text!r}."
            )
    return axes
