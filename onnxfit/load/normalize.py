"""Normalize a model in memory, so that graphs can be built upon it.

The result has one opset, one IR version and no functions; every value is named and typed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import onnx
import onnx.inliner
import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass, RemoveInitializersFromInputsPass

from onnxfit.errors import ModelError, warn_user
from onnxfit.graph.fold import take_known_branches
from onnxfit.graph.inference import infer_outputs
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

    ModelError: the model is inconsistent, packed weights have wrong sizes, or the opset cannot be
    converted.
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
    shape. ModelError: a node fixes the batch of an output.
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

    A model without functions is returned itself. ModelError: a function cannot be inlined.
    """
    if not model.functions:
        return model
    try:
        return onnx.inliner.inline_local_functions(model)
    # ValidationError or RuntimeError, for functions that call themselves or lack an opset import
    except Exception as error:
        raise ModelError(f"The model's functions cannot be inlined: {str(error).strip()}") from None


MADE_UP = "unk__"  # ONNX's inference names sizes that it does not know so; equal names mean nothing


@dataclass(frozen=True, eq=False)
class WrongDeclaration:
    """An output whose declared shape contradicts the computed shape.

    `node` determines the computed shape. `fixes_batch` tells whether it fixes the declared batch.
    """

    value: ir.Value
    declared: ir.Shape
    computed: ir.Shape
    node: ir.Node
    fixes_batch: bool

    def __str__(self) -> str:
        return (
            f"Output {self.value.name!r} is declared with shape {self.declared}, but"
            f" {self.node.op_type} {self.node.name!r} determines shape {self.computed}."
        )


def wrong_declarations(
    graph: ir.Graph, declared: Mapping[str, ir.Shape | None]
) -> list[WrongDeclaration]:
    """Return the outputs whose computed sizes differ from their declared sizes.

    A size named like the first size of an input is the batch. No node may fix the batch, and no
    declaration may.

    - `graph`: a graph whose shapes have been inferred.
    - `declared`: the declared shapes of its outputs.
    """
    first = [v.shape[0] for v in graph.inputs if v.shape]
    names = {size.value for size in first if isinstance(size, ir.SymbolicDim)} - {None}
    batch = {name for name in names if name and not name.startswith(MADE_UP)}
    found = []
    for value in graph.outputs:
        node = value.producer()
        shape = declared.get(value.name or "")
        computed = None if node is None else _computed_shape(graph, node, value)
        if node is None or shape is None or computed is None:
            continue
        pairs = list(zip(shape, computed))
        fixed = any(_is_batch(old, batch) and isinstance(new, int) for old, new in pairs)
        differ = any(
            isinstance(old, int)
            and old >= 0
            and (_is_batch(new, batch) if isinstance(new, ir.SymbolicDim) else old != new)
            for old, new in pairs
        )
        if len(shape) != len(computed) or fixed or differ:
            fixed = fixed and len(shape) == len(computed)
            source = _first_fixed(node) if fixed else node
            found.append(WrongDeclaration(value, shape, computed, source, fixed))
    return found


def correct_declarations(found: Sequence[WrongDeclaration]) -> None:
    """Give outputs their computed shapes, in place, with a warning, as onnxruntime does.

    ModelError: a node fixes the batch, so that the model cannot run other batches.
    """
    for wrong in found:
        if wrong.fixes_batch:
            raise ModelError(
                f"{wrong} Declare the computed shape. If a constant fixes the batch size, use"
                " onnxfit.dynamic_batch(model)."
            )
    for wrong in found:
        wrong.value.shape = wrong.computed
    if found:
        warn_user(
            f"{' '.join(map(str, found))} The computed shape is used. Correct the declaration in"
            " the file to avoid this warning."
        )


def _is_batch(size: int | ir.SymbolicDim, batch: Collection[str | None]) -> bool:
    return isinstance(size, ir.SymbolicDim) and size.value in batch


def _computed_shape(graph: ir.Graph, node: ir.Node, value: ir.Value) -> ir.Shape | None:
    """Return the shape that the node alone gives an output; None if unknown."""
    kept = [(v, v.type, v.shape) for v in node.outputs]
    value.shape = None
    with suppress(ValueError):  # reported when the model is used
        infer_outputs(graph, node)
    computed = value.shape
    for output, type_, shape in kept:
        output.type, output.shape = type_, shape
    return computed


def _first_fixed(node: ir.Node) -> ir.Node:
    """Return the first node before `node`, or `node`, whose output has only fixed sizes."""
    while True:
        made = [v for v in node.inputs if v is not None and v.producer() is not None]
        if not made or not all(v.shape is not None and v.shape.is_static() for v in made):
            return node
        if any(v is not None and v.is_graph_input() for v in node.inputs):
            return node
        producer = made[0].producer()
        assert producer is not None
        node = producer
