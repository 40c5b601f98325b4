"""The setting of `Trainer` for files of integers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import onnx

from onnxfit.checks import (
    ChecksArguments,
    check_number,
    name_list,
    require_choice,
    set_field,
    shortened,
)
from onnxfit.errors import SettingError
from onnxfit.load.reading import ModelSource

__all__ = ["Quantization"]

MAX_OBSERVED = 10**9  # batches


@dataclass(frozen=True)
class Quantization(ChecksArguments):
    r"""Settings for training a file with integer weights.

    Each integer initializer $q$ behind a DequantizeLinear gets a float weight $w$ of its name. The
    training step computes with $s\,(\mathrm{clamp}(\mathrm{round}(w / s) + z) - z)$ instead of $w$,
    and passes the gradient through the rounding (straight-through estimator, Bengio et al. 2013,
    arXiv:1308.3432). The exported file has $q = \mathrm{clamp}(\mathrm{round}(w / s) + z)$. A bias
    of 32 bits is trained without rounding.

    With this setting, the packed weights of MatMulNBits (4 or 8 bits, float32) train as well.
    Without it they stay unchanged, and its kernel computes the training step. Each gets a float
    weight of shape (K, N) under the name of the packed one, and $z$ is $2^{\mathrm{bits} - 1}$ if
    the node has none. The exported file packs the integers again. A training step does not round
    activations, as kernels with `accuracy_level=4` do; evaluation does.

    - `weights`: names and fnmatch patterns of the integer initializers to train, where `"!pattern"`
      excludes; None for all. The others stay byte-identical.
    - `float_model`: the float file that was quantized: a path, bytes or an `onnx.ModelProto`. The
      float weights start from its constants instead of $s\,(q - z)$. A constant is found by the
      name of the integers, without `_quantized` and `_Transposed`, or else by the nearest values,
      in the shape of the integers or transposed. Rounding it must give the integers, up to one step
      (in blocks, one step on average). Checkpoints do not store this model.
    - `scales`: "fixed" keeps the scales and zero points of the file; "learned" trains them.
    - `observe`: number of batches, at least 0, whose ranges the activations follow.

    Learned scales: every scale $s$ that a QuantizeLinear reads, of a trained weight or an
    activation, is a trained weight under its name in the file. For $v = w / s$ and the gradient $d$
    of the rounded number, the gradient of $s$ is the sum of $d\,(\mathrm{round}(v) - v)$ in range,
    and of $d\,(q - z)$ where $q$ was clamped (LSQ, Esser et al. 2020, arXiv:1902.08153). The
    gradient of a zero point is the sum of $-s\,d$ where $q$ was clamped (LSQ+, Bhalgat et al. 2020,
    arXiv:2004.09576): a float is trained, and rounded to the integer $z$. Both sums are multiplied
    by $1 / \sqrt{N Q}$, where $N$ counts the elements of a weight or of a row of an activation, and
    $Q$ is the greatest integer. So SGD takes the steps of the paper. Adam divides by the size of
    the gradient, so its steps do not depend on this factor: give scales a smaller learning rate
    with `learning_rate_multipliers={"*_scale": 0.1}`.

    A zero point of 0 or in the middle of its type stays, so symmetric numbers stay symmetric. Float
    zero points of MatMulNBits stay as well. Its learned scales have the shape (blocks, N). The
    scale of a block may be negative, and keeps its sign. Scales start at the file's values. After
    each update they are clamped between 1/128 and 128 times the scale of the file, and zero points
    to the range of their type: torch.ao's learnable quantizer also clamps both. Neither has a
    penalty. AdamW decays them unless `exclude_from_weight_decay` matches them. The scale of a bias
    of 32 bits is the product of the scales of its layer's input and weight, and follows them.

    Observed ranges: an activation's range is $[s\,(q_{\min} - z), s\,(q_{\max} - z)]$. In each of
    the first `observe` batches (updates, if `accumulate` is 1), both ends move by 0.01 of the
    distance to the least and the greatest number of the batch, or to 0 if that is further out:
    the moving average of torch.ao's MovingAverageMinMaxObserver, starting from the file's range. A
    batch is rounded with the range before the batch. After `observe` batches the ranges stay. Scale
    and zero point follow from the range as in onnxruntime's quantizer, symmetric if the zero point
    is in the middle of its type. Several ranks average their scales and zero points after each
    batch.

    SettingError: a setting has another type or is out of range, or learned scales are combined with
    `observe`. `Trainer` raises UnknownNameError for a pattern that matches no integer initializer,
    and SettingError if the float model does not fit, or the file has no integer activations to
    observe. It raises ModelError for scales that training would have to change in two ways, and for
    a MatMulNBits with 2 bits or g_idx.

    >>> Quantization(weights=["conv*", "!conv1*"]).weights
    ('conv*', '!conv1*')
    >>> Quantization(scales="learned").scales
    'learned'
    """

    weights: Sequence[str] | str | None = None
    float_model: ModelSource | None = field(default=None, repr=False)
    scales: str = "fixed"
    observe: int = 0

    def __post_init__(self) -> None:
        check_number(self, "observe", at_least=0, at_most=MAX_OBSERVED, whole=True)
        require_choice("scales must be", self.scales, ("fixed", "learned"))
        if self.scales == "learned" and self.observe:
            raise SettingError(
                f"scales='learned' cannot be combined with observe={self.observe}. Train with"
                " observe first, export the file, and train the exported file with"
                " scales='learned'."
            )
        if self.weights is not None:
            set_field(self, "weights", tuple(name_list("weights", self.weights)))
        self._check_source("float_model")

    def _check_source(self, name: str) -> None:
        source = getattr(self, name)
        sources = (str, os.PathLike, bytes, onnx.ModelProto)
        if source is not None and not isinstance(source, sources):
            raise SettingError(
                f"{name} must be a path, bytes or an onnx.ModelProto, got {shortened(source)}."
            )

    def without_files(self) -> Quantization:
        """Return the settings that a checkpoint stores."""
        return replace(self, float_model=None)
