"""`onnxfit inspect`: whether a model can be trained."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from onnxfit.cli import options, settings
from onnxfit.gradients import SOURCES
from onnxfit.training.inspection import inspect as inspect_file

__all__ = ["inspect"]


@click.command(short_help="Report whether a model can be trained, and what blocks it.")
@click.argument("model", type=options.EXISTING_FILE)
@click.option(
    "-w",
    "--weights",
    multiple=True,
    metavar="PATTERN",
    help="The name or pattern of weights to train; may be repeated, and '!PATTERN' excludes. By"
    " default all.",
)
@click.option(
    "--gradient",
    type=click.Choice(SOURCES),
    default="auto",
    show_default=True,
    help="The source of the gradients.",
)
@options.fixed_input
@options.batch_axis
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def inspect(
    model: str,
    weights: tuple[str, ...],
    gradient: str,
    fixed_inputs: tuple[str, ...],
    batch_axes: tuple[str, ...],
    as_json: bool,
) -> None:
    """List every operator of MODEL, how it is differentiated, and what blocks the gradient.

    Exit code 1 if the model cannot be trained.

    \b
    onnxfit inspect model.onnx
    onnxfit inspect model.onnx -w 'head.*' --json
    """
    report = inspect_file(
        model,
        list(weights) or None,
        gradient=gradient,
        fixed_inputs=settings.parse_fixed_inputs(fixed_inputs),
        batch_axes=settings.parse_batch_axes(batch_axes),
    )
    if as_json:
        click.echo(json.dumps({**asdict(report), "trains": report.trains}, indent=2))
    else:
        click.echo(str(report))
    if not report.trains:
        raise SystemExit(1)
