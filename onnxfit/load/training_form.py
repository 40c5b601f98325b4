"""BatchNormalization, Dropout and random numbers in plain operators, for training and evaluation.

An exported model contains the first two in inference form, which onnxruntime's gradient builder
silently switches to batch statistics. A training step therefore never contains them: each becomes
plain arithmetic. Random numbers depend on (seed, step, number of the node), so a step can be
repeated bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir

from onnxfit.errors import ModelError, SettingError
from onnxfit.graph.index import constant_of
from onnxfit.graph.random import BITS, normal, uniform
from onnxfit.graph.subgraphs import nodes_of
from onnxfit.graph.values import GraphBuilder, Value


def to_training_form(
    op: GraphBuilder, weights: Sequence[str], batch_norm: str, seed: Value, step: Value
) -> dict[str, Value]:
    """Rewrite the graph of `op` for training, in place.

    Dropout and the operators of random numbers draw from (seed, step, number of the node), and
    inside a Loop also from the number of the iteration; their attribute `seed` is ignored.

    - `op`: the builder of the graph.
    - `weights`: the names of the weights that are trained.
    - `batch_norm`: "train" lets a BatchNormalization normalize by the batch if its scale or bias is
      trained. Otherwise, or if its scale and bias are frozen, it uses its running statistics, like
      a frozen layer in Keras.
    - `seed`: an int64 scalar.
    - `step`: the number of updates so far, an int64 scalar.

    Returns the next value of every running statistic that the step updates, by name.

    ModelError: a subgraph contains batch statistics, or a Scan contains random numbers.
    """
    next_statistics: dict[str, Value] = {}
    draws = _Draws(seed, step)
    for node in list(op.graph):
        if node.op_type == "BatchNormalization" and node.domain == "":
            _refuse_other_outputs(node)
            with op.replacing(node) as replace_node:
                if _normalizes_by_batch(node, weights, batch_norm):
                    y, updates = _batch_norm(op, node, next_statistics)
                    next_statistics.update(updates)
                else:
                    y = _frozen_batch_norm(op, node)
                replace_node(y)
        else:
            _draw_from_step(op, node, draws)
            for inside, body in _bodies(op, node):
                _body_in_training_form(
                    inside, node, weights, batch_norm, draws.inside(inside, node, body)
                )
    return next_statistics


@dataclass
class _Draws:
    """Random numbers of the nodes of a graph.

    Inside a Loop, `iteration` is the number of the iteration. A Scan has no such number:
    `uncounted` is the Scan that contains the graph.
    """

    seed: Value
    step: Value
    iteration: Value | None = None
    uncounted: ir.Node | None = None
    # counts only the nodes that draw: the number of all nodes depends on folding
    streams: Iterator[int] = field(default_factory=count)

    def uniform(self, op: GraphBuilder, shape: Value) -> Value:
        return uniform(op, shape, *self._key(op))

    def normal(self, op: GraphBuilder, shape: Value) -> Value:
        return normal(op, shape, *self._key(op))

    def _key(self, op: GraphBuilder) -> tuple[Value, Value, int, Value | None]:
        iteration = None if self.iteration is None else op.wrap(self.iteration.ir)
        return op.wrap(self.seed.ir), op.wrap(self.step.ir), next(self.streams), iteration

    def inside(self, op: GraphBuilder, node: ir.Node, body: ir.Graph) -> _Draws:
        """Return the random numbers for a body of a node."""
        if node.op_type == "Scan":
            return replace(self, uncounted=node)
        if node.op_type != "Loop":
            return self
        iteration = op.wrap(body.inputs[0])
        if self.iteration is not None:
            iteration = op.wrap(self.iteration.ir) * 65537 + iteration
        return replace(self, iteration=iteration)


def _draw_from_step(op: GraphBuilder, node: ir.Node, draws: _Draws) -> None:
    """Replace a node of random numbers by nodes that draw them from seed and step."""
    if node.domain != "" or (node.op_type != "Dropout" and node.op_type not in RANDOM):
        return
    if draws.uncounted is not None and not (node.op_type == "Dropout" and _drops_nothing(node)):
        raise ModelError(
            f"{node.op_type} {node.name!r} inside Scan {draws.uncounted.name!r} cannot be trained:"
            " it would draw the same random numbers in every iteration. Draw them before the Scan"
            " and pass them as scan inputs, or use a Loop."
        )
    _refuse_other_outputs(node)
    with op.replacing(node) as replace_node:
        draw = _dropout if node.op_type == "Dropout" else RANDOM[node.op_type]
        replace_node(draw(op, node, draws))


def _body_in_training_form(
    op: GraphBuilder, outer: ir.Node, weights: Sequence[str], batch_norm: str, draws: _Draws
) -> None:
    """Rewrite a body of the node `outer` for training, in place."""
    for node in list(op.graph):
        if (
            node.op_type == "BatchNormalization"
            and node.domain == ""
            and _normalizes_by_batch(node, weights, batch_norm)
        ):
            raise ModelError(
                f"BatchNormalization {node.name!r} inside {outer.op_type} {outer.name!r} cannot use"
                " batch statistics, because a subgraph cannot update running statistics. Set"
                " batch_norm='frozen' to train with the file's running statistics."
            )
        _draw_from_step(op, node, draws)
        for inside, body in _bodies(op, node):
            _body_in_training_form(
                inside, node, weights, batch_norm, draws.inside(inside, node, body)
            )


def _bodies(op: GraphBuilder, node: ir.Node) -> Iterator[tuple[GraphBuilder, ir.Graph]]:
    """Yield the bodies of a node, each with its builder."""
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield GraphBuilder(attribute.as_graph(), outer=op), attribute.as_graph()


def updated_statistics(model: ir.Model, weights: Sequence[str], batch_norm: str) -> list[str]:
    """Return the running statistics that a training step updates, in the model's order.

    `weights` and `batch_norm` are those of `to_training_form`.
    """
    names: dict[str | None, None] = {}
    for node in model.graph:
        if (
            node.op_type == "BatchNormalization"
            and node.domain == ""
            and _normalizes_by_batch(node, weights, batch_norm)
        ):
            names |= dict.fromkeys(
                v.name
                for v in node.inputs[3:5]
                if v is not None and v.name in model.graph.initializers
            )
    return [name for name in names if name]


def unmeasured_batch_norms(model: ir.Model, measured: Collection[str]) -> list[str]:
    """Return the BatchNormalizations that normalize by the batch in the file, and have the initial
    statistics, means of 0 and variances of 1.

    In evaluation, their outputs differ from those of the file.

    - `measured`: the running statistics that training updates.
    """
    return [
        node.name or node.outputs[0].name or ""
        for node in model.graph
        if _is_in_training_mode(node)
        and not any(v is not None and v.name in measured for v in node.inputs[3:5])
        and all(_consists_of(v, number) for v, number in zip(node.inputs[3:5], (0, 1)))
    ]


def _consists_of(value: ir.Value | None, number: float) -> bool:
    array = constant_of(value)
    return array is not None and bool((array == number).all())


def constant_batch_norms(op: GraphBuilder, weights: Sequence[str], batch_norm: str) -> list[str]:
    """Return the names of each BatchNormalization that normalizes one value per channel.

    The value is its own mean, so the node's output is its bias for any input. The graph of `op` has
    the sizes of the batch; `weights` and `batch_norm` are those of `to_training_form`.
    """
    constant = []
    for node in op.graph:
        x = node.inputs[0] if node.op_type == "BatchNormalization" and not node.domain else None
        if x is None or x.shape is None or not _normalizes_by_batch(node, weights, batch_norm):
            continue
        if all(size == 1 for axis, size in enumerate(x.shape) if axis != 1):
            constant.append(node.name or "")
    return constant


def keep_batch_norms(model: ir.Model, batch_norm: str) -> None:
    """With `batch_norm="batch"`, let each BatchNormalization compute what the file says, in place.

    Nodes in training mode are written as arithmetic. They then normalize by the batch in training
    and in evaluation alike, and their running statistics are not used. Other values of `batch_norm`
    change nothing. SettingError: no node is in training mode.
    """
    if batch_norm == "batch" and not _normalize_by_batch(GraphBuilder(model.graph)):
        raise SettingError(
            "batch_norm='batch' needs a BatchNormalization that normalizes by the batch in the file"
            " (training_mode=1), and the model has none. Use batch_norm='train' or 'frozen'."
        )


def _is_in_training_mode(node: ir.Node) -> bool:
    """Return whether a node is a BatchNormalization of training mode."""
    is_batch_norm = node.op_type == "BatchNormalization" and node.domain == ""
    return is_batch_norm and bool(_attribute_or(node, "training_mode", 0))


def _normalize_by_batch(op: GraphBuilder) -> int:
    """Write each BatchNormalization of training mode as arithmetic; return their number."""
    changed = 0
    for node in list(op.graph):
        if _is_in_training_mode(node):
            _refuse_other_outputs(node)
            with op.replacing(node) as replace_node:
                replace_node(_normalized_by_batch(op, node)[0])
            changed += 1
        else:
            changed += sum(_normalize_by_batch(inside) for inside, _ in _bodies(op, node))
    return changed


def to_evaluation_form(op: GraphBuilder) -> None:
    """Rewrite the graph of `op` for evaluation, in place.

    Dropout returns its input, and BatchNormalization uses its running statistics, even if the file
    says otherwise.
    """
    for node in list(op.graph):
        if node.op_type == "Dropout" and node.domain == "":
            _refuse_other_outputs(node)
            with op.replacing(node) as replace_node:
                replace_node(_input(op, node, 0))
        elif _is_in_training_mode(node):
            _refuse_other_outputs(node)
            with op.replacing(node) as replace_node:
                inputs = [_input(op, node, i) for i in range(5)]
                epsilon = float(_attribute_or(node, "epsilon", 1e-5))
                replace_node(op.BatchNormalization(*inputs, epsilon=epsilon))
        else:
            for inside, _ in _bodies(op, node):
                to_evaluation_form(inside)


def to_frozen_form(op: GraphBuilder) -> None:
    """Rewrite the graph of `op` to compute as in evaluation inside a training step, in place.

    BatchNormalization becomes arithmetic: onnxruntime's gradient builder switches every one that it
    finds in a step to batch statistics.
    """
    to_evaluation_form(op)
    for node in list(op.graph):
        if node.op_type == "BatchNormalization" and node.domain == "":
            with op.replacing(node) as replace_node:
                replace_node(_frozen_batch_norm(op, node))


def to_inference_form(model: onnx.ModelProto, batch_norm: str = "train") -> None:
    """Switch the nodes of a model from training to inference, in place.

    Names and structure stay.

    - `batch_norm`: "batch" keeps every BatchNormalization as it is.
    """
    keeps_batch_norms = batch_norm == "batch"
    for node in nodes_of(model.graph):
        if node.domain == "" and node.op_type == "Dropout":
            del node.input[2:]  # training_mode
        elif node.domain == "" and node.op_type == "BatchNormalization" and not keeps_batch_norms:
            for attribute in [a for a in node.attribute if a.name == "training_mode" and a.i]:
                node.attribute.remove(attribute)
                del node.output[1:]


def _normalizes_by_batch(node: ir.Node, weights: Sequence[str], batch_norm: str) -> bool:
    """Return whether a BatchNormalization normalizes by the batch under `batch_norm`.

    It does so only if its scale or bias is trained.
    """
    scale_and_bias = node.inputs[1:3]
    return batch_norm == "train" and any(
        v is not None and v.name in weights for v in scale_and_bias
    )


def _batch_norm(
    op: GraphBuilder, node: ir.Node, earlier_updates: Mapping[str, Value]
) -> tuple[Value, dict[str, Value]]:
    """Return x normalized by the batch, and the next running mean and variance by name.

    The variance is the population variance. running <- momentum running + (1 - momentum) batch.
    `earlier_updates` are the updates of earlier nodes: if two nodes share statistics, the second
    update starts from the first.
    """
    running_mean, running_variance = (_input(op, node, i) for i in (3, 4))
    momentum = float(_attribute_or(node, "momentum", 0.9))
    y, mean, variance = _normalized_by_batch(op, node)

    def update(running: Value, batch: Value) -> Value:
        running = earlier_updates.get(running.name, running)
        return momentum * running + (1 - momentum) * op.cast(op.Reshape(batch, [-1]), running.dtype)

    next_mean = update(running_mean, mean)
    next_variance = update(running_variance, variance)
    return y, {running_mean.name: next_mean, running_variance.name: next_variance}


def _normalized_by_batch(op: GraphBuilder, node: ir.Node) -> tuple[Value, Value, Value]:
    """Return x normalized by the batch, and the batch's mean and population variance."""
    x, scale, bias = (_input(op, node, i) for i in range(3))
    axes = [a for a in range(_known_rank(x, node)) if a != 1]
    epsilon = float(_attribute_or(node, "epsilon", 1e-5))
    mean = op.ReduceMean(x, axes, keepdims=1)
    centred = x - mean
    # ReduceSumSquare takes twice as long as these two
    variance = op.ReduceMean(centred * centred, axes, keepdims=1)
    # The division runs once per channel, because operators on whole batches are expensive.
    factor = _per_channel(op, scale, x) / op.Sqrt(variance + epsilon)
    return centred * factor + _per_channel(op, bias, x), mean, variance


