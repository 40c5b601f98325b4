"""The graphs of a training folder, for the host that runs them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import onnx

from onnxfit.errors import GradientError, SettingError, listed_names
from onnxfit.graph import names
from onnxfit.graph.spec import Dim, TensorSpec
from onnxfit.step.graphs import compact_train_graph, evaluate_graph, predict_graph
from onnxfit.step.recipe import Batch, Recipe
from onnxfit.step.update import NO_FUSED_WEIGHTS

TRAIN, EVALUATE, PREDICT, SCALARS = "train", "evaluate", "predict", "scalars"
GRAPHS = (TRAIN, EVALUATE, PREDICT)
TARGETS = ("onnxruntime",)


def step_graphs(
    recipe: Recipe, include: Collection[str], rows: int | None, sample_weight: bool
) -> dict[str, onnx.ModelProto]:
    """Return the graphs of a folder by name.

    - `include`: the names of the graphs.
    - `rows`: the rows of a batch in the training step; None for any number.
    - `sample_weight`: whether the losses have factors, an input with one for each row.

    Raises GradientError if the gradient needs the number of rows, SettingError for other sizes that
    are missing.
    """
    any_rows = batch_specs(recipe, None, sample_weight)
    graphs = {}
    if TRAIN in include:
        batch = any_rows if rows is None else batch_specs(recipe, rows, sample_weight)
        try:
            # Each weight by itself: a host that knew tensors of several weights would be longer.
            graphs[TRAIN] = compact_train_graph(recipe, batch, NO_FUSED_WEIGHTS)
        except GradientError as error:
            if rows is not None:
                raise
            raise GradientError(
                f"{error}\nThere is no training step for any size of batch. Give the number of"
                " rows: export_training(folder, batch_size=...)."
            ) from None
    if EVALUATE in include:
        graphs[EVALUATE] = evaluate_graph(recipe, any_rows)
    if PREDICT in include:
        graphs[PREDICT] = predict_graph(recipe, any_rows)
    return graphs


def batch_specs(recipe: Recipe, rows: int | None, sample_weight: bool) -> Batch:
    """Return the specs of a batch of so many rows, or of any number."""
    batch = dict(recipe.declared_batch)
    if sample_weight:
        spec = TensorSpec(names.SAMPLE_WEIGHT, np.dtype(np.float32), ("batch",))
        batch[names.SAMPLE_WEIGHT] = spec
    if rows is None:
        return batch
    symbols = {_first(spec.shape) for spec in recipe.inputs}
    sizes = {symbol: rows for symbol in symbols if isinstance(symbol, str)}
    fixed = {name: _with_sizes(spec, sizes, rows) for name, spec in batch.items()}
    _require_sizes(recipe, fixed, rows)
    return fixed


def _first(shape: tuple[Dim, ...] | None) -> Dim:
    return shape[0] if shape else None


def _with_sizes(spec: TensorSpec, sizes: Mapping[str, int], rows: int) -> TensorSpec:
    """Return the spec with numbers for the names in `sizes`, and `rows` for an open first size."""
    if not spec.shape:
        return spec
    shape = [sizes.get(size, size) if isinstance(size, str) else size for size in spec.shape]
    if not isinstance(shape[0], int):
        shape[0] = rows
    return TensorSpec(spec.name, spec.dtype, tuple(shape))


def _require_sizes(recipe: Recipe, batch: Batch, rows: int) -> None:
    """Raise SettingError if an input of the model has another number of rows, or open sizes."""
    for name in [spec.name for spec in recipe.inputs]:
        spec = batch[name]
        if spec.shape and spec.shape[0] != rows:
            raise SettingError(
                f"batch_size={rows} is not the model's: input {spec} has another batch dimension."
                " onnxfit.dynamic_batch(model) makes it a name."
            )
        open_sizes = [size for size in spec.shape or (None,) if not isinstance(size, int)]
        if spec.shape != () and open_sizes:
            raise SettingError(
                f"batch_size={rows} fixes the rows alone, and input {spec} has other sizes that are"
                f" no numbers ({listed_names(open_sizes)}): leave batch_size out, or export the"
                " model with these sizes."
            )
