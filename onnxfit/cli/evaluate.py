"""`onnxfit evaluate`: how good a model is."""

from __future__ import annotations

from typing import Any

import click

from onnxfit.cli import arrays, options, settings
from onnxfit.cli.config import config_option
from onnxfit.cli.models import is_checkpoint
from onnxfit.trainer import Trainer


@click.command(short_help="Print loss and metrics over data.")
@click.argument("model", type=options.MODEL)
@options.data
@options.label
@options.loss
@options.metrics
@options.batch_size
@options.device
@config_option
@options.as_json
def evaluate(
    model: str,
    data: tuple[str, ...],
    label: tuple[str, ...],
    loss: tuple[str, ...],
    metrics: tuple[str, ...],
    batch_size: int,
    device: str,
    as_json: bool,
) -> None:
    """Print loss and metrics of MODEL, a .onnx or a checkpoint, over all of the data.

    A checkpoint knows its loss and metrics; --loss and --metrics replace them.

    \b
    onnxfit evaluate trained.onnx --data test.npz --loss cross_entropy --metrics accuracy
    """
    given: dict[str, Any] = {"device": device}
    if loss or not is_checkpoint(model):
        given["loss"] = settings.loss_of(loss)
    if metrics:
        given["metrics"] = settings.metrics_of(metrics, given.get("loss"))
    trainer = Trainer.load(model, **given) if is_checkpoint(model) else Trainer(model, **given)
    wanted = arrays.DataRequest(arrays.inputs_of(trainer.model), list(trainer.objectives), label)
    options.print_figures(
        trainer.evaluate(*arrays.read(data, wanted), batch_size=batch_size), as_json
    )
