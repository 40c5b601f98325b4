"""The command line: `onnxfit --help`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from onnxfit import __version__, drawing, inspection
from onnxfit.errors import OnnxfitError
from onnxfit.gradients import SOURCES, coverage


class _Group(click.Group):
    """An error of onnxfit is one message and exit code 1, not a traceback."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except OnnxfitError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="onnxfit")
def main() -> None:
    """Train ONNX models: see what of a model trains, which operators have a gradient, and what a model or a training step looks like.

    Results go to standard output; a failure is one message on standard error and a non-zero exit code.
    """


@main.command()
@click.argument("model", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "-w", "--weights", multiple=True, metavar="PATTERN", help="A weight's name or pattern; may be repeated, !PATTERN excludes."
)
@click.option("--gradient", type=click.Choice(SOURCES), default="auto", show_default=True, help="Where gradients come from.")
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


@main.command()
@click.argument("model", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write: .svg, .png or .txt; else standard output.",
)
@click.option(
    "--format", "form", type=click.Choice(drawing.FORMATS), help="Whatever the suffix of the file; text if there is no file."
)
@click.option(
    "--depth", type=click.IntRange(min=1), metavar="N", help="One box per scope of N steps; 1 leaves the parts of a training step."
)
def draw(model: str, output: Path | None, form: str | None, depth: int | None) -> None:
    """Draw the graph of MODEL, or list it as text: a line per node.

    Pictures need pip install "onnxfit[draw]"; text does not.

    \b
    onnxfit draw model.onnx
    onnxfit draw train.onnx -o step.svg --depth 2
    """
    drawn = drawing.draw(model, output, format=form, depth=depth)
    if output is None:
        click.echo(drawn, nl=isinstance(drawn, str))


@main.command()
@click.argument("operators", nargs=-1)
@click.option("--markdown", is_flag=True, help="Print the page docs/operators.md.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def ops(operators: tuple[str, ...], markdown: bool, as_json: bool) -> None:
    """List the operators of ONNX and how the gradient passes each; all, or those named in OPERATORS.

    \b
    onnxfit ops
    onnxfit ops Conv LSTM
    """
    if markdown and (operators or as_json):
        raise click.UsageError("--markdown prints the whole page: it goes with neither OPERATORS nor --json.")
    if markdown:
        click.echo(coverage.as_markdown(), nl=False)
        return
    chosen = coverage.operators(operators)
    click.echo(json.dumps([asdict(o) for o in chosen], indent=2) if as_json else coverage.as_text(chosen))
