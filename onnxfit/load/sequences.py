"""Replace sequences of known length by the tensors in them.

Exporters write a split into several tensors as a sequence and its elements. No sequence can be
differentiated. If the length is known, every `SequenceAt` and `ConcatFromSequence` can read the
tensors instead.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxfit.graph.values import GraphBuilder, Value

# Operators whose output is a sequence; Identity's output is one if its input is one.
SEQUENCE_OPERATORS = {
    "SplitToSequence",
    "SequenceConstruct",
    "SequenceEmpty",
    "SequenceInsert",
    "SequenceErase",
    "Identity",
}
MAKERS = {"SequenceEmpty", "SequenceConstruct", "SplitToSequence"}  # of tensors
MAX_ELEMENTS = 10_000  # elements of a sequence, each of which becomes a tensor


def unroll_sequences(model: ir.Model) -> bool:
    """Remove known sequences from the main graph, in place; return whether there were any."""
    if not any(node.op_type in MAKERS and node.domain == "" for node in model.graph):
        return False
    op = GraphBuilder(model.graph)
    known: dict[ir.Value, list[Value]] = {}
    for node in list(model.graph):
        if node.domain != "":
            continue
        elements = (
            _sequence_elements(op, node, known) if node.op_type in SEQUENCE_OPERATORS else None
        )
        if elements is not None:
            known[node.outputs[0]] = elements
        elif node.inputs and node.inputs[0] in known:
            with op.replacing(node) as replace:
                tensor = _tensor_from(op, node, known[node.inputs[0]])
                if tensor is not None:
                    replace(tensor)
    for producer in reversed([v.producer() for v in known]):
        if producer is None or any(v.uses() or v.is_graph_output() for v in producer.outputs):
            continue
        model.graph.remove(producer, safe=True)
    return bool(known)


def _sequence_elements(
    op: GraphBuilder, node: ir.Node, known: dict[ir.Value, list[Value]]
) -> list[Value] | None:
    """Return the elements of the sequence that a node makes, None if they are unknown."""
    if node.op_type == "SequenceEmpty":
        return []
    if node.op_type == "SequenceConstruct":
        return [op.wrap(v) for v in node.inputs if v is not None]
    if node.op_type == "SplitToSequence":
        return _split_elements(op, node)
    first = node.inputs[0] if node.inputs else None
    if first not in known:
        return None
    elements = list(known[first])
    if node.op_type == "SequenceInsert":
        position = _position(node, 2, len(elements))
        added = node.inputs[1]
        if position is None or added is None:
            return None
        return [*elements[:position], op.wrap(added), *elements[position:]]
    if node.op_type == "SequenceErase":
        position = _position(node, 1, len(elements) - 1)
        return None if position is None else elements[:position] + elements[position + 1 :]
    return elements


def _tensor_from(op: GraphBuilder, node: ir.Node, elements: list[Value]) -> Value | None:
    """Return the tensor that a node computes from a sequence, None if it is unknown."""
    if node.op_type == "SequenceAt":
        position = _position(node, 1, len(elements) - 1)
        return None if position is None else op.Identity(elements[position])
    if node.op_type == "SequenceLength":
        return op.Identity(op.constant(len(elements)))
    if node.op_type == "ConcatFromSequence" and elements:
        axis = node.attributes["axis"].as_int()
        if node.attributes.get_int("new_axis", 0):
            elements = [op.Unsqueeze(e, [axis]) for e in elements]
        return op.Concat(*elements, axis=axis)
    return None


def _split_elements(op: GraphBuilder, node: ir.Node) -> list[Value] | None:
    """Return the elements of a SplitToSequence, None if their sizes are unknown."""
    x = node.inputs[0]
    axis = node.attributes.get_int("axis", 0)
    split = node.inputs[1] if len(node.inputs) > 1 else None
    sizes = _sizes_of_split(x, axis, split)
    if x is None or sizes is None:
        return None
    keep_axis = split is not None or node.attributes.get_int("keepdims", 1) != 0
    with op.replacing(node):
        tensors = op.Split(op.wrap(x), op.constant(sizes), _outputs=len(sizes), axis=axis)
        return list(tensors) if keep_axis else [op.Squeeze(t, [axis]) for t in tensors]


def _sizes_of_split(x: ir.Value | None, axis: int, split: ir.Value | None) -> list[int] | None:
    """Return the sizes along the axis.

    `split` is a vector of sizes, or the size of every element, of which the last may be smaller.
    Without it, the size is 1.
    """
    size = 1
    if split is not None:
        tensor = ir.convenience.get_const_tensor(split)
        if tensor is None:
            return None
        if len(tensor.shape) == 1:
            return [int(n) for n in tensor.numpy()] or None
        size = int(tensor.numpy().item()) if tensor.size == 1 else 0
    if x is None or x.shape is None or not -len(x.shape) <= axis < len(x.shape):
        return None
    length = x.shape[axis]
    if not isinstance(length, int) or size < 1 or not 1 <= length <= MAX_ELEMENTS * size:
        return None
    return [min(size, length - start) for start in range(0, length, size)]


def _position(node: ir.Node, index: int, last: int) -> int | None:
    """Return the constant position at input `index`, from 0 to `last`; None if it is unknown.

    Without the input, the position is the end.
    """
    value = node.inputs[index] if index < len(node.inputs) else None
    if value is None:
        return last
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size != 1:
        return None
    position = int(tensor.numpy().item())
    if position < 0:
        # SequenceInsert may append: `last` is the length, and -1 is before the last element.
        position += last if node.op_type == "SequenceInsert" else last + 1
    return position if 0 <= position <= last else None
