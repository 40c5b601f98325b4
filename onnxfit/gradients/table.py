"""The table of gradients: one rule per operator, written in plain ONNX operators.

A rule is the derivative of one operator, written as in a textbook. Its parameters are the graph
builder `op`, one name per input, one per output, and `d` + name for the gradient that arrives at
each output; attributes are keyword-only parameters. It returns one gradient per input, None for an
input that has none. onnxruntime has an operator `CDist` for the distances between the rows of two
matrices, for which onnxfit has no rule:

    >>> import numpy as np, onnx, onnxfit, onnxruntime
    >>> from onnxfit.gradients import NoGradientError, register, same_type, table
    >>> @register("CDist", "com.microsoft", infer=same_type)
    ... def cdist(op, a, b, y, dy, *, metric="sqeuclidean"):
    ...     if metric != "sqeuclidean":
    ...         raise NoGradientError(f"metric={metric!r} has no rule", "metric='sqeuclidean'")
    ...     def of(x, other, dy):  # y = |a - b|^2
    ...         return 2 * (x * op.ReduceSum(dy, [1]) - dy @ other)
    ...     return lambda: of(a, b, dy), lambda: of(b, a, op.Transpose(dy, perm=[1, 0]))
    >>> model = onnx.parser.parse_model('''
    ...     <ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
    ...     distances (float[2, 1] a, float[3, 1] b) => (float[2, 3] y)
    ...     { y = com.microsoft.CDist<metric = "sqeuclidean">(a, b) }''')
    >>> slope = onnxfit.gradient_model(model, "a", gradient="onnx")
    >>> session = onnxruntime.InferenceSession(slope.SerializeToString())
    >>> a, b = np.array([[1], [2]], np.float32), np.array([[0], [4], [5]], np.float32)
    >>> y, da = session.run(None, {"a": a, "b": b, "y_grad": np.ones((2, 3), np.float32)})
    >>> y.tolist(), da.tolist()
    ([[1.0, 9.0, 16.0], [4.0, 4.0, 9.0]], [[-12.0], [-6.0]])
    >>> del table.RULES["com.microsoft", "CDist"]  # for this page only

The driver (`backward.py`) does the work common to all rules: it reduces the gradient of a broadcast
input (`broadcasts=True`), adds up the gradients of a value with several uses, casts to the type of
the input, and calls only the functions whose results are needed.

There are three other entries for an operator. `decompose` writes it in simpler operators, which
have rules. `NOT_DIFFERENTIABLE` gives the reason why it has no derivative. Without an entry, the
operator is differentiated through the ONNX function that defines it; without a function, it blocks
the gradient, and an error names it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Union

import onnx_ir as ir

from onnxfit.graph.inference import InferenceFunction, register_inference
from onnxfit.graph.values import Value

Values = tuple[Value, ...]
InputGradient = Union[Value, Callable[[], Value], None]
Gradients = Union[InputGradient, tuple[InputGradient, ...]]
SubgraphRule = Callable[..., dict[int, Value]]

Key = tuple[str, str]  # domain, operator


class NoGradientError(Exception):
    """Raised by a rule about a node that it cannot differentiate.

    `reason` is the reason, `fix` a remedy for the user. The driver collects these errors: the user
    sees one GradientError for all nodes that block the gradient.
    """

    def __init__(
        self, reason: str, fix: str = "freeze the weights before it, or replace the operator"
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.fix = fix


@dataclass(frozen=True)
class RuleSignature:
    """The parameters of a rule, read from its Python signature.

    A variadic rule takes all remaining inputs (outputs) as one tuple, in its last input (output)
    parameter. `optional` are the attributes for which the rule itself has a default.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[str, ...]
    optional: frozenset[str]
    variadic_inputs: bool
    variadic_outputs: bool


@dataclass(frozen=True)
class Rule:
    """An entry of the table: the function that differentiates an operator, and how to call it."""

    op_type: str
    domain: str
    function: Callable[..., Gradients]
    broadcasts: bool
    all_outputs: bool
    signature: RuleSignature


@dataclass(frozen=True)
class Decomposition:
    """An entry of the table: the function that writes an operator in simpler ones."""

    op_type: str
    domain: str
    function: Callable[..., Any]
    signature: RuleSignature


