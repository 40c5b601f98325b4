"""The settings of a training, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onnxfit.checks import is_finite, is_number, require_choice, shortened
from onnxfit.errors import SettingError
from onnxfit.load.reading import ModelSource
from onnxfit.optimizers.lookup import OptimizerLike
from onnxfit.penalties import PenaltyLike
from onnxfit.step.distillation import Distillation
from onnxfit.step.objectives import Losses, LossWeights, Metrics
from onnxfit.step.precision import get_precision

if TYPE_CHECKING:
    from onnxfit.trainable.adapters.lora import LoRA
    from onnxfit.trainable.quantized.settings import Quantization


@dataclass(frozen=True)
class TrainerSettings:
    """The arguments of `Trainer` other than the model. `Trainer` describes each of them.

    Names (of losses, optimizers, backends, ...) are looked up later, where the object is used.
    SettingError: a value is out of range.
    """

    weights: Sequence[str] | str | None = None
    loss: Losses = None
    penalty: PenaltyLike = None
    optimizer: OptimizerLike = "sgd"
    metrics: Metrics = ()
    loss_weights: LossWeights = None
    backend: str = "full"
    gradient: str = "auto"
    device: str = "cpu"
    seed: int = 0
    batch_norm: str = "train"
    precision: str = "float32"
    clip_norm: float | None = None
    clip_value: float | None = None
    clip_adaptive: float | None = None
    accumulate: int = 1
    threads: int | None = None
    dynamic_batch: bool = False
    stop_gradients: Sequence[str] | str | None = None
    freeze_rows: Mapping[str, Sequence[int]] | None = None
    fixed_inputs: Mapping[str, Any] | None = None
    state_outputs: Mapping[str, str] | None = None
    batch_axes: Mapping[str, int | None] | None = None
    teacher: Distillation | ModelSource | None = None
    quantization: Quantization | None = None
    adapters: LoRA | Sequence[LoRA] | None = None

    def __post_init__(self) -> None:
        check_batch_norm(self.batch_norm)
        get_precision(self.precision)
        check_accumulate(self.accumulate)
        if not isinstance(self.dynamic_batch, bool):
            raise SettingError(f"dynamic_batch must be True or False, got {self.dynamic_batch!r}.")
        if not isinstance(self.seed, int):
            raise SettingError(f"seed must be a whole number, got {self.seed!r}.")
        if self.threads is not None and not _is_whole(self.threads, 0, 1024):
            raise SettingError(
                f"threads must be a whole number of at most 1024, or None, got {self.threads!r}."
            )
        if self.freeze_rows is not None and not _is_rows(self.freeze_rows):
            raise SettingError(
                "freeze_rows must be a mapping from weights to lists of rows, got"
                f" {shortened(self.freeze_rows)}."
            )
        for name in ("clip_norm", "clip_value", "clip_adaptive"):
            bound = getattr(self, name)
            if bound is not None and not _is_bound(bound):
                raise SettingError(
                    f"{name} must be a positive number or None, got {shortened(bound)}."
                )


def check_batch_norm(batch_norm: object) -> None:
    """Raise SettingError unless `batch_norm` is a way to normalize by batches or statistics."""
    require_choice("batch_norm must be", batch_norm, ("train", "frozen", "batch"))


def check_accumulate(batches: object) -> None:
    """Raise SettingError unless `batches` is a valid number of batches per update."""
    if not isinstance(batches, int) or batches < 1:
        raise SettingError(
            f"accumulate must be a whole number of batches, at least 1, got {batches!r}."
        )


def _is_bound(value: Any) -> bool:
    """Return whether `value` is a positive number, infinity included."""
    return is_number(value) and (value == math.inf or (is_finite(value) and value > 0))


def _is_rows(value: object) -> bool:
    """Return whether `value` maps names to lists of whole numbers."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        return False
    return all(
        isinstance(rows, (list, tuple))
        and all(isinstance(row, int) and not isinstance(row, bool) for row in rows)
        for rows in value.values()
    )


def _is_whole(value: object, minimum: int, maximum: int) -> bool:
    return isinstance(value, int) and minimum <= value <= maximum
