"""Files that onnxruntime runs and ONNX's checker refuses train as the complete ones do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from onnxfit import ModelError, Trainer, inspect
from onnxfit.load.reading import load_model
from tests.graph.graphs import parse

RNG = np.random.default_rng(0)
X = RNG.standard_normal((6, 2)).astype(np.float32)
Y = RNG.standard_normal((6, 1)).astype(np.float32)
LINEAR = (
    '<ir_version: 8, opset_import: ["": 17]> line (float[N, 2] x) => (float[N, 1] y)'
    " <float[2, 1] w = {1, 2}> { s = MatMul(x, w)  y = Tanh(s) }"
)


def trained(model: onnx.ModelProto) -> np.ndarray:
    trainer = Trainer(model, loss="mse", optimizer=0.1)
    trainer.fit(X, Y, epochs=2, batch_size=3, verbose=0)
    exported = trainer.export()
    np.testing.assert_allclose(run(exported, X), trainer.predict(X), rtol=1e-6)
    return trainer.get_weights()["w"]


def run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, {"x": x})[0]


def without_shape(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.ClearField("shape")


def without_type(model: onnx.ModelProto) -> None:
    model.graph.output[0].ClearField("type")


def without_name(model: onnx.ModelProto) -> None:
    model.graph.name = ""


def long_name_of_onnx(model: onnx.ModelProto) -> None:
    model.opset_import[0].domain = "ai.onnx"
    for node in model.graph.node:
        node.domain = "ai.onnx"


def both_names_of_onnx(model: onnx.ModelProto) -> None:
    long_name_of_onnx(model)
    model.opset_import.append(helper.make_opsetid("", 17))


def not_sorted(model: onnx.ModelProto) -> None:
    first = onnx.NodeProto.FromString(model.graph.node[0].SerializeToString())
    del model.graph.node[0]
    model.graph.node.append(first)


def initializers_no_inputs_in_ir_3(model: onnx.ModelProto) -> None:
    model.ir_version = 3


def initializers_as_inputs(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, (2, 1)))


def unused_domains(model: onnx.ModelProto) -> None:
    for domain in ("com.microsoft", "com.microsoft.nchwc", "ai.onnx.training", "my.domain"):
        model.opset_import.append(helper.make_opsetid(domain, 1))


def wrong_value_info(model: onnx.ModelProto) -> None:
    model.graph.value_info.append(
        helper.make_tensor_value_info("s", TensorProto.FLOAT, ("N", 1, 7))
    )


@pytest.mark.parametrize(
    "change",
    [
        without_shape,
        without_type,
        without_name,
        long_name_of_onnx,
        both_names_of_onnx,
        not_sorted,
        initializers_no_inputs_in_ir_3,
        initializers_as_inputs,
        unused_domains,
        wrong_value_info,
    ],
)
def test_trains_what_onnxruntime_runs(change: Callable[[onnx.ModelProto], None]) -> None:
    model = parse(LINEAR)
    change(model)
    np.testing.assert_allclose(run(model, X), run(parse(LINEAR), X))  # onnxruntime runs it
    before = model.SerializeToString()
    np.testing.assert_array_equal(trained(model), trained(parse(LINEAR)))
    assert model.SerializeToString() == before, "the caller's model changed"


def test_an_output_gets_the_shape_that_follows() -> None:
    model = parse(LINEAR)
    without_type(model)
    (output,) = load_model(model).graph.output
    assert output == parse(LINEAR).graph.output[0]


def test_com_microsoft_need_not_be_imported() -> None:
    text = LINEAR.replace('"": 17', '"": 17, "com.microsoft": 1')
    model = parse(text.replace("Tanh(s)", "com.microsoft.Gelu(s)"))
    expected = trained(model)
    del model.opset_import[1]
    assert run(model, X).shape == (6, 1)
    np.testing.assert_array_equal(trained(model), expected)


def test_a_circle_of_nodes_is_refused() -> None:
    model = parse(LINEAR)
    model.graph.node[0].input[0] = "y"
    with pytest.raises(ModelError, match="not a valid ONNX model: Nodes in a graph must be"):
        load_model(model)


# What onnxruntime's optimizer writes into ONNX's own domain, in any opset


def normalized(op_type: str, opset: int, declared: bool) -> onnx.ModelProto:
    inputs = ["x", "g", "b"] if op_type == "LayerNormalization" else ["x", "g"]
    arrays = {"g": (4,), "b": (4,), "w": (4, 2)}
    graph = helper.make_graph(
        [
            helper.make_node(op_type, inputs, ["n"], name="norm", axis=-1, epsilon=1e-3),
            helper.make_node("MatMul", ["n", "w"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("N", 4))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ("N", 2) if declared else None)],
        [
            onnx.numpy_helper.from_array(
                np.random.default_rng(1).standard_normal(shape).astype(np.float32), name
            )
            for name, shape in arrays.items()
            if name == "w" or name in inputs
        ],
    )
    imports = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=imports, ir_version=7)


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("opset", [11, 13, 17])
@pytest.mark.parametrize("op_type", ["LayerNormalization", "SimplifiedLayerNormalization"])
def test_gradients_of_normalizations_by_finite_differences(
    op_type: str, opset: int, declared: bool
) -> None:
    model = normalized(op_type, opset, declared)
    x = RNG.standard_normal((5, 4)).astype(np.float32)
    y = RNG.standard_normal((5, 2)).astype(np.float32)
    rate = 1e-2
    trainer = Trainer(model, loss="mse", optimizer=rate)
    np.testing.assert_allclose(trainer.predict(x), run(model, x), rtol=1e-5, atol=1e-6)
    before = trainer.get_weights()
    trainer.train_on_batch(x, y)
    after = trainer.get_weights()
    assert set(before) == {t.name for t in model.graph.initializer}
    for name, array in before.items():
        direction = RNG.standard_normal(array.shape)
        slope = np.sum((before[name] - after[name]) / rate * direction)
        h = 1e-2
        moved = [loss_of(model, {**before, name: array + s * h * direction}, x, y) for s in (1, -1)]
        np.testing.assert_allclose(slope, (moved[0] - moved[1]) / (2 * h), rtol=2e-2, atol=1e-3)
    assert trainer.export().graph.node[0].domain == ""


def loss_of(model: onnx.ModelProto, weights: dict[str, Any], x: Any, y: Any) -> float:
    """The mean squared error in double precision, by the formula of the layers."""
    n = x.astype(np.float64)
    if model.graph.node[0].op_type == "LayerNormalization":
        n = n - n.mean(-1, keepdims=True)
    n = n / np.sqrt((n * n).mean(-1, keepdims=True) + 1e-3) * weights["g"] + weights.get("b", 0)
    return float(((n @ weights["w"] - y) ** 2).mean())


def test_inspect_names_the_normalization() -> None:
    report = inspect(normalized("SimplifiedLayerNormalization", 13, declared=False))
    assert report.trains
    assert [use.operator for use in report.operators] == ["MatMul", "SimplifiedLayerNormalization"]


OPTIMIZED = {
    "FusedMatMul": (
        "(float[N, 3, 4] x) => (y) <float[4, 2] w, float half = {0.5}>"
        " { t = Transpose <perm = [0, 2, 1]> (x)  m = MatMul(t, x)  s = Mul(m, half)"
        "   p = MatMul(s, w)  q = Sigmoid(p)  y = Mul(p, q) }",
        (6, 3, 4),
    ),
    "FusedConv": (
        "(float[N, 2, 5, 5] x) => (y) <float[3, 2, 3, 3] w, float[3, 2] v, float[2] b>"
        " { c = Conv(x, w)  r = Relu(c)  g = GlobalAveragePool(r)  f = Flatten(g)"
        "   m = Gemm(f, v, b)  y = Relu(m) }",
        (6, 2, 5, 5),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZED)
def test_trains_files_as_onnxruntime_optimizes_them(name: str, tmp_path: Any) -> None:
    text, shape = OPTIMIZED[name]
    model = parse('<ir_version: 7, opset_import: ["": 13]> g ' + text.replace("(y)", "(float[] y)"))
    without_shape(model)
    weights = {v.name: v for v in model.graph.value_info}
    rng = np.random.default_rng(2)
    for weight in weights.values():
        sizes = [d.dim_value for d in weight.type.tensor_type.shape.dim]
        array = rng.standard_normal(sizes).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, weight.name))
    del model.graph.value_info[:]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    optimized = onnx.load(tmp_path / "optimized.onnx")
    assert name in {node.op_type for node in optimized.graph.node}
    without_shape(optimized)
    x = rng.standard_normal(shape).astype(np.float32)
    y = rng.standard_normal(run(model, x).shape).astype(np.float32)
    losses = []
    for source in (model, optimized):
        trainer = Trainer(source, loss="mse", optimizer=0.01)
        trainer.fit(x, y, epochs=3, batch_size=3, verbose=0)
        losses.append(trainer.evaluate(x, y)["loss"])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_operators_of_one_machine_are_refused_with_the_way_out() -> None:
    text = '<ir_version: 8, opset_import: ["": 17, "com.microsoft.nchwc": 1]> '
    model = parse(
        text + "g (float[N, 8, 2, 2] x) => (float[N, 8, 2, 2] y)"
        " { y = com.microsoft.nchwc.ReorderOutput(x) }"
    )
    with pytest.raises(ModelError, match="optimized at ORT_ENABLE_EXTENDED"):
        Trainer(model, loss="mse")


# Declared shapes that contradict the computed ones


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        ("N, 7", "N,7"), ("N, 1, 1", "N,1,1"), ("K", "K"), ("1, 1", "1,1"), ("3, 1", "3,1"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("settings", [{}, {"dynamic_batch": True}, {"backend": "forward_backward"}])
def test_a_wrong_shape_of_an_output_is_corrected_with_a_warning(
    shape: str, named: str, settings: Any
) -> None:
    """onnxruntime warns as well, and runs the file."""
    model = parse(LINEAR.replace("float[N, 1] y", f"float[{shape}] y"))
    with pytest.warns(UserWarning, match=f"with shape .{named}., but Tanh '.*.N,1.") as caught:
        trainer = Trainer(model, loss="mse", **settings)
    assert len(caught) == 1
    right = Trainer(parse(LINEAR), loss="mse", **settings)
    x, y = np.ones((5, 2), np.float32), np.zeros((5, 1), np.float32)
    for one in (trainer, right):
        one.fit(x, y, epochs=2, batch_size=2, verbose=0)
    np.testing.assert_array_equal(trainer.predict(x), right.predict(x))
    assert trainer.history.history == right.history.history
    with pytest.warns(UserWarning, match="The computed shape is used") as caught:
        inspect(model)
    assert len(caught) == 1


def test_a_batch_that_only_the_declaration_leaves_open_names_the_node() -> None:
    text = LINEAR.replace("x)", "a)", 1).replace("{ s", "{ x = Reshape(a, sizes)  s")
    text = text.replace("<float[2", "<int64[2] sizes = {1, 2}, float[2", 1)
    with pytest.raises(ModelError, match=r"but Reshape '.*\[1,1\].*dynamic_batch"):
        Trainer(parse(text), loss="mse")
    hidden = text.replace("float[N, 1] y", "float[M, 1] y")
    with pytest.raises(ModelError, match=r"Reshape '.*' cannot turn .*onnxfit\.dynamic_batch"):
        Trainer(parse(hidden), loss="mse").fit(X, Y, batch_size=3, verbose=0)
