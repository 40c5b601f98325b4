"""The gradient of a Gather of rows, such as those of an embedding table, as one operator.

The operators of ONNX copy a table of zeros, and add the rows of dy to it in one thread. Many rows
need several operators. Plain SGD subtracts the result from the table by another operator. In the
gradient of scalar products, each row of dy is a row times a factor. The kernel multiplies them, and
writes the gradient, or the updated table, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx

from onnxfit.gradients.notes import GATHER_DX, GATHER_DY
from onnxfit.kernels.search import (
    NodeSearch,
    Note,
    ResultType,
    make_node,
    needed_nodes,
    paired_notes,
    with_kernel_nodes,
)


def replace_gather_gradients(
    graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto], types: Mapping[str, ResultType]
) -> Sequence[onnx.NodeProto]:
    """Return the nodes of a graph, with one node for each noted gradient of a Gather of rows.

    If a gradient is only subtracted from the table, the node computes the difference. The nodes are
    returned themselves if no gradient is noted (`gradients.notes.GATHER_DX`).
    """
    pairs = list(paired_notes(nodes, GATHER_DY, GATHER_DX))
    if not pairs:
        return nodes
    search = _GatherSearch(graph, nodes, types)
    kernels = []
    for reader, producer in pairs:
        gradient = search.gradient(reader, producer)
        if gradient is not None:
            kernels.append(gradient)
    if not kernels:
        return nodes
    return needed_nodes(with_kernel_nodes(nodes, kernels), search.outputs)


class _GatherSearch(NodeSearch):
    """A search for gradients of tables of float32 numbers."""

    def gradient(self, reader: Note, producer: Note) -> onnx.NodeProto | None:
        """Return the node of a gradient, or of the updated table; None if the kernel cannot compute
        it.
        """
        (indices,) = producer.content
        dy, dx = reader.node.input[reader.content[0]], producer.node.output[0]
        if not self.shape(dx) or not self.readers[indices]:
            return None
        rows, *factors = self.factored(dy, indices, self.shape(dx)[1:])
        update = self.update(dx)
        table, result = ([update.input[0]], update.output[0]) if update else ([], dx)
        return make_node(
            "GatherGradient",
            [indices, rows, *table, *factors],
            [result],
            producer.node.name,
            shape=self.shape(dx),
            has_factors=len(factors),
        )

    def factored(self, dy: str, indices: str, row: Sequence[int]) -> list[str]:
        """Return rows, and a factor for each of them, whose product is dy; else dy alone.

        - `row`: the shape of a row of the table.
        """
        product = self.operands(dy, "Reshape")[0] or dy
        shape, known = self.shape(product), self.types.get(indices)
        if known is None or shape != (*known.shape, *row):
            return [dy]
        if any(n in self.outputs or len(self.readers[n]) > 1 for n in (dy, product)):
            return [dy]
        one_each = (*shape[: len(known.shape)], *[1] * len(row))
        left, right = self.operands(product, "Mul")
        for rows, factors in ((left, right), (right, left)):
            fits = self.shape(rows) == shape and self.shape(factors) == one_each != shape
            # An update may overwrite a tensor of the state after its last reader.
            if fits and not self.is_state(rows) and not self.is_state(factors):
                return [rows, factors]
        return [dy]

    def update(self, dx: str) -> onnx.NodeProto | None:
        """Return the node that subtracts a gradient from the table, if nothing else reads it."""
        readers = self.readers[dx]
        if dx in self.outputs or len(readers) != 1:
            return None
        table, gradient = self.operands(readers[0].output[0], "Sub")
        is_update = gradient == dx != table and self.shape(table) == self.shape(dx)
        return readers[0] if is_update else None
