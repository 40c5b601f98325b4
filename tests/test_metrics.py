"""Metrics: laws over the registry, scikit-learn's figures, and numbers counted by hand."""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import onnxfit.metrics
from onnxfit.errors import (
    CheckpointError,
    DataError,
    SettingError,
    UnknownNameError,
    UnsupportedError,
)
from onnxfit.graph.values import GraphBuilder
from onnxfit.metrics import (
    AUC,
    F1,
    R2,
    Accuracy,
    BinaryAccuracy,
    CategoricalAccuracy,
    CohenKappa,
    ConfusionMatrix,
    CosineSimilarity,
    FBeta,
    MeanSquaredError,
    Metric,
    Perplexity,
    Precision,
    Recall,
    RootMeanSquaredError,
    SparseCategoricalAccuracy,
    TopKAccuracy,
    get_metric,
)
from onnxfit.registry import from_config, registry, to_config
from onnxfit.step.finish import finish
from tests.helpers import exchanged

ROWS, CLASSES = 40, 7
REGISTRY = {cls.__name__: cls for cls in registry("onnxfit.metrics", Metric).values()}
every_metric = pytest.mark.parametrize("cls", REGISTRY.values(), ids=REGISTRY)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def softmax(scores: np.ndarray, axis: int = -1) -> np.ndarray:
    odds = np.exp(scores - scores.max(axis=axis, keepdims=True))
    return odds / odds.sum(axis=axis, keepdims=True)


def tasks(seed: int = 0, rows: int = ROWS) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Labels as a loss prepares them, and outputs, for every kind of task; scores are coarse, so
    that some are equal.
    """
    r = rng(seed)
    classes = r.integers(0, CLASSES, rows)
    scores = softmax(np.round(r.standard_normal((rows, CLASSES)), 1)).astype(np.float32)
    pixels = r.integers(0, 3, (rows, 5, 6))
    return {
        "binary": (
            r.integers(0, 2, (rows, 1)).astype(np.float32),
            np.round(r.random((rows, 1)), 2).astype(np.float32),
        ),
        "flat binary": (
            r.integers(0, 2, rows).astype(np.float32),
            np.round(r.random(rows), 2).astype(np.float32),
        ),
        "classes": (classes, scores),
        "one-hot": (np.eye(CLASSES, dtype=np.float32)[classes], scores),
        "pixels": (pixels, softmax(r.standard_normal((rows, 3, 5, 6)), axis=1).astype(np.float32)),
        "tokens": (pixels[:, :, 0], softmax(r.standard_normal((rows, 5, 3))).astype(np.float32)),
        "regression": (
            r.standard_normal((rows, 3)).astype(np.float32),
            r.standard_normal((rows, 3)).astype(np.float32),
        ),
        "images": (
            r.random((rows, 1, 11, 12)).astype(np.float32),
            r.random((rows, 1, 11, 12)).astype(np.float32),
        ),
        "boxes": (
            np.append(corners(r, rows, 4), r.integers(-1, 2, (rows, 4, 1)), axis=2),
            np.concatenate(
                [
                    corners(r, rows, 5),
                    np.round(r.random((rows, 5, 1)), 1),
                    r.integers(0, 2, (rows, 5, 1)),
                ],
                axis=2,
            ),
        ),
        "ctc": (
            np.where(np.arange(2) < r.integers(0, 3, (rows, 1)), r.integers(1, 4, (rows, 2)), -1),
            softmax(r.standard_normal((rows, 5, 4))).astype(np.float32),
        ),
    }


def corners(r: np.random.Generator, rows: int, boxes: int) -> np.ndarray:
    first = r.integers(0, 4, (rows, boxes, 2))
    return np.concatenate([first, first + r.integers(3, 6, (rows, boxes, 2))], axis=2)


def weights(seed: int = 1, rows: int = ROWS) -> np.ndarray:
    return rng(seed).integers(0, 4, rows).astype(np.float32)


def quiet(cls: type[Metric], **settings: Any) -> Metric:
    """A metric that takes the outputs of every task for what they are."""
    metric = cls(**settings)
    vars(metric)["_warned"] = True  # numbers of a regression are no probabilities
    return metric


def fitting(
    cls: type[Metric], seed: int = 0, rows: int = ROWS
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The tasks that a metric is for: it refuses the others with a DataError."""
    found = {}
    for name, (y_true, y_pred) in tasks(seed, rows).items():
        try:
            quiet(cls).update(y_true, y_pred)
        except DataError:
            continue
        found[name] = (y_true, y_pred)
    assert found, f"{cls.__name__} fits no task: add one that it is for"
    return found


def figure(
    metric: Metric,
    y_true: np.ndarray,
    y_pred: np.ndarray,
    w: np.ndarray | None = None,
    cuts: Any = (),
) -> Any:
    """The result over data that comes in batches; every batch is overwritten once it was used, as
    buffers are.
    """
    metric.reset()
    for part in zip(
        *(
            np.split(a, cuts) if a is not None else [None] * (len(cuts) + 1)
            for a in (y_true, y_pred, w)
        )
    ):
        batch = [None if array is None else array.copy() for array in part]
        metric.update(*batch)
        for array in batch:
            if array is not None:
                array.fill(0)
    return metric.result()


