"""Find the nodes that share an initializer, and distinguish tied from merged tensors.

An exporter that writes equal tensors once merges the zero biases and the unit scales of a network
that has not been trained. Sharing is also intended: a module that is called twice reads all of its
tensors twice, and an embedding table may also be the weight of the last layer.

`uses_by_layer` groups the uses of a tensor by the layer that they belong to, which the graph may
call several times. A tensor with several groups is shared by different layers.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxfit.errors import warn_user
from onnxfit.graph.model import to_ir
from onnxfit.graph.subgraphs import nodes_of
from onnxfit.graph.weights import FLOATS, LAYERS

Array = np.ndarray[Any, np.dtype[Any]]

# torch's exporter notes the modules around a node, from the outermost to the operator itself.
MODULES = "pkg.torch.onnx.name_scopes"
CLASSES = "pkg.torch.onnx.class_hierarchy"
# `onnxfit.tie` and `untie` note it in a tensor: its uses belong together.
TIED = "onnxfit.tied"

NORMALIZATIONS = {
    "BatchNormalization",
    "GroupNormalization",
    "InstanceNormalization",
    "LayerNormalization",
    "RMSNormalization",
    "SimplifiedLayerNormalization",
}
RECURRENT = {"GRU", "LSTM", "RNN"}
# modules of torch.nn with several tensors of a role
SEVERAL_TENSORS = (
    "torch.nn.modules.activation.MultiheadAttention",
    "torch.nn.modules.rnn.",
    "torch.nn.modules.transformer.",
)
PARAMETER_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)+")
# between a layer and the Add of its bias
RESHAPING = {"Cast", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
READS_NO_VALUES = {"Shape", "Size"}
MAX_STEPS = 4  # nodes between a layer and its bias
MAX_NEIGHBOURS = 200  # nodes that are searched for the next matrix
MAX_NAMES = 5  # names in a warning, which counts the others

BIAS = "bias"
SCALE = "scale"
TABLE = "table"  # of an embedding
OTHER = "other"


@dataclass(frozen=True)
class Use:
    """One input of a node that reads a tensor.

    `alias` is the name of the Identity through which the node reads it, if that is the name of a
    parameter. `role` is the purpose of the tensor in its layer, in the words of torch where there
    is one: "weight", "bias", "scale", "running_mean", ...; "table" for an embedding's, and "other".
    """

    node: ir.Node
    index: int
    alias: str | None
    role: str


LayerUses = Sequence[Use]


def uses_of(value: ir.Value) -> list[Use]:
    """Return the uses of a value by all nodes, in and outside of subgraphs.

    Nodes behind an Identity are uses. The Identity itself is a use only if its output is a graph
    output.
    """
    return list(_uses_through(value, value, None))


def _uses_through(root: ir.Value, value: ir.Value, alias: str | None) -> Iterator[Use]:
    for usage in value.uses():
        node, index = usage.node, usage.idx
        if node.op_type == "Identity" and not node.domain and not node.outputs[0].is_graph_output():
            copy = node.outputs[0]
            named = PARAMETER_NAME.fullmatch(copy.name or "")
            yield from _uses_through(root, copy, copy.name if named else alias)
        else:
            yield Use(node, index, alias, _role_in_layer(root, node, index))


def reader_counts(model: ir.Model) -> dict[str, int]:
    """Return how many nodes read each initializer, directly or through Identity."""
    return {
        name: len({use.node for use in uses_of(value) if use.node.op_type not in READS_NO_VALUES})
        for name, value in model.graph.initializers.items()
    }


def used_by(count: int) -> str:
    """Return how a table says that several nodes read a tensor."""
    return f"used by {count} nodes"


def is_tied_on_purpose(value: ir.Value) -> bool:
    """Return whether a tensor is an embedding's table, or marked as tied.

    Equal tables of zeros, such as relative positions, may have been merged as well.
    """
    is_table = any(use.role == TABLE for use in uses_of(value)) and not is_constant(value)
    return TIED in value.metadata_props or is_table


def uses_by_layer(value: ir.Value) -> list[LayerUses]:
    """Return the uses of an initializer, grouped by the layers that they belong to.

    An Identity with the name of a parameter tells the layer of its readers; torch's older exporter
    writes it for each merged parameter. A module of torch.nn in the exporter's metadata tells it as
    well. Otherwise uses belong to one layer if they have the same role, the same operator and, if
    known, the same module, and if the layer's other weights are the same. These other weights and
    the tensor itself may each hold one repeated number (zeros, ones), as in a LayerNormalization
    before training. Then the next matrices after the layer or before it must also be the same, as
    in a block that is called twice. Tensors of different numbers are not merged by chance.
    """
    constant = is_constant(value)
    uses = uses_of(value)
    named = any(use.alias is not None for use in uses)
    groups: dict[object, list[Use]] = {}
    for use in uses:
        key: object = use.alias
        if named and use.node.inputs[use.index] is value:
            key = value.name
        elif use.alias is None:
            unknown = use.role == OTHER and not constant
            key = OTHER if unknown else _layer_key(use)
        groups.setdefault(key, []).append(use)
    places: list[LayerUses] = []
    for key, group in groups.items():
        certain = isinstance(key, str) or not constant or _is_one_module(group)
        places += [group] if certain else _by_neighbours(group)
    return places


def is_constant(value: ir.Value) -> bool:
    """Return whether all elements of an initializer are equal."""
    tensor = value.const_value
    if tensor is None or tensor.size == 0:
        return False
    array = tensor.numpy().reshape(-1)
    return bool((array == array[0]).all())


def module_of(node: ir.Node) -> str | None:
    """Return the path of a node's module; None if no exporter recorded it."""
    scopes = _noted_list(node, MODULES)
    return scopes[-2] if len(scopes) > 1 else None


