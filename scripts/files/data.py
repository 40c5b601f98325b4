"""Inputs and labels for a file, and its loss in NumPy."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx.helper import tensor_dtype_to_np_dtype

from scripts.files.catalogue import PublicFile

Arrays = dict[str, np.ndarray[Any, Any]]


def inputs_of(model: onnx.ModelProto, row: PublicFile) -> Arrays:
    """Return an array for each input of the file, in the file's element type."""
    rng = np.random.default_rng(zlib.crc32(row.path.encode()))
    initializers = {tensor.name for tensor in model.graph.initializer}
    arrays = {}
    for value in model.graph.input:
        if value.name not in initializers:
            dtype = tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            arrays[value.name] = _drawn(row.inputs[value.name], dtype, rng)
    return arrays


def _drawn(
    recipe: Mapping[str, Any], dtype: np.dtype[Any], rng: np.random.Generator
) -> np.ndarray[Any, Any]:
    shape = recipe.get("shape", [])
    if "value" in recipe:
        return np.full(shape, recipe["value"], dtype)
    if dtype.kind == "f":
        return rng.uniform(recipe["low"], recipe["high"], shape).astype(dtype)
    return rng.integers(recipe["low"], recipe["high"], shape).astype(dtype)


def class_axis(scores: np.ndarray[Any, Any]) -> int:
    """Return the axis that onnxfit takes for the classes: 1 for images, else the last."""
    return 1 if scores.ndim >= 4 else scores.ndim - 1


def labels_of(outputs: Mapping[str, np.ndarray[Any, Any]], row: PublicFile) -> Arrays:
    """Return labels that differ from the predictions: classes, zeros and ones, or numbers nearby."""
    rng = np.random.default_rng(1)
    labels = {}
    for name, loss in row.losses.items():
        y = outputs[name]
        if loss == "cross_entropy":
            axis = class_axis(y)
            shape = [size for i, size in enumerate(y.shape) if i != axis]
            labels[name] = rng.integers(0, y.shape[axis], shape)
        elif loss == "binary_cross_entropy":
            labels[name] = rng.integers(0, 2, y.shape).astype(y.dtype)
        else:
            distance = max(float(y.std()), 0.1 * float(np.abs(y).mean()), 0.1)
            labels[name] = (y + distance * rng.standard_normal(y.shape)).astype(y.dtype)
    return labels


def scores_of(model: onnx.ModelProto, row: PublicFile, ranks: Mapping[str, int]) -> dict[str, str]:
    """Return output -> the value before its final Sigmoid or Softmax over the last axis.

    Probabilities of 0 and 1 in float32 do not tell how far the score is beyond.
    """
    producers = {name: node for node in model.graph.node for name in node.output}
    opset = next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
    scores = {}
    for name, loss in row.losses.items():
        node = producers.get(name)
        kind = node.op_type if node is not None else ""
        if loss == "binary_cross_entropy" and kind == "Sigmoid":
            scores[name] = node.input[0]
        elif loss == "cross_entropy" and kind == "Softmax" and ranks[name] < 4:
            axis = next((a.i for a in node.attribute if a.name == "axis"), -1 if opset >= 13 else 1)
            if axis % ranks[name] == ranks[name] - 1:
                scores[name] = node.input[0]
    return scores


def loss_of(
    outputs: Mapping[str, np.ndarray[Any, Any]],
    labels: Mapping[str, np.ndarray[Any, Any]],
    row: PublicFile,
    scores: Mapping[str, str],
) -> float:
    """Return the sum of the outputs' mean losses, in float64; see `scores_of`."""
    total = 0.0
    for name, loss in row.losses.items():
        y = outputs[scores.get(name, name)].astype(float)
        total += _mean_loss(loss, y, labels[name], name in row.logits or name in scores)
    return total


def _mean_loss(
    loss: str, y: np.ndarray[Any, Any], label: np.ndarray[Any, Any], logits: bool
) -> float:
    tiny = np.finfo(float).tiny
    if loss == "cross_entropy":
        axis = class_axis(y)
        picked = np.take_along_axis(y, np.expand_dims(label, axis), axis)
        if logits:
            top = y.max(axis, keepdims=True)
            return float((np.log(np.exp(y - top).sum(axis, keepdims=True)) + top - picked).mean())
        return float(-np.log(np.maximum(picked, tiny)).mean())
    if loss == "binary_cross_entropy":
        if logits:
            return float((np.logaddexp(0, y) - label * y).mean())
        chosen = np.where(label > 0, y, 1 - y)
        return float(-np.log(np.maximum(chosen, tiny)).mean())
    return float(((y - label) ** 2).mean())
