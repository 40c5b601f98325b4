"""`onnxfit replace-head`: replace the last layer for another number of classes."""

from __future__ import annotations

from pathlib import Path

import click

from onnxfit.cli import options
from onnxfit.cli.models import write_edited
from onnxfit.tools import editing

__all__ = ["replace_head"]


@click.command(name="replace-head", short_help="Replace the last layer of a model.")
@click.argument("model", type=options.EXISTING_FILE)
@click.argument("output", type=options.NEW_FILE)
@click.option(
    "--classes",
    type=click.IntRange(min=1),
    required=True,
    metavar="N",
    help="The number of outputs of the new layer.",
)
@click.option(
    "--of",
    "of_output",
    metavar="NAME",
    help="The model's output that the layer computes. By default the only output.",
)
@click.option(
    "--keep",
    metavar="all|INDICES",
    callback=lambda context, option, text: _kept(text),
    help="The old classes that the first new classes are: all, or indices such as 0,3,17.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="The seed of the random weights of the new layer.",
)
def replace_head(
    model: str,
    output: Path,
    classes: int,
    of_output: str | None,
    keep: bool | list[int],
    seed: int,
) -> None:
    """Write MODEL to OUTPUT with a new last layer, whose weights are random.

    \b
    onnxfit replace-head model.onnx flowers.onnx --classes 7
    onnxfit replace-head model.onnx one-more.onnx --classes 1001 --keep all
    """
    edited = editing.replace_head(model, classes, output=of_output, keep=keep, seed=seed)
    write_edited(model, output, edited)


def _kept(text: str | None) -> bool | list[int]:
    if text is None or text == "all":
        return text == "all"
    try:
        return [int(index) for index in text.split(",")]
    except ValueError:
        raise click.BadParameter(
            f"expected all, or indices such as 0,3,17, got {text!r}."
        ) from None
