"""Training through quantised numbers: against torch's fake quantisation, the formulas of learned
step sizes, and floats.
"""

from __future__ import annotations

import ml_dtypes  # noqa: F401  # int4 and its like, for numpy
import numpy as np
import onnx
import pytest

from onnxfit.errors import GradientError
from tests.gradients.rules.cases import Arrays, built, runner

RANGES = {
    "int8": (-128, 127),
    "uint8": (0, 255),
    "int4": (-8, 7),
    "uint4": (0, 15),
    "int16": (-(2**15), 2**15 - 1),
}


def differentiated(
    inputs: str,
    constants: str,
    body: str,
    feeds: Arrays,
    wrt: str,
    domains: str = "",
    arrays: Arrays | None = None,
) -> Arrays:
    """All outputs, and the gradient of y for each name in `wrt`, for a random gradient arriving at
    y, which is returned as well.

    `arrays` are constants that ONNX's text format gets wrong, those of 4 bits.
    """
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21{domains}]> g ({inputs}) => (float y) <{constants}>'
        f" {{ {body} }}"
    )
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(a, name) for name, a in (arrays or {}).items()
    )
    y = runner(model, "onnxruntime")(feeds)["y"]
    arriving = {"y_grad": np.random.default_rng(7).normal(size=y.shape).astype(np.float32)}
    found = built(model, ["y"], wrt.split(), arriving).run({**feeds, **arriving})
    np.testing.assert_array_equal(found["y"], y)
    return {**found, **arriving}


def numbers(*shape: int, spread: float) -> np.ndarray:
    return (np.random.default_rng(3).normal(size=shape) * spread).astype(np.float32)