def tasks_without(
    row: int, y_true: np.ndarray, y_pred: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    return np.delete(y_true, row, axis=0), np.delete(y_pred, row, axis=0)


def same(a: Any, b: Any) -> None:
    np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


# ---------------------------------------------------------------------- laws


@every_metric
@settings(max_examples=25)
@given(
    cuts=st.lists(st.integers(0, ROWS), max_size=6).map(sorted),
    weighted=st.booleans(),
    seed=st.integers(0, 5),
)
def test_the_split_into_batches_does_not_matter(
    cls: type[Metric], cuts: list[int], weighted: bool, seed: int
) -> None:
    for y_true, y_pred in fitting(cls, seed).values():
        metric = quiet(cls, weighted=weighted)
        same(
            figure(metric, y_true, y_pred, weights(seed), cuts),
            figure(metric, y_true, y_pred, weights(seed)),
        )


@every_metric
def test_a_weight_counts_the_row_so_many_times_and_none_counts_it_once(cls: type[Metric]) -> None:
    w = weights()
    assert {0, 1, 2} < set(w), "the law says something about each"
    differs = False
    for y_true, y_pred in fitting(cls).values():
        metric, plain = quiet(cls, weighted=True), quiet(cls)
        times = w.astype(int)
        repeated = figure(plain, np.repeat(y_true, times, axis=0), np.repeat(y_pred, times, axis=0))
        same(figure(metric, y_true, y_pred, w), repeated)
        same(figure(metric, y_true, y_pred, w[:, None]), repeated)
        same(figure(metric, y_true, y_pred, np.ones_like(w)), figure(plain, y_true, y_pred))
        same(figure(metric, y_true, y_pred), figure(plain, y_true, y_pred))
        same(figure(plain, y_true, y_pred, w), figure(plain, y_true, y_pred))
        differs |= not np.array_equal(
            figure(metric, y_true, y_pred, w), figure(plain, y_true, y_pred)
        )
    assert differs, "weights have an effect"


@every_metric
def test_reset_forgets(cls: type[Metric]) -> None:
    for (y_true, y_pred), others in zip(fitting(cls).values(), fitting(cls, seed=7).values()):
        metric = quiet(cls)
        metric.update(*others)
        metric.reset()
        metric.update(y_true, y_pred)
        np.testing.assert_array_equal(metric.result(), figure(quiet(cls), y_true, y_pred))


@every_metric
def test_nothing_seen_is_nan(cls: type[Metric]) -> None:
    metric = cls(weighted=True)
    empty = metric.result()
    assert math.isnan(empty) if metric.scalar else empty.size == 0
    for y_true, y_pred in fitting(cls).values():
        masked = figure(quiet(cls, weighted=True), y_true, y_pred, np.zeros(ROWS))
        assert not metric.scalar or math.isnan(masked) or masked == 0


@every_metric
def test_result_is_a_float_unless_the_metric_says_otherwise(cls: type[Metric]) -> None:
    for y_true, y_pred in fitting(cls).values():
        result = figure(quiet(cls), y_true, y_pred)
        assert type(result) is (float if cls.scalar else np.ndarray)
        assert np.array_equal(quiet(cls).result(), cls().result(), equal_nan=True)


@every_metric
def test_mode_points_from_bad_predictions_to_perfect_ones(cls: type[Metric]) -> None:
    if not cls.scalar:
        return
    differs = False
    for name, (y_true, y_pred) in fitting(cls).items():
        perfect = y_true.astype(np.float32)
        if name in ("classes", "pixels", "tokens"):
            axis = 1 if name != "tokens" else -1
            perfect = np.moveaxis(np.eye(y_pred.shape[axis])[y_true], -1, axis)
        if name == "boxes":
            perfect = np.insert(perfect, 4, 0.5, axis=2)
        if name == "ctc":  # a blank between two labels
            path = np.zeros(y_pred.shape[:2], int)
            path[:, [0, 2]] = np.maximum(y_true, 0)
            perfect = np.eye(y_pred.shape[2])[path]
        best, noise = figure(quiet(cls), y_true, perfect), figure(quiet(cls), y_true, y_pred)
        assert best >= noise if cls.mode == "max" else best <= noise
        differs |= best != noise
    assert differs


@every_metric
def test_nan_is_never_right(cls: type[Metric]) -> None:
    """A prediction that is NaN makes a mean NaN, and is a miss where hits are counted."""
    for y_true, y_pred in fitting(cls).values():
        for row in range(ROWS):
            broken = y_pred.copy()
            broken[row] = np.nan
            metric = quiet(cls)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                result = figure(metric, y_true, broken)
            if not cls.scalar:
                assert result.sum() == figure(metric, *tasks_without(row, y_true, y_pred)).sum(), (
                    "in no cell"
                )
            elif not math.isnan(result):
                without = figure(metric, *tasks_without(row, y_true, y_pred))
                sign = 1 if cls.mode == "max" else -1
                assert sign * result <= sign * without + 1e-12


@every_metric
def test_infinite_outputs_do_not_warn(cls: type[Metric]) -> None:
    for y_true, y_pred in fitting(cls).values():
        broken = y_pred.copy()
        broken[3], broken[4] = np.inf, -np.inf
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            figure(quiet(cls), y_true, broken)


@every_metric
def test_a_metric_survives_its_configuration(cls: type[Metric]) -> None:
    for metric in (cls(), cls(weighted=True), cls(name="mine")):
        assert from_config(to_config(metric), "onnxfit.metrics") == metric


@every_metric
def test_labels_that_fit_nowhere_are_refused(cls: type[Metric]) -> None:
    with pytest.raises(DataError, match=rf"{cls.__name__} needs .*\(6, 7\).*\(6, 5\)"):
        quiet(cls).update(np.zeros((6, 7)), np.zeros((6, 5)))


# ---------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("spec", "cls"),
    [("acc", "Accuracy"), ("accuracy", "Accuracy"), ("mae", "MeanAbsoluteError"), ("mse", "MeanSquaredError"), ("MSE", "MeanSquaredError"),
     ("rmse", "RootMeanSquaredError"), ("mean_squared_error", "MeanSquaredError"), ("mean_absolute_error", "MeanAbsoluteError"), ("auc", "AUC"),
     ("AUC", "AUC"), ("f1", "F1"), ("f1_score", "F1"), ("precision", "Precision"), ("recall", "Recall"), ("r2", "R2"), ("top_k", "TopKAccuracy"),
     ("top_k_accuracy", "TopKAccuracy"), ("cosine_similarity", "CosineSimilarity"), ("confusion_matrix", "ConfusionMatrix"),
     ("binary_accuracy", "BinaryAccuracy"), ("categorical_accuracy", "CategoricalAccuracy"), ("MeanSquaredError", "MeanSquaredError"),
     ("sparse_categorical_accuracy", "SparseCategoricalAccuracy")],
)  # fmt: skip
def test_names_people_type(spec: str, cls: str) -> None:
    metric = get_metric(spec)
    assert (type(metric).__name__, metric.name) == (cls, spec)