RULES: dict[Key, Rule] = {}
DECOMPOSITIONS: dict[Key, Decomposition] = {}
SUBGRAPHS: dict[Key, SubgraphRule] = {}  # If, Loop, Scan: see rules/control.py

# Operators whose output counts as a constant, with the reason: their float outputs do not depend on
# the inputs, or their derivative is zero wherever it exists. Integers, booleans and strings never
# have a gradient, so comparisons and ArgMax are listed for the reader only.
NOT_DIFFERENTIABLE: dict[Key, str] = {}


def rule(
    op_type: str,
    domain: str = "",
    *,
    broadcasts: bool = False,
    all_outputs: bool = False,
    infer: InferenceFunction | None = None,
) -> Callable[[Any], Any]:
    """Register the decorated function as the gradient rule of an operator.

    Your rule replaces an existing rule. The rule is called as `rule(op, *inputs, *outputs,
    *output_gradients, **attributes)`. It returns one entry per input, or the entry itself for an
    operator with one input. An entry is a value, None for no gradient, or a function without
    arguments that computes the value; it is called only if the value is needed.

    - `op_type` and `domain` name the operator; "" is ONNX's own domain.
    - `broadcasts=True` allows an entry to have the broadcast shape: the driver sums it down to the
      shape of the input. Otherwise an entry has the shape of its input.
    - `all_outputs=True` gives the node all its optional outputs, for a rule that needs them.
      Otherwise an absent optional output is None.
    - `infer` sets the type and shape of the outputs of an operator that ONNX does not know. It is
      called with the `onnx_ir.Node`; `onnxfit.gradients` has `same_type`, `same_type_and_rank` and
      `same_type_and_shape`, which copy those of the first input.

    An absent optional input is None. The gradient of an output is None if no gradient arrives
    there; the only output of an operator always has one. A last input (output) parameter annotated
    `Values` takes all remaining inputs (outputs, gradients) as a tuple, and the returned tuple has
    one entry for each of them. An attribute that the node does not set has the default of the
    operator's schema, else the parameter's default, else None.

    Every operator that a rule uses on floats needs a rule itself, so that gradients can be
    differentiated again. Raise `NoGradientError` for a node that the rule cannot differentiate. The
    decorator raises TypeError if the parameters are not those of a rule.

    >>> from onnxfit.gradients import register, table
    >>> @register("RoundToHalf", "my.domain")
    ... def straight_through(op, x, y, dy):  # as if it did not round
    ...     return dy
    >>> table.RULES.pop(("my.domain", "RoundToHalf")).signature.inputs
    ('x',)
    """

    def register(function: Callable[..., Gradients]) -> Callable[..., Gradients]:
        signature = _rule_signature(function)
        _clear((domain, op_type), function.__module__)
        RULES[domain, op_type] = Rule(op_type, domain, function, broadcasts, all_outputs, signature)
        if infer is not None:
            register_inference(op_type, domain)(infer)
        return function

    return register


def decompose(
    op_type: str, domain: str = "", *, infer: InferenceFunction | None = None
) -> Callable[[Any], Any]:
    """Register the decorated function as the decomposition of an operator into simpler ones.

    The simpler operators replace the node before differentiation; they have rules or decompositions
    themselves. The function is called as `function(op, *inputs, **attributes)`, with inputs and
    attributes as in a rule (see `register`). It returns the output, or a tuple of outputs with None
    for an output that it does not compute; such an output must not be used. It may raise
    `NoGradientError`. It replaces an existing rule or decomposition.

    - `op_type` and `domain` name the operator; "" is ONNX's own domain.
    - `infer` sets the type and shape of the outputs, as for `register`.

    >>> import onnx, onnxfit
    >>> from onnxfit.gradients import decompose, table
    >>> @decompose("Swish", "my.domain")
    ... def swish(op, x, *, beta=1.0):
    ...     return x * op.Sigmoid(beta * x)
    >>> model = onnx.parser.parse_model('''
    ...     <ir_version: 8, opset_import: ["": 17, "my.domain": 1]>
    ...     g (float[2] x) => (float[2] y) { y = my.domain.Swish<beta = 2.0>(x) }''')
    >>> [node.op_type for node in onnxfit.gradient_model(model, gradient="onnx").graph.node][:3]
    ['Mul', 'Sigmoid', 'Mul']
    >>> del table.DECOMPOSITIONS["my.domain", "Swish"]
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        decomposition = Decomposition(op_type, domain, function, _decomposition_signature(function))
        _clear((domain, op_type), function.__module__)
        DECOMPOSITIONS[domain, op_type] = decomposition
        if infer is not None:
            register_inference(op_type, domain)(infer)
        return function

    return register


def subgraph_rule(op_type: str) -> Callable[[Any], Any]:
    """Register the decorated function as the rule of an operator with subgraphs.

    It is called as `function(tape, path_node, dys)`, `dys` being the gradients that arrive at the
    outputs, and returns a mapping from input position to gradient.
    """

    def register(function: SubgraphRule) -> SubgraphRule:
        _clear(("", op_type), function.__module__)
        SUBGRAPHS["", op_type] = function
        return function

    return register


def not_differentiable(module: str, reason: str, *op_types: str) -> None:
    """Enter the operators into NOT_DIFFERENTIABLE, on behalf of the module of this name."""
    for op_type in op_types:
        _clear(("", op_type), module)
        NOT_DIFFERENTIABLE["", op_type] = reason


def key_of(node: ir.Node) -> Key:
    """The key of a node's operator in the table."""
    return ("" if node.domain == "ai.onnx" else node.domain, node.op_type)


