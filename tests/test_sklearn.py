"""Estimators: scikit-learn's own checks and its own solutions, and what it does with estimators:
copies, pickles, searches, pipelines.
"""

import importlib
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import onnxruntime
import pytest

pytest.importorskip("sklearn", minversion="1.6")

import scipy.sparse
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.datasets import load_diabetes, load_digits, load_iris, load_wine
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge
from sklearn.metrics import accuracy_score, log_loss, mean_squared_error
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from onnxfit import LoRA, callbacks, optimizers, schedules
from onnxfit.callbacks import Callback
from onnxfit.errors import ArgumentError, InstallationError, SettingError
from onnxfit.losses import BinaryCrossEntropy, CrossEntropy
from onnxfit.optimizers import SGD, Adam
from onnxfit.sklearn import OnnxClassifier, OnnxRegressor
from onnxfit.sklearn.columns import relative_weights, standardization
from onnxfit.sklearn.estimator import still_falls
from onnxfit.sklearn.names import ANSWERS
from tests.constants import batch_for, structure, with_constants
from tests.models import mlp

Array = npt.NDArray[Any]
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(120, 4))
Y = X @ np.array([1.0, -2.0, 0.5, 0.0]) + 3 + 0.1 * RANDOM.normal(size=120)
CLASSES = np.digitize(X[:, 0] + 0.5 * X[:, 1] + 0.3 * RANDOM.normal(size=120), [-0.5, 0.5])
LINEAR: dict[str, Any] = {"hidden_layer_sizes": (), "standardize": False}
EXACT: dict[str, Any] = {
    **LINEAR,
    "optimizer": SGD(0.1, momentum=0.9),
    "epochs": 400,
    "batch_size": 120,
}

# Most fits here are short.
pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


def _name(case: Any) -> str:
    """The class of an estimator or the function of a check."""
    case = getattr(case, "func", case)
    return getattr(case, "__name__", type(case).__name__)


_names, _cases = parametrize_with_checks([OnnxRegressor(), OnnxClassifier()]).args
SCIKIT_LEARNS_CHECKS = pytest.mark.parametrize(_names, list(_cases), ids=_name)


# The array API, and pandas in some environments, are not installed: scikit-learn warns that it skips
# two
@pytest.mark.filterwarnings("default")
@SCIKIT_LEARNS_CHECKS
def test_scikit_learns_own_checks(estimator: Any, check: Any) -> None:
    check(estimator)


def run(model: onnx.ModelProto, x: Array) -> Any:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, {model.graph.input[0].name: x})[0]


def weights_of(estimator: Any) -> list[Array]:
    return list(estimator.trainer_.get_weights().values())


# ---------------------------------------------------------------------- scikit-learn's solutions


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("targets", [1, 3])
@pytest.mark.parametrize("alpha", [0.0, 5.0])
def test_regression_is_the_closed_form(alpha: float, targets: int, weighted: bool) -> None:
    y = Y if targets == 1 else np.stack([Y, -Y, X[:, 2]], axis=1)
    weight = RANDOM.uniform(0, 3, size=120) if weighted else None
    total = 120 if weight is None else weight.sum()
    ridge = (Ridge(alpha) if alpha else LinearRegression()).fit(X, y, sample_weight=weight)
    # ours is the mean over rows and targets, theirs the sum
    penalty = {"coefficients_0": alpha / total / targets} if alpha else None
    model = OnnxRegressor(
        penalty=penalty, **{**EXACT, "optimizer": SGD(0.1 * targets, momentum=0.9)}
    ).fit(X, y, sample_weight=weight)
    coefficients, intercepts = weights_of(model)
    np.testing.assert_allclose(coefficients.T.squeeze(), ridge.coef_, atol=1e-6)
    np.testing.assert_allclose(intercepts.squeeze(), ridge.intercept_, atol=1e-6)
    assert model.predict(X).shape == y.shape
    assert model.score(X, y) == pytest.approx(ridge.score(X, y), abs=1e-6)


@pytest.mark.parametrize("classes", [2, 3])
def test_classification_is_logistic_regression(classes: int) -> None:
    labels = np.array(["a", "b", "c"])[np.minimum(CLASSES, classes - 1)]
    theirs = LogisticRegression(C=0.5, tol=1e-8).fit(X, labels)
    model = OnnxClassifier(
        penalty={"coefficients_0": 1 / (2 * 0.5 * 120)},
        **{**EXACT, "optimizer": SGD(0.3, momentum=0.9)},
    )
    model.fit(X, labels)
    coefficients, intercepts = weights_of(model)
    np.testing.assert_allclose(coefficients.T, theirs.coef_, atol=1e-3)
    np.testing.assert_allclose(
        intercepts - intercepts.mean() * (classes > 2), theirs.intercept_, atol=1e-3
    )
    np.testing.assert_allclose(model.predict_proba(X), theirs.predict_proba(X), atol=1e-3)
    assert model.classes_.tolist() == theirs.classes_.tolist()
    assert model.score(X, labels) == theirs.score(X, labels)


def test_layers_learn_as_well_as_scikit_learns() -> None:
    images, digits = load_digits(return_X_y=True)
    train, test, y, expected = train_test_split(images / 16, digits, random_state=0)
    theirs = MLPClassifier(
        (64, 32), max_iter=40, random_state=0, learning_rate_init=0.003, tol=0
    ).set_params(n_iter_no_change=40)
    with pytest.warns(UserWarning, match="Maximum iterations"):
        theirs.fit(train, y)
    ours = OnnxClassifier(
        hidden_layer_sizes=(64, 32), learning_rate=0.003, epochs=40, random_state=0
    ).fit(train.astype(np.float32), y)
    assert ours.score(test.astype(np.float32), expected) > theirs.score(test, expected) - 0.015
    assert ours.trainer_.get_weights()["coefficients_2"].dtype == np.float32
    assert [node.op_type for node in ours.get_trained_onnx().graph.node].count("Relu") == 2


def test_a_search_finds_the_best_settings() -> None:
    irises, kinds = load_iris(return_X_y=True)
    grid = {"learning_rate": [1e-5, 0.05], "penalty": [None, 10.0]}
    search = GridSearchCV(
        OnnxClassifier(epochs=60, random_state=0, threads=1), grid, cv=3, n_jobs=2
    ).fit(irises, kinds)
    assert search.best_params_ == {"learning_rate": 0.05, "penalty": None}
    assert search.best_score_ > 0.9


