"""If, Scan and Loop: the gradient of a body is another body.

The backward body recomputes its forward body, then differentiates it. Of each iteration, only the
initial states are stored: memory grows with the states, not with the body, as in checkpointed
backpropagation through time (Chen et al. 2016).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onnxfit.gradients.blocker import STATIC
from onnxfit.gradients.branches import branch_error
from onnxfit.gradients.broadcasting import zeros_like
from onnxfit.gradients.paths import PathNode, carries_gradient, differentiable_inputs
from onnxfit.gradients.table import NoGradientError, subgraph_rule
from onnxfit.graph import scopes
from onnxfit.graph.fold import RANDOM
from onnxfit.graph.inference import infer_outputs
from onnxfit.graph.values import GraphBuilder, Value

if TYPE_CHECKING:
    from onnxfit.gradients.backward import Tape

SUPPORTED_LOOPS = "use a loop whose states are tensors of constant shape"
RANDOM_OUTSIDE = "draw the numbers outside the body"


@subgraph_rule("If")
def if_(tape: Tape, path_node: PathNode, dys: Sequence[Value | None]) -> dict[int, Value]:
    """Build an If on the same condition.

    Its branches return the gradients of the values that the branches of the forward If capture.
    Both need a gradient, although inputs of the model may select the same branch in all batches:
    the error about a branch without a gradient names these inputs.
    """
    op = tape.op
    node = path_node.node
    captured = _inputs_with_gradient(path_node)
    branches: dict[str, Any] = {}
    blocked: dict[ir.Node, tuple[str, NoGradientError]] = {}
    for name in ("then_branch", "else_branch"):
        before = set(tape.blockers)
        body = _copy_body(op, node.attributes[name].as_graph())
        output_gradients = {i: body.wrap(dy.ir) for i, dy in enumerate(dys) if dy is not None}
        gradients = _differentiate(tape, body, output_gradients, list(captured.values()))
        _set_outputs(body, [_gradient_or_zero(body, gradients, v) for v in captured.values()])
        branches[name] = body.graph
        blocked |= {n: (name, error) for n, error in tape.blockers.items() if n not in before}
    error = branch_error(node, blocked, tape.inputs) if blocked else None
    if error is not None:  # it says more than the errors of the nodes
        for inner in blocked:
            del tape.blockers[inner]
        raise error
    condition = op.wrap(_node_input(node, 0))
    return dict(zip(captured, op.If(condition, _outputs=len(captured), **branches)))


# Loops
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoopState:
    """A value that each step of a loop receives from the step before."""

    node_input: int
    body_output: int
    body_input: ir.Value
    initial: Value


@dataclass(frozen=True)
class Stacked:
    """Values of all steps along an axis; `direction` is 0 from the first to the last, 1 back."""

    steps: Value
    axis: int
    direction: int


@dataclass(frozen=True)
class StackedInput(Stacked):
    """Values from which each step receives a slice.

    `node_input` is None for a state that the forward loop recorded.
    """

    body_input: ir.Value
    node_input: int | None = None


@dataclass(frozen=True)
class StackedGradient(Stacked):
    """The gradient of a body's output that the loop stacks."""

    body_output: int


