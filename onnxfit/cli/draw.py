"""`onnxfit draw`: a graph as a picture or as text."""

from __future__ import annotations

from pathlib import Path

import click

from onnxfit import drawing


@click.command(short_help="Draw a graph, or list it as text.")
@click.argument("model", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write: .svg, .png or .txt; else standard output.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(drawing.FORMATS),
    help="Whatever the suffix of the file; text if there is no file.",
)
@click.option(
    "--depth",
    type=click.IntRange(min=1),
    metavar="N",
    help="One box per scope of N steps; 1 leaves the parts of a training step.",
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