def test_a_pipeline_trains_and_names_its_features() -> None:
    pipeline = make_pipeline(
        StandardScaler(),
        OnnxRegressor(epochs=300, learning_rate=0.03, random_state=0, penalty=1e-3),
    )
    pipeline.fit(10 * X + 5, Y)
    assert pipeline.score(10 * X + 5, Y) > 0.95
    assert pipeline[-1].n_features_in_ == 4
    assert clone(pipeline)[-1].get_params()["penalty"] == 1e-3


# ---------------------------------------------------------------------- state


@pytest.mark.parametrize("kind", [OnnxRegressor, OnnxClassifier])
def test_a_pickle_predicts_goes_on_and_holds_no_session(kind: Any) -> None:
    y = Y if kind is OnnxRegressor else CLASSES
    model = kind(
        hidden_layer_sizes=5,
        epochs=3,
        batch_size=16,
        warm_start=True,
        random_state=0,
        callbacks=[Callback()],
    ).fit(X, y)
    data = pickle.dumps(model)
    assert b"onnxruntime." not in data  # no class of its modules
    loaded = pickle.loads(data)
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))
    assert loaded.trainer_.history.history == model.trainer_.history.history
    for one in (model, loaded):
        one.fit(X, y)
    for before, after in zip(weights_of(model), weights_of(loaded), strict=True):
        np.testing.assert_array_equal(before, after)
    assert loaded.loss_curve_ == model.loss_curve_
    assert loaded.n_iter_ == len(loaded.train_losses_) == 6


@pytest.mark.parametrize("optimizer", [Adam(0.01), SGD(0.05, momentum=0.9)])
def test_a_warm_start_goes_on_where_the_fit_stopped(optimizer: Any) -> None:
    settings: dict[str, Any] = {"optimizer": optimizer, "batch_size": 16, "random_state": 3}
    twice = OnnxRegressor(epochs=4, warm_start=True, **settings).fit(X, Y).fit(X, Y)
    once = OnnxRegressor(epochs=8, **settings).fit(X, Y)
    by_parts = OnnxRegressor(**settings)
    for _ in range(8):
        by_parts.partial_fit(X, Y)
    for other in (twice, by_parts):
        assert other.loss_curve_ == once.loss_curve_
        np.testing.assert_array_equal(other.predict(X), once.predict(X))
    # a cold start forgets
    np.testing.assert_array_equal(once.fit(X, Y).predict(X), by_parts.predict(X))


def test_a_warm_start_with_another_learning_rate_keeps_the_slots() -> None:
    model = OnnxRegressor(epochs=2, warm_start=True, random_state=0, learning_rate=0.1).fit(X, Y)
    model.set_params(learning_rate=0.05).fit(X, Y)
    scheduled = OnnxRegressor(
        epochs=4, random_state=0, learning_rate=lambda step: 0.1 if step < 2 else 0.05
    ).fit(X, Y)
    np.testing.assert_array_equal(model.predict(X), scheduled.predict(X))


ADAPTERS = [LoRA(rank=2), [LoRA(rank=2, init="pissa")]]


def fit_adapters(adapters: Any = ADAPTERS[0], **settings: Any) -> Any:
    settings = {"hidden_layer_sizes": (8, 8), "epochs": 2, "random_state": 0, **settings}
    return OnnxRegressor(warm_start=True, adapters=adapters, **settings).fit(X, Y)


@pytest.mark.parametrize("adapters", ADAPTERS, ids=["kaiming", "pissa"])
def test_adapters_train_and_the_export_predicts_as_the_estimator(adapters: Any) -> None:
    model = clone(fit_adapters(adapters)).fit(X, Y)
    assert model.get_params()["adapters"] == adapters
    assert all("lora_" in name for name in model.trainer_.get_weights())
    session = onnxruntime.InferenceSession(
        model.export().SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (found,) = session.run(None, {session.get_inputs()[0].name: X})
    np.testing.assert_allclose(found[:, 0], model.predict(X), rtol=1e-9)


@pytest.mark.parametrize("adapters", ADAPTERS, ids=["kaiming", "pissa"])
def test_a_pickle_of_adapters_goes_on(adapters: Any) -> None:
    model = fit_adapters(adapters)
    loaded = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))
    np.testing.assert_array_equal(loaded.fit(X, Y).predict(X), model.fit(X, Y).predict(X))


@pytest.mark.parametrize("adapters", ADAPTERS, ids=["kaiming", "pissa"])
def test_a_warm_start_with_another_rate_keeps_the_adapters(adapters: Any) -> None:
    model = fit_adapters(adapters, weights="intercepts_2", learning_rate=0.1)
    model.set_params(learning_rate=0.05).fit(X, Y)
    settings = {"weights": "intercepts_2", "epochs": 4}
    scheduled = fit_adapters(
        adapters, learning_rate=lambda step: 0.1 if step < 2 else 0.05, **settings
    )
    np.testing.assert_array_equal(model.predict(X), scheduled.predict(X))


@pytest.mark.parametrize("later", [None, LoRA(rank=2, alpha=3), LoRA(rank=1)])
def test_a_warm_start_with_other_adapters_begins_at_the_merged_weights(later: Any) -> None:
    model = fit_adapters()
    before = model.predict(X)
    model.set_params(adapters=later, learning_rate=0.0).fit(X, Y)
    np.testing.assert_allclose(model.predict(X), before, rtol=1e-9)
    assert model.n_iter_ == 4


def test_a_warm_start_takes_changed_settings() -> None:
    model = OnnxRegressor(epochs=2, warm_start=True, random_state=0, learning_rate=0.1).fit(X, Y)
    before = weights_of(model)
    model.set_params(learning_rate=0.0, loss="mean_absolute_error").fit(X, Y)
    for old, new in zip(before, weights_of(model), strict=True):
        np.testing.assert_array_equal(old, new)
    assert model.n_iter_ == 4
    assert model.loss_curve_[-1] == pytest.approx(np.abs(model.predict(X) - Y).mean())
    model.set_params(optimizer="sgd", learning_rate=0.01).fit(X, Y)
    assert model.n_iter_ == 6


