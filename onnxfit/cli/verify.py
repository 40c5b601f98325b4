"""`onnxfit verify`: train a file again, and compare."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from onnxfit.cli import arrays, labels, options
from onnxfit.cli.models import is_checkpoint
from onnxfit.errors import SettingError
from onnxfit.graph.class_names import read_class_names
from onnxfit.load.reading import load_model
from onnxfit.trainer import Trainer
from onnxfit.training.training import training_of
from onnxfit.verification.verify import verified

__all__ = ["verify"]


@click.command(short_help="Train a file again from its parent and data, and compare.")
@click.argument("child", type=options.EXISTING_FILE)
@click.option(
    "-p",
    "--parent",
    required=True,
    type=options.EXISTING_FILE,
    help="The .onnx file that was trained.",
)
@options.data
@options.label
@click.option(
    "--teacher",
    type=options.EXISTING_FILE,
    help="The model of --teacher, if CHILD was trained with one.",
)
@click.option(
    "--seed",
    type=int,
    metavar="N",
    help="The seed that CHILD should have been trained with; by default the one that it names.",
)
@click.option(
    "--device",
    metavar="NAME",
    help="The device that trains; by default the one that CHILD names.",
)
@click.option("-q", "--quiet", is_flag=True, help="Show no progress on standard error.")
@options.as_json
@click.pass_context
def verify(
    ctx: click.Context,
    /,
    child: str,
    parent: str,
    data: tuple[str, ...],
    label: tuple[str, ...],
    quiet: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Train PARENT again on the data, as the metadata of CHILD says, and compare the weights.

    CHILD is a .onnx file that `onnxfit fit` or `Trainer.export` wrote. It runs no code, and nothing
    is written. The exit code is 0 if the weights have the same bits, 3 if they are equal within
    rounding (on another processor or with another onnxruntime), 4 if they are not the same, and 5
    if the training cannot be repeated.

    \b
    onnxfit verify trained.onnx --parent model.onnx --data digits.npz
    """
    for path in (child, parent):
        if is_checkpoint(path):
            raise SettingError(
                f"verify compares .onnx files, but {path!r} is a checkpoint. Write its model with"
                " `onnxfit export CHECKPOINT -o FILE`."
            )
    proto = load_model(child)

    def read(trainer: Trainer) -> list[arrays.Data]:
        request = arrays.DataRequest(trainer.inputs, list(trainer.objectives), label)
        targets = training_of(trainer).recipe.targets
        return [labels.encode(arrays.read(data, request), targets, read_class_names(proto))]

    passed = {name: value for name, value in settings.items() if value is not None}
    found = verified(proto, child, parent, read, passed, 0 if quiet else "auto")
    if as_json:
        report = {name: value for name, value in asdict(found).items() if name != "lineage"}
        options.print_figures(report, as_json)
    else:
        click.echo(str(found))
    ctx.exit(found.exit_code)
