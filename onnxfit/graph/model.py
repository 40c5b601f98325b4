"""Models in memory: between protos and onnx-ir, and the types and shapes of their values."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx.shape_inference
import onnx_ir as ir

from onnxfit.errors import ModelError
from onnxfit.graph.fold import fold_shapes, makes_long_vectors
from onnxfit.graph.index import tensors_of
from onnxfit.graph.inference import (
    MIN_KNOWN_OPSET,
    InputsError,
    has_inference,
    infer_outputs,
    sizes_of,
)
from onnxfit.graph.shared_tensors import (
    Storable,
    TensorContents,
    contents_of,
    include_shared,
    ir_tensor,
    require_memory,
    shared_arrays,
    shared_bytes,
    tensor_of,
    to_proto,
)
from onnxfit.graph.spec import TensorSpec
from onnxfit.graph.subgraphs import graph_protos, nodes_of, subgraph_protos, subgraphs_of
from onnxfit.graph.tensors import (
    detached,
    is_detachable,
    is_external,
    require_initializers,
    without_initializers,
)
from onnxfit.graph.values import values_of

SCALES_OF_PACKED = 2  # the position of the scales among the inputs of a MatMulNBits


@dataclass(frozen=True, eq=False)
class OnnxModel:
    """A model that owns the arrays to which its larger tensors refer.

    - `proto`: the model.
    - `arrays`: the arrays, which live as long as this object.
    """

    proto: onnx.ModelProto
    arrays: Sequence[TensorContents] = ()

    @property
    def graph(self) -> onnx.GraphProto:
        """The main graph."""
        return self.proto.graph

    def whole(self) -> onnx.ModelProto:
        """Copy the arrays into the proto, and return it."""
        return include_shared(self.proto)


@contextmanager
def model_errors() -> Iterator[None]:
    """Raise InputsError as ModelError: operators of the model are inconsistent."""
    try:
        yield
    except InputsError as error:
        raise ModelError(f"The model is inconsistent: {error}") from None


def to_ir(model: onnx.ModelProto) -> ir.Model:
    """Return the model as an onnx-ir model. ModelError: onnx-ir cannot read the model."""
    _require_device_configurations(model)
    try:
        work = ir.from_proto(model)
    except ir.serde.SerdeError as error:
        # onnx-ir raises one error for each level of the model; the innermost names the cause.
        reason = root_cause(error)
        raise ModelError(
            f"The model contains something that onnx-ir cannot read: {reason}"
        ) from None
    for tensor in model.graph.initializer:
        if shared_bytes(tensor) is not None:
            work.graph.initializers[tensor.name].const_value = ir_tensor(tensor)
    return work


def _require_device_configurations(model: onnx.ModelProto) -> None:
    """Raise ModelError for a device configuration that onnx-ir can read but not write."""
    graphs: list[Any] = [model.graph, *model.functions]
    for node in (node for graph in graphs for node in nodes_of(graph)):
        # older versions of onnx have no device configurations
        for configuration in getattr(node, "device_configurations", ()):
            needed = {
                "configuration_id": [configuration.configuration_id],
                "tensor_name": [spec.tensor_name for spec in configuration.sharding_spec],
            }
            for field, texts in needed.items():
                if not all(texts):
                    raise ModelError(
                        f"A device configuration of the {node.op_type} node {node.name!r} has no"
                        f" {field}. ONNX needs one."
                    )


def root_cause(error: BaseException) -> BaseException:
    """Return the error at the end of the chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def large_tensors_as_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of the model whose larger initializers are inputs instead.

    Each function of the onnx package copies its whole argument, which must be below 2 GB.
    """
    copy, _ = detached(model, {}, "")
    inputs = {value.name for value in copy.graph.input}
    for tensor in [t for t in copy.graph.initializer if is_external(t)]:
        if tensor.name not in inputs:
            copy.graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            )
        copy.graph.initializer.remove(tensor)
    return copy


def restore_initializers(graph: ir.Graph, model: onnx.ModelProto) -> None:
    """Undo `large_tensors_as_inputs(model)` in a graph that was built from its result.

    The initializers come in the model's order and share its memory.
    """
    tensors = tensors_of(model.graph)
    for value in [v for v in graph.inputs if v.name in tensors]:
        graph.inputs.remove(value)
        value.const_value = ir_tensor(tensors[value.name or ""])
        graph.register_initializer(value)
    values = {name: graph.initializers.pop(name) for name in [*graph.initializers]}
    in_order = [name for name in tensors if name in values]
    added = [name for name in values if name not in tensors]
    for name in (*in_order, *added):
        graph.register_initializer(values[name])


def share_tensors(graph: ir.Graph, model: onnx.ModelProto, names: Container[str]) -> None:
    """Let a graph that `restore_initializers` completed share the memory of another copy of the
    model, in place.

    - `names`: initializers that the copy has without numbers.
    """
    for tensor in model.graph.initializer:
        value = graph.initializers.get(tensor.name)
        if value is not None and (tensor.name in names or is_detachable(tensor)):
            value.const_value = ir_tensor(tensor)


def infer_shapes(model: ir.Model) -> ir.Model:
    """Give every value the type and shape that can be inferred, in place, and return the model.

    ModelError: shapes are inconsistent.
    """
    set_inferred(model.graph, infer_by_onnx(checked_proto(model)).graph)
    complete_ranks(model.graph)
    return model


def checked_proto(model: ir.Model) -> onnx.ModelProto:
    try:
        return to_proto(model)
    except ir.serde.SerdeError as error:
        # for instance a hidden size of -2^63: an LSTM's weights have four times that size
        raise ModelError(
            f"The model has sizes that ONNX cannot represent: {root_cause(error)}."
        ) from None


def inferred_model(proto: onnx.ModelProto) -> ir.Model:
    """Return a new model with the type and shape of every value that can be inferred."""
    model = to_ir(infer_by_onnx(proto))
    complete_ranks(model.graph)
    return model


def infer_by_onnx(model: onnx.ModelProto) -> onnx.ModelProto:
    # ONNX propagates the numbers of a vector as a list of its length, even if all are unknown.
    data_prop = not makes_long_vectors(model.graph)
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=data_prop)
    except onnx.shape_inference.InferenceError as error:
        raise ModelError(f"The model's shapes are inconsistent: {str(error).strip()}") from None
    except MemoryError:
        raise ModelError(
            "The model's sizes are too large: memory ran out during shape inference."
        ) from None
    forget_element_sizes(inferred.graph)
    return inferred


def forget_element_sizes(graph: onnx.GraphProto) -> None:
    """Make the symbolic sizes of sequence elements unknown, in place.

    ONNX's inference names an unknown size of the elements once, and gives that name to each element
    that is read, although elements may differ in size. onnxruntime shares memory between values
    whose sizes have the same names, and gradients assume that such values do not broadcast. Names
    of the graph's own inputs, such as the batch size, are kept.
    """
    types = [
        value.type for g in graph_protos(graph) for value in (*g.input, *g.output, *g.value_info)
    ]
    elements = (t for t in types if not t.HasField("tensor_type"))
    symbols = {dim.dim_param for t in elements for dim in _dims(t)} - {""}
    symbols -= {dim.dim_param for value in graph.input for dim in _dims(value.type)}
    if symbols:
        for dim in (dim for t in types for dim in _dims(t) if dim.dim_param in symbols):
            dim.ClearField("dim_param")


def _dims(type_: onnx.TypeProto) -> Iterator[onnx.TensorShapeProto.Dimension]:
    """Yield the sizes of a tensor, or of the tensors in a sequence or optional."""
    kind = type_.WhichOneof("value")
    if kind == "tensor_type":
        yield from type_.tensor_type.shape.dim
    elif kind in ("sequence_type", "optional_type"):
        yield from _dims(getattr(type_, kind).elem_type)


def set_inferred(graph: ir.Graph, proto: onnx.GraphProto) -> None:
    """Give the values of a graph and its subgraphs the types and shapes of `proto`."""
    values = values_of(graph)
    for info in (*proto.value_info, *proto.output):
        value = values.get(info.name)
        if value is not None:
            ir.serde.deserialize_value_info_proto(info, value)
    for node, node_proto in zip(graph, proto.node):
        bodies = (body for a in node_proto.attribute for body in subgraph_protos(a))
        for body, body_proto in zip(subgraphs_of(node), bodies):
            set_inferred(body, body_proto)


def complete_ranks(graph: ir.Graph) -> None:
    """Infer ranks that ONNX's inference misses, and the shapes that follow, in place."""
    # Operators of older opsets have attributes in place of inputs, until the file is converted.
    is_old = graph.opset_imports.get("", MIN_KNOWN_OPSET) < MIN_KNOWN_OPSET
    for node in graph:
        if any(v.shape is None and v.name for v in node.outputs):
            try:
                infer_outputs(graph, node)
            except ValueError:
                continue  # inconsistent sizes are reported when the model runs
            except IndexError:
                if not is_old:
                    raise


