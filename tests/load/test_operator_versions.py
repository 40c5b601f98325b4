"""An operator means the same in an older opset if only types that it does not use were added."""

from __future__ import annotations

import onnx
import onnx.shape_inference
import pytest

from onnxfit.load.operator_versions import CHANGED, oldest_opset, types_in
from tests.graph.graphs import parse

NEWEST = onnx.defs.onnx_opset_version()


def oldest(body: str, opset: int, *, inputs: str = "float[2,4,4,4] x") -> int:
    model = parse(f'<ir_version: 10, opset_import: ["": {opset}]> g ({inputs}) => (y) {{ {body} }}')
    graph = onnx.shape_inference.infer_shapes(model).graph
    types = dict(types_in(graph))
    return max(oldest_opset(node, opset, types, 13) for node in graph.node)


@pytest.mark.parametrize(
    ("body", "opset", "needed"),
    [
        ("y = Identity(x)", 21, 13),
        ("y = Cast<to = 11>(x)", 21, 13),
        ("y = Cast<to = 17>(x)", 21, 19),  # float8
        ("y = Gelu(x)", 21, 20),
        ("y = ReduceMax<keepdims = 1>(x)", 21, 13),
        ("a = Constant<value_ints = [1]>() y = ReduceMax(x, a)", 21, 18),  # the axes as an input
        ("y = Mod<fmod = 1>(x, x)", 21, 13),
        ("y = Softmax(x)", 21, 13),
        ("s = Shape<start = 1>(x) y = Cast<to = 1>(s)", 21, 15),
        ("y = Conv(x, x)", 22, 13),
        ("y = MaxPool<kernel_shape = [3, 3], strides = [2, 2], ceil_mode = 1>(x)", 22, 13),
        ("y = MaxPool<kernel_shape = [1, 1], strides = [2, 2], ceil_mode = 1>(x)", 22, 22),
        ("y = MaxPool<kernel_shape = [1, 1], strides = [2, 2]>(x)", 22, 13),
        (
            "y = AveragePool<kernel_shape = [3, 3], strides = [3, 3], pads = [0, 0, 1, 1],"
            " ceil_mode = 1>(x)",
            22,
            22,
        ),
        ("y = Swish(x)", 24, 24),
        pytest.param(
            "k = Constant<value_ints = [1]>() y, i = TopK(x, k)",
            24,
            13,
            marks=pytest.mark.skipif(NEWEST < 25, reason="onnx 1.19 infers no type of TopK"),
        ),
        ('y = Cast<to = 1, round_mode = "up">(x)', 24, 24),
        ("y = CumProd(x, x)", 26, 26),
        ("y = Mod(x, x)", 28, 28),  # the floor of a quotient of floats
        ("y = Mod<fmod = 1>(x, x)", 28, 13),
        ("y = SpaceToDepth<blocksize = 2>(x)", 28, 13),
        ('y = SpaceToDepth<blocksize = 2, mode = "CRD">(x)', 28, 28),
        ("y = Celu(x)", 28, 13),
    ],
)
def test_the_oldest_opset_of_a_node(body: str, opset: int, needed: int) -> None:
    if opset > NEWEST:
        pytest.skip(f"onnx {onnx.__version__} reads opsets up to {NEWEST}")
    assert oldest(body, opset) == needed


@pytest.mark.skipif(NEWEST < 28, reason=f"onnx {onnx.__version__} does not have it")
@pytest.mark.parametrize(("type_", "needed"), [("float", 13), ("double", 28), ("float16", 28)])
def test_an_element_type_may_need_a_newer_opset(type_: str, needed: int) -> None:
    assert oldest("y = Celu(x)", 28, inputs=f"{type_}[2] x") == needed


@pytest.mark.skipif(NEWEST < 28, reason=f"onnx {onnx.__version__} does not have it")
def test_integers_may_be_divided_in_every_opset() -> None:
    assert oldest("y = Mod(x, x)", 28, inputs="int64[2] x") == 13


def test_a_value_of_unknown_type_keeps_the_opset() -> None:
    node = onnx.helper.make_node("Cast", ["x"], ["y"], to=1)
    assert oldest_opset(node, 21, {}, 13) == 21


@pytest.mark.parametrize(("op_type", "version"), CHANGED.items())
def test_an_operator_with_another_result_keeps_the_opset(op_type: str, version: int) -> None:
    types = {"x": onnx.helper.make_tensor_type_proto(1, None)}
    node = onnx.helper.make_node(op_type, ["x", "x", "x"], ["x"])
    assert oldest_opset(node, 21, types, version - 1) >= version
