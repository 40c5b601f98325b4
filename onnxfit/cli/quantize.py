"""`onnxfit quantize`: convert a model's floats to integers."""

from __future__ import annotations

from pathlib import Path

import click

from onnxfit.cli import arrays, options
from onnxfit.graph.model import to_ir
from onnxfit.graph.quantized import quantized_weights
from onnxfit.load.model_file import write_model
from onnxfit.load.reading import load_model
from onnxfit.runtime.quantizer import INTEGER_TYPES, METHODS
from onnxfit.tools.quantization.quantize import ACTIVATIONS
from onnxfit.tools.quantization.quantize import quantize as quantized

__all__ = ["quantize"]

NONE = "none"


@click.command(short_help="Convert a model's floats to integers.")
@click.argument("model", type=options.EXISTING_FILE)
@click.argument("data", nargs=-1, type=options.DATA_FILE)
@options.label
@click.option(
    "-o",
    "--output",
    required=True,
    type=options.NEW_FILE,
    help="The .onnx file to write.",
)
@click.option(
    "--weights",
    type=click.Choice([*INTEGER_TYPES]),
    default="int8",
    show_default=True,
    help="The integer type of the weights.",
)
@click.option(
    "--activations",
    type=click.Choice([*ACTIVATIONS, NONE]),
    default="int8",
    show_default=True,
    help="The integer type of the layers' inputs and outputs; none leaves them in float.",
)
@click.option(
    "--per-channel/--no-per-channel",
    default=True,
    show_default=True,
    help="Use a scale for each output channel of a weight, or one scale for the whole weight.",
)
@click.option(
    "--method",
    type=click.Choice([*METHODS]),
    default="minmax",
    show_default=True,
    help="How to find the range of an activation from the data.",
)
@click.option(
    "--exclude",
    multiple=True,
    metavar="PATTERN",
    help="The name or pattern of nodes or weights that stay in float; may be repeated.",
)
@options.batch_size
def quantize(
    model: str,
    data: tuple[str, ...],
    label: tuple[str, ...],
    output: Path,
    weights: str,
    activations: str,
    per_channel: bool,
    method: str,
    exclude: tuple[str, ...],
    batch_size: int,
) -> None:
    """Write MODEL with integers instead of floats, which is four to eight times smaller.

    DATA is a few hundred representative rows: a .npz, a .csv, a .jsonl, or a .npy for each input,
    as for `onnxfit predict`. The ranges of the activations are measured on DATA. With --activations
    none, DATA is not needed.

    \b
    onnxfit quantize model.onnx calibration.npz -o model.int8.onnx
    onnxfit quantize model.onnx -o model.int4.onnx --weights int4 \\
        --activations none
    """
    proto = load_model(model)
    calibration = None
    if data:
        outputs = [value.name for value in proto.graph.output]
        request = arrays.DataRequest(arrays.inputs_of(proto), outputs, label, predicting=True)
        calibration = arrays.read(data, request)[0]
    result = quantized(
        proto,
        calibration,
        weights=weights,
        activations=None if activations == NONE else activations,
        per_channel=per_channel,
        method=method,
        exclude=exclude,
        batch_size=batch_size,
    )
    before = Path(model).stat().st_size
    write_model(output, result)
    count = len(quantized_weights(to_ir(result)))
    click.echo(
        f"{model} -> {output}: {count} weight{'s' if count != 1 else ''} as {weights},"
        f" {before:,} -> {output.stat().st_size:,} bytes"
    )
