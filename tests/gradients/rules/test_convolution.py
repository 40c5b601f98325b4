"""Convolutions and pools against torch, where the judges of the cases are weak, and where a tie or
an end decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

from onnxfit.gradients.rules import pooling
from onnxfit.gradients.rules.convolution import weights
from tests.gradients.rules.cases import built

Arrays = dict[str, np.ndarray[Any, Any]]


def gradients_of(
    inputs: str, body: str, feeds: Arrays, dy: np.ndarray[Any, Any]
) -> list[np.ndarray[Any, Any]]:
    """The gradients of sum(y * dy) by all inputs."""
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 21]> g ({inputs}) => (y) {{ y = {body} }}'
    )
    graph = built(model, ["y"], list(feeds), {"y_grad": dy})
    results = graph.run({**feeds, "y_grad": dy})
    return [results[f"{name}_grad"] for name in feeds]


def sizes(array: np.ndarray[Any, Any], known: bool) -> str:
    return ",".join(str(n) if known else f"s{array.ndim}{n}_{i}" for i, n in enumerate(array.shape))


def meets_torch(body: str, function: Callable[..., Any], *shapes: tuple[int, ...]) -> None:
    """With sizes known and unknown."""
    import torch

    rng = np.random.default_rng(0)
    feeds = {
        name: rng.standard_normal(shape).astype(np.float32) for name, shape in zip("abc", shapes)
    }
    tensors = [torch.tensor(array, requires_grad=True) for array in feeds.values()]
    y = function(*tensors)
    dy = rng.standard_normal(tuple(y.shape)).astype(np.float32)
    y.backward(torch.tensor(dy))
    for known in (True, False):
        inputs = ", ".join(f"float[{sizes(array, known)}] {name}" for name, array in feeds.items())
        for gradient, tensor in zip(gradients_of(inputs, body, feeds, dy), tensors):
            np.testing.assert_allclose(
                gradient,
                np.asarray(tensor.grad),
                rtol=1e-4,
                atol=1e-4,
                err_msg=f"sizes known: {known}",
            )


@pytest.mark.torch
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize(
    ("channels", "filters", "group"),
    [(4, 6, 1), (20, 17, 1), (40, 20, 1), (2, 8, 2), (6, 3, 3), (4, 4, 4), (1, 4, 1)],
)
def test_convolutions_are_torchs(
    stride: int, dilation: int, channels: int, filters: int, group: int
) -> None:
    torch = pytest.importorskip("torch")
    settings = {"stride": stride, "dilation": dilation, "groups": group, "padding": (1, 2)}
    onnx_attributes = (
        f"strides=[{stride},{stride}], dilations=[{dilation},{dilation}], group={group},"
        " pads=[1,2,1,2]"
    )
    weights = (filters, channels // group, 3, 2)
    meets_torch(
        f"Conv<{onnx_attributes}>(a, b, c)",
        lambda a, b, c: torch.nn.functional.conv2d(a, b, c, **settings),
        (2, channels, 8, 7), weights, (filters,),
    )  # fmt: skip
    meets_torch(
        f"ConvTranspose<{onnx_attributes}, output_padding=[{stride - 1},0]>(a, b, c)",
        lambda a, b, c: torch.nn.functional.conv_transpose2d(a, b, c, output_padding=(stride - 1, 0), **settings),
        (2, filters, 4, 6), weights, (channels,),
    )  # fmt: skip


@pytest.mark.torch
@pytest.mark.parametrize(("images", "group"), [(2, 1), (16, 1), (2, 2)])
def test_strides_that_end_at_the_last_pixel_are_torchs(images: int, group: int) -> None:
    """A tap reads the first and the last pixel of a row, and a stride skips others."""
    torch = pytest.importorskip("torch")
    meets_torch(
        f"Conv<strides=[2,2], group={group}>(a, b)",
        lambda a, b: torch.nn.functional.conv2d(a, b, stride=2, groups=group),
        (images, 16, 5, 5), (16, 16 // group, 1, 1),
    )  # fmt: skip


@pytest.mark.torch
@pytest.mark.parametrize("form", ["pixels", "columns", "sums"])
@pytest.mark.parametrize(
    ("stride", "dilation", "kernel", "pads"),
    [
        (1, 1, (3, 3), (1, 1)),
        (2, 1, (5, 3), (2, 1)),
        (3, 2, (2, 3), (0, 2)),
        (1, 2, (1, 4), (1, 0)),
    ],
)
def test_depthwise_convolutions_are_torchs(
    monkeypatch: pytest.MonkeyPatch, form: str, stride: int, dilation: int,
    kernel: tuple[int, int], pads: tuple[int, int],
) -> None:  # fmt: skip
    """In each of the forms, along one axis, two and three, with one filter or two for a channel."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(weights, "MAX_PIXEL_PAIRS", 2**20 if form == "pixels" else 0)
    monkeypatch.setattr(weights, "MAX_COLUMNS", 100 if form == "columns" else 0)
    for axes, shape in enumerate([(2, 3, 7), (2, 3, 7, 8), (2, 3, 3, 7, 8)], 1):
        taps, padding = ((2, *kernel), (1, *pads))
        taps, padding = taps[-axes:], padding[-axes:]
        settings = {"stride": stride, "dilation": dilation, "padding": padding, "groups": 3}
        function = getattr(torch.nn.functional, f"conv{axes}d")
        meets_torch(
            f"Conv<group=3, strides={[stride] * axes}, dilations={[dilation] * axes},"
            f" pads={[*padding] * 2}>(a, b)",
            lambda a, b, function=function, settings=settings: function(a, b, **settings),
            shape, (3 * (1 + axes % 2), 1, *taps),
        )  # fmt: skip


