"""The contents of a checkpoint, and the model to which they belong."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx

from onnxfit.errors import CheckpointError, SettingError
from onnxfit.files import as_checkpoint_error
from onnxfit.graph import names
from onnxfit.graph.model import OnnxModel
from onnxfit.load.constant_nodes import lower_constants, with_constant_nodes
from onnxfit.load.model_file import ModelSnapshot
from onnxfit.load.reading import ModelSource, read_model
from onnxfit.load.trainable import fingerprint
from onnxfit.step.distillation import Distillation
from onnxfit.tools.editing.dynamic_batch import dynamic_batch as any_batch
from onnxfit.training.forms import trainable_form
from onnxfit.training.lineage import add_lineage
from onnxfit.training.setting_values import decode_setting


@dataclass
class CheckpointContents:
    """The contents of a checkpoint.

    `state` is the result of `Trainer.get_state`, with the weights of `model`. `resume` has the
    fields of a `Position`. `tracker` is the `Tracker.state_dict` of the running epoch.
    `missed_event` is the event that the loggers have missed. `constants` are the constants of the
    trainable form. `model` is None if the checkpoint has only the adapters; `base` is then the
    fingerprint of the model. `lineage` is what made the weights, as JSON. `replaced` are the
    settings of the checkpoint in whose place others were passed, as JSON.
    """

    model: OnnxModel | None
    settings: dict[str, Any]
    state: dict[str, dict[str, Any]]
    history: dict[str, Any]
    train_losses: list[float]
    resume: Sequence[Any]
    tracker: Mapping[str, Any]
    missed_event: Mapping[str, Any]
    callbacks: Mapping[str, dict[str, Any]]
    constants: Mapping[str, Sequence[np.ndarray[Any, Any]]]
    base: str | None = None
    lineage: Mapping[str, Any] | None = None
    replaced: Mapping[str, Any] = field(default_factory=dict)

    def require_base(self, path: str | os.PathLike[str], found: str) -> None:
        """Raise SettingError unless `found` is the fingerprint of the base model."""
        if self.base is not None and self.base != found:
            raise SettingError(
                f"{os.fspath(path)!r} has adapters for another model: the SHA-256 of the model's"
                f" nodes and weights must begin with {self.base[:12]}, got {found[:12]}. Pass the"
                " unchanged file with which the adapters were trained."
            )

    def with_base(self, path: str | os.PathLike[str], model_onnx: ModelSource | None) -> OnnxModel:
        """Return the model of a checkpoint: `model_onnx` if the checkpoint has only adapters.

        CheckpointError: the model is missing. SettingError: the adapters belong to another model,
        or the checkpoint already has a model.
        """
        if self.model is not None:
            if model_onnx is not None:
                raise SettingError(
                    f"{os.fspath(path)!r} already contains a model, which model_onnx= would"
                    " replace. Remove model_onnx=. Only checkpoints saved with"
                    " adapters_only=True need it."
                )
            return self.model
        if model_onnx is None:
            raise CheckpointError(
                f"{os.fspath(path)!r} was saved with adapters_only=True, without the model. Pass"
                " the model: Trainer.load(path, model_onnx='base.onnx')."
            )
        is_dynamic = self.settings.get("dynamic_batch")
        model = read_model(any_batch(model_onnx) if is_dynamic else model_onnx)
        self.require_base(path, fingerprint(model.proto))
        return model

    def without_loss_weights(self, passed: Collection[str]) -> None:
        """Let another loss choose its own tensors, in place.

        - `passed`: the names of the passed settings.
        """
        chosen = self.settings.get("weights")
        if "weights" not in passed and isinstance(chosen, list) and self.model is not None:
            own = {tensor.name for tensor in self.model.graph.initializer}
            self.settings["weights"] = [
                n for n in chosen if n in own or not names.is_loss_weight(n.removeprefix("!"))
            ]

    def with_teacher(self, path: str | os.PathLike[str]) -> None:
        """Add the settings of the checkpoint to a teacher that was passed, in place.

        CheckpointError: the settings need a teacher, which checkpoints lack.
        """
        given = self.settings.get("teacher")
        if isinstance(given, Distillation):
            if given.teacher is None:
                raise CheckpointError(
                    f"{os.fspath(path)!r} was trained with a teacher, which a checkpoint does not"
                    " contain. Pass the teacher: Trainer.load(path, teacher='large.onnx'), or None"
                    " to train with the labels alone."
                )
        elif given is not None and self.replaced.get("teacher") is not None:
            stored = decode_setting("teacher", self.replaced["teacher"], os.fspath(path))
            if isinstance(stored, Distillation):
                self.settings["teacher"] = replace(stored, teacher=given)

    def trained_model(self) -> onnx.ModelProto:
        """Return the model with the trained weights; see `trained_snapshot`."""
        return self.trained_snapshot().whole()

    def trained_snapshot(self) -> ModelSnapshot:
        """Return the model with the trained weights, to be written tensor by tensor.

        `model` lacks them if floats are trained in place of its integers, or adapters in addition
        to its weights. CheckpointError: the checkpoint has no model.
        """
        model = self.model
        if model is None:
            raise CheckpointError(
                "The checkpoint was saved with adapters_only=True, without the model. Load it with"
                " its model, Trainer.load(path, model_onnx='base.onnx'), and export that trainer."
            )
        # the seed gives the initial values of adapters, which the state replaces
        trainable = trainable_form(model, {**self.settings, "seed": 0})
        weights = self.state["weights"]
        if trainable.is_file:
            exported = OnnxModel(with_constant_nodes(model.proto), model.arrays)
        else:
            with as_checkpoint_error(
                "The checkpoint is damaged: its weights are not those of its model"
            ):
                exported = trainable.export(weights)
            lower_constants(exported.proto)
        if self.lineage is not None:
            add_lineage(exported.proto, self.lineage, averaged=False, adapters="merged")
        return ModelSnapshot(exported, weights)