def _clear(key: Key, module: str) -> None:
    """Remove the entry of an operator, which `module` replaces.

    Users may replace entries of onnxfit. Two entries within onnxfit are a mistake: the module
    imported first would be dead code.
    """
    previous = _module_of(key)
    if previous is not None and _is_own(previous) and _is_own(module):
        raise RuntimeError(
            f"{key[1]} is registered twice: in {previous} and in {module}. Delete one of them."
        )
    for table in (RULES, DECOMPOSITIONS, SUBGRAPHS, NOT_DIFFERENTIABLE):
        table.pop(key, None)


def _module_of(key: Key) -> str | None:
    """The name of the module that registered an operator; None if there is no entry."""
    entry = RULES.get(key) or DECOMPOSITIONS.get(key)
    if entry is not None:
        return entry.function.__module__
    if key in SUBGRAPHS:
        return SUBGRAPHS[key].__module__
    return "onnxfit.gradients.rules.not_differentiable" if key in NOT_DIFFERENTIABLE else None


def _is_own(module: str) -> bool:
    return module.startswith("onnxfit.")


def _rule_signature(function: Callable[..., Any]) -> RuleSignature:
    """Return the parameters of a rule, or raise TypeError unless gradients mirror the outputs."""
    positional, keywords = _rule_parameters(function)
    names = [p.name for p in positional]
    # the longest tail (y, z, dy, dz) in which the second half is "d" + the first half
    for count in range(len(names) // 2, 0, -1):
        outputs = names[-2 * count : -count]
        if names[-count:] == ["d" + name for name in outputs]:
            inputs = len(names) - 2 * count
            return _signature(positional[:inputs], positional[inputs : inputs + count], keywords)
    everything = ", ".join(inspect.signature(function).parameters)
    raise TypeError(
        "The parameters of a rule must be op, its inputs, its outputs, and 'd' + name for each"
        f" output, as in (op, x, y, dy), but {function.__name__} has ({everything})."
    )


def _decomposition_signature(function: Callable[..., Any]) -> RuleSignature:
    positional, keywords = _rule_parameters(function)
    return _signature(positional, [], keywords)


def _rule_parameters(
    function: Callable[..., Any],
) -> tuple[list[inspect.Parameter], list[inspect.Parameter]]:
    """The parameters after `op` that are passed by position, and the keyword-only ones."""
    parameters = list(inspect.signature(function).parameters.values())
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    positional = [p for p in parameters if p.kind is not keyword_only]
    return positional[1:], [p for p in parameters if p.kind is keyword_only]


def _signature(
    inputs: list[inspect.Parameter],
    outputs: list[inspect.Parameter],
    keywords: list[inspect.Parameter],
) -> RuleSignature:
    return RuleSignature(
        tuple(p.name for p in inputs),
        tuple(p.name for p in outputs),
        tuple(p.name for p in keywords),
        frozenset(p.name for p in keywords if p.default is not inspect.Parameter.empty),
        bool(inputs) and _is_variadic(inputs[-1]),
        bool(outputs) and _is_variadic(outputs[-1]),
    )


def _is_variadic(parameter: inspect.Parameter) -> bool:
    return parameter.annotation in ("Values", Values)
