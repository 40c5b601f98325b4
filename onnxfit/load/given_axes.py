"""Batch axes that the user gives, checked against what the file says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnxfit.checks import is_integer, shortened
from onnxfit.errors import SettingError, UnknownNameError
from onnxfit.graph.spec import TensorSpec

Axes = Mapping[str, int | None]  # name -> axis, or None for a value without a batch


def axes_by_name(given: Any) -> dict[str, int | None]:
    """Return the argument `batch_axes` as a dict. SettingError: it is no mapping to axes."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(
        isinstance(name, str) and (axis is None or is_integer(axis)) for name, axis in given.items()
    ):
        raise SettingError(
            "batch_axes must map names of inputs and outputs to the axis of the batch, or to None"
            f" for a value without a batch, got {shortened(given)}."
        )
    return {name: None if axis is None else int(axis) for name, axis in given.items()}


def checked_axes(
    given: Axes, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> dict[str, int | None]:
    """Return the axes counted from the front. UnknownNameError or SettingError: one is missing."""
    specs = {spec.name: spec for spec in (*inputs, *outputs)}
    axes: dict[str, int | None] = {}
    for name, axis in given.items():
        if name not in specs:
            raise UnknownNameError("input or output of the model", name, specs)
        rank = specs[name].rank
        if axis is not None and axis != 0 and rank is None:
            raise SettingError(
                f"batch_axes has axis {axis} for {specs[name]}, whose number of axes is unknown."
                " Export the model with the shape of this value, or pass axis 0 or None."
            )
        if axis is not None and rank is not None and not -rank <= axis < rank:
            numbers = f"from {-rank} to {rank - 1}, or None" if rank else "None"
            raise SettingError(
                f"batch_axes has axis {axis} for {specs[name]}, which has {rank} axes. Pass"
                f" {numbers}."
            )
        axes[name] = axis if axis is None or rank is None else axis % rank
    return axes


def require_consistent(
    axes: Axes,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    batch: str | None,
    inferred: Mapping[str, int],
) -> None:
    """Raise SettingError for an axis that contradicts the file.

    - `inputs`: the inputs with their batch axes.
    - `batch`: the name of the size that counts rows, if one does.
    - `inferred`: output -> the axis that shape inference found.
    """
    specs = {spec.name: spec for spec in (*inputs, *outputs)}
    read = {spec.name for spec in inputs}
    for name, axis in axes.items():
        if name in inferred and inferred[name] != axis:
            problem = f"shape inference finds the batch on axis {inferred[name]}. Pass that axis"
        elif axis is not None:
            others = [spec for spec in inputs if spec.name != name]
            problem = _contradicts_axis(specs[name], axis, others, batch, is_input=name in read)
        elif name in read and batch is not None and batch in (specs[name].shape or ()):
            problem = f"its size {batch!r} is the batch. Pass its axis, or rename it in the file"
        else:
            continue
        if problem:
            place = "no axis" if axis is None else f"axis {axis}"
            raise SettingError(f"batch_axes has {place} for {specs[name]}, but {problem}.")


def _contradicts_axis(
    spec: TensorSpec, axis: int, others: Sequence[TensorSpec], batch: str | None, *, is_input: bool
) -> str:
    """Return what the file says against an axis; "" if nothing.

    - `others`: the other inputs.
    """
    shape = spec.shape or ()
    size = shape[axis] if shape else None
    if batch is not None and batch in shape and size != batch:
        where = f"the size {batch!r}, the batch, is on axis {shape.index(batch)}"
        return f"{where}. Pass that axis, or rename the size in the file"
    if isinstance(size, str) and batch is not None and not is_input:
        for other in others:
            if size != other.rows and size in (other.shape or ()):
                return f"{size!r} is a length of the input {other}. Pass the axis of the batch"
    for other in others:
        if isinstance(size, int) and isinstance(other.rows, int) and size != other.rows:
            where = f"the input {other} has {other.rows} rows, on axis {other.batch_axis}"
            return f"{where}. Pass axes of the same size"
    return ""
