"""The error about an If whose branches cannot all be differentiated, by what decides the branch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from onnxfit.gradients.blocker import STATIC, TYPED
from onnxfit.gradients.table import NoGradientError
from onnxfit.graph import names, scopes
from onnxfit.graph.fold import RANDOM, constant_array
from onnxfit.graph.subgraphs import subgraphs_of

EXPORT = "export the model with the branch that training takes, without this If"


@dataclass(frozen=True)
class Condition:
    """The inputs that decide an If, which reads nothing else.

    - `values`: the inputs whose values it reads.
    - `sizes`: the other inputs, of which it reads only the sizes.
    """

    values: tuple[ir.Value, ...]
    sizes: tuple[ir.Value, ...]

    def __str__(self) -> str:
        read = ", ".join(repr(value.name) for value in self.values)
        measured = ", ".join(repr(value.name) for value in self.sizes)
        parts = [f"the input{'s' * (len(self.values) > 1)} {read}"] if read else []
        parts += [f"the sizes of {measured}"] if measured else []
        return " and ".join(parts)


class BranchError(NoGradientError):
    """An If cannot be differentiated, because of nodes in its branches.

    - `blocked`: these nodes, each with its reason.
    """

    def __init__(self, condition: Condition, blocked: tuple[str, ...], fix: str) -> None:
        more = f", and {len(blocked) - 1} more" * (len(blocked) > 1)
        super().__init__(
            f"its branch depends on {condition}, so that both need a gradient, but this node in a"
            f" branch cannot be differentiated: {blocked[0]}{more}",
            fix,
        )
        self.blocked = blocked


def branch_error(
    node: ir.Node,
    errors: Mapping[ir.Node, tuple[str, NoGradientError]],
    inputs: Collection[ir.Value],
) -> BranchError | None:
    """Return the error about an If; None if other values than inputs decide its branch.

    - `errors`: node inside the branches -> the name of its branch, and the reason.
    - `inputs`: the inputs of the whole graph, without weights.
    """
    condition = _condition(node, inputs)
    if condition is None:
        return None
    causes = {n: pair for n, pair in errors.items() if pair[1].fix != TYPED} or errors
    blocked: list[str] = []
    for inner, (_, error) in causes.items():
        text = f"{inner.op_type} {scopes.original_of(inner.name or '')!r}: {error.reason}"
        blocked += error.blocked if isinstance(error, BranchError) else [text]
    return BranchError(condition, tuple(blocked), _fix(node, condition, errors))


def _condition(node: ir.Node, inputs: Collection[ir.Value]) -> Condition | None:
    """Return the inputs that decide an If; None if anything else does, such as random numbers."""
    waiting = [(node.inputs[0], False)]
    seen: set[tuple[ir.Value | None, bool]] = set()
    values: dict[ir.Value, bool] = {}  # input -> whether its values are read
    while waiting:
        value, measured = waiting.pop()
        if value is None or (value, measured) in seen:
            continue
        seen.add((value, measured))
        producer = value.producer()
        if producer is None:
            if value.is_initializer():
                continue
            if value not in inputs or names.reserved(value.name or ""):
                return None
            values[value] = values.get(value, False) or not measured
            continue
        if producer.op_type in RANDOM:
            return None
        measured = measured or producer.op_type in ("Shape", "Size")
        bodies = [v for body in subgraphs_of(producer) for v in body.outputs]
        waiting += [(v, measured) for v in (*producer.inputs, *bodies)]
    read = tuple(value for value, is_read in values.items() if is_read)
    return Condition(read, tuple(v for v in values if v not in read)) if values else None


def _fix(
    node: ir.Node,
    condition: Condition,
    errors: Mapping[ir.Node, tuple[str, NoGradientError]],
) -> str:
    if not condition.values:
        return STATIC  # the sizes of a batch select the branch
    shapes = [value.shape for value in condition.values]
    if not all(shape is not None and all(size == 1 for size in shape) for shape in shapes):
        return EXPORT  # the data of a batch selects the branch
    chosen = (
        _compared(node) if {branch for branch, _ in errors.values()} == {"else_branch"} else None
    )
    fixed = ", ".join(f"{value.name!r}: {chosen or 'value'}" for value in condition.values)
    return f"select a branch for all batches with fixed_inputs={{{fixed}}}"


def _compared(node: ir.Node) -> str | None:
    """Return the number with which the condition of an If compares its only input."""
    equal = None if node.inputs[0] is None else node.inputs[0].producer()
    if equal is None or equal.op_type != "Equal":
        return None
    constants = [
        constant_array(v) for v in equal.inputs if v is not None and not v.is_graph_input()
    ]
    found = [array for array in constants if array is not None and array.size == 1]
    return str(found[0].item()) if len(found) == 1 else None
