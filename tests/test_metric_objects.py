"""Metrics of other libraries, functions of a batch, and functions of all rows."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
from sklearn.metrics import average_precision_score, f1_score, log_loss, r2_score, roc_auc_score

from onnxfit import Trainer, losses, metrics
from onnxfit.callbacks import Callback, CSVLogger, EarlyStopping, LambdaCallback, ModelCheckpoint
from onnxfit.errors import CheckpointError, DataError, SettingError, UnsupportedError
from onnxfit.metrics import EpochMetric, ExternalMetric, get_metric
from tests.helpers import exchanged

ROWS, CLASSES = 90, 4
rng = np.random.default_rng(0)
X = rng.standard_normal((ROWS, 5)).astype(np.float32)
TRUE = rng.standard_normal((5, CLASSES))
Y = (X @ TRUE + rng.standard_normal((ROWS, CLASSES))).argmax(axis=1)
W = rng.integers(0, 3, ROWS).astype(np.float32)


def f1_macro(y_true: np.ndarray, y_pred: np.ndarray, **settings: Any) -> float:
    return float(f1_score(y_true, y_pred, average="macro", **settings))


def batch_f1(y_true: np.ndarray, y_pred: np.ndarray) -> float:
    return f1_macro(y_true, y_pred.argmax(axis=1))


def network(**settings: Any) -> Trainer:
    """Return a classifier with the weights of `TRUE`, so that its figures are those of `scores`."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        net (float[N, 5] x) => (float[N, {CLASSES}] y) {{ y = MatMul(x, w) }}"""
    )
    model.graph.initializer.append(
        onnx.numpy_helper.from_array(TRUE.astype(np.float32), "w"),
    )
    return Trainer(model, **{"loss": "cross_entropy", "optimizer": 0.0, **settings})


SCORES = X @ TRUE.astype(np.float32)
F1 = f1_macro(Y, SCORES.argmax(axis=1))


class KerasLike:
    """The macro-F1 by Keras's protocol; it cannot be averaged over batches, or called."""

    def __init__(self, name: str = "keras_f1") -> None:
        self.name = name
        self.table = np.zeros((CLASSES, CLASSES))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        weights = np.ones(len(y_true)) if sample_weight is None else sample_weight
        np.add.at(self.table, (y_true, y_pred.argmax(axis=-1)), weights)

    def result(self) -> Any:
        hits = np.diag(self.table)
        return (2 * hits / (self.table.sum(axis=0) + self.table.sum(axis=1))).mean()

    def reset_state(self) -> None:
        self.table = np.zeros((CLASSES, CLASSES))

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        self.update_state(y_true, y_pred, sample_weight)
        return self.result()


class TorchLike:
    """The same by torchmetrics's protocol: predictions first, and all rows in lists."""

    higher_is_better = True

    def __init__(self) -> None:
        self.reset()

    def update(self, preds: Any, target: Any) -> None:
        self.preds.append(preds.argmax(axis=1))
        self.target.append(target)

    def compute(self) -> Any:
        return np.array(f1_macro(np.concatenate(self.target), np.concatenate(self.preds)))

    def reset(self) -> None:
        self.preds: list[Any] = []
        self.target: list[Any] = []

    __call__ = update


OBJECTS: list[Any] = [KerasLike, TorchLike]
every_object = pytest.mark.parametrize("kind", OBJECTS)


# ---------------------------------------------------------------------- objects of other libraries


@every_object
def test_the_figure_of_an_object_is_that_of_all_rows(kind: Any) -> None:
    given = kind()
    trainer = network(metrics=[given])
    (metric,) = trainer.metrics
    assert (metric.name, metric.mode) == (
        ("keras_f1", "max") if kind is KerasLike else ("torch_like", "max")
    )
    history = trainer.fit(
        X, Y, batch_size=16, epochs=2, validation_data=(X[:40], Y[:40]), verbose=0
    ).history
    assert history[metric.name] == [pytest.approx(F1)] * 2
    part = f1_macro(Y[:40], SCORES[:40].argmax(axis=1))
    assert history[f"val_{metric.name}"] == [pytest.approx(part)] * 2
    assert trainer.evaluate(X, Y, batch_size=7)[metric.name] == pytest.approx(F1)
    assert trainer.train_on_batch(X[:40], Y[:40])[metric.name] == pytest.approx(part)
    assert vars(given).keys() == vars(kind()).keys()
    assert np.array_equal(*(np.sum(o.table if kind is KerasLike else 0) for o in (given, kind())))