def test_taps_that_read_padding_only_have_no_slope() -> None:
    """Of a depthwise convolution whose images are lower than its windows."""
    a = np.random.default_rng(0).standard_normal((2, 2, 1, 50)).astype(np.float32)
    dy = np.ones((2, 2, 1, 50), np.float32)
    b = np.zeros((2, 1, 3, 3), np.float32)
    _, gradient = gradients_of(
        "float[2,2,1,50] a, float[2,1,3,3] b",
        "Conv<group=2, pads=[1,1,1,1]>(a, b)",
        {"a": a, "b": b},
        dy,
    )
    assert not gradient[:, :, [0, 2]].any()
    np.testing.assert_allclose(gradient[:, 0, 1, 1], a.sum((0, 2, 3)), rtol=1e-4)


@pytest.mark.parametrize(
    ("size", "kernel", "products"),
    [(4, 3, 2), (16, 3, 4), (16, 5, 6), (16, 7, 8), (80, 3, 0)],
)
def test_depthwise_forms_follow_the_sizes(size: int, kernel: int, products: int) -> None:
    """One product of all pixels, one for each row of taps, or sums for rows that are long; and one
    product to sum the pairs of each tap.
    """
    pad = kernel // 2
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 21]>
        g (float[2,16,{size},{size}] a, float[16,1,{kernel},{kernel}] b) => (y)
        {{ y = Conv<group=16, pads={[pad] * 4}>(a, b) }}"""
    )
    dy = np.zeros((2, 16, size, size), np.float32)
    graph = built(model, ["y"], ["b"], {"y_grad": dy}, runs="").model.graph
    assert [n.op_type for n in graph.node].count("MatMul") == products


@pytest.mark.torch
@pytest.mark.parametrize("widest", [pooling.MAX_POOLED_WIDTH, 0])
@pytest.mark.parametrize("ceil", [0, 1])
@pytest.mark.parametrize(("kernel", "stride", "pad"), [(2, 2, 0), (3, 2, 1), (3, 1, 1), (2, 3, 1)])
def test_pools_are_torchs(
    monkeypatch: pytest.MonkeyPatch, widest: int, ceil: int, kernel: int, stride: int, pad: int
) -> None:
    """Small axes and wide ones have forms of their own."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(pooling, "MAX_POOLED_WIDTH", widest)
    settings = (
        f"kernel_shape=[{kernel},{kernel}], strides=[{stride},{stride}],"
        f" pads=[{','.join([str(pad)] * 4)}], ceil_mode={ceil}"
    )
    shape = (2, 3, 6, 9)
    for counted in (0, 1):
        meets_torch(
            f"AveragePool<{settings}, count_include_pad={counted}>(a)",
            lambda a, counted=counted: torch.nn.functional.avg_pool2d(
                a, kernel, stride, pad, bool(ceil), bool(counted)
            ),
            shape,
        )
    meets_torch(
        f"MaxPool<{settings}>(a)",
        lambda a: torch.nn.functional.max_pool2d(a, kernel, stride, pad, ceil_mode=bool(ceil)),
        shape,
    )
    if not ceil and not pad:
        meets_torch(
            f"LpPool<{settings}, p=2>(a)",
            lambda a: torch.nn.functional.lp_pool2d(a, 2.0, kernel, stride),
            shape,
        )


