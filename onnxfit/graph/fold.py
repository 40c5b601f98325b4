"""Compute the values that constants and the sizes of a batch determine.

Exporters write shapes as arithmetic (Shape, Gather, Concat, Reshape), which ONNX's own inference
follows only in part. One walk over the graph replaces every node whose inputs are known by its
value, and gives every other node the shapes that follow. An If whose condition is known is replaced
by the branch that it takes. onnx-ir's passes lift constants but do not compute; onnxruntime
computes, but only inside a session, after the gradient has been built.

The walk enters an If from outside, so that it visits every node once, and no node of a branch that
is not taken.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from typing import Any, Union

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from onnxfit.graph.index import constant_of, tensors_of
from onnxfit.graph.inference import infer_outputs
from onnxfit.graph.names import unused
from onnxfit.graph.shared_tensors import array_of
from onnxfit.graph.spec import known_sizes
from onnxfit.graph.subgraphs import detach, graph_protos, nodes_of, subgraphs_of

Array = npt.NDArray[Any]
ArrayOf = Callable[[ir.Value], Union[Array, None]]
MAX_FOLDED_ELEMENTS = 1024  # elements of a value that is computed: shapes and axes, not weights
MAX_LENGTH = 2**24  # of a vector whose numbers ONNX's inference may propagate
RANDOM = {
    "Bernoulli",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
}


# Operators whose output can be much larger than their inputs -> the inputs that decide its size
SIZE_INPUTS: dict[str, tuple[int, ...]] = {
    "BlackmanWindow": (0,),
    "ConstantOfShape": (0,),
    "Expand": (1,),
    "HammingWindow": (0,),
    "HannWindow": (0,),
    "OneHot": (1,),
    "Pad": (1,),
    "Range": (0, 1, 2),
    "Resize": (2, 3),
    "Tile": (1,),
}

_INTEGERS = {ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL}
_ANY_TYPE = {"Cast", "Constant", "Identity"}  # operators that are also computed for floats


def makes_long_vectors(graph: onnx.GraphProto) -> bool:
    """Return whether a constant makes the output of an operator such as Expand very long."""
    constants: dict[str, onnx.TensorProto] = {}
    for inner in graph_protos(graph):
        constants.update(tensors_of(inner))
        for node in inner.node:
            tensors = [a.t for a in node.attribute if a.HasField("t")]
            constants.update(zip(node.output, tensors if node.op_type == "Constant" else ()))
    return any(
        _has_large_number(constants[node.input[position]])
        for node in nodes_of(graph)
        for position in SIZE_INPUTS.get(node.op_type, ())
        if position < len(node.input) and node.input[position] in constants
    )


def _has_large_number(tensor: onnx.TensorProto) -> bool:
    if math.prod(tensor.dims) > MAX_FOLDED_ELEMENTS:
        return False  # tensors of sizes are small
    array = array_of(tensor)
    return array.dtype.kind in "iuf" and bool(np.any(np.abs(array.astype(float)) > MAX_LENGTH))


def fold_shapes(model: ir.Model) -> None:
    """Fold the main graph and the branches of its Ifs in place.

    A node that cannot be computed stays. The initializers must not include trained weights.
    """
    _Folding(model.graph).walk(model.graph)


def take_known_branches(model: ir.Model) -> bool:
    """Replace each If whose condition is known by the branch that it takes, in place.

    All other nodes stay. Float initializers count as unknown, because they may be trained. Returns
    whether an If was replaced.
    """
    if not any(node.op_type == "If" for node in ir.traversal.RecursiveGraphIterator(model.graph)):
        return False
    folding = _BranchFolding(model.graph)
    folding.walk(model.graph)
    return folding.takes_branches


class _Folding:
    """The walk over a graph and the graphs inside it that replaces known values."""

    def __init__(self, graph: ir.Graph) -> None:
        self.takes_branches = False
        self._graph = graph
        self._names: _Names | None = None  # most graphs have no If to replace

    def walk(self, graph: ir.Graph, *, in_body: bool = False, in_loop: bool = False) -> None:
        """Fold a graph and the graphs inside it, in place.

        - `in_body`: whether the graph is inside a node. A branch may contradict the sizes of its
          inputs, if it is never taken with these sizes.
        - `in_loop`: whether the graph is inside a Loop or a Scan. The file may declare the sizes of
          the first iteration, so that no size is known.
        """
        waiting = deque(graph)
        while waiting:
            node = waiting.popleft()
            branch = self._taken_branch(node)
            if branch is not None:
                waiting.extendleft(reversed(self._take(graph, node, branch)))
                continue
            for body in subgraphs_of(node):
                body.opset_imports.update(graph.opset_imports)  # a body in a file has none
                self.walk(body, in_body=True, in_loop=in_loop or node.op_type != "If")
            reads_sizes = node.op_type in ("Shape", "Size") or _selects_sizes(node)
            arrays = None if in_loop and reads_sizes else self._computed(node, graph)
            if arrays is not None:
                self._replace(graph, node, arrays)
            elif not in_loop:
                with suppress(ValueError) if in_body else nullcontext():
                    self._infer(graph, node)

    def _array_of(self, value: ir.Value) -> Array | None:
        """Return a small array that a value is known to have, else None."""
        return constant_array(value)

    def _computed(self, node: ir.Node, graph: ir.Graph) -> list[Array] | None:
        """Return the values of a node's outputs, None if they are unknown."""
        return computed_values(node, graph)

    def _replace(self, graph: ir.Graph, node: ir.Node, arrays: list[Array]) -> None:
        """Replace a node by its values, unless an output of the graph is among them."""
        if not any(v.is_graph_output() for v in node.outputs):
            _replace_by_constants(graph, node, arrays)

    def _infer(self, graph: ir.Graph, node: ir.Node) -> None:
        """Give the outputs of a node the shapes that follow from its inputs."""
        before = [v.shape for v in node.outputs]
        infer_outputs(graph, node)
        for value, shape in zip(node.outputs, before):
            value.shape = known_sizes(value.shape, shape)

    def _taken_branch(self, node: ir.Node) -> ir.Graph | None:
        """Return the branch of an If whose condition is known, None for any other node."""
        if node.op_type != "If" or node.domain != "" or node.inputs[0] is None:
            return None
        condition = self._array_of(node.inputs[0])
        if condition is None or condition.size != 1:
            return None
        return node.attributes["then_branch" if condition.item() else "else_branch"].as_graph()

    def _take(self, graph: ir.Graph, node: ir.Node, branch: ir.Graph) -> list[ir.Node]:
        """Replace an If by the nodes of one of its branches, and return them."""
        self.takes_branches = True
        if self._names is None:
            self._names = _Names(self._graph)
        initializers = _initializers_as_nodes(branch)
        outputs = list(branch.outputs)
        branch.outputs.clear()
        nodes = list(branch)
        branch.remove(nodes)
        nodes = [*initializers, *nodes]
        graph.insert_before(node, nodes)
        self._names.make_unique(nodes)
        for old, new in zip(node.outputs, outputs):
            new.type, new.shape = new.type or old.type, known_sizes(new.shape, old.shape)
            result = new
            if old.is_graph_output():  # it keeps its name
                copy = ir.Node("", "Identity", [new], name=f"{node.name}/{old.name}")
                graph.insert_before(node, copy)
                nodes.append(copy)
                result = copy.outputs[0]
                result.type, result.shape = new.type, new.shape
                result.name, old.name = old.name, None
            old.replace_all_uses_with(result, replace_graph_outputs=True)
        detach(node)
        graph.remove(node, safe=True)
        return nodes


