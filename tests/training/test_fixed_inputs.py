"""Inputs with one value for all batches: constants of every graph, and inputs of every export."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx.numpy_helper import from_array

import onnxfit
from onnxfit import Trainer
from onnxfit.errors import CheckpointError, DataError, SettingError, UnknownNameError
from onnxfit.training.setting_values import decode_setting, encode_setting
from tests.cli.helpers import call, done

BACKENDS = ["full", "forward_backward", "in_place"]
RNG = np.random.default_rng(0)
X = RNG.standard_normal((20, 6, 4)).astype(np.float32)
Y = RNG.standard_normal((20, 1)).astype(np.float32)


def recurrent() -> onnx.ModelProto:
    """A GRU whose first state is an input, and whose result is divided by another input."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[batch, 6, 4] x, float[1, batch, 5] h0, int64 rate) => (float[batch, 1] y)
        <int64[1] first = {0}>
        { steps = Transpose<perm = [1, 0, 2]>(x)  a, last = GRU<hidden_size = 5>(steps, W, R, , , h0)
          row = Squeeze(last, first)  whole = MatMul(row, v)  factor = Cast<to = 1>(rate)
          y = Div(whole, factor) }"""
    )
    shapes = {"W": (1, 15, 4), "R": (1, 15, 5), "v": (5, 1)}
    rng = np.random.default_rng(1)
    for name, shape in shapes.items():
        model.graph.initializer.append(from_array(rng.normal(size=shape).astype("f"), name))
    return model


def without_inputs(**constants: Any) -> onnx.ModelProto:
    """The same network, written without the inputs."""
    model = recurrent()
    kept = [value for value in model.graph.input if value.name not in constants]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    for i, (name, array) in enumerate(constants.items()):
        node = onnx.helper.make_node("Constant", [], [name], value=from_array(np.asarray(array)))
        model.graph.node.insert(i, node)
    return model


def new(model: onnx.ModelProto | None = None, **settings: Any) -> Trainer:
    return Trainer(model or recurrent(), loss="mse", **{"optimizer": 0.1, **settings})


FIXED = {"rate": 2, "h0": 0}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_fixed_input_trains_like_a_constant_of_the_file(backend: str) -> None:
    state = np.full((1, 4, 5), 0.5, np.float32)
    fixed = new(backend=backend, fixed_inputs={"rate": np.int32(2), "h0": state})
    constant = new(without_inputs(rate=np.int64(2), h0=state), backend=backend, weights="!h0")
    histories = [t.fit(X, Y, batch_size=4, epochs=2, verbose=0).history for t in (fixed, constant)]
    assert histories[0] == histories[1]
    for name, weight in fixed.get_weights().items():
        assert np.array_equal(weight, constant.get_weights()[name])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_number_fills_a_shape_with_the_sizes_of_other_inputs(backend: str) -> None:
    """The state has a row for each row of x, also in a shorter last batch."""
    trainer = new(backend=backend, fixed_inputs=FIXED)
    assert [spec.name for spec in trainer.inputs] == ["x"]
    trainer.fit(X, Y, batch_size=8, verbose=0)  # the last batch has 4 rows
    feeds = {"x": X, "h0": np.zeros((1, 20, 5), np.float32), "rate": np.array(2)}
    session = onnxruntime.InferenceSession(trainer.export().SerializeToString())
    np.testing.assert_allclose(trainer.predict(X), session.run(None, feeds)[0], rtol=1e-5)


def test_an_export_has_the_inputs_and_nodes_of_the_file() -> None:
    file = recurrent()
    trainer = new(file, fixed_inputs=FIXED)
    trainer.fit(X, Y, verbose=0)
    for model in (trainer.export(), trainer.model):
        assert model.graph.input == file.graph.input
        assert model.graph.node == file.graph.node
    assert file == recurrent()


def test_a_fixed_input_is_no_weight() -> None:
    weights = new(fixed_inputs={"rate": 2, "h0": np.ones((1, 4, 5), np.float32)}).get_weights()
    assert sorted(weights) == ["R", "W", "v"]
    with pytest.raises(UnknownNameError):
        new(fixed_inputs=FIXED, weights=["h0"])


def test_a_checkpoint_has_the_fixed_inputs(tmp_path: Path) -> None:
    trainer = new(fixed_inputs={"rate": 2, "h0": np.ones((1, 4, 5), np.float32)})
    trainer.fit(X, Y, batch_size=4, verbose=0)
    trainer.save(tmp_path / "c")
    loaded = Trainer.load(tmp_path / "c")
    trainer.fit(X, Y, batch_size=4, verbose=0)
    loaded.fit(X, Y, batch_size=4, verbose=0)
    for name, weight in trainer.get_weights().items():
        assert np.array_equal(weight, loaded.get_weights()[name])
    passed = Trainer.load(tmp_path / "c", fixed_inputs={"rate": 4, "h0": 0})
    assert passed.settings["fixed_inputs"]["rate"] == 4
    assert len(passed.predict(X)) == 20


def test_a_later_change_of_the_array_has_no_effect() -> None:
    state = np.zeros((1, 4, 5), np.float32)
    trainer = new(fixed_inputs={"rate": 2, "h0": state})
    before = trainer.predict(X[:4])
    state += 1
    assert np.array_equal(trainer.predict(X[:4]), before)
    assert not trainer.settings["fixed_inputs"]["h0"].any()


@pytest.mark.parametrize(
    ("fixed", "error", "words"),
    [
        ({"sr": 1}, UnknownNameError, "No input of the model is called 'sr'. .*: h0, rate, x"),
        ({"rate": [1, 2]}, DataError, r"shape \(2,\), but the input is rate: int64\[\]"),
        ({"rate": 1.5}, DataError, "int64 cannot represent"),
        ({"rate": "a"}, DataError, r"fixed_inputs\['rate'\] has element type"),
        ({"h0": np.zeros((2, 4, 5))}, DataError, r"h0: float32\[1, batch, 5\]"),
        ({"x": 0, "h0": 0, "rate": 1}, SettingError, "fixes every input"),
        ({"x": 0}, SettingError, None),
        (3, SettingError, "mapping from inputs"),
        ({1: 2}, SettingError, "mapping from inputs"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(fixed: Any, error: type, words: str | None) -> None:
    if words is None:  # x and h0 share their only size with a name
        fixed, words = {"x": 0, "h0": 0}, "no other input has a size of this name"
    with pytest.raises(error, match=words):
        new(fixed_inputs=fixed)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int64", "bool", "uint8"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_an_array_survives_the_settings_of_a_checkpoint(dtype: str, shape: tuple[int]) -> None:
    array = np.asarray(RNG.normal(size=shape) * 3).astype(dtype)
    encoded = json.loads(json.dumps(encode_setting({"x": array})))
    decoded = decode_setting("fixed_inputs", encoded, "c")["x"]
    assert decoded.dtype == array.dtype
    assert np.array_equal(decoded, array)
    for key, wrong in (("type", "O"), ("shape", [7]), ("onnxfit:bytes", "!"), ("shape", ["a"])):
        damaged = copy.deepcopy(encoded)
        damaged["x"][key] = wrong
        with pytest.raises(CheckpointError, match="damaged"):
            decode_setting("fixed_inputs", damaged, "c")


def test_the_summary_names_fixed_inputs() -> None:
    lines = new(fixed_inputs={"rate": 2, "h0": np.ones((1, 4, 5))}).summary().splitlines()
    assert "fixed      rate = 2" in lines
    assert "fixed      h0 = an array of shape (1, 4, 5)" in lines


def test_inspect_needs_no_value_of_the_data() -> None:
    assert onnxfit.inspect(recurrent(), fixed_inputs=FIXED).trains
    with pytest.raises(UnknownNameError):
        onnxfit.inspect(recurrent(), fixed_inputs={"sr": 1})


def test_the_command_line_fixes_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(recurrent(), "m.onnx")
    np.savez("d.npz", x=X, y=Y)
    np.save("h0.npy", np.zeros((1, 20, 5), np.float32))
    fixed = ["--fixed-input", "rate=2", "--fixed-input", "h0=0"]
    data = ["--data", "d.npz"]
    done("fit", "m.onnx", *data, "-l", "mse", *fixed, "--checkpoint", "c/", "-o", "t.onnx", "-q")
    assert [value.name for value in onnx.load("t.onnx").graph.input] == ["x", "h0", "rate"]
    trained = done("evaluate", "t.onnx", *data, "-l", "mse", *fixed, "--json")
    assert json.loads(trained) == json.loads(done("evaluate", "c/last.onnxfit", *data, "--json"))
    array = ["--fixed-input", "rate=2", "--fixed-input", "h0=h0.npy"]
    done("predict", "t.onnx", *data, *array, "-o", "p.npy")
    done("predict", "c/last.onnxfit", *data, "-o", "q.npy")
    np.testing.assert_allclose(np.load("p.npy"), np.load("q.npy"), rtol=1e-5)
    done("inspect", "m.onnx", *fixed)


@pytest.mark.parametrize("text", ["rate", "=2", "rate=a", "rate=none.npy", "rate={}", "rate="])
def test_the_command_line_refuses_other_values(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(recurrent(), "m.onnx")
    result = call("inspect", "m.onnx", "--fixed-input", text)
    assert result.exit_code
    assert "--fixed-input" in result.output
    twice = call("inspect", "m.onnx", "--fixed-input", "rate=1", "--fixed-input", "rate=2")
    assert twice.exit_code
    assert "twice" in twice.output


@pytest.mark.torch
def test_a_module_is_called_without_fixed_inputs() -> None:
    torch = pytest.importorskip("torch")
    from onnxfit.torch.module import OnnxModule

    module = OnnxModule(recurrent(), fixed_inputs=FIXED)
    assert module.input_names == ("x",)
    given = OnnxModule(recurrent())
    out = module(torch.from_numpy(X))
    zeros = torch.zeros(1, 20, 5)
    torch.testing.assert_close(out, given(torch.from_numpy(X), zeros, torch.tensor(2)))
    out.sum().backward()
    assert module.export().graph.input == recurrent().graph.input
    assert copy.deepcopy(module).export() == module.export()
