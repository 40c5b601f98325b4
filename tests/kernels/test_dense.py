"""Dense convolutions and their gradients by one operator each: those of the plain operators."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest

import onnxfit
from onnxfit.graph import names
from onnxfit.graph.index import attributes_of
from onnxfit.kernels import dense, library, rounding
from onnxfit.kernels.library import DOMAIN, has_products
from onnxfit.kernels.transforms import with_kernels
from tests.kernels.convolutions import exact_sums
from tests.kernels.sessions import kernel_types, parsed, random_feeds, run

# shape of x, shape of w, attributes
CONVOLUTIONS = {
    "3x3": ((2, 16, 5, 6), (16, 16, 3, 3), "pads=[1,1,1,1]"),
    "four vectors": ((2, 8, 9, 9), (64, 8, 3, 3), "pads=[1,1,1,1]"),
    "three vectors": ((2, 48, 5, 5), (40, 48, 3, 3), "pads=[1,1,1,1]"),
    "two blocks": ((1, 70, 5, 4), (130, 70, 2, 2), ""),
    "one channel": ((3, 1, 9, 8), (2, 1, 3, 3), ""),
    "halving": ((3, 20, 9, 8), (33, 20, 3, 3), "pads=[1,1,1,1], strides=[2,2]"),
    "skipping": ((2, 4, 9, 10), (5, 4, 1, 1), "strides=[3,2]"),
    "larger steps than windows": ((2, 3, 17, 9), (4, 3, 2, 2), "strides=[5,3]"),
    "no pads": ((2, 17, 8, 7), (6, 17, 3, 3), ""),
    "one pad": ((2, 9, 7, 6), (7, 9, 3, 2), "strides=[2,1], pads=[0,1,2,1]"),
    "dilated": ((2, 6, 12, 11), (10, 6, 3, 3), "dilations=[2,3], pads=[1,2,3,4]"),
    "dilated halving": ((2, 6, 12, 11), (9, 6, 3, 3), "dilations=[2,1], strides=[2,3], pads=[2,1,2,1]"),
    "patches": ((2, 3, 16, 16), (24, 3, 4, 4), "strides=[4,4]"),
    "many steps": ((1, 40, 6, 6), (8, 40, 3, 3), "pads=[1,1,1,1]"),
    "many images": ((37, 5, 4, 4), (18, 5, 3, 3), "pads=[1,1,1,1]"),
    "strips": ((2, 4, 40, 61), (8, 4, 3, 3), "pads=[1,1,1,1]"),
    "strips and grids": ((1, 8, 70, 65), (4, 8, 3, 3), "pads=[1,1,1,1], strides=[2,2]"),
    "many weights": ((2, 70, 5, 5), (64, 70, 5, 5), "pads=[2,2,2,2]"),
    "Winograd, odd sizes": ((3, 18, 7, 9), (70, 18, 3, 3), "pads=[1,1,1,1]"),
    "Winograd, no pads": ((2, 33, 6, 5), (24, 33, 3, 3), ""),
    "Winograd, wide pads": ((5, 9, 4, 3), (17, 9, 3, 3), "pads=[2,0,1,2]"),
    "Winograd, one pixel": ((3, 8, 1, 1), (8, 8, 3, 3), "pads=[1,1,1,1]"),
    "Winograd, strips": ((1, 8, 41, 66), (8, 8, 3, 3), "pads=[1,1,1,1]"),
    "Winograd, many channels": ((2, 150, 5, 5), (140, 150, 3, 3), "pads=[1,1,1,1]"),
    "Winograd, many tiles": ((20, 8, 39, 39), (8, 8, 3, 3), "pads=[1,1,1,1]"),
    "Winograd, groups of tiles and channels": ((8, 80, 19, 19), (24, 80, 3, 3), "pads=[1,1,1,1]"),
    "Winograd, groups across images": ((3, 70, 27, 40), (100, 70, 3, 3), "pads=[1,1,1,1]"),
    "Winograd, 400 channels": ((9, 400, 8, 8), (24, 400, 3, 3), "pads=[1,1,1,1]"),
    "Winograd, many images": ((67, 8, 4, 4), (16, 8, 3, 3), "pads=[1,1,1,1]"),
    "Winograd, one axis, 3 taps": ((3, 17, 33), (24, 17, 3), "pads=[1,1]"),
    "Winograd, one axis, 5 taps": ((3, 70, 64), (33, 70, 5), "pads=[2,2]"),
    "Winograd, one short axis, 5 taps": ((40, 9, 2), (8, 9, 5), "pads=[2,4]"),
    "Winograd, one long axis, 5 taps": ((1, 8, 700), (8, 8, 5), ""),
    "Winograd, one long axis": ((1, 8, 700), (8, 8, 3), "pads=[2,0]"),
    "Winograd, rows of 3 taps": ((2, 9, 5, 12), (20, 9, 1, 3), "pads=[0,1,0,2]"),
    "Winograd, rows of 5 taps": ((2, 8, 4, 9), (8, 8, 1, 5), "pads=[0,2,0,2]"),
    "one axis": ((3, 9, 128), (12, 9, 5), "pads=[2,2]"),
    "one axis, halving": ((3, 9, 31), (12, 9, 4), "strides=[2], pads=[1,2]"),
}  # fmt: skip


DIRECTIONS = {"Conv", "ConvTranspose", "ConvWeights"}


def winograd_directions(name: str) -> set[str]:
    """The types of nodes that compute fewer products for one of CONVOLUTIONS."""
    if not name.startswith("Winograd"):
        return set()
    return DIRECTIONS - ({"ConvWeights"} if "5 taps" in name else set())


def winograd_types(model: onnx.ModelProto) -> set[str]:
    """The types of the nodes that compute fewer products."""
    return {
        node.op_type
        for node in model.graph.node
        for attribute in node.attribute
        if attribute.name == "winograd" and attribute.i
    }


IS_FASTER, IS_FASTER_BY_WINOGRAD = dense._is_faster, dense._is_faster_by_winograd


@pytest.fixture(autouse=True)
def all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All sizes take a kernel here, although the plain operators would be faster for some."""
    monkeypatch.setattr(dense, "_is_faster", lambda convolution: True)
    monkeypatch.setattr(dense, "_is_faster_by_winograd", lambda *_: False)


