"""Files of integers with several ranks, on the command line, as estimators and in checkpoints."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from click.testing import CliRunner

from onnxfit import Distillation, OnnxfitError, Quantization, Trainer, dequantize
from onnxfit.cli import main
from onnxfit.graph import tensors
from onnxfit.optimizers import SGD
from tests.distributed.threads import on_ranks
from tests.trainable.quantized import integer_files as files
from tests.trainable.quantized.integer_files import integer_file

X = files.rows(32)
Y = np.random.default_rng(2).normal(size=(32, files.COLUMNS)).astype(np.float32)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"backend": "forward_backward"},
        {"accumulate": 2},
        {"quantization": Quantization(scales="learned"), "optimizer": SGD(1e-4)},
    ],
    ids=str,
)
def test_ranks_train_the_same_integers(settings: dict[str, Any]) -> None:
    def trained(distribute: Any) -> tuple[dict[str, np.ndarray], bytes, float]:
        trainer = Trainer(
            integer_file(),
            loss="mse",
            threads=1,
            distribute=distribute,
            **{"optimizer": SGD(0.1), **settings},
        )
        trainer.fit(X, Y, epochs=2, batch_size=16, verbose=0)
        loss = trainer.evaluate(X, Y)["loss"]
        return trainer.get_weights(), trainer.export(lineage=False).SerializeToString(), loss

    weights, _, loss = trained(None)
    ranks = on_ranks(2, trained)
    assert ranks[0][1] == ranks[1][1]
    assert ranks[0][2] == ranks[1][2] == pytest.approx(loss, rel=1e-3)
    for name, array in weights.items():
        np.testing.assert_array_equal(ranks[0][0][name], ranks[1][0][name])
        np.testing.assert_allclose(ranks[0][0][name], array, rtol=1e-4, atol=1e-5)


def call(*arguments: object) -> str:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_line_trains_integers(tmp_path: Path) -> None:
    file = integer_file()
    onnx.save(file, tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", x=X, y=Y)
    data = tmp_path / "data.npz"
    options = ["--data", data, "--loss", "mse", "--optimizer", "adam", "--lr", 0.1, "-q"]
    folder, output = tmp_path / "run", tmp_path / "run" / "trained.onnx"
    call("fit", tmp_path / "m.onnx", *options, "--checkpoint", f"{folder}/", "-o", output)
    first = onnx.load(output)
    call("resume", folder, "--epochs", 2, "-q")
    trained = onnx.load(output)
    assert files.stripped(trained) == files.stripped(first) == files.stripped(file)
    assert len({model.SerializeToString() for model in (file, first, trained)}) == 3
    call("predict", output, "-d", data, "-b", 32, "-o", tmp_path / "y.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), files.run_file(trained, X))
    checkpoint = folder / "last.onnxfit"
    call("evaluate", checkpoint, "-d", data)
    call("export", checkpoint, "-o", tmp_path / "exported.onnx")
    assert onnx.load(tmp_path / "exported.onnx") == trained


@pytest.mark.parametrize("setting", ["scales=learned", "observe=1"])
def test_the_commands_train_scales(tmp_path: Path, setting: str) -> None:
    file = integer_file()
    onnx.save(file, tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", x=X, y=Y)
    options = ["--data", tmp_path / "data.npz", "--loss", "mse", "-q", "--quantization", setting]
    output, checkpoint = tmp_path / "run" / "t.onnx", f"{tmp_path}/run/"
    call("fit", tmp_path / "m.onnx", *options, "--checkpoint", checkpoint, "-o", output)
    first = onnx.load(output)
    call("resume", checkpoint, "--epochs", 2, "-q")
    call("export", tmp_path / "run" / "last.onnxfit", "-o", tmp_path / "exported.onnx")
    second = onnx.load(tmp_path / "exported.onnx")
    assert onnx.load(output) == second
    scales = []
    for model in (file, first, second):
        assert files.stripped(model) == files.stripped(file)
        scales += [t.SerializeToString() for t in model.graph.initializer if t.name == "x_scale"]
    assert len({*scales}) == (3 if setting == "scales=learned" else 2)


def test_the_commands_take_the_float_model_and_a_teacher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Trainer does, also after a stop and in another folder."""
    file = integer_file("int4", "channel")
    floats = dequantize(file)
    onnx.save(file, tmp_path / "m.onnx")
    onnx.save(floats, tmp_path / "floats.onnx")
    np.savez(tmp_path / "data.npz", x=X, y=Y)
    settings = {"quantization": Quantization(float_model=floats)}
    taught = Distillation(floats, weight=0.9)
    trainer = Trainer(file, loss="mse", optimizer=SGD(0.1), teacher=taught, **settings)
    trainer.fit(X, Y, epochs=2, verbose=0)
    monkeypatch.chdir(tmp_path)
    options = ["--data", "data.npz", "--loss", "mse", "--optimizer", "sgd", "--lr", 0.1, "-q"]
    options += ["--float-model", "floats.onnx", "--teacher", "floats.onnx"]
    options += ["--distillation", "weight=0.9"]
    call("fit", "m.onnx", *options, "--checkpoint", "run/", "-o", "run/t.onnx")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    call("resume", tmp_path / "run", "--epochs", 2, "-q", "--allow-paths-outside")
    assert onnx.load(tmp_path / "run" / "t.onnx") == trainer.export()
    assert trainer.export() != file