def complete_shapes(model: ir.Model) -> ir.Model:
    """Return the model itself if every value has a type and a rank, else infer its shapes.

    ModelError: shapes are inconsistent.
    """
    outputs = (value for node in model.graph for value in node.outputs if value.name)
    if all(value.type is not None and value.shape is not None for value in outputs):
        return model
    return infer_shapes(model)


def specialize_shapes(model: ir.Model, shapes: Mapping[str, tuple[int, ...]]) -> ir.Model:
    """Return the model for inputs of exactly these shapes, with every other shape inferred anew.

    - `model`: a model that `normalize` returned, which may be changed.
    - `shapes`: the shapes of inputs by name; other names are ignored.

    ModelError: the model does not accept the shapes.
    """
    _forget_names_of_sizes(model.graph)
    known = {v: shapes[v.name or ""] for v in model.graph.inputs if v.name in shapes}
    changed = {value: shape for value, shape in known.items() if value.shape != shape}
    for value, shape in changed.items():
        value.shape = ir.Shape(shape)
    _fold(model, shapes)
    if changed and not _has_static_shapes(model.graph):
        # ONNX's inference of a whole model goes into subgraphs and follows the names of sizes.
        proto = checked_proto(model)
        _forget_inferred(model.graph, proto.graph)
        model = inferred_model(proto)
        _fold(model, shapes)
    require_steps(model.graph)
    return model


