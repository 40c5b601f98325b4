"""Operators of opset 23 and later beside the functions of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

from onnxfit import gradient_model
from onnxfit.load.newer_operators import PREVIEW
from onnxfit.load.runtime_support import newest_opset
from tests.gradients.rules.cases import Arrays, runner

torch = pytest.importorskip("torch")
F = torch.nn.functional

# Name -> inputs, constants, body, opset, and the same function in PyTorch.
Compared = tuple[str, str, str, int, Callable[..., Any]]
COMPARED: dict[str, Compared] = {
    "CumProd": ("a[2,5]", "int64 x = {1}", "y = CumProd(a, x)", 26, lambda a: a.cumprod(1)),
    "CumProd with zeros": (
        "a[3,5]",
        "int64 x = {1}, float[3,5] m = {1, 0, 1, 1, 1, 0, 1, 0, 1, 1, 0, 0, 0, 1, 1}",
        "b = Mul(a, m) y = CumProd(b, x)",
        26,
        lambda a: (a * torch.tensor([[1.0, 0, 1, 1, 1], [0, 1, 0, 1, 1], [0, 0, 0, 1, 1]])).cumprod(
            1
        ),
    ),
    "Swish": ("a[2,3]", "", "y = Swish(a)", 24, F.silu),
    "SwiGLU": ("a[2,3], b[2,3]", "", "y = SwiGLU(a, b)", 28, lambda a, b: F.silu(a) * b),
    "RMSNormalization": (
        "a[2,3,4], s[4]",
        "",
        "y = RMSNormalization<epsilon = 1e-3>(a, s)",
        23,
        lambda a, s: F.rms_norm(a, (4,), s, 1e-3),
    ),
    "Attention": (
        "q[2,4,3,8], k[2,2,5,8], v[2,2,5,6]",
        "",
        "y = Attention(q, k, v)",
        23,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    ),
    "Attention, causal": (
        "q[2,2,5,8], k[2,2,5,8], v[2,2,5,6]",
        "",
        "y = Attention<is_causal = 1>(q, k, v)",
        24,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    ),
    "FlexAttention": (
        "q[2,4,3,8], k[2,2,5,8], v[2,2,5,6], m[3,5]",
        "",
        f"y = {PREVIEW}.FlexAttention<score_mod = f (float[2,4,3,5] s) => (t) {{ t = Add(s, m) }}>"
        "(q, k, v)",
        21,
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, enable_gqa=True),
    ),
    "CausalConvWithState": (
        "a[2,3,5], w[3,1,4], b[3]",
        "",
        'y, s = CausalConvWithState<activation = "silu">(a, w, b)',
        27,
        lambda a, w, b: F.silu(F.conv1d(F.pad(a, (3, 0)), w, b, groups=3)),
    ),
    "LinearAttention": (
        "q[1,3,4], k[1,3,4], v[1,3,4], g[1,3,2], b[1,3,2]",
        "",
        "y, s = LinearAttention<q_num_heads = 2, kv_num_heads = 2>(q, k, v, , g, b)",
        27,
        lambda *arrays: gated_delta(*arrays),
    ),
}


def gated_delta(q: Any, k: Any, v: Any, decay: Any, beta: Any) -> Any:
    """The recurrence as the documentation of LinearAttention writes it; two heads of width 2."""
    q, k, v = (x.reshape(3, 2, 2) for x in (q, k, v))
    state, outputs = torch.zeros(2, 2, 2), []
    for t in range(3):
        state = state * decay[0, t, :, None, None].exp()
        read = torch.einsum("hkv,hk->hv", state, k[t])
        written = beta[0, t, :, None] * (v[t] - read)
        state = state + torch.einsum("hk,hv->hkv", k[t], written)
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]) / 2**0.5)
    return torch.stack(outputs).reshape(1, 3, 4)


def of_torch(function: Callable[..., Any], feeds: Arrays, dy: np.ndarray) -> Arrays:
    tensors = {name: torch.tensor(a, requires_grad=True) for name, a in feeds.items()}
    y = function(*tensors.values())
    y.backward(torch.tensor(dy))
    return {"y": y.detach().numpy()} | {f"{n}_grad": t.grad.numpy() for n, t in tensors.items()}


def is_here(name: str) -> bool:
    if name == "FlexAttention":
        return onnx.defs.has(name, PREVIEW)
    return COMPARED[name][3] <= newest_opset()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.skipif(not is_here(n), reason="newer than the runtime"))
        for n in COMPARED
    ],
)
def test_values_and_gradients_are_those_of_torch(name: str) -> None:
    inputs, constants, body, opset, function = COMPARED[name]
    declared = ", ".join(f"float{i[1:]} {i[0]}" for i in inputs.split(", "))
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": {opset}, "{PREVIEW}": 1]> g ({declared}) => (y)'
        f" <{constants}> {{ {body} }}"
    )
    rng = np.random.default_rng(0)
    feeds = {
        v.name: rng.normal(size=[d.dim_value for d in v.type.tensor_type.shape.dim])
        for v in model.graph.input
    }
    feeds = {n: a.astype(np.float32) for n, a in feeds.items()}
    written = gradient_model(model, list(feeds), gradient="onnx")
    shape = [d.dim_value for d in written.graph.output[0].type.tensor_type.shape.dim]
    dy = rng.normal(size=shape).astype(np.float32)
    found = runner(written, "onnxruntime")(feeds | {"y_grad": dy})
    for key, expected in of_torch(function, feeds, dy).items():
        np.testing.assert_allclose(found[key], expected, rtol=1e-4, atol=1e-5, err_msg=key)