@pytest.mark.torch
def test_response_normalisation_is_torchs() -> None:
    torch = pytest.importorskip("torch")
    meets_torch(
        "LRN<size=3, alpha=0.9, beta=0.6, bias=1.5>(a)",
        lambda a: torch.nn.functional.local_response_norm(a, 3, 0.9, 0.6, 1.5), (2, 5, 3, 2),
    )  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        "MaxPool<kernel_shape=[2,2], strides=[2,2]>(a)",
        "MaxPool<kernel_shape=[2,2], strides=[2,2], pads=[0,0,1,1]>(a)",
    ],
)
def test_the_first_of_equal_maxima_takes_the_gradient(body: str) -> None:
    a = np.array([[0, 0, 1, 2], [0, 0, 2, 2]], np.float32)[None, None]
    (gradient,) = gradients_of(
        "float[1,1,2,4] a", body, {"a": a}, np.array([3, 5], np.float32).reshape(1, 1, 1, 2)
    )
    assert gradient.tolist() == [[[[3, 0, 0, 5], [0, 0, 0, 0]]]]


def test_the_first_of_equal_maxima_takes_the_gradient_globally() -> None:
    a = np.array([[1, 3], [3, 3]], np.float32)[None, None]
    (gradient,) = gradients_of(
        "float[1,1,2,2] a", "GlobalMaxPool(a)", {"a": a}, np.full((1, 1, 1, 1), 7, np.float32)
    )
    assert gradient.tolist() == [[[[0, 7], [0, 0]]]]


@pytest.mark.parametrize("p", [1, 2, 3])
def test_windows_of_zeros_have_no_slope(p: int) -> None:
    a = np.array([[0, 0, 3, 4], [0, 0, 0, 0]], np.float32)[None, None]
    (gradient,) = gradients_of(
        "float[1,1,2,4] a",
        f"LpPool<kernel_shape=[2,2], strides=[2,2], p={p}>(a)",
        {"a": a},
        np.ones((1, 1, 1, 2), np.float32),
    )
    y = (3.0**p + 4.0**p) ** (1 / p)
    np.testing.assert_allclose(
        gradient[0, 0], [[0, 0, (3 / y) ** (p - 1), (4 / y) ** (p - 1)], [0, 0, 0, 0]], rtol=1e-6
    )


@pytest.mark.parametrize(("images", "form"), [(1, "MatMul"), (16, "Conv")])
def test_heavy_weights_are_not_turned_round(images: int, form: str) -> None:
    """For one small image there are more weights than elements: its gradient is a product.

    For many it is a convolution.
    """
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 21]>
        g (float[{images},32,6,6] a, float[32,32,3,3] b) => (y) {{ y = Conv<pads=[1,1,1,1]>(a, b) }}"""
    )
    graph = built(
        model, ["y"], ["a"], {"y_grad": np.zeros((images, 32, 6, 6), np.float32)}, runs=""
    ).model.graph
    added = [n.op_type for n in graph.node if n.name.startswith("gradient/")]
    assert {"MatMul", "Conv"} & set(added) == {form}


@pytest.mark.parametrize(
    ("images", "channels", "filters", "size", "form"),
    [
        (8, 3, 3, 20, [["Gemm"], [1, 0]]),  # one product of all copies, the images last
        (16, 16, 16, 20, [["Gemm"], [1, 0]]),
        (16, 80, 80, 32, [["Gemm"] * 3, [1, 0]]),  # too many copies to make all at once
        (16, 64, 64, 32, [["Gemm"] * 3, [1, 0, 2, 3]]),  # a product for each row of taps
        (7, 64, 64, 100, [["Gemm"] * 9, [1, 0, 2, 3]]),  # too many elements to shift
        # so many filters that turning them costs more: one product for each image
        (16, 3, 40, 20, [["MatMul"], [0, 2, 1]]),
        (7, 3, 3, 20, [["MatMul"], [0, 2, 1]]),
        (7, 16, 16, 20, [["Gemm"] * 9, [1, 0, 2, 3]]),  # a product for each tap
        (7, 16, 16, 4, [["Gemm"] * 9, [0, 2, 1]]),  # the channels last
    ],
)
def test_copies_lie_as_their_sizes_make_them_fast(
    images: int, channels: int, filters: int, size: int, form: list[list[str | int]]
) -> None:
    """Of a weight's gradient: its products, and how the images are turned before them.

    All equal what torch says (the tests of the rules).
    """
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 21]>
        g (float[{images},{channels},{size},{size}] a, float[{filters},{channels},3,3] b) => (y) {{ y = Conv<pads=[1,1,1,1]>(a, b) }}"""
    )
    graph = built(
        model,
        ["y"],
        ["b"],
        {"y_grad": np.zeros((images, filters, size, size), np.float32)},
        runs="",
    ).model.graph
    added = [node for node in graph.node if node.name.startswith("gradient/")]
    products = [node.op_type for node in added if node.op_type in ("Gemm", "MatMul")]
    turned = next(
        list(a.ints) for node in added if node.op_type == "Transpose" for a in node.attribute
    )
    assert [products, turned] == form


