"""`add_biases`: a bias for each layer whose zero bias the exporter dropped."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import onnx_ir as ir

from onnxfit.graph import protos
from onnxfit.graph.model import to_ir
from onnxfit.graph.records import FOLDED_FROM, KIND
from onnxfit.graph.sharing import MODULES, RESHAPING
from onnxfit.load.constant_nodes import lift_constants, lower_constants
from onnxfit.load.reading import ModelSource, load_model
from onnxfit.tools.editing.constants import Matrix, constant_elements, matrix_of, output_channels

__all__ = ["add_biases"]

LAYERS = {"Conv", "ConvTranspose", "Gemm", "MatMul"}
# torch's exporter notes the rewrites of a node; those that drop a zero bias have this in their name
REWRITES = "pkg.onnxscript.rewriter.rule_name"
DROPPED = "RemoveOptionalBias"
BIAS_INPUT = 2
SHIFTS = {"Add", "Sub"}


def add_biases(model_onnx: ModelSource) -> onnx.ModelProto:
    """Return the model with a bias of zeros for each layer whose bias the exporter dropped.

    torch's exporter drops the bias of a layer if it is zero, as many biases are before training. A
    bias that is not in the file cannot be trained. The returned model has the same outputs as the
    given model.

    If the exporter noted the layers whose bias it dropped, only these layers get a bias; other
    layers have none in torch. In a model without notes, each Conv, ConvTranspose and Gemm without a
    bias, and each MatMul with a weight matrix, gets one. (torch's older exporter writes no notes,
    but drops no bias.) In that case, a layer is not changed if a BatchNormalization follows, which
    cancels every bias, or an Add or Sub of a constant of this size, possibly after a Cast, a
    Transpose or a scale. Layers inside a function of the model are never changed.

    A bias is named after the weight, as in `fc.weight` and `fc.bias`, or after its layer. Layers
    that share a weight share the bias.

    - `model_onnx`: a path, bytes or an `onnx.ModelProto`, which is not changed.

    ModelError: the model cannot be read.

    >>> import onnx.parser
    >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    ...     g (float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {1, 2}> { y = MatMul(x, w) }''')
    >>> changed = add_biases(model)
    >>> [t.name for t in changed.graph.initializer], [n.op_type for n in changed.graph.node]
    (['w', 'y.bias'], ['MatMul', 'Add'])
    """
    model = load_model(model_onnx)
    lift_constants(model)
    work = to_ir(model)
    used = protos.used_names(model)
    biases: dict[object, str] = {}
    insertions = []
    locations = protos.node_locations(model, work)
    for node, weight, size in _layers_without_bias(list(locations)):
        location = locations[node]
        layer = (weight.initializer.name, node.op_type, size)
        if layer not in biases:
            biases[layer] = protos.unique_name(_bias_name(node, weight), used)
            zeros = np.zeros(size, weight.dtype.numpy())
            notes = weight.initializer.metadata_props
            parameter = True if KIND in notes or FOLDED_FROM in notes else None
            protos.add_initializer(model, biases[layer], zeros, parameter)
        if node.op_type == "MatMul":
            insertions.append((location, _sum_after(location.proto, biases[layer], used)))
        else:
            _set_bias(location.proto, biases[layer])
    protos.insert_nodes(insertions)
    return lower_constants(model)


def count_layers_without_bias(work: ir.Model) -> int:
    """Return the number of layers to which `add_biases` gives a bias."""
    return len(list(_layers_without_bias(list(ir.traversal.RecursiveGraphIterator(work.graph)))))


def _layers_without_bias(nodes: list[ir.Node]) -> Iterator[tuple[ir.Node, Matrix, int]]:
    """Yield the layers whose bias the exporter dropped, their weights, and sizes of the biases."""
    noted = any(MODULES in node.metadata_props for node in nodes)
    for node in nodes:
        if noted and DROPPED not in node.metadata_props.get(REWRITES, ""):
            continue
        weight, size = _layer_without_bias(node)
        if weight is None or size is None:
            continue
        if noted or _may_have_bias(node.outputs[0], size):
            yield node, weight, size


def _layer_without_bias(node: ir.Node) -> tuple[Matrix | None, int | None]:
    """Return the weight of a layer that has no bias, and the size of the missing bias."""
    if node.op_type not in LAYERS or node.domain not in ("", "ai.onnx"):
        return None, None
    if len(node.inputs) > BIAS_INPUT and node.inputs[BIAS_INPUT] is not None:
        return None, None
    weight = matrix_of(node.inputs[1])
    return weight, output_channels(node, weight.shape) if weight is not None else None


def _may_have_bias(value: ir.Value, size: int) -> bool:
    """Return whether no node after a layer already shifts each of its channels.

    An Add or a Sub of a constant of this size shifts the channels, and so does BatchNormalization.
    Keras's exporter writes Casts, Transposes and a scale before it.
    """
    for usage in value.uses():
        reader = usage.node
        if reader.op_type == "BatchNormalization":
            return False
        others = [v for i, v in enumerate(reader.inputs) if i != usage.idx]
        by_channel = any(constant_elements(v) == size for v in others)
        if reader.op_type in SHIFTS and by_channel:
            return False
        passes = reader.op_type in RESHAPING and usage.idx == 0
        scales = reader.op_type == "Mul" and by_channel
        if (passes or scales) and not _may_have_bias(reader.outputs[0], size):
            return False
    return True


def _bias_name(node: ir.Node, weight: Matrix) -> str:
    name = weight.initializer.name or ""
    layer = name.removesuffix(".weight")
    return f"{protos.layer_name(node) if layer == name else layer}.bias"


def _sum_after(matmul: onnx.NodeProto, bias: str, used: set[str]) -> onnx.NodeProto:
    """Return the Add of a bias to the product of a node, and rename that product."""
    result = matmul.output[0]
    matmul.output[0] = protos.unique_name(f"{result}/product", used)
    name = protos.unique_name(f"{matmul.name or result}/bias", used)
    return onnx.helper.make_node("Add", [matmul.output[0], bias], [result], name=name)


def _set_bias(layer: onnx.NodeProto, bias: str) -> None:
    del layer.input[BIAS_INPUT:]
    layer.input.append(bias)
    for i in reversed(range(len(layer.attribute))):
        if layer.attribute[i].name == "beta":  # the factor of a Gemm's bias, 1 by default
            del layer.attribute[i]
