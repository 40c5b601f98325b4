"""Reverse-mode differentiation of a graph by the table of rules.

First every node on the way is brought into operators that have rules (`prepare`); then the nodes
are walked once, from the outputs back: each passes the sum of the gradients that arrived at its
outputs on to its inputs (the "tape" of Wengert 1964, as in autograd and JAX).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
import onnx_ir as ir

from onnxfit.errors import GradientError, OnnxfitError
from onnxfit.gradients import rules  # noqa: F401  # fills the table
from onnxfit.gradients.blocker import FITTING, STATIC, TYPED, Blocker, check_ends, refuse
from onnxfit.gradients.broadcasting import reduce_to, zeros_like
from onnxfit.gradients.paths import FLOATS, PathNode, differentiable_inputs, differentiable_path
from onnxfit.gradients.table import (
    DECOMPOSITIONS,
    NOT_DIFFERENTIABLE,
    RULES,
    SUBGRAPHS,
    InputGradient,
    Key,
    NoGradientError,
    Rule,
    RuleSignature,
    key_of,
)
from onnxfit.graph import scopes
from onnxfit.graph.bodies import function_body
from onnxfit.graph.inference import InputsError, UnknownRankError, infer_outputs, schema_of
from onnxfit.graph.values import GraphBuilder, Value


def add_gradients(
    model: ir.Model, loss: str, weights: Sequence[str]
) -> tuple[ir.Model, dict[str, str]]:
    """The model with one more value per weight, the gradient of the loss, as a new model; and those
    values' names.

    `weights` are graph inputs, `loss` is a scalar float output, the opset is 21. Inputs and outputs
    keep their names and order. Raises GradientError with all blockers.
    """
    work, found, blocking = _differentiated(model, loss, weights)
    refuse(blocking)
    return work, found


def blockers(model: ir.Model, loss: str, weights: Sequence[str]) -> list[Blocker]:
    """Every node between `weights` and `loss` that cannot be differentiated, found without running
    anything.
    """
    return _differentiated(model, loss, weights)[2]


def _differentiated(
    model: ir.Model, loss: str, weights: Sequence[str]
) -> tuple[ir.Model, dict[str, str], list[Blocker]]:
    check_ends(model, loss, weights)
    work = model.clone()
    op = GraphBuilder(work.graph)
    position = next(i for i, v in enumerate(work.graph.outputs) if v.name == loss)
    one = op.constant(1, op.wrap(work.graph.outputs[position]).dtype)
    inputs = {v.name: v for v in work.graph.inputs}
    found, blocking = gradients(op, {position: one}, [inputs[w] for w in weights])
    for w in weights:
        if inputs[w] not in found:  # all its derivatives are zero
            found[inputs[w]] = zeros_like(op, op.wrap(inputs[w]))
    causes = [b for b in blocking if b.fix != TYPED]  # behind an unknown operator, no type is known
    return work, {w: found[inputs[w]].name for w in weights}, causes or blocking


@dataclass
class Tape:
    """One differentiation under way: the builder of the graph, and the nodes that turned out to
    block it.
    """

    op: GraphBuilder
    blockers: dict[ir.Node, NoGradientError] = field(default_factory=dict)

    def inner(self, op: GraphBuilder) -> Tape:
        """The same for a subgraph."""
        return Tape(op, self.blockers)


def gradients(
    op: GraphBuilder, arriving: Mapping[int, Value], wrt: Sequence[ir.Value]
) -> tuple[dict[ir.Value, Value], list[Blocker]]:
    """The gradient of sum(output_i * arriving_i) with respect to each value of `wrt`, appended to
    the graph; and what blocks it.

    `arriving` is by position among the graph's outputs. Values that the outputs do not depend on
    are missing in the result. If there are blockers, the result and the graph are of no use.
    """
    tape = Tape(op)
    prepare(tape, arriving, wrt)
    found = backward(tape, arriving, wrt)
    place = {node: i for i, node in enumerate(ir.traversal.RecursiveGraphIterator(op.graph))}
    blocking = sorted(tape.blockers.items(), key=lambda item: place.get(item[0], len(place)))
    return found, [
        Blocker(node.name or "", node.op_type, why.reason, why.fix) for node, why in blocking
    ]


def prepare(tape: Tape, arriving: Iterable[int], wrt: Iterable[ir.Value]) -> None:
    """Write every node on the way in operators that have rules, in place."""
    op, wrt = tape.op, list(wrt)
    waiting = True
    while waiting:
        waiting = False
        on_gradient_path = {path_node.node for path_node in _path(op, arriving, wrt)}
        for node in list(op.graph):
            if any(v.name and (v.type is None or v.shape is None) for v in node.outputs):
                # it came after an operator that ONNX does not know, which may be written out by now
                infer_outputs(op.graph, node)
            if node in on_gradient_path and node not in tape.blockers and _has_no_rule(node):
                try:
                    waiting |= _rewritten(op, node)
                except NoGradientError as refused:
                    tape.blockers[node] = refused
                except OnnxfitError:
                    raise
                except (
                    _MISFITS
                ) as error:  # ONNX's inference, of what the node's simpler form would compute
                    tape.blockers[node] = _misfit(error)


def backward(
    tape: Tape, arriving: Mapping[int, Value], wrt: Sequence[ir.Value]
) -> dict[ir.Value, Value]:
    """The walk, over a prepared graph. Of values captured from outside a subgraph, too."""
    op = tape.op
    pending: dict[ir.Value, list[Value]] = {}
    for i, dy in arriving.items():
        pending.setdefault(op.graph.outputs[i], []).append(dy)
    for path_node in reversed(_path(op, arriving, wrt)):
        dys = [
            _total(op, pending, v) if i in path_node.outputs else None
            for i, v in enumerate(path_node.node.outputs)
        ]
        if any(dy is not None for dy in dys):
            with op.scope(scopes.gradient_of(path_node.node.name or path_node.node.op_type)):
                for i, dx in _entries(tape, path_node, dys).items():
                    pending.setdefault(_input(path_node.node, i), []).append(dx)
    found = {v: _total(op, pending, v) for v in wrt}
    return {v: total for v, total in found.items() if total is not None}


def _path(op: GraphBuilder, arriving: Iterable[int], wrt: Iterable[ir.Value]) -> list[PathNode]:
    return differentiable_path(op.graph, [op.graph.outputs[i] for i in arriving], wrt)


def _input(node: ir.Node, index: int) -> ir.Value:
    """The input at a position, counting on through what the node's subgraphs capture."""
    given = node.inputs[index] if index < len(node.inputs) else None
    return (
        given
        if given is not None
        else next(v for i, v in differentiable_inputs(node) if i == index)
    )