class _BranchFolding(_Folding):
    """The walk that replaces Ifs alone. It computes the nodes on which conditions depend."""

    def __init__(self, graph: ir.Graph) -> None:
        super().__init__(graph)
        self._needed = _nodes_of_conditions(graph)
        self._known: dict[ir.Value, Array] = {}

    def _array_of(self, value: ir.Value) -> Array | None:
        if value in self._known:
            return self._known[value]
        is_float = value.dtype is not None and value.dtype.is_floating_point()
        return None if is_float and value.is_initializer() else constant_array(value)

    def _computed(self, node: ir.Node, graph: ir.Graph) -> list[Array] | None:
        return computed_values(node, graph, self._array_of) if node in self._needed else None

    def _replace(self, graph: ir.Graph, node: ir.Node, arrays: list[Array]) -> None:
        self._known.update(zip(node.outputs, arrays))

    def _infer(self, graph: ir.Graph, node: ir.Node) -> None:
        """Infer an unknown rank, which may follow from the branch of an If before."""
        if any(v.shape is None and v.name for v in node.outputs):
            with suppress(ValueError):  # inconsistent sizes are reported when the model runs
                infer_outputs(graph, node)


class _Names:
    """The names of all values and of all nodes of a graph and the graphs inside it."""

    def __init__(self, graph: ir.Graph) -> None:
        nodes = list(ir.traversal.RecursiveGraphIterator(graph))
        bodies = [graph, *(body for node in nodes for body in subgraphs_of(node))]
        inputs = [v for body in bodies for v in (*body.inputs, *body.initializers.values())]
        self._nodes = Counter(node.name for node in nodes)
        self._values = Counter(
            [v.name for v in inputs] + [v.name for n in nodes for v in n.outputs]
        )

    def make_unique(self, nodes: Iterable[ir.Node]) -> None:
        """Rename nodes and their outputs that have the name of another one anywhere.

        Two branches may have values of the same name, but a graph may not.
        """
        for node in nodes:
            node.name = self._unique(node.name, self._nodes)
            for value in node.outputs:
                value.name = self._unique(value.name, self._values)

    @staticmethod
    def _unique(name: str | None, names: Counter[str | None]) -> str | None:
        if not name or names[name] <= 1:
            return name
        names[name] -= 1
        name = unused(name, names.__contains__)
        names[name] += 1
        return name


