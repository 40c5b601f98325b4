"""Sequences and optional values, written away: what takes a tensor out of a sequence takes it from
what was put in.

Nothing passes a gradient through a sequence as such. But a sequence that is a split tensor needs no
known length: its element is a Slice, and its concatenation the tensor again. Of any other sequence
it must be known what it holds, and then its elements are at hand.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import onnx_ir as ir

from onnxfit.gradients.blocker import STATIC
from onnxfit.gradients.building import axis_size, concat_sizes, int_vector, known
from onnxfit.gradients.table import Gradients, NoGradientError, Values, decompose, gradient
from onnxfit.graph.values import GraphBuilder, Value

CURE = "sequences of tensors that the model itself puts together, at constant positions"


@gradient("Optional")
@gradient("SequenceConstruct")
@gradient("SequenceErase")
@gradient("SequenceInsert")
@gradient("SplitToSequence")
def sequence(op: GraphBuilder, xs: Values, y: Value, dy: Value) -> Gradients:
    """On the way only where what takes the elements out could not be written without the sequence."""
    raise NoGradientError(f"a gradient arrives at its output {y.name!r}, which is no tensor", CURE)


@decompose("OptionalGetElement")
def optional_get_element(op: GraphBuilder, x: Value) -> Value:
    if not isinstance(x.ir.type, ir.OptionalType):
        return op.Identity(x)
    maker = x.ir.producer()
    while maker is not None and maker.op_type == "Identity" and maker.inputs[0] is not None:
        maker = maker.inputs[0].producer()
    held = (
        maker.inputs[0]
        if maker is not None and maker.op_type == "Optional" and maker.inputs
        else None
    )
    if held is None:
        _unknown(x.ir)
    return op.Identity(op.wrap(held))


@decompose("SequenceAt")
def sequence_at(op: GraphBuilder, sequence: Value, position: Value) -> Value:
    maker, place = _maker(sequence.ir), known(position)
    if maker is not None and maker.op_type == "SplitToSequence":
        return _part(op, _Split(op, maker), position)
    elements = _elements(op, sequence.ir)
    if place is not None:
        return op.Identity(elements[int(place)])
    if any(e.shape is None or e.shape != elements[0].shape or None in e.shape for e in elements):
        raise NoGradientError(
            "its position is computed, and the elements may differ in size", "a constant position"
        )
    return op.Gather(op.Concat(*(op.Unsqueeze(e, [0]) for e in elements), axis=0), position, axis=0)


@decompose("ConcatFromSequence")
def concat_from_sequence(op: GraphBuilder, sequence: Value, *, axis: int, new_axis: int) -> Value:
    maker = _maker(sequence.ir)
    if maker is not None and maker.op_type == "SplitToSequence":
        return _together(op, _Split(op, maker), axis, bool(new_axis))
    elements = _elements(op, sequence.ir)
    if not elements:
        raise NoGradientError("its sequence is empty", "a sequence of at least one tensor")
    return op.Concat(*(op.Unsqueeze(e, [axis]) if new_axis else e for e in elements), axis=axis)


def _maker(sequence: ir.Value) -> ir.Node | None:
    """The node that makes a sequence, past those that hand it on."""
    maker = sequence.producer()
    while maker is not None and maker.op_type == "Identity" and maker.inputs[0] is not None:
        maker = maker.inputs[0].producer()
    return maker


def _elements(op: GraphBuilder, sequence: ir.Value) -> list[Value]:
    """What a sequence holds; Refused where that is not known."""
    maker = _maker(sequence)
    if maker is None:
        _unknown(sequence)
    if maker.op_type == "SequenceEmpty":
        return []
    if maker.op_type == "SequenceConstruct":
        return [op.wrap(v) for v in maker.inputs if v is not None]
    if maker.op_type == "SplitToSequence":
        return _Split(op, maker).elements()
    if maker.op_type not in ("SequenceInsert", "SequenceErase") or maker.inputs[0] is None:
        _unknown(sequence)
    elements = _elements(op, maker.inputs[0])
    if maker.op_type == "SequenceErase":
        del elements[_position(op, maker, 1, len(elements) - 1)]
        return elements
    assert maker.inputs[1] is not None
    elements.insert(_position(op, maker, 2, len(elements)), op.wrap(maker.inputs[1]))
    return elements


def _unknown(sequence: ir.Value) -> NoReturn:
    maker = sequence.producer()
    source = "is an input" if maker is None else f"comes from {maker.op_type} {maker.name!r}"
    raise NoGradientError(f"what {sequence.name!r} holds is not known: it {source}", CURE)


def _position(op: GraphBuilder, node: ir.Node, index: int, last: int) -> int:
    """A constant position; without one, the last."""
    given = node.inputs[index] if index < len(node.inputs) else None
    if given is None:
        return last
    place = known(op.wrap(given))
    if place is None:
        raise NoGradientError(
            f"the position at which {node.op_type} {node.name!r} changes the sequence is computed",
            "a constant position",
        )
    return int(place)


class _Split:
    """A tensor in parts along an axis: of one size, a vector or a number of them, or single rows."""

    def __init__(self, op: GraphBuilder, node: ir.Node) -> None:
        x, sizes = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
        assert x is not None
        self.op, self.x = op, op.wrap(x)
        self.axis = _attribute(node, "axis", 0) % self.x.rank
        self.length = axis_size(op, self.x, self.axis)
        self.sizes = None if sizes is None else op.cast(op.wrap(sizes), np.int64)
        self.squeezed = sizes is None and not _attribute(node, "keepdims", 1)

    def elements(self) -> list[Value]:
        op, length = self.op, known(self.length)
        sizes = np.array(1) if self.sizes is None else known(self.sizes)
        if sizes is None or (sizes.ndim == 0 and length is None):
            raise NoGradientError(
                f"into how many parts {self.x.name!r} is split is not known", STATIC
            )
        if sizes.ndim == 0:
            assert length is not None
            sizes = np.diff([*range(0, int(length[0]), int(sizes)), int(length[0])])
        parts = op.Split(self.x, op.constant(sizes), _outputs=len(sizes), axis=self.axis)
        return [op.Squeeze(p, [self.axis]) for p in parts] if self.squeezed else list(parts)


def _attribute(node: ir.Node, name: str, default: int) -> int:
    return node.attributes[name].as_int() if name in node.attributes else default


def _part(op: GraphBuilder, split: _Split, position: Value) -> Value:
    """One part; negative positions count from behind."""
    position = op.cast(position, np.int64)
    if split.squeezed:
        return op.Gather(split.x, position, axis=split.axis)
    number = known(position)
    place = op.Reshape(position, [1]) if number is None else op.constant(number.reshape(1))
    if split.sizes is None:
        return op.Gather(split.x, place, axis=split.axis)
    if split.sizes.rank == 1:
        sizes, fixed = known(split.sizes), known(place)
        if sizes is not None and fixed is not None:
            end = op.constant(np.cumsum(sizes)[fixed])
            start = op.constant(np.cumsum(sizes)[fixed] - sizes[fixed])
        else:
            end = op.Gather(op.CumSum(split.sizes, op.constant(np.int64(0))), place)
            start = end - op.Gather(split.sizes, place)
    else:
        count = (split.length + split.sizes - 1) / split.sizes
        place = op.Where(place < 0, place + count, place)
        start = place * split.sizes
        end = start + split.sizes
    return op.Slice(split.x, start, end, int_vector(op, split.axis))


def _together(op: GraphBuilder, split: _Split, axis: int, new_axis: bool) -> Value:
    """All parts again, along an old axis or a new one."""
    x, rank = split.x, split.x.rank - split.squeezed
    axis = axis % (rank + new_axis)
    if not new_axis and not split.squeezed and axis == split.axis:
        return op.Identity(x)
    if split.sizes is not None and split.sizes.rank == 1:
        return op.Concat(
            *(op.Unsqueeze(e, [axis]) if new_axis else e for e in split.elements()), axis=axis
        )
    # parts that meet along another axis are of one size: an axis (parts, size) in place of the axis
    if not split.squeezed:
        piece = int_vector(op, 1) if split.sizes is None else op.Reshape(split.sizes, [1])
        before = [op.shape(x, 0, split.axis)] if split.axis else []
        after = [op.shape(x, split.axis + 1)] if split.axis + 1 < x.rank else []
        x = op.Reshape(
            x, concat_sizes(op, *before, split.length / piece, piece, *after), allowzero=1
        )
    others = [a for a in range(rank + 1) if a != split.axis]
    x = op.Transpose(x, perm=[*others[:axis], split.axis, *others[axis:]])
    if new_axis:
        return x
    before = [op.shape(x, 0, axis)] if axis else []
    after = [op.shape(x, axis + 2)] if axis + 2 <= rank else []
    return op.Reshape(
        x,
        concat_sizes(op, *before, axis_size(op, x, axis) * axis_size(op, x, axis + 1), *after),
        allowzero=1,
    )
