"""`onnxfit add-dropout`: a Dropout in front of layers whose own Dropout an exporter left out."""

from __future__ import annotations

from pathlib import Path

import click

from onnxfit.cli import options
from onnxfit.cli.models import write_edited
from onnxfit.tools import editing

__all__ = ["add_dropout"]


@click.command(name="add-dropout", short_help="Add Dropout, which the exporter left out.")
@click.argument("model", type=options.EXISTING_FILE)
@click.argument("output", type=options.NEW_FILE)
@click.argument("rate", type=float)
@click.option(
    "--after",
    multiple=True,
    metavar="PATTERN",
    help="Names or patterns of nodes, values or operator types; repeatable. By default, in front of"
    " each layer with a weight except the first.",
)
def add_dropout(model: str, output: Path, rate: float, after: tuple[str, ...]) -> None:
    """Write MODEL to OUTPUT with a Dropout after nodes, of RATE above 0 and below 1.

    \b
    onnxfit add-dropout model.onnx dropped.onnx 0.2
    onnxfit add-dropout model.onnx dropped.onnx 0.2 --after Relu
    """
    edited = editing.add_dropout(model, rate, list(after) if after else "*")
    write_edited(model, output, edited)
