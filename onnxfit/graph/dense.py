"""A network of dense layers, for data that come without a model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
import onnx.helper as make


def dense_network(sizes: Sequence[int], dtype: np.dtype[Any], seed: int) -> onnx.ModelProto:
    """Return dense layers of these sizes, from features to outputs, with ReLU between them.

    The weights of layer i are `coefficients_<i>`, shape `(inputs, outputs)`, and
    `intercepts_<i>`. A single layer begins at 0; otherwise coefficients are uniform at random
    (Glorot and Bengio 2010), drawn from `seed`. The input is `X`, the output `predictions`.
    """
    random = np.random.default_rng(seed)
    elem_type = make.np_dtype_to_tensor_dtype(dtype)
    nodes = []
    initializers = []
    x = "X"
    for i, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        bound = np.sqrt(6 / (fan_in + fan_out)) if len(sizes) > 2 else 0.0
        w = f"coefficients_{i}"
        b = f"intercepts_{i}"
        last = i == len(sizes) - 2
        total = "predictions" if last else f"sums_{i}"
        coefficients = random.uniform(-bound, bound, (fan_in, fan_out))
        initializers.append(onnx.numpy_helper.from_array(coefficients.astype(dtype), w))
        initializers.append(onnx.numpy_helper.from_array(np.zeros(fan_out, dtype), b))
        nodes.append(make.make_node("MatMul", [x, w], [f"products_{i}"], name=f"product_{i}"))
        nodes.append(make.make_node("Add", [f"products_{i}", b], [total], name=f"sum_{i}"))
        if not last:
            x = f"hidden_{i}"
            nodes.append(make.make_node("Relu", [total], [x], name=f"relu_{i}"))
    inputs = [make.make_tensor_value_info("X", elem_type, ["batch", sizes[0]])]
    outputs = [make.make_tensor_value_info("predictions", elem_type, ["batch", sizes[-1]])]
    graph = make.make_graph(nodes, "network", inputs, outputs, initializers)
    return make.make_model(
        graph, opset_imports=[make.make_opsetid("", 17)], ir_version=8, producer_name="onnxfit"
    )