@subgraph_rule("Scan")
def scan(tape: Tape, path_node: PathNode, dys: Sequence[Value | None]) -> dict[int, Value]:
    """Build a Scan from the last step to the first.

    The forward Scan records the state s_t before each step; ds_t-1 and dx_t come from ds_t, dy_t.
    A value that the body captures gets the sum over all steps.
    """
    op = tape.op
    node = path_node.node
    count = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
    scanned = len(node.inputs) - count
    forward = node.attributes["body"].as_graph()
    stacked = len(forward.outputs) - count
    input_axes = _int_attribute(node, "scan_input_axes", scanned)
    input_directions = _int_attribute(node, "scan_input_directions", scanned)
    output_axes = _int_attribute(node, "scan_output_axes", stacked)
    output_directions = _int_attribute(node, "scan_output_directions", stacked)
    types = [v.type for v in node.inputs if v is not None]
    shapes = [_shape_of(v) for v in node.inputs[:count]]
    shapes += [_shape_of(v, axis) for v, axis in zip(node.inputs[count:], input_axes)]
    body = _copy_body(op, forward, types, shapes)
    attributes = {"scan_output_axes": output_axes, "scan_output_directions": output_directions}
    recorded = _record_inputs(op, node, forward.inputs[:count], attributes)
    body_inputs = list(body.graph.inputs)
    states = [LoopState(i, i, body_inputs[i], op.wrap(_node_input(node, i))) for i in range(count)]
    inputs = [StackedInput(op.wrap(v), 0, 1, body_inputs[i]) for i, v in enumerate(recorded)]
    for i, (axis, direction) in enumerate(zip(input_axes, input_directions), count):
        steps = op.wrap(_node_input(node, i))
        inputs.append(StackedInput(steps, axis, 1 - direction, body_inputs[i], i))
    output_gradients = [
        StackedGradient(dy, axis, 1 - direction, i)
        for i, (dy, axis, direction) in enumerate(
            zip(dys[count:], output_axes, output_directions), count
        )
        if dy is not None
    ]
    return _scan_back(tape, path_node, body, states, dys[:count], inputs, output_gradients)


@subgraph_rule("Loop")
def loop(tape: Tape, path_node: PathNode, dys: Sequence[Value | None]) -> dict[int, Value]:
    """Build a Scan over the recorded states, from the last iteration that ran to the first."""
    op = tape.op
    node = path_node.node
    count = len(node.inputs) - 2
    forward = node.attributes["body"].as_graph()
    initial = [_node_input(node, 2 + i) for i in range(count)]
    types = [
        ir.TensorType(ir.DataType.INT64),
        ir.TensorType(ir.DataType.BOOL),
        *(v.type for v in initial),
    ]
    shapes = [ir.Shape([]), ir.Shape([]), *(_shape_of(v) for v in initial)]
    body = _copy_body(op, forward, types, shapes)
    iteration, condition, *body_states = body.graph.inputs
    recorded = _record_inputs(op, node, [forward.inputs[0], *forward.inputs[2:]], {})
    # The condition was true in every iteration that ran.
    condition.replace_all_uses_with(body.constant(True).ir, replace_graph_outputs=True)
    body.graph.inputs[:] = [iteration, *body_states]
    del body.graph.outputs[0]  # the condition
    states = [
        LoopState(2 + i, i, body_states[i], op.wrap(value)) for i, value in enumerate(initial)
    ]
    inputs = [
        StackedInput(op.wrap(steps), 0, 1, value)
        for value, steps in zip([iteration, *body_states], recorded)
    ]
    output_gradients = [
        StackedGradient(dy, 0, 1, i) for i, dy in enumerate(dys) if i >= count and dy is not None
    ]
    return _scan_back(tape, path_node, body, states, dys[:count], inputs, output_gradients)


def _scan_back(
    tape: Tape,
    path_node: PathNode,
    body: GraphBuilder,
    states: Sequence[LoopState],
    dys: Sequence[Value | None],
    inputs: Sequence[StackedInput],
    output_gradients: Sequence[StackedGradient],
) -> dict[int, Value]:
    """Run the copied forward body and its gradient in a Scan; return the node's gradients.

    The outputs of `body` are the states, then the values that the loop stacks. `dys` are the
    gradients of the last states.
    """
    op = tape.op
    captured = {
        i: v for i, v in _inputs_with_gradient(path_node).items() if i >= len(path_node.node.inputs)
    }
    states = [state for state in states if carries_gradient(state.initial.ir)]
    scanned = [v for v in inputs if v.node_input in path_node.inputs]
    _append_gradient(tape, body, states, captured, inputs, scanned, output_gradients)
    stacked: list[Stacked] = [*inputs, *output_gradients]
    outputs = op.Scan(
        *(_or_zeros(op, dys[state.body_output], state.initial) for state in states),
        *(zeros_like(op, op.wrap(v)) for v in captured.values()),
        *(v.steps for v in stacked),
        _outputs=len(body.graph.outputs),
        body=body.graph,
        num_scan_inputs=len(stacked),
        scan_input_axes=[v.axis for v in stacked],
        scan_input_directions=[v.direction for v in stacked],
        scan_output_axes=[v.axis for v in scanned] or None,
        scan_output_directions=[v.direction for v in scanned] or None,
    )
    positions = [*(s.node_input for s in states), *captured, *(v.node_input for v in scanned)]
    return {i: dx for i, dx in zip(positions, outputs) if i is not None and i in path_node.inputs}


