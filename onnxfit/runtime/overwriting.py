"""The tensors that an update may overwrite while it reads them.

onnxruntime writes an output into the memory that is bound to it, as soon as the node that computes
the output runs. If this memory is also that of an input, such as the weight before the update, no
node may read the input afterwards. onnxruntime runs independent nodes in an order of its own, so
only a path in the graph says which node runs first.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from onnxfit.graph.index import NodeIndex
from onnxfit.graph.subgraphs import read_by
from onnxfit.kernels.search import VIEWS

# Operators whose kernels read each element, at the latest, when they write the element at the same
# place. With three inputs, Max and Min would write a result of the first two before they read the
# third. Where writes only after it has read all of its inputs.
ELEMENTWISE = {"Add": 2, "Sub": 2, "Mul": 2, "Div": 2, "Max": 2, "Min": 2, "Where": 3}
# onnxruntime and the operators in C++ join a product with such nodes before and after it. The joint
# node reads the factors of the product while it writes the result.
PRODUCTS = {"MatMul", "Gemm"}
JOINED_BEFORE = {"Div", "Mul", "Slice", "Split", "Transpose"}
JOINED_AFTER = {"Add", "Div", "Mul", "Sub", "Transpose"}


def overwritable_tensors(graph: onnx.GraphProto, updates: Mapping[str, str]) -> set[str]:
    """Return the inputs of a graph whose memory may be that of the output with their next value.

    Such an input is read by nodes from which a path leads to the node that computes the output, and
    perhaps by this node itself, if its operator is elementwise. Later, no change of the graph may
    let other nodes read the input, except that products are joined with nodes around them.

    - `updates`: input -> the output with its next value, which has the same type and shape. If an
      input is a part of another input's memory, only the larger one may be among them.
    """
    index = NodeIndex(list(graph.node))
    return {
        name
        for name, output in updates.items()
        if output in index.positions
        and _is_read_first(name, index.positions[output], index)
        and not _is_joined(name, index.producers[output], index)
    }


def _is_read_first(name: str, writer: int, index: NodeIndex) -> bool:
    """Return whether each node that reads an input runs before its writer, or is the writer."""
    first = min(index.reading[name], default=writer)
    before = _nodes_before(writer, first, index)
    waiting = [name]
    while waiting:
        value = waiting.pop()
        for i in index.reading[value]:
            node = index.nodes[i]
            if i == writer:
                fits = ELEMENTWISE.get(node.op_type) == len(node.input)
                if not fits or node.domain or value != name:
                    return False
            elif i not in before:
                return False
            elif node.op_type in VIEWS:
                waiting += node.output
    return True


def _is_joined(name: str, writer: onnx.NodeProto, index: NodeIndex) -> bool:
    """Return whether the writer may become one node with a product of an input."""
    waiting = [writer]
    while waiting:
        node = waiting.pop()
        if node.op_type in PRODUCTS:
            if any(_is_same_numbers(factor, name, index) for factor in node.input):
                return True
        elif node.op_type in JOINED_AFTER | VIEWS:
            waiting += [index.producers[each] for each in node.input if each in index.producers]
    return False


def _is_same_numbers(value: str, name: str, index: NodeIndex) -> bool:
    """Return whether a value consists of the numbers of an input, in another order or scaled."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if value == name:
            return True
        node = index.producers.get(value)
        if node is not None and node.op_type in JOINED_BEFORE | VIEWS:
            waiting += node.input
    return False


def _nodes_before(last: int, first: int, index: NodeIndex) -> set[int]:
    """Return the nodes from position `first` on from which a path leads to the node `last`."""
    found: set[int] = set()
    waiting = [last]
    while waiting:
        for name in read_by(index.nodes[waiting.pop()]):
            i = index.positions.get(name, -1)
            if i >= first and i not in found:
                found.add(i)
                waiting.append(i)
    return found