def merged_weights(model: onnx.ModelProto, weights: Collection[str]) -> list[str]:
    """Return the weights that are biases or scales of several layers.

    A weight that Identity nodes copy under the names of parameters counts as well.
    """
    if not _has_several_readers(model, set(weights)):
        return []  # reading a large model again takes time
    initializers = to_ir(model).graph.initializers
    return [name for name in weights if name in initializers and _is_merged(initializers[name])]


def warn_of_merged_weights(model: onnx.ModelProto, weights: Collection[str]) -> None:
    """Warn once of the weights that are biases or scales of several layers."""
    merged = merged_weights(model, weights)
    if not merged:
        return
    shown = ", ".join(map(repr, merged[:MAX_NAMES]))
    more = f" and {len(merged) - MAX_NAMES} more" if len(merged) > MAX_NAMES else ""
    one = len(merged) == 1
    warn_user(
        f"{shown}{more} {'is a weight' if one else 'are weights'} of several layers, which the"
        f" exporter merged because {'it was' if one else 'they were'} equal. Give each layer its"
        " own weight with Trainer(onnxfit.untie(model), ...), or ignore this warning if the layers"
        " share a weight on purpose."
    )


def warn_of_untied_tables(model: onnx.ModelProto, weights: Mapping[str, Array]) -> None:
    """Warn of weights that are transposed copies of an embedding's table."""
    gathered = {
        node.input[0] for node in nodes_of(model.graph) if node.op_type == "Gather" and node.input
    }
    copies = {
        name: table
        for table in weights
        if table in gathered
        for name, array in weights.items()
        if name != table and _is_transposed_copy(array, weights[table])
    }
    if not copies:
        return
    name, table = next(iter(copies.items()))
    warn_user(
        f"{name!r} has the values of the embedding table {table!r}, transposed. torch's exporter"
        " writes a weight that two layers share as two weights, which would be trained separately."
        f" Tie them with Trainer(onnxfit.tie(model, {copies}), ...), or ignore this warning if they"
        " are separate on purpose."
    )


def _is_transposed_copy(array: Array, table: Array) -> bool:
    if table.ndim != 2 or array.shape != table.shape[::-1] or not table.size:
        return False
    if not np.array_equal(array[0], table[:, 0]):  # settles nearly all cases without reading all
        return False
    return bool((table != table.flat[0]).any()) and np.array_equal(array, table.T)


def _is_merged(value: ir.Value) -> bool:
    if len(uses_of(value)) < 2 or is_tied_on_purpose(value):
        return False
    layers = uses_by_layer(value)
    uses = [use for layer in layers for use in layer]
    copied = any(use.alias is not None for use in uses)
    noted = all(module_of(use.node) or _module_in_name(use.node) for use in uses)
    if not (copied or noted or is_constant(value)):
        return False  # different numbers are equal on purpose, unless torch copied a whole module
    return sum(copied or layer[0].role in (BIAS, SCALE) for layer in layers) > 1


def _has_several_readers(model: onnx.ModelProto, names: set[str]) -> bool:
    seen: set[str] = set()
    for node in nodes_of(model.graph):
        for name in node.input:
            if name in names and (name in seen or node.op_type == "Identity"):
                return True
            seen.add(name)
    return False


def _role_in_layer(value: ir.Value, node: ir.Node, index: int) -> str:
    """Return the purpose of an initializer in the layer of a node that reads it."""
    op_type = node.op_type
    if op_type in NORMALIZATIONS:
        return ("x", SCALE, BIAS, "running_mean", "running_var")[index]
    if op_type in ("Conv", "ConvTranspose", "Gemm"):
        return ("weight", "weight", BIAS)[index]
    if op_type in RECURRENT:
        return ("x", "weight_ih", "weight_hh", BIAS)[index] if index < 4 else OTHER
    if op_type in ("MatMul", "Transpose", "PRelu"):
        return "weight"
    if op_type == "Gather" and index == 0:
        return TABLE
    if _is_vector(value):
        if op_type == "Mul":
            return SCALE
        if op_type == "Add" and _weights_before(node, index):
            return BIAS
    return OTHER


def _is_vector(value: ir.Value) -> bool:
    shape = value.shape
    return shape is not None and len(shape) > 0 and sum(d != 1 for d in shape) <= 1


