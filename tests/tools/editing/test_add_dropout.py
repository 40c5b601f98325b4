"""`add_dropout`: random in training, nothing in inference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

import onnxfit
from onnxfit import ModelError, SettingError, Trainer, UnknownNameError, add_dropout
from onnxfit.cli import main
from tests import models
from tests.tools.editing.graphs import (
    array_of,
    fresh_network,
    model_of,
    names_of,
    node,
    random,
    run,
)


def dropped(model: onnx.ModelProto) -> list[str]:
    """The values that a Dropout returns."""
    return [n.output[0] for n in model.graph.node if n.op_type == "Dropout"]


@pytest.mark.parametrize("opset", [7, 10, 11, 12, 13, 17, 21])
def test_inference_is_the_same_in_every_opset(opset: int) -> None:
    nodes = [node("Gemm", "x a", "h", transB=0), node("Relu", "h", "r"), node("Gemm", "r b", "y")]
    tensors = {"a": random(4, 6), "b": random(6, 3)}
    if opset < 11:  # Gemm had to have a bias
        tensors |= {"c": random(6), "d": random(3)}
        nodes[0].input.append("c")
        nodes[2].input.append("d")
    model = model_of(nodes, tensors, {"x": ("N", 4)}, {"y": ("N", 3)}, opset=opset)
    before = model.SerializeToString()
    changed = add_dropout(model, 0.4)
    onnx.checker.check_model(changed, full_check=True)
    assert dropped(changed) == ["r"]
    x = random(5, 4)
    np.testing.assert_array_equal(run(changed, x=x), run(model, x=x))
    assert model.SerializeToString() == before
    trainer = Trainer(changed, loss="mse")
    np.testing.assert_array_equal(trainer.predict(x), run(model, x=x)[0])
    assert set(trainer.get_weights()) == set(tensors)


@pytest.mark.parametrize("backend", ["full", "forward_backward", "in_place"])
def test_training_drops_the_given_share_and_scales_the_rest(backend: str) -> None:
    """y = sum of dropped ones: each row is Binomial(n, 1 - rate) / (1 - rate)."""
    count, rate = 4000, 0.3
    nodes = [node("Relu", "x", "r"), node("MatMul", "r w", "y")]
    model = model_of(nodes, {"w": np.ones((count, 1), np.float32)}, {"x": ("N", count)}, {"y": ("N", 1)})  # fmt: skip
    x = np.ones((50, count), np.float32)
    # the gradient of the mean of y by w is the mean of the dropped inputs
    trainer = Trainer(
        add_dropout(model, rate), loss=lambda op, t, y: y, optimizer=1.0, backend=backend
    )
    trainer.train_on_batch(x, np.zeros((50, 1), np.float32))
    means = 1 - trainer.get_weights()["w"]
    scaled = means * 50 * (1 - rate)  # how many of 50 rows kept each number
    np.testing.assert_allclose(scaled, np.rint(scaled), atol=1e-3)
    assert abs(scaled.mean() / 50 - (1 - rate)) < 0.01
    assert scaled.std() == pytest.approx((50 * rate * (1 - rate)) ** 0.5, rel=0.1)
    assert trainer.evaluate(x, np.zeros((50, 1), np.float32))["loss"] == pytest.approx(
        float((x @ trainer.get_weights()["w"]).mean()), rel=1e-4
    )


def test_an_export_keeps_the_nodes_and_the_numbers(tmp_path: Path) -> None:
    model = models.mlp((4, 8, 8, 3))
    trainer = Trainer(add_dropout(model, 0.5), loss="mse")
    x, y = random(12, 4), random(12, 3)
    trainer.fit(x, y, epochs=2, verbose=0)
    exported = trainer.export(tmp_path / "m.onnx")
    assert len(dropped(exported)) == 2
    np.testing.assert_allclose(run(exported, x=x)[0], trainer.predict(x), rtol=1e-6)
    again = Trainer(exported, loss="mse")
    np.testing.assert_array_equal(again.predict(x), trainer.predict(x))
    resumed = Trainer.load(trainer.save(tmp_path / "c.ckpt"))
    trainer.fit(x, y, epochs=2, verbose=0)
    resumed.fit(x, y, epochs=2, verbose=0)
    np.testing.assert_equal(resumed.get_weights(), trainer.get_weights())


def test_the_default_is_before_each_layer_but_the_first() -> None:
    assert dropped(add_dropout(fresh_network(), 0.1)) == ["n1", "n2"]
    nodes = [
        node("Conv", "x c", "h"), node("Relu", "h", "r"), node("MaxPool", "r", "p", kernel_shape=[2, 2]),
        node("Flatten", "p", "f"), node("Gemm", "f w", "y"),
    ]  # fmt: skip
    tensors = {"c": random(2, 1, 3, 3), "w": random(8, 3)}
    model = model_of(nodes, tensors, {"x": ("N", 1, 7, 7)}, {"y": ("N", 3)})
    nodes[2].attribute.append(onnx.helper.make_attribute("strides", [2, 2]))
    model = model_of(nodes, tensors, {"x": ("N", 1, 6, 6)}, {"y": ("N", 3)})
    assert dropped(add_dropout(model, 0.1)) == ["p"]
    assert dropped(add_dropout(model, 0.1, after="Relu")) == ["r"]
    assert dropped(add_dropout(model, 0.1, after=["r", "Max*"])) == ["r", "p"]


def test_nothing_is_inserted_twice() -> None:
    changed = add_dropout(fresh_network(), 0.1)
    with pytest.raises(SettingError, match="where a Dropout is already"):
        add_dropout(changed, 0.1)
    assert dropped(add_dropout(changed, 0.1, after="Relu")) == ["n1", "r", "n2"]


def test_names_stay_and_new_ones_are_free() -> None:
    model = fresh_network()
    changed = add_dropout(add_dropout(model, 0.1, after="a"), 0.2)
    assert names_of(model) < names_of(changed)
    rates = sorted(float(array_of(changed, name)) for name in names_of(changed) - names_of(model))
    assert rates == pytest.approx([0.1, 0.2])


def test_constants_integers_and_outputs_are_not_dropped() -> None:
    nodes = [
        node("Transpose", "w", "t"), node("Shape", "x", "s"), node("MatMul", "x t", "h"),
        node("Relu", "h", "y"),
    ]  # fmt: skip
    model = model_of(nodes, {"w": random(3, 4)}, {"x": ("N", 4)}, {"y": ("N", 3), "s": (2,)}, integers=["s"])  # fmt: skip
    for after in ("Transpose", "Shape", "y", "*"):
        with pytest.raises(SettingError, match="found no value to drop"):
            add_dropout(model, 0.1, after=after)
    assert dropped(add_dropout(model, 0.1, after=["h", "*"])) == ["h"]


@pytest.mark.parametrize("rate", [0, 1, -0.1, 1.5, float("nan"), "half"])
def test_a_rate_is_above_0_and_below_1(rate: object) -> None:
    with pytest.raises(SettingError, match="rate"):
        add_dropout(fresh_network(), rate)  # type: ignore[arg-type]


def test_an_unknown_name_and_an_old_opset_are_errors() -> None:
    with pytest.raises(UnknownNameError, match=r"No node, value or operator is called 'Rellu'.*'Relu'"):  # fmt: skip
        add_dropout(fresh_network(), 0.1, after="Rellu")
    old = onnx.parser.parse_model('<ir_version: 3, opset_import: ["": 6]> g (float[N] x) => (float[N] y) { y = Relu(x) }')  # fmt: skip
    with pytest.raises(ModelError, match="opset 7 or later, got opset 6"):
        add_dropout(old, 0.1)


def test_the_command_writes_the_same_model(tmp_path: Path) -> None:
    source, output = tmp_path / "m.onnx", tmp_path / "d.onnx"
    onnx.save(fresh_network(), source)
    for options, after in ((["0.2"], "*"), (["0.2", "--after", "Relu", "--after", "a"], ["Relu", "a"])):  # fmt: skip
        result = CliRunner().invoke(main, ["add-dropout", str(source), str(output), *options])
        assert result.exit_code == 0, result.output
        expected = onnxfit.add_dropout(source, 0.2, after)
        assert onnx.load(output) == expected
