"""Reverse-mode differentiation of a graph by the table of rules.

First, every node on the gradient path without a rule is replaced by operators with rules
(`prepare`). Then the nodes are visited once, from the outputs back. The gradients at a node's
outputs are summed, and its rule turns them into gradients of its inputs (the tape of Wengert 1964,
as in autograd and JAX).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
import onnx_ir as ir

from onnxfit.errors import GradientError, OnnxfitError
from onnxfit.gradients import rules  # noqa: F401  # fills the table
from onnxfit.gradients.blocker import (
    FITTING,
    STATIC,
    TYPED,
    Blocker,
    check_ends,
    missing_rule,
    refuse,
    without_consequences,
)
from onnxfit.gradients.broadcasting import reduce_to, zeros_like
from onnxfit.gradients.paths import PathNode, differentiable_inputs, differentiable_path
from onnxfit.gradients.table import (
    DECOMPOSITIONS,
    RULES,
    SUBGRAPHS,
    InputGradient,
    NoGradientError,
    Rule,
    RuleSignature,
    key_of,
)
from onnxfit.graph import scopes
from onnxfit.graph.bodies import function_body
from onnxfit.graph.inference import (
    InputsError,
    UnknownRankError,
    infer_outputs,
    inference_key,
    schema_of,
)
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.graph.weights import FLOATS

# Errors of a rule, or of ONNX's inference, at a node whose attributes do not fit its inputs: rules
# count axes and sizes, which ONNX's checker does not compare.
_CONTRADICTIONS = (ValueError, LookupError, ArithmeticError, MemoryError)


def add_gradients(
    model: ir.Model, loss: str, weights: Sequence[str], *, device: str = "cpu"
) -> tuple[ir.Model, dict[str, str]]:
    """Add one value per weight to the model: the gradient of the loss.

    Returns the model, and a mapping from weight to the name of its gradient. `weights` are graph
    inputs, `loss` is a scalar float output, the opset is 21 or later. Inputs and outputs keep
    their names and order. `device` is as for GraphBuilder. BlockedError: some nodes cannot be
    differentiated; the error has all of them, and the model must no longer be used.
    """
    path = check_ends(model, loss, weights)
    op = GraphBuilder(model.graph, device=device)
    position = _position_of_loss(model, loss)
    one = op.constant(1, op.wrap(model.graph.outputs[position]).dtype)
    inputs = {v.name: v for v in model.graph.inputs}
    by_value, blocking = gradients(op, {position: one}, [inputs[w] for w in weights], path)
    for weight in weights:
        if inputs[weight] not in by_value:  # all its derivatives are zero
            by_value[inputs[weight]] = zeros_like(op, op.wrap(inputs[weight]))
    refuse(without_consequences(blocking))
    return model, {weight: by_value[inputs[weight]].name for weight in weights}


def blockers(model: ir.Model, loss: str, weights: Sequence[str]) -> Sequence[Blocker]:
    """Return every node between `weights` and `loss` that cannot be differentiated.

    No gradient is built: of several nodes that look the same to a rule, only one is checked. The
    model must not be used afterwards.
    """
    path = check_ends(model, loss, weights)
    inputs = {v.name: v for v in model.graph.inputs}
    wrt = [inputs[weight] for weight in weights]
    position = _position_of_loss(model, loss)
    others = frozenset(model.graph.inputs).difference(wrt)
    tape = Tape(GraphBuilder(model.graph), inputs=others)
    path = prepare(tape, [position], wrt, path)
    _call_rules(tape, model.graph.outputs[position], path)
    return without_consequences(_in_order(tape))


def _position_of_loss(model: ir.Model, loss: str) -> int:
    """Return the position of the loss among the outputs."""
    return next(i for i, v in enumerate(model.graph.outputs) if v.name == loss)


@dataclass
class Tape:
    """State of one differentiation: the builder of the graph, and the nodes that block it.

    `inputs` are the inputs of the whole graph that get no gradient.
    """

    op: GraphBuilder
    blockers: dict[ir.Node, NoGradientError] = field(default_factory=dict)
    inputs: frozenset[ir.Value] = frozenset()

    def inner(self, op: GraphBuilder) -> Tape:
        """Return the tape of a subgraph. Its blockers are added to this tape's."""
        return Tape(op, self.blockers, self.inputs)