def learned_step(
    x: np.ndarray, s: np.ndarray, z: np.ndarray, low: int, high: int, dy: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The gradients of x, and of s before it is summed, all in the shape of x:

    Esser et al., equations 2 and 3.
    """
    v = x.astype(np.float64) / s
    level = np.round(v) + z
    inside = (level >= low) & (level <= high)
    return dy * inside, dy * (np.clip(level, low, high) - z - np.where(inside, v, 0))


@pytest.mark.torch
@pytest.mark.parametrize(
    ("kind", "zero"), [("int8", 0), ("int8", 5), ("uint8", 120), ("int4", 3), ("uint4", 7)]
)
def test_a_tensor_passes_as_in_torch(kind: str, zero: int) -> None:
    torch = pytest.importorskip("torch")
    low, high = RANGES[kind]
    x = numbers(6, 20, spread=0.05 * (high - low))
    s, z = torch.tensor([0.1], requires_grad=True), torch.tensor([float(zero)])
    found = differentiated(
        "float[6,20] x, float s", "", "q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z)",
        {"x": x, "s": np.array(0.1, np.float32)}, "x s", arrays={"z": np.array(zero).astype(kind)},
    )  # fmt: skip
    t = torch.tensor(x, requires_grad=True)
    y = torch._fake_quantize_learnable_per_tensor_affine(t, s, z, low, high, 1.0)
    y.backward(torch.tensor(found["y_grad"]))
    plain = torch.tensor(x, requires_grad=True)
    torch.fake_quantize_per_tensor_affine(plain, 0.1, zero, low, high).backward(
        torch.tensor(found["y_grad"])
    )
    assert 0.05 < (found["x_grad"] == 0).mean() < 0.95
    np.testing.assert_allclose(found["y"], y.detach().numpy(), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found["x_grad"], plain.grad.numpy(), rtol=1e-6)
    np.testing.assert_allclose(found["s_grad"], s.grad.numpy()[0], rtol=1e-4)


@pytest.mark.torch
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_channels_pass_as_in_torch(axis: int) -> None:
    torch = pytest.importorskip("torch")
    x = numbers(3, 3, 3, spread=6.0)
    scale, zero = np.array([0.02, 0.05, 0.1], np.float32), np.array([3, -4, 0])
    found = differentiated(
        "float[3,3,3] x, float[3] s", "int8[3] z = {3,-4,0}",
        f"q = QuantizeLinear<axis={axis}>(x, s, z) y = DequantizeLinear<axis={axis}>(q, s, z)", {"x": x, "s": scale}, "x s",
    )  # fmt: skip
    t, s = torch.tensor(x, requires_grad=True), torch.tensor(scale, requires_grad=True)
    z = torch.tensor(zero, dtype=torch.float32)
    y = torch._fake_quantize_learnable_per_channel_affine(t, s, z, axis % 3, -128, 127, 1.0)
    y.backward(torch.tensor(found["y_grad"]))
    plain = torch.tensor(x, requires_grad=True)
    quantised = torch.fake_quantize_per_channel_affine(
        plain, s.detach(), torch.tensor(zero, dtype=torch.int32), axis % 3, -128, 127
    )
    quantised.backward(torch.tensor(found["y_grad"]))
    np.testing.assert_allclose(found["y"], y.detach().numpy(), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found["x_grad"], plain.grad.numpy(), rtol=1e-6)
    np.testing.assert_allclose(found["s_grad"], s.grad.numpy(), rtol=1e-4)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("kind", "zero", "spread"),
    [("int8", 5.4, 1), ("uint8", 120.6, 1), ("int4", 2.4, 1), ("uint4", 6.7, 1), ("int8", 9, 0.1)],
)
def test_a_learned_zero_point_passes_as_in_torch(kind: str, zero: float, spread: float) -> None:
    """A float is rounded to the zero point. With a spread of 0.1 nothing is clamped.

    torch's backward pass of a tensor adds 0.5 and cuts off: below 0 that is another zero point.
    """
    torch = pytest.importorskip("torch")
    low, high = RANGES[kind]
    x = numbers(6, 20, spread=0.05 * (high - low) * spread)
    feeds = {"x": x, "s": np.array(0.1, np.float32), "f": np.array(zero, np.float32)}
    found = differentiated(
        "float[6,20] x, float s, float f", "float one = {1}",
        "z = QuantizeLinear(f, one, t) q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z)",
        feeds, "x s f", arrays={"t": np.array(0).astype(kind)},
    )  # fmt: skip
    t, s, z = (torch.tensor(feeds[name].reshape(-1), requires_grad=True) for name in "xsf")
    y = torch._fake_quantize_learnable_per_tensor_affine(t, s, z, low, high, 1.0)
    y.backward(torch.tensor(found["y_grad"].reshape(-1)))
    np.testing.assert_allclose(found["y"].reshape(-1), y.detach().numpy(), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found["s_grad"], s.grad.numpy()[0], rtol=1e-4)
    np.testing.assert_allclose(found["f_grad"], z.grad.numpy()[0], rtol=1e-4)
    assert (found["f_grad"] == 0) == (spread < 1)


@pytest.mark.torch
def test_learned_zero_points_of_channels_pass_as_in_torch() -> None:
    torch = pytest.importorskip("torch")
    feeds = {
        "x": numbers(3, 4, 5, spread=6.0),
        "s": np.array([0.02, 0.03, 0.04, 0.08], np.float32),
        "f": np.array([3.3, -40.2, 0, 99], np.float32),
    }
    found = differentiated(
        "float[3,4,5] x, float[4] s, float[4] f", "float one = {1}",
        "z = QuantizeLinear(f, one, t) q = QuantizeLinear<axis=1>(x, s, z) y = DequantizeLinear<axis=1>(q, s, z)",
        feeds, "x s f", arrays={"t": np.array(0, np.int8)},
    )  # fmt: skip
    t, s, z = (torch.tensor(feeds[name], requires_grad=True) for name in "xsf")
    y = torch._fake_quantize_learnable_per_channel_affine(t, s, z, 1, -128, 127, 1.0)
    y.backward(torch.tensor(found["y_grad"]))
    np.testing.assert_allclose(found["s_grad"], s.grad.numpy(), rtol=1e-3)
    np.testing.assert_allclose(found["f_grad"], z.grad.numpy(), rtol=1e-4)
    assert np.count_nonzero(found["f_grad"]) == 4


@pytest.mark.parametrize("shape", [(), (3,), (3, 2)], ids=["tensor", "channel", "block"])
def test_a_learned_quantizer_has_the_differences_of_real_numbers(shape: tuple[int, ...]) -> None:
    """The straight-through function, whose rounding errors r are constants:

    y = s (clamp(x / s + r + z) - z), by central differences in float64.
    """
    rng = np.random.default_rng(4)
    feeds = {
        "x": numbers(3, 8, spread=9.0),
        "s": rng.uniform(0.4, 0.9, shape).astype(np.float32),
        "f": rng.integers(-6, 6, shape).astype(np.float32),
    }
    size = ",".join(map(str, shape))
    attributes = {0: "", 1: "<axis=0>", 2: "<axis=1, block_size=4>"}[len(shape)]
    found = differentiated(
        f"float[3,8] x, float[{size}] s, float[{size}] f".replace("[]", ""), "float one = {1}",
        f"z = QuantizeLinear(f, one, t) q = QuantizeLinear{attributes}(x, s, z)"
        f" y = DequantizeLinear{attributes}(q, s, z)",
        feeds, "x s f", arrays={"t": np.array(0).astype("int4")},
    )  # fmt: skip

    def wide(array: np.ndarray) -> np.ndarray:
        if len(shape) == 2:
            return np.repeat(array, 4, axis=1)
        return array[:, None] if shape else array

    exact = {name: array.astype(np.float64) for name, array in feeds.items()}
    v = exact["x"] / wide(exact["s"])
    rounding = np.round(v) - v

    def total(values: dict[str, np.ndarray]) -> float:
        s, z = wide(values["s"]), wide(values["f"])
        level = np.clip(values["x"] / s + rounding + z, -8, 7)
        return float((s * (level - z) * found["y_grad"]).sum())

    for name, step in (("s", 1e-6), ("f", 1e-4)):
        differences = np.zeros(shape)
        for index in np.ndindex(*shape):
            ends = []
            for sign in (1, -1):
                moved = {**exact, name: exact[name].copy()}
                moved[name][index] += sign * step
                ends.append(total(moved))
            differences[index] = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose(found[f"{name}_grad"], differences, rtol=1e-3)


@pytest.mark.parametrize("kind", ["int8", "uint8", "int4", "uint4", "int16"])
@pytest.mark.parametrize("sizes", ["4,5", "A,B"])
def test_blocks_have_their_own_steps(kind: str, sizes: str) -> None:
    low, high = RANGES[kind]
    x = numbers(4, 5, spread=0.3 * (high - low))
    s = np.random.default_rng(5).uniform(0.5, 1.5, (4, 3)).astype(np.float32)
    z = np.arange(12).reshape(4, 3) % 5
    found = differentiated(
        f"float[{sizes}] x, float[{'4,3' if sizes == '4,5' else 'A,C'}] s", "",
        "q = QuantizeLinear<axis=1, block_size=2>(x, s, z) y = DequantizeLinear<axis=-1, block_size=2>(q, s, z)",
        {"x": x, "s": s}, "x s", arrays={"z": z.astype(kind)},
    )  # fmt: skip
    wide = [np.repeat(a, 2, axis=1)[:, :5] for a in (s, z)]
    dx, ds = learned_step(x, wide[0], wide[1], low, high, found["y_grad"])
    np.testing.assert_allclose(found["x_grad"], dx, rtol=1e-5, atol=1e-6)
    sums = np.stack([ds[:, i : i + 2].sum(axis=1) for i in (0, 2, 4)], axis=1)
    np.testing.assert_allclose(found["s_grad"], sums, rtol=1e-3, atol=1e-3 * np.abs(sums).max())


def test_small_floats_are_clamped_at_their_greatest() -> None:
    x = np.array([-1000, -449, -3, 0.3, 200, 500], np.float32)
    found = differentiated(
        "float[6] x",
        "float s = {1}",
        "q = QuantizeLinear<output_dtype=17>(x, s) y = DequantizeLinear(q, s)",
        {"x": x},
        "x",
    )
    np.testing.assert_array_equal(found["x_grad"], found["y_grad"] * [0, 0, 1, 1, 1, 0])


def test_numbers_by_hand() -> None:
    """s = 0.5, z = 1: x = 0.3 is 1 + round(0.6) = 2; -70 is clamped to -128, 100 to 127; the
    gradient of s is q - z - x / s, q - z.
    """
    found = differentiated(
        "float[3] x, float s", "int8 z = {1}", "q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z)",
        {"x": np.array([0.3, -70, 100], np.float32), "s": np.array(0.5, np.float32)}, "x s",
    )  # fmt: skip
    np.testing.assert_array_equal(found["y"], np.array([0.5, -64.5, 63], np.float32))
    np.testing.assert_allclose(found["x_grad"], found["y_grad"] * [1, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(
        found["s_grad"], found["y_grad"] @ np.array([0.4, -129, 126]), rtol=1e-5
    )


def test_the_gradient_passes_what_moves_integers() -> None:
    x = numbers(2, 6, spread=1.0)
    found = differentiated(
        "float[2,6] x", "float s = {0.01}, float t = {0.02}, int64[2] shape = {3,4}",
        "q = QuantizeLinear(x, s) r = Reshape(q, shape) m = Transpose<perm=[1,0]>(r) y = DequantizeLinear(m, t)", {"x": x}, "x",
    )  # fmt: skip
    passed = (found["y_grad"].T.reshape(2, 6) * 2) * ((x > -0.005) & (x < 2.555))
    np.testing.assert_allclose(found["x_grad"], passed, rtol=1e-6)


def test_a_cast_dequantises_as_well() -> None:
    found = differentiated(
        "float[4] x", "float s = {0.1}", "q = QuantizeLinear(x, s) f = Cast<to=1>(q) y = Mul(f, s)",
        {"x": np.array([-1, 1, 2, 30], np.float32)}, "x",
    )  # fmt: skip
    np.testing.assert_allclose(found["x_grad"], found["y_grad"] * [0, 1, 1, 0], rtol=1e-6)


def test_com_microsoft_means_the_same() -> None:
    feeds = {"x": numbers(3, 4, spread=20.0), "s": np.array([0.1, 0.2, 0.3], np.float32)}
    body = "q = QuantizeLinear<axis=0>(x, s, z) d = DequantizeLinear<axis=0>(q, s, z) y = Mul(d, d)"
    arguments = ("float[3,4] x, float[3] s", "int8[3] z = {1,2,3}")
    standard = differentiated(*arguments, body, feeds, "x s")
    own = body.replace("Quantize", "com.microsoft.Quantize").replace(
        "Dequantize", "com.microsoft.Dequantize"
    )
    found = differentiated(*arguments, own, feeds, "x s", ', "com.microsoft": 1')
    for name in ("x_grad", "s_grad"):
        np.testing.assert_array_equal(found[name], standard[name])


def test_dynamic_quantisation_passes_everything() -> None:
    found = differentiated(
        "float[3,4] x",
        "",
        "q, s, z = DynamicQuantizeLinear(x) y = DequantizeLinear(q, s, z)",
        {"x": numbers(3, 4, spread=1.0)},
        "x",
    )
    np.testing.assert_allclose(found["x_grad"], found["y_grad"], rtol=1e-6)


@pytest.mark.parametrize(
    ("zero", "shape"), [("uint8 bz = {7}", ""), ("uint8[2] bz = {7,9}", "[2]")]
)
def test_a_product_of_integers_is_one_of_floats(zero: str, shape: str) -> None:
    """As quantize_dynamic writes a Linear layer; its frozen weights in floats give the same
    gradient.
    """
    constants = (
        f"uint8[3,2] w = {{1,200,30,4,55,66}}, {zero}, float{shape} ws ="
        f" {{{'0.1,0.2' if shape else '0.1'}}}"
    )
    head = "q, s, z = DynamicQuantizeLinear(x) "
    feeds = {"x": numbers(2, 3, spread=1.0)}
    found = differentiated(
        "float[2,3] x", constants,
        head + "i = MatMulInteger(q, w, z, bz) f = Cast<to=1>(i) scale = Mul(s, ws) y = Mul(f, scale)", feeds, "x",
    )  # fmt: skip
    w = (
        np.array([[1, 200], [30, 4], [55, 66]], np.float32) - (np.array([7, 9]) if shape else 7)
    ) * (np.array([0.1, 0.2], np.float32) if shape else np.float32(0.1))
    np.testing.assert_allclose(found["x_grad"], found["y_grad"] @ w.T, rtol=1e-4)


def test_trained_weights_pass_a_product_of_integers() -> None:
    body = (
        "q = QuantizeLinear(x, s, z) p = QuantizeLinear<axis=0>(w, t, u) i = MatMulInteger(q, p,"
        " z{u}) y = Cast<to=1>(i)"
    )
    feeds = {"x": numbers(2, 3, spread=1.0), "w": numbers(3, 2, spread=1.0)}
    constants = "float s = {0.1}, uint8 z = {100}, float[3] t = {0.2,0.1,0.05}, int8[3] u = {0,0,0}"
    found = differentiated("float[2,3] x, float[3,2] w", constants, body.format(u=""), feeds, "x w")
    left, right = (
        np.round(feeds["x"] / np.float32(0.1)),
        np.round(feeds["w"] / np.array([[0.2], [0.1], [0.05]], np.float32)),
    )
    np.testing.assert_allclose(found["x_grad"], found["y_grad"] @ right.T / 0.1, rtol=1e-4)
    np.testing.assert_allclose(
        found["w_grad"], left.T @ found["y_grad"] / np.array([[0.2], [0.1], [0.05]]), rtol=1e-4
    )


def test_a_convolution_of_integers_is_one_of_floats() -> None:
    feeds = {"x": numbers(1, 2, 4, 4, spread=1.0), "w": numbers(2, 2, 3, 3, spread=1.0)}
    constants = "float s = {0.02}, uint8 z = {128}, float t = {0.01}, uint8 u = {130}"
    quantised = "q = QuantizeLinear(x, s, z) p = QuantizeLinear(w, t, u) "
    integers, floats = (
        differentiated(
            "float[1,2,4,4] x, float[2,2,3,3] w",
            constants,
            quantised + body.replace("ATTRIBUTES", "pads=[1,1,1,1], strides=[2,2]"),
            feeds,
            "x w",
        )
        for body in (
            (
                "i = ConvInteger<ATTRIBUTES>(q, p, z, u) f = Cast<to=1>(i) st = Mul(s, t) y ="
                " Mul(f, st)"
            ),
            (
                "d = DequantizeLinear(q, s, z) v = DequantizeLinear(p, t, u) y ="
                " Conv<ATTRIBUTES>(d, v)"
            ),
        )
    )
    for name in ("y", "x_grad", "w_grad"):
        np.testing.assert_allclose(integers[name], floats[name], rtol=1e-4, atol=1e-5)


def test_what_rounds_again_inside_is_refused() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[2,2] x) => (float[2,2] y)
        <float s = {0.1}, uint8 z = {7}, uint8[2,2] w = {1,2,3,4}>
        { q = QuantizeLinear(x, s, z) i = QLinearMatMul(q, s, z, w, s, z, s, z) y = DequantizeLinear(i, s, z) }"""
    )
    with pytest.raises(GradientError, match=r"QLinearMatMul.*train the model in floats"):
        built(model, ["y"], ["x"], {"y_grad": numbers(2, 2, spread=1.0)}, runs="")


