"""Forms that a device needs compute the same as those of the CPU."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from onnxfit import Trainer
from onnxfit.graph.values import GraphBuilder
from onnxfit.load.opset import OPSET
from onnxfit.step.batch_specs import batch_specs
from onnxfit.step.finish import finish
from onnxfit.step.split import split_step
from tests.models import mlp


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


@pytest.mark.parametrize(
    ("shape", "axes", "pads"),
    [((2, 3, 4, 5), [2, 3], [1, 0, 2, 3]), ((2, 3), [-1], [1, 2]), ((2, 3), [1, 0], [1, 2, 0, 4])],
)
@pytest.mark.parametrize("value", [None, 7.0])
def test_pads_of_some_axes_are_pads_of_all(
    shape: tuple[int, ...], axes: list[int], pads: list[int], value: float | None
) -> None:
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    results = []
    for device in ("cpu", "webgpu"):
        graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="g")
        op = GraphBuilder(graph, device=device)
        filled = None if value is None else op.constant(value)
        padding = op.input("pads", np.int64, (len(pads),))
        op.output("y", op.Pad(op.input("x", np.float32, shape), padding, filled, axes))
        model = finish(op)
        (pad,) = (node for node in model.graph.node if node.op_type == "Pad")
        assert (len(pad.input) == 4) == (device == "cpu")
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        results += session.run(["y"], {"x": x, "pads": np.array(pads)})
    np.testing.assert_array_equal(*results)


NUMBERS = np.array([-2.5, -0.0, 0.0, 1.0, np.inf, -np.inf, np.nan], np.float32)


@pytest.mark.parametrize("operator", ["Max", "Min", "Sum", "Sign", "And", "Or", "LogSoftmax"])
def test_operators_keep_their_numbers(operator: str) -> None:
    a, b = (grid.reshape(-1) for grid in np.meshgrid(NUMBERS, NUMBERS))
    feeds = {"a": a} if operator in ("Sign", "LogSoftmax") else {"a": a, "b": b}
    if operator in ("And", "Or"):
        feeds = {name: value > 0 for name, value in feeds.items()}
    if operator == "LogSoftmax":
        feeds = {"a": np.array([[1.0, -200.0, 300.0], [0.0, 0.0, -np.inf]], np.float32)}
    results = []
    for device in ("cpu", "webgpu"):
        graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="g")
        op = GraphBuilder(graph, device=device)
        inputs = [op.input(name, value.dtype, value.shape) for name, value in feeds.items()]
        op.output("y", getattr(op, operator)(*inputs))
        model = finish(op)
        assert (operator in {node.op_type for node in model.graph.node}) == (device == "cpu")
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        results += session.run(["y"], feeds)
    if operator == "Sign":  # ONNX says nothing of NaN
        results = [result[~np.isnan(a)] for result in results]
    np.testing.assert_allclose(*results, rtol=1e-6)


@pytest.mark.parametrize("operator", ["ReduceMean", "ReduceSum"])
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize(
    ("axes", "products"),
    [([0, 2, 3], 2), ([0, -1, -2], 2), ([0, 3], 2), ([0], 0), ([2, 3], 0), ([0, 2], 0), ([0, 1, 2, 3], 0)],
)  # fmt: skip
def test_channels_are_reduced_by_products_on_cuda(
    operator: str, keepdims: int, axes: list[int], products: int
) -> None:
    x = np.random.default_rng(0).normal(size=(4, 3, 5, 2))
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="g")
    op = GraphBuilder(graph, device="cuda")
    value = op.input("x", np.float64, x.shape)
    op.output("y", getattr(op, operator)(value, axes, keepdims=keepdims))
    model = finish(op)
    operators = [node.op_type for node in model.graph.node]
    assert operators.count("MatMul") == products
    assert (operator in operators) == (not products)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (y,) = session.run(["y"], {"x": x})
    reduce = np.mean if operator == "ReduceMean" else np.sum
    np.testing.assert_allclose(y, reduce(x, tuple(axes), keepdims=bool(keepdims)), rtol=1e-12)


def test_reductions_of_unknown_size_are_not_products() -> None:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="g")
    op = GraphBuilder(graph, device="cuda")
    op.output("y", op.ReduceSum(op.input("x", np.float32, ("N", 3, 5)), [0, 2]))
    assert [node.op_type for node in finish(op).graph.node] == ["ReduceSum"]


@pytest.mark.parametrize("rows", [None, 8])
def test_both_passes_have_the_forms_of_the_device(rows: int | None) -> None:
    operators = {}
    for device in ("cpu", "openvino"):
        trainer = Trainer(mlp((4, 3, 2), "Relu"), loss="cross_entropy")
        recipe = trainer._training.recipe.for_device(device)
        step = split_step(
            recipe, batch_specs(recipe, rows, False), list(recipe.outputs), recipe.weights
        )
        graphs = (step.forward.graph, step.backward.graph)
        operators[device] = {node.op_type for graph in graphs for node in graph.node}
    assert "HardSigmoid" in operators["cpu"]  # the derivative of Relu
    assert "HardSigmoid" not in operators["openvino"]