def gradients(
    op: GraphBuilder,
    output_gradients: Mapping[int, Value],
    wrt: Sequence[ir.Value],
    path: list[PathNode] | None = None,
) -> tuple[dict[ir.Value, Value], list[Blocker]]:
    """Append the gradient of sum(output_i * gradient_i) with respect to each value of `wrt`.

    `output_gradients` are by position among the graph's outputs; `path` is as for `prepare`.
    Returns a mapping from value to gradient, without values that do not affect the outputs, and
    the nodes that block the gradient. If there are any, the gradients and the graph must not be
    used.
    """
    tape = Tape(op, inputs=frozenset(op.graph.inputs).difference(wrt))
    by_value = backward(tape, output_gradients, wrt, prepare(tape, output_gradients, wrt, path))
    return by_value, _in_order(tape)


def _in_order(tape: Tape) -> list[Blocker]:
    """Return the nodes that block the gradient, in the order of the graph."""
    if not tape.blockers:
        return []
    nodes = ir.traversal.RecursiveGraphIterator(tape.op.graph)
    order = {node: i for i, node in enumerate(nodes)}
    blocking = sorted(tape.blockers.items(), key=lambda item: order.get(item[0], len(order)))
    return [
        Blocker(node.name or "", node.op_type, error.reason, error.fix) for node, error in blocking
    ]


def _call_rules(tape: Tape, target: ir.Value, path: Sequence[PathNode]) -> None:
    """Call the rules of the nodes on a path, to find the nodes that block the gradient.

    The gradients that arrive at a node are placeholders of the right type and shape. The layers of
    a model repeat the same few nodes, so a node equal to a checked one is skipped.
    """
    op = tape.op
    reached = {target}  # values at which a gradient arrives
    answers: dict[Any, frozenset[int]] = {}  # the inputs that have a gradient, by kind of node
    for path_node in reversed(path):
        node = path_node.node
        positions = frozenset(i for i in path_node.outputs if node.outputs[i] in reached)
        if not positions:
            continue
        kind = _kind_of_node(op.graph, path_node, positions)
        differentiated = answers.get(kind)
        if differentiated is None:
            dys = [
                _placeholder(op, v) if i in positions else None for i, v in enumerate(node.outputs)
            ]
            with op.scope(scopes.gradient_of(node.name or node.op_type), nested=False):
                differentiated = frozenset(_input_gradients(tape, path_node, dys))
            if kind is not None and node not in tape.blockers:
                answers[kind] = differentiated
        reached.update(_input(node, i) for i in differentiated)


def _kind_of_node(graph: ir.Graph, path_node: PathNode, positions: frozenset[int]) -> Any:
    """Return everything that a rule can see of a node; None if it is not hashable.

    - `positions`: the outputs whose gradients arrive.
    """
    key = inference_key(graph, path_node.node)
    if key is None:
        return None
    used = tuple(bool(v.uses() or v.is_graph_output()) for v in path_node.node.outputs)
    return key, path_node.inputs, positions, used


def _placeholder(op: GraphBuilder, output: ir.Value) -> Value:
    """Return a value with the type and shape of a gradient that arrives at an output."""
    is_integer = output.dtype is not None and output.dtype not in FLOATS  # a quantized float
    type_ = ir.TensorType(ir.DataType.FLOAT) if is_integer else output.type
    return op.wrap(ir.Value(name=op.unique_name("output_gradient"), type=type_, shape=output.shape))