@pytest.mark.parametrize(
    ("x", "w", "form"),
    [
        ((2, 16, 8, 8), (64, 16, 1, 1), "Conv"),
        ((2, 16, 80), (64, 16, 3), "Conv"),
        ((2, 16, 8, 8), (64, 16, 3, 3), "ConvTranspose"),
    ],
)
def test_many_filters_are_transposed_where_this_is_faster(
    x: tuple[int, ...], w: tuple[int, ...], form: str
) -> None:
    """The operator of the gradient of the images; all equal what torch says."""
    y = (x[0], w[0], *(n - k + 1 for n, k in zip(x[2:], w[2:])))
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 21]>
        g (float{[*x]} a, float{[*w]} b) => (y) {{ y = Conv(a, b) }}"""
    )
    graph = built(model, ["y"], ["a"], {"y_grad": np.zeros(y, np.float32)}, runs="").model.graph
    added = {node.op_type for node in graph.node if node.name.startswith("gradient/")}
    assert added & {"Conv", "ConvTranspose"} == {form}


def test_large_images_are_not_listed_place_by_place() -> None:
    """What a Gather reads is written in the graph: not for every place of a photograph."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 21]>
        g (float[16,3,100,100] a, float[4,3,3,3] b) => (y) { y = Conv(a, b) }""")
    graph = built(
        model, ["y"], ["b"], {"y_grad": np.zeros((16, 4, 98, 98), np.float32)}, runs=""
    ).model.graph
    assert "Gather" not in [node.op_type for node in graph.node]


@pytest.mark.parametrize(
    ("filters", "size", "transposed"),
    [
        (weights.MIN_FILTERS_FIRST, 4, []),
        (weights.MIN_FILTERS_FIRST - 1, 4, [[1, 0]]),
        (weights.MIN_FILTERS_FIRST, 32, [[1, 0]]),  # several products
    ],
)
def test_a_product_of_many_filters_is_not_transposed(
    filters: int, size: int, transposed: list[list[int]]
) -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 21]>
        g (float[16,80,{size},{size}] a, float[{filters},80,3,3] b) => (y) {{ y = Conv<pads=[1,1,1,1]>(a, b) }}"""
    )
    y = np.zeros((16, filters, size, size), np.float32)
    nodes = built(model, ["y"], ["b"], {"y_grad": y}, runs="").model.graph.node
    names = [node.op_type for node in nodes]
    after = nodes[names.index("Gemm") :]
    perms = [a.ints for node in after if node.op_type == "Transpose" for a in node.attribute]
    assert [list(perm) for perm in perms] == transposed


