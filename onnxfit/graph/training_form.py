"""BatchNormalization, Dropout and random numbers as they behave in training and in evaluation, in
plain operators.

An exported model holds the first two in inference form, and onnxruntime's gradient builder switches
that form silently to batch statistics; so a training step never contains them: each becomes the
arithmetic it stands for. What is random draws from (seed, step, number of the node), so that a step
can be repeated bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxfit.errors import ModelError
from onnxfit.graph.random import normal, uniform
from onnxfit.graph.values import GraphBuilder, Value


def to_training_form(
    op: GraphBuilder, weights: Sequence[str], batch_norm: str, seed: Value, step: Value
) -> dict[str, Value]:
    """Rewrite the graph of `op` in place; returns the next value of every running statistic that
    the step updates.

    With `batch_norm="train"` a BatchNormalization normalises by the batch, unless its scale and
    bias are both frozen or `batch_norm="frozen"`: then it uses its running statistics, like a layer
    that is not trained in Keras. Dropout and the operators of random numbers draw from (seed, step,
    number of the node), inside a Loop from the number of the iteration, too; their own attribute
    `seed` is not looked at. ModelError for what has no such form: batch statistics inside a body,
    random numbers inside a Scan.
    """
    next_statistics: dict[str, Value] = {}
    draws = _Draws(seed, step)
    for node in list(op.graph):
        if node.op_type == "BatchNormalization" and node.domain == "":
            _refuse_other_outputs(node)
            with op.replacing(node) as put:
                if _by_batch(node, weights, batch_norm):
                    y, mean, variance = _batch_norm(op, node, next_statistics)
                    for value, new in zip(node.inputs[3:5], (mean, variance)):
                        assert value is not None
                        next_statistics[value.name or ""] = new
                else:
                    y = _frozen_batch_norm(op, node)
                put(y)
        else:
            _drawn_anew(op, node, draws)
            for inside, body in _bodies(op, node):
                _body_in_training_form(
                    inside, node, weights, batch_norm, draws.inside(inside, node, body)
                )
    return next_statistics


@dataclass
class _Draws:
    """Where random numbers come from.

    Inside a Loop, `iteration` tells its passes apart; inside a Scan nothing does.
    """

    seed: Value
    step: Value
    iteration: Value | None = None
    uncounted: ir.Node | None = None
    # of what draws, not of nodes: folding leaves more or fewer of these
    streams: Iterator[int] = field(default_factory=count)

    def uniform(self, op: GraphBuilder, shape: Value) -> Value:
        return uniform(op, shape, *self._key(op))

    def normal(self, op: GraphBuilder, shape: Value) -> Value:
        return normal(op, shape, *self._key(op))

    def _key(self, op: GraphBuilder) -> tuple[Value, Value, int, Value | None]:
        iteration = None if self.iteration is None else op.wrap(self.iteration.ir)
        return op.wrap(self.seed.ir), op.wrap(self.step.ir), next(self.streams), iteration

    def inside(self, op: GraphBuilder, node: ir.Node, body: ir.Graph) -> _Draws:
        """The same for the body of a node."""
        if node.op_type == "Scan":
            return replace(self, uncounted=node)
        if node.op_type != "Loop":
            return self
        passed = op.wrap(body.inputs[0])
        return replace(
            self,
            iteration=(
                passed if self.iteration is None else op.wrap(self.iteration.ir) * 65537 + passed
            ),
        )


def _drawn_anew(op: GraphBuilder, node: ir.Node, draws: _Draws) -> None:
    """Let a node that draws random numbers draw them from the step."""
    if node.domain != "" or (node.op_type != "Dropout" and node.op_type not in RANDOM):
        return
    if draws.uncounted is not None and not (node.op_type == "Dropout" and _drops_nothing(node)):
        raise ModelError(
            f"{node.op_type} {node.name!r} inside Scan {draws.uncounted.name!r} cannot be trained:"
            " it would draw the same numbers in every pass. Draw them before the Scan and scan"
            " over them, or write it as a Loop."
        )
    _refuse_other_outputs(node)
    with op.replacing(node) as put:
        put(
            _dropout(op, node, draws)
            if node.op_type == "Dropout"
            else RANDOM[node.op_type](op, node, draws)
        )


def _body_in_training_form(
    op: GraphBuilder, outer: ir.Node, weights: Sequence[str], batch_norm: str, draws: _Draws
) -> None:
    for node in list(op.graph):
        if (
            node.op_type == "BatchNormalization"
            and node.domain == ""
            and _by_batch(node, weights, batch_norm)
        ):
            raise ModelError(
                f"BatchNormalization {node.name!r} inside {outer.op_type} {outer.name!r} cannot"
                " follow the batches, since no running statistics leave a body:"
                " batch_norm='frozen' trains with those the file has."
            )
        _drawn_anew(op, node, draws)
        for inside, body in _bodies(op, node):
            _body_in_training_form(
                inside, node, weights, batch_norm, draws.inside(inside, node, body)
            )


def _bodies(op: GraphBuilder, node: ir.Node) -> Iterator[tuple[GraphBuilder, ir.Graph]]:
    """The subgraphs of a node, each with its builder."""
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield GraphBuilder(attribute.as_graph(), around=op), attribute.as_graph()


def updated_statistics(model: ir.Model, weights: Sequence[str], batch_norm: str) -> list[str]:
    """The running statistics that a training step will update, in the model's order."""
    names: dict[str | None, None] = {}
    for node in model.graph:
        if (
            node.op_type == "BatchNormalization"
            and node.domain == ""
            and _by_batch(node, weights, batch_norm)
        ):
            names |= dict.fromkeys(
                v.name
                for v in node.inputs[3:5]
                if v is not None and v.name in model.graph.initializers
            )
    return [name for name in names if name]


