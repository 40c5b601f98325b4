"""`merge` and `unmerge`: add adapters to the weights of a file, or remove them again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Union

import onnx

from onnxfit.checks import check_arguments
from onnxfit.errors import SettingError, listed_names
from onnxfit.graph.index import tensors_of
from onnxfit.graph.model import with_tensors
from onnxfit.graph.shared_tensors import array_of
from onnxfit.graph.tensors import initializer_arrays
from onnxfit.load.constant_nodes import lower_constants
from onnxfit.load.normalize import inline_functions
from onnxfit.load.reading import ModelSource, read_model
from onnxfit.trainable.adapters.adapted import adapt, listed
from onnxfit.trainable.adapters.adapter import Adapter, Array
from onnxfit.trainable.adapters.lora import LoRA
from onnxfit.trainable.adapters.targets import match_adapters

__all__ = ["merge", "unmerge"]

AdapterSource = Union[LoRA, Sequence[LoRA], str, "os.PathLike[str]"]


@check_arguments
def merge(model_onnx: ModelSource, adapter: AdapterSource) -> onnx.ModelProto:
    r"""Return the model with each weight $W$ that has an adapter replaced by $W + s A B$.

    - `model_onnx`: a path, bytes or an `onnx.ModelProto`, which stays unchanged.
    - `adapter`: the result of `LoRA.load`, or the path that it reads.

    The result is the same as that of `Trainer(model_onnx, adapters=adapter).export()`. With DoRA
    the columns are scaled as well. Integers cannot be changed by less than a step, so their
    adapters become nodes. CheckpointError: the path has no adapters. SettingError or
    UnknownNameError: the adapters belong to another model. A UserWarning reports adapters that were
    trained with weights of other values.

    >>> import numpy as np, onnx.parser, onnxfit, tempfile
    >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    ...     g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}>
    ...     { y = MatMul(x, w) }''')
    >>> trainer = onnxfit.Trainer(model, adapters=onnxfit.LoRA(rank=1, alpha=1))
    >>> trainer.set_weights({"w.lora_A": [[1], [0]], "w.lora_B": [[10, 20]]})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     loaded = onnxfit.LoRA.load(trainer.export_adapter(folder))
    >>> merged = merge(model, loaded)
    >>> onnx.numpy_helper.to_array(merged.graph.initializer[0]).tolist()
    [[11.0, 22.0], [3.0, 4.0]]
    >>> base = unmerge(merged, loaded)
    >>> onnx.numpy_helper.to_array(base.graph.initializer[0]).tolist()
    [[1.0, 2.0], [3.0, 4.0]]
    """
    file = read_model(model_onnx)
    form = adapt(file, _loaded(adapter), seed=0)
    names = [name for one in form.adapters for name in one.names]
    return lower_constants(form.export(initializer_arrays(form.model, names)).whole())


@check_arguments
def unmerge(model_onnx: ModelSource, adapter: AdapterSource) -> onnx.ModelProto:
    r"""Return a merged model without its adapter: each weight $W'$ becomes $W' - s A B$.

    - `model_onnx`: the merged model, as `merge` or `Trainer.export` wrote it.
    - `adapter`: the adapter that it was merged with: the result of `LoRA.load`, or the path.

    Each number differs from the base's by less than the rounding of $W'$ and of itself, at most $6
    \cdot 10^{-8} (|W| + |W'|)$ in float32. Keep the base file if you need identical bits.
    SettingError: the file is the base itself; the adapter has DoRA, whose norms the merged weight
    does not store; or the weight consists of integers, which merging does not change.
    """
    file = read_model(model_onnx)
    model = inline_functions(file.proto)
    tensors = tensors_of(model.graph)
    matched = match_adapters(model, _loaded(adapter))
    for one in matched:
        _require_reversible(one)
    adapters = [one.initialized(0, tensors[one.weight.name]) for one in matched]
    base = [
        one.weight.module
        for one, _ in adapters
        if one.checksums and one.matches_base_weight(tensors[one.weight.name])
    ]
    if base:
        raise SettingError(
            f"This model is not merged with the adapter: the weights of {listed_names(base)} still"
            " have their values from before merging. Pass the merged model to unmerge."
        )
    arrays: dict[str, Array] = {}
    for one, matrices in adapters:
        weight = array_of(tensors[one.weight.name])
        arrays[one.weight.name] = one.merged(weight, {**matrices, one.b: -matrices[one.b]})
    return lower_constants(with_tensors(file.proto, arrays))


def _loaded(adapter: AdapterSource) -> list[LoRA]:
    """Return the adapters; SettingError for settings without matrices."""
    given = LoRA.load(adapter) if isinstance(adapter, (str, os.PathLike)) else adapter
    settings = listed(given)
    if any(one.matrices is None for one in settings):
        raise SettingError(
            "This adapter has settings but no matrices to merge. Pass the result of"
            " onnxfit.LoRA.load(path), or the path."
        )
    return settings


def _require_reversible(adapter: Adapter) -> None:
    """Raise SettingError for an adapter that cannot be removed from a merged weight."""
    name, problem = adapter.weight.name, ""
    if adapter.settings.dora:
        problem = f"DoRA divided the columns of {name!r} by norms that the file does not store"
    elif adapter.weight.is_packed:
        problem = f"{name!r} contains integers, whose adapters are separate nodes of the graph"
    if problem:
        raise SettingError(
            f"unmerge cannot remove this adapter: {problem}. Use a copy of the base model instead."
        )
