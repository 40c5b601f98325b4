"""Files with packed weights, made by hand: layers of MatMulNBits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from onnx import helper
from onnx.numpy_helper import from_array, to_array
from packaging.version import Version

Array = npt.NDArray[Any]
K, N, BLOCK = 40, 6, 16  # the last block has 8 numbers
BLOCKS = 3
IS_LATER = Version(onnxruntime.__version__) >= Version("1.22")  # has kernels for 8 bits
later = pytest.mark.skipif(
    not IS_LATER, reason=f"onnxruntime {onnxruntime.__version__} has no such kernel"
)
ZEROS = ("absent", "packed", "float")
FORMS = [
    *((4, zeros) for zeros in ZEROS),
    *(pytest.param(8, zeros, marks=later) for zeros in ("absent", "packed")),
]


def unpacked(packed: Array, bits: int) -> Array:
    """The numbers of the bytes, along the last axis; by loops, for all to see."""
    numbers = np.zeros((*packed.shape[:-1], packed.shape[-1] * 8 // bits), np.int64)
    per_byte = 8 // bits
    for i in range(numbers.shape[-1]):
        byte = packed[..., i // per_byte].astype(np.int64)
        numbers[..., i] = byte // 2 ** (bits * (i % per_byte)) % 2**bits
    return numbers


def spread(per_block: Array) -> Array:
    """Numbers of blocks, (N, BLOCKS), for each element of a weight, (K, N)."""
    return np.repeat(per_block.reshape(N, BLOCKS), BLOCK, axis=1)[:, :K].T


def packed_file(
    bits: int = 4, zeros: str = "absent", *, flat: bool = False, seed: int = 0, **attributes: int
) -> onnx.ModelProto:
    """y = x @ (s (q - z)) + b, with the packed weight q.

    - `flat`: scales and zero points have one dimension, as onnxruntime 1.19 writes them.
    """
    rng = np.random.default_rng(seed)
    step = 2 / 2**bits
    scale = (step * rng.uniform(0.5, 1.5, (N, BLOCKS)) * rng.choice([-1, 1], (N, BLOCKS))).astype(
        np.float32
    )
    arrays = {
        "q": rng.integers(0, 256, (N, BLOCKS, BLOCK * bits // 8)).astype(np.uint8),
        "s": scale,
        "b": rng.normal(size=N).astype(np.float32),
    }
    middle = 2 ** (bits - 1)
    if zeros == "packed":
        arrays["z"] = rng.integers(0, 256, (N, -(-BLOCKS * bits // 8))).astype(np.uint8)
    elif zeros == "float":
        arrays["z"] = rng.uniform(middle - 2, middle + 2, (N, BLOCKS)).astype(np.float32)
    for name in ("s", "z") if flat else ():
        if name in arrays:
            arrays[name] = arrays[name].reshape(-1)
    inputs = ["x", "q", "s", "z" if "z" in arrays else "", "", "b"]
    node = helper.make_node(
        "MatMulNBits", inputs, ["y"], name="multiply", domain="com.microsoft", K=K, N=N,
        block_size=BLOCK, bits=bits, **attributes,
    )  # fmt: skip
    graph = helper.make_graph(
        [node],
        "packed",
        [helper.make_tensor_value_info("x", 1, ["batch", K])],
        [helper.make_tensor_value_info("y", 1, ["batch", N])],
        [from_array(array, name) for name, array in arrays.items()],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def arrays_of(model: onnx.ModelProto) -> dict[str, Array]:
    return {tensor.name: to_array(tensor) for tensor in model.graph.initializer}


def zero_points_of(model: onnx.ModelProto, bits: int) -> Array:
    """The zero points, one for each element of the weight, in float64."""
    zeros = arrays_of(model).get("z")
    if zeros is None:
        return np.full((K, N), 2.0 ** (bits - 1))
    if zeros.dtype == np.uint8:
        zeros = unpacked(zeros.reshape(N, -1), bits)[:, :BLOCKS]
    return spread(zeros).astype(np.float64)


def real_numbers(model: onnx.ModelProto, bits: int) -> Array:
    """The weight of the file, in float64."""
    arrays = arrays_of(model)
    q = unpacked(arrays["q"], bits).reshape(N, -1)[:, :K].T
    return spread(arrays["s"]).astype(np.float64) * (q - zero_points_of(model, bits))
