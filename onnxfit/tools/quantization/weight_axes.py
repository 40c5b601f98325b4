"""The weights of a float model's layers, and their axes of output channels."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx

from onnxfit.errors import ModelError
from onnxfit.graph.index import tensors_of
from onnxfit.graph.shared_tensors import array_of

# Operators with weights -> the inputs that may be weights
LAYERS = {"Conv": (1,), "ConvTranspose": (1,), "Gemm": (0, 1), "MatMul": (0, 1)}


def explicit_axes(
    model: onnx.ModelProto, excluded: Collection[str], weights: str, per_channel: bool
) -> dict[str, int | None]:
    """Return the weights for which onnxruntime's quantizer would choose another type or axis.

    Version 1.19 gives a MatMul's weight with one scale the type of the activations, and uses int8
    instead of uint8 for channels. Later versions use one zero point for all channels of uint4.
    Every version fails at the bias of a ConvTranspose with groups: an axis of its weight has the
    channels of only one group.

    - `model`: a model with unique node names.
    - `excluded`: names of nodes whose weights stay in float.
    - `weights`, `per_channel`: as for `quantize`.

    The result maps names to the axis of the channels with separate scales, None for one scale.
    """
    axes = channel_axes(model, excluded)
    if not per_channel:
        return dict.fromkeys(axes)
    grouped = {
        node.input[1]
        for node in model.graph.node
        if node.op_type == "ConvTranspose"
        if any(a.name == "group" and a.i > 1 for a in node.attribute)
    }
    chosen = axes if weights.startswith("u") else grouped.intersection(axes)
    return {name: None if name in grouped else axes[name] for name in chosen}


def require_finite_weights(model: onnx.ModelProto, excluded: Collection[str]) -> None:
    """Raise ModelError for a weight with infinity or NaN, which have no scale."""
    tensors = tensors_of(model.graph)
    for name in channel_axes(model, excluded):
        if not np.isfinite(array_of(tensors[name])).all():
            raise ModelError(
                f"The weight {name!r} contains infinity or NaN. Exclude it with"
                f" exclude=[{name!r}], or train the model again."
            )


def channel_axes(model: onnx.ModelProto, excluded: Collection[str]) -> dict[str, int]:
    """Return the weights of the layers that are not excluded, with the axis of their channels."""
    float32 = onnx.TensorProto.FLOAT
    tensors = {t.name: t for t in model.graph.initializer if t.data_type == float32}
    axes: dict[str, int] = {}
    for node in model.graph.node:
        if node.domain not in ("", "ai.onnx") or node.name in excluded:
            continue
        for position in LAYERS.get(node.op_type, ()):
            tensor = tensors.get(node.input[position])
            if tensor is not None and len(tensor.dims) >= 2 and 0 not in tensor.dims:
                axes.setdefault(tensor.name, _channel_axis(node, position, len(tensor.dims)))
    return axes


def _channel_axis(node: onnx.NodeProto, position: int, rank: int) -> int:
    """Return the axis of a layer's weight that has an entry for each output channel."""
    if node.op_type == "Conv":
        return 0
    if node.op_type == "ConvTranspose":
        return 1
    last = position == 1
    if node.op_type == "Gemm":
        flag = "transB" if last else "transA"
        transposed = any(a.name == flag and a.i for a in node.attribute)
        return int(last != transposed)
    return rank - 1 if last else rank - 2
