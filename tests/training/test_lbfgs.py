"""L-BFGS: the minimum of problems whose minimum others know, and what it refuses."""

import sys

import numpy as np
import onnx
import pytest
from sklearn.linear_model import LogisticRegression

from onnxfit import Trainer, fit_lbfgs, optimizers
from onnxfit.errors import DataError, DivergenceError, InstallationError, SettingError
from onnxfit.losses import CrossEntropy
from tests.models import convolutional, mlp

optimize = pytest.importorskip("scipy.optimize")
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(60, 3))
Y = X @ [[1.0], [-2.0], [0.5]] + 0.3 + 0.1 * DRAW.normal(size=(60, 1))
CLASSES = (X @ DRAW.normal(size=(3, 4)) + 0.5 * DRAW.normal(size=(60, 4))).argmax(1)


def affine(outputs, dtype="double"):
    """y = x @ w + b, where everything starts at 0."""
    zeros = [", ".join(["0"] * count) for count in (3 * outputs, outputs)]
    return onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        g ({dtype}[N, 3] x) => ({dtype}[N, {outputs}] y)
        <{dtype}[3, {outputs}] w = {{{zeros[0]}}}, {dtype}[{outputs}] b = {{{zeros[1]}}}>
        {{ p = MatMul(x, w)  y = Add(p, b) }}"""
    )


def by_hand(model, **settings):
    return Trainer(model, backend="forward_backward", **settings)


def test_linear_regression_ends_at_the_closed_form():
    trainer = by_hand(affine(1), loss="mse")
    found = fit_lbfgs(trainer, X, Y, gtol=1e-10)
    solved, *_ = np.linalg.lstsq(np.column_stack([X, np.ones(60)]), Y, rcond=None)
    w = trainer.get_weights()
    np.testing.assert_allclose(np.vstack([w["w"], w["b"]]), solved, atol=1e-8)
    assert found["converged"]
    assert found["loss"] == pytest.approx(trainer.evaluate(X, Y)["loss"], rel=1e-12)
    assert trainer.global_step == 0


def test_the_search_is_scipys_for_the_same_loss():
    """Least squares with a penalty and weights of the rows, written in NumPy."""
    weight = DRAW.integers(1, 4, 60) / 2
    trainer = by_hand(affine(1), loss="mse", penalty={"w": 0.1})
    found = fit_lbfgs(trainer, X, Y, sample_weight=weight, max_iter=4)

    def loss(v):
        error = X @ v[:3, None] + v[3] - Y
        own = np.mean(weight[:, None] * error**2)
        gradient = 2 * weight[:, None] * error / 60
        slope = np.append((X.T @ gradient)[:, 0] + 0.2 * v[:3], gradient.sum())
        return own + 0.1 * (v[:3] ** 2).sum(), slope

    expected = optimize.minimize(
        loss, np.zeros(4), jac=True, method="L-BFGS-B", options={"maxiter": 4, "ftol": 0}
    )
    w = trainer.get_weights()
    np.testing.assert_allclose(np.append(w["w"], w["b"]), expected.x, rtol=1e-9)
    assert found["loss"] == pytest.approx(expected.fun, rel=1e-12)
    assert found["evaluations"] == expected.nfev


@pytest.mark.parametrize(("dtype", "atol"), [("double", 2e-5), ("float", 2e-3)])
def test_logistic_regression_is_scikit_learns(dtype, atol):
    theirs = LogisticRegression(C=2.0, tol=1e-10, max_iter=1000).fit(X, CLASSES)
    trainer = by_hand(
        affine(4, dtype),
        loss=CrossEntropy(from_logits=True),
        penalty={"w": 1 / (2 * 2.0 * len(X))},
    )
    x = X.astype(np.float64 if dtype == "double" else np.float32)
    fit_lbfgs(trainer, x, CLASSES, gtol=1e-8, max_iter=500)
    w = trainer.get_weights()
    np.testing.assert_allclose(w["w"], theirs.coef_.T, atol=atol)
    shift = w["b"] - w["b"].mean()  # softmax ignores a common shift of the logits
    np.testing.assert_allclose(shift, theirs.intercept_ - theirs.intercept_.mean(), atol=atol)


def test_a_network_learns_and_trains_on_and_exports(tmp_path):
    draw = np.random.default_rng(1)
    x, y = draw.normal(size=(40, 4)).astype(np.float32), draw.integers(0, 3, 40)
    trainer = by_hand(mlp((4, 16, 3)), loss="cross_entropy", optimizer="adam")
    first = trainer.evaluate(x, y)["loss"]
    found = fit_lbfgs(trainer, x, y, max_iter=200)
    assert found["loss"] < first / 10
    assert trainer.evaluate(x, y)["loss"] == pytest.approx(found["loss"], rel=1e-3)
    loaded = Trainer.load(trainer.save(tmp_path / "c"))
    for name, w in trainer.get_weights().items():
        np.testing.assert_array_equal(loaded.get_weights()[name], w)
    trainer.fit(x, y, epochs=1, verbose=0)
    assert trainer.global_step == 2


def test_an_error_leaves_the_weights():
    trainer = by_hand(affine(1), loss="mse", weights=["w"])
    fit_lbfgs(trainer, X, Y, max_iter=2)
    before = trainer.get_weights()
    with pytest.raises(DivergenceError, match="Scale the inputs"):
        fit_lbfgs(trainer, np.full_like(X, 1e200), Y)
    with pytest.raises(DataError):
        fit_lbfgs(trainer, X[:, :2], Y)
    np.testing.assert_array_equal(trainer.get_weights()["w"], before["w"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "full"}, r"needs Trainer\(\.\.\., backend='forward_backward'\)"),
        ({"freeze_rows": {"w": [0]}}, "frozen rows"),
        ({"optimizer": optimizers.SGD(0.1, constraints="non_neg")}, "constraints"),
    ],
)
def test_what_would_be_ignored_is_refused(settings, message):
    trainer = Trainer(affine(1), loss="mse", **{"backend": "forward_backward", **settings})
    with pytest.raises(SettingError, match=message):
        fit_lbfgs(trainer, X, Y)


def test_frozen_tensors_and_statistics_are_refused():
    trainer = by_hand(affine(1), loss="mse")
    trainer.frozen = "w"
    with pytest.raises(SettingError, match="frozen tensors"):
        fit_lbfgs(trainer, X, Y)
    trainer = by_hand(convolutional(), loss="cross_entropy")
    with pytest.raises(SettingError, match="batch_norm='frozen'"):
        fit_lbfgs(trainer, np.zeros((2, 1, 8, 8), np.float32), [0, 1])


@pytest.mark.parametrize(
    "numbers", [{"max_iter": 0}, {"max_iter": 1.5}, {"gtol": -1.0}, {"history_size": True}]
)
def test_impossible_numbers_are_refused(numbers):
    with pytest.raises(SettingError, match=f"fit_lbfgs needs {next(iter(numbers))}"):
        fit_lbfgs(by_hand(affine(1), loss="mse"), X, Y, **numbers)


def test_without_scipy_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(InstallationError, match="pip install scipy"):
        fit_lbfgs(by_hand(affine(1), loss="mse"), X, Y)
