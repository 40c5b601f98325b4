"""Concatenate pieces that fill each other's gaps, instead of padding and adding them.

A value that is split into pieces (queries, keys and values; the halves of a rotary embedding; the
gates of a cell) gets a gradient from each piece: a tensor of its own size, zero outside the piece.
If the pieces cover the value, the sum of these tensors is the concatenation of the pieces.
"""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from onnxfit.graph.index import constant_of
from onnxfit.step.rewrites.replacement import new_node, nodes_of_type, producer_of, replace_node

__all__ = ["join_pieces"]


class Piece(NamedTuple):
    """A value that lies along an axis of a larger one, with zeros before and after it."""

    value: ir.Value
    axis: int
    start: int
    end: int
    size: int  # of the larger value


def join_pieces(graph: ir.Graph) -> None:
    """Turn Pad(a) + Pad(b) + ... into Concat(a, b, ...), in place."""
    if not nodes_of_type(graph, "Pad"):
        return
    for node in nodes_of_type(graph, "Add", "Sum"):
        pieces = _pieces(node)
        if pieces:
            values = [piece.value for piece in pieces]
            axis = {"axis": pieces[0].axis}
            (out,) = node.outputs
            joined = new_node("Concat", values, f"{node.name}/Concat", out, attributes=axis)
            replace_node(graph, node, [joined])


def _pieces(node: ir.Node) -> list[Piece] | None:
    """Return the pieces that a sum puts together, in their order.

    None if a term is not a piece, or if the pieces leave gaps or overlap.
    """
    terms = [_piece(value) for value in node.inputs]
    pieces = sorted((p for p in terms if p is not None), key=lambda p: p.start)
    if len(pieces) < max(2, len(terms)) or len({(p.axis, p.size) for p in pieces}) > 1:
        return None
    starts = [piece.start for piece in pieces]
    ends = [piece.end for piece in pieces]
    return pieces if [*starts, pieces[0].size] == [0, *ends] else None


def _piece(value: ir.Value | None) -> Piece | None:
    """Return the piece that a Pad with zeros along one axis makes larger."""
    node = producer_of(value, "Pad")
    if node is None:
        return None
    source, pads, fill, axes = (*node.inputs, None, None)[:4]
    padding, number, named_axes = map(constant_of, (pads, fill, axes))
    if source is None or source.shape is None or padding is None:
        return None
    is_filled = fill is not None and (number is None or number.any())
    if node.attributes.get_string("mode", "constant") != "constant" or is_filled:
        return None
    if axes is not None and named_axes is None:
        return None
    rank = len(source.shape)
    padded_axes = list(range(rank))
    if named_axes is not None:
        padded_axes = [int(axis) % rank for axis in named_axes]
    before, after = padding.reshape(2, -1).tolist()
    padded = [(a, m, n) for a, m, n in zip(padded_axes, before, after) if m or n]
    if len(padded) != 1 or padding.min() < 0:
        return None
    axis, start, rest = padded[0]
    size = source.shape[axis]
    if not isinstance(size, int):
        return None
    return Piece(source, axis, start, start + size, start + size + rest)
