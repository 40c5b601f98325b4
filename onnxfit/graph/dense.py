"""A network of dense layers, for data without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.helper as make

# The name of the graph and the producer of every dense network.
NETWORK = "network"
PRODUCER = "onnxfit"


@dataclass(frozen=True)
class Scaling:
    """The center and the scale of each column of data; `(data - center) / scale` is of order 1."""

    center: npt.NDArray[Any]
    scale: npt.NDArray[Any]


def dense_network(
    sizes: Sequence[int],
    dtype: np.dtype[Any],
    seed: int,
    inputs: Scaling | None = None,
    outputs: Scaling | None = None,
) -> onnx.ModelProto:
    """Return dense layers of these sizes, from features to outputs, with ReLU between them.

    The weights of layer i are `coefficients_<i>`, shape `(inputs, outputs)`, and
    `intercepts_<i>`. A single layer begins at 0; otherwise coefficients are uniform at random
    (Glorot and Bengio 2010), drawn from `seed`. The input is `X`, the output `predictions`.

    - `inputs`: the first layer gets `(X - center) / scale`, unless None.
    - `outputs`: `predictions` are `center + scale * (output of the last layer)`, unless None.

    Centers and scales are constants of the graph, which no training changes.
    """
    random = np.random.default_rng(seed)
    elem_type = make.np_dtype_to_tensor_dtype(dtype)
    nodes = []
    initializers = []
    x = "X"
    if inputs is not None:
        nodes += [
            _constant_tensor("X_center", inputs.center, dtype),
            _constant_tensor("X_scale", inputs.scale, dtype),
            make.make_node("Sub", [x, "X_center"], ["X_centered"], name="center_X"),
            make.make_node("Div", ["X_centered", "X_scale"], ["X_scaled"], name="scale_X"),
        ]
        x = "X_scaled"
    for i, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        bound = np.sqrt(6 / (fan_in + fan_out)) if len(sizes) > 2 else 0.0
        w = f"coefficients_{i}"
        b = f"intercepts_{i}"
        last = i == len(sizes) - 2
        total = "predictions" if last and outputs is None else f"sums_{i}"
        coefficients = random.uniform(-bound, bound, (fan_in, fan_out))
        initializers.append(onnx.numpy_helper.from_array(coefficients.astype(dtype), w))
        initializers.append(onnx.numpy_helper.from_array(np.zeros(fan_out, dtype), b))
        nodes.append(make.make_node("MatMul", [x, w], [f"products_{i}"], name=f"product_{i}"))
        nodes.append(make.make_node("Add", [f"products_{i}", b], [total], name=f"sum_{i}"))
        if not last:
            x = f"hidden_{i}"
            nodes.append(make.make_node("Relu", [total], [x], name=f"relu_{i}"))
    if outputs is not None:
        nodes += [
            _constant_tensor("y_center", outputs.center, dtype),
            _constant_tensor("y_scale", outputs.scale, dtype),
            make.make_node("Mul", [total, "y_scale"], ["y_scaled"], name="scale_y"),
            make.make_node("Add", ["y_scaled", "y_center"], ["predictions"], name="center_y"),
        ]
    features = make.make_tensor_value_info("X", elem_type, ["batch", sizes[0]])
    predictions = make.make_tensor_value_info("predictions", elem_type, ["batch", sizes[-1]])
    graph = make.make_graph(nodes, NETWORK, [features], [predictions], initializers)
    return make.make_model(
        graph, opset_imports=[make.make_opsetid("", 17)], ir_version=8, producer_name=PRODUCER
    )


def _constant_tensor(name: str, values: npt.NDArray[Any], dtype: np.dtype[Any]) -> onnx.NodeProto:
    tensor = onnx.numpy_helper.from_array(values.astype(dtype), name)
    return make.make_node("Constant", [], [name], name=f"constant_{name}", value=tensor)
