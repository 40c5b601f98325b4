"""`onnxfit evaluate`: loss and metrics of a model."""

from __future__ import annotations

from typing import Any

import click

from onnxfit.cli import arrays, labels, options, settings
from onnxfit.cli.config import config_option
from onnxfit.cli.models import is_checkpoint, require_loss
from onnxfit.trainer import Trainer

__all__ = ["evaluate"]


@click.command(short_help="Print loss and metrics over data.")
@click.argument("model", type=options.EXISTING_FILE)
@options.data
@options.label
@options.loss
@options.metrics
@options.fixed_input
@options.batch_axis
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
    fixed_inputs: tuple[str, ...],
    batch_axes: tuple[str, ...],
    batch_size: int,
    device: str,
    as_json: bool,
) -> None:
    """Print loss and metrics of MODEL, a .onnx or a checkpoint, over all of the data.

    A checkpoint contains its loss and metrics; --loss and --metrics replace them.

    \b
    onnxfit evaluate trained.onnx --data test.npz --loss cross_entropy \\
        --metrics accuracy
    """
    trainer_settings: dict[str, Any] = {"device": device}
    if loss or not is_checkpoint(model):
        trainer_settings["loss"] = settings.parse_loss(loss)
    if metrics:
        trainer_settings["metrics"] = settings.parse_metrics(metrics)
    if fixed_inputs:
        trainer_settings["fixed_inputs"] = settings.parse_fixed_inputs(fixed_inputs)
    if batch_axes:
        trainer_settings["batch_axes"] = settings.parse_batch_axes(batch_axes)
    make_trainer = Trainer.load if is_checkpoint(model) else Trainer
    trainer = require_loss(make_trainer(model, **trainer_settings))
    request = arrays.DataRequest(trainer.inputs, list(trainer.objectives), label)
    given = labels.encode_as_stored(trainer, arrays.read(data, request))
    figures = trainer.evaluate(*given, batch_size=batch_size)
    options.print_figures(figures, as_json)
