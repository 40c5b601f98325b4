"""Normalize a model in memory, so that graphs can be built upon it.

The result has one opset, one IR version and no functions; every value is named and typed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import onnx.shape_inference
import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass, RemoveInitializersFromInputsPass

from onnxfit.errors import ModelError
from onnxfit.graph.classical import remove_zip_maps
from onnxfit.graph.constant_nodes import remove_places
from onnxfit.graph.declarations import correct_declarations, wrong_declarations
from onnxfit.graph.fold import fold_shapes, makes_long_vectors, take_known_branches
from onnxfit.graph.functions import inline_functions
from onnxfit.graph.inference import InputsError, has_inference, infer_outputs, sizes_of
from onnxfit.graph.opset import IR_VERSION, MIN_KNOWN_OPSET, OPSET, convert_opset
from onnxfit.graph.packed_sizes import require_packed_sizes
from onnxfit.graph.reading import large_tensors_as_inputs, restore_initializers, root_cause, to_ir
from onnxfit.graph.sequences import forget_element_sizes, unroll_sequences
from onnxfit.graph.shared_tensors import Contents, include_shared, replace_tensors, to_proto
from onnxfit.graph.spec import TensorSpec
from onnxfit.graph.subgraphs import subgraph_protos, subgraphs_of
from onnxfit.graph.tensors import require_initializers
from onnxfit.graph.validity import require_bodies, require_steps
from onnxfit.graph.values import values_of

SCALES_OF_PACKED = 2  # the position of the scales among the inputs of a MatMulNBits


@contextmanager
def model_errors() -> Iterator[None]:
    """Raise InputsError as ModelError: operators of the model are inconsistent."""
    try:
        yield
    except InputsError as error:
        raise ModelError(f"The model is inconsistent: {error}") from None


@model_errors()
def normalize(model: onnx.ModelProto, *, oldest: int = OPSET) -> ir.Model:
    """Return the same computation in the opset and IR version that its graphs are built in.

    Functions are inlined, known sequences are unrolled, an If with a known condition is replaced by
    the branch that it takes, and every node and value is named. Large initializers share the memory
    of `model`.

    - `oldest`: the oldest opset of the result, OPSET or later.

    Raises ModelError if the model is inconsistent, packed weights have wrong sizes, or its opset
    cannot be converted.
    """
    proto = large_tensors_as_inputs(model)
    remove_zip_maps(proto)
    proto = convert_opset(inline_functions(proto), oldest=oldest)
    proto.ir_version = IR_VERSION
    _clear_negative_sizes(proto)
    work = to_ir(proto)
    require_bodies(work.graph)
    RemoveInitializersFromInputsPass()(work)
    NameFixPass()(work)
    if not _has_same_values(proto.graph, work.graph):
        proto = _to_proto(work)
    work = _with_computed_shapes(work, proto, _declared_shapes(model))
    took_branches = take_known_branches(work)
    if unroll_sequences(work) or took_branches:
        work = infer_shapes(work)
    restore_initializers(work.graph, model)
    for value in work.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and value.shape != tensor.shape:
            value.shape = ir.Shape(tensor.shape.numpy())  # the file declares names of sizes
    require_packed_sizes(work.graph)
    remove_places(work)
    # The converter drops metadata, in which exporters record the weights.
    work.graph.metadata_props.update({e.key: e.value for e in model.graph.metadata_props})
    for info in model.graph.value_info:
        if info.metadata_props and info.name in work.graph.initializers:
            metadata = {entry.key: entry.value for entry in info.metadata_props}
            work.graph.initializers[info.name].metadata_props.update(metadata)
    return work


def _clear_negative_sizes(model: onnx.ModelProto) -> None:
    """Replace sizes of -1, written by some exporters, by unknown sizes, in place."""
    graph = model.graph
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_value < 0:
                dim.ClearField("dim_value")


def _declared_shapes(model: onnx.ModelProto) -> dict[str, ir.Shape | None]:
    """Return the shapes of outputs that the file declares. The opset converter changes them."""
    return {
        value.name: ir.serde.deserialize_type_proto_for_shape(value.type)
        for value in model.graph.output
        if value.type.HasField("tensor_type")
    }


def _has_same_values(proto: onnx.GraphProto, graph: ir.Graph) -> bool:
    """Return whether `proto` has inputs and values of the same names as `graph`, and no subgraphs.

    Names of nodes may differ, because shapes do not depend on them.
    """
    if any(subgraphs_of(node) for node in graph):
        return False
    if [v.name for v in proto.input] != [v.name for v in graph.inputs]:
        return False
    written = [name for node in proto.node for name in node.output]
    return written == [v.name for node in graph for v in node.outputs]


def _with_computed_shapes(
    model: ir.Model, proto: onnx.ModelProto, declared: Mapping[str, ir.Shape | None]
) -> ir.Model:
    """Return the model with inferred shapes. Wrong shapes of outputs are corrected, with a warning.

    `proto` has the values of the model. An output whose rank cannot be inferred has its declared
    shape. Raises ModelError if a node fixes the batch of an output.
    """
    _set_inferred(model.graph, _infer_by_onnx(proto).graph)
    _complete_ranks(model.graph)
    if wrong_declarations(model.graph, declared):
        # Declarations of values inside the model may be wrong, too. They change no result.
        del proto.graph.value_info[:]
        model = inferred_model(proto)
        NameFixPass()(model)
        correct_declarations(wrong_declarations(model.graph, declared))
    for value in model.graph.outputs:
        if value.shape is None:
            value.shape = declared.get(value.name or "")
    return model


def infer_shapes(model: ir.Model) -> ir.Model:
    """Give every value the type and shape that can be inferred, in place, and return the model.

    Raises ModelError if shapes are inconsistent.
    """
    _set_inferred(model.graph, _infer_by_onnx(_to_proto(model)).graph)
    _complete_ranks(model.graph)
    return model


def _to_proto(model: ir.Model) -> onnx.ModelProto:
    try:
        return to_proto(model)
    except ir.serde.SerdeError as error:
        # for instance a hidden size of -2^63: an LSTM's weights have four times that size
        raise ModelError(
            f"The model has sizes that ONNX cannot represent: {root_cause(error)}."
        ) from None


def inferred_model(proto: onnx.ModelProto) -> ir.Model:
    """Return a new model with the type and shape of every value that can be inferred."""
    model = to_ir(_infer_by_onnx(proto))
    _complete_ranks(model.graph)
    return model


def _infer_by_onnx(model: onnx.ModelProto) -> onnx.ModelProto:
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


def _set_inferred(graph: ir.Graph, proto: onnx.GraphProto) -> None:
    """Give the values of a graph and its subgraphs the types and shapes of `proto`."""
    values = values_of(graph)
    for info in (*proto.value_info, *proto.output):
        value = values.get(info.name)
        if value is not None:
            ir.serde.deserialize_value_info_proto(info, value)
    for node, node_proto in zip(graph, proto.node):
        bodies = (body for a in node_proto.attribute for body in subgraph_protos(a))
        for body, body_proto in zip(subgraphs_of(node), bodies):
            _set_inferred(body, body_proto)


def _complete_ranks(graph: ir.Graph) -> None:
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

    Raises ModelError if shapes are inconsistent.
    """
    outputs = (value for node in model.graph for value in node.outputs if value.name)
    if all(value.type is not None and value.shape is not None for value in outputs):
        return model
    return infer_shapes(model)


