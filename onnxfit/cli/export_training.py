"""`onnxfit export-training`: the training of a checkpoint, for hosts without Python."""

from __future__ import annotations

import click

from onnxfit.cli import options
from onnxfit.trainer import Trainer
from onnxfit.training_folder.manifest import GRAPHS
from onnxfit.training_folder.step_graphs import TARGETS

__all__ = ["export_training"]


@click.command(short_help="Write the training of a checkpoint to a folder that needs no Python.")
@click.argument("path", type=options.EXISTING_FILE, metavar="CHECKPOINT")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(file_okay=False),
    help="The folder to write.",
)
@click.option(
    "--target",
    default=TARGETS[0],
    show_default=True,
    type=click.Choice(TARGETS),
    help="The program that will run the training.",
)
@click.option(
    "-b",
    "--batch-size",
    type=click.IntRange(min=1),
    metavar="ROWS",
    help="The number of rows in each batch of the training step. By default any number.",
)
@click.option(
    "--include",
    multiple=True,
    default=GRAPHS,
    type=click.Choice(GRAPHS),
    help="A graph to write; may be repeated. By default all.",
)
@click.option(
    "--sample-weight", is_flag=True, help="Add an input for sample weights, which the losses use."
)
def export_training(
    path: str,
    output: str,
    target: str,
    batch_size: int | None,
    include: tuple[str, ...],
    sample_weight: bool,
) -> None:
    """Write the training in CHECKPOINT as ONNX graphs, its state and a manifest in JSON.

    \b
    onnxfit export-training checkpoints/last.onnxfit -o web/ --target web -b 32
    """
    Trainer.load(path).export_training(
        output,
        batch_size=batch_size,
        target=target,
        include=include,
        sample_weight=sample_weight,
    )
    click.echo(f"{path} -> {output}")