def _frozen_batch_norm(op: GraphBuilder, node: ir.Node) -> Value:
    """Return x normalized by the running statistics."""
    x, scale, bias, mean, variance = (_input(op, node, i) for i in range(5))
    _known_rank(x, node)
    deviation = op.Sqrt(variance + float(_attribute_or(node, "epsilon", 1e-5)))
    centred = x - _per_channel(op, mean, x)
    return centred * _per_channel(op, scale / deviation, x) + _per_channel(op, bias, x)


def _dropout(op: GraphBuilder, node: ir.Node, draws: _Draws) -> Value:
    """Return x / (1 - ratio) where the mask keeps x, else 0.

    This is the inverted form, as ONNX has it, of Srivastava et al. (2014).
    """
    x = _input(op, node, 0)
    if _drops_nothing(node):
        return x
    keep = _kept_share(op, node)
    mask = _kept(op, draws.uniform(op, op.shape(x)), keep)
    # With ratio 1, everything is dropped, and `keep` would be a divisor of 0.
    factor = 1 / op.Max(op.cast(keep, x.dtype), _smallest_normal(x.dtype))
    return x * (op.cast(mask, x.dtype) * factor)


def _kept_share(op: GraphBuilder, node: ir.Node) -> Value:
    """Return the probability that a Dropout keeps an element."""
    ratio = node.inputs[1] if len(node.inputs) > 1 else None
    if ratio is None:
        return op.constant(np.float32(0.5))
    array = constant_of(ratio)
    if array is None:
        return 1 - op.cast(op.wrap(ratio), np.float32)
    share = np.float32(1) - array.astype(np.float32)
    if not 0 <= share <= 1:
        raise ModelError(
            f"The Dropout {node.name!r} has the ratio {array}; expected a number from 0"
            " to 1. Correct the ratio in the model."
        )
    return op.constant(share)