def test_sample_weights_go_where_they_are_taken() -> None:
    trainer = network(metrics=[KerasLike(), ExternalMetric(KerasLike(), weighted=True)])
    figures = trainer.evaluate(X, Y, sample_weight=W, batch_size=16)
    guess = SCORES.argmax(axis=1)
    assert figures["keras_f1"] == pytest.approx(F1)
    assert figures["weighted_keras_f1"] == pytest.approx(f1_macro(Y, guess, sample_weight=W))
    with pytest.raises(SettingError, match=r"TorchLike.update takes \(preds, target\)"):
        ExternalMetric(TorchLike(), weighted=True)


@every_object
def test_each_output_has_its_own_object(kind: Any) -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]> net (float[N, 5] x) =>
        (float[N, {CLASSES}] a, float[N, {CLASSES}] b)
        {{ a = MatMul(x, w)  b = Neg(a) }}"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(TRUE.astype(np.float32), "w"))
    names = dict.fromkeys("ab", "cross_entropy")
    trainer = Trainer(model, loss=names, optimizer=0.0, metrics={"a": [kind()], "b": [kind()]})
    own = trainer.metrics[0].metric.name
    figures = trainer.evaluate(X, {"a": Y, "b": Y}, batch_size=16)
    for output, sign in (("a", 1), ("b", -1)):
        expected = f1_macro(Y, (sign * SCORES).argmax(axis=1))
        assert figures[f"{output}_{own}"] == pytest.approx(expected)


@every_object
def test_an_epoch_goes_on_from_a_checkpoint_within_it(kind: Any, tmp_path: Path) -> None:
    trainer = network(metrics=[kind()])
    save = ModelCheckpoint(tmp_path / "{step}.ckpt", save_freq=2)
    history = trainer.fit(X, Y, batch_size=16, verbose=0, callbacks=save).history
    name = trainer.metrics[0].name
    with pytest.raises(CheckpointError, match="metrics"):
        Trainer.load(tmp_path / "2.ckpt")
    resumed = Trainer.load(tmp_path / "2.ckpt", metrics=[kind()])
    assert resumed.fit(X, Y, batch_size=16, verbose=0).history[name] == history[name]


def test_a_state_that_a_checkpoint_cannot_hold_is_reported(tmp_path: Path) -> None:
    class Opaque(KerasLike):
        def __init__(self) -> None:
            super().__init__()
            self.helper = object()

    trainer = network(metrics=[Opaque()])
    save = ModelCheckpoint(tmp_path / "{step}.ckpt", save_freq=2)
    trainer.fit(X, Y, batch_size=16, verbose=0, callbacks=save, shuffle=False)
    resumed = Trainer.load(tmp_path / "2.ckpt", metrics=[Opaque()])
    with pytest.warns(UserWarning, match="'keras_f1'.* will cover only the batches after"):
        history = resumed.fit(X, Y, batch_size=16, verbose=0, shuffle=False).history
    assert history["keras_f1"] == [pytest.approx(f1_macro(Y[32:], SCORES[32:].argmax(axis=1)))]


@every_object
def test_labels_that_the_loss_ignores_do_not_reach_an_object(kind: Any) -> None:
    loss = losses.CrossEntropy(ignore_index=2)
    trainer = network(loss=loss, metrics=[kind()])
    name = trainer.metrics[0].name
    guess = SCORES.argmax(axis=1)
    table = np.zeros((CLASSES, CLASSES))
    np.add.at(table, (Y[Y != 2], guess[Y != 2]), 1)
    hits = np.diag(table)
    f1 = (2 * hits / (table.sum(axis=0) + table.sum(axis=1))).mean()
    assert trainer.evaluate(X, Y, batch_size=16)[name] == pytest.approx(f1)


class AxisAware:
    """Returns the share of outputs whose highest score along the last axis is right."""

    def reset_state(self) -> None:
        self.right = self.total = 0

    def update_state(self, y_true: Any, y_pred: Any) -> None:
        right = y_pred.argmax(axis=-1) == y_true
        self.right += int(right.sum())
        self.total += right.size

    def result(self) -> float:
        return self.right / self.total