def specialize_shapes(model: ir.Model, shapes: Mapping[str, tuple[int, ...]]) -> ir.Model:
    """Return the model for inputs of exactly these shapes, with every other shape inferred anew.

    - `model`: a model that `normalize` returned, which may be changed.
    - `shapes`: the shapes of inputs by name; other names are ignored.

    Raises ModelError if the model does not accept the shapes.
    """
    _forget_names_of_sizes(model.graph)
    known = {v: shapes[v.name or ""] for v in model.graph.inputs if v.name in shapes}
    changed = {value: shape for value, shape in known.items() if value.shape != shape}
    for value, shape in changed.items():
        value.shape = ir.Shape(shape)
    _fold(model, shapes)
    if changed and not _has_static_shapes(model.graph):
        # ONNX's inference of a whole model goes into subgraphs and follows the names of sizes.
        proto = _to_proto(model)
        _forget_inferred(model.graph, proto.graph)
        model = inferred_model(proto)
        _fold(model, shapes)
    require_steps(model.graph)
    return model


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
    """Return a tensor's name, element type and shape. Raises ModelError for any other value."""
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

    Sequences and maps, which converters of classical models add, are excluded. Raises ModelError
    for a model without a tensor among its outputs.
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

    Everything else is byte-identical. Raises ModelError for a name that is not an initializer.
    """
    return with_tensors(model, as_tensors(arrays))


def as_tensors(arrays: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, onnx.TensorProto]:
    """Return a mapping from name to an initializer of that name with the array."""
    return {
        name: onnx.numpy_helper.from_array(np.ascontiguousarray(array), name)
        for name, array in arrays.items()
    }


def with_tensors(
    model: onnx.ModelProto, tensors: Mapping[str, onnx.TensorProto]
) -> onnx.ModelProto:
    """Return a copy of the model with other initializers of the same names.

    Everything else is byte-identical. Raises ModelError for a name that is not an initializer.
    """
    copy, arrays = with_references(model, tensors)
    include_shared(copy)
    del arrays  # alive until here
    return copy


def with_references(
    model: onnx.ModelProto, tensors: Mapping[str, onnx.TensorProto]
) -> tuple[onnx.ModelProto, list[Contents]]:
    """Return `with_tensors` of the same arguments that refers to arrays as `model` does.

    The second result are these arrays. Keep them alive while using the model.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    require_initializers(copy, tensors)
    return copy, replace_tensors(copy, tensors)
