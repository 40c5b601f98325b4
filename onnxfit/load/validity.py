"""Check properties of a file that ONNX's checker does not check, before using the file.

Otherwise a damaged or hostile file would cause an error in a library later, or a crash.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter

import onnx
import onnx_ir as ir

from onnxfit.errors import ModelError
from onnxfit.graph.shared_tensors import shared_bytes
from onnxfit.graph.subgraphs import nodes_of, subgraph_protos

# By field of a TensorProto: its entries per element, for types stored without raw_data. Types of
# half a byte are packed in other ways.
_ELEMENTS_OF_FIELD = {
    "float_data": {"FLOAT": 1, "COMPLEX64": 2},
    "double_data": {"DOUBLE": 1, "COMPLEX128": 2},
    "int64_data": {"INT64": 1},
    "uint64_data": {"UINT32": 1, "UINT64": 1},
    "string_data": {"STRING": 1},
    "int32_data": dict.fromkeys(
        ("INT32", "INT16", "INT8", "UINT16", "UINT8", "BOOL", "FLOAT16", "BFLOAT16"), 1
    ),
}
_FIELD_OF_TYPE = {
    element_type: (field, entries)
    for field, types in _ELEMENTS_OF_FIELD.items()
    for element_type, entries in types.items()
}
MAX_ELEMENTS = 1 << 40  # elements of a tensor: no machine can hold more
MAX_AXES = 1 << 10  # axes of a tensor
_BODIES = {"If": ("then_branch", "else_branch"), "Loop": ("body",), "Scan": ("body",)}


def require_valid(model: onnx.ModelProto, description: str) -> None:
    """Raise ModelError for a damaged model, or one newer than the installed onnx.

    Names must be text, element types must exist, tensors must have as much data as their sizes
    need, and must not be in other files. No function may call itself. `description` is the model in
    messages.
    """
    _require_text(
        description, (model.producer_name, model.domain, *(o.domain for o in model.opset_import))
    )
    for function in model.functions:
        _require_text(
            description,
            (
                function.name,
                function.domain,
                *function.input,
                *function.output,
                *function.attribute,
            ),
        )
        _require_nodes(description, function.node, in_function=True)
    _refuse_recursion(model, description)
    _require_graph(description, model.graph)
    _require_known_versions(model, description)


def _refuse_recursion(model: onnx.ModelProto, description: str) -> None:
    """Refuse functions that call themselves: onnx 1.19 crashes while it inlines them."""
    calls = {
        (f.domain, f.name, f.overload): {
            (node.domain, node.op_type, node.overload) for node in nodes_of(f)
        }
        for f in model.functions
    }
    try:
        TopologicalSorter(calls).prepare()
    except CycleError as error:
        names = " -> ".join(f"{domain}::{name}" for domain, name, _ in error.args[1])
        raise ModelError(
            f"{description} has functions that call each other in a cycle: {names}."
        ) from None


def require_bodies(graph: ir.Graph) -> None:
    """Raise ModelError for an If, Loop or Scan whose bodies do not fit the node.

    They must have as many inputs and outputs as the node needs.
    """
    for node in ir.traversal.RecursiveGraphIterator(graph):
        if node.domain == "" and node.op_type in _BODIES:
            missing = [
                name for name in _BODIES[node.op_type] if not _is_graph(node.attributes.get(name))
            ]
            if missing:
                raise ModelError(f"{node.op_type} {node.name!r} has no {missing[0]}.")
            bodies = [node.attributes[name].as_graph() for name in _BODIES[node.op_type]]
            _require_counts(node, bodies)


def _require_known_versions(model: onnx.ModelProto, description: str) -> None:
    opsets = (o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
    versions = (
        ("opset", max(opsets, default=0), onnx.defs.onnx_opset_version()),
        ("IR version", model.ir_version, int(onnx.IR_VERSION)),
    )
    for kind, version, newest in versions:
        if version > newest:
            raise ModelError(
                f"{description} has {kind} {version}, but the installed onnx {onnx.__version__}"
                f" reads {kind}s up to {newest}. Install a newer onnx (pip install --upgrade onnx),"
                f" or export the model again with {kind} {newest} or older."
            )


def _require_counts(node: ir.Node, bodies: list[ir.Graph]) -> None:
    """Check the numbers of inputs and outputs of a node and its bodies."""
    inputs = len(node.inputs)
    outputs = len(node.outputs)
    states = 0
    body_inputs = 0
    body_outputs = outputs
    if node.op_type == "Loop":
        states = inputs - 2
        body_inputs = inputs
        body_outputs = outputs + 1  # the condition
    elif node.op_type == "Scan":
        states = inputs - _number_of_scanned(node)
        body_inputs = inputs
        _require_scan_attributes(node, inputs - states, outputs - states)
    # the count and the condition of a Loop are optional
    if None in node.inputs[{"Loop": 2, "Scan": 0, "If": 0}[node.op_type] :]:
        raise ModelError(f"{node.op_type} {node.name!r} lacks an input that its body reads.")
    if states < 0 or outputs < states:
        raise ModelError(
            f"{node.op_type} {node.name!r} has {inputs} inputs and {outputs} outputs, which do not"
            " match."
        )
    for body in bodies:
        if (len(body.inputs), len(body.outputs)) != (body_inputs, body_outputs):
            raise ModelError(
                f"The body {body.name!r} of {node.op_type} {node.name!r} has {len(body.inputs)}"
                f" inputs and {len(body.outputs)} outputs. Expected {body_inputs} inputs and"
                f" {body_outputs} outputs."
            )


def _number_of_scanned(node: ir.Node) -> int:
    """Return the number of inputs that a Scan scans."""
    attribute = node.attributes.get("num_scan_inputs")
    scanned = 0
    if attribute is not None and attribute.type == ir.AttributeType.INT:
        scanned = attribute.as_int()
    if not 1 <= scanned <= len(node.inputs):
        raise ModelError(
            f"num_scan_inputs of Scan {node.name!r} must be from 1 to {len(node.inputs)}, its"
            f" number of inputs, got {scanned}."
        )
    return scanned


def _require_scan_attributes(node: ir.Node, scanned: int, stacked: int) -> None:
    """Check that the lists of a Scan have an entry for each scanned input or stacked output."""
    lengths = {
        "scan_input_axes": scanned,
        "scan_input_directions": scanned,
        "scan_output_axes": stacked,
        "scan_output_directions": stacked,
    }
    for name, length in lengths.items():
        if name in node.attributes and len(node.attributes[name].value) != length:
            raise ModelError(
                f"Scan {node.name!r} has {len(node.attributes[name].value)} {name}, expected"
                f" {length}."
            )


def _is_graph(attribute: ir.Attr | None) -> bool:
    return attribute is not None and attribute.type == ir.AttributeType.GRAPH


def _require_graph(description: str, graph: onnx.GraphProto, in_function: bool = False) -> None:
    _require_text(description, (graph.name,))
    for value in (*graph.input, *graph.output, *graph.value_info):
        _require_text(description, (value.name,))
        _require_type(description, value.name, value.type)
    for tensor in graph.initializer:
        _require_tensor(description, tensor)
    for sparse in graph.sparse_initializer:
        _require_tensor(description, sparse.values)
        _require_tensor(description, sparse.indices)
    _require_nodes(description, graph.node, in_function)


def _require_nodes(description: str, nodes: Iterable[onnx.NodeProto], in_function: bool) -> None:
    for node in nodes:
        texts = (node.name, node.op_type, node.domain, node.overload, *node.input, *node.output)
        _require_text(description, texts)
        for attribute in node.attribute:
            _require_attribute(description, node, attribute, in_function)
        if node.domain == "ai.onnx.ml" and node.op_type.startswith("TreeEnsemble"):
            _require_trees(description, node)
        if node.domain == "ai.onnx.ml" and node.op_type.startswith("SVM"):
            _require_kernel(description, node)


def _require_attribute(
    description: str,
    node: onnx.NodeProto,
    attribute: onnx.AttributeProto,
    in_function: bool,
) -> None:
    _require_text(description, (attribute.name, attribute.ref_attr_name))
    if attribute.ref_attr_name and not in_function:
        raise ModelError(
            f"{description} is damaged: attribute {attribute.name} of {node.op_type} {node.name!r}"
            " refers to an attribute of a function, but the node is not in a function."
        )
    # ONNX's inference reads beyond the end of the sizes
    if attribute.name == "axis" and abs(attribute.i) > MAX_AXES:
        raise ModelError(
            f"{description} is damaged: {node.op_type} {node.name!r} has axis {attribute.i}, but"
            " tensors have fewer axes."
        )
    for tensor in _tensors(attribute):
        _require_tensor(description, tensor)
    for graph in subgraph_protos(attribute):
        _require_graph(description, graph, in_function)


def _require_kernel(description: str, node: onnx.NodeProto) -> None:
    """Check the parameters of a support vector machine.

    onnxruntime always reads three numbers, even beyond the end of a shorter list.
    """
    parameters = next((list(a.floats) for a in node.attribute if a.name == "kernel_params"), [])
    if len(parameters) not in (0, 3):
        raise ModelError(
            f"{description} is damaged: {node.op_type} {node.name!r} has {len(parameters)}"
            " kernel_params, expected 3."
        )


def _require_trees(description: str, node: onnx.NodeProto) -> None:
    """Check the parallel lists that describe the nodes, targets or classes of a tree.

    onnxruntime reads beyond the end of a shorter list.
    """
    for prefix in ("nodes_", "target_", "class_"):
        lengths = {
            a.name: max(len(a.ints), len(a.floats), len(a.strings))
            for a in node.attribute
            if a.name.startswith(prefix)
        }
        # hit rates may be missing, and tensors replace lists
        lengths = {name: length for name, length in lengths.items() if length}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise ModelError(
                f"{description} is damaged: {node.op_type} {node.name!r} has lists of different"
                f" lengths: {listed}."
            )
    names = {a.name.removesuffix("_as_tensor") for a in node.attribute}
    for dependent, required in (
        ("nodes_nodeids", "nodes_values"),
        ("target_ids", "target_weights"),
        ("class_ids", "class_weights"),
    ):
        if dependent in names and required not in names:
            raise ModelError(
                f"{description} is damaged: {node.op_type} {node.name!r} has no {required}."
            )


def _tensors(attribute: onnx.AttributeProto) -> Iterator[onnx.TensorProto]:
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors
    for sparse in (
        *([attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else ()),
        *attribute.sparse_tensors,
    ):
        yield from (sparse.values, sparse.indices)


def _require_text(description: str, names: Iterable[str | bytes]) -> None:
    for name in names:
        if isinstance(name, bytes):  # protobuf returns a name that is not UTF-8 as bytes
            raise ModelError(
                f"{description} is damaged: the name {name[:80]!r} is not valid UTF-8."
            )


def _require_type(description: str, name: str, type_: onnx.TypeProto) -> None:
    kind = type_.WhichOneof("value")
    if kind in ("tensor_type", "sparse_tensor_type"):
        tensor = getattr(type_, kind)
        if not _is_type(tensor.elem_type):
            raise ModelError(
                f"{description} declares {name!r} with element type {tensor.elem_type}, which ONNX"
                " does not define."
            )
        _require_text(description, (dim.dim_param for dim in tensor.shape.dim))
        sizes = [dim.dim_value for dim in tensor.shape.dim if dim.dim_value > 0]
        if math.prod(sizes) > MAX_ELEMENTS:
            raise ModelError(
                f"{description} declares {name!r} with {' x '.join(map(str, sizes))} elements,"
                " more than any memory can hold."
            )
    elif kind in ("sequence_type", "optional_type"):
        _require_type(description, name, getattr(type_, kind).elem_type)
    elif kind == "map_type":
        _require_type(description, name, type_.map_type.value_type)


def _is_type(number: int) -> bool:
    try:
        return bool(ir.DataType(number) is not None)
    except ValueError:
        return False


def _require_tensor(description: str, tensor: onnx.TensorProto) -> None:
    _require_text(description, (tensor.name,))
    if not _is_type(tensor.data_type) or tensor.data_type == onnx.TensorProto.UNDEFINED:
        raise ModelError(
            f"{description} has a tensor {tensor.name!r} with element type {tensor.data_type},"
            " which ONNX does not define."
        )
    if tensor.data_location == onnx.TensorProto.EXTERNAL and shared_bytes(tensor) is None:
        raise ModelError(
            f"{description} stores weights in other files ({tensor.name!r}), which cannot be found"
            " without its path. Pass the path, or load the model with onnx.load first."
        )
    if tensor.HasField("segment"):
        raise ModelError(
            f"{description} has a tensor {tensor.name!r} in segments, which ONNX no longer"
            " supports. Save the model again."
        )
    fields = [field for field in _ELEMENTS_OF_FIELD if getattr(tensor, field)]
    fields += ["raw_data"] * tensor.HasField("raw_data")
    if len(fields) > 1:
        raise ModelError(
            f"{description} has a tensor {tensor.name!r} that stores its elements twice, in"
            f" {' and in '.join(fields)}."
        )
    _require_size(description, tensor)


def _require_size(description: str, tensor: onnx.TensorProto) -> None:
    """Check that a tensor has as much data as its sizes and element type need."""
    if any(d < 0 for d in tensor.dims):
        raise ModelError(
            f"{description} has a tensor {tensor.name!r} of sizes {list(tensor.dims)}. Sizes must"
            " not be negative."
        )
    element_type = ir.DataType(tensor.data_type)
    elements = math.prod(tensor.dims)
    present = 0
    required = 0
    unit = ""
    shared = shared_bytes(tensor)
    if (tensor.HasField("raw_data") or shared is not None) and element_type != ir.DataType.STRING:
        present = len(tensor.raw_data) if shared is None else shared.nbytes
        required = (elements * element_type.bitwidth + 7) // 8
        unit = "bytes"
    elif element_type.name in _FIELD_OF_TYPE:
        field, entries = _FIELD_OF_TYPE[element_type.name]
        present = len(getattr(tensor, field))
        required = elements * entries
        unit = "numbers"
    if present != required:
        raise ModelError(
            f"{description} is damaged: tensor {tensor.name!r} of"
            f" {element_type.name}{list(tensor.dims)} needs {required} {unit}, got {present}."
        )
    # A tensor with a size of 0 is empty, but libraries multiply the other sizes in 64 bits.
    if math.prod(d for d in tensor.dims if d) > MAX_ELEMENTS:
        raise ModelError(
            f"{description} has a tensor {tensor.name!r} of sizes {list(tensor.dims)}, more than"
            " any memory can hold."
        )
