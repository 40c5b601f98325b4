"""Sequences of known length as the tensors they hold.

Exporters write a split into parts of given sizes as a sequence and its elements. Nothing
differentiates sequences, and where their length is known nothing needs them: every `SequenceAt` and
`ConcatFromSequence` is told its tensors.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxfit.graph.values import GraphBuilder, Value

MAKERS = {
    "SplitToSequence",
    "SequenceConstruct",
    "SequenceEmpty",
    "SequenceInsert",
    "SequenceErase",
    "Identity",
}

MAX_PARTS = 10_000  # each becomes a tensor of its own


def unroll_sequences(model: ir.Model) -> bool:
    """Take known sequences out of the main graph, in place; whether there were any.

    What is not known stays as it is.
    """
    op = GraphBuilder(model.graph)
    known: dict[ir.Value, list[Value]] = {}
    for node in list(model.graph):
        if node.domain != "":
            continue
        elements = _made(op, node, known) if node.op_type in MAKERS else None
        if elements is not None:
            known[node.outputs[0]] = elements
        elif node.inputs and node.inputs[0] in known:
            with op.replacing(node) as replace:
                found = _taken(op, node, known[node.inputs[0]])
                if found is not None:
                    replace(found)
    for maker in reversed([v.producer() for v in known]):
        if maker is not None and not any(v.uses() or v.is_graph_output() for v in maker.outputs):
            model.graph.remove(maker, safe=True)
    return bool(known)


def _made(
    op: GraphBuilder, node: ir.Node, known: dict[ir.Value, list[Value]]
) -> list[Value] | None:
    """The elements of the sequence that a node makes."""
    first = node.inputs[0] if node.inputs else None
    if node.op_type == "SequenceEmpty":
        return []
    if node.op_type == "SequenceConstruct":
        return [op.wrap(v) for v in node.inputs if v is not None]
    if node.op_type == "SplitToSequence":
        return _split(op, node)
    if first not in known:
        return None
    elements = list(known[first])
    if node.op_type == "SequenceInsert":
        position, added = _position(node, 2, len(elements)), node.inputs[1]
        if position is None or added is None:
            return None
        return [*elements[:position], op.wrap(added), *elements[position:]]
    if node.op_type == "SequenceErase":
        position = _position(node, 1, len(elements) - 1)
        return None if position is None else elements[:position] + elements[position + 1 :]
    return elements


def _taken(op: GraphBuilder, node: ir.Node, elements: list[Value]) -> Value | None:
    """The tensor that a node takes from a sequence."""
    if node.op_type == "SequenceAt":
        position = _position(node, 1, len(elements) - 1)
        return None if position is None else op.Identity(elements[position])
    if node.op_type == "SequenceLength":
        return op.Identity(op.constant(len(elements)))
    if node.op_type == "ConcatFromSequence" and elements:
        axis = node.attributes["axis"].as_int()
        if "new_axis" in node.attributes and node.attributes["new_axis"].as_int():
            elements = [op.Unsqueeze(e, [axis]) for e in elements]
        return op.Concat(*elements, axis=axis)
    return None


def _split(op: GraphBuilder, node: ir.Node) -> list[Value] | None:
    x = node.inputs[0]
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    given = node.inputs[1] if len(node.inputs) > 1 else None
    tensor = None if given is None else ir.convenience.get_const_tensor(given)
    if x is None or (given is not None and tensor is None):
        return None
    if tensor is not None and len(tensor.shape) == 1:
        sizes = [int(n) for n in tensor.numpy()]
    else:  # pieces of one size, the last one smaller
        length = (
            x.shape[axis] if x.shape is not None and -len(x.shape) <= axis < len(x.shape) else None
        )
        piece = 1 if tensor is None else int(tensor.numpy().item()) if tensor.size == 1 else 0
        if not isinstance(length, int) or piece < 1 or length > MAX_PARTS * piece:
            return None
        sizes = [min(piece, length - start) for start in range(0, length, piece)]
    keep = (
        given is not None
        or "keepdims" not in node.attributes
        or node.attributes["keepdims"].as_int()
    )
    with op.replacing(node):
        parts = op.Split(op.wrap(x), op.constant(sizes), _outputs=len(sizes), axis=axis)
        return list(parts) if keep else [op.Squeeze(p, [axis]) for p in parts]


def _position(node: ir.Node, index: int, last: int) -> int | None:
    """The constant position at an input, from 0 to `last`; without the input, the end."""
    given = node.inputs[index] if index < len(node.inputs) else None
    if given is None:
        return last
    tensor = ir.convenience.get_const_tensor(given)
    if tensor is None or tensor.size != 1:
        return None
    position = int(tensor.numpy().item())
    # negative positions count from behind; in SequenceInsert, where `last` is the length, -1 is
    # before the last element
    length = last + 1 if node.op_type != "SequenceInsert" else last
    position = position + length if position < 0 else position
    return position if 0 <= position <= last else None
