"""Check the labels of an output against its spec, and give the input of labels its sizes.

`owner` is the name of the loss that the labels are for, as messages show it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnxfit.errors import DataError, SettingError
from onnxfit.graph.spec import Dim, TensorSpec
from onnxfit.graph.values import Value

Array = npt.NDArray[Any]

# the names of element types in ONNX's text syntax that differ from NumPy's
TEXT_TYPES = {"float": "float32", "double": "float64"}
DECLARATION = re.compile(r"\s*(\w+)\s*\[([^\[\]]*)\]\s*")
SIZE = re.compile(r"[1-9]\d*|\?|[A-Za-z_]\w*")
RANGES = {(0.0, 1.0): "{} from 0 to 1", (0.0, math.inf): "finite {} >= 0"}


@dataclass(frozen=True)
class AllowedLabels:
    """The labels that a loss reads in the graph. All of them are finite.

    - `minimum`, `maximum`: the bounds of a label.
    - `values`: the only possible labels; None for any number in the bounds.
    - `ignored`: a label that does not count, which may lie outside of the bounds; None for none.
    """

    minimum: float = -math.inf
    maximum: float = math.inf
    values: tuple[float, ...] | None = None
    ignored: int | None = None


def parse_labels(labels: str | Mapping[str, str]) -> dict[str, TensorSpec]:
    """Return the specs of declared labels by name; a single text has the name "".

    - `labels`: an element type and a shape in ONNX's text syntax, or a dict name -> text.

    SettingError: a text is no element type and shape, or its first size is a number.

    >>> str(parse_labels("float[b, 7, 4]")[""])
    'y_true: float32[b, 7, 4]'
    """
    if isinstance(labels, str):
        return {"": _parsed(labels, "y_true")}
    valid = isinstance(labels, Mapping) and labels
    if not valid or not all(isinstance(n, str) and n and "/" not in n for n in labels):
        raise SettingError(
            "labels must be a text such as 'int64[b]', or a dict name -> text for several arrays,"
            f" got {labels!r}. Names have no '/'."
        )
    return {name: _parsed(text, name) for name, text in labels.items()}


def _parsed(text: Any, name: str) -> TensorSpec:
    match = DECLARATION.fullmatch(text) if isinstance(text, str) else None
    sizes = [] if match is None else [size.strip() for size in match[2].split(",")]
    try:
        dtype = np.dtype(TEXT_TYPES.get(match[1], match[1]) if match else "")
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind not in "biuf" or not all(map(SIZE.fullmatch, sizes)):
        raise SettingError(
            f"labels has {text!r} for {name!r}. Expected an element type and a shape, such as"
            " 'int64[b]', 'float[b, 7, 4]' or 'bool[b, ?]'."
        )
    if sizes[0].isdigit():
        raise SettingError(
            f"labels has {text!r} for {name!r}, but the first axis of labels is the batch. Write a"
            f" name for its size: '{match[1] if match else dtype}[{', '.join(['b', *sizes[1:]])}]'."
        )
    shape = (int(size) if size.isdigit() else None if size == "?" else size for size in sizes)
    return TensorSpec(name, dtype, tuple(shape))


def declared_labels(owner: str, labels: Array, expected: TensorSpec) -> Array:
    """Return labels in the element type and shape that a loss has declared for them.

    DataError: the labels have another shape, or numbers that the element type lacks.
    """
    fitted = fit_shape(labels, expected) if labels.dtype.kind in "biuf" else None
    if fitted is None:
        raise DataError(
            f"{owner} declares the labels {expected}, got {labels.dtype} of shape {labels.shape}."
            " Change labels= of the loss, or the array."
        )
    if fitted.dtype == expected.dtype:
        return fitted
    with np.errstate(invalid="ignore", over="ignore"):
        converted = fitted.astype(expected.dtype)
    if expected.dtype.kind == "f":
        wrong = np.isinf(converted) & np.isfinite(fitted)
    else:
        wrong = converted != fitted
    refuse_where(owner, fitted, wrong, f"numbers of {expected.dtype}", expected)
    return converted


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
    """Return labels in the expected shape. DataError, with `hint`: the labels do not fit."""
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
            f"{owner} expects {expected} for output {output}, got"
            f" {_shown_label(labels[index].item())} at row {index[0]}.{hint}"
        )


def _shown_label(label: float) -> str:
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