def require_steps(graph: ir.Graph) -> None:
    """Raise ModelError for sequences without steps, which crash onnxruntime's GRU."""
    for node in graph:
        if node.domain == "" and node.op_type in ("GRU", "LSTM", "RNN") and node.inputs:
            shape = node.inputs[0].shape if node.inputs[0] is not None else None
            axis = node.attributes.get_int("layout", 0)  # batch first
            if shape is not None and axis < shape.rank() and shape[axis] == 0:
                raise ModelError(
                    f"{node.op_type} {node.name!r} has sequences of length 0. Expected at least"
                    " one step."
                )


def _forget_inferred(graph: ir.Graph, proto: onnx.GraphProto) -> None:
    """Remove the types and shapes of values from `proto`, except where nothing can infer them."""
    unknown = [node for node in graph if not has_inference(graph, node)]
    names = {value.name for node in unknown for value in node.outputs}
    kept = [info for info in proto.value_info if info.name in names]
    del proto.value_info[:]
    proto.value_info.extend(kept)


def _fold(model: ir.Model, shapes: Mapping[str, tuple[int, ...]]) -> None:
    try:
        fold_shapes(model)
    except ValueError as error:
        reason = "does not accept inputs of these shapes" if shapes else "is inconsistent"
        raise ModelError(f"The model {reason}: {error}") from None


def _has_static_shapes(graph: ir.Graph) -> bool:
    """Return whether the size of every value is a number, and no node has a subgraph."""
    values = (value for node in graph for value in node.outputs if value.name)
    has_sizes = all(value.shape is not None and value.shape.is_static() for value in values)
    return has_sizes and not any(subgraphs_of(node) for node in graph)


def _forget_names_of_sizes(graph: ir.Graph) -> None:
    """Make the named sizes of outputs unknown, in place: the names may refer to known sizes."""
    for value in graph.outputs:
        if value.shape is not None and not value.is_graph_input():
            value.shape = ir.Shape([d if isinstance(d, int) else None for d in value.shape])


def spec_of(value: ir.Value) -> TensorSpec:
    """Return a tensor's name, element type and shape.

    ModelError: the value is not a tensor, or its element type is unknown.
    """
    if value.type is not None and not isinstance(value.type, ir.TensorType):
        raise ModelError(
            f"{value.name!r} is not a tensor. The inputs and outputs of a training step must be"
            " tensors."
        )
    if value.dtype is None:
        raise ModelError(f"The element type of {value.name!r} is unknown.")
    shape = None if value.shape is None else sizes_of(value.shape)
    return TensorSpec(value.name or "", value.dtype.numpy(), shape)


def tensor_outputs(model: ir.Model) -> dict[str, TensorSpec]:
    """Return the outputs that a loss can be put on, by name.

    Sequences and maps, which converters of classical models add, are excluded. ModelError: no
    output of the model is a tensor.
    """
    specs = {
        v.name or "": spec_of(v)
        for v in model.graph.outputs
        if v.type is None or isinstance(v.type, ir.TensorType)
    }
    if not specs:
        names = ", ".join(v.name or "" for v in model.graph.outputs)
        raise ModelError(f"The model has no tensor output; its outputs are {names}.")
    return specs