def _nodes_of_conditions(graph: ir.Graph) -> set[ir.Node]:
    """Return the nodes on which the condition of an If depends."""
    nodes = ir.traversal.RecursiveGraphIterator(graph)
    waiting = [node.inputs[0] for node in nodes if node.op_type == "If"]
    needed: set[ir.Node] = set()
    while waiting:
        value = waiting.pop()
        producer = None if value is None else value.producer()
        if producer is not None and producer not in needed:
            needed.add(producer)
            waiting += [*producer.inputs, *(v for b in subgraphs_of(producer) for v in b.outputs)]
    return needed


def _initializers_as_nodes(branch: ir.Graph) -> list[ir.Node]:
    """Replace the initializers of a branch by Constants, which are returned.

    An initializer of the main graph would count as a weight, but the main graph of the file has no
    such initializer.
    """
    constants = []
    for name, value in list(branch.initializers.items()):
        if value.const_value is None:
            continue
        tensor = ir.AttrTensor("value", value.const_value)
        constant = ir.Node("", "Constant", [], [tensor], name=name)
        new = constant.outputs[0]
        new.type, new.shape = value.type, value.shape
        value.replace_all_uses_with(new, replace_graph_outputs=True)
        del branch.initializers[name]
        new.name = name
        constants.append(constant)
    return constants


def _replace_by_constants(graph: ir.Graph, node: ir.Node, values: list[Array]) -> None:
    for value, array in zip(node.outputs, values):
        tensor = ir.tensor(array, name=value.name)
        constant = ir.Value(
            name=value.name,
            shape=ir.Shape(array.shape),
            type=ir.TensorType(tensor.dtype),
            const_value=tensor,
        )
        value.replace_all_uses_with(constant)
        value.name = None
        graph.register_initializer(constant)
    graph.remove(node, safe=True)


