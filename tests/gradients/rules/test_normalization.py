"""Normalizations that onnxruntime fuses, against torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxfit import gradient_model

HIDDEN, EPSILON = 16, 1e-3
SHAPES = {"x": (2, 3, HIDDEN), "k": (2, 3, HIDDEN), "g": (HIDDEN,), "b": (HIDDEN,), "c": (HIDDEN,)}


def rms_norm(torch: Any, x: Any, g: Any) -> Any:
    return torch.nn.functional.rms_norm(x, (HIDDEN,), g, EPSILON)


def layer_norm(torch: Any, x: Any, g: Any, b: Any) -> Any:
    return torch.nn.functional.layer_norm(x, (HIDDEN,), g, b, EPSILON)


MS = "com.microsoft."
# node -> the outputs y and z by torch
EXPECTED = {
    "y = SimplifiedLayerNormalization<axis=-1, epsilon=0.001, stash_type=1>(x, g)": (
        lambda torch, x, g: (rms_norm(torch, x, g),)
    ),
    f"y, m, i, z = {MS}SkipSimplifiedLayerNormalization<epsilon=0.001>(x, k, g)": (
        lambda torch, x, k, g: (rms_norm(torch, x + k, g), x + k)
    ),
    f"y, m, i, z = {MS}SkipSimplifiedLayerNormalization<epsilon=0.001>(x, k, g, c)": (
        lambda torch, x, k, g, c: (rms_norm(torch, x + k + c, g), x + k + c)
    ),
    f"y, m, i, z = {MS}SkipLayerNormalization<epsilon=0.001>(x, k, g, b)": (
        lambda torch, x, k, g, b: (layer_norm(torch, x + k, g, b), x + k)
    ),
    f"y, m, i, z = {MS}SkipLayerNormalization<epsilon=0.001>(x, k, g, b, c)": (
        lambda torch, x, k, g, b, c: (layer_norm(torch, x + k + c, g, b), x + k + c)
    ),
}


@pytest.mark.torch
@pytest.mark.parametrize("node", EXPECTED)
def test_outputs_and_gradients_are_those_of_torch(node: str) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    names = node.split("(")[1].rstrip(")").split(", ")
    feeds = {name: rng.normal(size=SHAPES[name]).astype(np.float32) for name in names}
    inputs = ", ".join(f"float[{','.join(map(str, SHAPES[n]))}] {n}" for n in names)
    outputs = [name for name in "yz" if name in node.split("=")[0]]
    declared = ", ".join(f"float[2,3,{HIDDEN}] {name}" for name in outputs)
    given = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 21, "com.microsoft": 1]> g ({inputs}) => ({declared})'
        f" {{ {node} }}"
    )
    written = gradient_model(given, names, gradient="onnx")
    session = onnxruntime.InferenceSession(
        written.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    arriving = {f"{n}_grad": rng.normal(size=(2, 3, HIDDEN)).astype(np.float32) for n in outputs}
    results = session.run(None, {**feeds, **arriving})
    found = dict(zip([o.name for o in session.get_outputs()], results))

    leaves = {n: torch.tensor(a, dtype=torch.float64, requires_grad=True) for n, a in feeds.items()}
    expected = EXPECTED[node](torch, **leaves)
    sum(
        (y * torch.tensor(arriving[f"{name}_grad"])).sum() for name, y in zip(outputs, expected)
    ).backward()
    for name, y in zip(outputs, expected):
        np.testing.assert_allclose(found[name], y.detach().numpy(), rtol=1e-5, atol=1e-5)
    for name, leaf in leaves.items():
        np.testing.assert_allclose(found[f"{name}_grad"], leaf.grad, rtol=1e-4, atol=1e-5)
