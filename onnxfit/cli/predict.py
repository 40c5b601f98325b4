"""`onnxfit predict`: a model's outputs for data."""

from __future__ import annotations

from pathlib import Path

import click

from onnxfit.cli import arrays, models, options, settings
from onnxfit.cli.config import config_option

__all__ = ["predict"]


@click.command(short_help="Write a model's outputs for data.")
@click.argument("model", type=options.EXISTING_FILE)
@options.data
@options.label
@options.fixed_input
@options.batch_axis
@click.option(
    "-o",
    "--output",
    type=options.NEW_FILE,
    help=(
        "The file to write: .npy for one output, .npz for any number, .csv for tables. By default"
        " CSV on standard output."
    ),
)
@options.batch_size
@options.device
@config_option
@options.as_json
def predict(
    model: str,
    data: tuple[str, ...],
    label: tuple[str, ...],
    fixed_inputs: tuple[str, ...],
    batch_axes: tuple[str, ...],
    output: Path | None,
    batch_size: int,
    device: str,
    as_json: bool,
) -> None:
    """Compute the outputs of MODEL, a .onnx or a checkpoint, for every row of the data, in order.

    Labels are ignored. MODEL need not be trainable. With --output, the command prints a line for
    each output that it wrote.

    \b
    onnxfit predict trained.onnx --data new.csv --output predictions.npy
    """
    stored = models.settings_of(model)
    fixed = {
        **(stored.get("fixed_inputs") or {}),
        **(settings.parse_fixed_inputs(fixed_inputs) or {}),
    }
    stored_axes = {
        n: axis for n, axis in (stored.get("batch_axes") or {}).items() if n not in fixed
    }
    axes = settings.parse_batch_axes(batch_axes) or stored_axes
    proto = models.model_for_data(model, fixed)
    names = [value.name for value in proto.graph.output]
    if output is not None:
        arrays.check_output(output, names)
    x, _, _ = arrays.read(
        data, arrays.DataRequest(arrays.inputs_of(proto), names, label, predicting=True)
    )
    outputs = models.predict(proto, x, batch_size, device, axes)
    if output is not None:
        arrays.write(output, outputs)
        shapes = {name: f"{array.dtype}{list(array.shape)}" for name, array in outputs.items()}
        if as_json:
            options.print_figures({"file": str(output), "outputs": shapes}, as_json)
        else:
            click.echo("\n".join(f"{name}: {shape} -> {output}" for name, shape in shapes.items()))
    elif as_json:
        options.print_figures(outputs, as_json)
    else:
        click.echo(arrays.as_csv(outputs), nl=False)