def _append_gradient(
    tape: Tape,
    body: GraphBuilder,
    states: Sequence[LoopState],
    captured: dict[int, ir.Value],
    inputs: Sequence[StackedInput],
    scanned: Sequence[StackedInput],
    output_gradients: Sequence[StackedGradient],
) -> None:
    """Turn a copy of the forward body into the backward body.

    It receives, in Scan's order, the gradients of the states, the sums so far for captured values,
    and slices of `inputs` and `output_gradients`. It returns the gradients of the states before the
    step, the new sums, and the gradients of the slices of `scanned`.
    """
    op = tape.op
    dstates = [_body_input(body, f"state_{s.body_output}", s.initial) for s in states]
    sums = [_body_input(body, f"sum_{i}", op.wrap(v)) for i, v in captured.items()]
    slices = [
        _body_input(body, f"output_gradient_{g.body_output}", g.steps, g.axis)
        for g in output_gradients
    ]
    body.graph.inputs[:] = [
        *(v.ir for v in dstates),
        *(v.ir for v in sums),
        *(v.body_input for v in inputs),
        *(v.ir for v in slices),
    ]
    dys = {state.body_output: dy for state, dy in zip(states, dstates)}
    dys.update({stacked.body_output: dy for stacked, dy in zip(output_gradients, slices)})
    starts = [state.body_input for state in states]
    elements = [v.body_input for v in scanned]
    gradients = _differentiate(tape, body, dys, [*starts, *elements, *captured.values()])
    results = [_gradient_or_zero(body, gradients, v) for v in starts]
    for total, v in zip(sums, captured.values()):
        results.append(total + gradients[v] if v in gradients else total)
    results += [_gradient_or_zero(body, gradients, v) for v in elements]
    if any(value.shape is None for value in results):  # onnxruntime does not run such a Scan
        raise NoGradientError("the rank of a value that its body uses is unknown", STATIC)
    _set_outputs(body, results)


def _or_zeros(op: GraphBuilder, dy: Value | None, like: Value) -> Value:
    return zeros_like(op, like) if dy is None else dy


def _differentiate(
    tape: Tape, body: GraphBuilder, output_gradients: dict[int, Value], wrt: Sequence[ir.Value]
) -> dict[ir.Value, Value]:
    """Append the gradient of a body to the body."""
    # The driver calls the rules, and these rules call the driver.
    from onnxfit.gradients.backward import backward, prepare

    inner = tape.inner(body)
    return backward(inner, output_gradients, wrt, prepare(inner, output_gradients, wrt))


def _gradient_or_zero(
    body: GraphBuilder, gradients: dict[ir.Value, Value], value: ir.Value
) -> Value:
    return gradients[value] if value in gradients else zeros_like(body, body.wrap(value))


# Bodies
# ------------------------------------------------------------------------------------------------


def _inputs_with_gradient(path_node: PathNode) -> dict[int, ir.Value]:
    """Return the values whose gradients are needed, by position.

    Captured values have the positions after the node's inputs.
    """
    return {i: v for i, v in differentiable_inputs(path_node.node) if i in path_node.inputs}


