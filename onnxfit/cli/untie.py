"""`onnxfit untie`: a copy of a shared weight for each layer that reads it."""

from __future__ import annotations

from pathlib import Path

import click

from onnxfit.cli import options
from onnxfit.cli.models import write_edited
from onnxfit.tools import editing

__all__ = ["untie"]


@click.command(short_help="Give each layer its own copy of a weight that the exporter merged.")
@click.argument("model", type=options.EXISTING_FILE)
@click.argument("output", type=options.NEW_FILE)
@click.option(
    "--names",
    multiple=True,
    metavar="PATTERN",
    help=(
        "A shared tensor's name or pattern; may be repeated, and '!PATTERN' excludes. By default"
        " all shared tensors, except those that look shared on purpose, such as an embedding"
        " table."
    ),
)
def untie(model: str, output: Path, names: tuple[str, ...]) -> None:
    """Write MODEL to OUTPUT with a copy of each shared weight for each layer that reads it.

    Exporters write equal tensors only once, such as the zero biases of an untrained network.

    \b
    onnxfit untie model.onnx own.onnx
    onnxfit untie model.onnx own.onnx --names 'decoder.*'
    """
    write_edited(model, output, editing.untie(model, list(names) or None))