def prepare(
    tape: Tape,
    outputs: Iterable[int],
    wrt: Iterable[ir.Value],
    path: list[PathNode] | None = None,
) -> list[PathNode]:
    """Replace, in place, every node on the gradient path by operators that have rules.

    `outputs` are the positions of the outputs whose gradients are given. `path` is the graph's
    current path, if the caller knows it. Returns the path afterwards.
    """
    op = tape.op
    leaves = list(wrt)
    if path is None:
        path = _path(op, outputs, leaves)
    while True:
        changed = False
        on_gradient_path = {path_node.node for path_node in path}
        for node in list(op.graph):
            for value in node.outputs:
                if value.name and (value.type is None or value.shape is None):
                    changed |= _infer_type(op.graph, node)
                    break
            if node in on_gradient_path and _has_no_rule(node) and node not in tape.blockers:
                changed |= _decompose_or_block(tape, node)
        if not changed:
            return path
        path = _path(op, outputs, leaves)


def _infer_type(graph: ir.Graph, node: ir.Node) -> bool:
    """Infer the outputs of a node. Return whether all their types, unknown before, are known.

    An earlier operator, unknown to ONNX, may have been decomposed since.
    """
    had_types = all(v.type is not None for v in node.outputs)
    infer_outputs(graph, node)
    return not had_types and all(v.type is not None for v in node.outputs)


def _decompose_or_block(tape: Tape, node: ir.Node) -> bool:
    """Decompose a node, or record why that is impossible. Return whether the node was replaced."""
    try:
        _decompose(tape.op, node)
        return True
    except OnnxfitError:
        raise
    except NoGradientError as error:
        tape.blockers[node] = error
    except _CONTRADICTIONS as error:
        tape.blockers[node] = _contradiction_error(error)
    return False


def backward(
    tape: Tape,
    output_gradients: Mapping[int, Value],
    wrt: Sequence[ir.Value],
    path: Sequence[PathNode],
) -> dict[ir.Value, Value]:
    """Visit a prepared graph from its outputs back; return a mapping from value to gradient.

    `wrt` may contain values that a subgraph captures from outside; `path` is the result of
    `prepare`.
    """
    op = tape.op
    pending: dict[ir.Value, list[Value]] = {}
    for i, dy in output_gradients.items():
        pending.setdefault(op.graph.outputs[i], []).append(dy)
    for path_node in reversed(path):
        node = path_node.node
        dys = [
            _sum_of_gradients(op, pending, v) if i in path_node.outputs else None
            for i, v in enumerate(node.outputs)
        ]
        if any(dy is not None for dy in dys):
            with op.scope(scopes.gradient_of(node.name or node.op_type), nested=False):
                for i, dx in _input_gradients(tape, path_node, dys).items():
                    pending.setdefault(_input(node, i), []).append(dx)
    sums = {v: _sum_of_gradients(op, pending, v) for v in wrt}
    return {v: total for v, total in sums.items() if total is not None}


def _path(op: GraphBuilder, outputs: Iterable[int], wrt: Iterable[ir.Value]) -> list[PathNode]:
    return differentiable_path(op.graph, [op.graph.outputs[i] for i in outputs], wrt)


def _input(node: ir.Node, index: int) -> ir.Value:
    """Return the input at a position; the values that subgraphs capture follow the inputs."""
    value = node.inputs[index] if index < len(node.inputs) else None
    if value is not None:
        return value
    return next(v for i, v in differentiable_inputs(node) if i == index)


def _sum_of_gradients(
    op: GraphBuilder, pending: Mapping[ir.Value, list[Value]], value: ir.Value
) -> Value | None:
    """Return the sum of the gradients of a value, which replaces them in `pending`."""
    terms = pending.get(value)
    if not terms:
        return None
    if len(terms) > 1:
        with op.scope(scopes.GRADIENT_SUM):
            total = terms[0] + terms[1] if len(terms) == 2 else op.Sum(*terms)
            _refine_shape(total, value)
            terms[:] = [total]
    return terms[0]