def _total(
    op: GraphBuilder, pending: Mapping[ir.Value, list[Value]], value: ir.Value
) -> Value | None:
    """The sum of the gradients that arrived at a value."""
    parts = pending.get(value)
    if not parts:
        return None
    if len(parts) > 1:
        with op.scope(scopes.GRADIENT_SUM):
            parts[:] = [parts[0] + parts[1] if len(parts) == 2 else op.Sum(*parts)]
            _know(parts[0], value)
    return parts[0]


def _entries(tape: Tape, path_node: PathNode, dys: list[Value | None]) -> dict[int, Value]:
    """What a node's rule says, by position of the input; only for inputs that derivatives flow
    through.
    """
    op, node = tape.op, path_node.node
    try:
        if node in tape.blockers:
            raise tape.blockers[node]
        for value in (*node.inputs, *node.outputs):
            if value is not None and value.name and value.dtype is None:
                raise NoGradientError(f"the element type of {value.name!r} is unknown", TYPED)
        if key_of(node) in SUBGRAPHS:
            return SUBGRAPHS[key_of(node)](tape, path_node, dys)
        return _by_rule(op, RULES[key_of(node)], path_node, dys)
    except OnnxfitError:
        raise  # of whoever wrote the rule
    except (NoGradientError, *_MISFITS) as error:
        tape.blockers.setdefault(
            node, error if isinstance(error, NoGradientError) else _misfit(error)
        )
        # go on with any number, to find the other blockers as well
        return {
            i: zeros_like(op, op.wrap(_input(node, i)))
            for i in path_node.inputs
            if isinstance(_input(node, i).type, ir.TensorType)
        }


# What a rule meets at a node whose attributes and inputs contradict each other: it counts axes and
# sizes, which the checker does not compare.
_MISFITS = (ValueError, LookupError, ArithmeticError, MemoryError)


def _misfit(error: Exception) -> NoGradientError:
    if isinstance(error, InputsError):
        return NoGradientError(
            str(error).rstrip("."), STATIC if isinstance(error, UnknownRankError) else FITTING
        )
    return NoGradientError(
        f"its attributes and the sizes of its inputs do not fit each other ({type(error).__name__}:"
        f" {error})",
        FITTING,
    )


def _by_rule(
    op: GraphBuilder, rule: Rule, path_node: PathNode, dys: list[Value | None]
) -> dict[int, Value]:
    node, signature = path_node.node, rule.signature
    inputs = _matched(op, node.inputs, signature.inputs, signature.variadic_inputs, node)
    if rule.all_outputs:
        _complete(op, node, len(signature.outputs))
        dys += [None] * (len(node.outputs) - len(dys))
    outputs = _matched(
        op,
        [v if v.name else None for v in node.outputs],
        signature.outputs,
        signature.variadic_outputs,
        node,
    )
    arriving = _matched(op, dys, signature.outputs, signature.variadic_outputs, node)
    given = rule.function(op, *inputs, *outputs, *arriving, **_attributes(op, node, signature))
    entries: tuple[InputGradient, ...] = given if isinstance(given, tuple) else (given,)
    if len(entries) < len(node.inputs):
        raise GradientError(
            f"The rule of {rule.op_type} returned {len(entries)} entries for the {len(node.inputs)}"
            f" inputs of {node.name!r}; it returns one per input, None where there is no gradient."
        )
    found = {}
    for i in path_node.inputs:
        entry = entries[i]
        dx = entry() if callable(entry) else entry
        if dx is not None:
            found[i] = _fitted(op, rule, dx, op.wrap(_input(node, i)))
    return found


