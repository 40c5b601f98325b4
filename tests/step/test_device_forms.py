"""Forms that a device needs compute the same as those of the CPU."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from onnxfit.graph.opset import OPSET
from onnxfit.graph.values import GraphBuilder
from onnxfit.step.finish import finish


@pytest.mark.parametrize(
    ("a_shape", "b_shape"), [((3,), (3, 4)), ((2, 3), (3,)), ((3,), (3,)), ((3,), (5, 3, 2))]
)
def test_products_with_vectors_are_products_of_matrices(
    a_shape: tuple[int, ...], b_shape: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-9, 9, shape).astype(np.float32) for shape in (a_shape, b_shape))
    model = product(a_shape, b_shape, "webgpu")
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in model.graph.value_info}
    (multiply,) = (node for node in model.graph.node if node.op_type == "MatMul")
    assert all(ranks.get(name, 2) >= 2 for name in multiply.input)
    assert {"Unsqueeze", "Squeeze"} <= {node.op_type for node in model.graph.node}
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (y,) = session.run(["y"], {"a": a, "b": b})
    np.testing.assert_array_equal(y, a @ b)


def test_the_cpu_multiplies_vectors() -> None:
    assert [node.op_type for node in product((3,), (3, 4), "cpu").graph.node] == ["MatMul"]


def product(a_shape: tuple[int, ...], b_shape: tuple[int, ...], device: str) -> onnx.ModelProto:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="g")
    op = GraphBuilder(graph, device=device)
    op.output("y", op.input("a", np.float32, a_shape) @ op.input("b", np.float32, b_shape))
    return finish(op)
