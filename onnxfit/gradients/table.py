"""The table of gradients: one rule per operator, written in plain ONNX operators.

A rule says how a gradient passes one node, in the words of every textbook: inputs `x`, outputs `y`,
arriving gradients `dy`.

    @gradient("Sigmoid")
    def sigmoid(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Value:
        return dy * y * (1 - y)

    @gradient("MatMul", broadcasts=True)
    def matmul(op: GraphBuilder, a: Value, b: Value, y: Value, dy: Value) -> Gradients:
        return lambda: dy @ op.swap(b), lambda: op.swap(a) @ dy

Its parameters are `op`, one per input, one per output, and one per arriving gradient, called `d` +
the name of its output; attributes are keyword-only parameters. What the driver (`backward.py`) sees
to, so that no rule has to: broadcasting (`broadcasts=True`), summing where a value is used several
times, element types, and asking for no gradient that nobody needs.

An operator whose gradient is best taken through others has a `decompose` instead: the same in
simpler operators, which then have rules. What has no derivative stands in `NOT_DIFFERENTIABLE`,
with the reason. An operator in none of the three is differentiated through its ONNX function body,
if it has one; else it blocks the gradient, and the user is told.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Union

import onnx_ir as ir

from onnxfit.graph.values import Value

Values = tuple[Value, ...]
InputGradient = Union[Value, Callable[[], Value], None]
Gradients = Union[InputGradient, tuple[InputGradient, ...]]

Key = tuple[str, str]  # domain, operator


class NoGradientError(Exception):
    """What a rule raises about a node whose gradient it cannot give: why, and what would help."""

    def __init__(
        self, reason: str, fix: str = "freeze the weights before it, or replace the operator"
    ) -> None:
        super().__init__(reason)
        self.reason, self.fix = reason, fix


@dataclass(frozen=True)
class RuleSignature:
    """What a rule wants to be given: its parameters, read off its signature."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[str, ...]
    optional: frozenset[str]  # attributes for which the rule has a default of its own
    many_inputs: bool  # the last input parameter takes all that are left
    many_outputs: bool


@dataclass(frozen=True)
class Rule:
    """One line of the table."""

    op_type: str
    domain: str
    function: Callable[..., Gradients]
    broadcasts: bool = False
    all_outputs: bool = False
    signature: RuleSignature = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "signature", _signature(self.function))


@dataclass(frozen=True)
class Decomposition:
    """An operator in terms of others."""

    op_type: str
    domain: str
    function: Callable[..., Any]
    signature: RuleSignature = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "signature", _signature(self.function, outputs=False))


RULES: dict[Key, Rule] = {}
SUBGRAPHS: dict[Key, Callable[..., dict[int, Value]]] = {}  # If, Loop, Scan: see rules/control.py
DECOMPOSITIONS: dict[Key, Decomposition] = {}

# Operators whose float results do not change with their inputs, or whose derivative is zero
# wherever it exists: what comes out counts as a constant. Through integers, booleans and strings
# nothing flows in any case, so comparisons or ArgMax stand here for the reader.
NOT_DIFFERENTIABLE: dict[Key, str] = {}


def gradient(
    op_type: str, domain: str = "", *, broadcasts: bool = False, all_outputs: bool = False
) -> Callable[[Any], Any]:
    """Enter the decorated rule into the table, in place of one that is there.

    The rule is called as `rule(op, *inputs, *outputs, *arriving, **attributes)` and returns one
    entry per input (of an operator with one input: the entry itself): a value, None for no
    gradient, or a function without arguments that makes the value if it is needed.

    - An absent optional input is None, so is the gradient of an output that nobody uses; of an
      operator with one output it never is. An absent optional output is None too, unless
      `complete=True`: then the node gets all its outputs.
    - A parameter annotated `Values` takes all inputs (outputs, gradients) that are left, as a
      tuple; the entries of such inputs stand flat in the returned tuple.
    - Attributes come with the defaults of the operator's schema filled in: numbers, strings,
      tuples, arrays; None where there is neither.
    - With `broadcasts=True` an entry may have the broadcast shape: the driver sums it down to its
      input's. Else it has its input's shape.
    - Every operator a rule uses on floats has a rule itself, so that gradients can be
      differentiated again.

    >>> @gradient("Double", "my.domain")
    ... def double(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Value:
    ...     return 2 * dy
    >>> del RULES["my.domain", "Double"]
    """

    def enter(function: Callable[..., Gradients]) -> Callable[..., Gradients]:
        RULES[domain, op_type] = Rule(op_type, domain, function, broadcasts, all_outputs)
        DECOMPOSITIONS.pop((domain, op_type), None)
        NOT_DIFFERENTIABLE.pop((domain, op_type), None)
        return function

    return enter


def decompose(op_type: str, domain: str = "") -> Callable[[Any], Any]:
    """Enter the decorated function as the way to write an operator in simpler ones, before anything
    is differentiated.

    It is called as `function(op, *inputs, **attributes)`, like a rule without its outputs, and
    returns the output or a tuple of outputs (None for those it cannot compute, which then must not
    be in use).
    """

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        DECOMPOSITIONS[domain, op_type] = Decomposition(op_type, domain, function)
        RULES.pop((domain, op_type), None)
        NOT_DIFFERENTIABLE.pop((domain, op_type), None)
        return function

    return enter


def subgraph_gradient(op_type: str) -> Callable[[Any], Any]:
    """Enter the decorated function as the rule of an operator that has bodies:

    `function(tape, site, dys) -> position of input -> gradient`.
    """

    def enter(function: Callable[..., dict[int, Value]]) -> Callable[..., dict[int, Value]]:
        SUBGRAPHS["", op_type] = function
        return function

    return enter


def _signature(function: Callable[..., Any], *, outputs: bool = True) -> RuleSignature:
    """The parameters of a rule; TypeError where its signature is none of a rule."""
    parameters = list(inspect.signature(function).parameters.values())
    plain = [p for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY][1:]
    keywords = [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    names = [p.name for p in plain]
    many = {p.name for p in plain if p.annotation in ("Values", Values)}
    count = 0
    if outputs:
        while count < len(names) and names[len(names) - 1 - count].startswith("d"):
            count += 1
        while count and names[-count:] != ["d" + n for n in names[-2 * count : -count]]:
            count -= 1
        if not count:
            raise TypeError(
                "The parameters of a rule are op, its inputs, its outputs, and 'd' + name for each"
                f" output, as in (op, x, y, dy); {function.__name__} has"
                f" ({', '.join(p.name for p in parameters)})."
            )
    inputs = tuple(names[: len(names) - 2 * count])
    results = tuple(names[len(inputs) : len(inputs) + count])
    return RuleSignature(
        inputs,
        results,
        tuple(p.name for p in keywords),
        frozenset(p.name for p in keywords if p.default is not inspect.Parameter.empty),
        bool(inputs) and inputs[-1] in many,
        bool(results) and results[-1] in many,
    )


def key_of(node: ir.Node) -> Key:
    """Where the table has a node's operator."""
    return ("" if node.domain == "ai.onnx" else node.domain, node.op_type)
