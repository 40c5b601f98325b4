"""A warning where the numbers of a first batch contradict what a loss expects of an output."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnx.parser
import pytest
from scipy import special

from onnxfit import Trainer, losses
from onnxfit.data import Batch

ROWS = 12
# Networks that onnxfit cannot read an activation from: v w, with a function of the rows after it
HIDDEN_SOFTMAX = "a = Abs(k)  s = ReduceSum(a, axis)  y = Div(a, s)"
HIDDEN_SIGMOID = "a = Sin(k)  y = Mul(a, a)"
SCORES = "y = Elu(k)"
both = pytest.mark.parametrize("backend", ["full", "forward_backward"])
either = pytest.mark.parametrize("method", ["fit", "evaluate"])


def trainer(body: str, loss: Any, columns: int = 3, **settings: Any) -> Trainer:
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[N, 4] x) => (float[N, {columns}] y) <int64[1] axis = {{1}}, float half = {{0.5}}>
        {{ k = MatMul(x, w)  {body} }}""")
    weight = np.random.default_rng(0).standard_normal((4, columns)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    return Trainer(model, loss=loss, optimizer=0.01, weights=["w"], **settings)


def messages(trainer: Trainer, method: str, columns: int = 3, **options: Any) -> list[str]:
    """The warnings of two calls, with labels that any loss of probabilities takes."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((ROWS, 4)).astype(np.float32)
    y = np.zeros((ROWS, 1), np.float32) if columns == 1 else rng.integers(0, columns, ROWS)
    if isinstance(trainer.loss, losses.KLDivergence):
        y = special.softmax(rng.standard_normal((ROWS, columns)), axis=1).astype(np.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            if method == "fit":
                trainer.fit(x, y, epochs=2, batch_size=4, verbose=0, **options)
            else:
                trainer.evaluate(x, y, batch_size=4, **options)
    return [str(each.message) for each in caught]


@both
@either
@pytest.mark.parametrize(
    ("loss", "columns", "body", "expected"),
    [
        ("cross_entropy", 3, HIDDEN_SOFTMAX, "CrossEntropy reads output 'y' as scores, but in the first batch all its numbers lie between 0 and 1, and each row sums to 1. If the output is probabilities, pass loss=CrossEntropy(from_logits=False)."),
        (losses.CrossEntropy(from_logits=True), 3, HIDDEN_SOFTMAX, "loss=CrossEntropy(from_logits=False)"),
        ("focal", 3, HIDDEN_SOFTMAX, "loss=Focal(from_logits=False)"),
        ("nll", 3, HIDDEN_SOFTMAX, "NLL reads output 'y' as log-probabilities"),
        ("bce_with_logits", 1, HIDDEN_SIGMOID, "loss=BinaryCrossEntropy(from_logits=False)"),
        ("bce", 1, SCORES, "BinaryCrossEntropy reads output 'y' as probabilities, but the first batch has numbers from"),
        ("bce", 1, SCORES, "pass loss=BinaryCrossEntropy(from_logits=True)."),
        (losses.CrossEntropy(from_logits=False), 3, SCORES, "loss=CrossEntropy(from_logits=True)"),
        (losses.KLDivergence(), 3, SCORES, "loss=KLDivergence(from_logits=True)"),
    ],
)  # fmt: skip
def test_a_contradiction_is_told_once(
    loss: Any, columns: int, body: str, expected: str, method: str, backend: str
) -> None:
    found = messages(trainer(body, loss, columns, backend=backend), method, columns)
    assert len(found) == 1
    assert expected in found[0]


@either
@pytest.mark.parametrize(
    ("loss", "columns", "body"),
    [
        ("cross_entropy", 3, SCORES),
        ("cross_entropy", 3, HIDDEN_SIGMOID),  # between 0 and 1, without the sum
        (losses.CrossEntropy(from_logits=False), 3, HIDDEN_SOFTMAX),
        ("nll", 3, f"{HIDDEN_SOFTMAX.replace('y =', 'p =')}  l = Log(p)  y = Identity(l)"),
        ("bce_with_logits", 1, SCORES),
        ("bce_with_logits", 1, "z = Sub(k, k)  c = Cos(z)  y = Mul(c, half)"),  # one number
        ("bce", 1, HIDDEN_SIGMOID),
        ("mse", 1, HIDDEN_SIGMOID),
        ("cross_entropy", 3, "y = Softmax(k)"),
        ("bce_with_logits", 1, "y = Identity(k)"),
    ],
)
def test_outputs_that_fit_are_not_mentioned(
    loss: Any, columns: int, body: str, method: str
) -> None:
    assert messages(trainer(body, loss, columns), method, columns) == []


def test_the_warning_comes_before_the_first_step() -> None:
    ours = trainer(HIDDEN_SOFTMAX, "cross_entropy")
    before = ours.get_weights()["w"]
    x, y = np.ones((ROWS, 4), np.float32), np.zeros(ROWS, np.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="each row sums to 1"):
            ours.fit(x, y, verbose=0)
    np.testing.assert_array_equal(ours.get_weights()["w"], before)


@both
@pytest.mark.parametrize(("body", "expected"), [("y = Softmax(k)", 0), (SCORES, 1)])
def test_only_the_first_batch_is_predicted(
    body: str, expected: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later batches cost nothing, and a graph that shows its activation costs nothing at all."""
    ours = trainer(body, "cross_entropy", backend=backend)
    predict, rows = ours._training.backend.predict, []

    def counted(batch: Batch) -> dict[str, Any]:
        rows.append(batch.rows)
        return predict(batch)

    monkeypatch.setattr(ours._training.backend, "predict", counted)
    messages(ours, "fit")
    messages(ours, "evaluate")
    assert rows == [4] * expected


def test_classes_on_another_axis() -> None:
    """The rows of a loss with axis=1 run along that axis."""
    body = (
        "u = Unsqueeze(k, last)  v = Concat<axis = 2>(u, u)  a = Abs(v)"
        "  s = ReduceSum(a, axis)  y = Div(a, s)"
    )
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[N, 4] x) => (float[N, 3, 2] y) <int64[1] axis = {{1}}, int64[1] last = {{2}}>
        {{ k = MatMul(x, w)  {body} }}""")
    weight = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    x, y = np.ones((ROWS, 4), np.float32), np.zeros((ROWS, 2), np.int64)
    with pytest.warns(UserWarning, match="each row sums to 1"):
        Trainer(model, loss=losses.CrossEntropy(axis=1)).evaluate(x, y)


def test_numbers_that_are_not_finite() -> None:
    """Nothing is concluded from NaN."""
    ours = trainer(SCORES, losses.CrossEntropy(from_logits=False))
    ours.set_weights({"w": np.full((4, 3), np.nan, np.float32)})
    assert messages(ours, "evaluate") == []
