"""The Trainer end to end: the loop's arithmetic, state, files, several inputs and outputs, and what
is refused.
"""

from __future__ import annotations

import json
import warnings
import zipfile
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx.numpy_helper import from_array

import onnxfit
from onnxfit import Trainer
from onnxfit.callbacks import Callback, LambdaCallback
from onnxfit.errors import (
    CheckpointError,
    DataError,
    GradientError,
    ModelError,
    SettingError,
    UnknownNameError,
)
from onnxfit.losses import MeanSquaredError
from onnxfit.optimizers import SGD, Adam
from tests.builds import needs_builder
from tests.helpers import Recorder, classification, column
from tests.models import convolutional, linear, mlp, two_inputs, two_outputs


def images(rows: int = 48) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, rows)
    x = rng.normal(size=(rows, 1, 8, 8)).astype(np.float32)
    x[np.arange(rows), 0, y * 2] += 2
    return x, y


class TestTraining:
    def test_ridge_regression_reaches_its_closed_form(self) -> None:
        rng = np.random.default_rng(0)
        x = rng.normal(size=(200, 5))
        y = x @ rng.normal(size=(5, 1)) + 0.1 * rng.normal(size=(200, 1))
        alpha = 0.3
        # the minimum of mean (y - xw)² + alpha w²
        expected = np.linalg.solve(x.T @ x / 200 + alpha * np.eye(5), x.T @ y / 200)
        trainer = Trainer(linear(5), loss="mse", penalty=alpha, optimizer=0.1)
        trainer.fit(
            x.astype(np.float32), y.astype(np.float32), batch_size=200, epochs=200, verbose=0
        )
        np.testing.assert_allclose(trainer.get_weights()["w"], expected, rtol=1e-3)

    @pytest.mark.parametrize(
        "model",
        [mlp(), convolutional(), convolutional(dropout=0.3)],
        ids=["mlp", "batch norm", "dropout"],
    )
    def test_networks_learn(self, model) -> None:
        x, y = classification(300) if model.graph.output[0].name == "y" else images(300)
        trainer = Trainer(model, loss="cross_entropy", optimizer=Adam(0.02), metrics=["accuracy"])
        trainer.fit(x, y, epochs=15, batch_size=50, verbose=0)
        assert trainer.evaluate(x, y)["accuracy"] > 0.9

    def test_frozen_weights_stay_byte_identical(self) -> None:
        model = mlp()
        x, y = classification()
        trainer = Trainer(model, "fc1*", loss="cross_entropy", optimizer="adam")
        trainer.fit(x, y, epochs=2, verbose=0)
        exported = trainer.export()
        for before, after in zip(model.graph.initializer, exported.graph.initializer):
            same = before.SerializeToString() == after.SerializeToString()
            assert same == before.name.startswith("fc0"), before.name

    def test_running_statistics_are_trained_and_exported(self) -> None:
        x, y = images()
        trainer = Trainer(convolutional(), loss="cross_entropy", optimizer=0.0)
        trainer.fit(x, y, epochs=1, batch_size=48, verbose=0)
        weights = trainer.get_weights()
        assert set(weights) == {
            "conv.weight",
            "conv.bias",
            "fc.weight",
            "fc.bias",
            "bn.scale",
            "bn.bias",
            "bn.mean",
            "bn.var",
        }
        session = onnxruntime.InferenceSession(
            _cut(convolutional(), "c").SerializeToString(), providers=["CPUExecutionProvider"]
        )
        c = session.run(None, {"x": x})[0]
        np.testing.assert_allclose(
            weights["bn.mean"], 0.1 * c.mean((0, 2, 3)), rtol=1e-4, atol=1e-6
        )
        np.testing.assert_allclose(weights["bn.var"], 0.9 + 0.1 * c.var((0, 2, 3)), rtol=1e-4)

    def test_frozen_batch_norm_keeps_its_statistics(self) -> None:
        x, y = images()
        trainer = Trainer(convolutional(), loss="cross_entropy", optimizer=0.1, batch_norm="frozen")
        first = trainer.evaluate(x, y, batch_size=48)["loss"]
        # the same forward as in inference
        assert trainer.train_on_batch(x, y)["loss"] == pytest.approx(first, rel=1e-5)
        assert "bn.mean" not in trainer.get_weights()
        assert {t.name: t.SerializeToString() for t in trainer.export().graph.initializer}[
            "bn.mean"
        ] == next(
            t.SerializeToString() for t in convolutional().graph.initializer if t.name == "bn.mean"
        )

    def test_the_same_seed_gives_the_same_weights_and_another_does_not(self) -> None:
        x, y = images()

        def trained(seed: int) -> bytes:
            trainer = Trainer(
                convolutional(dropout=0.5), loss="cross_entropy", optimizer="adam", seed=seed
            )
            trainer.fit(x, y, epochs=2, batch_size=10, verbose=0)
            return b"".join(w.tobytes() for w in trainer.get_weights().values())

        assert trained(1) == trained(1)
        assert trained(1) != trained(2)

    def test_two_inputs_by_name_and_by_order(self) -> None:
        left, right = column(1, 0, 1, 2), column(0, 1, 1, -1)
        for x in ({"right": right, "left": left}, [left, right]):
            trainer = Trainer(two_inputs(), loss="mse", optimizer=0.2)
            trainer.fit(x, 2 * left - right, epochs=200, verbose=0)
            assert trainer.get_weights()["u"].item() == pytest.approx(2, abs=1e-3)
            assert trainer.get_weights()["v"].item() == pytest.approx(-1, abs=1e-3)

    def test_a_model_with_its_own_loss(self) -> None:
        model = onnx.parser.parse_model(
            """<ir_version: 8, opset_import: ["": 17]>
            g (float[N, 1] x, float[N, 1] label) => (float[N, 1] y, float loss) <float[1, 1] w = {0}>
            { y = MatMul(x, w) d = Sub(y, label) s = Mul(d, d) loss = ReduceMean<keepdims = 0>(s) }"""
        )
        trainer = Trainer(model, optimizer=0.1)
        trainer.fit({"x": column(1, 2, 3), "label": column(2, 4, 6)}, epochs=50, verbose=0)
        assert trainer.get_weights()["w"].item() == pytest.approx(2, abs=1e-4)

    def test_many_shapes_of_batch_share_one_graph_and_its_figures(self) -> None:
        rng = np.random.default_rng(0)
        model = onnx.parser.parse_model(
            """<ir_version: 8, opset_import: ["": 17]>
            g (float[N, L, 2] x) => (float[N, 1] y) <float[2, 1] w = {0.5, -1}> { s = MatMul(x, w) y = ReduceMean<axes = [1], keepdims = 0>(s) }"""
        )
        batches = [
            (
                rng.normal(size=(3, length, 2)).astype(np.float32),
                rng.normal(size=(3, 1)).astype(np.float32),
            )
            for length in range(1, 13)
        ]
        trainer = Trainer(model, loss="mse", optimizer=0.1, metrics=["mae"])
        recorder = Recorder()
        trainer.fit(lambda: iter(batches), callbacks=[recorder], verbose=0)
        w, losses = np.array([[0.5], [-1]]), []
        for x, y in batches:  # the same in numpy
            d = (x @ w).mean(1) - y
            losses.append((d**2).mean())
            w = w - 0.1 * (2 / 3) * np.einsum("nf,no->fo", x.mean(1), d)
        assert recorder.logs("batch", "batch_loss") == pytest.approx(losses, rel=1e-4)
        np.testing.assert_allclose(trainer.get_weights()["w"], w, rtol=1e-4)

    def test_weight_averaging(self) -> None:
        trainer = Trainer(linear(w=1), loss="mse", optimizer=SGD(0.1, ema_momentum=0.5))
        w, average = 1.0, 1.0
        for _ in range(3):
            trainer.train_on_batch(column(1), column(0))
            w -= 0.1 * 2 * w
            average = 0.5 * average + 0.5 * w
        exported = onnx.numpy_helper.to_array(
            trainer.export(averaged=True).graph.initializer[0]
        ).item()
        assert exported == pytest.approx(average, rel=1e-6)
        assert trainer.get_weights()["w"].item() == pytest.approx(w, rel=1e-6)

    @pytest.mark.parametrize(("row", "loss"), [(3e38, "inf"), (np.inf, "nan")])
    def test_a_loss_that_is_not_finite_warns(self, row: float, loss: str) -> None:
        # a weight of 0 makes NaN of an infinite row
        trainer = Trainer(linear(w=1.0 if loss == "inf" else 0.0), loss="mse", optimizer=0.0)
        with pytest.warns(RuntimeWarning, match=f"The loss is {loss} at step") as warned:
            trainer.fit(column(1, row), column(0, 0), batch_size=1, epochs=3, verbose=0)
        assert len([w for w in warned if "The loss is" in str(w.message)]) == 1

    def test_a_step_can_be_undone(self) -> None:
        trainer = Trainer(linear(w=1), loss="mse", optimizer="adam")
        before = trainer.get_state()
        trainer.train_on_batch(column(1), column(0))
        trainer.revert_step()
        np.testing.assert_equal(trainer.get_state()["weights"], before["weights"])
        np.testing.assert_equal(trainer.get_state()["slots"], before["slots"])


