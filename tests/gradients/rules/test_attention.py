"""Attention as onnxruntime fuses it, against torch; and what of it is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxfit import gradient_model
from onnxfit.errors import GradientError
from tests.gradients.rules.cases import Arrays

HEADS, SIZE = 2, 4
HIDDEN = HEADS * SIZE


def model(
    inputs: str, body: str, constants: str = "", outputs: str = "float[B,3,8] y"
) -> onnx.ModelProto:
    imports = '"": 21, "com.microsoft": 1'
    text = (
        f"<ir_version: 8, opset_import: [{imports}]> g ({inputs}) => ({outputs}) <{constants}> {{"
        f" {body} }}"
    )
    return onnx.parser.parse_model(text)


def results(of: onnx.ModelProto, feeds: Arrays) -> Arrays:
    session = onnxruntime.InferenceSession(
        of.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds)))


def random(**shapes: tuple[int, ...]) -> Arrays:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def by_torch(torch: Any, feeds: Arrays, function: Any) -> Arrays:
    """The output and the gradients of sum(output * y_grad)."""
    leaves = {n: torch.tensor(a, requires_grad=True) for n, a in feeds.items() if n != "y_grad"}
    y = function(**leaves)
    (y * torch.tensor(feeds["y_grad"])).sum().backward()
    return {"y": y.detach().numpy(), **{f"{n}_grad": v.grad.numpy() for n, v in leaves.items()}}


def agree(found: Arrays, expected: Arrays) -> None:
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5, err_msg=name)


def by_head(x: Any) -> Any:
    return x.reshape(x.shape[0], x.shape[1], HEADS, -1).transpose(1, 2)


@pytest.mark.torch
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_it_is_torchs_scaled_dot_product_attention(causal: bool, masked: bool) -> None:
    torch = pytest.importorskip("torch")
    feeds = random(q=(2, 3, HIDDEN), k=(2, 3, HIDDEN), v=(2, 3, HIDDEN), y_grad=(2, 3, HIDDEN))
    shown = np.array([[1, 1, 0], [1, 0, 1]], np.int32)
    body = (
        f"y = com.microsoft.MultiHeadAttention<num_heads={HEADS}, unidirectional={int(causal)}>(q,"
        f" k, v{', , m' if masked else ''})"
    )
    given = model(
        "float[B,3,8] q, float[B,3,8] k, float[B,3,8] v",
        body,
        "int32[2,3] m = {1,1,0,1,0,1}" if masked else "",
    )

    def attention(q: Any, k: Any, v: Any) -> Any:
        mask = (
            torch.ones(2, 1, 3, 3, dtype=torch.bool).tril()
            if causal
            else torch.ones(2, 1, 3, 3, dtype=torch.bool)
        )
        if masked:
            mask = mask & torch.tensor(shown, dtype=torch.bool)[:, None, None, :]
        y = torch.nn.functional.scaled_dot_product_attention(
            by_head(q), by_head(k), by_head(v), attn_mask=mask
        )
        return y.transpose(1, 2).reshape(2, 3, HIDDEN)

    agree(results(gradient_model(given, gradient="onnx"), feeds), by_torch(torch, feeds, attention))


@pytest.mark.torch
def test_it_is_torchs_multi_head_attention() -> None:
    torch = pytest.importorskip("torch")
    feeds = random(x=(2, 3, HIDDEN), w=(HIDDEN, 3 * HIDDEN), b=(3 * HIDDEN,), y_grad=(2, 3, HIDDEN))
    body = f"y = com.microsoft.Attention<num_heads={HEADS}>(x, w, b)"
    given = model(
        f"float[B,3,{HIDDEN}] x, float[{HIDDEN},{3 * HIDDEN}] w, float[{3 * HIDDEN}] b", body
    )

    def attention(x: Any, w: Any, b: Any) -> Any:
        y, _ = torch.nn.functional.multi_head_attention_forward(
            x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1), HIDDEN, HEADS, w.T, b, None, None, False, 0.0,
            torch.eye(HIDDEN), torch.zeros(HIDDEN), need_weights=False,
        )  # fmt: skip
        return y.transpose(0, 1)

    agree(results(gradient_model(given, gradient="onnx"), feeds), by_torch(torch, feeds, attention))


@pytest.mark.torch
@pytest.mark.parametrize("packed", ["q", "k"])
def test_packed_heads_which_no_cpu_kernel_takes(packed: str) -> None:
    torch = pytest.importorskip("torch")
    feeds = random(
        q=(2, 3, HEADS, 3, SIZE) if packed == "q" else (2, 3, HIDDEN), y_grad=(2, 3, HIDDEN)
    )
    inputs, names = f"float[2,3,{HEADS},3,{SIZE}] q", "q"
    if packed == "k":
        feeds |= random(k=(2, 5, HEADS, 2, SIZE))
        inputs, names = f"float[2,3,{HIDDEN}] q, float[2,5,{HEADS},2,{SIZE}] k", "q, k"

    def attention(q: Any, k: Any = None) -> Any:
        parts = q.unbind(3) if k is None else (q.reshape(2, 3, HEADS, SIZE), *k.unbind(3))
        y = torch.nn.functional.scaled_dot_product_attention(*(p.transpose(1, 2) for p in parts))
        return y.transpose(1, 2).reshape(2, 3, HIDDEN)

    given = model(inputs, f"y = com.microsoft.MultiHeadAttention<num_heads={HEADS}>({names})")
    agree(results(gradient_model(given, gradient="onnx"), feeds), by_torch(torch, feeds, attention))


@pytest.mark.torch
def test_grouped_queries_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    feeds = random(q=(1, 3, 32), k=(1, 3, 16), v=(1, 3, 16), y_grad=(1, 3, 32))
    body = (
        "y, r, t = com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads=2>(q, k, v, , ,"
        " l, n)"
    )
    given = model(
        "float[1,3,32] q, float[1,3,16] k, float[1,3,16] v",
        body,
        "int32[1] l = {2}, int32 n = {3}",
        "float[1,3,32] y",
    )

    def attention(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.reshape(1, 3, -1, 8).transpose(1, 2) for x in (q, k, v))
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        return y.transpose(1, 2).reshape(1, 3, 32)

    agree(results(gradient_model(given, gradient="onnx"), feeds), by_torch(torch, feeds, attention))


@pytest.mark.torch
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("window", "softcap"), [(-1, 0.0), (2, 0.0), (-1, 0.7), (2, 0.7)])
def test_grouped_queries_as_language_models_have_them(
    interleaved: bool, window: int, softcap: float
) -> None:
    """Packed queries, keys and values, rotary positions, a window, capped scores and padding."""
    torch = pytest.importorskip("torch")
    heads, groups, size, length = 4, 2, 8, 5
    feeds = random(x=(2, length, (heads + 2 * groups) * size), y_grad=(2, length, heads * size))
    feeds["y_grad"][1, 3:] = 0  # tokens of padding have no loss
    angles = np.random.default_rng(1).uniform(-3, 3, (7, size // 2)).astype(np.float32)
    settings = f"num_heads={heads}, kv_num_heads={groups}, do_rotary=1, softcap={softcap}"
    settings += f", local_window_size={window}, rotary_interleaved={int(interleaved)}"
    given = model(
        f"float[B,{length},64] x",
        f"y, r, t = com.microsoft.GroupQueryAttention<{settings}>(x, , , , , l, n, c, s)",
        f"int32[2] l = {{4,2}}, int32 n = {{{length}}}",
        f"float[B,{length},32] y",
    )
    for name, table in (("c", np.cos(angles)), ("s", np.sin(angles))):
        given.graph.initializer.append(onnx.numpy_helper.from_array(table, name))

    def attention(x: Any) -> Any:
        turn = torch.polar(torch.tensor(1.0), torch.tensor(angles[:length]))
        packed = x.reshape(2, length, heads + 2 * groups, size).transpose(1, 2)
        q, k, v = packed.split([heads, groups, groups], dim=1)

        def turned(h: Any) -> Any:
            pairs = h.unflatten(-1, (-1, 2)) if interleaved else h.unflatten(-1, (2, -1)).mT
            result = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
            return (result if interleaved else result.mT).flatten(-2)

        k, v = (h.repeat_interleave(heads // groups, dim=1) for h in (turned(k), v))
        scores = turned(q) @ k.mT / size**0.5
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        shown = torch.ones(length, length, dtype=torch.bool).tril()
        if window > 0:
            shown &= torch.ones(length, length, dtype=torch.bool).triu(1 - window)
        weights = scores.masked_fill(~shown, -torch.inf).softmax(-1)
        y = (weights @ v).transpose(1, 2).flatten(2)
        return y * torch.tensor([[1.0] * 5, [1.0] * 3 + [0.0] * 2])[:, :, None]

    found = results(gradient_model(given, ["x"], gradient="onnx"), feeds)
    found["y"][1, 3:] = 0
    agree(found, by_torch(torch, feeds, attention))


@pytest.mark.torch
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding_multiplies_by_a_complex_number(interleaved: bool) -> None:
    torch = pytest.importorskip("torch")
    angles = np.random.default_rng(1).uniform(-3, 3, (5, SIZE // 2)).astype(np.float32)
    feeds = random(x=(2, 3, HIDDEN), y_grad=(2, 3, HIDDEN))
    tables = [
        f"float[5,2] {n} = {{{', '.join(map(repr, f(angles).ravel().tolist()))}}}"
        for n, f in (("c", np.cos), ("s", np.sin))
    ]
    body = f"y = com.microsoft.RotaryEmbedding<interleaved={int(interleaved)}>(x, p, c, s)"
    given = model("float[B,3,8] x", body, ", ".join(["int64[2,3] p = {0,1,2,4,0,3}", *tables]))

    def embedding(x: Any) -> Any:
        turn = torch.polar(torch.tensor(1.0), torch.tensor(angles[[[0, 1, 2], [4, 0, 3]]]))[
            :, :, None
        ]
        pairs = (
            x.reshape(2, 3, HEADS, SIZE // 2, 2)
            if interleaved
            else x.reshape(2, 3, HEADS, 2, SIZE // 2).transpose(3, 4)
        )
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
        return (turned if interleaved else turned.transpose(3, 4)).reshape(2, 3, HIDDEN)

    agree(results(gradient_model(given, gradient="onnx"), feeds), by_torch(torch, feeds, embedding))


@pytest.mark.torch
def test_multi_head_attention_is_the_module_of_torch() -> None:
    """Keys and values of another length, biases, and a mask of padding; with torch's own
    projections around it.
    """
    torch = pytest.importorskip("torch")
    feeds = random(
        q=(2, 3, HIDDEN),
        k=(2, 5, HIDDEN),
        w=(3 * HIDDEN, HIDDEN),
        b=(3 * HIDDEN,),
        o=(HIDDEN, HIDDEN),
        y_grad=(2, 3, HIDDEN),
    )
    feeds["w"] *= 0.3  # sharper scores are noise in single precision
    body = """t = Transpose<perm=[1, 0]>(w) x, g, h = Split<axis=1, num_outputs=3>(t) a = MatMul(q, x) c = MatMul(k, g) d = MatMul(k, h)
        n = com.microsoft.MultiHeadAttention<num_heads=2>(a, c, d, b, m) r = Transpose<perm=[1, 0]>(o) y = MatMul(n, r)"""
    inputs = "float[B,3,8] q, float[B,5,8] k, float[24,8] w, float[24] b, float[8,8] o"
    given = model(inputs, body, "int32[2,5] m = {1,1,1,0,0,1,0,1,1,1}")

    def attention(q: Any, k: Any, w: Any, b: Any, o: Any) -> Any:
        padding = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 0, 0, 0]], dtype=torch.bool)
        y, _ = torch.nn.functional.multi_head_attention_forward(
            q.transpose(0, 1), k.transpose(0, 1), k.transpose(0, 1), HIDDEN, HEADS, w, b, None, None, False, 0.0, o, None,
            key_padding_mask=padding, need_weights=False,
        )  # fmt: skip
        return y.transpose(0, 1)

    agree(results(gradient_model(given, gradient="onnx"), feeds), by_torch(torch, feeds, attention))


def test_attention_may_lack_its_bias_which_crashes_onnxruntimes_kernel() -> None:
    feeds = random(x=(2, 3, HIDDEN), w=(HIDDEN, 3 * HIDDEN), y_grad=(2, 3, HIDDEN))
    zero = f"float[24] b = {{{', '.join(['0'] * 24)}}}"
    without, with_zero = (
        model(
            "float[B,3,8] x, float[8,24] w",
            f"y = com.microsoft.Attention<num_heads=2>({given})",
            constants,
        )
        for given, constants in (("x, w", ""), ("x, w, b", zero))
    )
    expected = results(gradient_model(with_zero, ["x", "w"], gradient="onnx"), feeds)
    np.testing.assert_allclose(
        expected["y"], results(with_zero, {n: feeds[n] for n in ("x", "w")})["y"], atol=1e-5
    )
    agree(results(gradient_model(without, ["x", "w"], gradient="onnx"), feeds), expected)


@pytest.mark.parametrize(
    ("inputs", "body", "reason"),
    [
        (
            "float[2,3,8] q, float[2,3,8] k, float[2,3,8] v, float[2,2,4,4] p",
            "y, r, t = com.microsoft.MultiHeadAttention<num_heads=2>(q, k, v, , , , p, p)",
            "cache",
        ),
        (
            "float[2,3,8] q, float[8,24] k, float[24] v",
            "y = com.microsoft.Attention<num_heads=2, do_rotary=1>(q, k, v)",
            "rotates",
        ),
        (
            "float[2,3,8] q, float[8,24] k, float[24] v, float[2,2,2,4,4] p",
            "y, r = com.microsoft.Attention<num_heads=2>(q, k, v, , p)",
            "cache",
        ),
        (
            "float[2,3,8] q, float[8,24] k, float[24] v, int32[2,1,3,3] m",
            "y = com.microsoft.Attention<num_heads=2>(q, k, v, m)",
            "4 axes",
        ),
        (
            "float[2,3,8] q, int32[8] m",
            "y = com.microsoft.MultiHeadAttention<num_heads=2>(q, q, q, , m)",
            "8 entries for 2 sequences",
        ),
        ("float[2,3,8] q", "y = com.microsoft.MultiHeadAttention(q, q, q)", "num_heads is None"),
        (
            "float[2,3,8] q, int32[2] l, int32 n",
            "y = com.microsoft.GroupQueryAttention<num_heads=2, kv_num_heads=0>(q, q, q, , , l, n)",
            "kv_num_heads is 0",
        ),
        (
            "float[2,3,8] q, int64[2,3] p, float[4,2] c",
            "y = com.microsoft.RotaryEmbedding<is_packed_batching=1>(q, p, c, c)",
            "packed",
        ),
        (
            "float[2,3,8] q, int32[2] l, int32 n",
            (
                "y, r, t = com.microsoft.GroupQueryAttention<num_heads=1, kv_num_heads=1,"
                " local_window_size=0>(q, q, q, , , l, n)"
            ),
            "window",
        ),
        (
            "float[2,3,8] q, int32[2] l, int32 n, float[4,4] c, int64[2,3] p",
            (
                "y, r, t = com.microsoft.GroupQueryAttention<num_heads=1, kv_num_heads=1,"
                " do_rotary=1>(q, q, q, , , l, n, c, c, p)"
            ),
            "position_ids",
        ),
        (
            "float[2,3,8] q, float[2,1,N,8] p, int32[2] l, int32 n",
            (
                "y, r, t = com.microsoft.GroupQueryAttention<num_heads=1, kv_num_heads=1>(q, q, q,"
                " p, p, l, n)"
            ),
            "cache",
        ),
    ],
)
def test_what_cannot_be_written_out_is_refused(inputs: str, body: str, reason: str) -> None:
    with pytest.raises(GradientError, match=reason):
        gradient_model(model(inputs, body), ["q"], gradient="onnx")
