"""Sums of metrics, which the graphs of a step compute, against the figures of the outputs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import onnxfit
from onnxfit import Trainer
from onnxfit.losses import CausalLM, CrossEntropy
from onnxfit.metrics import Accuracy, Metric, Perplexity
from tests.models import two_outputs

BACKENDS = ("full", "forward_backward")
ROWS, TOKENS, VOCABULARY = 12, 5, 7


def decoder() -> onnx.ModelProto:
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
        decoder (int64[batch, tokens] ids) => (float[batch, tokens, {VOCABULARY}] logits)
        {{ e = Gather(embeddings, ids) logits = MatMul(e, head) }}""")
    rng = np.random.default_rng(0)
    for name, shape in {"embeddings": (VOCABULARY, 4), "head": (4, VOCABULARY)}.items():
        array = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def texts() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    ids = rng.integers(0, VOCABULARY, (ROWS, TOKENS))
    labels = np.where(rng.random(ids.shape) < 0.3, -100, ids)
    labels[3] = -100
    return ids, labels


def make(metrics: Any, loss: Any = "causal_lm", model: Any = None, **settings: Any) -> Trainer:
    settings = {"optimizer": onnxfit.optimizers.SGD(0.5), "threads": 1, **settings}
    return Trainer(model or decoder(), loss=loss, metrics=metrics, **settings)


def by_outputs(trainer: Trainer) -> Trainer:
    """The same trainer, whose metrics read the outputs."""
    backend = trainer._training.backend
    backend.recipe = dataclasses.replace(backend.recipe, sums_metrics=False)
    return trainer


def all_metrics() -> list[Metric]:
    return [Accuracy(), Perplexity(), Accuracy(weighted=True), Perplexity(weighted=True)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weights", ["none", "rows", "tokens"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_figures_are_those_of_the_outputs(backend: str, weights: str, accumulate: int) -> None:
    x, y = texts()
    rng = np.random.default_rng(2)
    shapes = {"none": None, "rows": (ROWS,), "tokens": (ROWS, TOKENS)}
    shape = shapes[weights]
    w = None if shape is None else rng.integers(0, 3, shape).astype(np.float32)
    settings = {"backend": backend, "accumulate": accumulate}
    results = []
    for trainer in (make(all_metrics(), **settings), by_outputs(make(all_metrics(), **settings))):
        history = trainer.fit(x, y, sample_weight=w, epochs=2, batch_size=5, verbose=0).history
        results.append((history, trainer.evaluate(x, y, sample_weight=w, batch_size=5)))
    (history, evaluated), (expected_history, expected) = results
    assert history.keys() == expected_history.keys() > {"perplexity", "weighted_accuracy"}
    for name, values in history.items():
        np.testing.assert_allclose(values, expected_history[name], rtol=1e-6)
    for name, value in evaluated.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-6)
    np.testing.assert_allclose(
        trainer.evaluate(x, y)["perplexity"], np.exp(trainer.evaluate(x, y)["loss"]), rtol=1e-6
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_leave_no_graph(backend: str) -> None:
    x, y = texts()
    trainer = make(["accuracy", "perplexity"], backend=backend)
    trainer.train_on_batch(x, y)
    graphs = trainer._training.backend.step_graphs(trainer._training.backend._last_shapes)
    graphs["evaluate"] = trainer._training.backend.graph(
        "evaluate", trainer._training.backend._last_shapes
    )
    graphs.pop("forward", None)  # whose outputs the graph of the loss reads where they are
    assert not any(v.name == "logits" for g in graphs.values() for v in g.graph.output)
    sums = {v.name for g in graphs.values() for v in g.graph.output if "metric" in v.name}
    metrics = ("accuracy", "perplexity")
    assert sums == {f"train/metric/{m}/{a}" for m in metrics for a in ("_total", "_count")}


def test_a_metric_that_reads_outputs_stands_beside_one_that_does_not() -> None:
    x, y = texts()
    trainer = make(["accuracy", "top_k"])
    expected = by_outputs(make(["accuracy", "top_k"]))
    assert trainer.train_on_batch(x, y) == pytest.approx(expected.train_on_batch(x, y), rel=1e-6)
    assert trainer.evaluate(x, y) == pytest.approx(expected.evaluate(x, y), rel=1e-6)


@pytest.mark.parametrize("ignored", [-1, 2, 100])
def test_labels_that_the_loss_ignores_count_in_no_metric(ignored: int) -> None:
    x, y = texts()
    y = np.where(y == -100, ignored, y)
    for loss in (CausalLM(ignore_index=ignored), CrossEntropy(ignore_index=ignored)):
        trainer, expected = make(all_metrics(), loss), by_outputs(make(all_metrics(), loss))
        assert trainer.evaluate(x, y) == pytest.approx(expected.evaluate(x, y), rel=1e-6)


def test_several_outputs_have_sums_of_their_own() -> None:
    losses = {"a": "mse", "b": "mse"}
    trainer = make("mae", losses, two_outputs())
    expected = by_outputs(make("mae", losses, two_outputs()))
    x = np.arange(6, dtype=np.float32)[:, None] / 6
    y = {"a": x + 1, "b": 2 - x}
    assert trainer.evaluate(x, y) == pytest.approx(expected.evaluate(x, y), rel=1e-9)
    assert trainer.train_on_batch(x, y) == pytest.approx(expected.train_on_batch(x, y), rel=1e-9)


def test_a_metric_or_a_loss_of_ones_own_gets_the_labels_that_it_wants() -> None:
    @dataclasses.dataclass
    class Halved(Accuracy):
        def update(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            super().update(y_true, y_pred, sample_weight)
            self._count *= 2

    @dataclasses.dataclass(frozen=True)
    class Shifted(CausalLM):
        def metric_labels(self, y_true: Any, sample_weight: Any) -> Any:
            return np.where(y_true >= 0, (y_true + 1) % VOCABULARY, y_true), sample_weight

    x, y = texts()
    for metric, loss in ((Halved(name="a"), "causal_lm"), (Accuracy(name="a"), Shifted())):
        trainer = make([metric], loss)
        assert trainer.evaluate(x, y) == by_outputs(make([metric], loss)).evaluate(x, y)
        assert trainer.evaluate(x, y) != make([Accuracy(name="a")]).evaluate(x, y)


def test_a_run_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    x, y = texts()
    whole = make(all_metrics()).fit(x, y, epochs=1, batch_size=4, verbose=0).history

    class Stop(onnxfit.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            self.trainer.save(tmp_path / "c.ckpt")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(all_metrics()).fit(x, y, epochs=1, batch_size=4, verbose=0, callbacks=Stop())
    resumed = Trainer.load(tmp_path / "c.ckpt").fit(x, y, epochs=1, batch_size=4, verbose=0)
    assert resumed.history == whole


def test_graphs_of_a_folder_leave_the_metrics_to_their_host(tmp_path: Path) -> None:
    trainer = make(["accuracy"])
    trainer.export_training(tmp_path)
    outputs = {v.name for v in onnx.load(tmp_path / "train.onnx").graph.output}
    assert "logits" in outputs
    assert not any("metric" in name for name in outputs)