def test_an_estimator_trains_integers() -> None:
    pytest.importorskip("sklearn")
    from onnxfit.sklearn import OnnxRegressor

    file = integer_file("int4")
    # so slow that each float stays nearest to the integer that it began with
    settings = {"optimizer": SGD(1e-6), "epochs": 1, "warm_start": True}
    estimator = OnnxRegressor(model=file, **settings)
    estimator.fit(X, Y)
    first = estimator.trainer_.get_weights()["w"]
    assert estimator.trainer_.export(lineage=False) == file
    np.testing.assert_array_equal(estimator.predict(X), estimator.trainer_.predict(X))
    estimator.fit(X, Y)
    second = estimator.trainer_.get_weights()["w"]
    start = Trainer(file, loss="mse").get_weights()["w"]
    assert np.abs(second - start).sum() > 1.5 * np.abs(first - start).sum() > 0


def test_an_estimator_takes_the_settings_of_integers() -> None:
    """As Trainer does, and a pickle keeps the teacher."""
    pytest.importorskip("sklearn")
    from onnxfit.sklearn import OnnxRegressor

    file = integer_file("int4", "channel")
    settings = {"quantization": Quantization(scales="learned"), "teacher": dequantize(file)}
    estimator = OnnxRegressor(model=file, optimizer=SGD(1e-3), epochs=2, batch_size=32, **settings)
    estimator = pickle.loads(pickle.dumps(estimator.fit(X, Y)))
    seed = estimator.trainer_.seed
    trainer = Trainer(file, loss="mse", optimizer=SGD(1e-3), seed=seed, **settings)
    trainer.fit(X, Y, epochs=2, batch_size=32, verbose=0)
    weights = trainer.get_weights()
    assert "w_scale" in weights
    for name, array in estimator.trainer_.get_weights().items():
        np.testing.assert_allclose(array, weights[name], rtol=1e-5, atol=1e-6, err_msg=name)
    estimator.partial_fit(X, Y)  # goes on with the teacher


def test_floats_that_a_graph_rounds_use_the_kernels_for_integers() -> None:
    """A file of quantization-aware training elsewhere: its weights are floats.

    onnxruntime 1.19 makes QLinearMatMul of the MatMul, and has no kernel of opset 21 for it.
    """
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[N, 2] x) => (float[N, 2] y)
        <float[2, 2] w = {0.1, 0.2, -0.3, 0.4}, float s = {0.01}, uint8 z = {128}, int8 n = {0}>
        { xq = QuantizeLinear(x, s, z)  xd = DequantizeLinear(xq, s, z)
          wq = QuantizeLinear(w, s, n)  wd = DequantizeLinear(wq, s, n)  p = MatMul(xd, wd)
          pq = QuantizeLinear(p, s, z)  y = DequantizeLinear(pq, s, z) }"""
    )
    trainer = Trainer(model, loss="mse")
    x = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
    trainer.fit(x, x, verbose=0)
    expected = files.run_file(trainer.export(), x)
    np.testing.assert_allclose(trainer.predict(x), expected, atol=1e-6)
    np.testing.assert_allclose(trainer.predict_on_batch(x), expected, atol=1e-6)
    assert trainer.evaluate(x, x)["loss"] == pytest.approx(np.mean((expected - x) ** 2), rel=1e-5)


@pytest.mark.parametrize(
    "masters",
    [
        {"w": 3, "b": 3},
        {"w": [1, 2], "b": None},
        {"w": {"onnxfit:array": "0"}, "b": {"onnxfit:array": "0"}},
        {"w": {"onnxfit:array": "99"}, "b": {"onnxfit:array": "1"}},
        {},
        [],
        None,
    ],
    ids=str,
)
def test_a_checkpoint_with_other_floats_is_refused(tmp_path: Path, masters: Any) -> None:
    path = Trainer(integer_file(), loss="mse").save(tmp_path / "c")
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    info = json.loads(entries["onnxfit.json"])
    assert info["format"] == 2
    assert set(info["masters"]) == {"w", "b"}
    entries["onnxfit.json"] = json.dumps({**info, "masters": masters}).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    with pytest.raises(OnnxfitError):
        Trainer.load(path)


@pytest.mark.parametrize("kind", ["int8", "int4", "uint4"])
def test_a_large_file_has_its_integers_beside_it(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(integer_file(kind), loss="mse", optimizer=0.1)
    trainer.fit(X, Y, verbose=0)
    monkeypatch.setattr(tensors, "MAX_MODEL_BYTES", 10)
    exported = trainer.export(tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx.data").stat().st_size
    np.testing.assert_array_equal(
        files.run_file(onnx.load(tmp_path / "m.onnx"), X), files.run_file(exported, X)
    )