def initializers_to_inputs(graph: ir.Graph, names: Iterable[str]) -> None:
    """Make the named initializers inputs without a value, after the other inputs, in place.

    A MatMulNBits whose scales become inputs loses its `accuracy_level`: it does not round its
    activations. The kernel that rounds them (level 4) reads the scales when a session is created,
    and computes garbage if they are inputs (onnxruntime 1.19 and 1.32).
    """
    for name in names:
        value = graph.initializers.pop(name)
        value.const_value = None
        graph.inputs.append(value)
        for usage in value.uses():
            if usage.node.op_type == "MatMulNBits" and usage.idx == SCALES_OF_PACKED:
                usage.node.attributes.pop("accuracy_level", None)


def with_initializers(
    model: onnx.ModelProto, arrays: Mapping[str, np.ndarray[Any, Any]]
) -> onnx.ModelProto:
    """Return a copy of the model with these arrays in the named initializers.

    Everything else is byte-identical. ModelError: a name is not an initializer.
    """
    return with_tensors(model, arrays)


def with_tensors(model: onnx.ModelProto, tensors: Mapping[str, Storable]) -> onnx.ModelProto:
    """Return a copy of the model with other values in initializers, by name.

    Everything else is byte-identical. ModelError: a name is not an initializer.
    """
    return with_references(model, tensors).whole()


def with_references(
    model: onnx.ModelProto, tensors: Mapping[str, Storable], *, compiled: bool = False
) -> OnnxModel:
    """Return `with_tensors` of the same arguments that refers to larger arrays of `tensors`.

    The references of `model` stay. No array is copied, and no computed array is computed.

    - `compiled`: whether a session will compile the model. It then refers to an array only in the
      place of a reference of `model`, because onnxruntime optimizes the constants of a graph best
      if the graph has them.
    """
    require_initializers(model, tensors)
    copy = without_initializers(model)
    require_memory(sum(t.ByteSize() for t in model.graph.initializer if t.name not in tensors))
    kept = shared_arrays(model)  # computed arrays may read them
    for old in model.graph.initializer:
        if old.name not in tensors:
            copy.graph.initializer.append(old)
            continue
        refers = not compiled or contents_of(old) is not None
        new, contents = tensor_of(old, tensors[old.name], refers=refers)
        copy.graph.initializer.append(new)
        kept += [] if contents is None else [contents]
    return OnnxModel(copy, kept)


def clone(model: ir.Model) -> ir.Model:
    """Return a copy of a model without functions, which shares its tensors, types and attributes.

    It equals onnx-ir's copy without onnx-ir's metadata (`meta`), and takes two thirds of the time.
    A model with subgraphs is copied by onnx-ir.
    """
    graph = model.graph
    if any(subgraphs_of(node) for node in graph):
        return model.clone()
    values = {
        value: _with_properties(ir.Value(name=value.name), value)
        for value in {**dict.fromkeys(graph.inputs), **dict.fromkeys(graph.initializers.values())}
    }
    nodes = []
    for node in graph:
        copy = ir.Node(
            node.domain,
            node.op_type,
            [None if value is None else values[value] for value in node.inputs],
            node.attributes.data,
            num_outputs=len(node.outputs),
            version=node.version,
            name=node.name,
            doc_string=node.doc_string,
            metadata_props=dict(node.metadata_props) or None,
        )
        for value, output in zip(node.outputs, copy.outputs):
            output.name = value.name
            values[value] = _with_properties(output, value)
        nodes.append(copy)
    copied = ir.Graph(
        [values[value] for value in graph.inputs],
        [values[value] for value in graph.outputs],
        nodes=nodes,
        initializers=[values[value] for value in graph.initializers.values()],
        doc_string=graph.doc_string,
        opset_imports=dict(graph.opset_imports),
        name=graph.name,
    )
    copied.metadata_props.update(graph.metadata_props)
    return ir.Model(copied, ir_version=model.ir_version)


def _with_properties(copy: ir.Value, value: ir.Value) -> ir.Value:
    """Return `copy` with every property of `value` except its name."""
    shape = value.shape
    copy.shape = shape if shape is None or shape.frozen else shape.copy()
    copy.type = value.type
    copy.const_value = value.const_value
    copy.doc_string = value.doc_string
    if value.metadata_props:
        copy.metadata_props.update(value.metadata_props)
    return copy
