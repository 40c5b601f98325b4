"""`onnxfit ops`: the operators of ONNX and their gradients."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from onnxfit.gradients import coverage

__all__ = ["ops"]


@click.command(short_help="List the operators of ONNX and their gradients.")
@click.argument("operators", nargs=-1)
@click.option("--markdown", is_flag=True, help="Print the page docs/operators.md.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def ops(operators: tuple[str, ...], markdown: bool, as_json: bool) -> None:
    """List how the operators of ONNX are differentiated: all operators, or only OPERATORS.

    \b
    onnxfit ops
    onnxfit ops Conv LSTM
    """
    if markdown and (operators or as_json):
        raise click.UsageError(
            "--markdown prints the whole page and cannot be combined with OPERATORS or --json."
        )
    if markdown:
        click.echo(coverage.as_markdown(), nl=False)
        return
    chosen = coverage.operators(operators)
    if as_json:
        click.echo(json.dumps([asdict(operator) for operator in chosen], indent=2))
    else:
        click.echo(coverage.as_text(chosen))