def _kept(op: GraphBuilder, drawn: Value, keep: Value) -> Value:
    """Return 1 where a number that `uniform` drew is below `keep`, else 0."""
    share = keep.ir.const_value
    if share is None:  # two operators instead of a comparison and a cast
        return op.Ceil(keep - drawn)
    # The numbers are whole multiples of 2^-BITS, so one operator tells exactly those below `keep`.
    numbers = 2.0**BITS
    below = math.ceil(share.numpy().item() * numbers)
    return op.HardSigmoid(drawn, alpha=-numbers, beta=float(below))


def _smallest_normal(dtype: np.dtype[Any]) -> float:
    # ml_dtypes has no annotations
    return float(ml_dtypes.finfo(dtype).smallest_normal)  # type: ignore[no-untyped-call]


def _drops_nothing(node: ir.Node) -> bool:
    """Return whether a Dropout has the constant ratio 0, as some exporters write it."""
    ratio = node.inputs[1] if len(node.inputs) > 1 else None
    array = constant_of(ratio)
    return array is not None and not array.any()


def _random_uniform(op: GraphBuilder, node: ir.Node, draws: _Draws) -> Value:
    low = float(_attribute_or(node, "low", 0.0))
    high = float(_attribute_or(node, "high", 1.0))
    drawn = op.cast(draws.uniform(op, _drawn_shape(op, node)), _drawn_type(op, node))
    return low + (high - low) * drawn


