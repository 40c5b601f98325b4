"""A scene as text: a line per call."""

from __future__ import annotations

from collections.abc import Iterator

from onnxfit.drawing.scene import KINDS, PARTS, Argument, Call, Scene, Tensor, clean


def as_text(scene: Scene) -> str:
    """Inputs by kind, the calls by part of the step, outputs; ends without a newline."""
    lines = [f"{clean(scene.name) or 'graph'}: {scene.nodes} node{'s' * (scene.nodes != 1)}"]
    for kind, title in KINDS.items():
        tensors = [tensor for tensor in scene.inputs if tensor.kind == kind]
        if tensors:
            lines += [
                "",
                title + "s" * (kind in ("input", "weight", "constant") and len(tensors) > 1),
            ]
            lines += [f"  {_tensor(tensor)}" for tensor in tensors]
    for part in scene.parts:
        lines += ["", PARTS[part]]
        for call in scene.calls:
            if call.part == part:
                lines += _call(scene, call, "  ")
    lines += [
        "",
        f"output{'s' * (len(scene.outputs) != 1)}",
        *(f"  {_tensor(tensor)}" for tensor in scene.outputs),
    ]
    return "\n".join(lines)


def _tensor(tensor: Tensor) -> str:
    return f"{clean(tensor.name)}: {tensor.type}" if tensor.type else clean(tensor.name)


def _call(scene: Scene, call: Call, indent: str) -> Iterator[str]:
    results = list(call.results)
    while results and not results[-1]:
        results.pop()
    made = ", ".join(
        f"{clean(name)}: {scene.types[name]}" if name in scene.types else clean(name) or "_"
        for name in results
    )
    arguments = [argument for argument in call.arguments if not argument.captured]
    while arguments and arguments[-1] == Argument(""):
        arguments.pop()
    given = ", ".join(argument.literal or clean(argument.tensor) or "_" for argument in arguments)
    if call.operator:
        line = f"{made} = {clean(call.operator)}({given})"
    else:
        line = f"{made or '_'} = [{clean(call.name)}]({given})  {summary(call)}"
    captured = [clean(argument.tensor) for argument in call.arguments if argument.captured]
    notes = [f"{clean(a.name)}={a.value}" for a in call.attributes] + (
        [f"reads {', '.join(captured)}"] if captured else []
    )
    yield f"{indent}{line}{'  ' * bool(notes)}{' '.join(notes)}"
    for name, body in call.bodies:
        given = ", ".join(_tensor(t) for t in body.inputs if t.kind == "input")
        yield (
            f"{indent}  {clean(name)}({given}) ->"
            f" ({', '.join(clean(t.name) for t in body.outputs)})"
        )
        for tensor in body.inputs:
            if tensor.kind != "input":
                yield f"{indent}    {_tensor(tensor)}"
        for inner in body.calls:
            yield from _call(body, inner, f"{indent}    ")


def summary(call: Call, most: int = 3) -> str:
    """Of a scope: how many nodes, and the most frequent operators."""
    kinds = [
        f"{clean(operator)} ×{n}" if n > 1 else clean(operator)
        for operator, n in call.operators.items()
    ]
    more = ["…"] if len(kinds) > most else []
    return f"{sum(call.operators.values())} nodes: {', '.join([*kinds[:most], *more])}"