def test_the_name_a_metric_is_logged_under() -> None:
    assert Accuracy().name == "accuracy"
    assert Accuracy(weighted=True).name == "weighted_accuracy"
    assert MeanSquaredError(name="error", weighted=True).name == "error"
    assert (TopKAccuracy().name, TopKAccuracy(3).name) == ("top_5_accuracy", "top_3_accuracy")
    assert get_metric(F1).name == "f1"


def test_unknown_metrics() -> None:
    with pytest.raises(
        UnknownNameError, match=r"No metric is called 'acuracy'\. Did you mean 'accuracy'"
    ):
        get_metric("acuracy")
    with pytest.raises(
        SettingError, match=r"A metric must be a name, a Metric, a metric object .*, got 3"
    ):
        get_metric(3)  # type: ignore[arg-type]


def test_a_metric_given_twice_is_two() -> None:
    given_metric = Accuracy(0.3)
    first, second = get_metric(given_metric), get_metric(given_metric)
    first.update(np.ones(3), np.ones(3))
    assert math.isnan(second.result())
    assert math.isnan(given_metric.result())
    assert first == second == given_metric
    used = Accuracy()
    used.update(np.ones(3), np.ones(3))
    assert math.isnan(get_metric(used).result())
    shallow = copy.copy(first)
    shallow.reset()
    assert first.result() == 1