def test_an_object_of_keras_has_the_classes_last() -> None:
    pixels = rng.standard_normal((3, CLASSES, 2, 2)).astype(np.float32)
    labels = rng.integers(0, CLASSES, (3, 2, 2))
    metric = get_metric(AxisAware())
    metric.update(labels, pixels)
    assert metric.result() == (pixels.argmax(axis=1) == labels).mean()


class Bare:
    def update_state(self, y_true: Any, y_pred: Any) -> None: ...

    def result(self) -> Any:
        return 0.0


class Several(TorchLike):
    def compute(self) -> Any:
        return np.zeros(3)


class Named(TorchLike):
    def compute(self) -> Any:
        return {"f1": 1.0, "recall": 2.0}


class OfValues(TorchLike):
    def update(self, value: Any, weight: Any = None) -> None: ...  # type: ignore[override]


class OfPairs(TorchLike):
    def update(self, output: Any) -> None: ...  # type: ignore[override]


class Failing(TorchLike):
    def update(self, preds: Any, target: Any) -> None:
        raise RuntimeError("only two classes")


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (Bare(), r"Bare lacks reset_state. Expected Keras's methods update_state, result, reset"),
        (KerasLike, r"got the class KerasLike. Create an object: KerasLike\(...\)"),
        (OfValues(), r"OfValues.update does not take labels .* are \(value, weight\)"),
        (OfPairs(), r"OfPairs.update does not take labels .* are \(output\)"),
        (lambda estimator, x, y: 0.0, r"must take the two arguments \(y_true, y_pred\)"),
        (3, "a metric object of Keras or torchmetrics, or a function"),
        (Several(), r"'several' returned array\(\[0., 0., 0.\]\), not one number. Let it"),
        (Named(), r"'named' returned \{'f1': .*Pass a metric for each of f1, recall"),
        (Failing(), r"Failing cannot use labels int64\[90\] and .* float32\[90, 4\]: only two cl"),
    ],
)
def test_what_cannot_be_used_is_refused_before_an_update(metric: Any, message: str) -> None:
    with pytest.raises((SettingError, DataError), match=message):
        network(metrics=[metric], optimizer=0.1).train_on_batch(X, Y)


def test_an_object_that_cannot_be_merged_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"'keras_f1' cannot be merged .* EpochMetric"):
        get_metric(KerasLike()).merge([])


def dim_zero_sum() -> None: ...


def dim_zero_cat() -> None: ...


class Reduced(TorchLike):
    """A metric whose states have the reductions of torchmetrics."""

    def __init__(self) -> None:
        super().__init__()
        self.count = np.zeros(())

    _reductions = {"preds": dim_zero_cat, "target": dim_zero_cat, "count": dim_zero_sum}

    @property
    def metric_state(self) -> dict[str, Any]:
        return {"preds": self.preds, "target": self.target, "count": self.count}

    def update(self, preds: Any, target: Any) -> None:
        super().update(preds, target)
        self.count = self.count + len(target)


def test_declared_reductions_merge_the_ranks() -> None:
    states = []
    for rows in (slice(0, 30), slice(30, 30), slice(30, 90)):
        metric = get_metric(Reduced())
        metric.update(Y[rows], SCORES[rows])
        states.append(exchanged(metric.state_dict()))
    whole = get_metric(Reduced())
    whole.merge(states)
    assert whole.result() == pytest.approx(F1)
    assert whole.external.count == ROWS  # type: ignore[attr-defined]


# ---------------------------------------------------------------------- functions of a batch