def _node_input(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None
    return value


def _copy_body(
    op: GraphBuilder,
    graph: ir.Graph,
    types: Iterable[ir.TypeProtocol | None] = (),
    shapes: Iterable[ir.Shape | None] = (),
) -> GraphBuilder:
    """Copy a body under new names; its inputs get the types and shapes that the node passes."""
    for node in ir.traversal.RecursiveGraphIterator(graph):
        if _is_random(node):
            raise NoGradientError(
                f"its body draws random numbers ({node.op_type} {node.name!r}), and its gradient"
                " would draw different ones",
                RANDOM_OUTSIDE,
            )
    copy = graph.clone(allow_outer_scope_values=True)
    copy.opset_imports.update(op.graph.opset_imports)
    for value, type_, shape in zip(copy.inputs, types, shapes):
        if type_ is not None and not isinstance(type_, ir.TensorType):
            raise NoGradientError(f"{value.name!r} is a sequence or optional", SUPPORTED_LOOPS)
        value.type = value.type or type_
        value.shape = shape if value.shape is None else value.shape
    for node in copy:
        if any(v.type is None or v.shape is None for v in node.outputs):
            infer_outputs(copy, node)
    _rename(op, copy)
    return GraphBuilder(copy, outer=op)


def _rename(op: GraphBuilder, copy: ir.Graph) -> None:
    """Give the values and nodes of a copied body names that are unused in the whole graph."""
    with op.scope(scopes.GRADIENT, nested=False):
        for value in (*copy.initializers.values(), *copy.inputs):
            value.name = op.unique_name(scopes.copy_of(value.name or "input"))
        for node in ir.traversal.RecursiveGraphIterator(copy):
            node.name = op.unique_name(scopes.copy_of(node.name or node.op_type))
            for value in node.outputs:
                if value.name:
                    value.name = op.unique_name(scopes.copy_of(value.name))


def _is_random(node: ir.Node) -> bool:
    """Whether the results of a node differ from run to run."""
    if node.domain not in ("", "ai.onnx"):
        return False
    if node.op_type in RANDOM:
        return True
    training = node.inputs[2] if node.op_type == "Dropout" and len(node.inputs) > 2 else None
    if training is None:
        return False
    flag = ir.convenience.get_const_tensor(training)
    return flag is None or bool(flag.numpy().any())


def _record_inputs(
    op: GraphBuilder,
    node: ir.Node,
    body_inputs: Sequence[ir.Value],
    attributes: dict[str, list[int]],
) -> list[ir.Value]:
    """Let a Scan or Loop return these inputs of its body for each step, stacked.

    `attributes` are the attributes with an entry per stacked output; the new outputs get 0.
    """
    body = GraphBuilder(node.attributes["body"].as_graph(), outer=op)
    before = len(node.outputs)
    for value in body_inputs:
        body.graph.outputs.append(body.Identity(body.wrap(value)).ir)
    node.resize_outputs(before + len(body_inputs))
    for value in node.outputs[before:]:
        value.name = op.unique_name(f"{node.name or node.op_type}/recorded")
    for name, values in attributes.items():
        node.attributes[name] = ir.AttrInt64s(name, [*values, *[0] * len(body_inputs)])
    infer_outputs(op.graph, node)
    return list(node.outputs[before:])


def _int_attribute(node: ir.Node, name: str, count: int) -> list[int]:
    """Return a list of integers, by default `count` zeros."""
    attribute = node.attributes.get(name)
    return list(attribute.as_ints()) if attribute is not None else [0] * count


def _shape_of(value: ir.Value | None, without: int | None = None) -> ir.Shape | None:
    """Return a value's shape, for a stacked value without the axis of the steps."""
    if value is None or value.shape is None:
        return None
    dims = list(value.shape)
    if without is not None:
        del dims[without]
    return ir.Shape(dims)


def _body_input(body: GraphBuilder, name: str, like: Value, without: int | None = None) -> Value:
    """Make an input of a body, of the type of `like` and its shape without an axis."""
    shape = _shape_of(like.ir, without)
    return body.wrap(ir.Value(name=body.unique_name(name), type=like.ir.type, shape=shape))


def _set_outputs(body: GraphBuilder, values: Sequence[Value]) -> None:
    """Set the outputs of a body, each as a separate value that a node of the body computes."""
    nodes = set(body.graph)
    outputs: list[ir.Value] = []
    for value in values:
        is_own = value.ir.producer() in nodes and value.ir not in outputs
        outputs.append(value.ir if is_own else body.Identity(value).ir)
    body.graph.outputs[:] = outputs
