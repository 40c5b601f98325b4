"""Prepare a float model for onnxruntime's quantizer, and clean up what the quantizer returns."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx
import onnx.shape_inference

from onnxfit.checks import matching_names, name_list
from onnxfit.errors import ModelError, UnsupportedError, listed_names
from onnxfit.graph import protos
from onnxfit.graph.index import NodeIndex, required_inputs
from onnxfit.graph.subgraphs import nodes_of
from onnxfit.graph.tensors import is_large
from onnxfit.load.completion import opset_of
from onnxfit.load.normalize import inline_functions
from onnxfit.load.operator_versions import lower_opset, set_opset
from onnxfit.load.opset import IR_VERSION, OPSET, convert_opset
from onnxfit.load.reading import ModelSource, load_model
from onnxfit.runtime.quantizer import optimize
from onnxfit.tools.quantization.weight_axes import LAYERS
from onnxfit.trainable.quantized.operators import OPSET_OF_CHANNELS, is_conversion, is_quantized

OPSET_OF_FOUR_BITS = 21  # the first opset with integers of 4 bits
# In a later opset onnxruntime 1.19 turns a MatMul into a QLinearMatMul without a kernel.
LAST_OPSET_OF_BYTES = 20
FOUR_BITS = ("int4", "uint4")


def load_float_model(source: ModelSource, weights: str) -> onnx.ModelProto:
    """Return the model in memory, in an opset that supports the quantized model.

    - `source`: a path, bytes or a ModelProto, which stays unchanged.
    - `weights`: the integer type of the weights.

    ModelError: the model cannot be read or is already quantized. UnsupportedError: the model is
    above 2 GB.
    """
    model = load_model(source)
    quantized = [node for node in nodes_of(model.graph) if is_quantized(node)]
    if quantized:
        node = quantized[0]
        raise ModelError(
            f"The model is already quantized: it contains {node.op_type} {node.name!r}. Pass the"
            " float model, or convert this one with onnxfit.dequantize(model)."
        )
    if is_large(model):
        raise UnsupportedError(
            "The model is larger than 2 GB, which onnxruntime's quantizer cannot read. Quantize it"
            " in parts, or with another tool."
        )
    _remove_initializers_from_inputs(model)
    model = inline_functions(model)
    _require_float32(model)
    needed_opset = OPSET_OF_FOUR_BITS if weights in FOUR_BITS else OPSET_OF_CHANNELS
    if not needed_opset <= (opset_of(model) or 0) <= OPSET:
        model = convert_opset(model)
    if weights not in FOUR_BITS:
        _lower_opset(model)
    needed = onnx.helper.find_min_ir_version_for(list(model.opset_import), ignore_unknown=True)
    model.ir_version = min(max(model.ir_version, needed), IR_VERSION)
    return model


def _require_float32(model: onnx.ModelProto) -> None:
    """Raise UnsupportedError for a layer whose weight is float16 or float64."""
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    for node in model.graph.node:
        for name in node.input if node.op_type in LAYERS else ():
            if types.get(name, onnx.TensorProto.FLOAT) != onnx.TensorProto.FLOAT:
                kind = onnx.TensorProto.DataType.Name(types[name]).lower()
                raise UnsupportedError(
                    f"The weight {name!r} is {kind}, but onnxruntime quantizes only float32."
                    " Convert the model to float32 first."
                )


def _lower_opset(model: onnx.ModelProto) -> None:
    """Lower the opset to 20, or to the oldest one after it that has the model's operators."""
    opset = opset_of(model) or 0
    typed = onnx.shape_inference.infer_shapes(model)
    lower_opset(typed, opset, LAST_OPSET_OF_BYTES)
    set_opset(model, opset_of(typed) or 0)


def _remove_initializers_from_inputs(model: onnx.ModelProto) -> None:
    """Make the weights constants, in place. Old files also list them as inputs."""
    inputs = list(required_inputs(model.graph).values())
    del model.graph.input[:]
    model.graph.input.extend(inputs)


