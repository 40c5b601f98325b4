"""What must hold of a file before anything is built upon it, and what ONNX's checker does not look
at.

A damaged or hostile file would else come to light in the middle of the building, as an error of
whatever library met it first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import onnx
import onnx_ir as ir

from onnxfit.errors import ModelError

# the type's own field where raw_data is not used, and how many of its entries make an element;
# types of half a byte are packed in other ways
_FIELDS = {
    "float_data": {"FLOAT": 1, "COMPLEX64": 2},
    "double_data": {"DOUBLE": 1, "COMPLEX128": 2},
    "int64_data": {"INT64": 1},
    "uint64_data": {"UINT32": 1, "UINT64": 1},
    "string_data": {"STRING": 1},
    "int32_data": dict.fromkeys(
        ("INT32", "INT16", "INT8", "UINT16", "UINT8", "BOOL", "FLOAT16", "BFLOAT16"), 1
    ),
}
_FIELD = {kind: (field, times) for field, kinds in _FIELDS.items() for kind, times in kinds.items()}
MAX_ELEMENTS = 1 << 40  # elements of a tensor: no machine has room for more
MAX_AXES = 1 << 10
_BODIES = {"If": ("then_branch", "else_branch"), "Loop": ("body",), "Scan": ("body",)}


def require_valid(model: onnx.ModelProto, what: str) -> None:
    """ModelError for names that are no text, element types that do not exist, tensors of other
    sizes than their data, and tensors in other files.
    """
    _require_text(
        what, (model.producer_name, model.domain, *(o.domain for o in model.opset_import))
    )
    for function in model.functions:
        _require_text(
            what,
            (
                function.name,
                function.domain,
                *function.input,
                *function.output,
                *function.attribute,
            ),
        )
        _require_nodes(what, function.node, in_function=True)
    _require_graph(what, model.graph)


def require_bodies(graph: ir.Graph) -> None:
    """ModelError for an If, Loop or Scan whose bodies have not as many inputs and outputs as the
    node gives and takes.
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


def require_steps(graph: ir.Graph) -> None:
    """ModelError for sequences without steps, at which onnxruntime's GRU ends the process."""
    for node in graph:
        if node.domain == "" and node.op_type in ("GRU", "LSTM", "RNN") and node.inputs:
            shape = node.inputs[0].shape if node.inputs[0] is not None else None
            axis = node.attributes.get_int("layout", 0)  # batch first
            if shape is not None and axis < shape.rank() and shape[axis] == 0:
                raise ModelError(
                    f"{node.op_type} {node.name!r} is given sequences without steps: it needs one"
                    " at least."
                )


def _require_counts(node: ir.Node, bodies: list[ir.Graph]) -> None:
    given, made = len(node.inputs), len(node.outputs)
    takes, gives = 0, made
    if node.op_type == "Loop":
        takes, gives, states = given, made + 1, given - 2
    elif node.op_type == "Scan":
        attribute = node.attributes.get("num_scan_inputs")
        scanned = (
            attribute.as_int()
            if attribute is not None and attribute.type == ir.AttributeType.INT
            else 0
        )
        takes, states = given, given - scanned
        if not 1 <= scanned <= given:
            raise ModelError(
                f"Scan {node.name!r} has num_scan_inputs={scanned} of {given} inputs; it scans at"
                " least one."
            )
        for name, count in (("scan_input_axes", scanned), ("scan_input_directions", scanned),
                            ("scan_output_axes", made - states), ("scan_output_directions", made - states)):  # fmt: skip
            if name in node.attributes and len(node.attributes[name].value) != count:
                raise ModelError(
                    f"Scan {node.name!r} has {len(node.attributes[name].value)} {name}, and needs"
                    f" {count}."
                )
    else:
        states = 0
    # a Loop may lack its count and its condition
    if None in node.inputs[{"Loop": 2, "Scan": 0, "If": 0}[node.op_type] :]:
        raise ModelError(f"{node.op_type} {node.name!r} lacks an input that its body takes.")
    if states < 0 or made < states:
        raise ModelError(
            f"{node.op_type} {node.name!r} has {given} inputs and {made} outputs, which do not fit"
            " each other."
        )
    for body in bodies:
        if (len(body.inputs), len(body.outputs)) != (takes, gives):
            raise ModelError(
                f"The body {body.name!r} of {node.op_type} {node.name!r} has {len(body.inputs)}"
                f" inputs and {len(body.outputs)} outputs; the node needs {takes} and {gives}."
            )


