"""Check the labels of an output against its spec, and give the input of labels its sizes.

`owner` is the name of the loss that the labels are for, as messages show it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnxfit.errors import DataError
from onnxfit.graph.spec import Dim, TensorSpec
from onnxfit.graph.values import Value

Array = npt.NDArray[Any]

RANGES = {(0.0, 1.0): "{} from 0 to 1", (0.0, math.inf): "finite {} >= 0"}


@dataclass(frozen=True)
class AllowedLabels:
    """The labels that a loss reads in the graph. All of them are finite.

    - `least`, `greatest`: the bounds of a label.
    - `values`: the only possible labels; None for any number in the bounds.
    - `ignored`: a label that does not count, which may lie outside of the bounds; None for none.
    """

    least: float = -math.inf
    greatest: float = math.inf
    values: tuple[float, ...] | None = None
    ignored: int | None = None


def label_numbers(owner: str, y: npt.ArrayLike) -> Array:
    """Return labels as an array of numbers; booleans become 0 and 1."""
    labels = np.asarray(y)
    if labels.dtype.kind == "b":
        return labels.astype(np.uint8)
    if labels.dtype.kind not in "iuf":
        raise DataError(f"{owner} needs numeric labels, got dtype {labels.dtype}.")
    return labels


def has_shape_of(labels: Array, output: TensorSpec) -> bool:
    """Return whether labels have the output's shape, for any number of rows."""
    return output.shape is not None and _any_rows(output).accepts(labels.shape)


def fit_shape(labels: Array, expected: TensorSpec) -> Array | None:
    """Return labels in the expected shape, or None if their shape does not fit.

    A last axis of size 1 is added or removed.
    """
    if expected.shape is None:
        return labels
    if labels.ndim == len(expected.shape) - 1 and expected.shape[-1] == 1:
        labels = labels[..., None]
    elif labels.ndim == len(expected.shape) + 1 and labels.shape[-1] == 1:
        labels = labels[..., 0]
    return labels if _any_rows(expected).accepts(labels.shape) else None


def align(
    owner: str, labels: Array, expected: TensorSpec, output: TensorSpec, hint: str = ""
) -> Array:
    """Return labels in the expected shape. Raises DataError, with `hint`, if it does not fit."""
    fitted = fit_shape(labels, expected)
    if fitted is None:
        sizes = ["?" if d is None else str(d) for d in _any_rows(expected).shape or ()]
        shape = ", ".join(sizes) + "," * (len(sizes) == 1)
        kind = "class indices" if expected.dtype.kind in "iu" else "labels"
        raise DataError(
            f"{owner} expects {kind} of shape ({shape}) for output {output}, got shape"
            f" {labels.shape}.{hint}"
        )
    return fitted


def check_range(
    owner: str,
    labels: Array,
    low: float,
    high: float,
    dtype: np.dtype[Any],
    output: TensorSpec,
    kind: str = "numbers",
) -> None:
    """Raise DataError unless all labels lie from `low` to `high` and are finite in `dtype`."""
    limit = float(np.finfo(dtype).max)
    lowest = max(low, -limit)
    highest = min(high, limit)
    if not labels.size:
        return
    # Python floats, because a bound of float64 would overflow in the type of float32 labels. With
    # NaN among the labels, minimum and maximum are NaN, and both comparisons fail.
    if not (float(labels.min()) >= lowest and float(labels.max()) <= highest):
        expected = RANGES.get((low, high), "finite {}").format(kind)
        numbers = labels.astype(np.float64) if labels.dtype.kind == "f" else labels
        refuse_where(owner, labels, ~((numbers >= lowest) & (numbers <= highest)), expected, output)


def refuse_where(
    owner: str, labels: Array, wrong: Array, expected: str, output: TensorSpec, hint: str = ""
) -> None:
    """Raise DataError that names the first label for which `wrong` is true, if there is one."""
    if wrong.any():
        index = np.unravel_index(int(wrong.argmax()), wrong.shape)
        raise DataError(
            f"{owner} expects {expected} for output {output}, got {_shown(labels[index].item())}"
            f" at row {index[0]}.{hint}"
        )


def _shown(label: float) -> str:
    """Return the text of a label for messages. A whole number shows all its digits."""
    return str(label) if isinstance(label, int) else f"{label:g}"


def adopt_sizes(value: Value, sizes: tuple[Dim, ...] | None) -> None:
    """Give an input of labels the sizes of its output that are unknown in the input.

    Otherwise sizes that are equal at run time would look as if they might broadcast. An input of
    another rank stays unchanged, because a loss may require it.
    """
    if value.ir.producer() is not None or value.shape is None or sizes is None:
        return
    if len(sizes) == value.rank:
        value.ir.shape = ir.Shape(
            [
                own if isinstance(own, int) or other is None else other
                for own, other in zip(value.shape, sizes)
            ]
        )


def _any_rows(spec: TensorSpec) -> TensorSpec:
    """Return the spec for any number of rows.

    A model may fix its batch, but an array of labels has the rows of all batches.
    """
    if not spec.shape:
        return spec
    return TensorSpec(spec.name, spec.dtype, ("batch", *spec.shape[1:]))
