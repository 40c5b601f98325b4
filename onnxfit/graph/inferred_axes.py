"""The shapes of outputs in which ONNX's shape inference follows the batch from the inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx

from onnxfit.errors import ModelError
from onnxfit.graph.inference import sizes_of
from onnxfit.graph.model import inferred_model
from onnxfit.graph.reading import large_tensors_as_inputs
from onnxfit.graph.spec import Dim

BATCH = "onnxfit/batch"  # the name of the batch during the inference


def inferred_outputs(
    model: onnx.ModelProto, axes: Mapping[str, int], outputs: Collection[str]
) -> dict[str, tuple[Dim, ...]]:
    """Return output -> shape, with the size `BATCH` where the batch of the inputs arrives.

    The operators alone determine the shapes; declared shapes of these outputs are not read. An
    output whose number of axes stays unknown is left out.

    - `model`: the model, which stays unchanged.
    - `axes`: input -> axis of the batch, for all inputs with a batch.
    - `outputs`: names of outputs.
    """
    proto = large_tensors_as_inputs(model)
    graph = proto.graph
    del graph.value_info[:]  # they may have the batch of the exporter's example
    for value in graph.input:
        dims = value.type.tensor_type.shape.dim
        if value.name in axes and axes[value.name] < len(dims):
            dims[axes[value.name]].dim_param = BATCH
    for value in graph.output:
        if value.name in outputs:
            value.type.tensor_type.ClearField("shape")
    try:
        inferred = inferred_model(proto)
    except ModelError:
        return {}  # the recipe of the training reports it
    return {
        value.name or "": _known(sizes_of(value.shape))
        for value in inferred.graph.outputs
        if value.name in outputs and value.shape is not None
    }


def _known(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Return a shape without the names that the inference invents."""
    return tuple(size if isinstance(size, int) or size == BATCH else None for size in shape)
