"""An operator that onnxfit does not know is added in one place, and then trains from end to end."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxfit import DataLoader, GradientError, Trainer, gradient_model, inspect
from onnxfit.gradients import decompose, register, same_type_and_shape
from onnxfit.graph import inference
from onnxfit.graph.values import GraphBuilder, Value

# CDist runs in onnxruntime; Swish is of a domain that nothing knows. ONNX infers no type of either.
DISTANCES = """nearest (float[N, 2] x) => (float[N, 3] y) <float[3, 2] centers = {0, 0, 1, 1, 2, 0}>
    { d = com.microsoft.CDist<metric = "sqeuclidean">(x, centers) y = Neg(d) }"""
SWISH = """swish (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 0.5, -0.5, 1}>
    { h = MatMul(x, w) s = my.domain.Swish<beta = 2.0>(h) y = Tanh(s) }"""


def parse(graph: str) -> onnx.ModelProto:
    imports = '"": 21, "com.microsoft": 1, "my.domain": 1'
    return onnx.parser.parse_model(f"<ir_version: 10, opset_import: [{imports}]> {graph}")


def data(outputs: int) -> DataLoader:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 2)).astype(np.float32)
    y = np.tanh(x[:, :1] + np.arange(outputs)).astype(np.float32)
    return DataLoader(x, y, batch_size=16)


@pytest.fixture(autouse=True)
def _restored(table_of_rules_restored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "INFERENCES", dict(inference.INFERENCES))


def add_cdist() -> None:
    def pairs(node: ir.Node) -> None:
        a, b = node.inputs
        node.outputs[0].type = a.type
        node.outputs[0].shape = ir.Shape([a.shape[0], b.shape[0]])

    @register("CDist", "com.microsoft", infer=pairs)
    def cdist(op: GraphBuilder, a: Value, b: Value, y: Value, dy: Value, *, metric: str):
        assert metric == "sqeuclidean"

        def of(x: Value, other: Value, dy: Value) -> Value:
            return 2 * (x * op.ReduceSum(dy, [1]) - dy @ other)

        return lambda: of(a, b, dy), lambda: of(b, a, op.Transpose(dy, perm=[1, 0]))


def add_swish() -> None:
    @decompose("Swish", "my.domain", infer=same_type_and_shape)
    def swish(op: GraphBuilder, x: Value, *, beta: float = 1.0) -> Value:
        return x * op.Sigmoid(beta * x)


@pytest.mark.parametrize(
    ("graph", "add", "outputs"),
    [(DISTANCES, add_cdist, 3), (SWISH, add_swish, 2)],
    ids=["rule", "decomposition"],
)
@pytest.mark.parametrize("gradient", ["auto", "onnx"])
def test_it_trains(graph: str, add, outputs: int, gradient: str) -> None:
    model = parse(graph)
    with pytest.raises(GradientError, match=r"onnxfit\.gradients\.register adds one"):
        Trainer(model, loss="mean_squared_error", gradient=gradient)
    add()
    assert inspect(model, gradient=gradient).trains
    trainer = Trainer(model, loss="mean_squared_error", optimizer="adam", gradient=gradient)
    losses = trainer.fit(data(outputs), epochs=5, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


def test_the_shape_behind_it_is_known() -> None:
    """ONNX's own inference knows neither, so a shape in the gradient graph comes from `infer`."""
    add_cdist()
    written = gradient_model(parse(DISTANCES), "centers", gradient="onnx")
    assert [d.dim_value for d in written.graph.output[1].type.tensor_type.shape.dim] == [3, 2]
    work = ir.from_proto(parse(DISTANCES))
    for node in work.graph:
        inference.infer_outputs(work.graph, node)
    assert list(map(str, work.graph.node(0).outputs[0].shape)) == ["N", "3"]
    assert work.graph.node(0).outputs[0].dtype == ir.DataType.FLOAT


@pytest.mark.parametrize("name", ["FusedMatMul", "BiasGelu", "Attention", "SkipLayerNormalization"])
def test_operators_of_onnxruntime_declare_their_inference(name: str) -> None:
    assert ("com.microsoft", name) in inference.INFERENCES