def test_early_stopping_keeps_the_best_epoch() -> None:
    model = OnnxClassifier(
        hidden_layer_sizes=(30,), learning_rate=0.05, epochs=500, early_stopping=True, n_iter_no_change=5, validation_fraction=0.3, random_state=0
    ).fit(X, CLASSES)  # fmt: skip
    losses = model.trainer_.history.history["val_loss"]
    assert model.n_iter_ == len(losses) == int(np.argmin(losses)) + 6 < 500
    _, held_out, _, y = train_test_split(
        X, CLASSES, test_size=0.3, random_state=model.trainer_.seed, stratify=CLASSES
    )
    probabilities = model.predict_proba(held_out)[np.arange(len(y)), y]
    assert -np.log(probabilities).mean() == pytest.approx(min(losses))


def test_random_states_decide() -> None:
    fits = [
        OnnxRegressor(hidden_layer_sizes=(3,), epochs=2, random_state=state).fit(X, Y).predict(X)
        for state in (0, 0, 1)
    ]
    np.testing.assert_array_equal(fits[0], fits[1])
    assert (fits[0] != fits[2]).any()


# ---------------------------------------------------------------------- models of one's own

LINE = """<ir_version: 8, opset_import: ["": 17]> g (float[N, 4] x) => (float[N, {width}] y)
    <float[4, {width}] w = {{{zeros}}}, float[{width}] b = {{{biases}}}> {{ p = MatMul(x, w)  {last} }}"""
ENDS = {
    "scores": "y = Add(p, b)",
    "Sigmoid": "s = Add(p, b) y = Sigmoid(s)",
    "Softmax": "s = Add(p, b) y = Softmax<axis=1>(s)",
}


def line(width: int, end: str = "scores") -> onnx.ModelProto:
    zeros, biases = ", ".join(["0"] * 4 * width), ", ".join(["0"] * width)
    return onnx.parser.parse_model(
        LINE.format(width=width, zeros=zeros, biases=biases, last=ENDS[end])
    )


LABELS = {
    "integers": np.array([-5, 40]), "strings": np.array(["yes", "no"]), "objects": np.array(["b", "a"], object), "booleans": np.array([True, False]),
    "floats": np.array([2.0, -1.0]),
}  # fmt: skip


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("width", [1, 2])
def test_labels_are_of_any_type(width: int, labels: str) -> None:
    y = LABELS[labels][(X[:, 0] > 0).astype(int)]
    model = OnnxClassifier(line(width), learning_rate=0.05, epochs=60, random_state=0).fit(X, y)
    predicted = model.predict(X)
    assert predicted.dtype == y.dtype
    assert accuracy_score(y, predicted) == model.score(X, y) > 0.93


@pytest.mark.parametrize(
    ("width", "end", "loss"),
    [
        (1, "scores", None), (1, "scores", "binary_cross_entropy"), (1, "scores", BinaryCrossEntropy(from_logits=True)), (1, "Sigmoid", None),
        (1, "Sigmoid", "cross_entropy"), (1, "scores", CrossEntropy()), (1, "scores", "hinge"), (1, "Sigmoid", "mean_squared_error"),
        (2, "scores", None), (2, "scores", "cross_entropy"), (2, "scores", "binary_cross_entropy"), (2, "Softmax", None),
        (2, "Softmax", CrossEntropy(from_logits=False)), (2, "Softmax", "mean_squared_error"), (2, "Sigmoid", "binary_cross_entropy"),
        (2, "scores", "focal"), (1, "scores", "focal"), (2, "Softmax", lambda op, y, p: op.Abs(y - p)),
    ],
)  # fmt: skip
def test_two_classes_in_one_column_or_two(width: int, end: str, loss: Any) -> None:
    y = LABELS["strings"][(X[:, 0] > 0).astype(int)]
    model = OnnxClassifier(
        line(width, end), loss=loss, learning_rate=0.05, epochs=60, random_state=0
    ).fit(X, y)
    probabilities = model.predict_proba(X)
    assert probabilities.shape == (120, 2)
    assert probabilities.min() >= 0
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)
    assert model.score(X, y) > 0.93
    raw = run(model.get_trained_onnx(), X.astype(np.float32))
    # whatever stands for the second class rises with its probability
    assert (
        np.corrcoef(raw[:, -1] - (raw[:, 0] if width == 2 else 0), probabilities[:, 1])[0, 1] > 0.8
    )


def test_the_export_gives_what_was_predicted(tmp_path: Path) -> None:
    model = OnnxRegressor(line(1), epochs=20, random_state=0).fit(X, Y)
    assert (
        model.export(tmp_path / "trained.onnx")
        == model.get_trained_onnx()
        == onnx.load(tmp_path / "trained.onnx")
    )
    np.testing.assert_array_equal(
        run(model.get_trained_onnx(), X.astype(np.float32))[:, 0], model.predict(X)
    )
    assert model.predict(X).dtype == np.float32


def test_the_model_and_all_settings_stay_as_they_were_given(tmp_path: Path) -> None:
    given = line(1)
    before = given.SerializeToString()
    onnx.save(given, tmp_path / "line.onnx")
    settings = {
        "optimizer": SGD(0.1),
        "penalty": {"w": 0.1},
        "weights": ["w"],
        "epochs": 2,
        "random_state": 0,
    }
    models: list[Any] = [given, before, str(tmp_path / "line.onnx"), tmp_path / "line.onnx"]
    found = []
    for source in models:
        model = OnnxRegressor(source, **settings).fit(X, Y)
        assert model.model is source
        assert all(model.get_params()[name] is value for name, value in settings.items())
        found.append(clone(model).fit(X, Y).predict(X))
    assert given.SerializeToString() == before
    for array in found[1:]:
        np.testing.assert_array_equal(array, found[0])
    assert list(model.trainer_.get_weights()) == ["w"]


def test_classes_may_come_in_parts() -> None:
    model = OnnxClassifier(random_state=0, learning_rate=0.1)
    model.partial_fit(X[CLASSES < 2], CLASSES[CLASSES < 2], classes=[0, 1, 2])
    for _ in range(40):
        model.partial_fit(X, CLASSES)
    assert model.score(X, CLASSES) > 0.75
    with pytest.raises(SettingError, match=r"unknown class np.int64\(7\).* classes 0, 1, 2"):
        model.partial_fit(X[:2], [0, 7])


