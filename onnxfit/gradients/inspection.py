"""Report, before anything runs, whether a model trains: every operator, and what blocks it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from onnxfit.drawing.labels import clean
from onnxfit.drawing.notebook import bullets, paragraph
from onnxfit.drawing.tables import Table
from onnxfit.errors import ModelError
from onnxfit.gradients import gradient_source
from onnxfit.gradients.blocker import HALF_PRECISION, Blocker
from onnxfit.gradients.coverage import GRADIENTS, operator
from onnxfit.gradients.paths import (
    carries_gradient,
    differentiable_path,
    is_float,
    leaves_of,
    outputs_of,
    reachable_values,
    select_float_outputs,
    stopping_nodes,
    stops_gradient,
)
from onnxfit.gradients.table import NOT_DIFFERENTIABLE, Key, key_of
from onnxfit.graph import names
from onnxfit.graph.model import (
    infer_shapes,
    initializers_to_inputs,
    model_errors,
    spec_of,
)
from onnxfit.graph.probabilities import decide_logits
from onnxfit.graph.quantized import REMEDY, describe_quantized, quantized_weights
from onnxfit.graph.sharing import reader_counts, used_by
from onnxfit.graph.values import GraphBuilder
from onnxfit.graph.weights import LOOKS_LIKE_A_WEIGHT, RECORDED, select_weights, weight_reasons
from onnxfit.load.facts import FileFacts

MAX_NODES_LISTED = 5  # nodes at which gradients stop; messages count the others
MAX_SHARED_LISTED = 5  # weights that several nodes read
MAX_INITIALIZERS_LISTED = 40  # rows of a table
MAX_NAME_CHARACTERS = 36  # of an initializer in a table
# reasons for being a weight that a long table counts
USUAL = {RECORDED.text, LOOKS_LIKE_A_WEIGHT.text}

BLOCKED = "BLOCKED"
DIFFERENTIATED_BY = {
    "onnx": "the table of rules",
    "onnxruntime": "onnxruntime's gradient builder",
}

HALF_TYPES = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}


@dataclass(frozen=True)
class OperatorUse:
    """One kind of operator in a model.

    `operator` is its name, `nodes` counts its nodes, `on_gradient_path` those between the weights
    and the outputs. `gradient` says how it is differentiated, or "BLOCKED".
    """

    operator: str
    nodes: int
    on_gradient_path: int
    gradient: str


@dataclass(frozen=True)
class InitializerUse:
    """A float initializer that is a weight, or could be taken for one.

    `shape` has its sizes. `trains` says whether it is trained. `parameter` says why it is a weight
    by default, or is not: "recorded" by the exporter as a parameter, "looks like one", "folded
    from" a parameter or an input, "buffer", "mask", "scalar", or "Constant node" for a tensor that
    the file has in such a node and that is not in the place of a weight. Other reasons name fixed
    filters, normalizations and grids, such as "STFT filter bank at 'audio'".
    """

    name: str
    shape: tuple[int, ...]
    trains: bool
    parameter: str


@dataclass(frozen=True)
class Inspection:
    """The result of `onnxfit.inspect`. It prints as a verdict and a table.

    - `weights` are the weights that train.
    - `idle` are selected weights without a gradient path to an output. A Trainer does not change
      them.
    - `outputs` are the float outputs that were differentiated.
    - `source` is the source of gradients: "onnx" (the table of rules) or "onnxruntime" (the
      builder).
    - `operators` has one OperatorUse per kind of operator, sorted by name.
    - `initializers` has one InitializerUse per weight, buffer and mask.
    - `blockers` are the nodes on the gradient path that cannot be differentiated, each with a
      `reason` and a `fix`.
    - `problems` are sentences about other obstacles to training, each with a fix.
    - `shared` has the weights that several nodes read, each with the number of these nodes, the
      largest numbers first. `onnxfit.untie` gives each layer its own.
    - `quantized` are integer weights, which training does not change.
    - `probabilities` has the outputs that losses read as probabilities, each with the nodes that
      show it. Losses compute from the scores before these nodes.
    - `batch_axes` says which axis of each input and output is the batch, and why.
    - `padding_rows` has the trained tables of embeddings with one row of zeros, each with its
      index. In PyTorch, such a row usually belongs to `padding_idx` and has no gradient. It is
      empty for a Trainer, which has its own `freeze_rows`.
    - `facts` has the origin of the file, the kind of each input, and a loss for each output.
    - `device` is the device that a Trainer was asked about, else None.
    - `on_cpu` are the operators of a training step that `device` leaves to the CPU, each with the
      number of their nodes. Their inputs and outputs are copied in every step.
    """

    weights: tuple[str, ...]
    idle: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str
    operators: tuple[OperatorUse, ...]
    blockers: tuple[Blocker, ...]
    problems: tuple[str, ...] = ()
    shared: tuple[tuple[str, int], ...] = ()
    quantized: tuple[str, ...] = ()
    device: str | None = None
    on_cpu: tuple[tuple[str, int], ...] = ()
    initializers: tuple[InitializerUse, ...] = ()
    probabilities: tuple[tuple[str, str], ...] = ()
    batch_axes: tuple[str, ...] = ()
    padding_rows: tuple[tuple[str, int], ...] = ()
    facts: FileFacts | None = None

    @property
    def trains(self) -> bool:
        """Whether there are weights to train, and no node on their gradient path is blocked."""
        return bool(self.weights) and not self.blockers

    def __str__(self) -> str:
        tables = [*self._table().lines(), ""]
        if self.initializers:
            tables += [*self._initializer_table().lines(), ""]
        return "\n".join([*tables, *map(clean, self._verdict(FileFacts.wrapped_lines))])

    def _repr_html_(self) -> str:
        """Return the verdict and the table for a notebook."""
        first, *others = self._verdict(FileFacts.lines)
        verdict = paragraph(first) + bullets(others)
        tables = [self._table(), *([self._initializer_table()] if self.initializers else [])]
        return verdict + "".join(table.html() for table in tables)

    def _table(self) -> Table:
        rows = [
            (use.operator, str(use.nodes), str(use.on_gradient_path or ""), use.gradient)
            for use in self.operators
        ]
        blocked = [i for i, use in enumerate(self.operators) if use.gradient == BLOCKED]
        header = ("operator", "nodes", "on the path", "gradient")
        return Table(header, rows, right=frozenset(header[1:3]), strong=frozenset(blocked))

    def _initializer_table(self) -> Table:
        """Return the table of initializers; a long one counts those that are usual."""
        uses = self.initializers
        counts: Counter[tuple[bool, str]] = Counter()
        if len(uses) > MAX_INITIALIZERS_LISTED:
            usual = [use for use in uses if use.parameter in USUAL]
            counts = Counter((use.trains, use.parameter) for use in usual)
            uses = tuple(use for use in uses if use.parameter not in USUAL)
        more = len(uses) - MAX_INITIALIZERS_LISTED
        cells = [(*_shown_initializer(use), "yes" * use.trains, use.parameter) for use in uses]
        rows = cells[:MAX_INITIALIZERS_LISTED]
        if more > 0:
            rows.append((f"… {more} more", "", "", ""))
        for (trains, reason), count in counts.items():
            rows.append((f"… {count} more", "", "yes" * trains, reason))
        return Table(("initializer", "shape", "trains", "parameter"), rows)

    def _verdict(self, lines_of: Callable[[FileFacts], list[str]]) -> list[str]:
        if self.blockers:
            lines = ["Does not train. These nodes between weights and outputs block the gradient:"]
            lines += [f"  {blocker}" for blocker in self.blockers]
        elif not self.weights:
            lines = ["Does not train: no output depends on a weight in a differentiable way."]
            lines += [f"  {problem}" for problem in self.problems]
        else:
            plural = "s" if len(self.weights) > 1 else ""
            by = DIFFERENTIATED_BY[self.source]
            lines = [f"Trains: {len(self.weights)} weight{plural}, differentiated by {by}."]
        lines += [f"Batch: {line}." for line in self.batch_axes]
        lines += [] if self.facts is None else lines_of(self.facts)
        if self.idle:
            idle = ", ".join(self.idle)
            lines.append(f"No output depends on {idle} in a differentiable way.")
        lines += [f"{name} is {used_by(count)}." for name, count in self.shared[:MAX_SHARED_LISTED]]
        if len(self.shared) > MAX_SHARED_LISTED:
            more = len(self.shared) - MAX_SHARED_LISTED
            lines.append(f"{more} more weights are used by several nodes.")
        lines += [
            f"Row {row} of {name} is zero, as with padding_idx. To keep it so, pass"
            f" freeze_rows={{{name!r}: [{row}]}}."
            for name, row in self.padding_rows
        ]
        lines += [f"{name} is probabilities: {reason}." for name, reason in self.probabilities]
        if self.quantized and not any(REMEDY in line for line in lines):
            lines.append(describe_quantized(list(self.quantized)))
        if self.device is not None:
            nodes = ", ".join(f"{operator} ({count})" for operator, count in self.on_cpu)
            lines.append(
                f"With device={self.device!r}, the CPU computes {nodes or 'no node of a step'}."
            )
        return lines


def _shown_initializer(use: InitializerUse) -> tuple[str, str]:
    """Return the name of an initializer, shortened in the middle, and its shape."""
    name, half = use.name, MAX_NAME_CHARACTERS // 2
    if len(name) > MAX_NAME_CHARACTERS:
        name = f"{name[: half - 1]}…{name[-half:]}"
    return name, "×".join(map(str, use.shape)) or "scalar"


def inspect_model(
    work: ir.Model,
    weights: Sequence[str] | str | None = None,
    *,
    outputs: Sequence[str] | str | None = None,
    gradient: str = "auto",
) -> Inspection:
    """Return the Inspection of a model that `normalize` returned; see `onnxfit.inspect`."""
    chosen = select_float_outputs(work.graph, outputs)
    try:
        selected = select_weights(work, weights)
    except ModelError as error:
        problem = _missing_weights(work, error)
        return inspect_working(work, (), chosen, gradient, problems=[problem])
    report = inspect_working(work, selected, chosen, gradient)
    return replace(report, padding_rows=tuple(_padding_rows(work, report.weights)))


@model_errors()
def inspect_working(
    work: ir.Model,
    weights: Sequence[str],
    outputs: Sequence[str],
    gradient: str,
    *,
    problems: Sequence[str] = (),
) -> Inspection:
    """Return the Inspection of a normalized model.

    `weights` are initializers, `outputs` are float outputs, `problems` are those that the caller
    has already found.
    """
    source = gradient_source(gradient)  # an unknown or missing source is an error for any model
    work = work.clone()
    reached = reachable_values(work, outputs, weights)
    blocking: Sequence[Blocker] = ()
    if reached:
        blocking = source.blockers(_with_total_loss(work, outputs, reached), names.TOTAL, reached)
    problems = list(problems)
    readers = reader_counts(work)
    shared = sorted((n for n in weights if readers[n] > 1), key=lambda n: -readers[n])
    if not outputs:
        problems.append(_missing_outputs(work))
    elif weights and not reached:
        problems.append(_missing_path(work, outputs, weights))
    dtypes = {v.dtype for v in outputs_of(work.graph, *outputs)}
    if dtypes and dtypes <= HALF_TYPES:
        problems.append(f"{', '.join(outputs)} cannot have a loss. Fix: {HALF_PRECISION}")
    return Inspection(
        weights=tuple(reached),
        idle=tuple(name for name in weights if name not in reached),
        outputs=tuple(outputs),
        source=source.name,
        operators=_operator_uses(work, outputs, reached, source.name, blocking),
        blockers=tuple(blocking),
        problems=tuple(problems),
        shared=tuple((name, readers[name]) for name in shared),
        quantized=tuple(quantized_weights(work)),
        initializers=_initializer_uses(work, weights, reached),
        probabilities=_probabilities(work, outputs),
    )


def _padding_rows(work: ir.Model, weights: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield the tables of embeddings that have one row of zeros, and the index of this row."""
    for name in weights:
        value = work.graph.initializers[name]
        tensor, uses = value.const_value, value.uses()
        is_table = all(
            use.node.op_type == "Gather"
            and use.idx == 0
            and not use.node.attributes.get_int("axis", 0)
            for use in uses
        )
        if tensor is None or not uses or not is_table:
            continue
        array = tensor.numpy()
        zeros = np.flatnonzero(~array.any(axis=-1))
        if array.ndim == 2 and len(zeros) == 1 and len(array) > 1:
            yield name, int(zeros[0])