@pytest.mark.parametrize(("kind", "zero"), [("int8", 0), ("int8", 127), ("uint8", 3), ("int16", 9)])
@pytest.mark.parametrize("per_axis", [True, False])
def test_the_last_float_in_range_has_a_gradient(kind: str, zero: int, per_axis: bool) -> None:
    """The three floats around each end: constants of scale know what a division says."""
    low, high = RANGES[kind]
    scales = (10.0 ** np.random.default_rng(1).uniform(-6, 4, 50)).astype(np.float32)
    ends = np.float32([low - zero - 0.5, high - zero + 0.5])
    middle = scales[:, None] * ends
    x = np.concatenate([np.nextafter(middle, -np.inf), middle, np.nextafter(middle, np.inf)], 1)
    x = np.concatenate([x, [[np.inf, -np.inf]] * len(x)], 1, dtype=np.float32)
    rows = [(x, scales)] if per_axis else [(x[i], scales[i]) for i in (0, 1, 2)]
    for numbers_, s in rows:
        found = differentiated(
            f"float[{','.join(map(str, numbers_.shape))}] x",
            "",
            "q = QuantizeLinear<axis=0>(x, s, z) y = DequantizeLinear<axis=0>(q, s, z)",
            {"x": numbers_},
            "x",
            arrays={"s": np.asarray(s), "z": np.full(np.shape(s), zero, kind)},
        )
        level = np.rint(numbers_ / (s[:, None] if per_axis else s)) + np.float32(zero)
        inside = (low <= level) & (level <= high)
        assert 0 < inside.mean() < 1
        np.testing.assert_array_equal(found["x_grad"] != 0, inside)
