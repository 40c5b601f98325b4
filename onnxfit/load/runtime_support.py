"""Opsets and operators that the installed onnxruntime supports, found by asking it.

No list of versions would do: onnxruntime 1.32 reads opset 28, but has no kernel for RoiAlign from
opset 22 on, and runs Swish in opset 24 only. Each question is a session of one node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

import onnx

from onnxfit.graph.subgraphs import subgraph_protos

FIRST_OPSET_ASKED = 21  # every supported onnxruntime reads it
IR_VERSION_ASKED = 8
NO_OPERATOR = ("is not a registered function/op", "No Op registered for")  # in an error's text


@cache
def newest_opset() -> int:
    """Return the newest opset that both the installed onnx and the installed onnxruntime read."""
    newest = onnx.defs.onnx_opset_version()
    node = onnx.helper.make_node("Relu", ["x"], ["y"])  # the same in all these opsets
    types = {"x": onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, [1])}
    candidates = range(newest, FIRST_OPSET_ASKED, -1)
    return next((v for v in candidates if not _error(node, types, v)), FIRST_OPSET_ASKED)


def has_kernel(node: onnx.NodeProto, types: Mapping[str, onnx.TypeProto], opset: int) -> bool:
    """Return whether onnxruntime can run a node of `opset` on the CPU.

    - `types`: the types of the node's inputs. Without them, the answer is True.

    If, Loop and Scan, whose subgraphs may read other values, count as runnable. Optional subgraphs
    of other operators are left out.
    """
    if any(name and name not in types for name in node.input):
        return True
    bodies = [attribute for attribute in node.attribute if subgraph_protos(attribute)]
    if bodies and not node.domain:
        return True
    alone = onnx.NodeProto()
    alone.CopyFrom(node)
    renamed = {name: f"i{i}" for i, name in enumerate(dict.fromkeys(filter(None, node.input)))}
    del alone.input[:], alone.output[:], alone.metadata_props[:]
    alone.input.extend(renamed.get(name, "") for name in node.input)
    alone.output.extend(f"o{i}" if name else "" for i, name in enumerate(node.output))
    alone.name = alone.doc_string = ""
    for attribute in bodies:
        alone.attribute.remove(attribute)
    given = [(new, types[old].SerializeToString()) for old, new in renamed.items()]
    return _has_kernel(alone.SerializeToString(deterministic=True), tuple(given), opset)


@cache
def _has_kernel(node: bytes, types: Iterable[tuple[str, bytes]], opset: int) -> bool:
    inputs = {name: onnx.TypeProto.FromString(type_) for name, type_ in types}
    error = _error(onnx.NodeProto.FromString(node), inputs, opset)
    return not ("NOT_IMPLEMENTED" in error or any(text in error for text in NO_OPERATOR))


def _error(node: onnx.NodeProto, types: Mapping[str, onnx.TypeProto], opset: int) -> str:
    """Return onnxruntime's error about a model of one node; "" without onnxruntime or an error."""
    try:
        import onnxruntime
    except ImportError:  # graphs can be built without onnxruntime
        return ""
    graph = onnx.helper.make_graph(
        [node],
        "asked",
        [onnx.helper.make_value_info(name, type_) for name, type_ in types.items()],
        [onnx.ValueInfoProto(name=name) for name in node.output if name],
    )
    imports = [onnx.helper.make_opsetid("", opset)]
    if node.domain:
        imports.append(onnx.helper.make_opsetid(node.domain, 1))
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION_ASKED)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # onnxruntime raises its own classes, all of them plain Exceptions
        return str(error)
    return ""
