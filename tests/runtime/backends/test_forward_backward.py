"""The forward_backward backend: equal to the full one, and open between its passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

from onnxfit import Trainer
from onnxfit.callbacks import Callback, TerminateOnNaN
from onnxfit.errors import (
    CheckpointError,
    DataError,
    ModelError,
    OnnxfitError,
    SettingError,
    UnknownNameError,
)
from onnxfit.graph.spec import TensorSpec
from onnxfit.optimizers import SGD, Adam
from onnxfit.runtime import device
from onnxfit.runtime.buffers import DoubleBufferedState
from onnxfit.runtime.device import CPU
from onnxfit.runtime.session import BoundSession
from onnxfit.schedules import Exponential
from onnxfit.step.split import split_step
from tests.builds import needs_builder
from tests.models import convolutional, linear, mlp, two_inputs, two_outputs

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 4)).astype(np.float32)
Y = RNG.normal(size=(24, 3)).astype(np.float32)
IMAGES = RNG.normal(size=(24, 1, 8, 8)).astype(np.float32)
CLASSES = RNG.integers(0, 3, 24)
COLUMN = X[:, :1]
OWN = onnx.parser.parse_model(
    """<ir_version: 8, opset_import: ["": 17]> g (float[N, 4] x, float[N, 1] t) => (float loss, float[N, 1] y)
    <float[4, 1] w = {1, 2, 3, 4}> { y = MatMul(x, w) d = Sub(y, t) s = Mul(d, d) loss = ReduceMean<keepdims = 0>(s) }"""
)
SOURCES = ["onnx", pytest.param("onnxruntime", marks=needs_builder)]

# model, data, settings of the trainer
CASES: dict[str, tuple[onnx.ModelProto, tuple[Any, ...], dict[str, Any]]] = {
    "mlp, adam": (mlp(), (X, Y), {"loss": "mse", "optimizer": Adam(0.01)}),
    "sample weights": (mlp(), (X, Y, np.arange(24.0)), {"loss": "huber", "optimizer": SGD(0.05, momentum=0.9, nesterov=True)}),
    "penalty, clipping": (
        mlp(), (X, Y), {"loss": "mae", "penalty": {"fc0*": 0.1, "fc1.weight": {"l1": 0.05, "l2": 0.01}}, "clip_norm": 0.5, "optimizer": 0.1},
    ),
    "clipped values, schedule": (mlp(), (X, Y), {"loss": "mse", "clip_value": 0.01, "optimizer": Adam(Exponential(0.01, 10, 0.5))}),
    # a large eps, since the gradient of a bias before BatchNormalization is rounding alone, which
    # Adam would make steps of
    "batch norm, dropout": (
        convolutional(dropout=0.4), (IMAGES, CLASSES), {"loss": "cross_entropy", "optimizer": Adam(eps=0.01), "metrics": ["accuracy"]},
    ),
    "frozen batch norm": (convolutional(), (IMAGES, CLASSES), {"loss": "cross_entropy", "batch_norm": "frozen"}),
    "some weights": (convolutional(dropout=0.4), (IMAGES, CLASSES), {"loss": "cross_entropy", "weights": ["fc*"]}),
    "accumulate": (convolutional(dropout=0.4), (IMAGES, CLASSES), {"loss": "cross_entropy", "optimizer": 0.1, "accumulate": 3, "penalty": 0.01}),
    "two losses": (two_outputs(), (COLUMN, {"a": COLUMN, "b": -COLUMN}), {"loss": {"a": "mse", "b": "mae"}, "loss_weights": {"a": 2.0}}),
    "metric of one output": (two_outputs(), (COLUMN, COLUMN), {"loss": {"b": "mse"}, "metrics": ["mae"]}),
    "two inputs": (two_inputs(), ({"left": COLUMN, "right": -COLUMN}, COLUMN), {"loss": "mse"}),
    "own loss": (OWN, ({"x": X, "t": COLUMN},), {"optimizer": 0.01}),
}  # fmt: skip


def both(model: onnx.ModelProto, **settings: Any) -> tuple[Trainer, Trainer]:
    return Trainer(model, **settings), Trainer(model, backend="forward_backward", **settings)


class TestEqualToTheFullBackend:
    @pytest.mark.parametrize("gradient", SOURCES)
    @pytest.mark.parametrize("name", CASES)
    def test_weights_figures_and_slots_after_twenty_steps(self, name: str, gradient: str) -> None:
        model, data, settings = CASES[name]
        full, split = both(model, gradient=gradient, **settings)
        histories = [
            t.fit(*data, epochs=7, batch_size=9, verbose=0).history for t in (full, split)
        ]  # 3 batches, the last of 6 rows
        assert full.global_step == split.global_step >= 7
        for one, two in zip(
            *(list(part.items()) for t in (full, split) for part in [t.get_weights()])
        ):
            np.testing.assert_allclose(two[1], one[1], rtol=1e-5, atol=1e-6, err_msg=one[0])
        assert histories[0].keys() == histories[1].keys()
        for figure, values in histories[0].items():
            np.testing.assert_allclose(histories[1][figure], values, rtol=1e-5, err_msg=figure)
        for slot, value in full.get_state()["slots"].items():
            np.testing.assert_allclose(
                split.get_state()["slots"][slot], value, rtol=1e-4, atol=1e-6, err_msg=slot
            )

    def test_evaluation_prediction_and_single_batches(self) -> None:
        model, data, settings = CASES["batch norm, dropout"]
        full, split = both(model, **settings)
        assert full.train_on_batch(*data) == pytest.approx(split.train_on_batch(*data))
        assert full.evaluate(*data) == pytest.approx(split.evaluate(*data))
        np.testing.assert_allclose(full.predict(IMAGES), split.predict(IMAGES), rtol=1e-5)
        np.testing.assert_allclose(
            split.forward(IMAGES, training=False), split.predict(IMAGES), rtol=1e-5, atol=1e-6
        )

    def test_batches_of_many_sizes(self) -> None:
        full, split = both(mlp(), loss="mse", optimizer="adam")
        for t in (full, split):
            for rows in (1, 2, 3, 4, 5, 6, 7, 5, 1):
                t.train_on_batch(X[:rows], Y[:rows])
        for name, value in full.get_weights().items():
            np.testing.assert_allclose(split.get_weights()[name], value, rtol=1e-5, atol=1e-6)

    def test_nan_is_undone(self) -> None:
        trainer = Trainer(mlp(), loss="mse", optimizer=1e30, backend="forward_backward")
        trainer.fit(X, Y, epochs=9, batch_size=24, callbacks=[TerminateOnNaN()], verbose=0)
        assert all(np.isfinite(w).all() for w in trainer.get_weights().values())

    def test_a_resumed_run_repeats_the_uninterrupted_one(self, tmp_path: Path) -> None:
        model, data, settings = CASES["accumulate"]
        trainers = [Trainer(model, backend="forward_backward", **settings) for _ in range(2)]
        trainers[0].fit(*data, epochs=4, batch_size=9, verbose=0)
        trainers[1].fit(*data, epochs=2, batch_size=9, verbose=0)
        resumed = Trainer.load(trainers[1].save(tmp_path / "half"))
        assert resumed.backend == "forward_backward"
        resumed.fit(*data, epochs=4, initial_epoch=2, batch_size=9, verbose=0)
        for name, value in trainers[0].get_weights().items():
            np.testing.assert_array_equal(resumed.get_weights()[name], value)


class Gradients(Callback):
    """Keeps copies of the gradients, and multiplies them."""

    def __init__(self, factor: float = 1.0) -> None:
        self.seen: list[dict[str, np.ndarray]] = []
        self.factor = factor

    def on_gradients(self, gradients: dict[str, np.ndarray]) -> None:
        self.seen.append({name: g.copy() for name, g in gradients.items()})
        for g in gradients.values():
            g *= self.factor


class TestOnGradients:
    def test_they_are_those_of_loss_and_penalty(self) -> None:
        trainer = Trainer(
            linear(4, w=0.5), loss="mse", penalty=0.1, optimizer=0.1, backend="forward_backward"
        )
        seen = Gradients()
        trainer.fit(X, COLUMN, batch_size=24, callbacks=[seen], verbose=0)
        w = np.full((4, 1), 0.5)
        expected = 2 * X.T @ (X @ w - COLUMN) / 24 + 0.2 * w
        np.testing.assert_allclose(seen.seen[0]["w"], expected, rtol=1e-5)
        np.testing.assert_allclose(trainer.get_weights()["w"], w - 0.1 * expected, rtol=1e-5)

    @pytest.mark.parametrize("gradient", SOURCES)
    def test_what_a_callback_makes_of_them_is_applied(self, gradient: str) -> None:
        settings = {
            "loss": "mse",
            "optimizer": 0.1,
            "backend": "forward_backward",
            "gradient": gradient,
        }
        still, double, twice = (Trainer(mlp(), **settings) for _ in range(3))
        before = still.get_weights()
        still.fit(X, Y, callbacks=[Gradients(0.0)], verbose=0)
        double.fit(X, Y, batch_size=24, callbacks=[Gradients(2.0)], verbose=0)
        twice.learning_rate = 0.2
        twice.fit(X, Y, batch_size=24, verbose=0)
        for name, value in before.items():
            np.testing.assert_array_equal(still.get_weights()[name], value)
            np.testing.assert_allclose(
                double.get_weights()[name], twice.get_weights()[name], rtol=1e-5, atol=1e-7
            )

    def test_one_that_fails_leaves_everything_as_it_was(self) -> None:
        class Fails(Callback):
            def on_gradients(self, gradients: dict[str, np.ndarray]) -> None:
                raise RuntimeError("no")

        trainer = Trainer(
            convolutional(), loss="cross_entropy", optimizer="adam", backend="forward_backward"
        )
        before = trainer.get_state()
        with pytest.raises(RuntimeError, match="no"):
            trainer.fit(IMAGES, CLASSES, callbacks=[Fails()], verbose=0)
        for part in ("weights", "slots"):
            for name, value in before[part].items():
                np.testing.assert_array_equal(trainer.get_state()[part][name], value)
        trainer.fit(IMAGES, CLASSES, verbose=0)

    def test_nobody_is_told_after_fit(self) -> None:
        trainer, seen = Trainer(mlp(), loss="mse", backend="forward_backward"), Gradients()
        trainer.fit(X, Y, callbacks=[seen], verbose=0)
        trainer.train_on_batch(X, Y)
        assert len(seen.seen) == 1


@pytest.mark.parametrize("gradient", SOURCES)
class TestByHand:
    def trainer(
        self, gradient: str, model: onnx.ModelProto | None = None, **settings: Any
    ) -> Trainer:
        return Trainer(model or mlp(), backend="forward_backward", gradient=gradient, **settings)

    def test_gradients_of_inputs_and_weights(self, gradient: str) -> None:
        trainer = self.trainer(gradient, linear(4, 2, w=0.5, b=1.0))
        y = trainer.forward(X)
        np.testing.assert_allclose(y, X @ np.full((4, 2), 0.5) + 1, rtol=1e-5)
        dy = np.random.default_rng(1).normal(size=y.shape).astype(np.float32)
        found = trainer.backward(dy)
        np.testing.assert_allclose(found["weights"]["w"], X.T @ dy, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found["weights"]["b"], dy.sum(0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found["inputs"]["x"], dy @ np.full((2, 4), 0.5), rtol=1e-5)

    def test_a_loop_in_numpy_is_fit(self, gradient: str) -> None:
        settings = {"penalty": {"fc0*": 0.1}, "optimizer": Adam(0.01), "clip_norm": 1.0}
        by_hand, fitted = (
            self.trainer(gradient, **settings),
            self.trainer(gradient, loss="mse", **settings),
        )
        fitted.fit(X, Y, epochs=10, batch_size=24, shuffle=False, verbose=0)
        for _ in range(10):
            error = by_hand.forward(X) - Y
            by_hand.apply_gradients(by_hand.backward(2 * error / error.size)["weights"])
        assert by_hand.global_step == 10
        for name, value in fitted.get_weights().items():
            np.testing.assert_allclose(by_hand.get_weights()[name], value, rtol=1e-5, atol=1e-6)

    def test_several_forward_passes_wait_and_each_has_its_own_backward(self, gradient: str) -> None:
        trainer = self.trainer(gradient)
        alone = []
        for i in range(3):
            trainer.forward(X[i : i + 4])
            alone.append(trainer.backward(np.ones((4, 3), np.float32)))
        outputs = [trainer.forward(X[i : i + 4]) for i in range(3)]
        for i in (1, 0):
            found = trainer.backward(np.ones((4, 3), np.float32), of=outputs[i])
            for name, value in alone[i]["weights"].items():
                np.testing.assert_array_equal(found["weights"][name], value)
        newest = trainer.backward(np.ones((4, 3), np.float32))
        np.testing.assert_array_equal(newest["inputs"]["x"], alone[2]["inputs"]["x"])

    def test_ort_values_come_and_go_without_a_copy(self, gradient: str) -> None:
        trainer = self.trainer(gradient, linear(4))
        x = X.copy()
        given = onnxruntime.OrtValue.ortvalue_from_numpy(x)
        y = trainer.forward(given)
        assert isinstance(y, onnxruntime.OrtValue)
        again = trainer.forward({"x": given})
        found = trainer.backward(
            onnxruntime.OrtValue.ortvalue_from_numpy(np.ones((24, 1), np.float32)), of=again
        )
        assert isinstance(found["weights"]["w"], onnxruntime.OrtValue)
        np.testing.assert_allclose(found["weights"]["w"].numpy(), X.sum(0)[:, None], rtol=1e-5)
        if given.data_ptr() == x.ctypes.data:  # this onnxruntime borrows numpy's memory
            x *= 2  # which the backward pass reads where it lies
            found = trainer.backward(np.ones((24, 1), np.float32), of=y)
            np.testing.assert_allclose(
                np.asarray(_numpy(found["weights"]["w"])), 2 * X.sum(0)[:, None], rtol=1e-5
            )

    def test_arrays_are_read_where_they_lie_and_outputs_are_protected(self, gradient: str) -> None:
        trainer = self.trainer(gradient, linear(4))
        x = X.copy()
        y = trainer.forward(x)
        with pytest.raises(ValueError, match="read-only"):
            y[...] = 0
        x *= 2
        np.testing.assert_allclose(
            trainer.backward(np.ones_like(y))["weights"]["w"], 2 * X.sum(0)[:, None], rtol=1e-5
        )

    def test_several_inputs_and_outputs(self, gradient: str) -> None:
        trainer = self.trainer(gradient, two_inputs())
        trainer.forward([COLUMN, 2 * COLUMN])
        found = trainer.backward(np.ones((24, 1), np.float32))
        np.testing.assert_allclose(found["weights"]["v"], 2 * found["weights"]["u"], rtol=1e-5)
        assert set(found["inputs"]) == {"left", "right"}
        trainer = self.trainer(gradient, two_outputs())
        assert set(trainer.forward(COLUMN)) == {"a", "b", "z"}
        one = np.ones((24, 1), np.float32)
        found = trainer.backward({"a": one, "b": None, "z": 2 * one})
        np.testing.assert_allclose(found["weights"]["u"], COLUMN.sum(keepdims=True), rtol=1e-5)
        assert not found["weights"]["v"].any()
        np.testing.assert_allclose(found["inputs"]["x"], np.full((24, 1), 1 + 2 * 3), rtol=1e-6)

    def test_what_does_not_fit_is_said_and_changes_nothing(self, gradient: str) -> None:
        trainer = self.trainer(gradient)
        right = np.ones((24, 3), np.float32)
        with pytest.raises(
            SettingError, match=r"No forward pass is waiting.*Call forward\(inputs\) first"
        ):
            trainer.backward(right)
        y = trainer.forward(X)
        for wrong, message in (
            (
                right[:, :2],
                r"The gradient of output y must be float32\[24, 3\], got float32\[24, 2\]",
            ),
            (
                right.astype(np.float64),
                r"got float64\[24, 3\]. Cast it: gradient.astype\('float32'\)",
            ),
            ({}, "The gradients of the outputs y are missing. Pass None for an output"),
            ({"y": right, "q": right}, "No output is called 'q'"),
            ("much", "got <U4"),
        ):
            with pytest.raises(OnnxfitError, match=message):
                trainer.backward(wrong)
        weights = trainer.backward(right)["weights"]  # still there
        with pytest.raises(SettingError, match="each forward pass allows one backward pass"):
            trainer.backward(right)
        trainer.forward(X)
        with pytest.raises(SettingError, match="must be the object that forward returned"):
            trainer.backward(right, of=y)
        before = trainer.get_weights()
        with pytest.raises(DataError, match=r"The gradients of fc1.bias are missing"):
            trainer.apply_gradients({name: g for name, g in weights.items() if name != "fc1.bias"})
        with pytest.raises(UnknownNameError, match="No trained weight is called 'other'"):
            trainer.apply_gradients({**weights, "other": right})
        with pytest.raises(
            DataError, match=r"The gradient of fc0.bias must be float32\[8\], got float32\[9\]"
        ):
            trainer.apply_gradients({**weights, "fc0.bias": np.zeros(9, np.float32)})
        for wrong_input, wanted in (
            (
                onnxruntime.OrtValue.ortvalue_from_numpy(X[:, :3].copy()),
                r"Expected input x: float32\[N, 4\], got x: float32\[24, 3\]",
            ),
            ({"q": onnxruntime.OrtValue.ortvalue_from_numpy(X)}, "No input is called 'q'"),
            (X[:, :3], r"x: float32\[N, 4\]"),
        ):
            with pytest.raises(OnnxfitError, match=wanted):
                trainer.forward(wrong_input)
        for name, value in before.items():
            np.testing.assert_array_equal(trainer.get_weights()[name], value)
        trainer.apply_gradients(weights)
        assert trainer.global_step == 1

    def test_weights_that_changed_since(self, gradient: str) -> None:
        trainer = self.trainer(gradient)
        right = np.ones((24, 3), np.float32)
        trainer.forward(X)
        trainer.set_weights({"fc0.bias": np.ones(8, np.float32)})
        with pytest.raises(
            SettingError, match=r"weights have changed since this forward pass.*Run forward again"
        ):
            trainer.backward(right)
        trainer.forward(X)
        trainer.backward(right)

    def test_a_weight_that_the_caller_deleted(self, gradient: str) -> None:
        trainer = self.trainer(gradient)
        state = trainer.get_state()
        del state["weights"]["fc0.bias"]
        with pytest.raises(
            SettingError, match=r"its weights are fc0.weight, fc1.bias, fc1.weight, but expected"
        ):
            trainer.set_state(state)
        step = trainer.backward(np.ones_like(trainer.forward(X)))["weights"]
        trainer.apply_gradients(step)
        initializers = trainer._training.trainable.file.graph.initializer
        kept = [t for t in initializers if t.name != "fc0.bias"]
        del initializers[:]
        initializers.extend(kept)
        with pytest.raises(ModelError, match=r"The model no longer contains fc0.bias"):
            trainer.export()
        trainer.apply_gradients(trainer.backward(np.ones_like(trainer.forward(X)))["weights"])

    def test_an_output_that_takes_no_gradient(self, gradient: str) -> None:
        model = onnx.parser.parse_model(
            """<ir_version: 8, opset_import: ["": 17]> g (float[N, 4] x) => (float[N, 2] y, int64[N, 1] best)
            <float[4, 2] w = {1, 2, 3, 4, 5, 6, 7, 8}> { y = MatMul(x, w)  best = ArgMax<axis = 1>(y) }"""
        )
        trainer = self.trainer(gradient, model)
        assert trainer.forward(X)["best"].dtype == np.int64
        with pytest.raises(DataError, match="Output 'best' cannot have a gradient"):
            trainer.backward(
                {"y": np.ones((24, 2), np.float32), "best": np.ones((24, 1), np.int64)}
            )
        trainer.backward(np.ones((24, 2), np.float32))


def _numpy(value: Any) -> np.ndarray:
    return value if isinstance(value, np.ndarray) else value.numpy()


class TestWithoutALoss:
    def test_fit_asks_for_one(self) -> None:
        trainer = Trainer(mlp(), backend="forward_backward")
        for call in (trainer.fit, trainer.evaluate, trainer.train_on_batch):
            with pytest.raises(SettingError, match=r"This trainer has no loss, but .* needs"):
                call(X, Y)
        assert trainer.predict(X).shape == (24, 3)
        assert set(trainer.save_onnx_graph(bytes)) == {
            "model",
            "trained",
            "forward",
            "backward",
            "update",
            "predict",
        }

    def test_the_full_backend_has_no_passes(self) -> None:
        trainer = Trainer(mlp(), loss="mse")
        for call in (
            lambda: trainer.forward(X),
            lambda: trainer.backward(Y),
            lambda: trainer.apply_gradients({}),
        ):
            with pytest.raises(SettingError, match="backend='forward_backward'"):
                call()

    def test_forgotten_passes_are_an_error_before_the_memory_is_full(self) -> None:
        trainer = Trainer(linear(4), backend="forward_backward")
        for _ in range(256):
            trainer.forward(X[:1])
        with pytest.raises(SettingError, match=r"256 forward passes are waiting.*training=False"):
            trainer.forward(X[:1])


class TestGraphs:
    @pytest.mark.parametrize(
        "name", ["penalty, clipping", "batch norm, dropout", "accumulate", "two losses", "own loss"]
    )
    @pytest.mark.parametrize("backend", ["full", "forward_backward"])
    def test_saved_checked_run_and_loaded_from_the_folder_alone(
        self, name: str, backend: str, tmp_path: Path
    ) -> None:
        model, data, settings = CASES[name]
        trainer = Trainer(model, backend=backend, **settings)
        trainer.fit(*data, epochs=2, batch_size=9, verbose=0)
        files, memory = (
            trainer.save_onnx_graph(tmp_path, prefix="a_", suffix="_z"),
            trainer.save_onnx_graph(bytes),
        )
        assert (
            list(files)
            == list(memory)
            == list(Trainer(model, backend=backend, **settings).save_onnx_graph(bytes))
        )
        made: dict[str, np.ndarray] = {}
        for graph, file in files.items():
            assert file == f"a_{graph}_z.onnx"
            data_on_disk = (tmp_path / file).read_bytes()
            assert data_on_disk == memory[graph]
            proto = onnx.load_from_string(data_on_disk)
            onnx.checker.check_model(proto, full_check=True)
            session = onnxruntime.InferenceSession(data_on_disk, providers=["CPUExecutionProvider"])
            given = {
                v.name: made[v.name] if v.name in made else _some(v) for v in proto.graph.input
            }
            # what the next graphs may want
            made |= dict(zip((o.name for o in proto.graph.output), session.run(None, given)))
        loaded = Trainer.load(tmp_path)
        for one in (trainer, loaded):
            one.fit(*data, epochs=3, initial_epoch=2, batch_size=9, verbose=0)
        for weight, value in trainer.get_weights().items():
            np.testing.assert_array_equal(loaded.get_weights()[weight], value)

    def test_a_folder_without_or_with_two_checkpoints(self, tmp_path: Path) -> None:
        with pytest.raises(
            CheckpointError,
            match=r"must contain exactly one checkpoint, called \*.onnxfit, but .* has none",
        ):
            Trainer.load(tmp_path)
        trainer = Trainer(mlp(), loss="mse")
        trainer.save_onnx_graph(tmp_path)
        trainer.save_onnx_graph(tmp_path, prefix="other_")
        with pytest.raises(
            CheckpointError,
            match=r"has 2 \(other_trainer.onnxfit, trainer.onnxfit\)\. Pass the file",
        ):
            Trainer.load(tmp_path)

    def test_the_passes_join_by_name_in_any_runtime(self) -> None:
        trainer = Trainer(mlp(), backend="forward_backward")
        graphs = {
            k: onnxruntime.InferenceSession(v, providers=["CPUExecutionProvider"])
            for k, v in trainer.save_onnx_graph(bytes).items()
        }
        weights = trainer.get_weights()
        ahead = graphs["forward"]
        found = dict(
            zip((o.name for o in ahead.get_outputs()), ahead.run(None, {"x": X, **weights}))
        )
        everything = {"x": X, **weights, **found, "y_grad": np.ones((24, 3), np.float32)}
        behind = graphs["backward"]
        given = {i.name: everything[i.name] for i in behind.get_inputs()}
        gradients = dict(zip((o.name for o in behind.get_outputs()), behind.run(None, given)))
        trainer.forward(X)
        for name, value in trainer.backward(np.ones((24, 3), np.float32))["weights"].items():
            np.testing.assert_allclose(gradients[f"{name}_grad"], value, rtol=1e-5)

    def test_nothing_is_kept_for_its_sizes_alone(self) -> None:
        model = onnx.parser.parse_model(
            """<ir_version: 8, opset_import: ["": 17]> g (float[A, B] x) => (float[2] y) <float[1] w = {2}>
            { h = Mul(x, w)  y = ReduceSum<keepdims = 0>(h, a) }""".replace(
                "float[1] w = {2}", "float[2] w = {2, 3}, int64[1] a = {0}"
            )
        )
        trainer = Trainer(model, backend="forward_backward")
        recipe = trainer._training.backend.recipe
        graphs = split_step(
            recipe, {"x": TensorSpec("x", np.dtype(np.float32), ("A", "B"))}, ["y"], recipe.weights
        )
        kept = {
            v.name: v.type.tensor_type.elem_type
            for v in graphs.forward.graph.output
            if v.name != "y"
        }
        assert kept
        assert set(kept.values()) == {onnx.TensorProto.INT64}


def _some(value: onnx.ValueInfoProto) -> np.ndarray:
    """Small numbers of the shape an input declares."""
    dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    return (
        np.ones([d.dim_value or 2 for d in value.type.tensor_type.shape.dim], dtype)
        if dtype.kind != "i"
        else np.zeros([d.dim_value or 2 for d in value.type.tensor_type.shape.dim], dtype)
    )


class TestBinding:
    """Inputs are bound when address, shape or type are others, and only then."""

    def session(self) -> BoundSession:
        text = (
            '<ir_version: 10, opset_import: ["": 21]> g (float[A, B] x) => (float[A, B] y) { y ='
            " Add(x, x) }"
        )
        return BoundSession(
            onnx.parser.parse_model(text), DoubleBufferedState({}, CPU), CPU, 1, "test"
        )

    def test_it_is_freed_after_the_modules(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The interpreter sets the names in modules to None when it ends."""
        bound = self.session()
        for name in ("nullcontext", "CUDA_CALLS"):
            monkeypatch.setattr(device, name, None)
        bound.__del__()
        assert bound._session is None

    def test_the_same_is_bound_once(self) -> None:
        session, x = self.session(), X.copy()
        for i in range(5):
            x[0, 0] = i
            session.run({"x": x})
            np.testing.assert_array_equal(session.prediction()["y"], 2 * x)
        assert session.binds == 1

    def test_a_view_of_another_shape_at_the_same_address_is_seen(self) -> None:
        session, x = self.session(), X.copy()
        for view in (x, x.reshape(4, 24), x[:3], x):
            session.run({"x": view})
            np.testing.assert_array_equal(session.prediction()["y"], 2 * view)
        assert session.binds == 4

    def test_an_array_reshaped_in_place_is_seen(self) -> None:
        session, x = self.session(), X.copy()
        session.run({"x": x})
        x.resize((12, 8), refcheck=False)
        session.run({"x": x})
        np.testing.assert_array_equal(session.prediction()["y"], 2 * x)
        assert session.binds == 2

    def test_memory_that_came_back_as_another_tensor(self) -> None:
        session = self.session()
        for i in range(20):
            x = np.full((3 + i % 2, 4), i, np.float32)
            session.run({"x": x})
            np.testing.assert_array_equal(session.prediction()["y"], 2 * x)
            del x

    def test_training_binds_nothing_after_the_first_steps(self) -> None:
        trainer = Trainer(
            mlp(), loss="mse", penalty=0.1, backend="forward_backward", gradient="onnx"
        )
        trainer.fit(X, Y, epochs=2, batch_size=8, verbose=0)
        (step,) = trainer._training.backend.caches["step"].exact.values()
        sessions = [
            step.passes.forward_session,
            step.passes.backward_session,
            step.loss,
            trainer._training.backend.batchless_session("apply"),
            trainer._training.backend.batchless_session("penalty"),
        ]
        before = [s.binds for s in sessions]
        trainer.fit(X, Y, epochs=5, batch_size=8, verbose=0)
        assert [s.binds for s in sessions] == before


