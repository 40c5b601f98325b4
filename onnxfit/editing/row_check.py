"""Compare a model with a dynamic batch size with the original, row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from onnxfit.editing.batch_axes import BatchAxis
from onnxfit.runtime.compilation import compile_model
from onnxfit.runtime.device import Device

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]
CPU = Device("cpu", 0)
SEED = 0
# relative to the largest number of an output, by the bytes of an element
TOLERANCES = {2: 2e-2, 4: 1e-3, 8: 1e-6}


class ModelRun:
    """A model that onnxruntime runs on arrays.

    - `model`: the model.
    - `outputs`: names of values to return instead of the model's outputs.

    StepError: onnxruntime cannot compile the model.
    """

    def __init__(self, model: onnx.ModelProto, outputs: Sequence[str] | None = None) -> None:
        if outputs is not None:
            model = with_outputs(model, outputs)
        self._session = compile_model(model, CPU, None, "dynamic batch", uses_integers=True)
        self._names = [value.name for value in self._session.get_outputs()]

    def __call__(self, feeds: Arrays) -> dict[str, Array]:
        return dict(zip(self._names, self._session.run(self._names, dict(feeds))))


def with_outputs(model: onnx.ModelProto, outputs: Sequence[str]) -> onnx.ModelProto:
    """Return a copy of the model that returns the named values."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.output[:]
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    return copy


def random_rows(
    inputs: Sequence[ir.Value],
    shapes: Mapping[str, tuple[int, ...]],
    axes: Mapping[str, int],
    rows: int,
    max_integer: int,
) -> dict[str, Array]:
    """Return arrays for the inputs, with `rows` rows: normal floats, and small integers."""
    rng = np.random.default_rng(SEED)
    arrays = {}
    for value in inputs:
        name = value.name or ""
        shape = list(shapes[name])
        if name in axes:
            shape[axes[name]] = rows
        dtype = value.dtype.numpy() if value.dtype is not None else np.dtype(np.float32)
        if value.dtype == ir.DataType.STRING:
            arrays[name] = np.full(shape, "a", object)
        elif value.dtype is not None and value.dtype.is_floating_point():
            arrays[name] = rng.standard_normal(shape).astype(dtype)
        else:
            array = rng.integers(0, max_integer + 1, shape)
            if array.ndim > 1:
                array[..., 0] = max_integer  # a mask hides no whole row
            arrays[name] = array.astype(dtype)
    return arrays


def rows_of(arrays: Arrays, axes: Mapping[str, int], start: int, stop: int) -> dict[str, Array]:
    """Return the rows from `start` to `stop`."""
    rows = slice(start, stop)
    return {
        name: array[(slice(None),) * axes[name] + (rows,)] if name in axes else array
        for name, array in arrays.items()
    }


def different(
    names: Sequence[str],
    chunks: Sequence[Arrays],
    mended: Arrays,
    axes: Mapping[str, BatchAxis | None],
) -> list[str]:
    """Return the values that differ between a changed model and the original.

    - `names`: the values to compare.
    - `chunks`: the results of the original, for one batch of the file after the other.
    - `mended`: the results of the changed model for all these rows at once.
    - `axes`: the batch axis of each value. A value without one must be equal for all batches.
    """
    found = []
    for name in names:
        parts = [chunk[name] for chunk in chunks]
        origin = axes.get(name)
        if origin is None:
            expected = [np.asarray(part) for part in parts]
        elif origin.outer > 1:
            continue  # the rows are not contiguous
        else:
            expected = [np.concatenate(parts, origin.axis)]
        if not all(is_close(np.asarray(mended[name]), part) for part in expected):
            found.append(name)
    return found


def is_close(array: Array, expected: Array) -> bool:
    """Return whether two results agree, apart from rounding."""
    if array.shape != expected.shape or array.dtype != expected.dtype:
        return False
    if array.dtype.kind in "OUSb":
        return bool((array == expected).all())
    if array.dtype.kind in "iu":
        return bool((array == expected).all())
    tolerance = TOLERANCES.get(array.dtype.itemsize, 2e-2)
    a, b = array.astype(np.float64), expected.astype(np.float64)
    finite = b[np.isfinite(b)]
    scale = float(np.abs(finite).max()) if finite.size else 0.0
    return bool(np.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True))
