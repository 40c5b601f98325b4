"""Compare a model with a dynamic batch size with the original, row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from onnxfit.runtime.compilation import compile_model
from onnxfit.runtime.device import Device
from onnxfit.tools.editing.batch_axes import BatchAxis

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


@dataclass(frozen=True)
class Trial:
    """Random rows, and what the original model computes for them.

    - `run`: the original.
    - `shapes`: the shape of each input, with the batch of the file.
    - `axes`: the batch axis of each input that has one.
    - `rows`: the rows of the batch in the file.
    - `feeds`: the rows of several batches.
    - `chunks`: the results, for one batch of the file after the other.
    """

    run: ModelRun
    shapes: Mapping[str, tuple[int, ...]]
    axes: Mapping[str, int]
    rows: int
    feeds: Arrays
    chunks: Sequence[Arrays]

    def of(self, run: ModelRun) -> Trial:
        """Return the results of another model for the same rows."""
        starts = range(0, self.rows * len(self.chunks), self.rows)
        batches = [rows_of(self.feeds, self.axes, start, start + self.rows) for start in starts]
        return replace(self, run=run, chunks=[run(batch) for batch in batches])

    def found_axes(self, whole: Arrays) -> dict[str, BatchAxis | None]:
        """Return the batch axis of each result for all rows at once, as far as its sizes tell."""
        found: dict[str, BatchAxis | None] = {}
        for name, part in self.chunks[0].items():
            small, large = np.shape(part), np.shape(whole[name])
            grown = [i for i, sizes in enumerate(zip(small, large)) if sizes[0] != sizes[1]]
            if small == large:
                found[name] = None
            elif len(small) == len(large) and len(grown) == 1:
                found[name] = BatchAxis(grown[0])
        return found

    def differences(
        self, run: ModelRun, axes: Mapping[str, BatchAxis | None], factor: float = 1.0
    ) -> list[str]:
        """Return the results of a changed model that differ from the original's.

        - `run`: the changed model.
        - `axes`: the batch axis of each result, or None for a result that must be equal for all
          batches. A result that is not listed differs.
        - `factor`: times the tolerance.
        """
        whole, first = run(self.feeds), run(rows_of(self.feeds, self.axes, 0, 1))
        found = []
        for name, array in whole.items():
            parts = [np.asarray(chunk[name]) for chunk in self.chunks]
            origin = axes.get(name)
            if origin is not None and origin.is_new:
                parts = [np.expand_dims(part, origin.axis) for part in parts]
            if name not in axes:
                found.append(name)
            elif origin is None:
                if not all(is_close(np.asarray(array), part, factor) for part in parts):
                    found.append(name)
            elif not (
                is_close(np.asarray(array), _join_batches(parts, origin), factor)
                and is_close(np.asarray(first[name]), _row(parts[0], origin, self.rows), factor)
            ):
                found.append(name)
        return found


def accepts_any_batch(trial: Trial, axes: Mapping[str, BatchAxis | None] | None) -> bool:
    """Return whether the original computes several batches at once as it computes each.

    - `axes`: the batch axis of each output, or None if only the sizes of outputs tell.
    """
    try:
        whole = trial.run(trial.feeds)
        found = trial.found_axes(whole)
        if axes is None:  # merged axes have more entries than rows
            for name, origin in found.items():
                if origin and trial.chunks[0][name].shape[origin.axis] != trial.rows:
                    return False
        known = found if axes is None else {**found, **axes}
        outputs = [known.get(name) for name in trial.chunks[0]]
        return any(outputs) and not trial.differences(trial.run, known)
    except Exception:  # onnxruntime raises its own classes
        return False


def _join_batches(parts: Sequence[Array], origin: BatchAxis) -> Array:
    """Return the rows of several batches; their axis may have other axes merged before the rows."""
    split = [_split_axis(part, origin) for part in parts]
    shape = list(parts[0].shape)
    shape[origin.axis] *= len(parts)
    return np.concatenate(split, origin.axis + 1).reshape(shape)


def _row(part: Array, origin: BatchAxis, rows: int) -> Array:
    """Return the first row of a batch."""
    shape = list(part.shape)
    shape[origin.axis] //= rows
    split = _split_axis(part, origin)
    entries = range(split.shape[origin.axis + 1] // rows)
    return np.asarray(split.take(entries, origin.axis + 1)).reshape(shape)


def _split_axis(part: Array, origin: BatchAxis) -> Array:
    axis, outer = origin.axis, origin.outer
    sizes = part.shape
    return part.reshape(*sizes[:axis], outer, sizes[axis] // outer, *sizes[axis + 1 :])


def is_close(array: Array, expected: Array, factor: float = 1.0) -> bool:
    """Return whether two results agree, apart from rounding; `factor` times the tolerance."""
    if array.shape != expected.shape or array.dtype != expected.dtype:
        return False
    if array.dtype.kind in "OUSb":
        return bool((array == expected).all())
    if array.dtype.kind in "iu":
        return bool((array == expected).all())
    tolerance = factor * TOLERANCES.get(array.dtype.itemsize, 2e-2)
    a, b = array.astype(np.float64), expected.astype(np.float64)
    finite = b[np.isfinite(b)]
    scale = float(np.abs(finite).max()) if finite.size else 0.0
    return bool(np.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True))
