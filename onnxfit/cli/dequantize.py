"""`onnxfit dequantize`: convert a quantized model to floats."""

from __future__ import annotations

from pathlib import Path

import click

from onnxfit.cli import options
from onnxfit.cli.models import write_edited
from onnxfit.tools.quantization.dequantize import dequantize as dequantized

__all__ = ["dequantize"]


@click.command(short_help="Convert a quantized model's integers to floats.")
@click.argument("model", type=options.EXISTING_FILE)
@click.option(
    "-o",
    "--output",
    required=True,
    type=options.NEW_FILE,
    help="The .onnx file to write.",
)
def dequantize(model: str, output: Path) -> None:
    """Write the quantized MODEL as a float model.

    The weights of the float model have the values that the integers represent.

    \b
    onnxfit dequantize model.int8.onnx -o model.onnx
    """
    write_edited(model, output, dequantized(model))
