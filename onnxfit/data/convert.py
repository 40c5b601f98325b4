"""One array: read as numbers, then given the shape, type and layout of the input it is for, or
refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxfit.data.batch import Array
from onnxfit.errors import DataError
from onnxfit.graph.spec import TensorSpec


def as_array(value: Any, place: object) -> Array:
    """An array of numbers or booleans. DataError for anything else."""
    if isinstance(value, np.ma.MaskedArray):
        raise DataError(
            f"{place} is a masked array, whose mask would be lost: fill it first, array.filled(0)."
        )
    if hasattr(value, "toarray"):
        raise DataError(
            f"{place} is sparse ({type(value).__name__}), and models take dense arrays: pass"
            " .toarray()."
        )
    try:
        array = np.asarray(value)
    except Exception as error:  # numpy, torch and others each raise their own
        raise DataError(
            f"{place} cannot become one array (rows of different lengths?): {error}"
        ) from error
    # V: bfloat16 and its like
    if array.dtype.kind in "biuf" or (array.dtype.kind == "V" and array.dtype.type is not np.void):
        return array
    hint = {"O": "objects", "V": "records", "c": "complex", "M": "dates", "m": "times"}.get(
        array.dtype.kind, "text"
    )
    raise DataError(
        f"{place} has element type {array.dtype} ({hint}): pass numbers; np.unique(...,"
        " return_inverse=True)[1] numbers classes."
    )


def in_shape(array: Array, spec: TensorSpec) -> Array:
    """The array with the rank of the input; the batch dimension is the caller's."""
    shape = spec.shape
    if shape is None:
        return array
    if not shape:
        if array.size != 1:
            raise DataError(f"{spec} is a single number, got an array of shape {array.shape}.")
        return array.reshape(())
    if array.ndim and not len(array):
        return array  # no rows: that is the error to report
    if array.ndim == len(shape) - 1 and array.ndim and shape[-1] == 1:
        array = array[..., None]
    if array.ndim != len(shape) or any(
        isinstance(d, int) and d != s for d, s in zip(shape[1:], array.shape[1:])
    ):
        raise DataError(
            f"{spec} got an array of shape {array.shape}; the first dimension is the batch."
        )
    return array


def in_dtype(array: Array, spec: TensorSpec) -> Array:
    """The array in the input's element type; what loses more than precision is a DataError."""
    dtype = spec.dtype
    if array.dtype == dtype:
        return array
    if dtype.kind not in "biu":
        try:
            with np.errstate(over="raise"):
                return array.astype(dtype)
        except FloatingPointError:
            raise DataError(
                f"{spec} got {array.dtype} values beyond the range of {dtype}."
            ) from None
    with np.errstate(invalid="ignore"):
        cast = array.astype(dtype)
    if array.dtype.kind != "b" and not np.array_equal(cast, array):
        raise DataError(
            f"{spec} got {array.dtype} values that {dtype} cannot hold, such as"
            f" {array[cast != array].flat[0]}."
        )
    return cast


def in_c_order(array: Array) -> Array:
    """The array in the memory layout that np.take reads; any other it would copy as a whole, for
    every batch.
    """
    return (
        array
        if array.flags.c_contiguous and array.flags.aligned
        else np.require(array, requirements=["C", "A"])
    )


def narrows(given: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    return is_float(given) and is_float(wanted) and given.itemsize > wanted.itemsize


def is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "fV"
