"""If, Scan and Loop: the gradient of a body is a body.

The backward body computes its forward again (no intermediate of an iteration is kept but the states
it began with), then goes back through it: memory grows with the states, not with the body, as in
checkpointed backpropagation through time (Chen et al. 2016).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onnxfit.gradients.blocker import STATIC
from onnxfit.gradients.broadcasting import zeros_like
from onnxfit.gradients.paths import PathNode, carries_gradient, differentiable_inputs
from onnxfit.gradients.table import NoGradientError, subgraph_gradient
from onnxfit.graph.fold import RANDOM
from onnxfit.graph.values import GraphBuilder, Value, infer_outputs

if TYPE_CHECKING:
    from onnxfit.gradients.backward import Tape

LOOPS = "a loop without state that changes its shape or is a sequence"
DRAWN = "draw the numbers outside of the body"


@subgraph_gradient("If")
def if_(tape: Tape, path_node: PathNode, dys: Sequence[Value | None]) -> dict[int, Value]:
    """An If on the same condition, whose branches give the gradients of what the branches of the
    forward one capture.
    """
    op, node = tape.op, path_node.node
    wanted = _values(path_node)
    branches: dict[str, Any] = {}
    for name in ("then_branch", "else_branch"):
        inner = _copy(op, node.attributes[name].as_graph())
        arriving = {i: inner.wrap(dy.ir) for i, dy in enumerate(dys) if dy is not None}
        found = _inside(tape, inner, arriving, list(wanted.values()))
        _outputs(inner, [_or_zero(inner, found, v) for v in wanted.values()])
        branches[name] = inner.graph
    return dict(zip(wanted, op.If(op.wrap(_given(node, 0)), _outputs=len(wanted), **branches)))


@subgraph_gradient("Scan")
def scan(tape: Tape, path_node: PathNode, dys: Sequence[Value | None]) -> dict[int, Value]:
    """A Scan from the last step to the first: s_t is recorded by the forward one, ds_{t-1} and dx_t
    come from ds_t, dy_t.

    What the body captures has the sum over all steps.
    """
    op, node = tape.op, path_node.node
    count = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
    states, scanned = node.inputs[:count], node.inputs[count:]
    body = node.attributes["body"].as_graph()
    outputs = len(body.outputs) - count
    input_axes, input_ways = (
        _ints(node, "scan_input_axes", len(scanned)),
        _ints(node, "scan_input_directions", len(scanned)),
    )
    output_axes, output_ways = (
        _ints(node, "scan_output_axes", outputs),
        _ints(node, "scan_output_directions", outputs),
    )
    types = [*(v.type for v in node.inputs if v is not None)]
    shapes = [_shape(v) for v in states] + [_shape(v, axis) for v, axis in zip(scanned, input_axes)]
    inner = _copy(op, body, types, shapes)
    recorded = _record(
        op,
        node,
        body.inputs[:count],
        {"scan_output_axes": output_axes, "scan_output_directions": output_ways},
    )
    steps = [op.wrap(v) for v in recorded]
    arriving_steps = [dys[count + k] for k in range(outputs)]
    return _back(
        tape, path_node, inner,
        states=[(i, i, inner.graph.inputs[i], op.wrap(_given(node, i))) for i in range(count)],
        dys=dys[:count],
        given=[
            *((inner.graph.inputs[i], v, 0, 1) for i, v in enumerate(steps)),
            *((inner.graph.inputs[count + i], op.wrap(_given(node, count + i)), input_axes[i], 1 - input_ways[i]) for i in range(len(scanned))),
        ],
        scanned=[(count + i, inner.graph.inputs[count + i], input_axes[i], 1 - input_ways[i]) for i in range(len(scanned))],
        arriving=[(count + k, dy, output_axes[k], 1 - output_ways[k]) for k, dy in enumerate(arriving_steps) if dy is not None],
    )  # fmt: skip


@subgraph_gradient("Loop")
def loop(tape: Tape, path_node: PathNode, dys: Sequence[Value | None]) -> dict[int, Value]:
    """A Scan over what the loop recorded, from the last iteration that it really made to the first."""
    op, node = tape.op, path_node.node
    count = len(node.inputs) - 2
    body = node.attributes["body"].as_graph()
    states = [_given(node, 2 + i) for i in range(count)]
    types = [
        ir.TensorType(ir.DataType.INT64),
        ir.TensorType(ir.DataType.BOOL),
        *(v.type for v in states),
    ]
    inner = _copy(op, body, types, [ir.Shape([]), ir.Shape([]), *(_shape(v) for v in states)])
    number, going_on, *inside = inner.graph.inputs
    recorded = _record(op, node, [body.inputs[0], *body.inputs[2:]], {})
    # it was, or there had been no iteration
    going_on.replace_all_uses_with(inner.constant(True).ir, replace_graph_outputs=True)
    inner.graph.inputs[:] = [number, *inside]
    del inner.graph.outputs[0]  # the condition
    return _back(
        tape, path_node, inner,
        states=[(2 + i, i, inside[i], op.wrap(v)) for i, v in enumerate(states)],
        dys=dys[:count],
        given=[(v, op.wrap(r), 0, 1) for v, r in zip([number, *inside], recorded)],
        scanned=[],
        arriving=[(k, dy, 0, 1) for k, dy in enumerate(dys) if k >= count and dy is not None],
    )  # fmt: skip


def _back(
    tape: Tape,
    path_node: PathNode,
    inner: GraphBuilder,
    *,
    states: Sequence[tuple[int, int, ir.Value, Value]],
    dys: Sequence[Value | None],
    given: Sequence[tuple[ir.Value, Value, int, int]],
    scanned: Sequence[tuple[int, ir.Value, int, int]],
    arriving: Sequence[tuple[int, Value, int, int]],
) -> dict[int, Value]:
    """The Scan backwards.

    `inner` is the copy of the forward body, whose outputs are states, then what is stacked.

    `states` are (input of the node, output of the body, input of the body, first value), `dys` the
    gradients that arrive at their last values; `given` is what the copy's inputs are each step
    (input of the body, all steps, axis, direction), `scanned` those of them that have a gradient
    (input of the node first), `arriving` the gradients of what is stacked (output of the body, all
    steps, axis, direction).
    """
    op = tape.op
    moving = [state for state in states if carries_gradient(state[-1].ir)]
    starts = [start for _, _, start, _ in moving]
    captured = {i: v for i, v in _values(path_node).items() if i >= len(path_node.node.inputs)}
    # what the body is given each step, in the order of Scan: states, then slices
    dstates = [_input(inner, f"state_{o}", first) for _, o, _, first in moving]
    sums = [_input(inner, f"sum_{i}", op.wrap(v)) for i, v in captured.items()]
    slices = [_slice(inner, f"arriving_{o}", dy, axis) for o, dy, axis, _ in arriving]
    inner.graph.inputs[:] = [
        *(v.ir for v in dstates),
        *(v.ir for v in sums),
        *(v for v, *_ in given),
        *(v.ir for v in slices),
    ]
    inside = {
        **{o: d for (_, o, *_), d in zip(moving, dstates)},
        **{o: s for (o, *_), s in zip(arriving, slices)},
    }
    wanted = [(i, v, axis, way) for i, v, axis, way in scanned if i in path_node.inputs]
    leaves = [*starts, *(v for _, v, *_ in wanted), *captured.values()]
    found = _inside(tape, inner, inside, leaves)
    results = [
        *(_or_zero(inner, found, start) for start in starts),
        *(s + found[v] if v in found else s for s, v in zip(sums, captured.values())),
        *(_or_zero(inner, found, v) for _, v, *_ in wanted),
    ]
    if any(value.shape is None for value in results):  # onnxruntime runs no such Scan
        raise NoGradientError("the rank of a value that its body uses is unknown", STATIC)
    _outputs(inner, results)
    first = [zeros_like(op, value) if dys[o] is None else dys[o] for _, o, _, value in moving]
    made = op.Scan(*first, *(zeros_like(op, op.wrap(v)) for v in captured.values()), *(v for _, v, *_ in given), *(dy for _, dy, *_ in arriving), _outputs=len(results), body=inner.graph, num_scan_inputs=len(given) + len(arriving), scan_input_axes=[*(axis for *_, axis, _ in given), *(axis for *_, axis, _ in arriving)], scan_input_directions=[*(way for *_, way in given), *(way for *_, way in arriving)], scan_output_axes=[axis for *_, axis, _ in wanted] or None, scan_output_directions=[way for *_, way in wanted] or None)  # fmt: skip
    positions = [*(i for i, *_ in moving), *captured, *(i for i, *_ in wanted)]
    return {i: dx for i, dx in zip(positions, made) if i in path_node.inputs}


def _inside(
    tape: Tape, inner: GraphBuilder, arriving: dict[int, Value], wrt: Sequence[ir.Value]
) -> dict[ir.Value, Value]:
    # the walk calls the rules, and these call the walk
    from onnxfit.gradients.backward import backward, prepare

    body = tape.inner(inner)
    prepare(body, arriving, wrt)
    return backward(body, arriving, wrt)


def _values(path_node: PathNode) -> dict[int, ir.Value]:
    """The values whose gradients are wanted, by position."""
    return {i: v for i, v in differentiable_inputs(path_node.node) if i in path_node.inputs}


def _given(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None
    return value


def _copy(
    op: GraphBuilder,
    graph: ir.Graph,
    types: Iterable[ir.TypeProtocol | None] = (),
    shapes: Iterable[ir.Shape | None] = (),
) -> GraphBuilder:
    """A copy of a body under names of its own, its inputs typed by what they are given."""
    for node in ir.traversal.RecursiveGraphIterator(graph):
        if _draws(node):
            raise NoGradientError(
                f"its body draws random numbers ({node.op_type} {node.name!r}), and the gradient"
                " would draw others",
                DRAWN,
            )
    copy = graph.clone(allow_outer_scope_values=True)
    copy.opset_imports.update(op.graph.opset_imports)
    for value, type_, shape in zip(copy.inputs, types, shapes):
        if type_ is not None and not isinstance(type_, ir.TensorType):
            raise NoGradientError(f"{value.name!r} is a sequence or optional", LOOPS)
        value.type = value.type or type_
        value.shape = shape if value.shape is None else value.shape
    for node in copy:
        if any(v.type is None or v.shape is None for v in node.outputs):
            infer_outputs(copy, node)
    for initializer in list(copy.initializers.values()):
        initializer.name = op.unique_name(f"{initializer.name}/again")
    for value in copy.inputs:
        value.name = op.unique_name(f"{value.name}/again")
    for node in ir.traversal.RecursiveGraphIterator(copy):
        node.name = op.unique_name(f"{node.name or node.op_type}/again")
        for value in node.outputs:
            if value.name:
                value.name = op.unique_name(f"{value.name}/again")
    return GraphBuilder(copy, around=op)


def _draws(node: ir.Node) -> bool:
    """Whether a node gives other values each time it is run."""
    if node.domain not in ("", "ai.onnx"):
        return False
    training = node.inputs[2] if node.op_type == "Dropout" and len(node.inputs) > 2 else None
    flag = None if training is None else ir.convenience.get_const_tensor(training)
    return node.op_type in RANDOM or (
        training is not None and (flag is None or bool(flag.numpy().any()))
    )


def _record(
    op: GraphBuilder, node: ir.Node, inside: Sequence[ir.Value], attributes: dict[str, list[int]]
) -> list[ir.Value]:
    """Let a Scan or Loop hand out, stacked, what these inputs of its body are in each step."""
    body = GraphBuilder(node.attributes["body"].as_graph(), around=op)
    before = len(node.outputs)
    for value in inside:
        body.graph.outputs.append(body.Identity(body.wrap(value)).ir)
    node.resize_outputs(before + len(inside))
    for value in node.outputs[before:]:
        value.name = op.unique_name(f"{node.name or node.op_type}/recorded")
    for name, values in attributes.items():
        node.attributes[name] = ir.AttrInt64s(name, [*values, *[0] * len(inside)])
    infer_outputs(op.graph, node)
    return list(node.outputs[before:])


def _ints(node: ir.Node, name: str, count: int) -> list[int]:
    attribute = node.attributes.get(name)
    return list(attribute.as_ints()) if attribute is not None else [0] * count


def _shape(value: ir.Value | None, without: int | None = None) -> ir.Shape | None:
    """A value's shape, of a scanned one without the axis of the steps."""
    if value is None or value.shape is None:
        return None
    dims = list(value.shape)
    if without is not None:
        del dims[without]
    return ir.Shape(dims)


def _input(inner: GraphBuilder, name: str, like: Value) -> Value:
    return _new(inner, name, like, _shape(like.ir))


def _slice(inner: GraphBuilder, name: str, steps: Value, axis: int) -> Value:
    return _new(inner, name, steps, _shape(steps.ir, axis))


def _new(inner: GraphBuilder, name: str, like: Value, shape: ir.Shape | None) -> Value:
    return inner.wrap(ir.Value(name=inner.unique_name(name), type=like.ir.type, shape=shape))


def _outputs(inner: GraphBuilder, values: Sequence[Value]) -> None:
    """Make these the outputs of a body: each its own, and made in it."""
    taken: list[ir.Value] = []
    for value in values:
        own = value.ir.producer() is not None and value.ir.producer() in set(inner.graph)
        taken.append(value.ir if own and value.ir not in taken else inner.Identity(value).ir)
    inner.graph.outputs[:] = taken


def _or_zero(inner: GraphBuilder, found: dict[ir.Value, Value], value: ir.Value) -> Value:
    return found[value] if value in found else zeros_like(inner, inner.wrap(value))