def optimize_float_model(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model after onnxruntime's optimizations, with unique node names."""
    optimized = optimize(model)
    used: set[str] = set()
    for node in optimized.graph.node:
        node.name = protos.unique_name(node.name or f"{node.output[0]}/{node.op_type}", used)
    return optimized


def excluded_nodes(
    model: onnx.ModelProto, optimized: onnx.ModelProto, exclude: Sequence[str] | str
) -> set[str]:
    """Return the nodes of the optimized model that stay in float.

    - `exclude`: names or fnmatch patterns of nodes or initializers of `model`.

    UnknownNameError: a pattern matches nothing.
    """
    nodes = {node.name: node for node in model.graph.node if node.name}
    tensors = {tensor.name for tensor in model.graph.initializer}
    known = [*nodes, *tensors]
    matched: set[str] = set()
    for pattern in name_list("exclude", exclude):
        matched |= matching_names(pattern, known, "node or weight")
    selected = [
        node
        for node in model.graph.node
        if node.name in matched or not matched.isdisjoint(tensors.intersection(node.input))
    ]
    return _surviving(selected, model, optimized)


def _surviving(
    nodes: list[onnx.NodeProto], model: onnx.ModelProto, optimized: onnx.ModelProto
) -> set[str]:
    """Return the nodes of the optimized model that correspond to nodes of the model.

    A node that was fused with the next ones, such as a convolution with its BatchNormalization,
    corresponds to the node that computes their result.
    """
    makers = NodeIndex(optimized.graph.node).producers
    readers = NodeIndex(model.graph.node).readers
    surviving = set()
    waiting = [name for node in nodes for name in node.output]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in makers:
            surviving.add(makers[name].name)
        elif name not in seen:
            seen.add(name)
            waiting += [output for node in readers[name] for output in node.output]
    return surviving


def cut_outputs(optimized: onnx.ModelProto) -> set[str]:
    """Return each Relu and Clip that reads an output of the model.

    onnxruntime's quantizer gives their input the range of their result, and would clip the output.
    """
    outputs = {value.name for value in optimized.graph.output}
    return {
        node.name
        for node in optimized.graph.node
        if node.op_type in ("Clip", "Relu") and node.input[0] in outputs
    }


def products_of_activations(optimized: onnx.ModelProto) -> set[str]:
    """Return the MatMuls of two activations, as in attention."""
    constants = {tensor.name for tensor in optimized.graph.initializer}
    return {
        node.name
        for node in optimized.graph.node
        if node.op_type == "MatMul" and constants.isdisjoint(node.input)
    }


def read_floats(quantized: onnx.ModelProto, names: Collection[str]) -> None:
    """Let the named nodes read activations before rounding, in place.

    Otherwise onnxruntime would compute these nodes with integers.
    """
    makers = NodeIndex(quantized.graph.node).producers
    for node in quantized.graph.node:
        for i, name in enumerate(node.input if node.name in names else ()):
            rounding = makers.get(makers[name].input[0]) if name in makers else None
            if rounding is not None and is_conversion(makers[name]) and is_conversion(rounding):
                node.input[i] = rounding.input[0]


def read_and_computed(
    optimized: onnx.ModelProto, operators: Collection[str], excluded: Collection[str]
) -> set[str]:
    """Return the values that nodes of some operators, except the excluded ones, read or compute."""
    return {
        name
        for node in optimized.graph.node
        if node.op_type in operators and node.name not in excluded
        for name in (*node.input, *node.output)
    }


def restore_declarations(quantized: onnx.ModelProto, model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the quantized model with the inputs, outputs and metadata of the model."""
    restored = onnx.ModelProto()
    restored.CopyFrom(quantized)
    del restored.graph.input[:]
    restored.graph.input.extend(model.graph.input)
    del restored.graph.output[:]
    restored.graph.output.extend(model.graph.output)
    restored.graph.name = model.graph.name
    restored.graph.doc_string = model.graph.doc_string
    restored.ir_version = model.ir_version
    restored.producer_name = model.producer_name
    restored.producer_version = model.producer_version
    restored.domain = model.domain
    restored.model_version = model.model_version
    restored.doc_string = model.doc_string
    del restored.metadata_props[:]
    restored.metadata_props.extend(model.metadata_props)
    domains = {node.domain for node in nodes_of(restored.graph)} | {""}
    imports = [entry for entry in restored.opset_import if entry.domain in domains]
    del restored.opset_import[:]
    restored.opset_import.extend(imports)
    return restored


def require_quantizable(
    optimized: onnx.ModelProto, operators: Sequence[str], excluded: set[str]
) -> None:
    """Raise ModelError unless a node is left that can be quantized."""
    nodes = [node for node in optimized.graph.node if node.op_type in operators]
    if any(node.name not in excluded for node in nodes):
        return
    kinds = listed_names(sorted({node.op_type for node in optimized.graph.node})) or "nothing"
    reason = "exclude= leaves no node to quantize" if nodes else f"it computes {kinds}"
    raise ModelError(
        f"The model has nothing to quantize: {reason}. Expected layers with weights, such as Conv,"
        " Gemm and MatMul."
    )