@pytest.mark.torch
@pytest.mark.parametrize(
    ("cached", "filters_first"),
    [
        (weights.MAX_GATHERED_ELEMENTS, weights.MIN_FILTERS_FIRST),
        (weights.MAX_GATHERED_ELEMENTS, 1),
        (0, 1),
    ],
)
@pytest.mark.parametrize(
    ("stride", "dilation", "pads"), [(1, 1, (0, 0)), (1, 2, (1, 2)), (2, 1, (2, 0)), (3, 2, (1, 1))]
)
def test_copies_of_many_images_are_torchs(
    monkeypatch: pytest.MonkeyPatch,
    stride: int,
    dilation: int,
    pads: tuple[int, int],
    cached: int,
    filters_first: int,
) -> None:
    """In one piece, and row of taps by row of taps; along one axis, two and three."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(weights, "MAX_GATHERED_ELEMENTS", cached)
    monkeypatch.setattr(weights, "MIN_FILTERS_FIRST", filters_first)
    many = weights.MIN_IMAGES_FOR_GATHER
    settings = {"stride": stride, "dilation": dilation, "padding": pads}
    for axes, shape in enumerate([(many, 3, 8), (many, 3, 8, 7), (many, 2, 8, 7, 6)], 1):
        settings["padding"] = padding = (*pads, 1)[:axes]
        onnx_attributes = (
            f"strides={[stride] * axes}, dilations={[dilation] * axes}, pads={[*padding] * 2}"
        )
        taps = (3, 2, 3)[:axes]
        for name, filters in {"conv": (3, shape[1]), "conv_transpose": (shape[1], 3)}.items():
            function = getattr(torch.nn.functional, f"{name}{axes}d")
            body = f"{name.title().replace('_', '')}<{onnx_attributes}>(a, b)"
            meets_torch(
                body,
                lambda a, b, function=function: function(a, b, **settings),
                shape,
                (*filters, *taps),
            )


@pytest.mark.torch
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("images", [1, 3])
def test_copies_of_long_rows_are_torchs(
    monkeypatch: pytest.MonkeyPatch, images: int, dilation: int
) -> None:
    """With different pads on both sides, along two axes and three."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(weights, "MAX_PADDING_TO_SHIFT", 100)
    columns = weights.MIN_COLUMNS_TO_SHIFT + 4 * dilation
    for padding, taps in [
        ((1, 0), (3, 2)),
        ((2, 3), (2, 1)),
        ((2, 3), (3, 4)),
        ((1, 0, 2), (1, 2, 3)),
    ]:
        axes = len(taps)
        shape = (images, 16, *(6, 5)[: axes - 1], columns)
        w = (17, 16, *taps)
        function = getattr(torch.nn.functional, f"conv{axes}d")

        def of_padded(a: Any, b: Any, padding: Any = padding, function: Any = function) -> Any:
            both_sides = [n for pad in reversed(padding) for n in (pad, pad + 1)]
            return function(torch.nn.functional.pad(a, both_sides), b, dilation=dilation)

        after = [pad + 1 for pad in padding]
        body = f"Conv<dilations={[dilation] * axes}, pads={[*padding, *after]}>(a, b)"
        model = onnx.parser.parse_model(
            f"""<ir_version: 8, opset_import: ["": 21]>
            g (float{[*shape]} a, float{[*w]} b) => (y) {{ y = {body} }}"""
        )
        dy = of_padded(torch.zeros(shape), torch.zeros(w)).numpy()
        graph = built(model, ["y"], ["b"], {"y_grad": dy}, runs="").model.graph
        slices = [node for node in graph.node if node.op_type == "Slice"]
        assert len(slices) == taps[-1] + np.prod(taps[:-1])  # not one for each tap
        meets_torch(body, of_padded, shape, w)


@pytest.mark.torch
def test_pixels_that_no_window_covers_have_no_part_in_the_weights() -> None:
    """A ConvTranspose with long rows, whose output is larger than its windows reach.

    onnxruntime 1.32 refuses an output padding that is not less than the stride.
    """
    torch = pytest.importorskip("torch")
    meets_torch(
        "ConvTranspose<dilations=[2,2], strides=[2,2], output_padding=[1,1]>(a, b)",
        lambda a, b: torch.nn.functional.conv_transpose2d(a, b, dilation=2, stride=2, output_padding=1),
        (2, 16, 40, 40), (16, 17, 3, 3),
    )  # fmt: skip


@pytest.mark.torch
@pytest.mark.parametrize(("kernel", "pads"), [((3, 2), (0, 1)), ((1, 3), (0, 0)), ((3, 3), (2, 1))])
def test_gradients_of_few_places_and_heavy_weights_are_torchs(
    kernel: tuple[int, int], pads: tuple[int, int]
) -> None:
    torch = pytest.importorskip("torch")
    meets_torch(
        f"Conv<pads={[*pads] * 2}>(a, b)",
        lambda a, b: torch.nn.functional.conv2d(a, b, padding=pads),
        (1, 17, 3, 4),
        (20, 17, *kernel),
    )
