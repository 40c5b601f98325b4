"""Evaluations and predictions: how many batches, and what a person sees of them."""

from __future__ import annotations

import math

import numpy as np
import onnx.parser
import pytest

from onnxfit import DataError, DataLoader, SettingError, Trainer
from onnxfit.callbacks import LambdaCallback
from tests.data.test_text import bigrams
from tests.helpers import compiled_graphs
from tests.models import linear

X = np.arange(10, dtype=np.float32)[:, None]


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return Trainer(linear(w=1.0), loss="mse")


@pytest.mark.parametrize("verbose", [0, "auto"])
def test_nothing_is_shown_unless_it_is_asked_for(trainer: Trainer, verbose, capfd) -> None:
    trainer.predict(X, verbose=verbose)
    trainer.evaluate(X, X, verbose=verbose)
    assert capfd.readouterr() == ("", "")


def test_a_bar_counts_the_batches(trainer: Trainer, capfd) -> None:
    trainer.predict(X, batch_size=2, verbose=1)
    assert "predict: 100%" in (shown := capfd.readouterr().err)
    assert "5/5" in shown
    trainer.evaluate(X, X, batch_size=2, steps=3, verbose=1)
    assert "evaluate: 100%" in (shown := capfd.readouterr().err)
    assert "3/3" in shown


def test_a_bar_of_unknown_length(trainer: Trainer, capfd) -> None:
    trainer.predict(lambda: iter([X[:4], X[4:]]), verbose=1)
    assert "predict: 2batch" in capfd.readouterr().err


def test_a_line_at_the_end(trainer: Trainer, capfd) -> None:
    trainer.predict(X, batch_size=4, verbose=2)
    trainer.evaluate(X, X, batch_size=4, verbose=2)
    lines = capfd.readouterr().err.splitlines()
    assert [line.split("  ")[::2] for line in lines] == [
        ["predict", "3 batches"],
        ["evaluate", "3 batches"],
    ]


@pytest.mark.parametrize("data", [X, DataLoader(X, batch_size=4, shuffle=False)])
def test_steps_are_the_first_batches(trainer: Trainer, data) -> None:
    np.testing.assert_array_equal(trainer.predict(data, batch_size=4, steps=2), X[:8])
    np.testing.assert_array_equal(trainer.predict(data, batch_size=4, steps=9), X)


def test_steps_of_an_evaluation_tell_its_callbacks(trainer: Trainer) -> None:
    seen: list[int] = []
    tell = LambdaCallback(on_test_batch_end=lambda batch, logs: seen.append(batch))
    trainer.evaluate(X, X, batch_size=4, steps=2, callbacks=tell)
    assert seen == [0, 1]


@pytest.mark.parametrize("verbose", [3, "loud", None])
def test_another_verbose_is_refused(trainer: Trainer, verbose) -> None:
    with pytest.raises(SettingError, match="verbose"):
        trainer.predict(X, verbose=verbose)
    with pytest.raises(SettingError, match="verbose"):
        trainer.evaluate(X, X, verbose=verbose)


def test_a_trainer_without_a_loss_is_kept_in_a_file(tmp_path) -> None:
    path = Trainer(linear(w=2.0)).save(tmp_path / "c")
    np.testing.assert_array_equal(Trainer.load(path).predict(X), 2 * X)
    assert Trainer.load(path, loss="mse").fit(X, X, verbose=0).epoch == [0]


def test_a_fit_goes_on_to_log_after_an_evaluation_in_a_hook() -> None:
    def evaluate(epoch, logs) -> None:
        loss = hook.trainer.evaluate(X, 0 * X)["loss"]
        hook.trainer.log("other_loss", loss)

    hook = LambdaCallback(on_epoch_end=evaluate)
    fitted = Trainer(linear(w=1.0), loss="mse", optimizer=0.0)
    history = fitted.fit(X, X, epochs=2, verbose=0, callbacks=[hook])
    assert history.history["other_loss"] == pytest.approx([28.5, 28.5])


@pytest.mark.parametrize("call", ["predict", "evaluate"])
def test_data_without_a_batch_is_refused(trainer: Trainer, call: str) -> None:
    with pytest.raises(DataError, match=r"it gave no batches"):
        getattr(trainer, call)(lambda: iter(()))


def test_a_file_of_a_newer_opset_than_the_runtime_reads_predicts() -> None:
    """onnxruntime 1.19 reads opset 21; a step is built in it, and `predict` runs the file."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 22]>
        g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, -1, 0.5}>
        { h = MatMul(x, w) y = Gelu(h) }""")
    trainer = Trainer(model, loss="mse")
    x = np.array([[1, 2], [3, -4]], np.float32)
    h = x @ np.array([[1, 2], [-1, 0.5]])
    expected = h / 2 * (1 + np.vectorize(math.erf)(h / np.sqrt(2)))
    np.testing.assert_allclose(trainer.predict(x), expected, rtol=1e-5)


def ids_of_length(length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(0, 10, (3, length))


def causal_loss(table: np.ndarray, ids: np.ndarray) -> float:
    """The mean of -log p of each token after the first, in float64."""
    log_p = table.astype(float) - np.log(np.exp(table.astype(float)).sum(1, keepdims=True))
    return -log_p[ids[:, :-1], ids[:, 1:]].mean()


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_one_graph_evaluates_sequences_of_all_lengths(backend: str, monkeypatch) -> None:
    trainer = Trainer(bigrams(), loss="causal_lm", optimizer=1.0, backend=backend)
    compiled = compiled_graphs(monkeypatch)
    evaluated = 0
    for length in (2, 5, 3, 9, 4, 7):
        ids = ids_of_length(length)
        before = len(compiled)
        loss = trainer.evaluate(ids, ids, batch_size=2)["loss"]
        evaluated += len(compiled) - before
        assert loss == pytest.approx(causal_loss(trainer.get_weights()["table"], ids), rel=1e-5)
        trainer.train_on_batch(ids, ids)
    # A lookup does not show what it gives, so the first batch is also predicted.
    assert evaluated == 2


def test_one_graph_predicts_sequences_of_all_lengths(monkeypatch) -> None:
    """`predict_on_batch` compiles once; `predict` once for each state of the weights."""
    trainer = Trainer(bigrams(), loss="causal_lm", optimizer=1.0)
    compiled = compiled_graphs(monkeypatch)
    for state in (1, 2):
        for length in (2, 5, 3, 9, 4, 7):
            ids = ids_of_length(length)
            expected = trainer.get_weights()["table"][ids]
            np.testing.assert_array_equal(trainer.predict(ids), expected)
            np.testing.assert_array_equal(trainer.predict_on_batch(ids), expected)
        assert (compiled.count("prediction"), compiled.count("predict")) == (state, 1)
        trainer.train_on_batch(ids, ids)


def test_an_evaluation_of_rows_of_one_size_has_graphs_for_its_batches(monkeypatch) -> None:
    """Known sizes are faster; the rows of a full batch and of the last one are two."""
    fresh = Trainer(linear(w=1.0), loss="mse")
    compiled = compiled_graphs(monkeypatch)
    assert fresh.evaluate(X, 0 * X, batch_size=4)["loss"] == pytest.approx(28.5)
    assert compiled == ["evaluate"] * 2
