"""The contents of a checkpoint, and the model that they are for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from onnxfit.editing.dynamic_batch import dynamic_batch as any_batch
from onnxfit.errors import CheckpointError, SettingError
from onnxfit.files import refusing_misfits
from onnxfit.graph.fingerprint import fingerprint
from onnxfit.graph.reading import ModelSource, read_shared
from onnxfit.graph.shared_tensors import whole_model
from onnxfit.quantization.settings import Quantization
from onnxfit.training.forms import trainable_form


@dataclass
class Contents:
    """The contents of a checkpoint.

    `state` is that of `Trainer.get_state`, with the weights of `model`; `resume` are the fields of
    a `Position`; `tracker` is the `Tracker.state_dict` of the running epoch; `undelivered` is the
    event of which the loggers have not been told yet; `constants` are those of the trainable form.
    `model` is None where the checkpoint has the adapters alone; `base` is then its fingerprint.
    `tensors` are the arrays that a large `model` refers to.
    """

    model: onnx.ModelProto | None
    settings: dict[str, Any]
    state: dict[str, dict[str, Any]]
    history: dict[str, Any]
    train_losses: list[float]
    resume: Sequence[Any]
    tracker: Mapping[str, Any]
    undelivered: Mapping[str, Any]
    callbacks: Mapping[str, dict[str, Any]]
    constants: Mapping[str, Sequence[np.ndarray[Any, Any]]]
    base: str | None = None
    tensors: Sequence[np.ndarray[Any, Any]] = ()

    def require_base(self, path: str | os.PathLike[str], found: str) -> None:
        """Raise SettingError unless a model with the fingerprint `found` is the base."""
        if self.base is not None and self.base != found:
            raise SettingError(
                f"{os.fspath(path)!r} holds adapters of another model: the SHA-256 of its nodes and"
                f" weights is {self.base[:12]}..., and that of the given one {found[:12]}... . Give"
                " the file that the adapters were trained beside, as it was then."
            )

    def with_base(
        self, path: str | os.PathLike[str], model_onnx: ModelSource | None
    ) -> onnx.ModelProto:
        """Return the model of a checkpoint: `model_onnx` where the checkpoint has adapters alone.

        Raises CheckpointError for a missing model, and SettingError for another model than that of
        the adapters, or for one beside a checkpoint that has its own.
        """
        if self.model is not None:
            if model_onnx is not None:
                raise SettingError(
                    f"{os.fspath(path)!r} has its own model, which model_onnx= would replace: leave"
                    " model_onnx= out. Only checkpoints of adapters_only=True have no model."
                )
            return self.model
        if model_onnx is None:
            raise CheckpointError(
                f"{os.fspath(path)!r} was saved with adapters_only=True, without the model. Give"
                " the file beside it: Trainer.load(path, model_onnx='base.onnx')."
            )
        is_dynamic = self.settings.get("dynamic_batch")
        model, self.tensors = read_shared(any_batch(model_onnx) if is_dynamic else model_onnx)
        self.require_base(path, fingerprint(model))
        return model

    def require_teacher(self, path: str | os.PathLike[str]) -> None:
        """Raise CheckpointError for settings of a teacher without it; a checkpoint has no files."""
        quantization = self.settings.get("quantization")
        if isinstance(quantization, Quantization) and quantization.lacks_teacher:
            call = repr(quantization).replace("(", "(teacher=..., ", 1)
            raise CheckpointError(
                f"{os.fspath(path)!r} was trained with a teacher, which a checkpoint does not hold."
                f" Give it again: Trainer.load(path, quantization=onnxfit.{call})."
            )

    def trained_model(self) -> onnx.ModelProto:
        """Return the model with the trained weights.

        `model` lacks them where floats are trained in the place of its integers, or adapters beside
        its weights. Raises CheckpointError for a checkpoint without a model.
        """
        model = self.model
        if model is None:
            raise CheckpointError(
                "The checkpoint was saved with adapters_only=True, without the model. Load it with"
                " its model, Trainer.load(path, model_onnx='base.onnx'), and export that trainer."
            )
        # the seed decides the first values of adapters, which the state replaces
        trainable = trainable_form(model, {**self.settings, "seed": 0})
        if trainable.is_file:
            return whole_model(model)
        with refusing_misfits("The checkpoint is damaged: its weights are not those of its model"):
            return trainable.exported(self.state["weights"])
