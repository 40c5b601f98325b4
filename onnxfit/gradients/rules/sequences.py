"""Sequences and optional values: reading a tensor from one is replaced by the tensor itself.

No gradient passes through a sequence itself. A sequence that is a split tensor needs no known
length: its element is a Slice, and its concatenation is the tensor. The elements of any other
sequence must be known when the graph is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import onnx_ir as ir

from onnxfit.gradients.blocker import STATIC
from onnxfit.gradients.building import axis_size, concat_sizes, constant_elements, int_vector
from onnxfit.gradients.table import Gradients, NoGradientError, Values, decompose, rule
from onnxfit.graph.values import GraphBuilder, Value

SUPPORTED_SEQUENCES = "use sequences that the model builds from tensors, at constant positions"


@rule("Optional")
@rule("SequenceConstruct")
@rule("SequenceErase")
@rule("SequenceInsert")
@rule("SplitToSequence")
def sequence(op: GraphBuilder, xs: Values, y: Value, dy: Value) -> Gradients:
    """Refuse the gradient of a sequence.

    The gradient is needed only if an operator that reads elements could not be decomposed.
    """
    raise NoGradientError(
        f"its output {y.name!r} needs a gradient, but is not a tensor", SUPPORTED_SEQUENCES
    )


@decompose("OptionalGetElement")
def optional_get_element(op: GraphBuilder, x: Value) -> Value:
    if not isinstance(x.ir.type, ir.OptionalType):
        return op.Identity(x)
    maker = _maker(x.ir)
    element = None
    if maker is not None and maker.op_type == "Optional" and maker.inputs:
        element = maker.inputs[0]
    if element is None:
        _refuse_unknown(x.ir)
    return op.Identity(op.wrap(element))


@decompose("SequenceAt")
def sequence_at(op: GraphBuilder, sequence: Value, position: Value) -> Value:
    maker = _maker(sequence.ir)
    index = constant_elements(position)
    if maker is not None and maker.op_type == "SplitToSequence":
        return _split_element(op, SplitSequence(op, maker), position)
    elements = _elements(op, sequence.ir)
    if index is not None:
        return op.Identity(elements[int(index)])
    if any(e.shape is None or e.shape != elements[0].shape or None in e.shape for e in elements):
        raise NoGradientError(
            "its position is computed, and the elements may differ in size",
            "use a constant position",
        )
    return op.Gather(op.Concat(*(op.Unsqueeze(e, [0]) for e in elements), axis=0), position, axis=0)


@decompose("ConcatFromSequence")
def concat_from_sequence(op: GraphBuilder, sequence: Value, *, axis: int, new_axis: int) -> Value:
    maker = _maker(sequence.ir)
    if maker is not None and maker.op_type == "SplitToSequence":
        return _concat_split(op, SplitSequence(op, maker), axis, bool(new_axis))
    elements = _elements(op, sequence.ir)
    if not elements:
        raise NoGradientError("its sequence is empty", "use a sequence of at least one tensor")
    return _concat(op, elements, axis, bool(new_axis))


def _concat(op: GraphBuilder, elements: Sequence[Value], axis: int, new_axis: bool) -> Value:
    if new_axis:
        return op.Concat(*(op.Unsqueeze(e, [axis]) for e in elements), axis=axis)
    return op.Concat(*elements, axis=axis)


def _maker(value: ir.Value) -> ir.Node | None:
    """Return the node that makes a sequence or optional, skipping Identity nodes."""
    maker = value.producer()
    while maker is not None and maker.op_type == "Identity" and maker.inputs[0] is not None:
        maker = maker.inputs[0].producer()
    return maker


def _elements(op: GraphBuilder, sequence: ir.Value) -> list[Value]:
    """Return the elements of a sequence. NoGradientError: the elements are unknown."""
    maker = _maker(sequence)
    if maker is None:
        _refuse_unknown(sequence)
    if maker.op_type == "SequenceEmpty":
        return []
    if maker.op_type == "SequenceConstruct":
        return [op.wrap(v) for v in maker.inputs if v is not None]
    if maker.op_type == "SplitToSequence":
        return SplitSequence(op, maker).elements()
    if maker.op_type not in ("SequenceInsert", "SequenceErase") or maker.inputs[0] is None:
        _refuse_unknown(sequence)
    elements = _elements(op, maker.inputs[0])
    if maker.op_type == "SequenceErase":
        del elements[_position(op, maker, 1, len(elements) - 1)]
        return elements
    assert maker.inputs[1] is not None
    elements.insert(_position(op, maker, 2, len(elements)), op.wrap(maker.inputs[1]))
    return elements


def _refuse_unknown(sequence: ir.Value) -> NoReturn:
    maker = sequence.producer()
    origin = "is an input" if maker is None else f"comes from {maker.op_type} {maker.name!r}"
    raise NoGradientError(
        f"the elements of {sequence.name!r} are unknown: it {origin}", SUPPORTED_SEQUENCES
    )


def _position(op: GraphBuilder, node: ir.Node, index: int, last: int) -> int:
    """Return the constant position that input `index` of a node gives, by default the last."""
    value = node.inputs[index] if index < len(node.inputs) else None
    if value is None:
        return last
    position = constant_elements(op.wrap(value))
    if position is None:
        raise NoGradientError(
            f"the position at which {node.op_type} {node.name!r} changes the sequence is computed",
            "use a constant position",
        )
    return int(position)


# Split tensors
# ------------------------------------------------------------------------------------------------


class SplitSequence:
    """The sequence of a SplitToSequence.

    `sizes` are one size for all elements, a vector of one for each, or None for single rows, whose
    axis is `squeezed` without `keepdims`.
    """

    def __init__(self, op: GraphBuilder, node: ir.Node) -> None:
        x = node.inputs[0]
        sizes = node.inputs[1] if len(node.inputs) > 1 else None
        assert x is not None
        self.op = op
        self.x = op.wrap(x)
        self.axis = _int_attribute(node, "axis", 0) % self.x.rank
        self.length = axis_size(op, self.x, self.axis)
        self.sizes = None if sizes is None else op.cast(op.wrap(sizes), np.int64)
        self.squeezed = sizes is None and not _int_attribute(node, "keepdims", 1)

    def elements(self) -> list[Value]:
        """Return the elements. NoGradientError: the number of parts is unknown."""
        op = self.op
        length = constant_elements(self.length)
        sizes = np.array(1) if self.sizes is None else constant_elements(self.sizes)
        if sizes is None or (sizes.ndim == 0 and length is None):
            raise NoGradientError(
                f"the number of parts that {self.x.name!r} is split into is unknown", STATIC
            )
        if sizes.ndim == 0:
            assert length is not None
            sizes = np.diff([*range(0, int(length[0]), int(sizes)), int(length[0])])
        elements = op.Split(self.x, op.constant(sizes), _outputs=len(sizes), axis=self.axis)
        if self.squeezed:
            return [op.Squeeze(e, [self.axis]) for e in elements]
        return list(elements)


def _int_attribute(node: ir.Node, name: str, default: int) -> int:
    return node.attributes[name].as_int() if name in node.attributes else default


def _split_element(op: GraphBuilder, split: SplitSequence, position: Value) -> Value:
    """Return one element of a split tensor; negative positions count from the end."""
    position = op.cast(position, np.int64)
    if split.squeezed:
        return op.Gather(split.x, position, axis=split.axis)
    constant = constant_elements(position)
    if constant is None:
        index = op.Reshape(position, [1])
    else:
        index = op.constant(constant.reshape(1))
    if split.sizes is None:
        return op.Gather(split.x, index, axis=split.axis)
    start, end = _bounds(op, split, split.sizes, index)
    return op.Slice(split.x, start, end, int_vector(op, split.axis))


def _bounds(
    op: GraphBuilder, split: SplitSequence, sizes: Value, index: Value
) -> tuple[Value, Value]:
    """Return the first element of a part along the axis, and the one after its last."""
    if sizes.rank != 1:
        count = (split.length + sizes - 1) / sizes
        index = op.Where(index < 0, index + count, index)
        start = index * sizes
        return start, start + sizes
    constant_sizes = constant_elements(sizes)
    constant_index = constant_elements(index)
    if constant_sizes is not None and constant_index is not None:
        ends = np.cumsum(constant_sizes)[constant_index]
        return op.constant(ends - constant_sizes[constant_index]), op.constant(ends)
    end = op.Gather(op.CumSum(sizes, op.constant(np.int64(0))), index)
    return end - op.Gather(sizes, index), end


def _concat_split(op: GraphBuilder, split: SplitSequence, axis: int, new_axis: bool) -> Value:
    """Concatenate all elements of a split tensor along an old or a new axis."""
    x = split.x
    rank = x.rank - split.squeezed
    axis = axis % (rank + new_axis)
    if not new_axis and not split.squeezed and axis == split.axis:
        return op.Identity(x)
    if split.sizes is not None and split.sizes.rank == 1:
        return _concat(op, split.elements(), axis, new_axis)
    # Elements that are joined along another axis have one size: split the axis into two,
    # (elements, size), and move the first one.
    if not split.squeezed:
        piece = int_vector(op, 1) if split.sizes is None else op.Reshape(split.sizes, [1])
        before, after = _sizes_around(op, x, split.axis, split.axis + 1)
        shape = concat_sizes(op, *before, split.length / piece, piece, *after)
        x = op.Reshape(x, shape, allowzero=1)
    others = [a for a in range(rank + 1) if a != split.axis]
    x = op.Transpose(x, perm=[*others[:axis], split.axis, *others[axis:]])
    if new_axis:
        return x
    before, after = _sizes_around(op, x, axis, axis + 2)
    merged = axis_size(op, x, axis) * axis_size(op, x, axis + 1)
    return op.Reshape(x, concat_sizes(op, *before, merged, *after), allowzero=1)


def _sizes_around(
    op: GraphBuilder, x: Value, first: int, end: int
) -> tuple[list[Value], list[Value]]:
    """Return the sizes of the axes before `first`, and from `end` on, without empty vectors."""
    before = [op.shape(x, 0, first)] if first else []
    after = [op.shape(x, end)] if end < x.rank else []
    return before, after