@pytest.fixture(params=CONVOLUTIONS)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A convolution; one with Winograd in its name is computed so in all directions."""
    is_winograd = request.param.startswith("Winograd")
    monkeypatch.setattr(dense, "_is_faster_by_winograd", lambda *_: is_winograd)
    return str(request.param)


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The factors of all convolutions are rounded to bfloat16, on every processor."""
    monkeypatch.setattr(dense, "rounds_convolutions", lambda graph: True)
    monkeypatch.setattr(dense, "_is_faster_in_bfloat16", lambda convolution: True)


@pytest.fixture
def compiled(kernels: Path) -> Path:
    """The library, on a processor that it is compiled for."""
    if not has_products(str(kernels)):
        pytest.skip("this processor has neither AVX2 nor AVX-512")
    return kernels


def gradient(name: str) -> onnx.ModelProto:
    """y of x, w and b, and their gradients."""
    x, w, attributes = CONVOLUTIONS[name]
    text = f"""<ir_version: 10, opset_import: ["": 21]>
        g (float{list(x)} x, float{list(w)} w, float[{w[0]}] b) => (float[] y)
        {{ y = Conv<{attributes or "group=1"}>(x, w, b) }}"""
    model = onnx.parser.parse_model(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    model = onnxfit.gradient_model(onnx.shape_inference.infer_shapes(model))
    return onnx.shape_inference.infer_shapes(model, data_prop=True)


def test_results_are_those_of_float64(name: str, compiled: Path) -> None:
    """They are at most 1e-6 of the largest number away."""
    model = with_kernels(gradient(name))
    feeds = random_feeds(model)
    right = exact_sums(CONVOLUTIONS[name][2], feeds)
    for value, found in zip(model.graph.output, run(model, feeds, compiled), strict=True):
        atol = 1e-6 * np.abs(right[value.name]).max()
        np.testing.assert_allclose(found, right[value.name], rtol=0, atol=atol)


@pytest.mark.usefixtures("rounded")
def test_rounded_factors(name: str, compiled: Path) -> None:
    """Each result is within the error of bfloat16, and is that of rounded factors if these are its
    factors.
    """
    model = with_kernels(gradient(name))
    feeds = random_feeds(model)
    feeds["b"][:] = 0  # it is not rounded
    attributes = CONVOLUTIONS[name][2]
    right = exact_sums(attributes, feeds)
    nearest = {n: x.astype(ml_dtypes.bfloat16).astype(np.float32) for n, x in feeds.items()}
    of_nearest = exact_sums(attributes, nearest)
    sizes = exact_sums(attributes, {n: np.abs(x) for n, x in feeds.items()})
    by_sums = winograd_types(model)
    assert by_sums == (set() if "5 taps" in name else winograd_directions(name))
    found = dict(zip([v.name for v in model.graph.output], run(model, feeds, compiled)))
    for value, op in (("y", "Conv"), ("x_grad", "ConvTranspose"), ("w_grad", "ConvWeights")):
        error, size = np.abs(found[value] - right[value]), sizes[value]
        bound = np.full_like(size, size.max()) if op in by_sums else size
        assert (error <= 2.0**-7 * bound).all()  # 2^-8 for each factor
        assert error.max() > 2.0**-14 * size.max()
        if op not in by_sums:
            assert (np.abs(found[value] - of_nearest[value]) <= 1e-6 * size.max()).all()


def test_results_are_those_of_the_operators(name: str, compiled: Path) -> None:
    plain = gradient(name)
    feeds = random_feeds(plain)
    for found, right in zip(
        run(with_kernels(plain), feeds, compiled), run(plain, feeds), strict=True
    ):
        np.testing.assert_allclose(found, right, rtol=0, atol=2e-6 * np.abs(right).max())


def test_three_directions_are_replaced(name: str) -> None:
    """Nothing is left of the plain forms: a bias's gradient alone has a node besides."""
    model = with_kernels(gradient(name))
    assert winograd_types(model) == winograd_directions(name)
    types = [node.op_type for node in model.graph.node]
    assert types.count("ConvWeights") == 1
    assert types.count("Conv") == 1
    assert types.count("ConvTranspose") == 1
    assert all(node.domain == DOMAIN for node in model.graph.node if "Conv" in node.op_type)
    assert not {"Transpose", "Gather", "Pad"} & set(types)


@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize("threads", range(1, 9))
def test_threads_change_nothing(
    threads: int,
    is_rounded: bool,
    compiled: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if is_rounded:
        request.getfixturevalue("rounded")
    names = ["halving", "many images", "strips and grids", "many weights"]
    for name in [*names, *(name for name in CONVOLUTIONS if name.startswith("Winograd"))]:
        is_winograd = name.startswith("Winograd")
        monkeypatch.setattr(dense, "_is_faster_by_winograd", lambda *_, w=is_winograd: w)
        model = with_kernels(gradient(name))
        feeds = random_feeds(model, threads)
        found, right = (run(model, feeds, compiled, n) for n in (threads, 1))
        for value, a, b in zip(model.graph.output, found, right, strict=True):
            if value.name != "b_grad":  # a sum of onnxruntime's
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "attributes",
    [
        "",
        "strides=[2,2]",
        "strides=[2,3], dilations=[1,2], pads=[1,0,2,1], output_padding=[1,2]",
        "pads=[1,0,1,2]",
    ],
)
@pytest.mark.parametrize("is_winograd", [False, True])
def test_the_transposed_convolution_of_a_model(
    attributes: str, is_winograd: bool, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "_is_faster_by_winograd", lambda *_: is_winograd)
    text = f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[3,5,6,7] x, float[5,9,3,{3 if is_winograd else 4}] w, float[9] b) => (y)
        {{ y = ConvTranspose<{attributes or "group=1"}>(x, w, b) }}"""
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    assert kernel_types(model) == ["ConvTranspose"]
    feeds = random_feeds(model)
    (found,), (right,) = run(with_kernels(model), feeds, compiled), run(model, feeds)
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-6 * np.abs(right).max())


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite_reach_the_windows_of_their_tile(
    value: float, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Winograd's sums also reach the other windows of a tile of 2x2, and no others."""
    monkeypatch.setattr(dense, "_is_faster_by_winograd", lambda *_: True)
    plain = gradient("Winograd, odd sizes")
    feeds = random_feeds(plain)
    feeds["x"][1, 3, 4, 5] = value
    found, right = run(with_kernels(plain), feeds, compiled), run(plain, feeds)
    assert not np.isfinite(found[0][~np.isfinite(right[0])]).any()
    (of_filter,) = {tuple(np.isfinite(y).ravel()) for y in found[0].swapaxes(0, 1)}
    reached = np.argwhere(~np.array(of_filter).reshape(found[0][:, 0].shape))
    assert {(image, y // 2, x // 2) for image, y, x in reached} == {
        (1, y, x) for y in (1, 2) for x in (2, 3)
    }


@pytest.mark.parametrize("is_rounded", [False, True])
def test_a_nan_reaches_the_sums_that_read_it(
    is_rounded: bool, compiled: Path, request: pytest.FixtureRequest
) -> None:
    """Also the last row of a tile, and those at the border: no NaN comes from copies."""
    if is_rounded:
        request.getfixturevalue("rounded")
    plain = gradient("3x3")
    feeds = random_feeds(plain)
    feeds["x"][1, 3, 4, 5] = np.nan
    for found, right in zip(
        run(with_kernels(plain), feeds, compiled), run(plain, feeds), strict=True
    ):
        np.testing.assert_array_equal(np.isnan(found), np.isnan(right))


@pytest.mark.parametrize(
    ("inputs", "body"),
    [
        ("double[2,4,5,5] x, double[4,4,3,3] w", "Conv(x, w)"),
        ("float[n,4,5,5] x, float[4,4,3,3] w", "Conv(x, w)"),
        ("float[2,4,5,5] x, float[4,2,3,3] w", "Conv<group=2>(x, w)"),
        ("float[2,4,5,5,5] x, float[4,4,3,3,3] w", "Conv(x, w)"),
        ("float[2,4,5,5] x, float[4,4,3,3] w", "Conv<pads=[-1,0,0,0]>(x, w)"),
        ("float[2,4,5,5] x, float[4,4,3,3] w", 'Conv<auto_pad="SAME_UPPER">(x, w)'),
        ("float[2,4,5,5] x, float[4,4,3,3] w",
         "ConvTranspose<strides=[2,2], output_shape=[10,10]>(x, w)"),
    ],
)  # fmt: skip
def test_other_convolutions_keep_their_operators(inputs: str, body: str) -> None:
    text = f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => (y) {{ y = {body} }}'
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    assert with_kernels(model) is model


def test_a_processor_without_the_kernels_keeps_the_operators() -> None:
    model = gradient("3x3")
    assert with_kernels(model, products=False) is model


@pytest.mark.parametrize(
    ("x", "w", "attributes", "expected"),
    [
        ((2, 16, 16, 16), (16, 16, 3, 3), "", ["Conv", "ConvTranspose", "ConvWeights"]),
        ((2, 3, 16, 16), (16, 3, 3, 3), "", ["ConvWeights"]),  # few products, few channels
        ((2, 16, 16, 16), (16, 16, 1, 1), "", ["ConvWeights"]),
        ((2, 16, 4, 4), (16, 16, 3, 3), "pads=[1,1,1,1]", ["ConvWeights"]),
        (
            (2, 16, 32, 32),
            (120, 16, 3, 3),
            "strides=[2,2]",
            ["Conv", "ConvTranspose", "ConvWeights"],
        ),
        ((2, 16, 32, 32), (29, 16, 3, 3), "strides=[2,2]", ["Conv", "ConvWeights"]),
        (
            (4, 16, 32, 32),
            (29, 16, 3, 3),
            "strides=[2,2]",
            ["Conv", "ConvTranspose", "ConvWeights"],
        ),
        ((4, 15, 32, 32), (29, 15, 3, 3), "strides=[2,2]", ["Conv", "ConvWeights"]),
        ((4, 16, 32, 32), (28, 16, 3, 3), "strides=[2,2]", ["Conv", "ConvWeights"]),
        ((4, 16, 32, 32), (99, 16, 2, 2), "strides=[2,2]", ["Conv", "ConvWeights"]),
        (
            (4, 16, 32, 32),
            (99, 16, 1, 4),
            "strides=[2,2]",
            ["Conv", "ConvTranspose", "ConvWeights"],
        ),
    ],
)
def test_sizes_for_which_the_operators_are_faster(
    x: tuple[int, ...],
    w: tuple[int, ...],
    attributes: str,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()  # of `all_sizes`
    monkeypatch.setitem(CONVOLUTIONS, "case", (x, w, attributes))
    assert sorted(kernel_types(gradient("case"))) == expected


@pytest.mark.parametrize(
    ("x", "w", "attributes", "expected"),
    [
        ((2, 24, 16, 16), (24, 24, 3, 3), "", DIRECTIONS),
        ((2, 16, 16, 16), (24, 16, 3, 3), "", {"ConvWeights"}),
        ((1, 24, 8, 8), (24, 24, 3, 3), "pads=[1,1,1,1]", set()),  # few tiles
        ((16, 24, 4, 4), (24, 24, 3, 3), "pads=[1,1,1,1]", {"ConvWeights"}),
        ((16, 64, 4, 4), (64, 64, 3, 3), "pads=[1,1,1,1]", DIRECTIONS),
        ((16, 3, 16, 16), (64, 3, 3, 3), "pads=[1,1,1,1]", set()),
        ((2, 24, 16, 16), (24, 24, 3, 3), "strides=[2,2]", set()),
        ((2, 24, 16, 16), (24, 24, 3, 3), "dilations=[2,1]", set()),
        ((2, 24, 16, 16), (24, 24, 3, 3), "pads=[3,0,0,0]", set()),
        ((2, 24, 16, 16), (24, 24, 3, 2), "", set()),
        ((8, 48, 32), (48, 48, 3), "pads=[1,1]", DIRECTIONS),
        ((8, 48, 32), (48, 48, 5), "pads=[2,2]", {"Conv", "ConvTranspose"}),
        ((8, 32, 32), (48, 32, 3), "pads=[1,1]", {"ConvWeights"}),
        ((4, 48, 5, 32), (48, 48, 1, 3), "", DIRECTIONS),
        ((8, 48, 32), (48, 48, 7), "", set()),
    ],
)
def test_sizes_for_which_fewer_products_are_faster(
    x: tuple[int, ...],
    w: tuple[int, ...],
    attributes: str,
    expected: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()  # of `all_sizes`
    monkeypatch.setitem(CONVOLUTIONS, "case", (x, w, attributes))
    assert winograd_types(with_kernels(gradient("case"))) == expected


@pytest.mark.parametrize(
    ("attribute", "numbers", "message"),
    [
        ("kernel_shape", [0, 3], "out of range"),
        ("kernel_shape", [3, 3, 3], "out of range"),
        ("kernel_shape", [3, 2], "do not fit"),
        ("strides", [0, 1], "out of range"),
        ("strides", [1], "out of range"),
        ("dilations", [1, -1], "out of range"),
        ("pads", [-1, 0], "out of range"),
        ("pads", [2**40, 0], "out of range"),
        ("sizes", [5], "out of range"),
        ("sizes", [0, 5], "out of range"),
    ],
)
def test_wrong_attributes_are_refused(
    attribute: str, numbers: list[int], message: str, compiled: Path
) -> None:
    model = with_kernels(gradient("3x3"))
    node = next(node for node in model.graph.node if node.domain == DOMAIN)
    for given in node.attribute:
        if given.name == attribute:
            given.ints[:] = numbers
    with pytest.raises(Exception, match=message):
        run(model, random_feeds(model), compiled)


@pytest.mark.parametrize(
    ("w", "attributes"),
    [
        ((8, 8, 3, 3), "pads=[3,0,0,0]"),
        ((8, 8, 3, 3), "strides=[2,1]"),
        ((8, 8, 3, 3), "dilations=[1,2]"),
        ((8, 8, 3, 2), ""),
        ((8, 8, 3, 1), ""),
        ((8, 8, 5, 5), ""),
    ],
)
def test_fewer_products_of_other_convolutions_are_refused(
    w: tuple[int, ...], attributes: str, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONVOLUTIONS, "case", ((2, 8, 20, 20), w, attributes))
    monkeypatch.setattr(dense, "_has_winograd", lambda *_, **attributes: True)
    monkeypatch.setattr(dense, "_is_faster_by_winograd", lambda *_: True)
    model = with_kernels(gradient("case"))
    assert winograd_types(model) == DIRECTIONS
    with pytest.raises(Exception, match="winograd=1 needs a kernel of 3x3, 1x3, 1x5, 3 or 5"):
        run(model, random_feeds(model), compiled)


@pytest.mark.parametrize(
    ("inputs", "body"),
    [
        ("float[1,8,40000] x, float[8,8,5] w", "Conv<pads=[2,2]>(x, w)"),
        ('float[2,8,20,20] x, float[8,8,3,3] w', 'Conv(x, w, "")'),
        ('float[2,8,20,20] x, float[8,1,3,3] w', 'Conv<group=8>(x, w, "")'),
    ],
)  # fmt: skip
def test_unusual_convolutions_and_their_gradients(inputs: str, body: str, compiled: Path) -> None:
    """Long axes, and a bias that is missing but named."""
    text = f"""<ir_version: 10, opset_import: ["": 21]>
        g ({inputs}) => (float[] y) {{ y = {body.replace(', ""', "")} }}"""
    model = onnx.parser.parse_model(text)
    if '""' in body:
        model.graph.node[0].input.append("")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    model = onnxfit.gradient_model(onnx.shape_inference.infer_shapes(model))
    model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    feeds = random_feeds(model)
    for found, right in zip(
        run(with_kernels(model), feeds, compiled), run(model, feeds), strict=True
    ):
        np.testing.assert_allclose(found, right, rtol=0, atol=2e-6 * np.abs(right).max())


@pytest.mark.parametrize("group", [1, 8])
def test_no_kernel_has_negative_pads(group: int) -> None:
    """Kernels refuse them, as newer versions of onnxruntime do; 1.19.2 computes them."""
    text = f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[2,8,20,20] x, float[8,{8 // group},3,3] w) => (float[2,8,17,18] y)
        {{ y = Conv<group={group}, pads=[-1,0,0,0]>(x, w) }}"""
    model = onnxfit.gradient_model(onnx.parser.parse_model(text))
    model = with_kernels(onnx.shape_inference.infer_shapes(model, data_prop=True))
    assert "Conv" in {node.op_type for node in model.graph.node if not node.domain}
    pads = [
        pad
        for node in model.graph.node
        for value in node.attribute
        if node.domain == DOMAIN and value.name == "pads"
        for pad in value.ints
    ]
    assert min(pads, default=0) >= 0


# shape of x, shape of w, attributes -> the directions that round their factors, with all products and
# with fewer; the others are float32
ROUNDED = {
    "16 channels": ((8, 16, 64, 64), (16, 16, 3, 3), "pads=[1,1,1,1]", "y dx dw", ""),
    "32 channels": ((32, 32, 32, 32), (32, 32, 3, 3), "pads=[1,1,1,1]", "y dx dw", ""),
    "32 to 64": ((32, 32, 16, 16), (64, 32, 3, 3), "pads=[1,1,1,1]", "dw", "y dx"),
    "64 channels": ((32, 64, 16, 16), (64, 64, 3, 3), "pads=[1,1,1,1]", "", "y dx dw"),
    "3 channels": ((32, 3, 32, 32), (32, 3, 3, 3), "pads=[1,1,1,1]", "", ""),
    "halving": ((16, 64, 32, 32), (128, 64, 3, 3), "pads=[1,1,1,1], strides=[2,2]", "y dx dw", ""),
    "small, halving": ((64, 16, 14, 14), (32, 16, 3, 3), "pads=[1,1,1,1], strides=[2,2]", "dw", ""),
    "5 taps": ((64, 64, 64), (128, 64, 5), "pads=[2,2]", "y dx dw", ""),
    "3 taps": ((64, 128, 32), (128, 128, 3), "pads=[1,1]", "dw", "y dx"),
    "3 taps, 64 channels": ((16, 64, 64), (64, 64, 3), "pads=[1,1]", "y dx dw", ""),
    "one tap": ((32, 256, 8, 8), (256, 256, 1, 1), "", "y dw", ""),
    "one tap, 64 channels": ((32, 64, 16, 16), (128, 64, 1, 1), "", "dw", ""),
    "one tap, 16 channels": ((16, 16, 32, 32), (96, 16, 1, 1), "", "", ""),
    "one tap, halving": ((16, 64, 32, 32), (128, 64, 1, 1), "strides=[2,2]", "dw", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", ROUNDED)
def test_factors_are_rounded_where_that_is_faster(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "rounds_convolutions", lambda graph: True)
    monkeypatch.setattr(dense, "_is_faster", IS_FASTER)
    monkeypatch.setattr(dense, "_is_faster_by_winograd", IS_FASTER_BY_WINOGRAD)
    *shapes, by_products, by_sums = ROUNDED[name]
    monkeypatch.setitem(CONVOLUTIONS, "case", tuple(shapes))
    found: dict[int, set[str]] = {0: set(), 1: set()}
    values = {"Conv": "y", "ConvTranspose": "dx", "ConvWeights": "dw"}
    for node in with_kernels(gradient("case")).graph.node:
        given = attributes_of(node)
        if node.op_type in values and given.get("precision"):
            found[given["winograd"]].add(values[node.op_type])
    assert found == {0: set(by_products.split()), 1: set(by_sums.split())}


def test_only_the_model_and_its_gradient_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "pair_instructions", lambda: library.PairInstructions.AVX512_BF16)
    inputs = "float[8,64,16,16] x, float[64,64,3,3] w"
    for scope, precision, expected in [
        ("layer", "bf16", 1), ("gradient/layer", "bf16", 1), ("loss/y", "bf16", None),
        ("gradient/loss/y", "bf16", None), ("layer", "bf16x3", None),
    ]:  # fmt: skip
        model = parsed(f"g ({inputs}) => (float[8,64,14,14] y) {{ y = Conv(x, w) }}", scope)
        model.graph.metadata_props.add(key=names.PRODUCTS, value=precision)
        (node,) = with_kernels(model).graph.node
        assert attributes_of(node).get("precision") == expected, scope


@pytest.mark.parametrize("found", ["NONE", "AMX"])
def test_convolutions_stay_float32_on_other_processors(
    found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounding, "pair_instructions", lambda: library.PairInstructions[found])
    model = gradient("3x3")
    model.graph.metadata_props.add(key=names.PRODUCTS, value="bf16")
    nodes = [n for n in with_kernels(model).graph.node if n.op_type in DIRECTIONS]
    assert nodes
    assert not any("precision" in attributes_of(node) for node in nodes)