def test_callbacks_hear_of_every_epoch() -> None:
    heard: list[int] = []

    class Listener(Callback):
        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            heard.append(epoch)

    OnnxRegressor(epochs=3, callbacks=[Listener()]).fit(X, Y)
    assert heard == [0, 1, 2]


TWO_OUTPUTS = """<ir_version: 8, opset_import: ["": 17]> g (float[N, 4] x) => (float[N, 1] y, float[N, 4] h)
    <float[4, 4] a = {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1}, float[4, 1] b = {0, 0, 0, 0}> { h = MatMul(x, a)  y = MatMul(h, b) }"""


def test_several_outputs_need_a_choice() -> None:
    model = onnx.parser.parse_model(TWO_OUTPUTS)
    with pytest.raises(SettingError, match="the float outputs of the model are: y, h"):
        OnnxRegressor(model).fit(X, Y)
    fitted = OnnxRegressor(model, loss={"y": "mean_squared_error"}, epochs=30).fit(X, Y - 3)
    assert fitted.score(X, Y - 3) > 0.3


@pytest.mark.parametrize(
    ("estimator", "y", "message"),
    [
        (OnnxClassifier(line(2)), CLASSES, "2 columns, but y has 3 classes"),
        (OnnxClassifier(line(1)), CLASSES, "1 column, but y has 3 classes"),
        (OnnxClassifier(line(4)), CLASSES, "4 columns, but y has 3 classes"),
        (OnnxClassifier(), np.zeros(120), "at least 2 classes, got 1 class"),
        (OnnxRegressor(hidden_layer_sizes=(0,)), Y, "hidden_layer_sizes must all be >= 1"),
        (OnnxRegressor(line(1), loss={"z": "mse"}), Y, "a dict with exactly one output"),
    ],
)
def test_what_does_not_fit_is_refused(estimator: Any, y: Array, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        estimator.fit(X, y)


@pytest.mark.parametrize(
    ("weight", "message"),
    [(-1.0, "sample_weight must be >= 0, got -1"), (0.0, "0 for all rows|non-zero")],
)  # newer ones of scikit-learn say the second
def test_sample_weights_are_checked(weight: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OnnxRegressor().fit(X, Y, sample_weight=np.full(120, weight))


def test_two_inputs_are_refused() -> None:
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[N, 1] a, float[N, 1] b) => (float[N, 1] y)
        <float[1] w = {1}> { c = Add(a, b) y = Mul(c, w) }"""
    with pytest.raises(
        SettingError,
        match=r"one input, but the inputs of this model are a: float32\[N, 1\]; b: float32\[N, 1\]",
    ):
        OnnxRegressor(onnx.parser.parse_model(text)).fit(X, Y)


def test_without_scikit_learn_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "onnxfit.sklearn")
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    with pytest.raises(InstallationError, match=r"pip install 'onnxfit\[sklearn\]'"):
        importlib.import_module("onnxfit.sklearn")


# ---------------------------------------------------------------------- the default network


def constants(model: onnx.ModelProto) -> dict[str, Array]:
    return {
        node.output[0]: onnx.numpy_helper.to_array(node.attribute[0].t)
        for node in model.graph.node
        if node.op_type == "Constant"
    }


def test_the_default_predicts_raw_data() -> None:
    x, y = load_diabetes(return_X_y=True, scaled=False)
    train, test, y_train, y_test = train_test_split(x, y, random_state=1)
    model = OnnxRegressor(random_state=0).fit(train, y_train)
    linear = LinearRegression().fit(train, y_train)
    assert model.score(test, y_test) > linear.score(test, y_test) - 0.1 > 0.3
    assert model.loss_curve_[-1] < 0.6 * y_train.var() < model.loss_curve_[0]

    x, kinds = load_wine(return_X_y=True)
    train, test, y_train, y_test = train_test_split(x, kinds, random_state=0)
    assert OnnxClassifier(random_state=0).fit(train, y_train).score(test, y_test) > 0.95


@pytest.mark.parametrize("optimizer", [None, SGD(0.05, momentum=0.9)])
@pytest.mark.parametrize("loss", [None, "mean_absolute_error"])
def test_units_do_not_matter(loss: Any, optimizer: Any) -> None:
    settings: dict[str, Any] = {
        "loss": loss,
        "optimizer": optimizer,
        "epochs": 20,
        "batch_size": 40,
        "random_state": 0,
    }
    one = OnnxRegressor(**settings).fit(X, Y)
    other = OnnxRegressor(**settings).fit(1e4 * X + 700, 1e5 * Y - 3e6)
    predicted = (other.predict(1e4 * X + 700) + 3e6) / 1e5
    np.testing.assert_allclose(predicted, one.predict(X), atol=1e-5)
    power = 1 if loss else 2
    np.testing.assert_allclose(other.loss_curve_, 1e5**power * np.array(one.loss_curve_), rtol=1e-5)


def test_the_trained_default_takes_and_gives_the_original_units(tmp_path: Path) -> None:
    x, y = (50 * X + 9).astype(np.float32), np.stack([1e3 * Y, Y - 70], axis=1)
    model = OnnxRegressor(epochs=5, random_state=0).fit(x, y)
    exported = model.export(tmp_path / "network.onnx")
    np.testing.assert_array_equal(run(exported, x), model.predict(x))
    found = constants(exported)
    np.testing.assert_allclose(found["X_center"], x.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(found["X_scale"], x.std(axis=0), rtol=1e-5)
    np.testing.assert_allclose(found["y_center"], y.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(found["y_scale"], y.std(axis=0), rtol=1e-5)
    assert list(model.trainer_.get_weights()) == [
        "coefficients_0",
        "intercepts_0",
        "coefficients_1",
        "intercepts_1",
    ]
    # Later rows do not move the scales.
    model.partial_fit(100 * x, 100 * y)
    for name, array in constants(model.export()).items():
        np.testing.assert_array_equal(array, found[name])
    # As a model of the user, the file is not scaled a second time.
    again = OnnxRegressor(tmp_path / "network.onnx", learning_rate=0.0, epochs=1).fit(10 * x, y)
    np.testing.assert_array_equal(again.predict(x), run(exported, x))


def test_a_model_of_the_user_is_not_scaled() -> None:
    given = line(1)
    model = OnnxRegressor(given, learning_rate=0.0, epochs=1).fit(1000 * X, 1000 * Y)
    assert model.get_trained_onnx().graph.node == given.graph.node
    assert not any(weight.any() for weight in weights_of(model))
    assert model.loss_curve_ == [pytest.approx((1e6 * Y**2).mean())]
    assert model.trainer_.optimizer == Adam(0.0)
    assert OnnxRegressor(given, epochs=1).fit(X, Y).trainer_.optimizer == Adam(0.01)


def test_outputs_are_not_scaled_for_a_loss_of_another_kind() -> None:
    counts = np.rint(np.exp(0.3 * X[:, 0] + 4))
    for loss in ("poisson", lambda op, y, p: op.Abs(y - p)):
        model = OnnxRegressor(loss=loss, epochs=1).fit(X, counts)
        assert sorted(constants(model.export())) == ["X_center", "X_scale"]
    named = OnnxRegressor(loss={"predictions": "huber"}, epochs=1).fit(X, counts)
    assert "y_scale" in constants(named.export())
    plain = OnnxRegressor(standardize=False, epochs=1).fit(X, counts)
    assert constants(plain.export()) == {}


def test_constant_columns_and_single_rows_are_fitted() -> None:
    x = np.stack([np.full(120, 0.1), X[:, 0]], axis=1)
    model = OnnxRegressor(epochs=3, random_state=0).fit(x, np.full(120, 7.0))
    assert constants(model.export())["X_scale"][0] == constants(model.export())["y_scale"] == 1
    assert np.abs(model.predict(x) - 7).max() < 3
    one = OnnxRegressor(random_state=0).partial_fit([[1e300, 2.0]], [5.0])
    assert np.isfinite(one.predict([[1e300, 3.0]])).all()


def test_rows_without_weight_do_not_count_in_the_scales() -> None:
    weight = np.arange(120) % 3
    x = np.where(weight[:, None] > 0, X, 1e6)
    scaling = standardization(x, relative_weights(weight))
    repeated = X.repeat(weight, axis=0)
    np.testing.assert_allclose(scaling.center, repeated.mean(axis=0))
    np.testing.assert_allclose(scaling.scale, repeated.std(axis=0))


# ---------------------------------------------------------------------- class weights


def test_balanced_classes_are_weights_of_rows() -> None:
    labels = np.array(["rare", "often"])[(X[:, 0] + X[:, 1] < 1.2).astype(int)]
    given = RANDOM.uniform(0.5, 2, size=120)
    settings: dict[str, Any] = {"epochs": 30, "random_state": 0}
    totals = {label: given[labels == label].sum() for label in ("rare", "often")}
    by_hand = {label: given.sum() / (2 * total) for label, total in totals.items()}
    weights = given * np.vectorize(by_hand.get)(labels)
    expected = OnnxClassifier(**settings).fit(X, labels, weights).predict_proba(X)
    for class_weight in ("balanced", by_hand):
        model = OnnxClassifier(class_weight=class_weight, **settings).fit(X, labels, given)
        np.testing.assert_allclose(model.predict_proba(X), expected, atol=1e-9)
    plain = OnnxClassifier(**settings).fit(X, labels)
    balanced = OnnxClassifier(class_weight="balanced", **settings).fit(X, labels)
    assert (balanced.predict(X) == "rare").sum() > (plain.predict(X) == "rare").sum()


@pytest.mark.parametrize(
    ("class_weight", "message"),
    [
        ("equal", "'balanced', a dict label -> weight or None, got 'equal'"),
        ({0: 1.0, 7: 2.0}, "does not fit the labels"),
        ({0: -1.0}, "finite numbers >= 0"),
        ({0: np.nan}, "finite numbers >= 0"),
        ({0: "much"}, "does not fit the labels"),
    ],
)
def test_wrong_class_weights_are_refused(class_weight: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        OnnxClassifier(class_weight=class_weight).fit(X, CLASSES)


def test_rows_that_come_in_parts_are_not_balanced() -> None:
    with pytest.raises(SettingError, match="partial_fit cannot use class_weight='balanced'"):
        OnnxClassifier(class_weight="balanced").partial_fit(X, CLASSES)
    OnnxClassifier(class_weight={0: 2.0}).partial_fit(X, CLASSES)


# ---------------------------------------------------------------------- convergence


@pytest.mark.parametrize(
    ("losses", "falls"),
    [
        ([], False),
        ([3.0], False),
        ([3.0, 2.0], True),
        ([2.0, 3.0], False),
        ([10.0 - i for i in range(10)], True),
        ([0.95**i for i in range(30)], True),
        ([0.5**i for i in range(50)], False),
        ([1 + 1e-6 * (10 - i) for i in range(10)], False),
        ([1.0, float("nan"), float("nan")], False),
    ],
)
def test_a_loss_falls_or_has_converged(losses: list[float], falls: bool) -> None:
    assert still_falls(losses) == falls


@pytest.mark.filterwarnings("error")
def test_a_fit_that_is_too_short_is_told() -> None:
    for early_stopping in (False, True):
        short = OnnxRegressor(epochs=5, random_state=0, early_stopping=early_stopping)
        with pytest.warns(ConvergenceWarning, match="still falling after 5 epochs") as warned:
            short.fit(X, Y)
        assert warned[0].filename == __file__
    OnnxRegressor(hidden_layer_sizes=(), learning_rate=0.1, random_state=0).fit(X, Y)
    short.partial_fit(X, Y)
    stopping = OnnxRegressor(epochs=5, callbacks=[Stop()])
    assert stopping.fit(X, Y).n_iter_ == 2
    OnnxRegressor(line(1), epochs=5).fit(X, Y)  # a model of the user, which may be pretrained


class Stop(Callback):
    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        self.trainer.stop_training = epoch == 1


# ---------------------------------------------------------------------- tables


def test_a_search_over_a_pipeline_takes_tables_and_names() -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(X, columns=["width", "height", "depth", "mass"])
    table["colour"] = np.array(["red", "blue"])[(X[:, 3] > 0).astype(int)]
    labels = pandas.Series(np.array(["low", "middle", "high"])[CLASSES], index=table.index + 7)
    columns = make_column_transformer(
        (OneHotEncoder(), ["colour"]), remainder="passthrough", sparse_threshold=0
    )
    pipeline = make_pipeline(columns, OnnxClassifier(epochs=40, random_state=0, threads=1))
    grid = {"onnxclassifier__hidden_layer_sizes": [(), (20,)]}
    search = GridSearchCV(pipeline, grid, cv=3).fit(table, labels)
    assert search.best_score_ > 0.6
    assert set(search.predict(table)) == {"low", "middle", "high"}

    numbers = table.drop(columns="colour").astype({"width": np.float32})
    model = OnnxRegressor(epochs=3, random_state=0).fit(numbers, pandas.Series(Y, name="price"))
    assert list(model.feature_names_in_) == ["width", "height", "depth", "mass"]
    with pytest.raises(ValueError, match="feature names"):
        model.predict(numbers.rename(columns={"mass": "volume"}))


def test_a_search_over_a_pipeline_takes_names_of_classes() -> None:
    labels = np.array(["low", "middle", "high"], object)[CLASSES]
    pipeline = make_pipeline(StandardScaler(), OnnxClassifier(epochs=40, random_state=0, threads=1))
    grid = {"onnxclassifier__class_weight": [None, "balanced", {"high": 2.0}]}
    search = GridSearchCV(pipeline, grid, cv=3, scoring="balanced_accuracy").fit(X, labels)
    assert search.best_score_ > 0.6
    assert search.classes_.tolist() == ["high", "low", "middle"]


# ---------------------------------------------------------------------- models by skl2onnx


def test_a_converted_classifier_trains_on_its_own_labels() -> None:
    skl2onnx = pytest.importorskip("skl2onnx")
    labels = np.array(["a", "b", "c"])[CLASSES]
    few = make_pipeline(StandardScaler(), LogisticRegression()).fit(X[:12], labels[:12])
    model = skl2onnx.to_onnx(few, X[:1].astype(np.float32), target_opset=21)
    trained = OnnxClassifier(model, epochs=100, random_state=0).fit(X, labels)
    assert trained.score(X, labels) > few.score(X, labels)
    assert sorted(trained.trainer_.get_weights()) == [
        "LinearClassifier/coefficients",
        "LinearClassifier/intercepts",
    ]
    session = onnxruntime.InferenceSession(
        trained.get_trained_onnx().SerializeToString(), providers=["CPUExecutionProvider"]
    )
    label, maps = session.run(None, {"X": X.astype(np.float32)})
    assert label.tolist() == trained.predict(X).tolist()
    np.testing.assert_array_equal(
        np.array([[m[c] for c in "abc"] for m in maps], np.float32), trained.predict_proba(X)
    )


def test_constant_nodes_hold_weights() -> None:
    model = with_constants(mlp())
    x, y = batch_for(model)
    regressor = OnnxRegressor(model, epochs=2).fit(x["x"], y["y"])
    again = pickle.loads(pickle.dumps(regressor))
    assert structure(again.trainer_.export()) == structure(model)
    np.testing.assert_array_equal(again.predict(x["x"]), regressor.predict(x["x"]))


# ---------------------------------------------------------------------- sparse rows


def sparse_rows(dtype: Any = np.float64) -> Any:
    numbers = np.where(RANDOM.uniform(size=X.shape) < 0.4, X, 0).astype(dtype)
    matrix = scipy.sparse.csr_matrix(numbers)
    np.testing.assert_array_equal(matrix.toarray(), numbers)
    return matrix


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("make", [scipy.sparse.csr_matrix, scipy.sparse.csc_array])
def test_sparse_rows_train_as_dense_ones(make: Any, early_stopping: bool) -> None:
    matrix = make(sparse_rows())
    settings: dict[str, Any] = {"epochs": 5, "batch_size": 32, "random_state": 0}
    settings |= {"standardize": False, "early_stopping": early_stopping}
    weights = RANDOM.uniform(1, 2, size=120)
    ours = OnnxRegressor(**settings).fit(matrix, Y, weights)
    dense = OnnxRegressor(**settings).fit(matrix.toarray(), Y, weights)
    assert ours.loss_curve_ == dense.loss_curve_
    np.testing.assert_array_equal(ours.predict(matrix), dense.predict(matrix.toarray()))
    assert ours.partial_fit(matrix, Y).score(matrix, Y) == ours.score(matrix.toarray(), Y)


def test_a_sparse_fit_is_ridge() -> None:
    matrix = sparse_rows()
    ridge = Ridge(5.0, solver="sparse_cg", tol=1e-12).fit(matrix, Y)
    model = OnnxRegressor(penalty={"coefficients_0": 5.0 / 120}, **EXACT).fit(matrix, Y)
    np.testing.assert_allclose(model.predict(matrix), ridge.predict(matrix), atol=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
def test_sparse_columns_have_the_scaling_of_dense_ones(weighted: bool) -> None:
    matrix = scipy.sparse.vstack([sparse_rows(), scipy.sparse.csr_matrix((3, 4))], format="csr")
    matrix.data[:40] += 1e4
    weights = RANDOM.uniform(size=123) if weighted else None
    sparse, dense = standardization(matrix, weights), standardization(matrix.toarray(), weights)
    np.testing.assert_allclose(sparse.center, dense.center, rtol=1e-12)
    np.testing.assert_allclose(sparse.scale, dense.scale, rtol=1e-12)
    scaler = StandardScaler(with_mean=False).fit(matrix, sample_weight=weights)
    np.testing.assert_allclose(sparse.scale, scaler.scale_, rtol=1e-9)


def test_only_a_batch_of_a_sparse_matrix_is_dense() -> None:
    """As a dense array the matrix would take 160 GB."""
    rows, columns = 1_000_000, 20_000
    places = RANDOM.integers(0, columns, 300)
    matrix = scipy.sparse.csr_matrix(
        (np.ones(300, np.float32), (np.arange(300), places)), (rows, columns)
    )
    part = scipy.sparse.vstack([matrix[:300], matrix[-20:]], format="csr")
    assert standardization(matrix, None).center.sum() == pytest.approx(300 / rows)
    model = OnnxRegressor(hidden_layer_sizes=(), epochs=2, batch_size=64, random_state=0)
    assert model.fit(part, np.ones(320)).predict(part).shape == (320,)


# ---------------------------------------------------------------------- several labels a row

INDICATOR = np.stack([X[:, 0] > 0, X[:, 1] + X[:, 2] > 0, X[:, 0] > 1], axis=1).astype(int)


@pytest.mark.parametrize("as_sparse", [False, True])
def test_several_labels_a_row_are_those_of_mlp_classifier(as_sparse: bool) -> None:
    y = scipy.sparse.csr_matrix(INDICATOR) if as_sparse else INDICATOR
    theirs = MLPClassifier((16,), max_iter=300, learning_rate_init=0.03, random_state=0).fit(X, y)
    ours = OnnxClassifier(
        hidden_layer_sizes=(16,), epochs=300, learning_rate=0.03, random_state=0
    ).fit(X, y)
    for name in ("predict", "predict_proba", "predict_log_proba"):
        found, expected = getattr(ours, name)(X), getattr(theirs, name)(X)
        assert type(found) is type(expected)
        assert found.shape == expected.shape == (120, 3)
        assert found.dtype.kind == expected.dtype.kind
    np.testing.assert_array_equal(ours.classes_, theirs.classes_)
    np.testing.assert_array_equal(_dense(ours.predict(X)), ours.predict_proba(X) > 0.5)
    assert ours.score(X, y) > theirs.score(X, y) - 0.03 > 0.9
    again = pickle.loads(pickle.dumps(ours))
    np.testing.assert_array_equal(again.predict_proba(X), ours.predict_proba(X))


def _dense(matrix: Any) -> Any:
    return matrix.toarray() if scipy.sparse.issparse(matrix) else matrix


def test_each_label_is_a_logistic_regression() -> None:
    model = OnnxClassifier(
        penalty={"coefficients_0": 1 / (2 * 0.5 * 120 * 3)},
        **{**EXACT, "optimizer": SGD(1.0, momentum=0.9)},
    ).fit(X, INDICATOR)
    for column in range(3):
        theirs = LogisticRegression(C=0.5, tol=1e-8).fit(X, INDICATOR[:, column])
        np.testing.assert_allclose(
            model.predict_proba(X)[:, column], theirs.predict_proba(X)[:, 1], atol=1e-3
        )
        np.testing.assert_allclose(
            model.decision_function(X)[:, column], theirs.decision_function(X), atol=2e-2
        )


@pytest.mark.parametrize("end", ["scores", "Sigmoid"])
def test_a_model_of_the_user_takes_several_labels(end: str) -> None:
    model = OnnxClassifier(line(3, end), learning_rate=0.05, epochs=60, random_state=0)
    assert model.fit(X, INDICATOR).score(X, INDICATOR) > 0.7
    np.testing.assert_array_equal(model.decision_function(X) > 0, model.predict(X))
    assert model.set_params(early_stopping=True).fit(X, INDICATOR).score(X, INDICATOR) > 0.6


@pytest.mark.parametrize(
    ("settings", "y", "message"),
    [
        ({"model": line(2)}, INDICATOR, "2 columns, but y has 3 labels"),
        ({"class_weight": "balanced"}, INDICATOR, "class_weight weights rows by their class"),
        ({"loss": "focal"}, INDICATOR, "several labels a row. Use loss='binary_cross_entropy'"),
        ({}, 2 * INDICATOR - 1, "must be 0 or 1, got -1, 1"),
        ({}, 2 * INDICATOR + INDICATOR[:, ::-1], "MultiOutputClassifier"),
    ],
)
def test_wrong_labels_are_refused(settings: Any, y: Array, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        OnnxClassifier(**settings).fit(X, y)


def test_the_form_of_labels_stays() -> None:
    model = OnnxClassifier(epochs=1).fit(X, INDICATOR)
    for y in (CLASSES, INDICATOR[:, :2]):
        with pytest.raises(SettingError, match="3 columns of zeros and ones, as in the first call"):
            model.partial_fit(X, y)
    with pytest.raises(SettingError, match="first fitted with one class a row"):
        OnnxClassifier(epochs=1).fit(X, CLASSES).partial_fit(X, INDICATOR)


# ---------------------------------------------------------------------- scores


def test_those_have_scores_that_have_them_in_scikit_learn() -> None:
    assert hasattr(OnnxClassifier(), "decision_function") == hasattr(
        MLPClassifier(), "decision_function"
    )
    assert hasattr(OnnxClassifier(hidden_layer_sizes=()), "decision_function") == hasattr(
        LogisticRegression(), "decision_function"
    )
    assert hasattr(OnnxClassifier(line(1)), "decision_function")


@pytest.mark.parametrize("classes", [2, 3])
def test_scores_and_logarithms_are_those_of_logistic_regression(classes: int) -> None:
    labels = np.minimum(CLASSES, classes - 1)
    theirs = LogisticRegression(C=0.5, tol=1e-8).fit(X, labels)
    model = OnnxClassifier(
        penalty={"coefficients_0": 1 / (2 * 0.5 * 120)},
        **{**EXACT, "optimizer": SGD(0.3, momentum=0.9)},
    ).fit(X, labels)
    found, expected = model.decision_function(X), theirs.decision_function(X)
    if classes == 3:  # the intercepts of a softmax are known up to a constant
        found, expected = (array - array.mean(axis=1, keepdims=True) for array in (found, expected))
    np.testing.assert_allclose(found, expected, atol=1e-2)
    np.testing.assert_allclose(model.predict_log_proba(X), theirs.predict_log_proba(X), atol=1e-2)


@pytest.mark.parametrize(
    ("width", "end", "loss"),
    [
        (1, "scores", None), (1, "Sigmoid", None), (2, "scores", None), (2, "Softmax", None), (2, "scores", "binary_cross_entropy"),
        (2, "Sigmoid", "binary_cross_entropy"), (3, "scores", None), (3, "Softmax", None),
    ],
)  # fmt: skip
def test_scores_order_the_rows_as_probabilities(width: int, end: str, loss: Any) -> None:
    labels = np.minimum(CLASSES, max(width, 2) - 1)
    model = OnnxClassifier(line(width, end), loss=loss, learning_rate=0.05, epochs=30).fit(
        X, labels
    )
    scores, probabilities = model.decision_function(X), model.predict_proba(X)
    if width == 3:
        np.testing.assert_array_equal(scores.argmax(axis=1), probabilities.argmax(axis=1))
        return
    assert scores.shape == (120,)
    np.testing.assert_array_equal(scores > 0, probabilities[:, 1] > 0.5)
    np.testing.assert_array_equal(np.argsort(scores, kind="stable"), np.argsort(scores))
    assert (
        np.corrcoef(scores.argsort().argsort(), probabilities[:, 1].argsort().argsort())[0, 1]
        > 0.999
    )


# ---------------------------------------------------------------------- names of other libraries


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_iter": 50}, "no argument max_iter=50. Pass epochs=50"),
        ({"alpha": 0.1}, "Pass penalty="),
        ({"learning_rate_init": 0.01}, "Pass learning_rate=0.01"),
        ({"solver": "lbfgs"}, "Pass optimizer='adam', 'sgd'.*There is no L-BFGS"),
        ({"momentum": 0.5}, r"Pass optimizer=onnxfit.optimizers.SGD\(momentum=0.5\)"),
        ({"nesterovs_momentum": True}, r"SGD\(momentum=0.9, nesterov=True\)"),
        ({"beta_1": 0.8}, r"Adam\(betas=\(0.8, 0.999\)\)"),
        ({"activation": "tanh"}, "For another activation, pass a model"),
        ({"tol": 1e-3}, "early_stopping=True"),
        ({"n_jobs": 2}, "Pass threads=2"),
        ({"epoch": 2}, "Did you mean 'epochs'"),
    ],
)
@pytest.mark.parametrize("kind", [OnnxRegressor, OnnxClassifier])
def test_arguments_of_scikit_learn_are_answered(kind: Any, given: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as raised:
        kind(**given)
    assert str(raised.value).startswith(kind.__name__)
    with pytest.raises(ValueError, match=message if "epoch" not in given else "Invalid parameter"):
        kind().set_params(**given)


def test_the_answers_name_arguments_and_classes_that_exist() -> None:
    for name, hint in ANSWERS.items():
        assert name not in OnnxClassifier().get_params()
        for argument in re.findall(r"Pass (?:a )?(\w+)=", hint):
            assert argument in {*OnnxClassifier().get_params(), "callbacks"}
        for call in re.findall(r"onnxfit\.(\w+\.\w+\(.*\))[.;]", hint.replace("{}", "0.5")):
            code = call.replace("...", "0.5" if "Scaling" not in call else "0.1")
            eval(code, {"optimizers": optimizers, "schedules": schedules, "callbacks": callbacks})


@pytest.mark.parametrize("sizes", [(32,), [8, 8], 16])
def test_sizes_in_the_place_of_the_model_are_answered(sizes: Any) -> None:
    message = f"first argument of OnnxClassifier is the model.*hidden_layer_sizes={sizes!r}"
    with pytest.raises(ArgumentError, match=re.escape(message).replace(r"\.\*", ".*")):
        OnnxClassifier(sizes)


# ---------------------------------------------------------------------- validation data


@pytest.mark.parametrize("kind", [OnnxRegressor, OnnxClassifier])
def test_rows_to_validate_on_are_evaluated_after_each_epoch(kind: Any) -> None:
    labels = 1e3 * Y if kind is OnnxRegressor else np.array(["a", "b", "c"])[CLASSES]
    train, test = slice(0, 80), slice(80, 120)
    settings: dict[str, Any] = {"epochs": 4, "random_state": 0, "learning_rate": 0.01}
    plain = kind(**settings).fit(X[train], labels[train])
    assert plain.validation_losses_ == []
    for given in (
        {"X_val": X[test], "y_val": labels[test]},
        {"eval_set": [(X[test], labels[test])]},
        {"eval_set": (X[test], labels[test])},
    ):
        model = kind(**settings).fit(X[train], labels[train], **given)
        assert model.loss_curve_ == plain.loss_curve_
        assert len(model.validation_losses_) == 4
        assert len(model.trainer_.history.history["val_loss"]) == 4
        last = (
            mean_squared_error(labels[test], model.predict(X[test]))
            if kind is OnnxRegressor
            else log_loss(labels[test], model.predict_proba(X[test]))
        )
        assert model.validation_losses_[-1] == pytest.approx(last)


def test_early_stopping_watches_the_rows_passed() -> None:
    model = OnnxRegressor(
        hidden_layer_sizes=(30,), learning_rate=0.05, epochs=300, early_stopping=True, n_iter_no_change=5, random_state=0
    ).fit(X[:60], Y[:60], X_val=X[60:], y_val=Y[60:])  # fmt: skip
    losses = model.validation_losses_
    assert model.n_iter_ == len(losses) == int(np.argmin(losses)) + 6 < 300
    assert mean_squared_error(Y[60:], model.predict(X[60:])) == pytest.approx(min(losses))
    sparse = scipy.sparse.csr_matrix(X)
    assert (
        OnnxClassifier(epochs=2)
        .fit(sparse[:60], INDICATOR[:60], eval_set=[(sparse[60:], INDICATOR[60:])])
        .validation_losses_
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"X_val": X}, "y_val is missing"),
        ({"y_val": Y}, "X_val is missing"),
        ({"X_val": X, "y_val": Y, "eval_set": [(X, Y)]}, "not both"),
        ({"eval_set": [(X, Y), (X, Y)]}, "exactly one pair.*got 2 sets"),
        ({"eval_set": [(X, Y, Y)]}, "exactly one pair.*3 items"),
        ({"X_val": X[:, :2], "y_val": Y}, "2 features"),
    ],
)
def test_wrong_validation_data_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OnnxRegressor(epochs=1).fit(X, Y, **given)
    with pytest.raises(SettingError, match="unknown class"):
        OnnxClassifier(epochs=1).fit(X, CLASSES, X_val=X, y_val=CLASSES + 1)


# ---------------------------------------------------------------------- threads


@pytest.mark.parametrize(
    ("estimator", "threads"),
    [
        (OnnxRegressor(), 1), (OnnxRegressor(threads=2), 2), (OnnxRegressor(hidden_layer_sizes=(2000, 200)), None), (OnnxRegressor(line(1)), None),
        (OnnxRegressor(hidden_layer_sizes=(1000,)), 1), (OnnxRegressor(hidden_layer_sizes=(2000,), batch_size=1000), None),
    ],
)  # fmt: skip
def test_small_default_networks_use_one_thread(estimator: Any, threads: Any) -> None:
    estimator.set_params(epochs=1).fit(X, Y)
    assert estimator.trainer_.settings["threads"] == threads
    assert clone(estimator).threads == estimator.threads
