"""`onnxfit tie`: share one weight among several layers."""

from __future__ import annotations

from pathlib import Path

import click

from onnxfit.cli import options
from onnxfit.cli.models import write_edited
from onnxfit.tools import editing

__all__ = ["tie"]


@click.command(short_help="Share one weight among several layers.")
@click.argument("model", type=options.EXISTING_FILE)
@click.argument("output", type=options.NEW_FILE)
@click.argument("pairs", nargs=-1, required=True, metavar="NAME=OTHER...")
def tie(model: str, output: Path, pairs: tuple[str, ...]) -> None:
    """Write MODEL to OUTPUT with the weight NAME replaced by OTHER, or by its transpose.

    \b
    onnxfit tie model.onnx tied.onnx lm_head.weight=embedding.weight
    """
    weights = {}
    for pair in pairs:
        name, equals, other = pair.partition("=")
        if not (name and equals and other):
            raise click.BadParameter(f"Expected NAME=OTHER, got {pair!r}.")
        weights[name] = other
    write_edited(model, output, editing.tie(model, weights))