def _is_graph(attribute: ir.Attr | None) -> bool:
    return attribute is not None and attribute.type == ir.AttributeType.GRAPH


def _require_graph(what: str, graph: onnx.GraphProto, in_function: bool = False) -> None:
    _require_text(what, (graph.name,))
    for value in (*graph.input, *graph.output, *graph.value_info):
        _require_text(what, (value.name,))
        _require_type(what, value.name, value.type)
    for tensor in graph.initializer:
        _require_tensor(what, tensor)
    for sparse in graph.sparse_initializer:
        _require_tensor(what, sparse.values)
        _require_tensor(what, sparse.indices)
    _require_nodes(what, graph.node, in_function)


def _require_nodes(what: str, nodes: Iterable[onnx.NodeProto], in_function: bool) -> None:
    for node in nodes:
        _require_text(
            what, (node.name, node.op_type, node.domain, node.overload, *node.input, *node.output)
        )
        for attribute in node.attribute:
            _require_text(what, (attribute.name, attribute.ref_attr_name))
            if attribute.ref_attr_name and not in_function:
                raise ModelError(
                    f"{what} has a {node.op_type} {node.name!r} whose {attribute.name} is that of a"
                    " function, outside of any."
                )
            # ONNX's inference reads beyond the end of the sizes
            if attribute.name == "axis" and abs(attribute.i) > MAX_AXES:
                raise ModelError(
                    f"{what} has a {node.op_type} {node.name!r} of axis {attribute.i}; no tensor"
                    " has so many."
                )
            for tensor in _tensors(attribute):
                _require_tensor(what, tensor)
            for graph in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
                _require_graph(what, graph, in_function)
        if node.domain == "ai.onnx.ml" and node.op_type.startswith("TreeEnsemble"):
            _require_trees(what, node)
        if node.domain == "ai.onnx.ml" and node.op_type.startswith("SVM"):
            parameters = next(
                (list(a.floats) for a in node.attribute if a.name == "kernel_params"), []
            )
            if len(parameters) not in (0, 3):  # onnxruntime reads beyond the end of fewer
                raise ModelError(
                    f"{what} has an {node.op_type} {node.name!r} with {len(parameters)}"
                    " kernel_params; they are three."
                )


def _require_trees(what: str, node: onnx.NodeProto) -> None:
    """What a node, a target or a class of a tree is, stands in lists side by side; onnxruntime
    reads beyond the end of a shorter one.
    """
    for kind in ("nodes_", "target_", "class_"):
        counts = {
            a.name: max(len(a.ints), len(a.floats), len(a.strings))
            for a in node.attribute
            if a.name.startswith(kind)
        }
        # hit rates may be missing, and tensors take the place of lists
        counts = {name: n for name, n in counts.items() if n}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise ModelError(
                f"{what} has a {node.op_type} {node.name!r} whose lists differ in length: {listed}."
            )
    have = {a.name.removesuffix("_as_tensor") for a in node.attribute}
    for needing, needed in (
        ("nodes_nodeids", "nodes_values"),
        ("target_ids", "target_weights"),
        ("class_ids", "class_weights"),
    ):
        if needing in have and needed not in have:
            raise ModelError(f"{what} has a {node.op_type} {node.name!r} without {needed}.")


