"""Operators of com.microsoft without a kernel for the CPU, against their definitions in numpy."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxfit import gradient_model


def gelu(x: np.ndarray) -> np.ndarray:
    return (0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))).astype(np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


A, B = (
    np.random.default_rng(i).normal(size=shape).astype(np.float32)
    for i, shape in enumerate([(2, 3, 4, 4), (3, 4, 4)])
)
EXPECTED = {
    "BiasAdd(a, c, a)": A + B[0, 0] + A,
    "BiasSplitGelu(a, c)": (A + B[0, 0])[..., :2] * gelu((A + B[0, 0])[..., 2:]),
    "BiasSoftmax<axis=3, is_inner_broadcast=0>(a, b)": softmax(A + B),
    "BiasSoftmax<axis=2, is_inner_broadcast=0>(a, b)": (
        softmax((A + B).reshape(2, 3, 16)).reshape(A.shape)
    ),
    "BiasSoftmax<axis=-1, is_inner_broadcast=1>(a, d)": softmax(A + A[:, :1, :1]),
}


@pytest.mark.parametrize("node", EXPECTED)
def test_the_simpler_form_is_the_definition(node: str) -> None:
    inputs = "float[2,3,4,4] a, float[3,4,4] b, float[4] c, float[2,1,1,4] d"
    imports, last = '"": 21, "com.microsoft": 1', EXPECTED[node].shape[-1]
    text = (
        f"<ir_version: 8, opset_import: [{imports}]> g ({inputs}) => (float[2,3,4,{last}] y) {{ y ="
        f" com.microsoft.{node} }}"
    )
    written = gradient_model(onnx.parser.parse_model(text), ["a"], gradient="onnx")
    session = onnxruntime.InferenceSession(
        written.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    feeds = {
        "a": A,
        "b": B,
        "c": B[0, 0],
        "d": A[:, :1, :1],
        "y_grad": np.ones_like(EXPECTED[node]),
    }
    np.testing.assert_allclose(session.run(["y"], feeds)[0], EXPECTED[node], atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 3), (2, 3, 3)])
def test_the_gradient_of_an_inverse(shape: tuple[int, ...]) -> None:
    """dX = -Y' dY Y', with Y by numpy in double precision."""
    x = np.random.default_rng(2).normal(size=shape).astype(np.float32) + 3 * np.eye(
        3, dtype=np.float32
    )
    dy = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    sizes = ",".join(map(str, shape))
    imports = '"": 21, "com.microsoft": 1'
    text = (
        f"<ir_version: 8, opset_import: [{imports}]> g (float[{sizes}] x) => (float[{sizes}] y) {{"
        " y = com.microsoft.Inverse(x) }"
    )
    written = gradient_model(onnx.parser.parse_model(text), ["x"], gradient="onnx")
    session = onnxruntime.InferenceSession(
        written.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    turned = np.linalg.inv(x.astype(np.float64)).swapaxes(-1, -2)
    np.testing.assert_allclose(
        session.run(["x_grad"], {"x": x, "y_grad": dy})[0],
        -turned @ dy @ turned,
        rtol=1e-4,
        atol=1e-5,
    )