def _cut(model: onnx.ModelProto, output: str) -> onnx.ModelProto:
    return onnx.utils.Extractor(onnx.shape_inference.infer_shapes(model)).extract_model(
        ["x"], [output]
    )


def _with_format(path: Path, version: int) -> None:
    """Rewrite a checkpoint as one of another format."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    entries["onnxfit.json"] = json.dumps(
        {**json.loads(entries["onnxfit.json"]), "format": version}
    ).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)


class TestState:
    def test_weights_come_and_go_as_copies(self) -> None:
        trainer = Trainer(linear(w=1), loss="mse")
        weights = trainer.get_weights()
        weights["w"][...] = 5
        assert trainer.get_weights()["w"].item() == 1
        trainer.set_weights(weights)
        assert trainer.predict(column(2)).item() == 10

    @pytest.mark.parametrize(
        ("weights", "message"),
        [
            (
                {"w": np.zeros((2, 2), np.float32)},
                r"w must be float32\[1, 1\], got float32\[2, 2\]",
            ),
            ({"w": np.array([["a"]])}, r"w must be float32"),
            ({"v": np.zeros((1, 1), np.float32)}, r"No trained weight is called 'v'"),
        ],
    )
    def test_wrong_weights_change_nothing(self, weights, message) -> None:
        trainer = Trainer(linear(w=1, b=1), loss="mse")
        with pytest.raises(ValueError, match=message):
            trainer.set_weights({"b": np.zeros(1, np.float32), **weights})
        assert trainer.get_weights()["b"].item() == 1

    @pytest.mark.parametrize("accumulate", [1, 4])
    def test_a_state_set_back_repeats_the_training(self, accumulate: int) -> None:
        x, y = images()
        trainer = Trainer(
            convolutional(dropout=0.5),
            loss="cross_entropy",
            optimizer="adam",
            accumulate=accumulate,
        )

        def step(i: int) -> float:
            return trainer.train_on_batch(x[i : i + 8], y[i : i + 8])["loss"]

        for i in range(5):
            step(i)
        state = trainer.get_state()
        first = [step(i) for i in range(6)], trainer.get_weights()
        trainer.set_state(state)
        second = [step(i) for i in range(6)], trainer.get_weights()
        assert first[0] == second[0]
        np.testing.assert_equal(first[1], second[1])

    def test_learning_rate_can_be_set_unless_a_schedule_drives(self) -> None:
        trainer = Trainer(linear(w=1), loss="mse", optimizer=0.1)
        trainer.learning_rate = 0.0
        trainer.train_on_batch(column(1), column(0))
        assert trainer.get_weights()["w"].item() == 1
        with pytest.raises(
            ValueError, match=r"learning_rate must be a finite number >= 0, got nan"
        ):
            trainer.learning_rate = float("nan")
        driven = Trainer(linear(w=1), loss="mse", optimizer=SGD(lambda step: 0.1 / (step + 1)))
        driven.train_on_batch(column(1), column(0))
        assert driven.learning_rate == pytest.approx(0.05)
        with pytest.raises(TypeError, match=r"follows the schedule"):
            driven.learning_rate = 1.0


class TestFiles:
    def test_export_runs_anywhere_and_predicts_the_same(self, tmp_path) -> None:
        x, y = images()
        trainer = Trainer(convolutional(dropout=0.2), loss="cross_entropy", optimizer="adam")
        trainer.fit(x, y, verbose=0)
        trainer.export(tmp_path / "deep" / "trained.onnx")
        session = onnxruntime.InferenceSession(
            tmp_path / "deep" / "trained.onnx", providers=["CPUExecutionProvider"]
        )
        np.testing.assert_allclose(session.run(None, {"x": x})[0], trainer.predict(x), atol=1e-6)
        assert [p.name for p in (tmp_path / "deep").iterdir()] == ["trained.onnx"]

    def test_a_loaded_trainer_goes_on_as_if_nothing_had_been(self, tmp_path) -> None:
        x, y = images()

        def fit(trainer: Trainer, epochs: int) -> Trainer:
            trainer.fit(x, y, batch_size=10, epochs=epochs, verbose=0)
            return trainer

        def new() -> Trainer:
            return Trainer(
                convolutional(dropout=0.5), loss="cross_entropy", penalty={"conv*": 0.01}, metrics=["accuracy"], clip_norm=1.0, accumulate=2,
                optimizer=Adam(onnxfit.schedules.Warmup(onnxfit.schedules.Cosine(0.01, 100), 5), weight_decay=0.01),
            )  # fmt: skip

        whole = fit(fit(new(), 2), 3)
        path = fit(new(), 2).save(tmp_path / "a" / "b.ckpt")
        loaded = Trainer.load(path)
        assert loaded.train_losses_ == whole.train_losses_[:2]
        fit(loaded, 3)
        np.testing.assert_equal(loaded.get_state(), whole.get_state())
        assert loaded.history.history == whole.history.history
        assert loaded.train_losses_ == whole.train_losses_
        assert [p.name for p in path.parent.iterdir()] == ["b.ckpt"]

    def test_saved_inside_a_fit_and_loaded_it_finishes_that_fit(self, tmp_path) -> None:
        x, y = classification()
        kill = LambdaCallback(
            on_epoch_end=lambda epoch, logs: (
                (_ for _ in ()).throw(KeyboardInterrupt) if epoch == 2 else None
            )
        )

        class Save(Callback):
            phase = "checkpoint"

            def on_epoch_end(self, epoch, logs):
                self.trainer.save(tmp_path / "c")

        def new() -> Trainer:
            return Trainer(mlp(), loss="cross_entropy", optimizer="adam")

        whole = new()
        whole.fit(x, y, epochs=5, verbose=0)
        broken = new()
        with pytest.raises(KeyboardInterrupt):
            broken.fit(x, y, epochs=5, verbose=0, callbacks=[Save(), kill])
        loaded = Trainer.load(tmp_path / "c")
        loaded.fit(x, y, epochs=5, verbose=0)
        np.testing.assert_equal(loaded.get_state(), whole.get_state())
        # a plain fit afterwards is a whole one
        assert loaded.fit(x, y, epochs=3, verbose=0).epoch == [0, 1, 2]

    def test_after_an_interruption_a_plain_fit_is_a_whole_one(self, tmp_path) -> None:
        x, y = classification(64)
        batches: list[int] = []

        def interrupt(batch: int, logs: object) -> None:
            batches.append(batch)
            if len(batches) == 3:
                raise KeyboardInterrupt

        trainer = Trainer(mlp(), loss="cross_entropy")
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(
                x,
                y,
                batch_size=16,
                epochs=2,
                callbacks=[LambdaCallback(on_train_batch_end=interrupt)],
                verbose=0,
            )
        trainer.save(tmp_path / "c")
        assert trainer.fit(x, y, batch_size=16, epochs=2, verbose=0).epoch == [0, 1]
        assert trainer.global_step == 3 + 8
        loaded = Trainer.load(tmp_path / "c")  # but what was saved goes on where it stopped
        loaded.fit(x, y, batch_size=16, epochs=2, verbose=0)
        assert loaded.global_step == 8

    def test_ones_own_loss_must_be_given_again(self, tmp_path) -> None:
        def half(op, y_true, y_pred):
            return 0.5 * (y_true - y_pred) ** 2

        path = Trainer(linear(w=1), loss=half).save(tmp_path / "c")
        with pytest.raises(
            CheckpointError,
            match=(
                r"a custom loss 'half', but a checkpoint contains no code.*Trainer.load\(path,"
                r" loss=...\)"
            ),
        ):
            Trainer.load(path)
        assert Trainer.load(path, loss=half).evaluate(column(2), column(0))["loss"] == 2

    @pytest.mark.parametrize("damage", ["missing", "empty", "foreign", "cut", "flipped", "newer"])
    def test_a_damaged_checkpoint_is_refused(self, tmp_path, damage: str) -> None:
        path = Trainer(linear(w=1), loss="mse").save(tmp_path / "c")
        data = bytearray(path.read_bytes())
        if damage == "missing":
            path.unlink()
        elif damage == "empty":
            path.write_bytes(b"")
        elif damage == "foreign":
            path.write_bytes(linear().SerializeToString())
        elif damage == "cut":
            path.write_bytes(data[: len(data) // 2])
        elif damage == "flipped":
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        else:
            _with_format(path, 99)
        with pytest.raises(CheckpointError, match=r"'.*c'.*|newer"):
            Trainer.load(path)

    def test_a_failed_save_keeps_the_old_file(self, tmp_path, monkeypatch) -> None:
        trainer = Trainer(linear(w=1), loss="mse")
        path = trainer.save(tmp_path / "c")
        before = path.read_bytes()
        trainer.train_on_batch(column(1), column(0))

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(
            CheckpointError,
            match=r"cannot be written: No space left on device. The training state is unchanged",
        ):
            trainer.save(path)
        assert path.read_bytes() == before
        assert [p.name for p in tmp_path.iterdir()] == ["c"]

    def test_every_graph_is_written_and_valid(self, tmp_path) -> None:
        trainer = Trainer(mlp(), loss="cross_entropy", optimizer="adam")
        files = trainer.save_onnx_graph(tmp_path, prefix="p_", suffix="_s")
        in_memory = trainer.save_onnx_graph(bytes)
        assert files == {
            name: f"p_{name}_s.onnx"
            for name in ("model", "trained", "train", "evaluate", "predict")
        }
        for name, file in files.items():
            assert (tmp_path / file).read_bytes() == in_memory[name]
            onnxruntime.InferenceSession(tmp_path / file, providers=["CPUExecutionProvider"])
        graph = onnx.load(tmp_path / "p_train_s.onnx").graph
        assert {"x", "y_true/y", "fc0.weight", "train/learning_rate"} <= {
            i.name for i in graph.input
        }
        assert {"train/loss", "fc0.weight/next"} <= {o.name for o in graph.output}

    @needs_builder
    def test_a_graph_that_needs_sizes_is_written_once_they_are_known(self) -> None:
        model = onnx.parser.parse_model(
            """<ir_version: 8, opset_import: ["": 17]> g (float[N, 1, 8, 8] x) => (float[N, 16] y)
            <float[1, 1, 3, 3] w = {1, 0, 0, 0, 1, 0, 0, 0, 1}>
            { c = Conv<pads = [1, 1, 1, 1]>(x, w) p = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(c) y = Flatten(p) }"""
        )
        trainer = Trainer(model, loss="mse", gradient="onnxruntime")
        with pytest.raises(
            GradientError,
            match=r"(?s)AveragePool.*Train on one batch first",
        ):
            trainer.save_onnx_graph(bytes)
        trainer.train_on_batch(np.ones((4, 1, 8, 8), np.float32), np.ones((4, 16), np.float32))
        assert set(trainer.save_onnx_graph(bytes)) == {
            "model",
            "trained",
            "train",
            "evaluate",
            "predict",
        }


class TestRefusals:
    """One error each, that says what was given, what was expected and how to fix it."""

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            (
                {"loss": "crossentropi"},
                UnknownNameError,
                r"No loss is called 'crossentropi'. Did you mean 'cross",
            ),
            (
                {"loss": "mse", "optimizer": "adamm"},
                UnknownNameError,
                r"No optimizer is called 'adamm'. Did you mean 'adam",
            ),
            (
                {"loss": "mse", "metrics": ["accuracyy"]},
                UnknownNameError,
                r"No metric is called 'accuracyy'. Did you mean 'accuracy'",
            ),
            (
                {"loss": "mse", "weights": ["fc9*"]},
                UnknownNameError,
                r"No weight is called 'fc9\*'",
            ),
            ({"loss": {"z": "mse"}}, UnknownNameError, r"No output is called 'z'. Known: y"),
            (
                {"loss": "mse", "backend": "ful"},
                UnknownNameError,
                r"No backend is called 'ful'. Did you mean 'full'",
            ),
            (
                {"loss": "mse", "gradient": "torch"},
                UnknownNameError,
                r"No gradient source is called 'torch'",
            ),
            (
                {"loss": "mse", "batch_norm": "eval"},
                SettingError,
                r"batch_norm must be 'train', 'frozen' or 'batch', got 'eval'",
            ),
            (
                {"loss": "mse", "accumulate": 0},
                SettingError,
                r"accumulate must be a whole number of batches, at least 1, got 0",
            ),
            (
                {"loss": "mse", "clip_norm": -1.0},
                SettingError,
                r"clip_norm must be a positive number or None, got -1.0",
            ),
            (
                {"loss": "mse", "clip_value": 10**400},
                SettingError,
                r"clip_value must be a positive number or None",
            ),
            (
                {"loss": "mse", "device": "gpu"},
                SettingError,
                r"device must be one of 'cpu', 'cuda', .*got 'gpu'. Did you mean 'cuda'",
            ),
            (
                {"loss": "mse", "metrics": ["mse", "mse"]},
                SettingError,
                r"Two metrics are called 'mse'",
            ),
            (
                {"loss": lambda op, t, p: p - np.ones(2, np.float32)},
                SettingError,
                r"does not accept output y: float32\[N, 3\]",
            ),
        ],
    )
    def test_at_construction(self, arguments, error, message) -> None:
        with pytest.raises(error, match=message):
            Trainer(mlp(), **arguments)

    def test_several_outputs_need_names(self) -> None:
        with pytest.raises(
            SettingError, match=r"3 outputs \(a, b, z\)\. Give each output its loss"
        ):
            Trainer(two_outputs(), loss="mse")

    def test_a_weight_no_loss_depends_on(self) -> None:
        with pytest.raises(SettingError, match=r"No loss depends on t"):
            Trainer(two_outputs(), ["u", "t"], loss={"a": "mse"})

    def test_an_operator_without_gradient_names_the_node(self) -> None:
        model = onnx.parser.parse_model(
            """<ir_version: 8, opset_import: ["": 17, "my.domain": 1]> g (float[N, 4] x) => (float[N, 4] y)
            <float[4] w = {1, 2, 3, 4}> { [wave] y = my.domain.Wave(x, w) }"""
        )
        with pytest.raises(
            GradientError, match=r"Wave 'wave': there is no rule for my.domain::Wave"
        ):
            Trainer(model, loss="mse")

    def test_a_loss_without_derivative(self) -> None:
        model = onnx.parser.parse_model(
            """<ir_version: 8, opset_import: ["": 17]> g (float[N, 4] x) => (float[N, 4] y)
            <float[4] w = {1, 2, 3, 4}> { s = Mul(x, w) y = Round(s) }"""
        )
        with pytest.raises(
            ModelError,
            match=r"No weight has a gradient path to the loss\. The weights are w",
        ):
            Trainer(model, loss="mse")

    @pytest.mark.parametrize(
        ("x", "y", "message"),
        [
            (np.zeros((5, 7), np.float32), np.zeros(5, int), r"x: float32\[N, 4\]"),
            (np.zeros((5, 4), np.float32), np.full(5, 3), r"class indices from 0 to 2"),
            (np.zeros((5, 4), np.float32), np.zeros((5, 2), np.float32), r"\(5, 2\)"),
            (np.zeros((5, 4), np.float32), np.zeros(4, int), r"5.*4"),
            (np.full((5, 4), np.nan, np.float32), np.zeros(5, int), r"(?i)nan"),
            (np.zeros((0, 4), np.float32), np.zeros(0, int), r"(?i)empty|no row"),
            (np.zeros((5, 4), np.float32), None, r"label"),
        ],
        ids=["width", "label", "label shape", "rows", "nan", "empty", "no labels"],
    )
    def test_bad_data_changes_nothing(self, x, y, message) -> None:
        good = classification()
        trainer = Trainer(mlp(), loss="cross_entropy", optimizer="adam")
        trainer.fit(*good, verbose=0)
        before, history = trainer.get_state(), trainer.history
        with pytest.raises(DataError, match=message):
            trainer.fit(x, y, verbose=0)
        np.testing.assert_equal(trainer.get_state(), before)
        assert trainer.history is history

    def test_a_step_that_cannot_be_built_changes_nothing(self) -> None:
        """Only the batch tells the size of M: 3 is not 5."""
        model = onnx.parser.parse_model(
            """<ir_version: 8, opset_import: ["": 17]> g (float[N, M] x) => (float[N, 1] y)
            <float[3] w = {1, 2, 3}> { h = Add(x, w)  y = ReduceMean<axes = [1]>(h) }"""
        )
        trainer = Trainer(model, loss="mse", optimizer="adam")
        x, y = np.ones((4, 3), np.float32), np.ones((4, 1), np.float32)
        history, state = trainer.fit(x, y, verbose=0), trainer.get_state()
        x = np.ones((4, 5), np.float32)
        with pytest.raises(ModelError, match=r"does not accept inputs of these shapes|contradict"):
            trainer.fit(x, y, verbose=0)
        assert trainer.history is history
        np.testing.assert_equal(trainer.get_state(), state)

    def test_float64_data_is_converted_with_one_warning(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Above a bound, which is lowered here; below it, nothing is said."""
        x, y = classification()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Trainer(mlp(), loss="cross_entropy").fit(x.astype(np.float64), y, verbose=0)
        monkeypatch.setattr("onnxfit.data.adapter.MAX_SILENT_BYTES", 0)
        with pytest.warns(UserWarning, match=r"float64") as caught:
            Trainer(mlp(), loss="cross_entropy").fit(x.astype(np.float64), y, verbose=0)
        assert len(caught) == 1

    def test_a_model_without_float_weights(self) -> None:
        model = onnx.parser.parse_model(
            '<ir_version: 8, opset_import: ["": 17]> g (float[N] x) => (float[N] y) { y = Abs(x) }'
        )
        with pytest.raises(ModelError, match=r"no float weights"):
            Trainer(model, loss=MeanSquaredError())

    def test_a_device_that_is_not_there(self) -> None:
        with pytest.raises(
            onnxfit.InstallationError,
            match=(
                r"device='cuda:7' needs onnxruntime's CUDAExecutionProvider, which is not available"
            ),
        ):
            Trainer(mlp(), loss="mse", device="cuda:7")


