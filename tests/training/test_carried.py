"""States that pass from one batch to the next, against loops that pass them by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx.numpy_helper import from_array

import onnxfit
from onnxfit import Trainer
from onnxfit.callbacks import Callback, LambdaCallback
from onnxfit.errors import CheckpointError, DataError, OnnxfitError, SettingError, UnknownNameError

BACKENDS = ["full", "forward_backward", "in_place"]
RNG = np.random.default_rng(0)
ROWS, CHUNKS, TIME = 3, 4, 5
X = RNG.standard_normal((CHUNKS, ROWS, TIME, 2)).astype(np.float32)
Y = RNG.standard_normal((CHUNKS, ROWS, TIME, 1)).astype(np.float32)
FORMS = {
    "first": ("float[N, 1, 4]", "h = Transpose<perm = [1, 0, 2]>(h0)",
              "hn = Transpose<perm = [1, 0, 2]>(last)"),
    "second": ("float[1, N, 4]", "h = Identity(h0)", "hn = Identity(last)"),
    "whole": (f"float[1, {ROWS}, 4]", "h = Identity(h0)", "hn = Identity(last)"),
}  # fmt: skip


def network(form: str = "second") -> onnx.ModelProto:
    """A GRU over chunks of a sequence, whose state has the batch on this axis, or on none."""
    state, before, after = FORMS[form]
    rows = ROWS if form == "whole" else "N"
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[{rows}, T, 2] x, {state} h0) => (float[{rows}, T, 1] y, {state} hn)
        <int64[1] one = {{1}}>
        {{ steps = Transpose<perm = [1, 0, 2]>(x)  {before}
          a, last = GRU<hidden_size = 4>(steps, W, R, , , h)  rows = Squeeze(a, one)
          z = MatMul(rows, v)  y = Transpose<perm = [1, 0, 2]>(z)  {after} }}"""
    )
    rng = np.random.default_rng(1)
    for name, shape in {"W": (1, 12, 2), "R": (1, 12, 4), "v": (4, 1)}.items():
        model.graph.initializer.append(from_array(rng.normal(size=shape).astype("f"), name))
    return model


def new(form: str = "second", **settings: Any) -> Trainer:
    settings = {"optimizer": onnxfit.optimizers.SGD(0.1, momentum=0.9), **settings}
    return Trainer(network(form), loss={"y": "mse"}, state_outputs={"hn": "h0"}, **settings)


def zeros(form: str = "second") -> np.ndarray[Any, Any]:
    return np.zeros((ROWS, 1, 4) if form == "first" else (1, ROWS, 4), np.float32)


def by_hand(form: str, epochs: int, **settings: Any) -> tuple[Trainer, list[float]]:
    """A trainer that gets each state as data, which starts with zeros in every epoch."""
    optimizer = onnxfit.optimizers.SGD(0.1, momentum=0.9)
    trainer = Trainer(network(form), loss={"y": "mse"}, optimizer=optimizer, **settings)
    losses = []
    for _ in range(epochs):
        state = zeros(form)
        for x, y in zip(X, Y):
            following = trainer.predict_on_batch({"x": x, "h0": state})["hn"]
            losses.append(trainer.train_on_batch({"x": x, "h0": state}, y)["loss"])
            state = following
    return trainer, losses


def batches() -> list[Any]:
    return list(zip(X, Y))


def inputs() -> list[Any]:
    return [(x,) for x in X]


