"""`onnxfit inspect`: what of a model trains."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from onnxfit.gradients import SOURCES, inspection

__all__ = ["inspect"]


@click.command(short_help="Say what of a model trains, and what is in the way.")
@click.argument("model", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "-w",
    "--weights",
    multiple=True,
    metavar="PATTERN",
    help="A weight's name or pattern; may be repeated, !PATTERN excludes.",
)
@click.option(
    "--gradient",
    type=click.Choice(SOURCES),
    default="auto",
    show_default=True,
    help="Where gradients come from.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def inspect(model: str, weights: tuple[str, ...], gradient: str, as_json: bool) -> None:
    """List every operator of MODEL, whether the gradient passes, and what blocks it.

    Exit code 1 if the model cannot be trained.

    \b
    onnxfit inspect model.onnx
    onnxfit inspect model.onnx -w 'head.*' --json
    """
    found = inspection.inspect(model, list(weights) or None, gradient=gradient)
    if as_json:
        click.echo(json.dumps({**asdict(found), "trains": found.trains}, indent=2))
    else:
        click.echo(str(found))
    if not found.trains:
        raise SystemExit(1)
