"""Depthwise convolutions and their gradients by one operator each: those of the plain operators."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

import onnxfit
from onnxfit.kernels import depthwise
from onnxfit.kernels.library import DOMAIN
from onnxfit.kernels.transforms import with_kernels
from tests.kernels.convolutions import exact_sums
from tests.kernels.sessions import kernel_types, layer_types, random_feeds, run

# shape of x, rows and columns of the kernel, attributes
CONVOLUTIONS = {
    "3x3": ((2, 16, 5, 6), (3, 3), "pads=[1,1,1,1]"),
    "halving": ((3, 20, 9, 8), (3, 3), "pads=[1,1,1,1], strides=[2,2]"),
    "halving wide": ((2, 3, 7, 70), (3, 3), "pads=[1,1,1,1], strides=[2,2]"),
    "even pads": ((2, 5, 11, 12), (5, 5), "pads=[2,2,2,2], strides=[2,2]"),
    "5x5": ((5, 7, 13, 9), (5, 5), "pads=[2,2,2,2]"),
    "no pads": ((2, 17, 8, 7), (3, 3), ""),
    "one pad": ((2, 9, 7, 6), (3, 2), "strides=[2,1], pads=[0,1,2,1]"),
    "dilated": ((2, 6, 12, 11), (3, 3), "dilations=[2,3], pads=[1,2,3,4]"),
    "dilated halving": ((2, 6, 12, 11), (3, 3), "dilations=[2,1], strides=[2,3], pads=[2,1,2,1]"),
    "long": ((1, 4, 2, 133), (1, 5), "strides=[1,2], pads=[0,3,0,1]"),
    "skipping": ((2, 4, 9, 10), (1, 1), "strides=[3,2]"),
    "many images": ((67, 33, 4, 4), (3, 3), "pads=[1,1,1,1]"),
    "all taps": ((1, 2, 9, 9), (7, 7), "pads=[6,0,1,6]"),
}


@pytest.fixture(autouse=True)
def no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """All sizes take a kernel here, although blocks of channels would be faster for some."""
    monkeypatch.setattr(depthwise, "channel_block", lambda: 0)


def gradient(name: str) -> onnx.ModelProto:
    """y of x and w, and their gradients."""
    (n, channels, *pixels), (rows, columns), attributes = CONVOLUTIONS[name]
    comma = ", " if attributes else ""
    text = f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[{n},{channels},{pixels[0]},{pixels[1]}] x, float[{channels},1,{rows},{columns}] w,
           float[{channels}] b) => (float[] y)
        {{ y = Conv<group={channels}{comma}{attributes}>(x, w, b) }}"""
    model = onnx.parser.parse_model(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    model = onnxfit.gradient_model(onnx.shape_inference.infer_shapes(model))
    return onnx.shape_inference.infer_shapes(model, data_prop=True)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_results_are_those_of_float64(name: str, kernels: Path) -> None:
    """They are at most 1e-6 of the largest number away."""
    model = with_kernels(gradient(name))
    feeds = random_feeds(model)
    right = exact_sums(CONVOLUTIONS[name][2], feeds, depthwise=True)
    for value, found in zip(model.graph.output, run(model, feeds, kernels), strict=True):
        atol = 1e-6 * np.abs(right[value.name]).max()
        np.testing.assert_allclose(found, right[value.name], rtol=0, atol=atol)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_results_are_those_of_the_operators(name: str, kernels: Path) -> None:
    plain = gradient(name)
    feeds = random_feeds(plain)
    for found, right in zip(
        run(with_kernels(plain), feeds, kernels), run(plain, feeds), strict=True
    ):
        np.testing.assert_allclose(found, right, rtol=0, atol=2e-6 * np.abs(right).max())


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_three_directions_are_replaced(name: str) -> None:
    types = kernel_types(gradient(name))
    assert types.count("DepthwiseConvWeights") == 1
    # a gradient of x without strides is a Conv of flipped weights, too
    others = types.count("DepthwiseConv") + types.count("DepthwiseConvTranspose")
    assert (len(types), others) == (3, 2)


@pytest.mark.parametrize("threads", range(1, 9))
def test_threads_change_nothing(threads: int, kernels: Path) -> None:
    for name in ("halving", "many images"):
        model = with_kernels(gradient(name))
        feeds = random_feeds(model, threads)
        found, right = (run(model, feeds, kernels, n) for n in (threads, 1))
        for a, b in zip(found, right, strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_transposed_convolution_of_a_model(kernels: Path) -> None:
    text = """<ir_version: 10, opset_import: ["": 21]>
        g (float[3,5,6,7] x, float[5,1,3,4] w, float[5] b) => (y)
        { y = ConvTranspose<group=5, strides=[2,3], dilations=[1,2], pads=[1,0,2,1],
                            output_padding=[1,2]>(x, w, b) }"""
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    assert kernel_types(model) == ["DepthwiseConvTranspose"]
    feeds = random_feeds(model)
    (found,), (right,) = run(with_kernels(model), feeds, kernels), run(model, feeds)
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-6 * np.abs(right).max())


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ("16,32,32", {"DepthwiseConv", "DepthwiseConvTranspose", "DepthwiseConvWeights"}),
        ("16,31,32", {"DepthwiseConvTranspose"}),
        ("17,31,32", {"DepthwiseConv", "DepthwiseConvTranspose", "DepthwiseConvWeights"}),
    ],
)
def test_small_images_are_left_to_blocks_of_channels(
    sizes: str, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depthwise, "channel_block", lambda: 16)
    channels, *pixels = map(int, sizes.split(","))
    case = ((2, channels, *pixels), (3, 3), "strides=[2,2], pads=[1,1,1,1]")
    monkeypatch.setitem(CONVOLUTIONS, "case", case)
    assert set(layer_types(gradient("case"))) == expected