def assert_same(a: Trainer, b: Trainer) -> None:
    for name, weight in a.get_weights().items():
        np.testing.assert_allclose(b.get_weights()[name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_training_is_that_of_a_loop_that_passes_states(form: str, backend: str) -> None:
    """Without a gradient from one batch to the one before, and with zeros in each epoch."""
    expected, losses = by_hand(form, 2, backend=backend)
    trainer = new(form, backend=backend, metrics=["mae"])
    history = trainer.fit(batches(), epochs=2, shuffle=False, verbose=0).history["loss"]
    np.testing.assert_allclose(history, np.reshape(losses, (2, CHUNKS)).mean(1), rtol=1e-5)
    assert_same(expected, trainer)


@pytest.mark.parametrize("form", FORMS)
def test_predictions_are_those_of_the_whole_sequence(form: str) -> None:
    trainer = new(form)
    whole = Trainer(network(form)).predict_on_batch(
        {"x": np.concatenate(X, axis=1), "h0": zeros(form)}
    )
    for _ in range(2):  # each prediction begins anew
        found = trainer.predict(inputs())["y"]
        joined = np.concatenate(np.split(found, CHUNKS), axis=1)
        np.testing.assert_allclose(joined, whole["y"], rtol=1e-5, atol=1e-6)
    for _ in range(2):
        parts = [trainer.predict_on_batch(x) for x in X]
        joined = np.concatenate([part["y"] for part in parts], axis=1)
        np.testing.assert_allclose(joined, whole["y"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(parts[-1]["hn"], whole["hn"], rtol=1e-5, atol=1e-6)
        trainer.reset_states()


def test_evaluations_carry_states_of_their_own() -> None:
    trainer = new()
    whole = Trainer(network(), loss={"y": "mse"})
    x, y = np.concatenate(X, axis=1), np.concatenate(Y, axis=1)
    expected = whole.evaluate({"x": x, "h0": zeros()}, y)["loss"]
    for _ in range(2):
        np.testing.assert_allclose(trainer.evaluate(batches())["loss"], expected, rtol=1e-5)
    losses = [trainer.test_on_batch(x, y)["loss"] for x, y in batches()]
    np.testing.assert_allclose(np.mean(losses), expected, rtol=1e-5)
    # validation in the middle of a training does not touch its states
    evaluating = LambdaCallback(on_train_batch_end=lambda batch, logs: trainer.evaluate(batches()))
    alone = new()
    arguments = {"epochs": 2, "shuffle": False, "verbose": 0}
    trainer.fit(batches(), validation_data=batches(), callbacks=[evaluating], **arguments)
    alone.fit(batches(), **arguments)
    assert_same(trainer, alone)


@pytest.mark.parametrize("backend", BACKENDS)
def test_single_batches_go_on_until_the_states_are_reset(backend: str) -> None:
    expected, _ = by_hand("second", 2, backend=backend)
    trainer = new(backend=backend)
    for _ in range(2):
        for x, y in batches():
            trainer.train_on_batch(x, y)
        trainer.reset_states()
    assert_same(expected, trainer)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_fit_resumes_in_the_middle_of_a_sequence(backend: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"epochs": 3, "shuffle": False, "verbose": 0}
    whole = new(backend=backend)
    history = whole.fit(batches(), **arguments)

    class Stop(Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            if self.trainer.global_batch == CHUNKS + 2:
                self.trainer.save(tmp_path / "c")
                raise KeyboardInterrupt

    interrupted = new(backend=backend)
    with pytest.raises(KeyboardInterrupt):
        interrupted.fit(batches(), callbacks=[Stop()], **arguments)
    loaded = Trainer.load(tmp_path / "c")
    resumed = loaded.fit(batches(), **arguments)
    assert resumed.history["loss"] == history.history["loss"]
    for name, weight in whole.get_weights().items():
        assert np.array_equal(weight, loaded.get_weights()[name])


def test_a_sequence_begins_where_a_callback_says() -> None:
    """In all rows, or in some of them."""

    class Reset(Callback):
        rows: Any = None

        def on_predict_batch_begin(self, batch: int, logs: Any) -> None:
            if batch == 2:
                self.trainer.reset_states(self.rows)

    trainer, reset = new(), Reset()
    whole = Trainer(network())

    def outputs(chunks: Any) -> Any:
        return whole.predict_on_batch({"x": np.concatenate(chunks, axis=1), "h0": zeros()})["y"]

    going_on, anew = outputs(X)[:, 2 * TIME :], outputs(X[2:])
    for rows, chosen in ((None, [0, 1, 2]), ([1], [1]), (np.array([True, False, True]), [0, 2])):
        reset.rows = rows
        found = np.split(trainer.predict(inputs(), callbacks=[reset])["y"], CHUNKS)[2:]
        expected = going_on.copy()
        expected[chosen] = anew[chosen]
        np.testing.assert_allclose(np.concatenate(found, axis=1), expected, rtol=1e-5, atol=1e-6)


def test_a_sequence_begins_with_the_fixed_value() -> None:
    state = RNG.standard_normal((1, 1, 4)).astype(np.float32)
    trainer = new(fixed_inputs={"h0": state})
    for_each = np.repeat(state, ROWS, axis=1)
    expected = Trainer(network()).predict_on_batch({"x": X[0], "h0": for_each})["y"]
    np.testing.assert_allclose(trainer.predict(X[0])["y"], expected, rtol=1e-5, atol=1e-6)
    assert [spec.name for spec in trainer.inputs] == ["x"]
    assert "state      h0 = hn of the batch before" in trainer.summary().splitlines()
    with pytest.raises(DataError, match="a first state 'h0' for 2 rows"):
        new(fixed_inputs={"h0": np.zeros((1, 2, 4))}).predict(X[0])


def test_a_step_that_fails_or_is_undone_leaves_the_state() -> None:
    trainer, expected = new(), new()

    def fail(y_true: Any, y_pred: Any) -> Any:
        raise ValueError("a metric fails")

    failing = new(metrics=[fail])
    for one in (trainer, expected, failing):
        one.predict_on_batch(X[0])
    before = failing._training.state.carried.state_dict()
    with pytest.raises(ValueError, match="a metric fails"):
        failing.train_on_batch(X[0], Y[0])
    assert failing._training.state.carried.state_dict() == before == {}
    for one in (trainer, expected):
        one.train_on_batch(X[0], Y[0])
    trainer.train_on_batch(X[1], Y[1])
    trainer.revert_step()
    results = [one.train_on_batch(X[2], Y[2])["loss"] for one in (trainer, expected)]
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("states", "error", "words"),
    [
        ({"hm": "h0"}, UnknownNameError, "No output of the model is called 'hm'"),
        ({"hn": "h1"}, UnknownNameError, "No input of the model is called 'h1'"),
        ({"y": "h0"}, SettingError, "does not fit the input"),
        ({"hn": "h0", "y": "h0"}, SettingError, "several outputs for the input 'h0'"),
        (["hn"], SettingError, "must map names"),
        ("hn", SettingError, "must map names"),
        ({"hn": ["h0"]}, SettingError, "must map names"),
        ({1: "h0"}, SettingError, "must map names"),
    ],
)
def test_states_that_do_not_fit_are_refused(states: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        Trainer(network(), loss={"y": "mse"}, state_outputs=states)


def test_rows_that_do_not_go_on_are_refused(tmp_path: Path) -> None:
    trainer = new()
    for shuffled in (batches(), onnxfit.DataLoader(X[0], Y[0], batch_size=1)):
        with pytest.raises(SettingError, match="Pass shuffle=False"):
            trainer.fit(shuffled, verbose=0)
    assert trainer.global_batch == 0
    shorter = [*batches(), (X[0][:2], Y[0][:2])]
    for call in (trainer.evaluate, lambda data: trainer.fit(data, shuffle=False, verbose=0)):
        with pytest.raises(DataError, match="The batch has 2 rows, but the state 'h0' goes on"):
            call(shorter)
    for rows in ([7], [0.5], [True], [[0]], 0, "a"):
        with pytest.raises(SettingError, match="rows of a batch of 3"):
            trainer.reset_states(rows)  # type: ignore[arg-type]
    trainer.reset_states([])
    with pytest.raises(SettingError, match="needs a trainer with states"):
        Trainer(network()).reset_states()
    with pytest.raises(SettingError, match="forward takes states as inputs"):
        new(backend="forward_backward").forward(X[0])
    with pytest.raises(OnnxfitError, match="carries states"):
        trainer.export_training(tmp_path)
    for damaged in ({"h1": zeros()}, {"h0": zeros()[:, :, :2]}, 3):
        with pytest.raises(CheckpointError):
            trainer._training.state.carried.load_state_dict(damaged)


def test_a_rate_finder_leaves_the_state() -> None:
    trainer, expected = new(), new()
    finder = onnxfit.callbacks.LearningRateFinder(steps=3)
    arguments: dict[str, Any] = {"shuffle": False, "verbose": 0}
    rate = trainer.learning_rate
    trainer.fit(batches(), callbacks=[finder], **arguments)
    expected.learning_rate = trainer.learning_rate
    assert rate
    expected.fit(batches(), **arguments)
    assert_same(trainer, expected)
