"""Conversion of one array to the numbers, shape, type and layout of a graph's input."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxfit.data.batch import Array
from onnxfit.errors import DataError
from onnxfit.graph.spec import TensorSpec


def as_array(value: Any, name: object) -> Array:
    """Return `value` as an array of numbers or booleans. DataError: it is something else."""
    # NumPy imports this module late, and nobody has a masked array without it.
    if "numpy.ma" in sys.modules and isinstance(value, np.ma.MaskedArray):
        raise DataError(
            f"{name} is a masked array, whose mask would be lost. Fill it first: array.filled(0)."
        )
    if hasattr(value, "toarray"):
        raise DataError(
            f"{name} is sparse ({type(value).__name__}), but models take dense arrays. Pass"
            " .toarray()."
        )
    try:
        array = np.asarray(value)
    except Exception as error:  # numpy, torch and others each raise their own errors
        raise DataError(
            f"{name} cannot be converted to one array (rows of different lengths?): {error}"
        ) from error
    # bfloat16 and similar types have kind "V".
    if array.dtype.kind in "biuf" or (array.dtype.kind == "V" and array.dtype.type is not np.void):
        return array
    if hasattr(value, "iloc"):
        return _pandas_numbers(value, name)
    hint = {"O": "objects", "V": "records", "c": "complex", "M": "dates", "m": "times"}.get(
        array.dtype.kind, "text"
    )
    raise DataError(
        f"{name} has element type {array.dtype} ({hint}), but expected numbers. Convert class names"
        " to numbers with np.unique(..., return_inverse=True)[1]."
    )


def _pandas_numbers(value: Any, name: object) -> Array:
    """Return a table or a column of pandas whose types NumPy does not join: booleans beside
    numbers, nullable types, and categories.

    DataError, which names the column: it has missing values or no numbers.
    """
    if not hasattr(value, "columns"):
        return _column_numbers(value, f"{name}")
    columns = [
        _column_numbers(value.iloc[:, place], f"{name}: the column {column!r}")
        for place, column in enumerate(value.columns)
    ]
    return np.stack(columns, axis=1)


def _column_numbers(column: Any, name: str) -> Array:
    missing = np.asarray(column.isna())
    kind = getattr(column.dtype, "kind", "O")
    if kind in "biuf" and not isinstance(column.dtype, np.dtype):  # a nullable type
        if missing.any():
            raise DataError(
                f"{name} has a missing value in row {int(missing.argmax())}. Fill missing values,"
                " such as with df.fillna(0), or leave the rows out with df.dropna()."
            )
        return np.asarray(column.to_numpy(dtype=column.dtype.numpy_dtype))
    array = np.asarray(column)
    if array.dtype.kind in "biuf":
        return array
    fix = "Convert it to numbers, such as with df.astype(float)"
    if hasattr(column, "cat"):
        fix = "Use the numbers of the categories, df[column].cat.codes, or pandas.get_dummies(df)"
    elif any(isinstance(entry, str) for entry in array[:1]):
        fix = "Use pandas.get_dummies(df), or numbers of classes, pandas.factorize(df[column])[0]"
    raise DataError(f"{name} has the type {column.dtype}, but expected numbers or booleans. {fix}.")


def in_shape(array: Array, spec: TensorSpec) -> Array:
    """Return the array with the rank of the input. DataError: its shape does not fit.

    The first dimension is the batch, of any size.
    """
    shape = spec.shape
    if shape is None:
        return array
    if not shape:
        if array.size != 1:
            raise DataError(f"{spec} must be a single number, got an array of shape {array.shape}.")
        return array.reshape(())
    if array.ndim and not len(array):
        return array  # the caller reports that there are no rows
    if array.ndim == len(shape) - 1 and array.ndim and shape[-1] == 1:
        array = array[..., None]
    if not _has_shape(array.shape, shape):
        raise DataError(
            f"{spec} got an array of shape {array.shape}. The first dimension is the batch."
            + _channels_hint(array.shape, shape)
        )
    return array


def rows_first(value: Any, spec: TensorSpec) -> Any:
    """Return an array with the batch on its first axis, as a view of the data.

    - `value`: an array in the layout of the model's file.
    - `spec`: the input in this layout. If its first axis is the batch, or it has no rows, the value
      is returned itself.

    DataError: the shape does not fit.
    """
    axis, shape = spec.batch_axis, spec.shape
    if not axis or shape is None:
        return value
    array = value if isinstance(value, np.ndarray) else as_array(value, spec)
    sizes = array.shape
    if len(sizes) != len(shape) or not _has_shape(
        (sizes[axis], *sizes[:axis], *sizes[axis + 1 :]), (spec.rows_first().shape or ())
    ):
        raise DataError(f"{spec} got an array of shape {sizes}. Axis {axis} is the batch.")
    return np.moveaxis(array, axis, 0)


def whole_array(array: Array, spec: TensorSpec) -> Array:
    """Return an array of an input without rows. DataError: its shape does not fit."""
    if spec.shape == ():
        return in_shape(array, spec)
    if not spec.accepts(array.shape):
        raise DataError(
            f"{spec} got an array of shape {array.shape}. This input has no batch axis, so each"
            " batch gets the whole array."
        )
    return array


def _has_shape(sizes: Sequence[int], shape: Sequence[int | str | None]) -> bool:
    """Return whether an array of these sizes has the input's shape, apart from the batch."""
    return len(sizes) == len(shape) and not any(
        isinstance(expected, int) and expected != size
        for expected, size in zip(shape[1:], sizes[1:])
    )


