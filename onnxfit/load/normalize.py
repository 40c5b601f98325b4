"""Normalize a model in memory, so that graphs can be built upon it.

The result has one opset, one IR version and no functions; every value is named and typed.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
import onnx.inliner
import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass, RemoveInitializersFromInputsPass

from onnxfit.errors import ModelError
from onnxfit.graph.fold import take_known_branches
from onnxfit.graph.model import (
    OnnxModel,
    checked_proto,
    complete_ranks,
    infer_by_onnx,
    infer_shapes,
    inferred_model,
    large_tensors_as_inputs,
    model_errors,
    restore_initializers,
    set_inferred,
    to_ir,
)
from onnxfit.graph.subgraphs import subgraphs_of
from onnxfit.load.classical import remove_zip_maps
from onnxfit.load.constant_nodes import remove_places
from onnxfit.load.declarations import correct_declarations, wrong_declarations
from onnxfit.load.opset import IR_VERSION, OPSET, convert_opset
from onnxfit.load.packed_sizes import require_packed_sizes
from onnxfit.load.sequences import unroll_sequences
from onnxfit.load.validity import require_bodies


@model_errors()
def normalize(model: OnnxModel | onnx.ModelProto, *, oldest: int = OPSET) -> ir.Model:
    """Return the same computation in the opset and IR version that its graphs are built in.

    Functions are inlined, known sequences are unrolled, an If with a known condition is replaced by
    the branch that it takes, and every node and value is named. Large initializers share the memory
    of `model`.

    - `oldest`: the oldest opset of the result, OPSET or later.

    Raises ModelError if the model is inconsistent, packed weights have wrong sizes, or its opset
    cannot be converted.
    """
    file = model.proto if isinstance(model, OnnxModel) else model
    proto = large_tensors_as_inputs(file)
    remove_zip_maps(proto)
    proto = convert_opset(inline_functions(proto), oldest=oldest)
    proto.ir_version = IR_VERSION
    _clear_negative_sizes(proto)
    work = to_ir(proto)
    require_bodies(work.graph)
    RemoveInitializersFromInputsPass()(work)
    NameFixPass()(work)
    if not _has_same_values(proto.graph, work.graph):
        proto = checked_proto(work)
    work = _with_computed_shapes(work, proto, _declared_shapes(file))
    took_branches = take_known_branches(work)
    if unroll_sequences(work) or took_branches:
        work = infer_shapes(work)
    restore_initializers(work.graph, file)
    for value in work.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and value.shape != tensor.shape:
            value.shape = ir.Shape(tensor.shape.numpy())  # the file declares names of sizes
    require_packed_sizes(work.graph)
    remove_places(work)
    # The converter drops metadata, in which exporters record the weights.
    work.graph.metadata_props.update({e.key: e.value for e in file.graph.metadata_props})
    for info in file.graph.value_info:
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
    set_inferred(model.graph, infer_by_onnx(proto).graph)
    complete_ranks(model.graph)
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


def inline_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with its functions inlined.

    A model without functions is returned itself. Raises ModelError if a function cannot be inlined.
    """
    if not model.functions:
        return model
    try:
        return onnx.inliner.inline_local_functions(model)
    # ValidationError or RuntimeError, for functions that call themselves or lack an opset import
    except Exception as error:
        raise ModelError(f"The model's functions cannot be inlined: {str(error).strip()}") from None