def _layer_key(use: Use) -> object:
    node = use.node
    if _module_of_torch(node) is not None:
        return (use.role, _module_of_torch(node))
    others = tuple(weight.name if weight is not None else None for weight in _other_weights(use))
    module = module_of(node) or _module_in_name(node)
    return (node.domain, node.op_type, use.role, module, others)


@dataclass(frozen=True)
class _Weight:
    """A float initializer, by the name of the parameter that it is, perhaps behind an Identity."""

    name: str
    initializer: ir.Value


def _other_weights(use: Use) -> list[_Weight | None]:
    """Return the other weights of the layer that reads a tensor, None for inputs without one."""
    node = use.node
    if node.op_type in LAYERS | NORMALIZATIONS:
        return [_weight_at(v) for i, v in enumerate(node.inputs[1:], 1) if i != use.index]
    return list(_weights_before(node, use.index))


def _weights_before(node: ir.Node, index: int) -> list[_Weight]:
    """Return the weights of the node that makes the other operand of an Add, Mul, ..."""
    others = [v for i, v in enumerate(node.inputs) if i != index and v is not None]
    if len(others) != 1:
        return []
    maker = others[0].producer()
    for _ in range(MAX_STEPS):
        if maker is None or maker.op_type not in RESHAPING or maker.inputs[0] is None:
            break
        maker = maker.inputs[0].producer()
    if maker is None:
        return []
    return [weight for v in maker.inputs if (weight := _weight_at(v)) is not None]


def _weight_at(value: ir.Value | None) -> _Weight | None:
    name = None
    while value is not None:
        if value.is_initializer():
            return _Weight(name or value.name or "", value) if value.dtype in FLOATS else None
        maker = value.producer()
        if maker is None or maker.op_type not in ("Identity", "Transpose"):
            return None
        if maker.op_type == "Identity" and PARAMETER_NAME.fullmatch(value.name or ""):
            name = name or value.name
        value = maker.inputs[0]
    return None


def _is_one_module(group: Sequence[Use]) -> bool:
    """Return whether uses with the same key are surely calls of one module.

    They are if another weight of the layer has different numbers, or if torch's exporter recorded
    the module. The older exporter marks merged parameters by an Identity.
    """
    node = group[0].node
    if _module_of_torch(node) is not None or _module_in_name(node):
        return True
    others = [weight for weight in _other_weights(group[0]) if weight is not None]
    return any(not is_constant(weight.initializer) for weight in others)


def _module_in_name(node: ir.Node) -> str:
    """Return the path of the module in a node's name from torch's older exporter.

    The exporter adds a number to the name of a module at each further call.
    """
    name = node.name or ""
    path = name.rpartition("/")[0] if name.startswith("/") else ""
    return re.sub(r"_\d+(?=/|$)", "", path)


def _module_of_torch(node: ir.Node) -> str | None:
    """Return the path of the module of torch.nn that a node belongs to.

    None for a module that may have several tensors of a role, such as a user's module.
    """
    classes = _noted_list(node, CLASSES)
    name = str(classes[-2]) if len(classes) > 1 else ""
    if not name.startswith("torch.nn.modules.") or name.startswith(SEVERAL_TENSORS):
        return None
    return module_of(node)


def _noted_list(node: ir.Node, key: str) -> list[str]:
    text = node.metadata_props.get(key)
    if not text:
        return []
    try:
        noted = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return []
    return noted if isinstance(noted, list) else []


def _by_neighbours(group: Sequence[Use]) -> list[LayerUses]:
    """Split uses into those with the same next matrices after them, or before them."""
    if len(group) == 1:
        return [group]
    same_as = list(range(len(group)))  # the use before it in the same group, or itself

    def first(i: int) -> int:
        while same_as[i] != i:
            same_as[i] = same_as[same_as[i]]
            i = same_as[i]
        return i

    seen: dict[tuple[str, frozenset[str]], int] = {}
    for i, use in enumerate(group):
        for side, neighbours in (("after", ir.Node.successors), ("before", ir.Node.predecessors)):
            matrices = _matrices_near(use.node, neighbours)
            if matrices:
                j = seen.setdefault((side, matrices), i)
                same_as[max(first(i), first(j))] = min(first(i), first(j))
    groups: dict[int, list[Use]] = {}
    for i, use in enumerate(group):
        groups.setdefault(first(i), []).append(use)
    return list(groups.values())


def _matrices_near(
    node: ir.Node, neighbours: Callable[[ir.Node], Iterable[ir.Node]]
) -> frozenset[str]:
    """Return the names of the first matrices that a search from a node finds on each path."""
    found: set[str] = set()
    seen = {node}
    waiting = [node]
    while waiting and len(seen) < MAX_NEIGHBOURS:
        for near in neighbours(waiting.pop(0)):
            if near in seen:
                continue
            seen.add(near)
            names = _matrix_names(near)
            found |= names
            if not names:
                waiting.append(near)
    return frozenset(found)


def _matrix_names(node: ir.Node) -> set[str]:
    """Return the names of a node's float initializers with two axes or more."""
    weights = [
        _weight_at(v)
        for v in node.inputs
        if v is not None and v.shape is not None and len(v.shape) > 1
    ]
    return {weight.name for weight in weights if weight is not None}
