"""Counts of decisions, their ratios, agreement and overlap, against scikit-learn and by hand.

The laws for every metric are in tests/test_metrics.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn import metrics as sk

from onnxfit import Trainer
from onnxfit.callbacks import EarlyStopping
from onnxfit.errors import DataError, SettingError
from onnxfit.metrics import (
    F1,
    BalancedAccuracy,
    CohenKappa,
    Dice,
    FalseNegatives,
    FalsePositives,
    FBeta,
    IoU,
    MatthewsCorrelation,
    MeanIoU,
    Metric,
    Precision,
    Recall,
    Specificity,
    TrueNegatives,
    TruePositives,
)
from tests.models import mlp

RNG = np.random.default_rng(0)
ROWS = 60
BINARY = RNG.integers(0, 2, (ROWS, 1)).astype(float), RNG.random((ROWS, 1))
CLASSES = RNG.integers(0, 5, ROWS), RNG.random((ROWS, 5))
COLUMNS = (RNG.random((ROWS, 4)) < 0.4).astype(float), RNG.random((ROWS, 4))
WEIGHTS = RNG.integers(0, 4, ROWS) + 0.5
PER_CLASS = (Precision, Recall, F1, FBeta, IoU, Dice)


def figure(metric: Metric, data: tuple[Any, Any], w: Any = None) -> Any:
    """The result over three batches."""
    metric.reset()
    for rows in (slice(0, 7), slice(7, 30), slice(30, None)):
        metric.update(data[0][rows], data[1][rows], None if w is None else w[rows])
    return metric.result()


@pytest.mark.parametrize("w", [None, WEIGHTS], ids=["plain", "weighted"])
def test_scikit_learn_agrees(w: np.ndarray | None) -> None:
    def same(metric: Metric, data: tuple[Any, Any], expected: Any) -> None:
        metric.weighted = w is not None
        np.testing.assert_allclose(figure(metric, data, w), expected, rtol=1e-12)

    scores = {
        IoU: sk.jaccard_score,
        Precision: sk.precision_score,
        Recall: sk.recall_score,
        F1: sk.f1_score,
        Dice: sk.f1_score,
    }
    decisions = {
        "binary": (BINARY, BINARY[0].ravel(), BINARY[1].ravel() > 0.5, {}),
        "classes": (CLASSES, CLASSES[0], CLASSES[1].argmax(axis=1), {}),
        "columns": (COLUMNS, COLUMNS[0], COLUMNS[1] > 0.5, {"multi_label": True}),
    }
    for name, (data, y, guess, settings) in decisions.items():
        averages = ("macro", "micro", "weighted", None) if name != "binary" else ("binary",)
        for average in averages:
            own = {**settings, **({} if average == "binary" else {"average": average})}
            chosen = {"average": average, "sample_weight": w}
            for cls, score in scores.items():
                same(cls(**own), data, score(y, guess, **chosen))
            same(FBeta(beta=0.5, **own), data, sk.fbeta_score(y, guess, beta=0.5, **chosen))
        if name == "columns":
            cells = sk.multilabel_confusion_matrix(y, guess, sample_weight=w)
            (tn, fp), (fn, tp) = cells.transpose(1, 2, 0)
            counts = {TruePositives: tp, FalsePositives: fp, TrueNegatives: tn, FalseNegatives: fn}
            for counting, expected in counts.items():
                same(counting(multi_label=True, average=None), data, expected)
                same(counting(multi_label=True), data, expected.sum())
            same(Specificity(multi_label=True, average=None), data, tn / (tn + fp))
            continue
        weighting = {"sample_weight": w}
        same(BalancedAccuracy(), data, sk.balanced_accuracy_score(y, guess, **weighting))
        same(MatthewsCorrelation(), data, sk.matthews_corrcoef(y, guess, **weighting))
        same(MeanIoU(), data, sk.jaccard_score(y, guess, average="macro", **weighting))
        for kind in (None, "linear", "quadratic"):
            expected = sk.cohen_kappa_score(y, guess, weights=kind, **weighting)
            same(CohenKappa(weights=kind), data, expected)
    y, guess = BINARY[0].ravel(), BINARY[1].ravel() > 0.5
    same(Specificity(), BINARY, sk.recall_score(y, guess, pos_label=0, sample_weight=w))


def test_images_count_as_their_pixels() -> None:
    masks = RNG.integers(0, 3, (ROWS, 4, 5))
    scores = RNG.random((ROWS, 3, 4, 5))
    flat = masks.ravel(), scores.argmax(axis=1).ravel()
    each = sk.jaccard_score(*flat, average=None)
    np.testing.assert_allclose(figure(IoU(average=None), (masks, scores)), each)
    np.testing.assert_allclose(figure(MeanIoU(), (masks, scores)), each.mean())
    masked = np.where(masks == 2, -1, masks)
    kept = flat[0] != 2
    cells = sk.confusion_matrix(flat[0][kept], flat[1][kept], labels=[0, 1, 2])
    hits, union = np.diag(cells), cells.sum(axis=0) + cells.sum(axis=1) - np.diag(cells)
    np.testing.assert_allclose(figure(MeanIoU(), (masked, scores)), np.mean(hits / union))


def test_undefined_agreement() -> None:
    same_class = np.ones(ROWS), np.full(ROWS, 0.9)
    assert np.isnan(figure(CohenKappa(), same_class))
    assert figure(MatthewsCorrelation(), same_class) == 0
    assert figure(MeanIoU(), same_class) == 1
    assert figure(BalancedAccuracy(), same_class) == 1


# ---------------------------------------------------------------------- figures of each class


@pytest.mark.parametrize("cls", PER_CLASS)
def test_each_class_has_its_figure_before_and_after_a_merge(cls: type[Metric]) -> None:
    metric = cls(average=None)
    assert not metric.scalar
    assert metric.figure_names == ()
    whole = figure(metric, CLASSES)
    assert whole.shape == (5,)
    states = []
    for rank in range(3):
        metric.reset()
        metric.update(CLASSES[0][rank::3], CLASSES[1][rank::3])
        states.append(metric.state_dict())
    metric.reset()
    metric.merge(states)
    np.testing.assert_allclose(metric.result(), whole)


X = RNG.normal(size=(48, 4)).astype(np.float32)
Y = (X @ RNG.normal(size=(4, 3))).argmax(axis=1)


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_logs_have_a_figure_for_each_class(backend: str, tmp_path: Path) -> None:
    metrics = [F1(average=None), IoU(average=None, class_names=["cat", "dog", "cow"])]
    trainer = Trainer(mlp(), loss="cross_entropy", metrics=metrics, backend=backend)
    assert trainer.monitor_mode("val_f1_class2") == "max"
    stop = EarlyStopping("val_iou_dog", mode="auto")
    history = trainer.fit(X, Y, epochs=2, validation_split=0.25, callbacks=[stop], verbose=0)
    names = {"f1_class0", "f1_class1", "f1_class2", "iou_cat", "iou_dog", "iou_cow"}
    assert names <= set(history.history)
    assert {f"val_{name}" for name in names} <= set(history.history)
    logs = trainer.evaluate(X, Y, batch_size=7)
    guess = trainer.predict(X).argmax(axis=1)
    expected = sk.f1_score(Y, guess, average=None)
    np.testing.assert_allclose([logs[f"f1_class{i}"] for i in range(3)], expected)
    assert all(isinstance(value, float) for value in logs.values())
    loaded = Trainer.load(trainer.save(tmp_path / "c"))
    assert loaded.evaluate(X, Y) == trainer.evaluate(X, Y)


def test_the_figures_of_the_classes_are_computed_at_once(monkeypatch: Any) -> None:
    trainer = Trainer(mlp(), loss="cross_entropy", metrics=[F1(average=None)])
    trainer.train_on_batch(X, Y)
    (metric,) = trainer.metrics
    metric.metric.update(Y, X[:, :3])
    calls, result = [], metric.metric.result
    monkeypatch.setattr(metric.metric, "result", lambda: calls.append(1) or result())
    figures = [figure() for figure in metric.figures.values()]
    np.testing.assert_array_equal(figures, result())
    assert len(calls) == 1


def test_names_that_do_not_fit_the_classes() -> None:
    metric = F1(average=None, class_names=["a", "b"])
    with pytest.raises(DataError, match=r"class_names for 2 classes, but the outputs have 5"):
        metric.update(*CLASSES)
    with pytest.raises(SettingError, match="class_names"):
        F1(average=None, class_names=[1, 2])
    with pytest.raises(SettingError, match=r"another name for each class, got \['a', 'b', 'a'\]"):
        F1(average=None, class_names=["a", "b", "a"])
    named = [F1(name="f", average=None, class_names=["a", "b", "c"]), F1(name="f_a")]
    with pytest.raises(SettingError, match="Two metrics are called 'f_a'"):
        Trainer(mlp(), loss="cross_entropy", metrics=named)
