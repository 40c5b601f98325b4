"""`onnxfit export`: the model of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import click

from onnxfit.cli import options
from onnxfit.cli.models import WITHOUT_CODE
from onnxfit.trainer import Trainer
from onnxfit.training import checkpoint

__all__ = ["export"]


@click.command(short_help="Write the model of a checkpoint as .onnx.")
@click.argument("path", type=options.EXISTING_FILE, metavar="CHECKPOINT")
@click.option(
    "-o",
    "--output",
    required=True,
    type=options.NEW_FILE,
    help="The .onnx file to write.",
)
@click.option(
    "--averaged",
    is_flag=True,
    help=(
        "Use the averaged weights of an optimizer with ema_momentum, such as"
        " adam:ema_momentum=0.99."
    ),
)
def export(path: str, output: Path, averaged: bool) -> None:
    """Write the model in CHECKPOINT, with the trained weights, as a .onnx for inference.

    \b
    onnxfit export checkpoints/last.onnxfit -o trained.onnx
    """
    if averaged:
        Trainer.load(path).export(output, averaged=True)
    else:
        checkpoint.load(path, WITHOUT_CODE).trained_snapshot().write(output)
    click.echo(f"{path} -> {output}")
