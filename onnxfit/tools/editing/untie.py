"""`untie`: a copy of a shared weight for each layer that reads it."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import onnx
import onnx_ir as ir

from onnxfit.checks import name_list
from onnxfit.errors import UnknownNameError
from onnxfit.graph import protos
from onnxfit.graph.index import tensors_of
from onnxfit.graph.model import to_ir
from onnxfit.graph.records import KIND
from onnxfit.graph.sharing import (
    OTHER,
    SCALE,
    TABLE,
    TIED,
    LayerUses,
    Use,
    is_tied_on_purpose,
    uses_by_layer,
    uses_of,
)
from onnxfit.graph.weights import all_weights, statistics
from onnxfit.load.constant_nodes import lift_constants, lower_constants
from onnxfit.load.reading import ModelSource, load_model

__all__ = ["untie"]

STATISTICS = ("running_mean", "running_var")


def untie(model_onnx: ModelSource, names: Sequence[str] | str | None = None) -> onnx.ModelProto:
    """Return the model with a separate copy of each shared weight for each layer that reads it.

    Exporters write equal tensors only once. In an untrained network, the biases (zeros) and the
    scales of normalizations (ones) are equal, so its file would train fewer weights than the
    network has. The returned model has the same outputs as the given model.

    If the exporter replaced a copy by an Identity, the copy gets the name of this Identity, if that
    is the name of a parameter. Other copies are named after their layers, such as
    `encoder.norm2.weight`. One layer keeps the old name. Nodes inside a function of the model are
    not changed: a call of the function is one use.

    - `model_onnx`: a path, bytes or an `onnx.ModelProto`, which is not changed.
    - `names`: names and fnmatch patterns of initializers, in any order, where `"!pattern"`
      excludes; each node that reads one of them gets a copy. None selects every weight and every
      running statistic, except tensors that look shared on purpose: the table of an embedding
      (`Gather`), even if it is also the weight of the last layer; a tensor that `onnxfit.tie`
      tied; and the weights of a layer that is called several times, all of whose weights are
      shared. If `names` selects them, they are untied, too. Patterns that only exclude start from
      the selection of None.

    ModelError: the model cannot be read. UnknownNameError: the model has no initializer of a name.

    >>> import onnx.parser
    >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    ...     g (float[N, 2] x) => (float[N, 2] y)
    ...     <float[2, 2] u = {1, 2, 3, 4}, float[2, 2] v = {5, 6, 7, 8}, float[2] bias = {0, 0}>
    ...     { h = Gemm(x, u, bias) y = Gemm(h, v, bias) }''')
    >>> [t.name for t in untie(model).graph.initializer]
    ['u', 'v', 'bias', 'y.bias']
    """
    model = load_model(model_onnx)
    lift_constants(model)
    work = to_ir(model)
    selected = {name: places for name, places in _places_of(work, names).items() if len(places) > 1}
    if selected:
        _Copies(model, work).make(selected)
    return lower_constants(model)


def _places_of(work: ir.Model, names: Sequence[str] | str | None) -> dict[str, list[LayerUses]]:
    """Return the places of every initializer to untie."""
    initializers = work.graph.initializers
    patterns = [] if names is None else name_list("names", names)
    excluded = [p[1:] for p in patterns if p.startswith("!") and p not in initializers]
    included = [p for p in patterns if p in initializers or not p.startswith("!")]
    for pattern in (*included, *excluded):
        if not any(_matches(name, pattern) for name in initializers):
            raise UnknownNameError("initializer", pattern, initializers)
    kept = [name for name in initializers if not any(_matches(name, p) for p in excluded)]
    if included:
        chosen = [name for name in kept if any(_matches(name, p) for p in included)]
        return {name: _by_node(initializers[name]) for name in chosen}
    weights = {*all_weights(work), *statistics(work)}
    return {
        name: uses_by_layer(initializers[name])
        for name in kept
        if (name in weights or _is_copied(initializers[name]))
        and not is_tied_on_purpose(initializers[name])
    }


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)


def _by_node(value: ir.Value) -> list[LayerUses]:
    places: dict[ir.Node, list[Use]] = {}
    for use in uses_of(value):
        places.setdefault(use.node, []).append(use)
    return list(places.values())


def _is_copied(value: ir.Value) -> bool:
    """Return whether an Identity of a parameter's name copies a float initializer."""
    is_float = value.dtype is not None and value.dtype.is_floating_point()
    return is_float and any(use.alias is not None for use in uses_of(value))


class _Copies:
    """Editor that adds the copies to a model."""

    def __init__(self, model: onnx.ModelProto, work: ir.Model) -> None:
        self.model = model
        self.work = work
        self.nodes = protos.node_locations(model, work)
        self.used = protos.used_names(model)
        self.tensors = tensors_of(model.graph)

    def make(self, selected: dict[str, list[LayerUses]]) -> None:
        new_names: set[str] = set()
        for name, places in selected.items():
            owner = _owner(name, places)
            for place in places:
                if place is not owner:
                    new_names.add(self._copy(name, place, new_names))
        self._remove_identities(new_names)
        for name, places in selected.items():
            owner = _owner(name, places)
            protos.remove_note(self.model, name, TIED)
            if owner is not None:
                self._note_calls(name, owner)
            elif not protos.is_read(self.model, name):
                protos.remove_initializer(self.model, name)

    def _note_calls(self, name: str, place: LayerUses) -> None:
        """Note in the model that the nodes that still share a tensor do so on purpose.

        The Identity nodes that showed it are removed, so nothing else may show it any more.
        """
        if len({use.node for use in place}) > 1:
            protos.set_note(self.model, name, TIED, "true")

    def _copy(self, name: str, place: LayerUses, taken: set[str]) -> str:
        """Add a copy of an initializer for the uses of one place; return its name."""
        use = place[0]
        if use.alias is not None and use.alias not in taken:
            copy = use.alias
        else:
            copy = protos.unique_name(_derived_name(name, use), self.used)
        noted = KIND in self.work.graph.initializers[name].metadata_props
        parameter = use.role not in STATISTICS if noted else None
        protos.copy_initializer(self.model, self.tensors[name], copy, parameter)
        for other in place:
            self.nodes[other.node].proto.input[other.index] = copy
        self._note_calls(copy, place)
        return copy

    def _remove_identities(self, new_names: set[str]) -> None:
        """Remove each Identity whose output has become an initializer, or is unused."""
        identities = [
            location
            for node, location in self.nodes.items()
            if node.op_type == "Identity"
            and not node.outputs[0].is_graph_output()
            and _source(node) in self.tensors
        ]
        for location in sorted(identities, key=lambda location: -location.position):
            output = location.proto.output[0]
            if output in new_names:
                del location.graph.node[location.position]
            elif not protos.is_read(self.model, output):
                del location.graph.node[location.position]
                infos = location.graph.value_info
                for i in reversed([i for i, v in enumerate(infos) if v.name == output]):
                    del infos[i]


def _source(node: ir.Node) -> str | None:
    """Return the name of the value at the beginning of a chain of Identity nodes."""
    value = node.inputs[0]
    while value is not None:
        maker = value.producer()
        if maker is None or maker.op_type != "Identity":
            return value.name
        value = maker.inputs[0]
    return None


def _owner(name: str, places: Sequence[LayerUses]) -> LayerUses | None:
    """Return the place that keeps the old name, or None if each place has its own name."""
    without_name = [place for place in places if place[0].alias is None]
    same_name = [place for place in without_name if _derived_name(name, place[0]) == name]
    return next(iter([*same_name, *without_name]), None)


def _derived_name(name: str, use: Use) -> str:
    if use.role == OTHER:
        last = name.rpartition(".")[2]
    else:
        last = "weight" if use.role in (SCALE, TABLE) else use.role
    return f"{protos.layer_name(use.node)}.{last}"
