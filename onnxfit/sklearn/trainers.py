"""Trainers that continue other trainers, and their contents for pickles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnxfit.quantization import Quantization
from onnxfit.trainer import Trainer


def continued(before: Trainer, after: Trainer) -> Trainer:
    """Return `after`, a new trainer of the same weights, with the state of `before`. It takes over
    the slots if both optimizers have the same slots.
    """
    old = before.get_state()
    new = after.get_state()
    slots = old["slots"] if old["slots"].keys() == new["slots"].keys() else new["slots"]
    counters = {**old["counters"], "learning_rate": new["counters"]["learning_rate"]}
    # The floats trained in place of integers are not in the file from which `after` was made.
    weights = {name: old["weights"].get(name, array) for name, array in new["weights"].items()}
    after.set_state({"weights": weights, "slots": slots, "counters": counters})
    after.train_losses_ = list(before.train_losses_)
    return after


def packed(trainer: Trainer) -> dict[str, Any]:
    """Return the contents of a trainer, without sessions."""
    return {
        "model": trainer.export(None).SerializeToString(),
        "settings": trainer.settings,
        "state": trainer.get_state(),
        "history": trainer.history.state_dict(),
        "train_losses": trainer.train_losses_,
    }


def unpacked(packed: Mapping[str, Any], quantization: Quantization | None) -> Trainer:
    """Return the trainer from its packed contents.

    - `packed`: the result of the function `packed`.
    - `quantization`: the setting with its files, which the settings of a trainer do not contain.
    """
    trainer = Trainer(packed["model"], **{**packed["settings"], "quantization": quantization})
    trainer.set_state(packed["state"])
    trainer.history.load_state_dict(packed["history"])
    trainer.train_losses_ = list(packed["train_losses"])
    return trainer