def _random_normal(op: GraphBuilder, node: ir.Node, draws: _Draws) -> Value:
    mean = float(_attribute_or(node, "mean", 0.0))
    scale = float(_attribute_or(node, "scale", 1.0))
    return mean + scale * op.cast(draws.normal(op, _drawn_shape(op, node)), _drawn_type(op, node))


def _bernoulli(op: GraphBuilder, node: ir.Node, draws: _Draws) -> Value:
    """Return 1 with the probability that the input gives, else 0."""
    probability = _input(op, node, 0)
    drawn = op.cast(draws.uniform(op, op.shape(probability)), probability.dtype)
    return op.cast(drawn < probability, _drawn_type(op, node))


RANDOM = {
    "RandomUniform": _random_uniform,
    "RandomUniformLike": _random_uniform,
    "RandomNormal": _random_normal,
    "RandomNormalLike": _random_normal,
    "Bernoulli": _bernoulli,
}


def _drawn_shape(op: GraphBuilder, node: ir.Node) -> Value:
    if node.inputs:
        return op.shape(_input(op, node, 0))
    return op.constant(np.array(node.attributes["shape"].as_ints(), np.int64))


def _drawn_type(op: GraphBuilder, node: ir.Node) -> np.dtype[Any]:
    """Return the type in the attribute `dtype`, else the input's type, else float32."""
    if "dtype" in node.attributes:
        return ir.DataType(node.attributes["dtype"].as_int()).numpy()
    return _input(op, node, 0).dtype if node.inputs else np.dtype(np.float32)


def _refuse_other_outputs(node: ir.Node) -> None:
    used = [v.name for v in node.outputs[1:] if v.uses() or v.is_graph_output()]
    if used:
        raise ModelError(
            f"{node.op_type} {node.name!r} cannot be trained: the model uses its output"
            f" {used[0]!r} (mask or statistics)."
        )


def _per_channel(op: GraphBuilder, v: Value, x: Value) -> Value:
    """Return a vector of channels in a shape that broadcasts to x, `(batch, channels, ...)`."""
    return op.Reshape(v, [1, -1] + [1] * (x.rank - 2)) if x.rank > 2 else v


def _known_rank(x: Value, node: ir.Node) -> int:
    if x.shape is None:
        raise ModelError(
            f"{node.op_type} {node.name!r} cannot be trained: the rank of its input {x.name!r} is"
            " unknown."
        )
    return x.rank


def _attribute_or(node: ir.Node, name: str, default: float) -> float:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.value


def _input(op: GraphBuilder, node: ir.Node, index: int) -> Value:
    value = node.inputs[index]
    assert value is not None
    return op.wrap(value)
