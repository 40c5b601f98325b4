"""`add_dropout`: a Dropout in front of layers whose own Dropout an exporter left out."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, Union

import numpy as np
import onnx
import onnx_ir as ir

from onnxfit.checks import check_arguments, name_list, shortened
from onnxfit.errors import ModelError, SettingError, UnknownNameError
from onnxfit.graph import protos
from onnxfit.graph.model import inferred_model, large_tensors_as_inputs, to_ir
from onnxfit.graph.sharing import RESHAPING
from onnxfit.graph.values import values_of
from onnxfit.load.completion import opset_of
from onnxfit.load.constant_nodes import lift_constants, lower_constants
from onnxfit.load.reading import ModelSource, load_model
from onnxfit.tools.editing.constants import matrix_of

__all__ = ["add_dropout"]

LAYERS = {"Conv", "ConvTranspose", "Gemm", "MatMul"}
PASSING = {*RESHAPING, "Flatten"}
EACH_LAYER = "*"
FIRST_OPSET = 7  # whose Dropout drops nothing in inference
OPSET_OF_RATIO = 12  # whose Dropout has its ratio as an input


@check_arguments
def add_dropout(
    model_onnx: ModelSource, rate: float, after: Union[str, Sequence[str]] = EACH_LAYER
) -> onnx.ModelProto:
    r"""Return the model with a Dropout after the selected nodes.

    Exporters leave out Dropout, because it does nothing in inference. In training, the new nodes
    set each number to 0 with probability $r$, and divide the others by $1 - r$ (Srivastava et al.,
    2014). `predict`, `evaluate` and the exported file compute the same as without them. An exported
    file keeps the nodes, so that it can be trained further; runtimes remove them.

    - `model_onnx`: a path, bytes or an `onnx.ModelProto`, which is not changed.
    - `rate`: the probability $r$, above 0 and below 1.
    - `after`: names or fnmatch patterns of nodes, of their first outputs, or of operator types,
      such as "Relu". By default, one Dropout is inserted in front of each Conv, ConvTranspose, Gemm
      and MatMul with a weight, except the first layers, which read the inputs of the model. Nothing
      is inserted after constants, integers, outputs of the model, and where a Dropout is already.

    SettingError: the rate is out of range, or no node remains. UnknownNameError: a pattern matches
    nothing. ModelError: the model cannot be read, or has an opset below 7.

    >>> import onnx.parser
    >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    ...     g (float[N, 2] x) => (float[N, 1] y)
    ...     <float[2, 2] w = {1, 2, 3, 4}, float[2, 1] v = {1, 2}>
    ...     { h = MatMul(x, w)  a = Relu(h)  y = MatMul(a, v) }''')
    >>> [node.op_type for node in add_dropout(model, 0.5).graph.node]
    ['MatMul', 'Relu', 'Dropout', 'MatMul']
    """
    if not 0 < rate < 1:
        raise SettingError(f"add_dropout needs a rate above 0 and below 1, got {shortened(rate)}.")
    patterns = name_list("after", after)
    model = load_model(model_onnx)
    opset = opset_of(model)
    if opset is None or opset < FIRST_OPSET:
        raise ModelError(
            f"add_dropout needs a model of opset {FIRST_OPSET} or later, got opset {opset}. Export"
            " the model again with a later opset."
        )
    lift_constants(model)
    work = to_ir(model)
    places = _places(work, _floats(model))
    if patterns == [EACH_LAYER]:
        chosen = [node for node in places if node in _before_layers(work)]
    else:
        chosen = _matching_places(patterns, work, places)
    if not chosen:
        raise SettingError(
            "add_dropout found no value to drop: nothing is inserted after constants, integers and"
            f" outputs of the model, and where a Dropout is already. Got after={after!r}."
        )
    _insert(model, work, chosen, rate, opset)
    return lower_constants(model)


def _floats(model: onnx.ModelProto) -> set[str]:
    """Return the names of the float tensors of the main graph."""
    inferred = inferred_model(large_tensors_as_inputs(model))
    return {
        name
        for name, value in values_of(inferred.graph).items()
        if value.dtype is not None and value.dtype.is_floating_point()
    }


def _places(work: ir.Model, floats: set[str]) -> list[ir.Node]:
    """Return the nodes of the main graph whose first output can be dropped."""
    computed: set[ir.Value] = {v for v in work.graph.inputs if not v.is_initializer()}
    places = []
    for node in work.graph:
        if not computed.intersection(v for v in _names_read(node) if v is not None):
            continue
        computed.update(node.outputs)
        value = node.outputs[0]
        dropped = node.op_type == "Dropout" or any(
            reader.op_type == "Dropout" for reader in value.consumers()
        )
        if value.name in floats and not value.is_graph_output() and not dropped:
            places.append(node)
    return places


def _names_read(node: ir.Node) -> list[ir.Value | None]:
    """Return what a node and its bodies read."""
    read = list(node.inputs)
    for attribute in node.attributes.values():
        bodies = [attribute.as_graph()] if attribute.type == ir.AttributeType.GRAPH else []
        if attribute.type == ir.AttributeType.GRAPHS:
            bodies = list(attribute.as_graphs())
        for body in bodies:
            read += [v for inner in body.all_nodes() for v in inner.inputs]
    return read


def _before_layers(work: ir.Model) -> set[ir.Node]:
    """Return the nodes whose first output a layer with a weight reads, perhaps reshaped."""
    found = set()
    for node in work.graph:
        if node.op_type not in LAYERS or node.domain not in ("", "ai.onnx"):
            continue
        if matrix_of(node.inputs[1]) is None:
            continue
        maker = node.inputs[0].producer() if node.inputs[0] is not None else None
        while maker is not None and maker.op_type in PASSING and maker.inputs[0] is not None:
            maker = maker.inputs[0].producer()
        if maker is not None:
            found.add(maker)
    return found


def _matching_places(
    patterns: Sequence[str], work: ir.Model, places: Sequence[ir.Node]
) -> list[ir.Node]:
    """Return the places that patterns select. UnknownNameError: one matches no node."""
    chosen = set()
    for pattern in patterns:
        matched = [node for node in work.graph if _is_called(node, pattern)]
        if not matched:
            known = {name for node in work.graph for name in _names_of_place(node)}
            raise UnknownNameError("node, value or operator", pattern, known)
        chosen.update(matched)
    return [node for node in places if node in chosen]


def _names_of_place(node: ir.Node) -> list[str]:
    return [name for name in (node.name, node.outputs[0].name, node.op_type) if name]


def _is_called(node: ir.Node, pattern: str) -> bool:
    return any(name == pattern or fnmatchcase(name, pattern) for name in _names_of_place(node))


def _insert(
    model: onnx.ModelProto, work: ir.Model, chosen: Sequence[ir.Node], rate: float, opset: int
) -> None:
    """Insert a Dropout after each chosen node, in place. Its output has the name of the node's."""
    used = protos.used_names(model)
    locations = protos.node_locations(model, work)
    settings: dict[str, Any] = {"ratio": rate}
    inputs: list[str] = []
    if opset >= OPSET_OF_RATIO:
        ratio = protos.unique_name("dropout.ratio", used)
        protos.add_initializer(model, ratio, np.array(rate, np.float32))
        settings, inputs = {}, [ratio]
    insertions = []
    for node in chosen:
        place = locations[node]
        value = place.proto.output[0]
        place.proto.output[0] = protos.unique_name(f"{value}/kept", used)
        name = protos.unique_name(f"{place.proto.name or value}/dropout", used)
        dropout = onnx.helper.make_node(
            "Dropout", [place.proto.output[0], *inputs], [value], name=name, **settings
        )
        insertions.append((place, dropout))
    protos.insert_nodes(insertions)