@pytest.mark.parametrize(("backend", "alone"), [("full", ["0"]), ("forward_backward", [])])
def test_threads_sleep_where_graphs_take_turns(
    monkeypatch: pytest.MonkeyPatch, backend: str, alone: list[str]
) -> None:
    """Only the graph that is run again and again may keep its threads awake."""
    found: list[str] = []
    make = onnxruntime.InferenceSession

    def noted(model: bytes, options: onnxruntime.SessionOptions, **others: Any) -> Any:
        try:
            found.append(options.get_session_config_entry("session.force_spinning_stop"))
        except RuntimeError:  # it was not set
            found.append("0")
        return make(model, options, **others)

    monkeypatch.setattr(onnxruntime, "InferenceSession", noted)
    trainer = Trainer(mlp(), loss="mse", backend=backend)
    trainer.fit(X, Y, batch_size=12, validation_data=(X, Y), verbose=0)
    assert sorted(found) == [*alone, *["1"] * (len(found) - len(alone))]
    assert len(found) >= 2


def test_dropout_draws_anew_and_statistics_follow_in_training_alone() -> None:
    made = TestByHand().trainer
    trainer = made("onnx", convolutional(dropout=0.5), seed=3)
    before = trainer.get_weights()
    one, two = trainer.forward(IMAGES), trainer.forward(IMAGES)
    assert np.abs(one - two).max() > 0.1
    assert np.abs(trainer.get_weights()["bn.mean"] - before["bn.mean"]).max() > 1e-4
    again = made("onnx", convolutional(dropout=0.5), seed=3)
    np.testing.assert_array_equal(again.forward(IMAGES), one)
    after = trainer.get_weights()
    trainer.forward(IMAGES, training=False)
    np.testing.assert_array_equal(trainer.get_weights()["bn.mean"], after["bn.mean"])
