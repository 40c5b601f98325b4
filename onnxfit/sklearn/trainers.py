"""Trainers that continue other trainers, and their contents for pickles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx

from onnxfit.trainable.adapters.adapted import AdaptedModel, with_constants
from onnxfit.trainer import Trainer
from onnxfit.training.training import training_of


def base_model(trainer: Trainer, *, keeps_adapters: bool) -> onnx.ModelProto:
    """Return the model from which another trainer continues.

    - `keeps_adapters`: whether the other trainer takes over the matrices of the adapters. They are
      merged into the model otherwise.
    """
    form = training_of(trainer).trainable
    if keeps_adapters and isinstance(form, AdaptedModel):
        return form.frozen_base(trainer.get_weights(copy=False)).whole()
    return trainer.export(None)


def continued(before: Trainer, after: Trainer, *, keeps_adapters: bool) -> Trainer:
    """Return `after`, a new trainer of a `base_model`, with the state of `before`. It takes over
    the slots if both optimizers have the same slots, and all adapters or none.
    """
    old = before.get_state()
    new = after.get_state()
    same_slots = keeps_adapters and old["slots"].keys() == new["slots"].keys()
    slots = old["slots"] if same_slots else new["slots"]
    counters = {**old["counters"], "learning_rate": new["counters"]["learning_rate"]}
    # The floats trained in place of integers are not in the file from which `after` was made.
    known = old["weights"] if keeps_adapters else {}
    weights = {name: known.get(name, array) for name, array in new["weights"].items()}
    after.set_state({"weights": weights, "slots": slots, "counters": counters})
    after.train_losses_ = list(before.train_losses_)
    return after


def packed(trainer: Trainer) -> dict[str, Any]:
    """Return the contents of a trainer, without sessions."""
    return {
        "model": base_model(trainer, keeps_adapters=True).SerializeToString(),
        "constants": training_of(trainer).trainable.constants,
        "settings": trainer.settings,
        "state": trainer.get_state(),
        "history": trainer.history.state_dict(),
        "train_losses": trainer.train_losses_,
    }


def unpacked(packed: Mapping[str, Any], with_files: Mapping[str, Any]) -> Trainer:
    """Return the trainer from its packed contents.

    - `packed`: the result of the function `packed`.
    - `with_files`: the settings with files, which the settings of a trainer do not contain.
    """
    settings = {**packed["settings"], **with_files}
    settings["adapters"] = with_constants(settings["adapters"], packed["constants"])
    trainer = Trainer(packed["model"], **settings)
    trainer.set_state(packed["state"])
    trainer.history.load_state_dict(packed["history"])
    trainer.train_losses_ = list(packed["train_losses"])
    return trainer