def _probabilities(work: ir.Model, outputs: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the outputs that are probabilities, and the nodes that show it."""
    decisions = {v.name or "": decide_logits(None, v, True) for v in work.graph.outputs}
    return tuple((name, decisions[name].reason) for name in outputs if not decisions[name].logits)


def _initializer_uses(
    work: ir.Model, weights: Sequence[str], trained: Sequence[str]
) -> tuple[InitializerUse, ...]:
    """Return the initializers that are weights, or could be taken for weights."""
    tensors = work.graph.initializers
    return tuple(
        InitializerUse(name, _sizes(tensors[name]), name in trained, reason.text)
        for name, reason in weight_reasons(work, known=weights).items()
        if reason.is_listed or name in weights
    )


def _sizes(initializer: ir.Value) -> tuple[int, ...]:
    return tuple(int(size or 0) for size in spec_of(initializer).shape or ())


def _operator_uses(
    work: ir.Model,
    outputs: Sequence[str],
    weights: Sequence[str],
    source: str,
    blocking: Sequence[Blocker],
) -> tuple[OperatorUse, ...]:
    targets = outputs_of(work.graph, *outputs)
    path = differentiable_path(work.graph, targets, leaves_of(work.graph, weights))
    on_path = {path_node.node for path_node in path}
    blocked = {blocker.op_type for blocker in blocking}
    nodes: dict[Key, list[ir.Node]] = {}
    for node in work.graph:
        nodes.setdefault(key_of(node), []).append(node)
    uses = []
    for key, nodes_of_key in sorted(nodes.items()):
        if all(names.reserved(node.name or "") for node in nodes_of_key):
            continue
        count = sum(node in on_path for node in nodes_of_key)
        text = _gradient_text(key, source, needed=count > 0, blocked=key[1] in blocked)
        uses.append(OperatorUse(operator(key).name, len(nodes_of_key), count, text))
    return tuple(uses)


def _gradient_text(key: Key, source: str, *, needed: bool, blocked: bool) -> str:
    gradient = operator(key).gradient
    if blocked:
        return BLOCKED
    if gradient == "not_differentiable":
        return GRADIENTS[gradient]
    if not needed:
        return "not needed"
    return GRADIENTS[gradient] if source == "onnx" else "by the builder"


def _missing_weights(work: ir.Model, error: ModelError) -> str:
    """Explain why a model has no weights; `error` is the error from their selection."""
    constants = any(n.op_type == "Constant" and is_float(n.outputs[0]) for n in work.graph)
    in_bodies = any(graph.initializers for graph in work.graph.subgraphs())
    if any(is_float(v) for v in work.graph.initializers.values()) or constants or in_bodies:
        return str(error)  # the error contains a fix
    if work.graph.initializers:
        if quantized_weights(work):
            return str(error)
        fix = "train the model in floats, and quantize it afterwards"
    else:
        fix = "export the model with its parameters, as initializers"
    return f"{error} Fix: {fix}."


def _missing_outputs(work: ir.Model) -> str:
    """Explain why there is no output to differentiate, and name a value that could be one."""
    floats = [v.name or "" for v in work.graph.outputs if is_float(v)]
    if floats:
        return f"No output was selected. Fix: use outputs=None, which selects {', '.join(floats)}."
    types = ", ".join(f"{v.name} ({v.dtype or v.type})" for v in work.graph.outputs)
    problem = f"None of the outputs is a float tensor: {types}."
    for output in work.graph.outputs:
        node = output.producer()
        while node is not None:
            inputs = [v for v in node.inputs if v is not None and is_float(v)]
            if inputs:
                return (
                    f"{problem} Fix: add {inputs[0].name!r}, the input of {node.op_type}"
                    f" {node.name!r}, to the model's outputs."
                )
            producers = [v.producer() for v in node.inputs if v is not None]
            node = next((producer for producer in producers if producer is not None), None)
    return f"{problem} Fix: add a float output for a loss."


def _missing_path(work: ir.Model, outputs: Sequence[str], weights: Sequence[str]) -> str:
    """Explain why no weight has a gradient path to an output."""
    targets = outputs_of(work.graph, *outputs)
    stops = stopping_nodes(work.graph, targets, leaves_of(work.graph, weights))
    if not stops:
        return (
            f"{', '.join(outputs)} cannot be computed from {', '.join(weights)}. Fix: select other"
            " weights or other outputs."
        )
    listed = "; ".join(
        f"{node.op_type} {node.name!r} ({_stop_reason(node)})" for node in stops[:MAX_NODES_LISTED]
    )
    if len(stops) > MAX_NODES_LISTED:
        listed += f"; and {len(stops) - MAX_NODES_LISTED} more"
    return (
        f"No gradient flows through {listed}. Fix: make a value that is computed before it an"
        " output, or register a rule with onnxfit.gradients.register."
    )


def _stop_reason(node: ir.Node) -> str:
    if key_of(node) in NOT_DIFFERENTIABLE:
        return NOT_DIFFERENTIABLE[key_of(node)]
    if stops_gradient(node):
        return "the gradient is stopped there"
    if not any(carries_gradient(v) for v in node.outputs):
        return "its output is not a float"
    return "it uses only the shape or type of its input"


def _with_total_loss(work: ir.Model, outputs: Sequence[str], weights: Sequence[str]) -> ir.Model:
    """Return a copy that a gradient source can differentiate.

    Its weights are inputs, and the sum of its outputs is the loss.
    """
    copy = work.clone()
    initializers_to_inputs(copy.graph, weights)
    op = GraphBuilder(copy.graph)
    total = op.constant(0.0)
    for value in outputs_of(copy.graph, *outputs):
        total = total + op.cast(op.ReduceSum(op.wrap(value), keepdims=0), total.dtype)
    op.output(names.TOTAL, total)
    return infer_shapes(copy)