def _tensors(attribute: onnx.AttributeProto) -> Iterator[onnx.TensorProto]:
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors
    for sparse in (
        *([attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else ()),
        *attribute.sparse_tensors,
    ):
        yield from (sparse.values, sparse.indices)


def _require_text(what: str, names: Iterable[str | bytes]) -> None:
    for name in names:
        if isinstance(name, bytes):  # protobuf's way to say that it is no UTF-8
            raise ModelError(f"{what} is damaged: a name in it, {name[:80]!r}, is no text.")


def _require_type(what: str, name: str, given: onnx.TypeProto) -> None:
    kind = given.WhichOneof("value")
    if kind in ("tensor_type", "sparse_tensor_type"):
        tensor = getattr(given, kind)
        if not _is_type(tensor.elem_type):
            raise ModelError(
                f"{what} says that {name!r} has elements of the type {tensor.elem_type}, which ONNX"
                " does not have."
            )
        _require_text(what, (dim.dim_param for dim in tensor.shape.dim))
        sizes = [dim.dim_value for dim in tensor.shape.dim if dim.dim_value > 0]
        if math.prod(sizes) > MAX_ELEMENTS:
            raise ModelError(
                f"{what} says that {name!r} has {' x '.join(map(str, sizes))} elements: that is"
                " more than there is room for."
            )
    elif kind in ("sequence_type", "optional_type"):
        _require_type(what, name, getattr(given, kind).elem_type)
    elif kind == "map_type":
        _require_type(what, name, given.map_type.value_type)


def _is_type(number: int) -> bool:
    try:
        return bool(ir.DataType(number) is not None)
    except ValueError:
        return False


def _require_tensor(what: str, tensor: onnx.TensorProto) -> None:
    _require_text(what, (tensor.name,))
    if not _is_type(tensor.data_type) or tensor.data_type == onnx.TensorProto.UNDEFINED:
        raise ModelError(
            f"{what} has a tensor {tensor.name!r} with elements of the type {tensor.data_type},"
            " which ONNX does not have."
        )
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        raise ModelError(
            f"{what} keeps weights in other files ({tensor.name!r}), which only its path leads to:"
            " pass the path, or call onnx.load first."
        )
    if tensor.HasField("segment"):
        raise ModelError(
            f"{what} has a tensor {tensor.name!r} in segments, a form that ONNX gave up: save it"
            " again."
        )
    forms = [field for field in _FIELDS if getattr(tensor, field)] + ["raw_data"] * tensor.HasField(
        "raw_data"
    )
    if len(forms) > 1:
        raise ModelError(
            f"{what} has a tensor {tensor.name!r} that holds its elements twice, in"
            f" {' and in '.join(forms)}."
        )
    kind = ir.DataType(tensor.data_type)
    elements = math.prod(tensor.dims)
    if any(d < 0 for d in tensor.dims):
        raise ModelError(
            f"{what} has a tensor {tensor.name!r} of the sizes {list(tensor.dims)}: none can be"
            " negative."
        )
    if tensor.HasField("raw_data") and kind != ir.DataType.STRING:
        have, need, unit = len(tensor.raw_data), (elements * kind.bitwidth + 7) // 8, "bytes"
    elif kind.name in _FIELD:
        field, times = _FIELD[kind.name]
        have, need, unit = len(getattr(tensor, field)), elements * times, "numbers"
    else:
        have, need, unit = 0, 0, ""
    if have != need:
        raise ModelError(
            f"{what} has a tensor {tensor.name!r} of {kind.name}{list(tensor.dims)} that needs"
            f" {need} {unit} and has {have}: it is damaged."
        )
    # nothing at all, along one axis; but libraries multiply in 64 bits
    if math.prod(d for d in tensor.dims if d) > MAX_ELEMENTS:
        raise ModelError(
            f"{what} has a tensor {tensor.name!r} of the sizes {list(tensor.dims)}: that is more"
            " than there is room for."
        )
