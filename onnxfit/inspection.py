"""What of a model trains, and what does not: every operator, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxfit.gradients import gradient_source
from onnxfit.gradients.blocker import Blocker
from onnxfit.gradients.coverage import WAYS, operator
from onnxfit.gradients.paths import leaves_of, outputs_of, sites
from onnxfit.gradients.table import key_of
from onnxfit.graph import names
from onnxfit.graph.model import ModelSource, infer_shapes, read_model, working_form
from onnxfit.graph.values import Op
from onnxfit.graph.weights import select_weights


@dataclass(frozen=True)
class OperatorUse:
    """One kind of operator in a model: how many nodes, how many of them between weights and outputs, how the gradient passes."""

    operator: str
    nodes: int
    on_the_way: int
    gradient: str


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found. `source` is what differentiates the model: "onnx" (the table of rules) or "onnxruntime" (the builder)."""

    weights: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str
    operators: tuple[OperatorUse, ...]
    blockers: tuple[Blocker, ...]

    @property
    def trains(self) -> bool:
        """Whether nothing stands between the weights and the outputs."""
        return not self.blockers

    def __str__(self) -> str:
        rows = [("operator", "nodes", "on the way", "gradient")]
        rows += [(use.operator, str(use.nodes), str(use.on_the_way or ""), use.gradient) for use in self.operators]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [f"{a.ljust(widths[0])}  {b.rjust(widths[1])}  {c.rjust(widths[2])}  {d}".rstrip() for a, b, c, d in rows]
        lines.insert(1, "  ".join("─" * w for w in widths))
        who = {"onnx": "the table of rules", "onnxruntime": "onnxruntime's gradient builder"}[self.source]
        verdict = f"Trains: {len(self.weights)} weights, differentiated by {who}."
        if self.blockers:
            verdict = "\n  ".join(
                ["Does not train. These nodes between the weights and the outputs block the gradient:", *map(str, self.blockers)]
            )
        return "\n".join([*lines, "", verdict])


def inspect(
    model_onnx: ModelSource,
    weights: Sequence[str] | str | None = None,
    *,
    outputs: Sequence[str] | None = None,
    gradient: str = "auto",
) -> Inspection:
    """Every operator of a model, whether the gradient of `outputs` (default: all float outputs) passes on its way to `weights`, and how.

    Nothing is run. Printed, it is a table; `blockers` has for each node in the way the reason and the cure.

    >>> import onnx.parser
    >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    ...     g (float[N, 2] x) => (float[N, 3] y) <float[2, 3] w = {1, 2, 3, 4, 5, 6}> { h = MatMul(x, w) y = Relu(h) }''')
    >>> print(inspect(model))
    operator  nodes  on the way  gradient
    ────────  ─────  ──────────  ─────────────────
    MatMul        1           1  a rule of its own
    Relu          1           1  a rule of its own
    <BLANKLINE>
    Trains: 1 weights, differentiated by the table of rules.
    """
    work = working_form(read_model(model_onnx))
    return inspect_working(work, select_weights(work, weights), outputs, gradient)


def inspect_working(work: ir.Model, weights: Sequence[str], outputs: Sequence[str] | None, gradient: str) -> Inspection:
    """The same for a model in its working form."""
    work = work.clone()
    ends = [v.name or "" for v in work.graph.outputs if outputs is None or v.name in outputs]
    ways = {s.node: s for s in sites(work.graph, outputs_of(work.graph, *ends), leaves_of(work.graph, weights))}
    total = _with_a_loss(work, ends, weights)
    reached = [w for w in weights if w in {v.name for v in leaves_of(total.graph, weights)}]
    source = gradient if gradient != "auto" else "onnx"
    found = list(gradient_source(source).blockers(total, names.TOTAL, reached))
    if found and gradient == "auto" and not gradient_source("auto").blockers(total, names.TOTAL, reached):
        source, found = "onnxruntime", []
    uses = []
    kinds = dict.fromkeys(key_of(node) for node in work.graph if not names.reserved(node.name or ""))
    for key in sorted(kinds):
        nodes = [node for node in work.graph if key_of(node) == key]
        on_the_way = sum(node in ways for node in nodes)
        known = operator(key)
        blocked = next((b for b in found if b.op_type == key[1]), None)
        text = (
            "BLOCKED" if blocked else "not needed" if not on_the_way else WAYS[known.way] if source == "onnx" else "by the builder"
        )
        if known.way == "flat" and not blocked:
            text = WAYS["flat"]
        uses.append(OperatorUse(known.name, len(nodes), on_the_way, text))
    return Inspection(tuple(weights), tuple(ends), source, tuple(uses), tuple(found))


def _with_a_loss(work: ir.Model, outputs: Sequence[str], weights: Sequence[str]) -> ir.Model:
    """The sum of all float outputs as a loss, and the weights as inputs: what sources of gradients take."""
    copy = work.clone()
    for name in weights:
        value = copy.graph.initializers.pop(name)
        value.const_value = None
        copy.graph.inputs.append(value)
    op = Op(copy.graph)
    total = op.constant(0.0)
    for value in outputs_of(copy.graph, *outputs):
        y = op.wrap(value)
        if y.dtype.kind == "f":
            total = total + op.cast(op.ReduceSum(y, keepdims=0), total.dtype)
    op.output(names.TOTAL, total)
    return infer_shapes(copy)
