"""The untrained models of the examples: plain ONNX with random weights, as exporters write it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

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


def decoder(
    vocabulary: int, layers: int = 2, heads: int = 4, head_size: int = 16, seed: int = 0
) -> onnx.ModelProto:
    """A language model that decodes with caches, in the nodes and names that onnxruntime-genai's
    builder writes for a Llama: rotary attention, RMS norms, and a gated MLP.
    """
    width, positions = heads * head_size, 64
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {"one": np.array([1]), "axis": np.array(1)}
    angles = np.arange(positions)[:, None] / 100.0 ** (np.arange(head_size // 2) * 2 / head_size)
    arrays |= {"cos": np.cos(angles), "sin": np.sin(angles)}
    nodes, inputs, outputs = [], [], []

    def node(op_type: str, names: str, y: str, **attributes: Any) -> str:
        domain = "com.microsoft" if op_type == "GroupQueryAttention" else ""
        names_in = ["" if name == "-" else name for name in names.split()]
        nodes.append(helper.make_node(op_type, names_in, y.split(), domain=domain, **attributes))
        return y.split()[0]

    def product(x: str, module: str, rows: int, columns: int) -> str:
        arrays[f"{module}.weight"] = rng.normal(0, rows**-0.5, (rows, columns))
        return node("MatMul", f"{x} {module}.weight", f"{module}/y")

    def norm(x: str, module: str) -> str:
        arrays[f"{module}.weight"] = np.ones(width)
        return node("SimplifiedLayerNormalization", f"{x} {module}.weight", f"{module}/y", axis=-1)

    node("ReduceSum", "attention_mask one", "lengths", keepdims=0)
    node("Sub", "lengths one", "last")
    last = node("Cast", "last", "last/int32", to=TensorProto.INT32)
    node("Shape", "attention_mask", "sizes")
    node("Gather", "sizes axis", "total")
    total = node("Cast", "total", "total/int32", to=TensorProto.INT32)
    arrays["embed_tokens.weight"] = rng.normal(size=(vocabulary, width))
    x = node("Gather", "embed_tokens.weight input_ids", "embed_tokens/y")
    for i in range(layers):
        kinds = ("key", "value")
        past = " ".join(f"past_key_values.{i}.{kind}" for kind in kinds)
        present = " ".join(f"present.{i}.{kind}" for kind in kinds)
        for values, names, length in ((inputs, past, "past"), (outputs, present, "total")):
            shape = ["batch", heads, length, head_size]
            values += [
                helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
                for name in names.split()
            ]
        layer = f"layers.{i}"
        qkv = product(norm(x, f"{layer}.input_norm"), f"{layer}.qkv_proj", width, 3 * width)
        attended = node(
            "GroupQueryAttention",
            f"{qkv} - - {past} {last} {total} cos sin",
            f"{layer}.attention {present}",
            num_heads=heads,
            kv_num_heads=heads,
            do_rotary=1,
        )
        x = node("Add", f"{x} {product(attended, f'{layer}.o_proj', width, width)}", f"{layer}/x")
        h = norm(x, f"{layer}.mlp_norm")
        gate = product(h, f"{layer}.gate_proj", width, 2 * width)
        node("Mul", f"{gate} {node('Sigmoid', gate, f'{layer}/sigmoid')}", f"{layer}/silu")
        up = product(h, f"{layer}.up_proj", width, 2 * width)
        hidden = node("Mul", f"{layer}/silu {up}", f"{layer}/hidden")
        x = node(
            "Add", f"{x} {product(hidden, f'{layer}.down_proj', 2 * width, width)}", f"{layer}/y"
        )
    product(norm(x, "norm"), "lm_head", width, vocabulary)
    nodes[-1].output[0] = "logits"
    text = [("input_ids", "tokens"), ("attention_mask", "total")]
    inputs[:0] = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", length])
        for name, length in text
    ]
    logits = ["batch", "tokens", vocabulary]
    outputs[:0] = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, logits)]
    tensors = [
        numpy_helper.from_array(
            array.astype(np.float32) if array.dtype.kind == "f" else array, name
        )
        for name, array in arrays.items()
    ]
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "decoder", inputs, outputs, tensors)
    return helper.make_model(graph, opset_imports=imports, ir_version=10)
