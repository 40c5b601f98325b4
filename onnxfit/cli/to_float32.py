"""`onnxfit to-float32`: a model in half precision as one that can be trained."""

from __future__ import annotations

from pathlib import Path

import click

from onnxfit.cli import options
from onnxfit.cli.models import write_edited
from onnxfit.tools import editing

__all__ = ["to_float32"]


@click.command(short_help="Convert a model in float16 or bfloat16, so that it can be trained.")
@click.argument("model", type=options.EXISTING_FILE)
@click.argument("output", type=options.NEW_FILE)
def to_float32(model: str, output: Path) -> None:
    """Write MODEL to OUTPUT with float32 in the place of float16 and bfloat16.

    \b
    onnxfit to-float32 deployed.onnx model.onnx
    """
    write_edited(model, output, editing.to_float32(model))
