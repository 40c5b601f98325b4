"""`to_float32`: a model in half precision as one in float32, which can be trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import onnx
from onnx import numpy_helper

from onnxfit.graph.subgraphs import subgraph_protos
from onnxfit.load.reading import ModelSource, load_model

__all__ = ["to_float32"]

HALF = frozenset({onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16})
# Attributes whose number is the element type of a result, or of a computation inside the operator.
ELEMENT_TYPES = frozenset(
    {"dtype", "output_datatype", "output_dtype", "softmax_precision", "stash_type", "to"}
)


def to_float32(model_onnx: ModelSource) -> onnx.ModelProto:
    """Return the model with float32 in the place of float16 and bfloat16.

    This changes the types of weights and constants, of inputs and outputs, and of values inside
    the model, its subgraphs and functions. Names, operators and numbers stay: float32 represents
    every number of both types. The outputs differ from those of the given model by the roundings
    that it makes and the new one does not. A Cast between the types copies its input. The new
    weights take twice the memory. A model without half precision is returned unchanged.

    A `Trainer` needs float32, because a small update is lost in a weight with 8 or 11 bits of
    precision (Micikevicius et al., 2018). `Trainer(..., precision="fp16")` or `"bf16"` computes in
    16 bits all the same, with weights in float32.

    - `model_onnx`: a path, bytes or an `onnx.ModelProto`, which is not changed.

    ModelError: the model cannot be read.

    >>> import onnx.parser, onnxfit  # the parser takes bits: 15360 is 1, and 16384 is 2
    >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    ...     g (float16[N, 2] x) => (float16[N, 1] y) <float16[2, 1] w = {15360, 16384}>
    ...     { y = MatMul(x, w) }''')
    >>> trainer = onnxfit.Trainer(to_float32(model), loss="mse")
    >>> trainer.get_weights()["w"].ravel()
    array([1., 2.], dtype=float32)
    """
    model = load_model(model_onnx)
    _widen_graph(model.graph)
    for function in model.functions:
        _widen_values(function.value_info)
        _widen_attributes(function.attribute_proto)
        _widen_nodes(function.node)
    return model


def _widen_graph(graph: onnx.GraphProto) -> None:
    _widen_values((*graph.input, *graph.output, *graph.value_info))
    _widen_tensors(graph.initializer)
    _widen_tensors(sparse.values for sparse in graph.sparse_initializer)
    _widen_nodes(graph.node)


def _widen_nodes(nodes: Iterable[onnx.NodeProto]) -> None:
    for node in nodes:
        _widen_attributes(node.attribute)


def _widen_attributes(attributes: Iterable[onnx.AttributeProto]) -> None:
    for attribute in attributes:
        if attribute.name in ELEMENT_TYPES and attribute.i in HALF:
            attribute.i = onnx.TensorProto.FLOAT
        _widen_tensors(_tensors_in(attribute))
        types = [attribute.tp] if attribute.HasField("tp") else []
        for type_ in (*types, *attribute.type_protos):
            _widen_type(type_)
        for body in subgraph_protos(attribute):
            _widen_graph(body)


def _tensors_in(attribute: onnx.AttributeProto) -> Iterator[onnx.TensorProto]:
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors
    if attribute.HasField("sparse_tensor"):
        yield attribute.sparse_tensor.values
    for sparse in attribute.sparse_tensors:
        yield sparse.values


def _widen_tensors(tensors: Iterable[onnx.TensorProto]) -> None:
    for tensor in tensors:
        if tensor.data_type in HALF:
            numbers = numpy_helper.to_array(tensor).astype(np.float32)
            tensor.ClearField("int32_data")
            tensor.raw_data = numbers.astype("<f4", copy=False).tobytes()
            tensor.data_type = onnx.TensorProto.FLOAT


def _widen_values(values: Iterable[onnx.ValueInfoProto]) -> None:
    for value in values:
        _widen_type(value.type)


def _widen_type(type_: onnx.TypeProto) -> None:
    """Change the element type in a type, which may be that of a sequence, an optional or a map."""
    kind = type_.WhichOneof("value")
    if kind in ("tensor_type", "sparse_tensor_type"):
        tensor = getattr(type_, kind)
        if tensor.elem_type in HALF:
            tensor.elem_type = onnx.TensorProto.FLOAT
    elif kind in ("sequence_type", "optional_type"):
        _widen_type(getattr(type_, kind).elem_type)
    elif kind == "map_type":
        _widen_type(type_.map_type.value_type)