def test_versions_names_what_bug_reports_need() -> None:
    assert {"python", "onnx", "numpy"} <= set(onnxfit.versions())


@pytest.mark.parametrize("settings", [{}, {"penalty": 0.01, "clip_norm": 1.0}])
def test_a_finite_mask_is_no_weight(settings: dict[str, float]) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[N, 4, 3] x) => (float[N, 4, 3] y) {
        q = MatMul(x, w)  t = Transpose<perm = [0, 2, 1]>(x)  s = MatMul(q, t)  a = Add(s, mask)
        p = Softmax<axis = -1>(a)  y = MatMul(p, x) }"""
    )
    mask = np.where(np.tril(np.ones((4, 4))) > 0, 0, -1e9).astype(np.float32)
    model.graph.initializer.append(from_array(np.eye(3, dtype=np.float32), "w"))
    model.graph.initializer.append(from_array(mask, "mask"))
    x = np.random.default_rng(0).standard_normal((64, 4, 3)).astype(np.float32)
    trainers = [
        Trainer(model, weights, loss="mse", optimizer=0.1, threads=1, **settings)
        for weights in (None, ["w"])
    ]
    losses = [trainer.fit(x, -x, epochs=3, verbose=0).history["loss"] for trainer in trainers]
    assert losses[0] == losses[1]
    assert losses[0][2] < losses[0][0]
    assert list(trainers[0].get_weights()) == ["w"]