def constant_array(value: ir.Value) -> Array | None:
    """Return the array of a constant, None if it is large or the value is computed."""
    return constant_of(value, MAX_FOLDED_ELEMENTS)


def computed_values(
    node: ir.Node, graph: ir.Graph, array_of: ArrayOf = constant_array
) -> list[Array] | None:
    """Return the values of a node's outputs, None if they are unknown or not small.

    `array_of` returns the array of an input, None if it is unknown or not small.
    """
    if node.domain not in ("", "ai.onnx") or node.op_type in RANDOM:
        return None
    if subgraphs_of(node):
        return None
    if node.op_type in ("Shape", "Size"):
        sizes = _all_known(_sizes_read_by(node))
        if sizes is None or math.prod(sizes) >= 2**63:
            return None
        return [np.array(sizes if node.op_type == "Shape" else math.prod(sizes), np.int64)]
    if _selects_sizes(node):
        return _selected_sizes(node, graph, array_of)
    return _evaluated(node, graph, array_of)


def _sizes_read_by(node: ir.Node) -> list[int | ir.SymbolicDim] | None:
    """Return the sizes that a Shape or Size reads, None if their number is unknown."""
    value = node.inputs[0]
    if value is None or value.shape is None:
        return None
    start = node.attributes.get_int("start", 0)
    return list(value.shape)[start : node.attributes.get_int("end", None)]


def _all_known(sizes: list[int | ir.SymbolicDim] | None) -> list[int] | None:
    """Return the sizes if all are numbers."""
    numbers = [size for size in sizes or () if isinstance(size, int)]
    return numbers if sizes is not None and len(numbers) == len(sizes) else None


def _selects_sizes(node: ir.Node) -> bool:
    """Return whether a node selects elements of a Shape that was not computed."""
    selects = node.op_type in ("Gather", "Slice") and node.domain == ""
    value = node.inputs[0] if selects else None
    producer = None if value is None else value.producer()
    return producer is not None and producer.op_type == "Shape" and producer.domain == ""


def _selected_sizes(node: ir.Node, graph: ir.Graph, array_of: ArrayOf) -> list[Array] | None:
    """Return the sizes that a node selects from a Shape. Others may be unknown, as the batch size.

    The node selects positions as it selects sizes.
    """
    shape = node.inputs[0]
    producer = None if shape is None else shape.producer()
    sizes = None if producer is None else _sizes_read_by(producer)
    if sizes is None:
        return None
    indices = np.arange(len(sizes))
    positions = _evaluated(node, graph, lambda v: indices if v is shape else array_of(v))
    if positions is None:
        return None
    selected = _all_known([sizes[i] for i in positions[0].flat])
    return None if selected is None else [np.array(selected, np.int64).reshape(positions[0].shape)]


def _evaluated(node: ir.Node, graph: ir.Graph, array_of: ArrayOf) -> list[Array] | None:
    """Return what a node computes from known inputs, None if it is unknown or not small."""
    feeds = _known_inputs(node, array_of)
    if feeds is None or not (feeds or node.op_type == "Constant"):
        return None
    if node.op_type in SIZE_INPUTS:
        infer_outputs(graph, node)  # the output could be too large to be computed
    outputs = [_all_known(None if v.shape is None else list(v.shape)) for v in node.outputs]
    if any(math.prod(sizes or [0]) > MAX_FOLDED_ELEMENTS for sizes in outputs):
        return None
    # The reference may differ from onnxruntime in details of an operator, so only arithmetic of
    # shapes is computed.
    if node.op_type not in _ANY_TYPE and not all(v.dtype in _INTEGERS for v in node.outputs):
        return None
    try:
        arrays = evaluate(node, feeds, graph.opset_imports[""])
    # The reference may lack an operator, or the node may fail: then it fails when the model runs,
    # with a message of its own.
    except Exception:
        return None
    small = all(isinstance(a, np.ndarray) and a.size <= MAX_FOLDED_ELEMENTS for a in arrays)
    return arrays if small else None


