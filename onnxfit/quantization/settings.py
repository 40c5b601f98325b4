"""The setting of `Trainer` for files of integers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import onnx

from onnxfit.errors import SettingError
from onnxfit.graph.reading import ModelSource
from onnxfit.registry import ChecksArguments, check_number, name_list, shortened
from onnxfit.step.distillation import Distillation

__all__ = ["Quantization"]


@dataclass(frozen=True)
class Quantization(ChecksArguments):
    r"""How a file whose weights are integers is trained.

    Each integer initializer $q$ behind a DequantizeLinear gets a float weight $w$ of its name. The
    training step computes with $s\,(\mathrm{clamp}(\mathrm{round}(w / s) + z) - z)$ instead of $w$,
    and passes the gradient through the rounding (straight-through estimator, Bengio et al. 2013,
    arXiv:1308.3432). The exported file has $q = \mathrm{clamp}(\mathrm{round}(w / s) + z)$. A bias
    of 32 bits is trained without rounding.

    - `weights`: names and fnmatch patterns of the integer initializers that are trained, where
      `"!pattern"` excludes; None for all. Others stay byte-identical.
    - `float_model`: the float file that was quantized: a path, bytes or an `onnx.ModelProto`. The
      float weights begin with its initializers instead of with $s\,(q - z)$. They are found by
      name, by the name without `_quantized`, or by shape and nearest values. Checkpoints do not
      hold it.
    - `teacher`: a float model of the same task, often the one that was quantized: a path, bytes or
      an `onnx.ModelProto`. It runs in every training step on the same inputs, and each entry of the
      loss becomes $(1 - a)\,\ell + a\,d$ (Hinton, Vinyals, Dean 2015, arXiv:1503.02531). For losses
      of classes and probabilities $d = T^2\,\mathrm{KL}(q \Vert p)$, where $q$ and $p$ are the
      softmax (or sigmoid) of the teacher's and the model's logits, divided by $T$; the graphs tell
      logits from probabilities, as for `from_logits=None`. For all other losses $d$ is the squared
      difference of the outputs. Weights of rows, masks and class weights apply to both terms.
      `evaluate`, `val_loss` and metrics are without the teacher. Inputs and outputs are matched by
      name, or by position if there is one. Checkpoints do not hold the teacher.
    - `temperature`: $T > 0$; with a teacher 2 by default. It has no influence on squared
      differences.
    - `teacher_weight`: $a$ in [0, 1]; with a teacher 0.5 by default. With 0 the teacher does not
      run; with 1 the labels have no influence, and `fit` still needs them.

    Raises SettingError for another type or a number out of range. `Trainer` raises UnknownNameError
    for a pattern that matches no integer initializer, and SettingError if the float model does not
    fit. It raises ModelError if the teacher's inputs or outputs do not fit, and SettingError for
    `temperature` or `teacher_weight` without a teacher, or a teacher without a loss.

    >>> Quantization(weights=["conv*", "!conv1*"]).weights
    ('conv*', '!conv1*')
    >>> Quantization(teacher="float.onnx", temperature=4).teacher_weight
    0.5
    """

    weights: Sequence[str] | str | None = None
    float_model: ModelSource | None = field(default=None, repr=False)
    teacher: ModelSource | None = field(default=None, repr=False)
    temperature: float | None = None
    teacher_weight: float | None = None

    def __post_init__(self) -> None:
        if self.weights is not None:
            object.__setattr__(self, "weights", tuple(name_list("weights", self.weights)))
        for name in ("float_model", "teacher"):
            self._check_source(name)
        if self.teacher is not None:
            for name, default in (("temperature", 2.0), ("teacher_weight", 0.5)):
                if getattr(self, name) is None:
                    object.__setattr__(self, name, default)
        if self.temperature is not None:
            check_number(self, "temperature", above=0)
        if self.teacher_weight is not None:
            check_number(self, "teacher_weight", at_least=0, at_most=1)

    def _check_source(self, name: str) -> None:
        source = getattr(self, name)
        sources = (str, os.PathLike, bytes, onnx.ModelProto)
        if source is not None and not isinstance(source, sources):
            raise SettingError(
                f"{name} is a path, bytes or an onnx.ModelProto, got {shortened(source)}."
            )

    @property
    def lacks_teacher(self) -> bool:
        """Whether there are settings for a teacher, and no teacher."""
        return self.teacher is None and (
            self.temperature is not None or self.teacher_weight is not None
        )

    def distillation(self) -> Distillation | None:
        """Return the teacher, read from its file, and its settings; None without a teacher.

        Raises ModelError if it cannot be read, and SettingError for settings of a teacher without
        a teacher.
        """
        if self.lacks_teacher:
            raise SettingError(
                "temperature and teacher_weight are for a teacher, and Quantization has none: give"
                " teacher=, or leave them out."
            )
        if self.teacher is None or self.temperature is None or self.teacher_weight is None:
            return None
        return Distillation.read(self.teacher, self.temperature, self.teacher_weight)

    def without_files(self) -> Quantization:
        """Return the settings that a checkpoint holds.

        Those of a teacher stay, so that loading such a checkpoint can ask for the teacher.
        """
        return replace(self, float_model=None, teacher=None)
