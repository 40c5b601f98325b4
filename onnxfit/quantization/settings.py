"""The setting of `Trainer` for files of integers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import onnx

from onnxfit.errors import SettingError
from onnxfit.graph.reading import ModelSource
from onnxfit.registry import ChecksArguments, name_list, shortened

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

    Raises SettingError for another type. `Trainer` raises UnknownNameError for a pattern that
    matches no integer initializer, and SettingError if the float model does not fit.

    >>> Quantization(weights=["conv*", "!conv1*"]).weights
    ('conv*', '!conv1*')
    """

    weights: Sequence[str] | str | None = None
    float_model: ModelSource | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.weights is not None:
            object.__setattr__(self, "weights", tuple(name_list("weights", self.weights)))
        sources = (str, os.PathLike, bytes, onnx.ModelProto)
        if self.float_model is not None and not isinstance(self.float_model, sources):
            raise SettingError(
                "float_model is a path, bytes or an onnx.ModelProto, got"
                f" {shortened(self.float_model)}."
            )

    def without_files(self) -> Quantization:
        """Return the settings that a checkpoint holds."""
        return replace(self, float_model=None)
