"""What of a model trains, and what does not: every operator, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxfit.errors import UnknownNameError
from onnxfit.gradients import gradient_source
from onnxfit.gradients.blocker import Blocker
from onnxfit.gradients.coverage import WAYS, operator
from onnxfit.gradients.paths import (
    differentiable_path,
    is_float,
    leaves_of,
    outputs_of,
    reachable_values,
)
from onnxfit.gradients.table import key_of
from onnxfit.graph import names
from onnxfit.graph.model import infer_shapes, model_errors, normalize
from onnxfit.graph.reading import ModelSource, read_model
from onnxfit.graph.values import GraphBuilder
from onnxfit.graph.weights import select_weights


@dataclass(frozen=True)
class OperatorUse:
    """One kind of operator in a model: how many nodes, how many of them between weights and
    outputs, how the gradient passes.
    """

    operator: str
    nodes: int
    on_gradient_path: int
    gradient: str


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found.

    `source` is what differentiates the model: "onnx" (the table of rules) or "onnxruntime" (the
    builder).

    `idle` are the weights that no output depends on in a way that has a derivative: a Trainer
    leaves them as they are.
    """

    weights: tuple[str, ...]
    idle: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str
    operators: tuple[OperatorUse, ...]
    blockers: tuple[Blocker, ...]

    @property
    def trains(self) -> bool:
        """Whether there are weights to train, and nothing stands between them and the outputs."""
        return bool(self.weights) and not self.blockers

    def __str__(self) -> str:
        rows = [("operator", "nodes", "on the way", "gradient")]
        rows += [
            (use.operator, str(use.nodes), str(use.on_gradient_path or ""), use.gradient)
            for use in self.operators
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [
            f"{a.ljust(widths[0])}  {b.rjust(widths[1])}  {c.rjust(widths[2])}  {d}".rstrip()
            for a, b, c, d in rows
        ]
        lines.insert(1, "  ".join("─" * w for w in widths))
        who = {"onnx": "the table of rules", "onnxruntime": "onnxruntime's gradient builder"}[
            self.source
        ]
        verdict = (
            f"Trains: {len(self.weights)} weight{'s' * (len(self.weights) != 1)}, differentiated by"
            f" {who}."
        )
        if self.blockers:
            verdict = "\n  ".join(
                [
                    (
                        "Does not train. These nodes between the weights and the outputs block the"
                        " gradient:"
                    ),
                    *map(str, self.blockers),
                ]
            )
        elif not self.weights:
            verdict = (
                "Does not train: no output depends on a weight in a way that has a derivative."
            )
        if self.idle:
            verdict += (
                f"\nNo output depends on {', '.join(self.idle)} in a way that has a derivative."
            )
        return "\n".join([*lines, "", verdict])


def inspect(
    model_onnx: ModelSource,
    weights: Sequence[str] | str | None = None,
    *,
    outputs: Sequence[str] | str | None = None,
    gradient: str = "auto",
) -> Inspection:
    """Every operator of a model, whether the gradient of `outputs` (default: all float outputs)
    passes on its way to `weights`, and how.

    Nothing is run. Printed, it is a table; `blockers` has for each node in the way the reason and
    the cure. Raises UnknownNameError for an output or a weight that the model has not.

    >>> import onnx.parser
    >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    ...     g (float[N, 2] x) => (float[N, 3] y) <float[2, 3] w = {1, 2, 3, 4, 5, 6}> { h = MatMul(x, w) y = Relu(h) }''')
    >>> print(inspect(model))
    operator  nodes  on the way  gradient
    ────────  ─────  ──────────  ─────────────────
    MatMul        1           1  a rule of its own
    Relu          1           1  a rule of its own
    <BLANKLINE>
    Trains: 1 weight, differentiated by the table of rules.
    """
    work = normalize(read_model(model_onnx))
    floats = [v.name or "" for v in work.graph.outputs if is_float(v)]
    chosen = floats if outputs is None else [outputs] if isinstance(outputs, str) else list(outputs)
    for name in chosen:
        if name not in floats:
            raise UnknownNameError("float output", name, floats)
    return inspect_working(work, select_weights(work, weights), chosen, gradient)


@model_errors()
def inspect_working(
    work: ir.Model, weights: Sequence[str], outputs: Sequence[str], gradient: str
) -> Inspection:
    """The same for a model in its working form."""
    work = work.clone()
    blockers = gradient_source(gradient).blockers
    reached = reachable_values(work, outputs, weights)
    ways = {
        s.node
        for s in differentiable_path(
            work.graph, outputs_of(work.graph, *outputs), leaves_of(work.graph, reached)
        )
    }
    source = gradient if gradient != "auto" else "onnx"
    found: list[Blocker] = []
    if reached:
        total = _with_a_loss(work, outputs, reached)
        found = list(gradient_source(source).blockers(total, names.TOTAL, reached))
        if found and gradient == "auto" and not blockers(total, names.TOTAL, reached):
            source, found = "onnxruntime", []
    uses = []
    kinds = dict.fromkeys(
        key_of(node) for node in work.graph if not names.reserved(node.name or "")
    )
    for key in sorted(kinds):
        nodes = [node for node in work.graph if key_of(node) == key]
        on_gradient_path = sum(node in ways for node in nodes)
        known = operator(key)
        blocked = next((b for b in found if b.op_type == key[1]), None)
        text = (
            "BLOCKED"
            if blocked
            else (
                "not needed"
                if not on_gradient_path
                else WAYS[known.way]
                if source == "onnx"
                else "by the builder"
            )
        )
        if known.way == "flat" and not blocked:
            text = WAYS["flat"]
        uses.append(OperatorUse(known.name, len(nodes), on_gradient_path, text))
    idle = tuple(name for name in weights if name not in reached)
    return Inspection(tuple(reached), idle, tuple(outputs), source, tuple(uses), tuple(found))


def _with_a_loss(work: ir.Model, outputs: Sequence[str], weights: Sequence[str]) -> ir.Model:
    """The sum of the outputs as a loss, and the weights as inputs: what sources of gradients take."""
    copy = work.clone()
    for name in weights:
        value = copy.graph.initializers.pop(name)
        value.const_value = None
        copy.graph.inputs.append(value)
    op = GraphBuilder(copy.graph)
    total = op.constant(0.0)
    for value in outputs_of(copy.graph, *outputs):
        total = total + op.cast(op.ReduceSum(op.wrap(value), keepdims=0), total.dtype)
    op.output(names.TOTAL, total)
    return infer_shapes(copy)