def test_functions_are_metrics() -> None:
    def bias(y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        return (y_pred - y_true)[:, 0]

    def worst_accuracy(y_true: np.ndarray, y_pred: np.ndarray) -> float:
        return float(np.abs(y_true - y_pred).max())

    y_true, y_pred = np.zeros((4, 1)), np.array([[1.0], [2], [3], [6]])
    metric = get_metric(bias)
    assert (metric.name, metric.mode, figure(metric, y_true, y_pred, cuts=[1])) == (
        "bias",
        "min",
        3,
    )
    metric = get_metric(worst_accuracy)
    metric.check.has_warned = True  # type: ignore[attr-defined]
    assert (metric.name, metric.mode, figure(metric, y_true, y_pred, cuts=[3])) == (
        "worst_accuracy",
        "max",
        (3 * 3 + 6) / 4,
    )
    assert get_metric(lambda y_true, y_pred: 1.0).name == "function"
    with pytest.raises(DataError, match=r"Metric 'function' returned shape \(2,\) for 4 rows"):
        get_metric(lambda y_true, y_pred: np.zeros(2)).update(y_true, y_pred)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopKAccuracy(0), "TopKAccuracy needs k >= 1, got 0"),
        (lambda: BinaryAccuracy(math.nan), "BinaryAccuracy needs a finite threshold, got nan"),
        (lambda: F1(1.0, from_logits=True), "F1 needs 0 < threshold < 1 for logits, got 1.0"),
        (
            lambda: Precision(average="samples"),
            "Precision needs average 'macro', 'micro', 'weighted' or None, got 'samples'",
        ),
        (lambda: F1(class_names=["a"]), "F1 needs average=None for class_names, got average='mac"),
        (lambda: FBeta(beta=0), "FBeta needs beta > 0, got 0"),
        (
            lambda: CohenKappa(weights="cubic"),
            "CohenKappa needs weights 'linear', 'quadratic' or N",
        ),
    ],
)
def test_impossible_settings(make: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        make()


# ---------------------------------------------------------------------- numbers counted by hand


def test_the_weighted_and_the_plain_squared_error() -> None:
    y_true, y_pred, w = np.zeros((4, 1)), np.array([[1.0], [2], [3], [4]]), np.array([0.0, 0, 1, 1])
    assert figure(MeanSquaredError(), y_true, y_pred, w) == 7.5
    assert figure(MeanSquaredError(weighted=True), y_true, y_pred, w, [1, 3]) == 12.5
    assert figure(RootMeanSquaredError(), y_true, y_pred, None, [2]) == math.sqrt(7.5)


def test_a_row_that_does_not_count_cannot_spoil_the_figure() -> None:
    y_pred = np.array([[1.0], [np.nan]])
    for cls in (MeanSquaredError, R2, CosineSimilarity):
        result = figure(cls(weighted=True), np.zeros((2, 1)), y_pred, np.array([1.0, 0]))
        assert not math.isnan(result) or cls is R2  # one row has no R2


def test_accuracy_over_every_axis_that_can_hold_the_classes() -> None:
    labels = np.array([[[0, 1], [2, 2]]])  # one image of 2 × 2
    scores = np.zeros((1, 3, 2, 2))
    for (i, j), winner in {(0, 0): 0, (0, 1): 1, (1, 0): 0, (1, 1): 2}.items():
        scores[0, winner, i, j] = 1
    for metric in (Accuracy(), SparseCategoricalAccuracy()):
        assert figure(metric, labels, scores) == 0.75
        assert figure(metric, labels, np.moveaxis(scores, 1, -1)) == 0.75
    one_hot = np.moveaxis(np.eye(3)[labels], -1, 1)
    for metric in (Accuracy(), CategoricalAccuracy()):
        assert figure(metric, one_hot, scores) == 0.75
        assert figure(metric, np.moveaxis(one_hot, 1, -1), np.moveaxis(scores, 1, -1)) == 0.75
    assert figure(ConfusionMatrix(), labels, scores).tolist() == [[1, 0, 0], [0, 1, 0], [1, 0, 1]]
    # labels (n, 1)
    assert figure(Accuracy(), np.array([[1], [0]]), np.array([[0.1, 0.9], [0.2, 0.8]])) == 0.5


def test_where_several_axes_could_hold_the_classes_it_is_the_losses_axis() -> None:
    tokens, images = np.array([[0, 1], [1, 1]]), np.array([[[0, 1], [1, 1]]] * 2)
    assert figure(Accuracy(), tokens, np.eye(2)[tokens]) == 1  # (batch, tokens, classes)
    # (batch, classes, height, width)
    assert figure(Accuracy(), images, np.moveaxis(np.eye(2)[images], -1, 1)) == 1


def test_classes_that_the_outputs_lack_count_nowhere() -> None:
    y_true, scores = (
        np.array([0, -100, 1, 255]),
        np.array([[0.9, 0.1], [0.9, 0.1], [0.8, 0.2], [0.1, 0.9]]),
    )
    for metric, expected in (
        (Accuracy(), 0.5),
        (TopKAccuracy(1), 0.5),
        (Recall(average="micro"), 0.5),
        (AUC(), 1.0),
    ):
        assert figure(metric, y_true, scores) == expected
    assert figure(ConfusionMatrix(), y_true, scores).sum() == 2


@pytest.mark.parametrize("kind", [SparseCategoricalAccuracy, partial(TopKAccuracy, 1)])
def test_classes_that_the_outputs_lack_count_nowhere_with_weights_too(kind: Any) -> None:
    metric = kind(weighted=True)
    outputs = np.array([[0.9, 0.1], [0.9, 0.1], [0.2, 0.8]])
    metric.update(np.array([0, 7, 0]), outputs, np.array([1.0, 5.0, 3.0]))
    assert metric.result() == 1 / 4


@pytest.mark.parametrize("shape", [(4,), (4, 1), (1, 1, 2, 2), (2, 2, 1)])
def test_binary_outputs_of_any_shape(shape: tuple[int, ...]) -> None:
    y_true, y_pred = (
        np.array([0, 1, 1, 0.0]).reshape(shape),
        np.array([0.4, 0.6, 0.4, 0.5]).reshape(shape),
    )
    assert figure(Accuracy(), y_true, y_pred) == 0.75
    assert figure(Accuracy(threshold=0.3), y_true, y_pred) == 0.5
    assert figure(Recall(), y_true, y_pred) == 0.5
    assert figure(Precision(), y_true, y_pred) == 1
    assert figure(ConfusionMatrix(), y_true, y_pred).tolist() == [[2, 0], [1, 1]]


def test_logits_are_cut_where_their_sigmoid_is() -> None:
    probability = np.array([0.1, 0.29, 0.31, 0.5, 0.9])
    logit = np.log(probability / (1 - probability))
    y_true = np.array([0, 1, 1, 0, 1.0])
    for cls in (Accuracy, BinaryAccuracy, Precision, Recall, F1, ConfusionMatrix):
        for threshold in (0.3, 0.5, 0.89):
            np.testing.assert_array_equal(
                figure(cls(threshold=threshold, from_logits=True), y_true, logit),
                figure(cls(threshold=threshold), y_true, probability),
            )
        metric = cls()
        with pytest.warns(
            UserWarning,
            match=rf"outside 0\.\.1\. If they are logits, use {cls.__name__}\(from_logits=True\)",
        ):
            metric.update(y_true, logit)
        metric.update(y_true, logit)  # says it once
    # scores around 0 are what they are
    figure(BinaryAccuracy(threshold=0.0), np.sign(logit), logit)


def test_several_labels_at_once_are_not_taken_for_one_class() -> None:
    y_true, y_pred = (
        np.array([[1, 1, 0], [0, 0, 0.0]]),
        np.array([[0.9, 0.8, 0.7], [0.1, 0.2, 0.3]]),
    )
    for metric in (Accuracy(), CategoricalAccuracy(), F1(), ConfusionMatrix(), TopKAccuracy()):
        with pytest.raises(
            DataError, match=r"add up to 1 over the classes.*BinaryAccuracy.*multi_label=True"
        ):
            metric.update(y_true, y_pred)
    assert figure(BinaryAccuracy(), y_true, y_pred) == 5 / 6


def test_equal_scores_do_not_count_for_every_class() -> None:
    constant = np.full((4, 4), 0.25)
    for k in (1, 2, 3, 4):
        assert figure(TopKAccuracy(k), np.arange(4), constant) == k / 4
    assert figure(AUC(), np.arange(4), constant) == 0.5


def test_cosine_of_zero_is_zero() -> None:
    same(
        figure(
            CosineSimilarity(),
            np.array([[3.0, 4], [0, 0], [1, 0]]),
            np.array([[4.0, 3], [1, 1], [-2, 0]]),
        ),
        (24 / 25 + 0 - 1) / 3,
    )


def test_r2_of_a_constant() -> None:
    constant = np.full((6, 1), 0.1)
    assert constant[:3].sum() / 3 != 0.1, "the mean of equal numbers need not be that number"
    assert figure(R2(), constant, constant, None, [1, 3]) == 1
    assert figure(R2(), constant, constant + 1, None, [1, 3]) == 0
    assert math.isnan(figure(R2(), constant[:1], constant[:1]))


def test_r2_does_not_cancel() -> None:
    y = rng().standard_normal((1000, 1))
    noisy = y + 0.1 * rng(1).standard_normal((1000, 1))
    same_spread = figure(R2(), y, noisy)
    np.testing.assert_allclose(
        figure(R2(), y + 1e8, noisy + 1e8, None, range(0, 1000, 7)), same_spread, rtol=1e-6
    )


def test_undefined_areas() -> None:
    assert math.isnan(figure(AUC(), np.ones(3), np.array([0.1, 0.2, 0.3])))
    assert math.isnan(figure(AUC(), np.array([0.0, 1]), np.array([0.1, np.nan])))
    scores = softmax(rng().standard_normal((6, 3)))
    two_of_three = np.array([0, 1, 0, 1, 1, 0])
    columns = [figure(AUC(), (two_of_three == c).astype(float), scores[:, c]) for c in (0, 1)]
    same(figure(AUC(), two_of_three, scores), np.mean(columns))


# ---------------------------------------------------------------------- scikit-learn


@pytest.mark.filterwarnings("ignore:.*y_pred contains classes not in y_true.*")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("weighted", [False, True])
def test_scikit_learn_agrees(seed: int, weighted: bool) -> None:
    from sklearn import metrics as sk

    data = tasks(seed)
    w = weights(seed + 10) + 0.5 if weighted else None
    options = {"sample_weight": w}

    def ours(metric: Metric, task: str) -> Any:
        metric.weighted = weighted
        return figure(metric, *data[task], w, [5, 6, 20])

    y, p = (a.ravel() for a in data["binary"])
    same(ours(Accuracy(), "binary"), sk.accuracy_score(y, p > 0.5, **options))
    same(ours(BinaryAccuracy(0.3), "binary"), sk.accuracy_score(y, p > np.float32(0.3), **options))
    same(ours(AUC(), "binary"), sk.roc_auc_score(y, p, **options))
    same(ours(ConfusionMatrix(), "binary"), sk.confusion_matrix(y, p > 0.5, **options))
    for cls, score in (
        (Precision, sk.precision_score),
        (Recall, sk.recall_score),
        (F1, sk.f1_score),
    ):
        same(ours(cls(0.7), "binary"), score(y, p > np.float32(0.7), **options))

    y, scores = data["classes"]
    guess = scores.argmax(axis=1)
    for task in ("classes", "one-hot"):
        same(ours(Accuracy(), task), sk.accuracy_score(y, guess, **options))
        same(
            ours(AUC(), task),
            sk.roc_auc_score(
                y,
                scores / scores.astype(np.float64).sum(1, keepdims=True),
                multi_class="ovr",
                **options,
            ),
        )
        same(ours(ConfusionMatrix(), task), sk.confusion_matrix(y, guess, **options))
        for cls, score in (
            (Precision, sk.precision_score),
            (Recall, sk.recall_score),
            (F1, sk.f1_score),
        ):
            for average in ("macro", "micro", "weighted"):
                same(ours(cls(average=average), task), score(y, guess, average=average, **options))

    y, scores = rng(seed).integers(0, 7, ROWS), softmax(rng(seed + 1).standard_normal((ROWS, 7)))
    data["distinct"] = (y, scores)
    for k in (1, 2, 3, 6):
        same(
            ours(TopKAccuracy(k), "distinct"),
            sk.top_k_accuracy_score(y, scores, k=k, labels=np.arange(7), **options),
        )

    y, p = data["regression"]
    same(
        ours(MeanSquaredError(), "regression"),
        sk.mean_squared_error(y.astype(float), p.astype(float), **options),
    )
    same(
        ours(get_metric("mae"), "regression"),
        sk.mean_absolute_error(y.astype(float), p.astype(float), **options),
    )
    same(ours(R2(), "regression"), sk.r2_score(y.astype(float), p.astype(float), **options))
    cosines = np.diag(sk.pairwise.cosine_similarity(y.astype(float), p.astype(float)))
    same(ours(CosineSimilarity(), "regression"), np.average(cosines, weights=w))

    several = (rng(seed).random((ROWS, 3)) < 0.4).astype(np.float32)
    data["labels"] = (several, rng(seed + 1).random((ROWS, 3)))
    for cls, score in (
        (Precision, sk.precision_score),
        (Recall, sk.recall_score),
        (F1, sk.f1_score),
    ):
        for average in ("macro", "micro", "weighted"):
            same(
                ours(cls(average=average, multi_label=True), "labels"),
                score(several, data["labels"][1] > 0.5, average=average, **options),
            )
    same(
        ours(AUC(), "labels"),
        sk.roc_auc_score(several, data["labels"][1], average="macro", **options),
    )


def test_classes_that_neither_occur_nor_are_predicted_do_not_count() -> None:
    from sklearn.metrics import f1_score

    y, scores = np.array([0, 1, 1, 3]), np.eye(5)[[0, 1, 2, 3]]
    same(figure(F1(), y, scores), f1_score(y, scores.argmax(axis=1), average="macro"))


def test_the_area_of_logits_is_that_of_their_softmax() -> None:
    logits = rng().standard_normal((ROWS, CLASSES)) * 3
    y = tasks()["classes"][0]
    same(figure(AUC(from_logits=True), y, logits), figure(AUC(), y, softmax(logits)))
    assert figure(AUC(), y, logits) != figure(AUC(), y, softmax(logits)), (
        "the order of rows depends on it"
    )


def test_every_exported_name_is_tested_or_a_metric() -> None:
    assert set(onnxfit.metrics.__all__) == {
        *REGISTRY,
        "EpochMetric",  # tests/test_metric_objects.py
        "ExternalMetric",
        "MeanMetric",
        "Metric",
        "WordErrorRate",  # tests/test_ctc.py
        "get_metric",
    }


@pytest.mark.parametrize("label", [0.5, math.nan, math.inf])
def test_a_float_label_that_is_no_class_is_refused(label):
    for cls in (Accuracy, SparseCategoricalAccuracy, TopKAccuracy, ConfusionMatrix, AUC):
        with np.errstate(invalid="ignore"), pytest.raises(DataError, match=f"got {label:g}"):
            cls().update(np.array([1.0, label]), np.eye(3)[:2])


@every_metric
@pytest.mark.filterwarnings("ignore:.*outside 0..1")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_of_weight_zero_that_is_not_finite_has_no_influence(cls, bad):
    taken = 0
    for true, pred in tasks().values():
        weight = np.linspace(0.5, 2, len(pred)) * (np.arange(len(pred)) % 4 > 0)
        try:
            used = weight > 0
            expected = figure(cls(weighted=True), true[used], pred[used], weight[used])
        except DataError:
            continue
        taken += 1
        pred = pred.copy()
        pred[weight == 0] = bad
        result = figure(cls(weighted=True), true, pred, weight)
        np.testing.assert_allclose(result, expected, rtol=1e-9)
    assert taken


# ---------------------------------------------------------------------- several processes


def shares(
    metric: Metric, arrays: Sequence[np.ndarray | None], processes: int, size: int
) -> list[dict[str, Any]]:
    """The state of the metric of each process, which has every n-th row, in batches."""
    states = []
    for rank in range(processes):
        own = copy.copy(metric)
        own.reset()
        rows = [None if a is None else a[rank::processes] for a in arrays]
        for start in range(0, -(-ROWS // processes), size):
            own.update(*(None if a is None else a[start : start + size] for a in rows))
        states.append(exchanged(own.state_dict()))
    return states


def merged(metric: Metric, states: Sequence[Mapping[str, Any]]) -> Any:
    whole = copy.copy(metric)
    whole.reset()
    whole.merge(states)
    return whole.result()


def near(a: Any, b: Any) -> None:
    np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def label_weights(metric: Metric, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
    """A weight for each label, or for each row if the metric takes no others; some are 0."""
    w = rng(3).integers(0, 3, y_true.shape).astype(np.float32)
    try:
        figure(metric, y_true, y_pred, w)
    except DataError:
        return weights(3)
    return w


@every_metric
def test_merged_shares_are_the_whole(cls: type[Metric]) -> None:
    for y_true, y_pred in fitting(cls).values():
        metric = quiet(cls, weighted=True)
        for w in (None, weights() + 0.5, label_weights(metric, y_true, y_pred)):
            metric.weighted = w is not None
            whole = figure(metric, y_true, y_pred, w)
            # Of batches of one row, some have no row that counts.
            for processes, size in ((1, 16), (2, ROWS), (3, 1), (5, 3)):
                states = shares(metric, (y_true, y_pred, w), processes, size)
                near(merged(metric, states), whole)
                near(merged(metric, states[::-1]), whole)


@every_metric
def test_a_process_without_rows_adds_nothing(cls: type[Metric]) -> None:
    for y_true, y_pred in fitting(cls).values():
        metric, unused = quiet(cls), quiet(cls)
        whole = figure(metric, y_true, y_pred)
        none, state = unused.state_dict(), metric.state_dict()
        emptied = quiet(cls)
        emptied.update(y_true[:0], y_pred[:0])
        for states in ([none, state], [state, none, none], [emptied.state_dict(), state]):
            near(merged(metric, exchanged(states)), whole)
        for states in ([], [none], [none, none]):
            np.testing.assert_array_equal(merged(metric, exchanged(states)), quiet(cls).result())


@every_metric
def test_a_merged_metric_goes_on_and_leaves_the_others_alone(cls: type[Metric]) -> None:
    for y_true, y_pred in fitting(cls).values():
        first, second, last = (
            (y_true[rows], y_pred[rows]) for rows in (slice(12), slice(12, 25), slice(25, None))
        )
        metric, other = quiet(cls), quiet(cls)
        metric.update(*first)
        other.update(*second)
        before = other.result()
        earlier = quiet(cls)
        earlier.load_state_dict(metric.state_dict())
        metric.merge([other.state_dict()])
        np.testing.assert_array_equal(earlier.result(), figure(quiet(cls), *first))
        near(metric.result(), figure(quiet(cls), y_true[:25], y_pred[:25]))
        metric.update(*last)
        whole = figure(quiet(cls), y_true, y_pred)
        near(metric.result(), whole)
        np.testing.assert_array_equal(other.result(), before)
        resumed = quiet(cls)
        resumed.load_state_dict(exchanged(metric.state_dict()))
        np.testing.assert_array_equal(resumed.result(), metric.result())


@every_metric
def test_a_state_stays_as_it_is_when_its_metric_goes_on(cls: type[Metric]) -> None:
    for y_true, y_pred in fitting(cls).values():
        metric, resumed = quiet(cls), quiet(cls)
        metric.update(y_true[:9], y_pred[:9])
        state, earlier = metric.state_dict(), metric.result()
        resumed.load_state_dict(state)
        for one in (metric, resumed):
            one.update(y_true[9:], y_pred[9:])
            np.testing.assert_array_equal(merged(quiet(cls), [state]), earlier)


def test_one_hot_labels_of_images_with_their_classes_last_in_a_batch_where_nothing_counts() -> None:
    """The labels do not tell then which axis has the classes."""
    one_hot = np.eye(3)[rng().integers(0, 3, (4, 5, 6))]
    scores = softmax(rng(1).standard_normal((4, 5, 6, 3)))
    w = np.array([0.0, 1, 2, 0])
    for cls in (Precision, Recall, F1, ConfusionMatrix, AUC):
        metric = cls(weighted=True)
        whole = figure(metric, one_hot[1:3], scores[1:3], w[1:3])
        near(figure(metric, one_hot, scores, w, [1, 3]), whole)
        states = []
        for rows in (slice(0, 1), slice(1, 2), slice(2, 4), slice(0, 0)):
            figure(metric, one_hot[rows], scores[rows], w[rows])
            states.append(metric.state_dict())
        near(merged(metric, states), whole)


@pytest.mark.parametrize("offset", [0.0, 1e8])
def test_merged_r2_does_not_cancel(offset: float) -> None:
    y = np.round(rng().standard_normal((1000, 2)), 3)
    noisy = y + np.round(0.1 * rng(1).standard_normal((1000, 2)), 3)
    states = []
    for rank in range(5):
        metric = R2()
        figure(metric, y[rank::5] + offset, noisy[rank::5] + offset, None, [17, 100])
        states.append(metric.state_dict())
    tolerance = 1e-12 if offset == 0 else 1e-6
    np.testing.assert_allclose(merged(R2(), states), figure(R2(), y, noisy), rtol=tolerance)


@pytest.mark.parametrize("w", [None, np.array([[0.0, 1], [0, 1], [1, 1], [1, 1], [1, 1], [1, 0]])])
def test_merged_r2_of_a_constant(w: np.ndarray | None) -> None:
    constant = np.full((6, 2), 0.1)
    for error, expected in ((0, 1), (1, 0)):
        metric = R2(weighted=True)
        assert figure(metric, constant, constant + error, w, [1, 5]) == expected
        states = []
        for rows in (slice(0, 1), slice(1, 5), slice(5, 6)):
            part = None if w is None else w[rows]
            figure(metric, constant[rows], constant[rows] + error, part)
            states.append(metric.state_dict())
        assert merged(metric, states) == expected


def test_the_value_of_a_function_counts_as_often_as_its_batch_has_rows() -> None:
    metric = get_metric(lambda y_true, y_pred: np.abs(y_true - y_pred).max())
    y_true, y_pred = np.zeros(4), np.array([1.0, 2, 3, 6])
    states = []
    for rows in (slice(0, 3), slice(3, 4), slice(4, 4)):
        metric.reset()
        metric.update(y_true[rows], y_pred[rows])
        states.append(metric.state_dict())
    assert merged(metric, states) == (3 * 3 + 6) / 4


@dataclasses.dataclass
class Largest(Metric):
    """A metric that a sum would merge to a wrong figure."""

    def reset(self) -> None:
        self._largest = math.nan

    def update(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self._largest = float(np.fmax(self._largest, np.abs(y_true - y_pred).max()))

    def result(self) -> float:
        return self._largest


@dataclasses.dataclass
class MeanAndLargest(MeanSquaredError):
    """A metric that remembers more than the class whose `merge` it inherits."""

    def reset(self) -> None:
        super().reset()
        self._largest = math.nan


@pytest.mark.parametrize("cls", [Largest, MeanAndLargest])
@pytest.mark.parametrize("count", [0, 1])
def test_a_metric_that_does_not_say_how_is_not_merged(cls: type[Metric], count: int) -> None:
    metric = cls()
    message = (
        rf"metric '{metric.name}' cannot be merged .* Implement {cls.__name__}\.merge\(self, sta"
    )
    with pytest.raises(UnsupportedError, match=message):
        metric.merge([metric.state_dict()] * count)


def test_a_metric_merges_what_its_class_adds() -> None:
    class Merging(MeanAndLargest):
        def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
            super().merge(states)
            for state in states:
                self._largest = float(np.fmax(self._largest, state["_largest"]))

    metric, other = Merging(), Merging()
    other.update(np.zeros(2), np.array([1.0, 3.0]))
    other._largest = 3.0
    metric.merge([other.state_dict(), Merging().state_dict()])
    assert (metric.result(), metric._largest) == (5, 3)


def test_a_metric_is_not_merged_with_another() -> None:
    metric = MeanSquaredError()
    with pytest.raises(CheckpointError, match="'mean_squared_error' stores _count, _total"):
        metric.merge([AUC().state_dict()])


# ---------------------------------------------------------------------- sums of a graph

INDICES = {"classes", "pixels", "tokens"}
ERRORS = {"binary", "flat binary", "one-hot", "regression", "images"}
# Metric -> the tasks of which a graph computes its sums
SUMMED = {
    **dict.fromkeys(("Accuracy", "SparseCategoricalAccuracy", "LogLoss", "Perplexity"), INDICES),
    **dict.fromkeys(("MeanSquaredError", "RootMeanSquaredError", "MeanAbsoluteError"), ERRORS),
}


def graph_figure(
    metric: Metric,
    y_true: np.ndarray,
    y_pred: np.ndarray,
    w: np.ndarray | None = None,
    sizes: Sequence[int | str | None] = ("batch",),
) -> Any:
    """The result over data in two batches of which a graph computes the sums; None where it does
    not. `sizes` are the first ones that the graph declares for each array.
    """
    op = GraphBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="metric"))
    arrays = {"y_true": y_true, "y_pred": y_pred} | ({} if w is None else {"w": w})
    inputs = [
        op.input(name, array.dtype, (*sizes[: array.ndim], *array.shape[len(sizes) :]))
        for name, array in arrays.items()
    ]
    sums = metric.sums(op, inputs[0], inputs[1], None if w is None else inputs[2])
    if sums is None:
        return None
    for name, value in sums.items():
        assert value.shape == ()
        op.output(name, value)
    session = onnxruntime.InferenceSession(
        finish(op).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    read = {value.name for value in session.get_inputs()}
    metric.reset()
    for rows in (slice(0, 15), slice(15, None)):
        feeds = {name: array[rows] for name, array in arrays.items() if name in read}
        metric.add_sums(dict(zip(sums, session.run(None, feeds))))
    return metric.result()


def agree(graph: Any, host: Any) -> None:
    np.testing.assert_allclose(graph, host, rtol=1e-6, atol=1e-12)


@every_metric
def test_a_graph_adds_up_what_update_adds(cls: type[Metric]) -> None:
    summed = set()
    for name, (y_true, y_pred) in fitting(cls).items():
        for dtype in (np.float32, np.float64):
            pred = y_pred.astype(dtype)
            metric = quiet(cls)
            result = graph_figure(metric, y_true.astype(dtype) if name in ERRORS else y_true, pred)
            if result is None:
                continue
            summed.add(name)
            agree(result, figure(metric, y_true, pred))
            for w in (weights(), label_weights(metric, y_true, y_pred)):
                metric.weighted = True
                agree(graph_figure(metric, y_true, pred, w), figure(metric, y_true, pred, w))
                metric.weighted = False
                agree(graph_figure(metric, y_true, pred, w), figure(metric, y_true, pred))
    assert summed == SUMMED.get(cls.__name__, set())


@pytest.mark.parametrize("cls", [Accuracy, SparseCategoricalAccuracy, Perplexity])
def test_labels_that_a_graph_does_not_count(cls: type[Metric]) -> None:
    for name in ("classes", "pixels", "tokens"):
        y_true, y_pred = tasks()[name]
        y_true = y_true.copy()
        y_true[::3] = -1
        y_true[1::5] = 100
        metric = quiet(cls)
        agree(graph_figure(metric, y_true, y_pred), figure(metric, y_true, y_pred))
        assert math.isnan(graph_figure(metric, np.full_like(y_true, -100), y_pred))


@pytest.mark.parametrize("classes", [2, 127, 640, 1000])
@pytest.mark.parametrize("rank", [2, 3])
def test_the_first_of_equal_scores_counts_in_a_graph_of_many_classes(
    classes: int, rank: int
) -> None:
    shape = (ROWS, 3, classes) if rank == 3 else (ROWS, classes)
    y_pred = rng().integers(0, 3, shape).astype(np.float32)
    highest = y_pred.argmax(axis=-1)
    last = classes - 1 - y_pred[..., ::-1].argmax(axis=-1)
    assert (highest != last).any() or classes == 2
    for y_true in (highest, last):
        metric = Accuracy()
        agree(graph_figure(metric, y_true, y_pred), figure(metric, y_true, y_pred))


@pytest.mark.parametrize("classes", [7, 1000])
def test_scores_that_are_not_finite_in_a_graph(classes: int) -> None:
    y_pred = rng().standard_normal((ROWS, classes)).astype(np.float32)
    y_true = y_pred.argmax(axis=1)
    y_pred[0, 1], y_pred[1] = np.nan, np.nan
    y_pred[2, y_true[2]], y_pred[3, y_true[3] - 1] = np.inf, -np.inf
    y_pred[4, y_true[4]], y_pred[4, y_true[4] - 1] = np.inf, -np.inf
    metric = Accuracy()
    result = figure(metric, y_true, y_pred)
    assert result == (ROWS - 3) / ROWS, "rows 0, 1 and 4 are wrong"
    agree(graph_figure(metric, y_true, y_pred), result)


@pytest.mark.parametrize("classes", [7, 640])
def test_perplexity_of_logits_in_a_graph(classes: int) -> None:
    y_pred = (5 * rng().standard_normal((ROWS, classes))).astype(np.float32)
    y_pred[3, 0] = -np.inf
    y_true = rng(1).integers(1, classes, ROWS)
    metric = Perplexity(from_logits=True)
    agree(graph_figure(metric, y_true, y_pred), figure(metric, y_true, y_pred))
    y_true[3] = 0
    assert graph_figure(metric, y_true, y_pred) == figure(metric, y_true, y_pred) == math.inf


def test_sizes_that_a_graph_does_not_know_are_left_to_update() -> None:
    y_true, y_pred = tasks()["tokens"]
    assert graph_figure(Accuracy(), y_true, y_pred, sizes=("batch", "tokens")) is not None
    for sizes in ((None,), ("batch", None), ("batch", "tokens", "classes")):
        assert graph_figure(Accuracy(), y_true, y_pred, sizes=sizes) is None
        assert graph_figure(Perplexity(), y_true, y_pred, sizes=sizes) is None
        assert graph_figure(MeanSquaredError(), y_pred, y_pred, sizes=("batch", None)) is None


def test_a_mean_with_values_of_its_own_is_not_added_up_by_a_graph() -> None:
    @dataclasses.dataclass
    class Half(MeanSquaredError):
        def values(self, y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
            return super().values(y_true, y_pred) / 2

    y_true, y_pred = tasks()["regression"]
    assert graph_figure(MeanSquaredError(), y_true, y_pred) is not None
    assert graph_figure(Half(), y_true, y_pred) is None
