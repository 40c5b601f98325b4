"""Write a model of a newer opset for the installed onnxruntime.

The model gets the oldest opset that has its operators, because onnxruntime has the most kernels
there: version 1.32 reads opset 28, but runs RoiAlign up to opset 21, and Swish in opset 24 only.
Operators that onnxruntime cannot run are replaced by their ONNX definitions, again and again, until
it can run every operator or no definition is left.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx.shape_inference
import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass

from onnxfit.errors import ModelError
from onnxfit.graph.bodies import Body, function_body
from onnxfit.graph.inference import find_schema
from onnxfit.graph.model import to_ir
from onnxfit.graph.subgraphs import nodes_of, subgraphs_of
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.load.operator_versions import Types, oldest_opset, set_opset, types_in
from onnxfit.load.runtime_support import has_kernel, newest_opset

PREVIEW = "ai.onnx.preview"  # ONNX's domain of operators that may still change


def use_supported_operators(
    model: onnx.ModelProto, opset: int, base: int, oldest: int
) -> onnx.ModelProto:
    """Return a model of `opset` in the oldest opset that has its operators, `oldest` or later.

    Without a replaced operator, it is the model itself, changed in place. Operators of the opset
    `base` are never replaced. ModelError: an operator is newer than the installed onnxruntime, and
    ONNX does not define it in older ones.
    """
    newest = newest_opset()
    node_names = {_key_of_node(node): node.name for node in nodes_of(model.graph)}
    typed = model
    without_definition: set[str] = set()
    while True:
        typed = onnx.shape_inference.infer_shapes(typed)
        types = dict(types_in(typed.graph))
        nodes = list(nodes_of(typed.graph))
        if any(_has_wrong_sizes(node, types) for node in nodes):
            _forget_zero_sizes(typed.graph)
        opsets = {_key_of_node(n): oldest_opset(n, opset, types, base) for n in nodes}
        needed = max((oldest, *opsets.values()))
        newer = {name for name, first in opsets.items() if first > base}
        too_new = {name for name, first in opsets.items() if first > newest}
        unsupported = too_new | _without_kernel(nodes, types, newer, base, min(needed, newest))
        unsupported -= without_definition
        if not unsupported:
            break
        model = typed = _with_definitions(typed, unsupported, without_definition)
    for node in nodes:
        name = _key_of_node(node)
        if name in too_new:
            raise ModelError(
                f"{node.op_type} {(node_names.get(name) or name)!r} needs opset {opsets[name]}, but"
                f" the installed onnxruntime reads opsets up to {newest}, and ONNX does not define"
                " the operator in older ones. Install a newer onnxruntime, or export the model"
                f" again with opset {newest}."
            )
    set_opset(model, needed)
    return model


def _key_of_node(node: onnx.NodeProto) -> str:
    """Return the first output of a node, whose name is unique in the model."""
    return next(filter(None, node.output), "")


def _without_kernel(
    nodes: Sequence[onnx.NodeProto], types: Types, newer: set[str], base: int, opset: int
) -> set[str]:
    """Return the nodes that cannot run in `opset`, or else all `newer` ones if they deny a kernel.

    A newer operator denies a kernel to a node whose operator has one in the opset `base` only.
    """
    found = {
        _key_of_node(node)
        for node in nodes
        if (
            (_key_of_node(node) in newer or node.domain == PREVIEW)
            and not has_kernel(node, types, opset)
        )
        or _has_wrong_sizes(node, types)
    }
    if found or not newer:
        return found
    changed = (n for n in nodes if _key_of_node(n) not in newer and _differs(n, opset, base))
    return newer if not all(has_kernel(node, types, opset) for node in changed) else set()


def _has_wrong_sizes(node: onnx.NodeProto, types: Types) -> bool:
    """Return whether ONNX infers sizes of 0: for an Attention that splits an unknown size in heads.

    Its definition has operators whose unknown sizes stay unknown.
    """
    if node.op_type != "Attention" or node.domain:
        return False
    shapes = [types[name].tensor_type.shape.dim for name in node.input[:3] if name in types]
    return any(len(dims) == 3 and not dims[2].HasField("dim_value") for dims in shapes)


def _forget_zero_sizes(graph: onnx.GraphProto) -> None:
    """Make sizes of 0 unknown, in place."""
    for value in (*graph.value_info, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_value") and dim.dim_value == 0:
                dim.ClearField("dim_value")


def _differs(node: onnx.NodeProto, opset: int, base: int) -> bool:
    """Return whether two opsets have different versions of a node's operator."""
    versions = [find_schema("", node.op_type, v) for v in (opset, base)] if not node.domain else []
    return len({schema.since_version for schema in versions if schema is not None}) > 1


def _with_definitions(
    model: onnx.ModelProto, names: set[str], without_definition: set[str]
) -> onnx.ModelProto:
    """Return the model with the named nodes replaced by the ONNX definitions of their operators.

    The names of those that have none are added to `without_definition`.
    """
    work = to_ir(model)
    NameFixPass()(work)
    _replace_operators(GraphBuilder(work.graph), names, without_definition)
    return ir.to_proto(work)


def _definition(node: ir.Node, graph: ir.Graph) -> Body | None:
    """Return the definition of a node in operators of older opsets; None if there is none."""
    if node.op_type == "Mod" and node.domain == "" and not node.attributes.get_int("fmod", 0):
        return lambda op: (_floor_mod(op, *map(op.wrap, filter(None, node.inputs))),)
    return function_body(node, graph)


def _floor_mod(op: GraphBuilder, x: Value, divisor: Value) -> Value:
    """Return x - floor(x / divisor) divisor, which has the sign of the divisor.

    Mod computes it from opset 28 on for floats, and has no definition in ONNX. The remainder of
    `fmod` has the sign of x, and is exact.
    """
    rest = op.Mod(x, divisor, fmod=1)
    has_other_sign = (rest < 0) != (divisor < 0)
    return op.Where(has_other_sign & (rest != 0), rest + divisor, rest)


def _replace_operators(op: GraphBuilder, names: set[str], without_definition: set[str]) -> None:
    for node in list(op.graph):
        name = next((v.name for v in node.outputs if v.name), "")
        body = _definition(node, op.graph) if name in names else None
        if body is not None:
            with op.replacing(node) as replace:
                replace(*body(op))
            continue
        if name in names:
            without_definition.add(name)
        for inner in subgraphs_of(node):
            _replace_operators(GraphBuilder(inner, outer=op), names, without_definition)
