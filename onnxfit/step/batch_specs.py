"""The types and sizes of a batch, from a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from onnxfit.errors import SettingError, listed_names
from onnxfit.graph import names
from onnxfit.graph.spec import Dim, TensorSpec
from onnxfit.step.recipe import Batch, Recipe


def batch_specs(recipe: Recipe, rows: int | None, sample_weight: bool) -> Batch:
    """Return the specs of a batch of so many rows, or of any number."""
    batch = dict(recipe.declared_batch)
    if sample_weight:
        first = [_first(spec.shape) for spec in recipe.inputs if spec.shape and spec.has_rows]
        shape = (first[0] or "batch",) if first else ("batch",)
        batch[names.SAMPLE_WEIGHT] = TensorSpec(names.SAMPLE_WEIGHT, np.dtype(np.float32), shape)
    if rows is None:
        return batch
    symbols = {_first(spec.shape) for spec in recipe.inputs if spec.has_rows}
    sizes = {symbol: rows for symbol in symbols if isinstance(symbol, str)}
    fixed = {name: _with_sizes(spec, sizes, rows) for name, spec in batch.items()}
    _require_sizes(recipe, fixed, rows)
    return fixed


def fixed_rows(recipe: Recipe) -> int:
    """Return the number of rows that the inputs of the model declare.

    SettingError: they declare none.
    """
    sizes = {_first(spec.shape) for spec in recipe.inputs if spec.has_rows}
    (rows,) = sizes if len(sizes) == 1 else (None,)
    if not isinstance(rows, int):
        raise SettingError(
            "target='npu' needs a fixed batch size, but the inputs of the model declare none. Pass"
            " the number of rows: export_training(folder, target='npu', batch_size=...)."
        )
    return rows


def _first(shape: tuple[Dim, ...] | None) -> Dim:
    return shape[0] if shape else None


def _with_sizes(spec: TensorSpec, sizes: Mapping[str, int], rows: int) -> TensorSpec:
    """Return the spec with numbers for the names in `sizes`, and `rows` for an open first size."""
    if not spec.shape:
        return spec
    shape = [sizes.get(size, size) if isinstance(size, str) else size for size in spec.shape]
    if spec.has_rows and not isinstance(shape[0], int):
        shape[0] = rows
    return replace(spec, shape=tuple(shape))


def _require_sizes(recipe: Recipe, batch: Batch, rows: int) -> None:
    """Raise SettingError if an input of the model has another number of rows, or open sizes."""
    for name in [spec.name for spec in recipe.inputs]:
        spec = batch[name]
        if spec.shape and spec.has_rows and spec.shape[0] != rows:
            raise SettingError(
                f"batch_size={rows} does not fit the model: input {spec} has a fixed batch"
                " dimension. Pass its size, or use onnxfit.dynamic_batch(model)."
            )
        open_sizes = [size for size in spec.shape or (None,) if not isinstance(size, int)]
        if spec.shape != () and open_sizes:
            raise SettingError(
                f"batch_size={rows} fixes only the number of rows, but input {spec} has other"
                f" dynamic sizes ({listed_names(open_sizes)}). Remove batch_size, or export the"
                " model with fixed sizes."
            )