@pytest.mark.parametrize(
    ("inputs", "body"),
    [
        ("double[2,4,5,5] x, double[4,1,3,3] w", "Conv<group=4>(x, w)"),
        ("float[n,4,5,5] x, float[4,1,3,3] w", "Conv<group=4>(x, w)"),
        ("float[2,4,5,5] x, float[8,1,3,3] w", "Conv<group=4>(x, w)"),
        ("float[2,4,5] x, float[4,1,3] w", "Conv<group=4>(x, w)"),
        ("float[2,4,9,9] x, float[4,1,8,8] w", "Conv<group=4>(x, w)"),
        ("float[2,4,5,5] x, float[4,1,3,3] w", 'Conv<group=4, auto_pad="SAME_UPPER">(x, w)'),
        ("float[2,4,5,5] x, float[4,1,3,3] w",
         "ConvTranspose<group=4, strides=[2,2], output_shape=[10,10]>(x, w)"),
    ],
)  # fmt: skip
def test_other_convolutions_keep_their_operators(inputs: str, body: str) -> None:
    text = f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => (y) {{ y = {body} }}'
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    assert with_kernels(model) is model


@pytest.mark.parametrize(
    ("attribute", "numbers", "message"),
    [
        ("kernel_shape", [0, 2], "out of range"),
        ("kernel_shape", [9, 9], "out of range"),
        ("kernel_shape", [3, 2], "do not fit"),
        ("strides", [0, 1], "out of range"),
        ("dilations", [1, -1], "out of range"),
        ("pads", [-1, 0], "out of range"),
        ("pads", [2**40, 0], "out of range"),
        ("sizes", [5], "out of range"),
        ("sizes", [0, 5], "out of range"),
    ],
)
def test_wrong_attributes_are_refused(
    attribute: str, numbers: list[int], message: str, kernels: Path
) -> None:
    model = with_kernels(gradient("3x3"))
    node = next(node for node in model.graph.node if node.domain == DOMAIN)
    for given in node.attribute:
        if given.name == attribute:
            given.ints[:] = numbers
    with pytest.raises(Exception, match=message):
        run(model, random_feeds(model), kernels)
