"""`onnxfit add-biases`: a bias for each layer whose zero bias the exporter dropped."""

from __future__ import annotations

from pathlib import Path

import click

from onnxfit.cli import options
from onnxfit.cli.models import write_edited
from onnxfit.tools import editing

__all__ = ["add_biases"]


@click.command(name="add-biases", short_help="Restore the zero biases that the exporter dropped.")
@click.argument("model", type=options.EXISTING_FILE)
@click.argument("output", type=options.NEW_FILE)
def add_biases(model: str, output: Path) -> None:
    """Write MODEL to OUTPUT with a bias of zeros for each layer whose bias the exporter dropped.

    \b
    onnxfit add-biases model.onnx biased.onnx
    """
    write_edited(model, output, editing.add_biases(model))
