"""Complete parts of a file that onnxruntime accepts as missing, but ONNX's checker does not."""

from __future__ import annotations

from collections.abc import Iterable

import onnx
import onnx.shape_inference
import onnx_ir as ir

from onnxfit.graph.inference import infer_outputs
from onnxfit.graph.replacement import replace_nodes
from onnxfit.graph.subgraphs import nodes_of, read_by

MICROSOFT = "com.microsoft"
FIRST_IR_WITH_OWN_INITIALIZERS = 4  # before, every initializer was also an input
# Operators of ONNX's own domain that onnxruntime defines, and its optimizer writes; ONNX has them
# only from some opset on, or not at all.
RUNTIME_OPERATORS: dict[str, int | None] = {
    "LayerNormalization": 17,
    "SimplifiedLayerNormalization": None,
}


def complete(model: onnx.ModelProto) -> None:
    """Complete a model in place: names, imports, the order of nodes, and types of its outputs.

    Types and shapes that cannot be inferred stay missing.
    """
    model.graph.name = model.graph.name or "graph"
    _use_one_name_of_onnx(model)
    if any(node.domain == MICROSOFT for node in nodes_of(model.graph)):
        import_domain(model)
    initializers = {tensor.name for tensor in model.graph.initializer}
    own = initializers.difference(value.name for value in model.graph.input)
    if own and model.ir_version == FIRST_IR_WITH_OWN_INITIALIZERS - 1:
        model.ir_version = FIRST_IR_WITH_OWN_INITIALIZERS
    _sort_nodes(model.graph)


def complete_outputs(model: onnx.ModelProto, small: onnx.ModelProto) -> None:
    """Give the outputs of a model the types and shapes that it does not declare, in place.

    `small` is a copy without large tensors, for ONNX's inference. It gets the same outputs.
    """
    incomplete = [value for value in model.graph.output if not _is_declared(value)]
    if not incomplete:
        return
    types = _inferred_types(small)
    for value in incomplete:
        inferred = types.get(value.name)
        if inferred is None:
            continue
        if value.type.WhichOneof("value") is None:
            value.type.CopyFrom(inferred)
        elif inferred.tensor_type.HasField("shape"):
            value.type.tensor_type.shape.CopyFrom(inferred.tensor_type.shape)
    del small.graph.output[:]
    small.graph.output.extend(model.graph.output)


def opset_of(model: onnx.ModelProto) -> int | None:
    """Return the version of ONNX's own operators in a model; None for a model without them."""
    return next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), None)


def checkable(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model, changed in place, with the shapes and domains that ONNX's checker needs."""
    for value in (*model.graph.input, *model.graph.output):
        if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape"):
            value.type.tensor_type.shape.SetInParent()
    move_runtime_operators(model)
    return model


def move_runtime_operators(model: onnx.ModelProto) -> list[str]:
    """Move operators that only onnxruntime defines to its own domain, in place.

    ONNX's checker and converter accept them there. Returns the first output of each.
    """
    version = opset_of(model)
    moved = []
    for node in nodes_of(model.graph):
        first = RUNTIME_OPERATORS.get(node.op_type, 0)
        if node.domain == "" and (first is None or (version is not None and version < first)):
            node.domain = MICROSOFT
            moved.append(node.output[0])
    if moved:
        import_domain(model)
    return moved


def restore_runtime_operators(model: onnx.ModelProto, moved: Iterable[str]) -> None:
    """Undo `move_runtime_operators`, in place."""
    outputs = set(moved)
    for node in nodes_of(model.graph) if outputs else ():
        if node.op_type in RUNTIME_OPERATORS and node.output[0] in outputs:
            node.domain = ""


def import_domain(model: onnx.ModelProto, domain: str = MICROSOFT, version: int = 1) -> None:
    """Import a domain of operators, in place, unless the model imports it."""
    if domain not in {entry.domain for entry in model.opset_import}:
        model.opset_import.add(domain=domain, version=version)


def _use_one_name_of_onnx(model: onnx.ModelProto) -> None:
    """Replace the domain "ai.onnx" by "", the other name of ONNX's own domain."""
    if not any(entry.domain == "ai.onnx" for entry in model.opset_import):
        return
    both = any(entry.domain == "" for entry in model.opset_import)
    for entry in [entry for entry in model.opset_import if entry.domain == "ai.onnx"]:
        if both:
            model.opset_import.remove(entry)
        else:
            entry.domain = ""
            both = True
    for node in nodes_of(model.graph):
        if node.domain == "ai.onnx":
            node.domain = ""


def _sort_nodes(graph: onnx.GraphProto) -> None:
    """Put every node after the nodes whose outputs it reads, in place.

    A sorted graph stays unchanged, and so does a graph with a cycle.
    """
    made = {name for node in graph.node for name in node.output if name}
    if _is_sorted(graph, made):
        return
    waiting = list(graph.node)
    ordered: list[onnx.NodeProto] = []
    done: set[str] = set()
    while waiting:
        ready = [node for node in waiting if made.intersection(read_by(node)) <= done]
        if not ready:
            return  # the checker reports the cycle
        ordered += ready
        done |= {name for node in ready for name in node.output}
        placed = set(map(id, ready))
        waiting = [node for node in waiting if id(node) not in placed]
    replace_nodes(graph, ordered)


def _is_sorted(graph: onnx.GraphProto, made: set[str]) -> bool:
    done: set[str] = set()
    for node in graph.node:
        if not made.intersection(node.input) <= done:
            return False
        done.update(node.output)
    return True


def _is_declared(value: onnx.ValueInfoProto) -> bool:
    kind = value.type.WhichOneof("value")
    return kind is not None and (kind != "tensor_type" or value.type.tensor_type.HasField("shape"))


def _inferred_types(model: onnx.ModelProto) -> dict[str, onnx.TypeProto]:
    """Return the types of outputs by ONNX's inference or, if it fails, by `infer_outputs`."""
    moved = move_runtime_operators(model)
    try:
        proto = onnx.shape_inference.infer_shapes(model)
        restore_runtime_operators(proto, moved)
        work = ir.from_proto(proto)
    # The checker reports any error of the model better.
    except Exception:
        return {}
    for node in work.graph:
        if any(v.type is None or v.shape is None for v in node.outputs if v.name):
            try:
                infer_outputs(work.graph, node)
            except ValueError:
                continue
    return {
        value.name or "": ir.serde.serialize_value(value).type
        for value in work.graph.outputs
        if value.type is not None
    }
