"""`onnxfit bom`: a bill of materials of a trained file."""

from __future__ import annotations

import json
from pathlib import Path

import click

from onnxfit.cli import options
from onnxfit.verification import model_bom

__all__ = ["bom"]


@click.command(short_help="Write a bill of materials of a trained file (CycloneDX).")
@click.argument("model", type=options.EXISTING_FILE)
@click.option(
    "-o",
    "--output",
    type=options.NEW_FILE,
    help="The .json file to write. By default standard output.",
)
def bom(model: str, output: Path | None) -> None:
    """Write what MODEL, a .onnx file, was made of, as JSON in the format CycloneDX 1.6.

    The bill has the hashes of the file, its parent and its training data, its license, and the
    versions of the packages that trained it, as far as the metadata of MODEL says them.

    \b
    onnxfit bom trained.onnx --output trained.cdx.json
    """
    bill = model_bom(model, output)
    click.echo(json.dumps(bill, indent=2) if output is None else f"{model} -> {output}")