def to_evaluation_form(op: GraphBuilder) -> None:
    """Rewrite the graph of `op` in place:

    Dropout passes, BatchNormalization uses its running statistics, whatever the file says.
    """
    for node in list(op.graph):
        if node.op_type == "Dropout" and node.domain == "":
            _refuse_other_outputs(node)
            with op.replacing(node) as put:
                put(_input(op, node, 0))
        elif (
            node.op_type == "BatchNormalization"
            and node.domain == ""
            and _attribute(node, "training_mode", 0)
        ):
            _refuse_other_outputs(node)
            with op.replacing(node) as put:
                inputs = [_input(op, node, i) for i in range(5)]
                put(
                    op.BatchNormalization(*inputs, epsilon=float(_attribute(node, "epsilon", 1e-5)))
                )
        else:
            for inside, _ in _bodies(op, node):
                to_evaluation_form(inside)


def to_inference_form(model: onnx.ModelProto) -> None:
    """Let the nodes of a model in place behave as in inference, where the file says otherwise;
    names and structure stay.
    """
    _graph_to_inference_form(model.graph)


def _graph_to_inference_form(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _graph_to_inference_form(attribute.g)
        if node.domain == "" and node.op_type == "Dropout":
            del node.input[2:]  # training_mode
        elif node.domain == "" and node.op_type == "BatchNormalization":
            for attribute in [a for a in node.attribute if a.name == "training_mode" and a.i]:
                node.attribute.remove(attribute)
                del node.output[1:]


def _by_batch(node: ir.Node, weights: Sequence[str], batch_norm: str) -> bool:
    """Whether a BatchNormalization normalises by the batch: it is asked for, and its scale or bias
    is trained.
    """
    return batch_norm == "train" and any(
        v is not None and v.name in weights for v in node.inputs[1:3]
    )


def _batch_norm(
    op: GraphBuilder, node: ir.Node, so_far: Mapping[str, Value]
) -> tuple[Value, Value, Value]:
    """Normalised by the batch's own mean and (population) variance; running <- momentum running +
    (1 - momentum) batch.

    Statistics that two nodes share go on from the first node's update (`so_far`).
    """
    x, scale, bias, running_mean, running_variance = (_input(op, node, i) for i in range(5))
    axes = [a for a in range(_rank(x, node)) if a != 1]
    epsilon, momentum = (
        float(_attribute(node, "epsilon", 1e-5)),
        float(_attribute(node, "momentum", 0.9)),
    )
    mean = op.ReduceMean(x, axes, keepdims=1)
    centred = x - mean
    # ReduceSumSquare takes twice as long as these two
    variance = op.ReduceMean(centred * centred, axes, keepdims=1)
    # one number per channel is made first, so that the tensors of the batch are passed over as
    # seldom as can be
    y = centred * (_per_channel(op, scale, x) / op.Sqrt(variance + epsilon)) + _per_channel(
        op, bias, x
    )

    def follow(running: Value, batch: Value) -> Value:
        running = so_far.get(running.name, running)
        return momentum * running + (1 - momentum) * op.cast(op.Reshape(batch, [-1]), running.dtype)

    return y, follow(running_mean, mean), follow(running_variance, variance)


def _frozen_batch_norm(op: GraphBuilder, node: ir.Node) -> Value:
    x, scale, bias, mean, variance = (_input(op, node, i) for i in range(5))
    _rank(x, node)
    deviation = op.Sqrt(variance + float(_attribute(node, "epsilon", 1e-5)))
    return (x - _per_channel(op, mean, x)) * _per_channel(op, scale / deviation, x) + _per_channel(
        op, bias, x
    )


def _dropout(op: GraphBuilder, node: ir.Node, draws: _Draws) -> Value:
    """x / (1 - ratio) where the mask keeps it (Srivastava et al. 2014, in the inverted form of
    ONNX).
    """
    x = _input(op, node, 0)
    if _drops_nothing(node):
        return x
    ratio = node.inputs[1] if len(node.inputs) > 1 else None
    keep = 1 - op.cast(op.wrap(ratio), x.dtype) if ratio is not None else op.constant(0.5, x.dtype)
    mask = op.cast(draws.uniform(op, op.shape(x)), x.dtype) < keep
    # ratio 1 drops everything, and divides by 0
    return x * (op.cast(mask, x.dtype) / op.Max(keep, np.finfo(x.dtype).tiny))


def _drops_nothing(node: ir.Node) -> bool:
    """Exporters write a Dropout of nothing, too."""
    ratio = node.inputs[1] if len(node.inputs) > 1 else None
    known = ir.convenience.get_const_tensor(ratio) if ratio is not None else None
    return known is not None and not known.numpy().any()


def _random_uniform(op: GraphBuilder, node: ir.Node, draws: _Draws) -> Value:
    low, high = float(_attribute(node, "low", 0.0)), float(_attribute(node, "high", 1.0))
    drawn = op.cast(draws.uniform(op, _drawn_shape(op, node)), _drawn_type(op, node))
    return low + (high - low) * drawn


def _random_normal(op: GraphBuilder, node: ir.Node, draws: _Draws) -> Value:
    mean, scale = float(_attribute(node, "mean", 0.0)), float(_attribute(node, "scale", 1.0))
    return mean + scale * op.cast(draws.normal(op, _drawn_shape(op, node)), _drawn_type(op, node))


def _bernoulli(op: GraphBuilder, node: ir.Node, draws: _Draws) -> Value:
    """1 with the probability that the input gives."""
    chance = _input(op, node, 0)
    return op.cast(
        op.cast(draws.uniform(op, op.shape(chance)), chance.dtype) < chance, _drawn_type(op, node)
    )


RANDOM = {
    "RandomUniform": _random_uniform, "RandomUniformLike": _random_uniform, "RandomNormal": _random_normal,
    "RandomNormalLike": _random_normal, "Bernoulli": _bernoulli,
}  # fmt: skip


def _drawn_shape(op: GraphBuilder, node: ir.Node) -> Value:
    if node.inputs:
        return op.shape(_input(op, node, 0))
    return op.constant(np.array(node.attributes["shape"].as_ints(), np.int64))


def _drawn_type(op: GraphBuilder, node: ir.Node) -> np.dtype[Any]:
    """What the attribute says; else the input's type, or float32."""
    if "dtype" in node.attributes:
        return ir.DataType(node.attributes["dtype"].as_int()).numpy()
    return _input(op, node, 0).dtype if node.inputs else np.dtype(np.float32)


def _refuse_other_outputs(node: ir.Node) -> None:
    used = [v.name for v in node.outputs[1:] if v.uses() or v.is_graph_output()]
    if used:
        raise ModelError(
            f"{node.op_type} {node.name!r} cannot be trained: its output {used[0]!r} (mask or"
            " statistics) is used by the model."
        )


def _per_channel(op: GraphBuilder, v: Value, x: Value) -> Value:
    """A vector of channels against `(batch, channels, ...)`."""
    return op.Reshape(v, [1, -1] + [1] * (x.rank - 2)) if x.rank > 2 else v


def _rank(x: Value, node: ir.Node) -> int:
    if x.shape is None:
        raise ModelError(
            f"{node.op_type} {node.name!r} cannot be trained: the rank of its input {x.name!r} is"
            " unknown."
        )
    return x.rank


def _attribute(node: ir.Node, name: str, default: float) -> float:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.value


def _input(op: GraphBuilder, node: ir.Node, index: int) -> Value:
    value = node.inputs[index]
    assert value is not None
    return op.wrap(value)
