"""`dequantize`: convert a quantized model to a float model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
import onnx_ir as ir

from onnxfit.checks import check_arguments
from onnxfit.errors import ModelError, UnsupportedError, listed_names
from onnxfit.graph.index import constant_of
from onnxfit.graph.model import to_ir
from onnxfit.graph.names import unused
from onnxfit.graph.subgraphs import nodes_of
from onnxfit.graph.values import values_of
from onnxfit.load.normalize import inline_functions
from onnxfit.load.reading import load_model
from onnxfit.tools.quantization.removed_activations import (
    NonNegativeValues,
    add_removed_activation,
)
from onnxfit.trainable.quantized.operators import (
    SUFFIX,
    computes_with_integers,
    is_conversion,
    is_dequantize,
    is_dynamic_quantize,
    is_quantize,
    is_text,
    misfit,
    parameters_of,
)
from onnxfit.trainable.quantized.parameters import Array
from onnxfit.trainable.quantized.qoperators import remaining_qoperators, to_qdq

__all__ = ["dequantize"]


@check_arguments
def dequantize(model: Any) -> onnx.ModelProto:
    """Return the float model with the values that a quantized model's integers represent.

    An integer weight $q$ with the scale $s$ and the zero point $z$ becomes the float weight
    $s (q - z)$ under its name before `quantize`, if that name can be determined. Pairs of a
    QuantizeLinear and a DequantizeLinear, which round activations, are removed. Inputs and outputs
    stay as they are. If only weights are quantized, the result computes the same as the quantized
    model.

    onnxruntime's quantizer removes a Relu, or a Clip from 0 to 6, if the range of integers clips
    the same numbers. `dequantize` adds it again.

    Operators that compute with integers, such as QLinearConv or the MatMulInteger of
    `quantize_dynamic`, become operators of floats. If other operators, such as MaxPool, read
    integers, the conversions around them stay.

    - `model`: a path, bytes or an `onnx.ModelProto`, which is not changed.

    ModelError: the model cannot be read or is not quantized. UnsupportedError: the model has an
    integer operator that cannot be converted.

    >>> import onnx.parser
    >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    ...     g (float[N, 1] x) => (float[N, 2] y)
    ...     <int8[1, 2] w_quantized = {4, -6}, float s = {0.5}, int8 z = {0}>
    ...     { w = DequantizeLinear(w_quantized, s, z) y = MatMul(x, w) }''')
    >>> floats = dequantize(model)
    >>> [node.op_type for node in floats.graph.node]
    ['MatMul']
    >>> onnx.numpy_helper.to_array(floats.graph.initializer[0])
    array([[ 2., -3.]], dtype=float32)
    """
    proto = to_qdq(inline_functions(load_model(model)))
    nodes = list(nodes_of(proto.graph))
    computing = [node for node in nodes if computes_with_integers(node)]
    integer = sorted({node.op_type for node in computing if not is_dynamic_quantize(node)})
    if integer:
        reasons = [f"{name}: {why}" for name, why in remaining_qoperators(proto).items()]
        raise UnsupportedError(
            "The model has integer operators that cannot be converted to float operators"
            f" ({listed_names(integer)}). {'; '.join(reasons[:1])}".rstrip()
        )
    if not any(map(is_conversion, nodes)):
        raise ModelError(
            "The model is not quantized: it has no QuantizeLinear and no DequantizeLinear."
        )
    work = to_ir(proto)
    weights = {}
    for graph in (work.graph, *work.graph.subgraphs()):
        weights.update(_dequantize_graph(graph))
    _remove_unused(work)
    _name_weights(work, weights)
    return ir.to_proto(work)


def _dequantize_graph(graph: ir.Graph) -> dict[ir.Value, str]:
    """Convert constants to floats, and remove pairs that round activations, in place.

    Return the new weights, each with the name that it should have.
    """
    non_negative = NonNegativeValues()
    known: dict[tuple[object, ...], ir.Value] = {}
    names = {}
    for node in list(graph):
        if not is_dequantize(node):
            non_negative.add_outputs(node)
            continue
        key = (*node.inputs, *(a.value for a in node.attributes.values()))
        if key not in known:
            array = _constant_floats(node)
            if array is not None:
                known[key] = _add_float_initializer(graph, node, array)
                names[known[key]] = _name_before(node)
        value = known.get(key) or _dynamically_rounded(node)
        if value is None:
            rounding = _rounding_before(node)
            if rounding is None:
                continue
            value = add_removed_activation(rounding, node, non_negative)
            assert value is not None
        _replace_output(node, value)
    return names


def _constant_floats(node: ir.Node) -> Array | None:
    """Return the output of a DequantizeLinear, if it is a constant.

    ModelError: a scale or a zero point has another shape or type.
    """
    array = constant_of(node.inputs[0])
    rounding = None if array is not None else _rounding_before(node)
    if rounding is not None:  # a weight as training in PyTorch stores it
        array = constant_of(rounding.inputs[0])
    if array is None:
        return None
    parameters = parameters_of(rounding or node)
    if parameters is None:
        return None
    if is_text(array) or not parameters.fits(array.shape):
        shapes = parameters.scale.shape, parameters.zero_point.shape
        raise misfit(
            node,
            f"its shapes are {shapes[0]} and {shapes[1]} along axis {parameters.axis}, and the"
            f" values are {array.dtype} of shape {array.shape}",
        )
    return parameters.dequantized(parameters.quantized(array) if rounding else array)


def _rounding_before(node: ir.Node) -> ir.Node | None:
    """Return the QuantizeLinear whose integers a DequantizeLinear reads, if there is one."""
    producer = node.inputs[0].producer() if node.inputs[0] is not None else None
    if producer is None or not is_quantize(producer):
        return None
    if producer.inputs[1:] == node.inputs[1:]:
        return producer
    before = parameters_of(producer)
    same = before is not None and before == parameters_of(node, before.element_type)
    return producer if same else None


def _dynamically_rounded(node: ir.Node) -> ir.Value | None:
    """Return the input of the DynamicQuantizeLinear whose outputs a DequantizeLinear reads.

    The range of a DynamicQuantizeLinear has all numbers of its input, so it clips none.
    """
    producer = node.inputs[0].producer() if node.inputs[0] is not None else None
    if producer is None or not is_dynamic_quantize(producer) or not producer.inputs:
        return None
    return producer.inputs[0] if tuple(node.inputs) == tuple(producer.outputs) else None


def _add_float_initializer(graph: ir.Graph, node: ir.Node, array: Array) -> ir.Value:
    """Add an initializer with the float output of a DequantizeLinear."""
    output = node.outputs[0]
    name = f"{output.name}/floats"
    value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
    value.dtype, value.shape = ir.DataType.from_numpy(array.dtype), ir.Shape(array.shape)
    graph.register_initializer(value)
    return value


def _name_before(node: ir.Node) -> str:
    """Return the name of a weight before quantization, if it can be determined."""
    integers = node.inputs[0]
    assert integers is not None
    rounding = integers.producer()
    if rounding is not None and is_quantize(rounding) and rounding.inputs[0] is not None:
        return rounding.inputs[0].name or ""
    return (integers.name or "").removesuffix(SUFFIX)


def _replace_output(node: ir.Node, value: ir.Value) -> None:
    """Replace all uses of the output of a DequantizeLinear by another value."""
    output = node.outputs[0]
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    if not output.is_graph_output():
        output.replace_all_uses_with(value)
        return
    producer = value.producer()
    if producer is None or value.is_graph_output() or producer.graph is not graph:
        identity = ir.node("Identity", [value], outputs=[ir.Value(name=output.name)])
        graph.insert_after(node, identity)
        value = identity.outputs[0]
    name, output.name = output.name, f"{output.name}/rounded"
    value.name, value.type, value.shape = name, output.type, output.shape
    output.replace_all_uses_with(value, replace_graph_outputs=True)


def _remove_unused(model: ir.Model) -> None:
    """Remove unused conversions, then the constants that only they read."""
    constants: dict[ir.Value, None] = {}
    for node in reversed(list(ir.traversal.RecursiveGraphIterator(model.graph))):
        is_left = any(v.uses() or v.is_graph_output() for v in node.outputs)
        if is_left or not (is_conversion(node) or is_dynamic_quantize(node)):
            continue
        constants.update((value, None) for value in node.inputs if value is not None)
        assert node.graph is not None
        node.graph.remove(node, safe=True)
    for value in constants:
        producer, graph = value.producer(), value.graph
        if value.uses() or value.is_graph_output() or graph is None:
            continue
        if producer is not None and producer.op_type == "Constant":
            graph.remove(producer, safe=True)
        elif value.is_initializer():
            graph.initializers.pop(value.name or "")
            if value.is_graph_input():
                graph.inputs.remove(value)


def _name_weights(model: ir.Model, weights: Mapping[ir.Value, str]) -> None:
    """Give the new weights their names, with a number appended to a name in use."""
    graphs = (model.graph, *model.graph.subgraphs())
    used = {name for graph in graphs for name in values_of(graph)} - {v.name for v in weights}
    for value, name in weights.items():
        value.name = unused(name, used.__contains__)
        used.add(value.name)
