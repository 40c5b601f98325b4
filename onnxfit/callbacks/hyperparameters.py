"""The settings of a run that loggers write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxfit.trainer import Trainer

__all__ = ["hyperparameters"]


def hyperparameters(trainer: Trainer, others: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer, learning rate, loss and batch size of a trainer, and other settings.

    - `trainer`: a Trainer whose `fit` is running.
    - `others`: name -> value, settings to add or to replace.

    Settings that are None are left out.
    """
    optimizer = trainer.optimizer.settings
    rate = optimizer.learning_rate
    settings = {
        "optimizer": type(optimizer).__name__,
        "learning_rate": repr(rate) if callable(rate) else float(rate),
        "loss": loss_name(trainer.loss),
        "batch_size": trainer.batch_size,
        **others,
    }
    return {name: value for name, value in settings.items() if value is not None}


def loss_name(loss: Any) -> str:
    """Return a name for a Trainer's `loss` argument: a name, an object, a dict or None."""
    if isinstance(loss, Mapping):
        return ", ".join(f"{output}: {loss_name(one)}" for output, one in loss.items())
    if loss is None:
        return "in the model"
    if isinstance(loss, str):
        return loss
    return str(getattr(loss, "__name__", type(loss).__name__))