def _fitted(op: GraphBuilder, rule: Rule, dx: Value, x: Value) -> Value:
    """A rule's gradient in the type and shape of its input."""
    # other numbers on the way stand for floats that were quantised, and so does their gradient
    if x.ir.dtype in FLOATS:
        dx = op.cast(dx, x.dtype)
    if rule.broadcasts:
        dx = reduce_to(op, dx, x)
    _know(dx, x.ir)
    have, want = dx.shape, x.shape
    if have is not None and want is not None:
        differ = len(have) != len(want) or any(
            isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(have, want)
        )
        if differ:
            raise GradientError(
                f"The rule of {rule.op_type} returned a gradient of shape {have} for an input of"
                f" shape {want}."
            )
    return dx


def _know(dx: Value, x: ir.Value) -> None:
    """A gradient has the shape of its value, which may be known better than inference found."""
    have = dx.ir.shape
    if (
        dx.ir.producer() is not None
        and x.shape is not None
        and (have is None or (len(have) == len(x.shape) and not have.is_static()))
    ):
        dx.ir.shape = x.shape.copy()


def _matched(
    op: GraphBuilder, given: Sequence[Any], names: Sequence[str], many: bool, node: ir.Node
) -> list[Any]:
    """Inputs, outputs or gradients as a rule's parameters want them: absent ones None, the rest of
    a variadic one a tuple.
    """
    values = [op.wrap(v) if isinstance(v, ir.Value) else v for v in given]
    if many:
        alone = len(names) - 1
        return [*(values + [None] * alone)[:alone], tuple(values[alone:])]
    if any(v is not None for v in values[len(names) :]):
        raise NoGradientError(f"its rule knows {len(names)} of its {len(values)} inputs or outputs")
    return (values + [None] * len(names))[: len(names)]


def _complete(op: GraphBuilder, node: ir.Node, count: int) -> None:
    """Give a node all its optional outputs."""
    if len(node.outputs) < count:
        node.resize_outputs(count)
    bare = [v for v in node.outputs if not v.name]
    for v in bare:
        v.name = op.unique_name(f"{node.op_type}.out")
    if bare:
        infer_outputs(op.graph, node)


def _attributes(op: GraphBuilder, node: ir.Node, signature: RuleSignature) -> dict[str, Any]:
    """A node's attributes as a rule's keywords, with the defaults of the operator's definition."""
    schema = schema_of(node, op.graph)
    found: dict[str, Any] = {}
    for name in signature.attributes:
        attribute = node.attributes.get(name)
        if attribute is None and schema is not None and name in schema.attributes:
            default = schema.attributes[name].default_value
            if default.type != onnx.AttributeProto.UNDEFINED:
                attribute = ir.serde.deserialize_attribute(default)
        if attribute is not None:
            found[name] = (
                attribute.value.numpy()
                if attribute.type == ir.AttributeType.TENSOR
                else attribute.value
            )
        elif name not in signature.optional:
            found[name] = None
    return found


def _has_no_rule(node: ir.Node) -> bool:
    return key_of(node) not in RULES and key_of(node) not in SUBGRAPHS


def _rewritten(op: GraphBuilder, node: ir.Node) -> bool:
    """Put simpler operators in the place of a node. Refused where there is no way."""
    key = key_of(node)
    made: Any = None
    with op.replacing(node) as replace:
        if key in DECOMPOSITIONS:
            form = DECOMPOSITIONS[key].signature
            inputs = _matched(op, node.inputs, form.inputs, form.variadic_inputs, node)
            made = DECOMPOSITIONS[key].function(op, *inputs, **_attributes(op, node, form))
        if made is None:
            body = function_body(node, op.graph)
            if body is None:
                raise NoGradientError(_why_not(key))
            made = body(op)
        outputs = made if isinstance(made, tuple) else (made,)
        for i, old in enumerate(node.outputs):
            if (old.uses() or old.is_graph_output()) and (i >= len(outputs) or outputs[i] is None):
                raise NoGradientError(
                    f"its output {old.name!r} is used, which its simpler form does not compute"
                )
        replace(*outputs)
    return True


def _why_not(key: Key) -> str:
    domain, op_type = key
    if key in NOT_DIFFERENTIABLE:
        return NOT_DIFFERENTIABLE[key]
    return (
        f"there is no rule for {f'{domain}::' if domain else ''}{op_type};"
        " onnxfit.gradients.register adds one"
    )