def _input_gradients(
    tape: Tape, path_node: PathNode, dys: Sequence[Value | None]
) -> dict[int, Value]:
    """Return the gradients of a node's inputs on the gradient path, by position."""
    op = tape.op
    node = path_node.node
    try:
        if node in tape.blockers:
            raise tape.blockers[node]
        for value in (*node.inputs, *node.outputs):
            if value is not None and value.name and value.dtype is None:
                raise NoGradientError(f"the element type of {value.name!r} is unknown", TYPED)
        key = key_of(node)
        if key in SUBGRAPHS:
            return SUBGRAPHS[key](tape, path_node, dys)
        return _by_rule(op, RULES[key], path_node, dys)
    except OnnxfitError:
        raise  # a mistake of the rule, not of the model
    except NoGradientError as error:
        tape.blockers.setdefault(node, error)
    except _CONTRADICTIONS as error:
        tape.blockers.setdefault(node, _contradiction_error(error))
    # With zeros the walk continues, and finds the other blockers as well.
    return {
        i: zeros_like(op, op.wrap(_input(node, i)))
        for i in path_node.inputs
        if isinstance(_input(node, i).type, ir.TensorType)
    }


def _contradiction_error(error: Exception) -> NoGradientError:
    if isinstance(error, InputsError):
        fix = STATIC if isinstance(error, UnknownRankError) else FITTING
        return NoGradientError(str(error).rstrip("."), fix)
    return NoGradientError(
        f"its attributes do not fit the sizes of its inputs ({type(error).__name__}: {error})",
        FITTING,
    )


def _by_rule(
    op: GraphBuilder, rule: Rule, path_node: PathNode, dys: Sequence[Value | None]
) -> dict[int, Value]:
    """Call a rule, and return the gradients of the inputs on the gradient path by position."""
    node = path_node.node
    signature = rule.signature
    inputs = _arguments(op, node.inputs, signature.inputs, signature.variadic_inputs)
    if rule.all_outputs:
        _add_optional_outputs(op, node, len(signature.outputs))
    outputs = _arguments(
        op,
        [v if v.name else None for v in node.outputs],
        signature.outputs,
        signature.variadic_outputs,
    )
    missing = [None] * (len(node.outputs) - len(dys))
    gradients = _arguments(op, [*dys, *missing], signature.outputs, signature.variadic_outputs)
    result = rule.function(
        op, *inputs, *outputs, *gradients, **_rule_attributes(op, node, signature)
    )
    entries: tuple[InputGradient, ...] = result if isinstance(result, tuple) else (result,)
    if len(entries) < len(node.inputs):
        raise GradientError(
            f"The rule of {rule.op_type} returned {len(entries)} entries for the"
            f" {len(node.inputs)} inputs of {node.name!r}. Return one entry per input, None for an"
            " input without a gradient."
        )
    by_position = {}
    for i in path_node.inputs:
        entry = entries[i]
        dx = entry() if callable(entry) else entry
        if dx is not None:
            by_position[i] = _as_gradient(op, rule, dx, op.wrap(_input(node, i)))
    return by_position


def _as_gradient(op: GraphBuilder, rule: Rule, dx: Value, x: Value) -> Value:
    """Return a rule's gradient in the type of its input. GradientError: the shape differs."""
    # An integer on the gradient path is a quantized float, whose gradient is a float.
    dtype = x.ir.dtype
    if dtype in FLOATS and dtype != dx.ir.dtype:
        dx = op.cast(dx, x.dtype)
    if rule.broadcasts:
        dx = reduce_to(op, dx, x)
    _refine_shape(dx, x.ir)
    if not may_be_equal(dx.ir.shape, x.ir.shape):
        raise GradientError(
            f"The rule of {rule.op_type} returned a gradient of shape {dx.shape} for an input of"
            f" shape {x.shape}."
        )
    return dx


def may_be_equal(shape: ir.Shape | None, other: ir.Shape | None) -> bool:
    """Return whether no known size of one shape contradicts the other shape."""
    if shape is None or other is None or shape == other:
        return True
    if len(shape) != len(other):
        return False
    pairs = zip(shape, other)
    return all(a == b for a, b in pairs if isinstance(a, int) and isinstance(b, int))