def warned(metric: Any, batches: int) -> list[str]:
    trainer = network(metrics=[metric])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        size = -(-ROWS // batches)
        trainer.fit(X, Y, batch_size=size, epochs=2, validation_data=(X, Y), verbose=0)
        trainer.evaluate(X, Y, batch_size=size)
    return [str(warning.message) for warning in caught]


def test_a_number_of_a_batch_that_is_no_mean_over_rows_warns_once() -> None:
    (message,) = warned(batch_f1, 4)
    assert "'batch_f1' returns one number for a batch, and is no mean over rows" in message
    assert "onnxfit.metrics.EpochMetric" in message
    assert warned(batch_f1, 1) == []


@pytest.mark.parametrize(
    "function",
    [
        lambda y, p: (p.argmax(axis=1) == y).mean(),
        lambda y, p: float(np.float32((p**2).mean(dtype=np.float32))),
        lambda y, p: p.argmax(axis=1) == y,
        lambda y, p: np.abs(p).mean(axis=1),
        lambda y, p: 1.0,
    ],
)
def test_a_mean_over_rows_does_not_warn(function: Any) -> None:
    assert warned(function, 4) == []


# ---------------------------------------------------------------------- functions of all rows


def softmax(scores: np.ndarray) -> np.ndarray:
    odds = np.exp(scores.astype(np.float64))
    return odds / odds.sum(axis=1, keepdims=True)


def auc(y_true: np.ndarray, y_pred: np.ndarray) -> float:
    return float(roc_auc_score(y_true, y_pred, multi_class="ovr"))


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        (EpochMetric(f1_macro), F1),
        (EpochMetric(auc, predictions="probabilities"), auc(Y, softmax(SCORES))),
        (EpochMetric(log_loss, predictions="probabilities"), log_loss(Y, softmax(SCORES))),
        (EpochMetric(lambda y, p: p.sum(), predictions="outputs"), SCORES.sum()),
        (
            EpochMetric(f1_macro, weighted=True),
            f1_macro(Y, SCORES.argmax(axis=1), sample_weight=W),
        ),
    ],
)
@pytest.mark.parametrize("batch_size", [16, ROWS])
def test_scikit_learn_gives_the_figure_of_all_rows(
    metric: EpochMetric, expected: float, batch_size: int
) -> None:
    trainer = network(metrics=[metric])
    figures = trainer.evaluate(X, Y, sample_weight=W, batch_size=batch_size)
    assert figures[metric.name] == pytest.approx(expected, rel=1e-5)
    assert metric.name == ("weighted_" if metric.weighted else "") + (
        "function" if metric.function.__name__ == "<lambda>" else metric.function.__name__
    )


@pytest.mark.parametrize(
    ("end", "loss", "width"),
    [("Identity", "bce", 1), ("Sigmoid", "bce", 1), ("Identity", "bce", 3)],
)
def test_binary_outputs_have_the_forms_of_scikit_learn(end: str, loss: str, width: int) -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        net (float[N, 5] x) => (float[N, {width}] y) {{ z = MatMul(x, w)  y = {end}(z) }}"""
    )
    weight = TRUE[:, :width].astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    labels = (X @ weight + rng.standard_normal((ROWS, width)) > 0).astype(np.float32)
    chosen = [
        EpochMetric(f1_score if width == 1 else f1_macro, name="f1"),
        EpochMetric(average_precision_score, predictions="probabilities", name="ap"),
        EpochMetric(lambda y, p: p.mean(), predictions="probabilities", name="mean"),
    ]
    figures = Trainer(model, loss=loss, metrics=chosen).evaluate(X, labels, batch_size=16)
    scores = X @ weight
    logits = end == "Identity" and loss == "bce"
    del logits  # the loss decides by the graph: both ends give the same probabilities
    own = labels[:, 0] if width == 1 else labels
    guess = (scores > 0)[:, 0] if width == 1 else scores > 0
    f1 = f1_score(own, guess) if width == 1 else f1_macro(own, guess)
    assert figures["f1"] == pytest.approx(f1)
    assert figures["ap"] == pytest.approx(average_precision_score(own, scores.squeeze()))
    assert figures["mean"] == pytest.approx((1 / (1 + np.exp(-scores))).mean(), rel=1e-5)


def test_two_classes_have_the_probability_of_the_second() -> None:
    metric = EpochMetric(roc_auc_score, "probabilities", task="classes", from_logits=True)
    y_true, y_pred = Y % 2, SCORES[:, :2]
    metric.update(y_true, y_pred)
    difference = (y_pred[:, 1] - y_pred[:, 0]).astype(np.float64)
    assert metric.result() == pytest.approx(roc_auc_score(y_true, difference))


def test_log_probabilities_are_known_as_such() -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]> net (float[N, 5] x) => (float[N, {CLASSES}] y)
        {{ z = MatMul(x, w)  y = LogSoftmax(z) }}"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(TRUE.astype(np.float32), "w"))
    chosen = [EpochMetric(log_loss, "probabilities"), "perplexity"]
    figures = Trainer(model, loss="nll", metrics=chosen).evaluate(X, Y, batch_size=16)
    expected = log_loss(Y, softmax(SCORES))
    assert figures["log_loss"] == pytest.approx(expected, rel=1e-5)
    assert figures["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)


def test_a_regression_passes_its_outputs() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> net (float[N, 5] x) => (float[N, 1] y)
        { y = MatMul(x, w) }"""
    )
    model.graph.initializer.append(
        onnx.numpy_helper.from_array(TRUE[:, :1].astype(np.float32), "w")
    )
    labels = X[:, :1] + 1
    trainer = Trainer(model, loss="mse", metrics=[EpochMetric(r2_score)])
    figures = trainer.evaluate(X, labels, batch_size=16)
    assert figures["r2_score"] == pytest.approx(r2_score(labels, SCORES[:, :1]), rel=1e-5)


