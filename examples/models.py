"""The untrained models of the examples: plain ONNX with random weights, as exporters write it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def dense(*sizes: int, names: Sequence[str] | None = None, seed: int = 0) -> onnx.ModelProto:
    """`x: float[batch, sizes[0]]`, Gemm, Relu, ..., Gemm, `y: float[batch, sizes[-1]]`; weights
    fc1.weight, fc1.bias, ...
    """
    names = names or [f"fc{i}" for i in range(1, len(sizes))]
    nodes, shapes = [], {}
    here = "x"
    for name, size_in, size_out in zip(names, sizes, sizes[1:]):
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (size_out, size_in), (size_out,)
        last = name == names[-1]
        there = "y" if last else f"{name}.sum"
        nodes.append(
            helper.make_node(
                "Gemm", [here, f"{name}.weight", f"{name}.bias"], [there], name=name, transB=1
            )
        )
        if not last:
            here = f"{name}.out"
            nodes.append(helper.make_node("Relu", [there], [here], name=f"{name}.relu"))
    return _model(
        "dense", nodes, shapes, {"x": ("batch", sizes[0])}, {"y": ("batch", sizes[-1])}, seed
    )


def convolutional(seed: int = 0) -> onnx.ModelProto:
    """Two 3x3 convolutions, a pooling and a linear layer:

    `image: float[batch, 1, 8, 8]` -> `logits: float[batch, 10]`.
    """
    node = helper.make_node
    same = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    nodes = [
        node("Conv", ["image", "conv1.weight", "conv1.bias"], ["conv1.sum"], name="conv1", **same),
        node("Relu", ["conv1.sum"], ["conv1.out"], name="conv1.relu"),
        node(
            "Conv", ["conv1.out", "conv2.weight", "conv2.bias"], ["conv2.sum"], name="conv2", **same
        ),
        node("Relu", ["conv2.sum"], ["conv2.out"], name="conv2.relu"),
        node(
            "MaxPool", ["conv2.out"], ["pooled"], name="pool", kernel_shape=[2, 2], strides=[2, 2]
        ),
        node("Flatten", ["pooled"], ["features"], name="flatten"),
        node("Gemm", ["features", "fc.weight", "fc.bias"], ["logits"], name="fc", transB=1),
    ]
    shapes = {
        "conv1.weight": (16, 1, 3, 3),
        "conv1.bias": (16,),
        "conv2.weight": (32, 16, 3, 3),
        "conv2.bias": (32,),
        "fc.weight": (10, 32 * 4 * 4),
        "fc.bias": (10,),
    }
    return _model(
        "digits", nodes, shapes, {"image": ("batch", 1, 8, 8)}, {"logits": ("batch", 10)}, seed
    )


def with_unequal_channels(model: onnx.ModelProto, largest: float, seed: int = 0) -> onnx.ModelProto:
    """Return `convolutional` with channels of different size, and the same results.

    Each channel of a convolution is multiplied by a number from 1 / `largest` to 1, and the weights
    that read it are divided by the number: Relu and MaxPool pass positive factors on. Networks with
    BatchNormalization have channels like these once it is folded into the convolutions (Nagel et
    al. 2019, arXiv:1906.04721).
    """
    rng = np.random.default_rng(seed)
    weights = {t.name: numpy_helper.to_array(t).copy() for t in model.graph.initializer}
    for layer, reader in (("conv1", "conv2"), ("conv2", "fc")):
        channels = len(weights[f"{layer}.bias"])
        factors = rng.permutation(np.geomspace(1 / largest, 1, channels)).astype(np.float32)
        weights[f"{layer}.weight"] *= factors[:, None, None, None]
        weights[f"{layer}.bias"] *= factors
        read = weights[f"{reader}.weight"]
        by_channel = read.reshape(len(read), channels, -1) / factors[:, None]
        weights[f"{reader}.weight"] = by_channel.reshape(read.shape)
    unequal = onnx.ModelProto()
    unequal.CopyFrom(model)
    for tensor in unequal.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(weights[tensor.name], tensor.name))
    return unequal


def two_headed(seed: int = 0) -> onnx.ModelProto:
    """One hidden layer and two outputs:

    `x: float[batch, 4]` -> `position: float[batch, 2]` and `side: float[batch, 2]`.
    """
    node = helper.make_node
    nodes = [
        node("Gemm", ["x", "trunk.weight", "trunk.bias"], ["trunk.sum"], name="trunk", transB=1),
        node("Tanh", ["trunk.sum"], ["trunk.out"], name="trunk.tanh"),
        node(
            "Gemm",
            ["trunk.out", "position.weight", "position.bias"],
            ["position"],
            name="position",
            transB=1,
        ),
        node("Gemm", ["trunk.out", "side.weight", "side.bias"], ["side"], name="side", transB=1),
    ]
    shapes = {"trunk.weight": (32, 4), "trunk.bias": (32,)}
    for head in ("position", "side"):
        shapes |= {f"{head}.weight": (2, 32), f"{head}.bias": (2,)}
    return _model(
        "two_headed",
        nodes,
        shapes,
        {"x": ("batch", 4)},
        {"position": ("batch", 2), "side": ("batch", 2)},
        seed,
    )


def _model(
    name: str,
    nodes: list[onnx.NodeProto],
    weights: dict[str, tuple[int, ...]],
    inputs: dict[str, tuple[str | int, ...]],
    outputs: dict[str, tuple[str | int, ...]],
    seed: int,
) -> onnx.ModelProto:
    rng = np.random.default_rng(seed)
    initializers = []
    for weight, shape in weights.items():
        # He et al. 2015; biases start at 0
        deviation = math.sqrt(2 / math.prod(shape[1:])) if len(shape) > 1 else 0.0
        initializers.append(
            numpy_helper.from_array(
                (deviation * rng.standard_normal(shape)).astype(np.float32), weight
            )
        )
    graph = helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info(k, TensorProto.FLOAT, shape) for k, shape in inputs.items()],
        [
            helper.make_tensor_value_info(k, TensorProto.FLOAT, shape)
            for k, shape in outputs.items()
        ],
        initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return model