def _known_inputs(node: ir.Node, array_of: ArrayOf) -> dict[str, Array] | None:
    """Return the inputs of a node by name, None if one is unknown or large."""
    arrays: dict[str, Array] = {}
    for value in node.inputs:
        if value is None:
            continue
        array = array_of(value)
        if array is None:
            return None
        arrays[value.name or ""] = array
    return arrays


def _constant(node: ir.Node) -> Array:
    if "value" in node.attributes:
        return np.array(node.attributes["value"].as_tensor().numpy())
    (integers,) = node.attributes.values()
    return np.array(integers.value, np.int64)


def _expand(node: ir.Node, data: Array, shape: Array) -> Array:
    return np.array(np.broadcast_to(data, np.broadcast_shapes(data.shape, tuple(shape))))


def _reshape(node: ir.Node, data: Array, shape: Array) -> Array:
    keeps_zeros = node.attributes.get_int("allowzero", 0)
    sizes = [s if s or keeps_zeros else data.shape[i] for i, s in enumerate(shape.tolist())]
    return data.reshape(sizes)


def _slice(
    node: ir.Node,
    data: Array,
    starts: Array,
    ends: Array,
    axes: Array | None = None,
    steps: Array | None = None,
) -> Array:
    slices = [slice(None)] * data.ndim
    for i, (start, end) in enumerate(zip(starts, ends)):
        axis = i if axes is None else axes[i]
        slices[axis] = slice(start, end, None if steps is None else steps[i])
    return data[tuple(slices)]


def _squeeze(node: ir.Node, data: Array, axes: Array | None = None) -> Array:
    return np.squeeze(data, None if axes is None else tuple(axes))


def _axis(node: ir.Node) -> int:
    return node.attributes.get_int("axis", 0) or 0


# The operators that compute most shapes. The reference implementation of all operators takes 50 ms
# to import.
FORMULAS: dict[str, Callable[..., Array]] = {
    "Concat": lambda node, *arrays: np.concatenate(arrays, _axis(node)),
    "Constant": _constant,
    "Expand": _expand,
    "Gather": lambda node, data, indices: np.take(data, indices, _axis(node)),
    "Reshape": _reshape,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Unsqueeze": lambda node, data, axes: np.expand_dims(data, tuple(axes)),
}
OPSET_OF_FORMULAS = 13  # the first in which axes are inputs


def _has_formula(node: ir.Node, opset: int) -> bool:
    if node.op_type == "Constant":
        value = node.attributes.get("value")
        if value is None:
            return not {"value_int", "value_ints"}.isdisjoint(node.attributes)
        return value.as_tensor().dtype in (ir.DataType.FLOAT, *_INTEGERS)
    return node.op_type in FORMULAS and opset >= OPSET_OF_FORMULAS


def evaluate(node: ir.Node, feeds: dict[str, Array], opset: int) -> list[Array]:
    """Compute one node by its formula, or else by ONNX's reference implementation."""
    if _has_formula(node, opset):
        arrays = [None if v is None else feeds[v.name or ""] for v in node.inputs]
        return [np.asarray(FORMULAS[node.op_type](node, *arrays))]
    # imported late: it reads the schemas of all operators, and many models do not need it
    from onnx.reference import ReferenceEvaluator

    make = onnx.helper
    inputs = [
        make.make_tensor_value_info(name, make.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for name, a in feeds.items()
    ]
    outputs = [onnx.ValueInfoProto(name=v.name or "") for v in node.outputs if v.name]
    graph = make.make_graph([ir.serde.serialize_node(node)], "node", inputs, outputs)
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", opset)], ir_version=10)
    return [np.asarray(a) for a in ReferenceEvaluator(model).run(None, feeds)]