def _channels_hint(sizes: Sequence[int], shape: Sequence[int | str | None]) -> str:
    """Return a hint for images whose channels are on another axis than in the model."""
    if len(sizes) != 4:
        return ""
    rows, a, b, c = sizes
    for last, moved in ((True, (rows, b, c, a)), (False, (rows, c, a, b))):
        if _has_shape(moved, shape):
            axes = (0, 2, 3, 1) if last else (0, 3, 1, 2)
            return (
                f" The model expects channels {'last' if last else 'first'}. Pass"
                f" x.transpose{axes}, or use ImageFolder(..., channels_last={last})."
            )
    return ""


def in_dtype(array: Array, spec: TensorSpec) -> Array:
    """Return the array in the input's element type. DataError: more than precision is lost."""
    dtype = spec.dtype
    if array.dtype == dtype:
        return array
    if dtype.kind not in "biu":
        try:
            with np.errstate(over="raise"):
                return array.astype(dtype)
        except FloatingPointError:
            raise DataError(
                f"{spec} got {array.dtype} values outside the range of {dtype}."
            ) from None
    with np.errstate(invalid="ignore"):
        cast = array.astype(dtype)
    if array.dtype.kind != "b" and not np.array_equal(cast, array):
        raise DataError(
            f"{spec} got {array.dtype} values that {dtype} cannot represent, such as"
            f" {array[cast != array].flat[0]}."
        )
    return cast


def in_c_order(array: Array) -> Array:
    """Return the array in C order, aligned.

    `np.take` copies an array of any other layout as a whole, for every batch.
    """
    if array.flags.c_contiguous and array.flags.aligned:
        return array
    return np.require(array, requirements=["C", "A"])


def narrows(dtype: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Return whether a cast from `dtype` to `target` reduces the precision of floats."""
    return is_float(dtype) and is_float(target) and dtype.itemsize > target.itemsize


def is_float(dtype: np.dtype[Any]) -> bool:
    """Return whether the type is a float type, including bfloat16 and similar types."""
    # bfloat16 and similar types have kind "V", as int4 has, and reading a dtype's name is slow.
    return dtype.kind == "f" or (dtype.kind == "V" and "float" in dtype.name)