def _refine_shape(dx: Value, x: ir.Value) -> None:
    """Give a gradient the shape of its value, if inference did not find the gradient's shape."""
    shape = dx.ir.shape
    if dx.ir.producer() is None or x.shape is None:
        return
    if shape is None or (len(shape) == len(x.shape) and not shape.is_static()):
        dx.ir.shape = x.shape.copy()


def _arguments(
    op: GraphBuilder, values: Sequence[Any], parameters: Sequence[str], variadic: bool
) -> list[Any]:
    """Return an argument per parameter: None if absent, a tuple for a variadic parameter."""
    wrapped = [op.wrap(v) if isinstance(v, ir.Value) else v for v in values]
    if len(wrapped) == len(parameters) and not variadic:
        return wrapped
    if variadic:
        single = len(parameters) - 1
        return [*(wrapped + [None] * single)[:single], tuple(wrapped[single:])]
    if any(v is not None for v in wrapped[len(parameters) :]):
        raise NoGradientError(
            f"its rule has {len(parameters)} parameters for {len(wrapped)} inputs or outputs"
        )
    return (wrapped + [None] * len(parameters))[: len(parameters)]


def _add_optional_outputs(op: GraphBuilder, node: ir.Node, count: int) -> None:
    """Give a node all its optional outputs."""
    if len(node.outputs) < count:
        node.resize_outputs(count)
    unnamed = [v for v in node.outputs if not v.name]
    for value in unnamed:
        value.name = op.unique_name(f"{node.op_type}.out")
    if unnamed:
        infer_outputs(op.graph, node)


def _rule_attributes(op: GraphBuilder, node: ir.Node, signature: RuleSignature) -> dict[str, Any]:
    """Return a node's attributes as a rule's keywords, with the operator's defaults."""
    keywords: dict[str, Any] = {}
    if not signature.attributes:
        return keywords
    schema = schema_of(node, op.graph)
    for name in signature.attributes:
        attribute = node.attributes.get(name)
        if attribute is None:
            attribute = _schema_default(schema, name)
        if attribute is not None:
            tensor = attribute.type == ir.AttributeType.TENSOR
            keywords[name] = attribute.value.numpy() if tensor else attribute.value
        elif name not in signature.optional:
            keywords[name] = None
    return keywords


def _schema_default(schema: onnx.defs.OpSchema | None, name: str) -> ir.Attr | None:
    """Return the default of an attribute in an operator's schema; None without one."""
    if schema is None or name not in schema.attributes:
        return None
    default = schema.attributes[name].default_value
    if default.type == onnx.AttributeProto.UNDEFINED:
        return None
    return ir.serde.deserialize_attribute(default)


def _has_no_rule(node: ir.Node) -> bool:
    key = key_of(node)
    return key not in RULES and key not in SUBGRAPHS


def _decompose(op: GraphBuilder, node: ir.Node) -> None:
    """Replace a node by simpler operators. NoGradientError: a used output has no decomposition."""
    with op.replacing(node) as replace:
        outputs = _simpler_outputs(op, node)
        for i, output in enumerate(node.outputs):
            used = output.uses() or output.is_graph_output()
            if used and (i >= len(outputs) or outputs[i] is None):
                raise NoGradientError(
                    f"its output {output.name!r} is used, but its decomposition does not compute it"
                )
        replace(*outputs)


def _simpler_outputs(op: GraphBuilder, node: ir.Node) -> tuple[Any, ...]:
    """Return a node's outputs, computed by its decomposition or by its ONNX function."""
    key = key_of(node)
    outputs: Any = None
    if key in DECOMPOSITIONS:
        signature = DECOMPOSITIONS[key].signature
        inputs = _arguments(op, node.inputs, signature.inputs, signature.variadic_inputs)
        attributes = _rule_attributes(op, node, signature)
        outputs = DECOMPOSITIONS[key].function(op, *inputs, **attributes)
    if outputs is None:
        body = function_body(node, op.graph)
        if body is None:
            raise missing_rule(key, schema_of(node, op.graph))
        outputs = body(op)
    return outputs if isinstance(outputs, tuple) else (outputs,)
