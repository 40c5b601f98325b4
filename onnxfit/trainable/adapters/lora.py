"""The setting of `Trainer` for adapters of low rank."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from onnxfit.checks import (
    ChecksArguments,
    check_arguments,
    check_number,
    name_list,
    set_field,
    shortened,
)
from onnxfit.errors import CheckpointError, SettingError
from onnxfit.files import require_path
from onnxfit.trainable.adapters.onnx_adapter import is_onnx_adapter, read_onnx_adapter
from onnxfit.trainable.adapters.peft import Matrices, read_adapters, scale_of

__all__ = ["LoRA"]

SCALINGS = ("alpha/r", "alpha/sqrt(r)")
INITIALIZERS = ("kaiming", "gaussian", "pissa")


@dataclass(frozen=True)
class LoRA(ChecksArguments):
    r"""Low-rank adapters: two small matrices are trained instead of each weight.

    A linear layer $y = x W + b$ with $W$ of (inputs, outputs) computes
    $y = x W + b + s\,\mathrm{dropout}(x) A B$, with $A$ of (inputs, rank), $B$ of (rank, outputs)
    and $s = \alpha / r$ (Hu et al. 2021, arXiv:2106.09685). The table of an embedding and the
    weights of a Conv are adapted in the same way. $B$ starts with zeros ($A$ in an embedding), so
    the model first computes what the file computes.

    - `rank`: $r$, a whole number from 1 up to the smaller side of each weight.
    - `alpha`: $\alpha$, a finite number > 0.
    - `target`: names and fnmatch patterns of the weights, where `"!pattern"` excludes. A pattern is
      compared with the names of the initializer, of the parameter and module that it was exported
      from, and of the node that reads it. None adapts every linear layer except those that no other
      linear layer follows, as "all-linear" of PEFT leaves out the output layer, and fixed filters.
    - `dropout`: the fraction of the elements of $x$ that a training step drops for the adapter,
      in [0, 1). Layers that read the same $x$ share its dropout; an embedding has none.
    - `scaling`: "alpha/r"; or "alpha/sqrt(r)", $s = \alpha / \sqrt{r}$, with which updates do not
      shrink as the rank grows (rsLoRA, Kalajdzievski 2023, arXiv:2312.03732).
    - `init`: the first values of $A$: "kaiming", uniform in $\pm 1 / \sqrt{\text{inputs}}$, or
      "gaussian", with standard deviation $1 / r$ (1 for $B$ in an embedding). "pissa": $s A B$ is
      the best approximation of $W$ of this rank, from the singular value decomposition, and $W - s
      A B$ is frozen (Meng et al. 2024, arXiv:2404.02948). The model first computes what the file
      computes, within rounding. It learns faster, because $A$ and $B$ start with the largest parts
      of $W$. Packed weights cannot use "pissa". The decomposition of a large weight takes time:
      about a minute for 4096 x 4096.
    - `dora`: train the magnitude of each weight apart from its direction (DoRA, Liu et al. 2024,
      arXiv:2402.09353). With $V = W + s A B$ the layer computes $y = x V \mathrm{diag}(m / \lVert
      V \rVert) + b$. The vector $m$ also trains, and starts with the norms of the columns of $W$.
      The norms $\lVert V \rVert$, one for each output, count as constants in the gradient. Dropout
      applies to $x A B$ alone. Packed weights cannot use DoRA, nor can tables that are also the
      weight of a linear layer.
    - `matrices`: a mapping from module to the first values of $A$ and $B$, as `LoRA.load` returns
      them; None takes them from `init`. Checkpoints do not store it.

    SettingError: a value is out of range. `Trainer` raises UnknownNameError for a pattern that
    matches no weight, and SettingError for a rank that is too large, or for a weight that two of
    several adapters match.

    >>> LoRA(rank=4, alpha=8, target=["*attn*", "!*out_proj*"]).scale
    2.0
    """

    rank: int = 8
    alpha: float = 16.0
    target: Sequence[str] | str | None = None
    dropout: float = 0.0
    scaling: str = "alpha/r"
    init: str = "kaiming"
    dora: bool = False
    matrices: Mapping[str, Matrices] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_number(self, "rank", at_least=1, whole=True)
        check_number(self, "alpha", above=0)
        check_number(self, "dropout", at_least=0, below=1)
        if self.target is not None:
            patterns = tuple(name_list("target", self.target))
            if not patterns:
                raise SettingError(
                    "target=[] matches no weight. Omit target to adapt all linear layers."
                )
            set_field(self, "target", patterns)
        for name, known in (("scaling", SCALINGS), ("init", INITIALIZERS)):
            if getattr(self, name) not in known:
                raise SettingError(
                    f"LoRA {name} must be one of {', '.join(map(repr, known))}, got"
                    f" {shortened(getattr(self, name))}."
                )

        if not isinstance(self.dora, bool):
            raise SettingError(f"LoRA dora must be True or False, got {shortened(self.dora)}.")
        given = {} if self.matrices is None else self.matrices
        values = given.values() if isinstance(given, Mapping) else [None]
        if not all(isinstance(value, Matrices) for value in values):
            raise SettingError(
                "LoRA matrices must be None or the matrices that LoRA.load(path) returns, got"
                f" {shortened(self.matrices)}."
            )

    @classmethod
    @check_arguments
    def load(cls, path: str | os.PathLike[str]) -> tuple[LoRA, ...]:
        """Return the adapters that `Trainer.export_adapter` or PEFT wrote, for `Trainer`.

        `path` is a folder, or an `.onnx_adapter` file of `Trainer.export_adapter`. The file stores
        $s B$ instead of $B$: its adapters have alpha = rank, hence $s = 1$, and no dropout.
        The list has one LoRA for each rank and alpha. `Trainer(model, adapters=LoRA.load(path))`
        continues their training, predicts with them, or exports the merged file. CheckpointError:
        the path has no adapters, or adapters other than LoRA. The Trainer raises UnknownNameError
        or SettingError for adapters of another model. It warns if the adapters of a folder were
        trained with weights of other values.
        """
        require_path(path)
        read = read_onnx_adapter if is_onnx_adapter(path) else read_adapters
        groups: dict[tuple[int, float], dict[str, Matrices]] = {}
        for module, one in read(path).items():
            groups.setdefault((one.rank, one.alpha), {})[module] = one
        loaded = []
        for (rank, alpha), matrices in groups.items():
            first = next(iter(matrices.values()))
            try:
                settings = cls(rank, alpha, tuple(matrices), first.dropout, first.scaling)
            except SettingError as error:
                raise CheckpointError(
                    f"{os.fspath(path)!r} has invalid adapter settings: {error}"
                ) from None
            dora = first.magnitude is not None
            loaded.append(replace(settings, dora=dora, matrices=matrices))
        return tuple(loaded)

    def without_matrices(self) -> LoRA:
        """Return the settings that a checkpoint stores."""
        return replace(self, matrices=None)

    def with_initial_factors(self, factors: Mapping[str, Sequence[Any]]) -> LoRA:
        """Return the same settings with matrices. `factors` maps a module to A and B as in PEFT."""
        settings = self.alpha, self.dropout, self.scaling
        matrices = {module: Matrices(a, b, *settings) for module, (a, b) in factors.items()}
        return replace(self, matrices=matrices)

    @property
    def scale(self) -> float:
        """The factor $s$ of the product of the two matrices."""
        return scale_of(self.alpha, self.rank, self.scaling)