def test_ignored_labels_do_not_count() -> None:
    loss = losses.CrossEntropy(ignore_index=2)
    trainer = network(loss=loss, metrics=[EpochMetric(f1_macro)])
    counted = Y != 2
    expected = f1_macro(Y[counted], SCORES[counted].argmax(axis=1))
    assert trainer.evaluate(X, Y, batch_size=16)["f1_macro"] == pytest.approx(expected)


class Record(Callback):
    def __init__(self) -> None:
        self.names: set[str] = set()

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self.names |= set(logs)


def test_the_function_is_called_once_an_epoch(tmp_path: Path) -> None:
    calls = []

    def counted(y_true: np.ndarray, y_pred: np.ndarray) -> float:
        calls.append(len(y_true))
        return f1_macro(y_true, y_pred)

    record = Record()
    trainer = network(metrics=[EpochMetric(counted)])
    callbacks = [record, EarlyStopping("val_counted", patience=9), CSVLogger(tmp_path / "a.csv")]
    history = trainer.fit(
        X, Y, batch_size=16, epochs=2, validation_split=0.5, verbose=2, callbacks=callbacks
    ).history
    assert calls == [45, 45] * 2
    assert "counted" not in record.names
    assert list(history) == ["loss", "counted", "val_loss", "val_counted", "learning_rate"]
    with pytest.raises(SettingError, match="monitors 'counted', which this fit never computes"):
        trainer.fit(
            X, Y, verbose=0, callbacks=ModelCheckpoint("a", monitor="counted", save_freq=1,
                                                       save_best_only=True)
        )  # fmt: skip


def test_an_epoch_metric_goes_on_from_a_checkpoint_and_merges(tmp_path: Path) -> None:
    trainer = network(metrics=[EpochMetric(f1_macro)])
    save = LambdaCallback(
        on_train_batch_end=lambda batch, logs: batch == 1 and trainer.save(tmp_path / "a.ckpt")
    )
    trainer.fit(X, Y, batch_size=16, verbose=0, callbacks=save)
    resumed = Trainer.load(tmp_path / "a.ckpt", metrics=[EpochMetric(f1_macro)])
    assert resumed.fit(X, Y, batch_size=16, verbose=0).history["f1_macro"] == [pytest.approx(F1)]
    states = []
    for rows in (slice(0, 30), slice(30, 30), slice(30, 90)):
        metric = EpochMetric(f1_macro)
        metric.update(Y[rows], SCORES[rows])
        states.append(exchanged(metric.state_dict()))
    whole = EpochMetric(f1_macro)
    assert math.isnan(whole.result())
    whole.merge(states)
    assert whole.result() == pytest.approx(F1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EpochMetric("f1"), r"needs a function \(y_true, y_pred\) -> number, got 'f1'"),
        (lambda: EpochMetric(f1_macro, "labels"), "predictions to be one of 'classes', 'prob"),
        (lambda: EpochMetric(f1_macro, task="words"), "task to be one of 'classes', 'binary',"),
    ],
)
def test_settings_that_will_not_do(make: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        make()


def test_a_function_that_returns_no_number_is_named() -> None:
    metric = metrics.EpochMetric(lambda y, p: [1, 2], name="pair")
    metric.update(Y, SCORES)
    with pytest.raises(DataError, match=r"'pair' returned \[1, 2\], not one number"):
        metric.result()
