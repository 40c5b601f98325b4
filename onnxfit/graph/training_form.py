"""BatchNormalization and Dropout as they behave in training and in evaluation, in plain operators.

An exported model holds them in inference form, and onnxruntime's gradient builder switches that form silently to batch statistics;
so a step never contains them: each becomes the arithmetic it stands for.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxfit.errors import ModelError
from onnxfit.graph.random import uniform
from onnxfit.graph.values import Op, Value


def to_training_form(op: Op, weights: Sequence[str], batch_norm: str, seed: Value, step: Value) -> dict[str, Value]:
    """Rewrite the graph of `op` in place; returns the next value of every running statistic that the step updates.

    With `batch_norm="train"` a BatchNormalization normalises by the batch, unless its scale and bias are both frozen or
    `batch_norm="frozen"`: then it uses its running statistics, like a layer that is not trained in Keras. Dropout draws its mask from
    (seed, step, position of the node).
    """
    next_statistics: dict[str, Value] = {}
    for position, node in enumerate(list(op.graph)):
        if node.op_type == "BatchNormalization" and node.domain == "":
            with op.replacing(node) as replace:
                if _by_batch(node, weights, batch_norm):
                    y, mean, variance = _batch_norm(op, node)
                    for value, new in zip(node.inputs[3:5], (mean, variance)):
                        assert value is not None
                        next_statistics[value.name or ""] = new
                else:
                    y = _frozen_batch_norm(op, node)
                replace(y)
        elif node.op_type == "Dropout" and node.domain == "":
            with op.replacing(node) as replace:
                replace(_dropout(op, node, seed, step, position))
    return next_statistics


def updated_statistics(model: ir.Model, weights: Sequence[str], batch_norm: str) -> list[str]:
    """The running statistics that a training step will update, in the model's order."""
    names: dict[str | None, None] = {}
    for node in model.graph:
        if node.op_type == "BatchNormalization" and node.domain == "" and _by_batch(node, weights, batch_norm):
            names |= dict.fromkeys(v.name for v in node.inputs[3:5] if v is not None and v.name in model.graph.initializers)
    return [name for name in names if name]


def to_evaluation_form(op: Op) -> None:
    """Rewrite the graph of `op` in place: Dropout passes, BatchNormalization uses its running statistics, whatever the file says."""
    for node in list(op.graph):
        if node.op_type == "Dropout" and node.domain == "":
            with op.replacing(node) as replace:
                replace(_input(op, node, 0))
        elif node.op_type == "BatchNormalization" and node.domain == "" and _attribute(node, "training_mode", 0):
            with op.replacing(node) as replace:
                inputs = [_input(op, node, i) for i in range(5)]
                replace(op.BatchNormalization(*inputs, epsilon=float(_attribute(node, "epsilon", 1e-5))))


def _by_batch(node: ir.Node, weights: Sequence[str], batch_norm: str) -> bool:
    """Whether a BatchNormalization normalises by the batch: it is asked for, and its scale or bias is trained."""
    return batch_norm == "train" and any(v is not None and v.name in weights for v in node.inputs[1:3])


def _batch_norm(op: Op, node: ir.Node) -> tuple[Value, Value, Value]:
    """Normalised by the batch's own mean and (population) variance; running <- momentum running + (1 - momentum) batch."""
    x, scale, bias, running_mean, running_variance = (_input(op, node, i) for i in range(5))
    axes = [a for a in range(_rank(x, node)) if a != 1]
    epsilon, momentum = float(_attribute(node, "epsilon", 1e-5)), float(_attribute(node, "momentum", 0.9))
    mean = op.ReduceMean(x, axes, keepdims=1)
    centred = x - mean
    variance = op.ReduceMean(centred * centred, axes, keepdims=1)
    y = centred / op.Sqrt(variance + epsilon) * _per_channel(op, scale, x) + _per_channel(op, bias, x)

    def follow(running: Value, batch: Value) -> Value:
        return momentum * running + (1 - momentum) * op.cast(op.Reshape(batch, [-1]), running.dtype)

    return y, follow(running_mean, mean), follow(running_variance, variance)


def _frozen_batch_norm(op: Op, node: ir.Node) -> Value:
    x, scale, bias, mean, variance = (_input(op, node, i) for i in range(5))
    _rank(x, node)
    deviation = op.Sqrt(variance + float(_attribute(node, "epsilon", 1e-5)))
    return (x - _per_channel(op, mean, x)) * _per_channel(op, scale / deviation, x) + _per_channel(op, bias, x)


def _dropout(op: Op, node: ir.Node, seed: Value, step: Value, stream: int) -> Value:
    """x / (1 - ratio) where the mask keeps it (Srivastava et al. 2014, in the inverted form of ONNX)."""
    x = _input(op, node, 0)
    ratio = node.inputs[1] if len(node.inputs) > 1 else None
    keep = 1 - op.cast(op.wrap(ratio), x.dtype) if ratio is not None else op.constant(0.5, x.dtype)
    mask = op.cast(uniform(op, x, seed, step, stream), x.dtype) < keep
    return x * (op.cast(mask, x.dtype) / keep)


def _per_channel(op: Op, v: Value, x: Value) -> Value:
    """A vector of channels against `(batch, channels, ...)`."""
    return op.Reshape(v, [-1] + [1] * (x.rank - 2)) if x.rank > 2 else v


def _rank(x: Value, node: ir.Node) -> int:
    if x.shape is None:
        raise ModelError(f"{node.op_type} {node.name!r} cannot be trained: the rank of its input {x.name!r} is unknown.")
    return x.rank


def _attribute(node: ir.Node, name: str, default: float) -> float:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.value


def _input(op: Op, node: ir.Node, index: int) -> Value:
    value = node.inputs[index]
    assert value is not None
    return op.wrap(value)
