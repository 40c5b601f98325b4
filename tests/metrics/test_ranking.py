"""Metrics of the order of scores and of items, against scikit-learn and by brute force."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn import metrics as sk

from onnxfit import Trainer
from onnxfit.errors import DataError, SettingError
from onnxfit.metrics import (
    AUC,
    NDCG,
    AveragePrecision,
    HitRate,
    MeanReciprocalRank,
    Metric,
    PrecisionAtK,
    PrecisionAtRecall,
    PrecisionRecallAUC,
    RecallAtK,
    RecallAtPrecision,
    SensitivityAtSpecificity,
    SpecificityAtSensitivity,
)
from tests.models import mlp

RNG = np.random.default_rng(0)
ROWS = 80
LABELS = RNG.integers(0, 2, ROWS).astype(float)
SCORES = np.round(RNG.random(ROWS) + 0.3 * LABELS, 1)  # many are equal
COLUMNS = (RNG.random((ROWS, 3)) < 0.4).astype(float), np.round(RNG.random((ROWS, 3)), 1)
CLASSES = RNG.integers(0, 4, ROWS), np.round(RNG.random((ROWS, 4)), 1)
WEIGHTS = RNG.integers(0, 4, ROWS)


def figure(metric: Metric, y: Any, p: Any, w: Any = None) -> Any:
    """The result over three batches."""
    metric.reset()
    for rows in (slice(0, 7), slice(7, 30), slice(30, None)):
        metric.update(y[rows], p[rows], None if w is None else w[rows])
    return metric.result()


def trapezoids(y: Any, p: Any, sample_weight: Any = None) -> float:
    precision, recall, _ = sk.precision_recall_curve(y, p, sample_weight=sample_weight)
    return float(sk.auc(recall, precision))


@pytest.mark.parametrize("w", [None, WEIGHTS], ids=["plain", "weighted"])
def test_areas_are_those_of_scikit_learn(w: np.ndarray | None) -> None:
    scores = {
        AUC: sk.roc_auc_score,
        AveragePrecision: sk.average_precision_score,
        PrecisionRecallAUC: trapezoids,
    }
    one_hot = np.eye(4)[CLASSES[0]]
    for cls, score in scores.items():
        metric = cls(weighted=w is not None)
        expected = score(LABELS, SCORES, sample_weight=w)
        np.testing.assert_allclose(figure(metric, LABELS, SCORES, w), expected, rtol=1e-12)
        for (y, p), matrix in ((COLUMNS, COLUMNS[0]), (CLASSES, one_hot)):
            each = [score(matrix[:, c], p[:, c], sample_weight=w) for c in range(p.shape[1])]
            shares = np.average(matrix, axis=0, weights=w)
            for average, mean in (
                ("macro", np.mean(each)),
                ("weighted", np.average(each, weights=shares)),
                (None, each),
            ):
                metric = cls(average=average, weighted=w is not None)
                np.testing.assert_allclose(figure(metric, y, p, w), mean, rtol=1e-12)


@pytest.mark.parametrize("bound", [0.0, 0.3, 0.5, 0.8, 1.0])
def test_the_best_threshold_by_trying_all(bound: float) -> None:
    found = []  # recall, precision, specificity
    for cut in np.unique(SCORES):
        guess = cut <= SCORES
        hits, rejected = guess[LABELS == 1], ~guess[LABELS == 0]
        found.append((hits.mean(), LABELS[guess].mean(), rejected.mean()))
    recall, precision, specificity = np.array(found).T

    def best(figures: np.ndarray, others: np.ndarray) -> float:
        return max(figures[others >= bound], default=0.0)

    cases: list[tuple[Metric, float]] = [
        (PrecisionAtRecall(recall=bound), best(precision, recall)),
        (RecallAtPrecision(precision=bound), best(recall, precision)),
        (SensitivityAtSpecificity(specificity=bound), best(recall, specificity)),
    ]
    if bound:
        metric = SpecificityAtSensitivity(sensitivity=bound)
        cases.append((metric, best(specificity, recall)))
    for metric, expected in cases:
        np.testing.assert_allclose(figure(metric, LABELS, SCORES), expected, rtol=1e-12)


def test_a_bound_outside_of_its_range() -> None:
    with pytest.raises(SettingError, match=r"PrecisionAtRecall needs recall >= 0 and <= 1, got 2"):
        PrecisionAtRecall(recall=2)
    with pytest.raises(SettingError, match=r"sensitivity > 0 and <= 1, got 0"):
        SpecificityAtSensitivity(sensitivity=0)


def test_logs_have_the_area_of_each_class(tmp_path: Path) -> None:
    x = RNG.normal(size=(48, 4)).astype(np.float32)
    y = (x @ RNG.normal(size=(4, 3))).argmax(axis=1)
    trainer = Trainer(mlp(), loss="cross_entropy", metrics=[AUC(average=None), "pr_auc"])
    history = trainer.fit(x, y, validation_split=0.25, verbose=0).history
    assert {"auc_class0", "auc_class2", "val_auc_class1", "val_pr_auc"} <= set(history)
    logs = trainer.evaluate(x, y, batch_size=7)
    odds = np.exp(trainer.predict(x))
    shares = odds / odds.sum(axis=1, keepdims=True)
    for c in range(3):
        expected = sk.roc_auc_score(y == c, shares[:, c])
        assert logs[f"auc_class{c}"] == pytest.approx(expected)


# ---------------------------------------------------------------------- items

GAINS = RNG.integers(0, 4, (ROWS, 6)).astype(float)
GAINS[3] = 0  # nothing is relevant
ITEMS = np.round(RNG.random((ROWS, 6)), 1)


@pytest.mark.parametrize("k", [None, 1, 3, 6, 9])
@pytest.mark.parametrize("w", [None, WEIGHTS], ids=["plain", "weighted"])
def test_ndcg_is_that_of_scikit_learn(k: int | None, w: np.ndarray | None) -> None:
    expected = sk.ndcg_score(GAINS, ITEMS, k=k, sample_weight=w)
    metric = NDCG(k, weighted=w is not None)
    np.testing.assert_allclose(figure(metric, GAINS, ITEMS, w), expected, rtol=1e-12)


@pytest.mark.parametrize("k", [1, 3, 6, 9])
def test_items_of_each_row_by_sorting_them(k: int) -> None:
    figures = []
    for gains, scores in zip(GAINS, ITEMS):
        ranked = sorted(range(6), key=lambda i, s=scores: -s[i])
        hits = [gains[i] > 0 for i in ranked]
        first = 1 / (1 + hits.index(True)) if any(hits) else 0
        relevant = max(1, sum(hits))
        figures.append((sum(hits[:k]) / relevant, sum(hits[:k]) / k, any(hits[:k]), first))
    metrics = (RecallAtK(k), PrecisionAtK(k), HitRate(k), MeanReciprocalRank())
    for metric, expected in zip(metrics, np.mean(figures, axis=0)):
        np.testing.assert_allclose(figure(metric, GAINS, ITEMS), expected, rtol=1e-12)


def test_the_index_of_the_relevant_item() -> None:
    index = GAINS.argmax(axis=1)
    one_hot = np.eye(6)[index]
    for cls in (NDCG, RecallAtK, MeanReciprocalRank, HitRate):
        expected = figure(cls(), one_hot, ITEMS)
        assert figure(cls(), index, ITEMS) == expected
        assert figure(cls(), index[:, None], ITEMS) == expected
        masked = np.where(np.arange(ROWS) < 40, index, -1)
        np.testing.assert_allclose(
            figure(cls(), masked, ITEMS), figure(cls(), one_hot[:40], ITEMS[:40])
        )


def test_items_of_negative_relevance_do_not_count() -> None:
    padded = np.append(GAINS, np.full((ROWS, 2), -1.0), axis=1)
    scores = np.append(ITEMS, np.full((ROWS, 2), 5.0), axis=1)
    for metric in (NDCG(), NDCG(2), RecallAtK(2), PrecisionAtK(2), MeanReciprocalRank()):
        same = figure(metric, GAINS, ITEMS)
        np.testing.assert_allclose(figure(metric, padded, scores), same, rtol=1e-12)


def test_labels_that_are_no_items() -> None:
    with pytest.raises(DataError, match=r"NDCG needs a relevance for each item, .*\(80, 5\)"):
        NDCG().update(GAINS[:, :5], ITEMS)
    assert [metric.name for metric in (RecallAtK(3), NDCG(), NDCG(10), HitRate())] == [
        "recall_at_3",
        "ndcg",
        "ndcg_at_10",
        "hit_rate_at_5",
    ]
