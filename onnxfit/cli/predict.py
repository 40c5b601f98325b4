"""`onnxfit predict`: a model's outputs for data."""

from __future__ import annotations

from pathlib import Path

import click

from onnxfit.cli import arrays, labels, models, options, settings
from onnxfit.cli.config import config_option
from onnxfit.errors import ModelError
from onnxfit.graph.class_names import read_class_names

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
@click.option(
    "--classes",
    is_flag=True,
    help=(
        "Write the name of the most probable class of each output that has classes, instead of its"
        " scores. MODEL must have been trained on text labels."
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
    classes: bool,
    batch_size: int,
    device: str,
    as_json: bool,
) -> None:
    """Compute the outputs of MODEL, a .onnx or a checkpoint, for every row of the data, in order.

    Labels are ignored. MODEL need not be trainable. With --output, the command prints a line for
    each output that it wrote. If `onnxfit fit` trained MODEL on text labels, the columns of a CSV
    have the names of the classes.

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
    class_names = {n: known for n, known in read_class_names(proto).items() if n in names}
    if classes and not class_names:
        raise ModelError(
            f"--classes needs a model that names its classes, but {model!r} does not. `onnxfit fit`"
            " stores the names if it trains on text labels."
        )
    if output is not None:
        arrays.check_output(output, names)
    x, _, _ = arrays.read(
        data, arrays.DataRequest(arrays.inputs_of(proto), names, label, predicting=True)
    )
    outputs = models.predict(proto, x, batch_size, device, axes)
    if classes:
        outputs |= labels.predicted_names(proto, outputs, class_names)
    if output is not None:
        arrays.write(output, outputs, class_names)
        shapes = {name: f"{array.dtype}{list(array.shape)}" for name, array in outputs.items()}
        if as_json:
            options.print_figures({"file": str(output), "outputs": shapes}, as_json)
        else:
            click.echo("\n".join(f"{name}: {shape} -> {output}" for name, shape in shapes.items()))
    elif as_json:
        options.print_figures(outputs, as_json)
    else:
        click.echo(arrays.as_csv(outputs, class_names), nl=False)
