"""`onnxfit draw`: a graph as a picture or as text."""

from __future__ import annotations

from pathlib import Path

import click

from onnxfit import drawing
from onnxfit.cli import options

__all__ = ["draw"]


@click.command(short_help="Draw a graph, or list it as text.")
@click.argument("model", type=options.EXISTING_FILE)
@click.option(
    "-o",
    "--output",
    type=options.NEW_FILE,
    help="The file to write: .svg, .png or .txt. By default standard output.",
)
@click.option(
    "--format",
    "file_format",
    type=click.Choice(drawing.FORMATS),
    help="The format. By default the file's suffix determines it, or text without a file.",
)
@click.option(
    "--depth",
    type=click.IntRange(min=1),
    metavar="N",
    help="Draw one box for each scope at depth N; 1 shows the stages of a training step.",
)
def draw(model: str, output: Path | None, file_format: str | None, depth: int | None) -> None:
    """Draw the graph of MODEL, or list it as text with a line per node.

    Pictures need pip install "onnxfit[draw]"; text does not.

    \b
    onnxfit draw model.onnx
    onnxfit draw train.onnx -o step.svg --depth 2
    """
    drawn = drawing.draw(model, output, format=file_format, depth=depth)
    if output is None:
        click.echo(drawn, nl=isinstance(drawn, str))
