"""The units of weights: for each layer, the axes that one output sums over."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxfit.graph.layers import unit_axes

NODES = {
    "y = MatMul(x, w)": ([4, 3], (0,)),
    "y = MatMul(w, x)": ([3, 4], (1,)),
    "t = Transpose<perm = [1, 0]>(w) y = MatMul(x, t)": ([3, 4], (1,)),
    "t = Transpose(w) y = MatMul(x, t)": ([3, 4], (1,)),
    "t = Identity(w) y = MatMul(x, t)": ([4, 3], (0,)),
    "y = MatMul(x, w) z = Add(y, w)": ([4, 4], (0,)),
    "y = Gemm(x, w)": ([4, 3], (0,)),
    "y = Gemm<transB = 1>(x, w)": ([3, 4], (1,)),
    "y = Gemm(w, x)": ([3, 4], (1,)),
    "y = Gemm<transA = 1>(w, x)": ([4, 3], (0,)),
    "y = Add(x, w)": ([4, 4], (1,)),
    "y = Mul(x, w)": ([1, 4], (0, 1)),
    "y = Mul(w, x)": ([4], (0,)),
    "i = Cast<to = 7>(x) y = Gather(w, i)": ([7, 3], (1,)),
}


@pytest.mark.parametrize(("nodes", "case"), NODES.items())
def test_a_unit_extends_over_the_axes_that_an_output_sums_over(nodes, case):
    shape, axes = case
    assert axes == axes_of(nodes, shape, [4, 4])


@pytest.mark.parametrize(
    ("node", "shape", "axes"),
    [
        ("y = Conv(x, w)", [8, 2, 3, 3], (1, 2, 3)),
        ("y = ConvTranspose(x, w)", [2, 8, 3, 3], (0, 2, 3)),
    ],
)
def test_a_filter_is_a_unit(node, shape, axes):
    assert axes_of(node, shape, [1, 2, 6, 6]) == axes


def axes_of(nodes, shape, data):
    sizes = ", ".join(map(str, data))
    output = "z" if "z =" in nodes else "y"
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> g (float[{sizes}] x) => (float[] {output})'
        f" {{ {nodes} }}"
    )
    tensor = onnx.numpy_helper.from_array(np.ones(shape, np.float32), "w")
    model.graph.initializer.append(tensor)
    return unit_axes(ir.from_proto(model).graph.initializers["w"])
