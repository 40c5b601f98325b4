"""A drawing as text: one line for each node."""

from __future__ import annotations

from collections.abc import Iterator

from onnxfit.drawing.labels import clean, count
from onnxfit.drawing.scene import KINDS, Argument, DrawnNode, Scene, Tensor
from onnxfit.graph.scopes import STAGES

MAX_OPERATORS_IN_SUMMARY = 3  # kinds of operators that the summary of a scope names
_PLURAL = {"input", "weight", "constant"}  # kinds whose title has a plural


def as_text(scene: Scene) -> str:
    """Return the inputs by kind, the nodes by stage and the outputs, without a final newline."""
    lines = [f"{clean(scene.name) or 'graph'}: {count(scene.node_count, 'node')}"]
    for kind, title in KINDS.items():
        tensors = [tensor for tensor in scene.inputs if tensor.kind == kind]
        if tensors:
            lines += ["", title + "s" * (kind in _PLURAL and len(tensors) > 1)]
            lines += [f"  {_tensor_text(tensor)}" for tensor in tensors]
    for stage in scene.stages:
        lines += ["", STAGES[stage]]
        for node in scene.nodes:
            if node.stage == stage:
                lines += _node_lines(scene, node, "  ")
    lines += ["", f"output{'s' * (len(scene.outputs) != 1)}"]
    lines += [f"  {_tensor_text(tensor)}" for tensor in scene.outputs]
    return "\n".join(lines)


def summary(box: DrawnNode) -> str:
    """Return the number of nodes of a scope and its most frequent operators."""
    operators = [
        f"{clean(operator)} ×{n}" if n > 1 else clean(operator)
        for operator, n in box.operator_counts.items()
    ]
    shown = operators[:MAX_OPERATORS_IN_SUMMARY]
    if len(operators) > len(shown):
        shown.append("…")
    return f"{sum(box.operator_counts.values())} nodes: {', '.join(shown)}"


def _tensor_text(tensor: Tensor) -> str:
    return f"{clean(tensor.name)}: {tensor.type}" if tensor.type else clean(tensor.name)


def _node_lines(scene: Scene, node: DrawnNode, indent: str) -> Iterator[str]:
    """Yield the line of a node and those of its bodies."""
    outputs = _outputs(scene, node)
    arguments = _inputs_text(node)
    if node.operator:
        line = f"{outputs} = {clean(node.operator)}({arguments})"
    else:
        line = f"{outputs or '_'} = [{clean(node.name)}]({arguments})  {summary(node)}"
    notes = [f"{clean(a.name)}={a.value}" for a in node.attributes]
    captured = [clean(argument.tensor) for argument in node.arguments if argument.captured]
    if captured:
        notes.append(f"reads {', '.join(captured)}")
    yield f"{indent}{line}{'  ' * bool(notes)}{' '.join(notes)}"
    for name, body in node.bodies:
        inputs = ", ".join(_tensor_text(t) for t in body.inputs if t.kind == "input")
        results = ", ".join(clean(t.name) for t in body.outputs)
        yield f"{indent}  {clean(name)}({inputs}) -> ({results})"
        for tensor in body.inputs:
            if tensor.kind != "input":
                yield f"{indent}    {_tensor_text(tensor)}"
        for inner in body.nodes:
            yield from _node_lines(body, inner, f"{indent}    ")


def _outputs(scene: Scene, node: DrawnNode) -> str:
    """Return the outputs of a node with their types; "_" stands for one that is left out."""
    names = list(node.outputs)
    while names and not names[-1]:
        names.pop()
    return ", ".join(
        f"{clean(name)}: {scene.types[name]}" if name in scene.types else clean(name) or "_"
        for name in names
    )


def _inputs_text(node: DrawnNode) -> str:
    """Return the inputs of a node; "_" stands for one that is left out."""
    arguments = [argument for argument in node.arguments if not argument.captured]
    while arguments and arguments[-1] == Argument(""):
        arguments.pop()
    return ", ".join(a.literal or clean(a.tensor) or "_" for a in arguments)
