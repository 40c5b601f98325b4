"""Sample weights and class weights."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from onnxfit.data import DataLoader
from onnxfit.errors import DataError, SettingError
from tests.data.kinds import NAMED, ROWS, Labels, W, X, Y, make, three_batches, whole


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 1)])
def test_sample_weights_have_one_number_a_row(shape: tuple[int, ...]) -> None:
    np.testing.assert_array_equal(
        whole(make(X, Y, W.reshape(shape)))["sample_weight"], W, strict=True
    )


@pytest.mark.parametrize(
    ("y", "class_weight", "expected"),
    [
        ([0, 0, 1, 1], {0: 0.2, 1: 0.3}, [0.2, 0.2, 0.3, 0.3]),
        ([0, 0, 1, 1], {0: 0.2}, [0.2, 0.2, 1, 1]),
        ([0.0, 0.0, 1.0, 1.0], {1: 0.3}, [1, 1, 0.3, 0.3]),
        ([[2], [0], [-1], [2]], {2: 5, -1: 0}, [5, 1, 0, 5]),
        ([True, False, True, True], {True: 2, False: 3}, [2, 3, 2, 2]),
    ],
)
def test_class_weights_become_sample_weights(
    y: Any, class_weight: dict[int, float], expected: list[float]
) -> None:
    y = np.array(y)
    for data in (
        make(X[:4], y, class_weight=class_weight),
        make([(X[:4], y)], class_weight=class_weight),
    ):
        np.testing.assert_allclose(
            whole(data)["sample_weight"], np.array(expected, np.float32), rtol=0
        )


def test_one_hot_labels_have_the_class_of_their_one() -> None:
    class OneHot(Labels):
        def prepare(self, y: np.ndarray) -> np.ndarray:
            return y.astype(np.float32)

    data = make(
        X[:3], np.eye(3)[[2, 0, 1]], targets={"out": OneHot()}, class_weight={2: 5.0, 1: 3.0}
    )
    assert whole(data)["sample_weight"].tolist() == [5, 1, 3]
    for several in ([[1, 1, 0]], [[0.5, 0.5, 0]], [[2, -1, 0]]):
        with pytest.raises(DataError, match="integer classes"):
            make(X[:1], np.array(several), targets={"out": OneHot()}, class_weight={0: 2.0})


@pytest.mark.parametrize("x", [(X, Y, W), (DataLoader(X, Y, W),), (three_batches(),), (NAMED,)])
def test_class_weights_beside_sample_weights_are_refused(x: tuple[Any, ...]) -> None:
    with pytest.raises(SettingError, match="class_weight or sample_weight, not both"):
        list(make(*x, class_weight={0: 1.0}).batches(0))


@pytest.mark.parametrize(
    "class_weight", ["balanced", {"cat": 1.0}, {0: "much"}, {0: np.nan}, [1.0, 2.0]]
)
def test_class_weights_are_numbers_by_class(class_weight: Any) -> None:
    with pytest.raises(SettingError, match=f"got {re.escape(repr(class_weight))}"):
        make(X, Y, class_weight=class_weight)


def test_class_weights_need_classes_and_one_output() -> None:
    with pytest.raises(DataError, match="integer classes"):
        make(X, Y, class_weight={0: 1.0})
    with pytest.raises(
        SettingError, match=r"exactly one output with labels, but the model has 2\."
    ):
        make(X, [Y, Y], targets={"u": Labels("u"), "v": Labels("v")}, class_weight={0: 1.0})


@pytest.mark.parametrize("weight", [np.nan, np.inf, -np.inf, 1e39, -1e39, 1e-50])
@pytest.mark.parametrize("purpose", ["training", "evaluation"])
def test_a_weight_that_float32_cannot_hold_is_refused(weight: float, purpose: str) -> None:
    weights = np.ones(ROWS)
    weights[3] = weight
    given = "NaN" if np.isnan(weight) else re.escape(f"{weight:g}")
    expected = rf"sample_weight is {given} in row 3.*1.4e-45 to 3.4e\+38.*Divide all weights"
    with pytest.raises(DataError, match=expected):
        make(X, Y, weights, purpose=purpose)
    with pytest.raises(SettingError, match=r"class_weight"):
        make(X, np.zeros(ROWS, np.int64), class_weight={0: weight})


def test_a_weight_may_be_negative_or_0() -> None:
    weights = np.array([-1.0, 0.0, -0.0, 1e38, 1e-38] * 2)[:ROWS]
    np.testing.assert_array_equal(
        whole(make(X, Y, weights))["sample_weight"], weights.astype(np.float32)
    )


@pytest.mark.parametrize("value", [10**400, "a", None])
def test_class_weights_are_numbers(value: Any) -> None:
    with pytest.raises(SettingError, match="class_weight"):
        make(X, np.zeros(ROWS, np.int64), class_weight={0: value})


def test_infinite_labels_have_no_class() -> None:
    with pytest.raises(DataError, match="integer classes"):
        make(X, np.full(ROWS, np.inf), class_weight={0: 2.0})


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["x", "y", "x and y"])
def test_another_row_stands_in_for_one_of_weight_0_that_is_not_finite(value, where) -> None:
    x, y, weights = X.copy(), np.array(Y, np.float32), np.ones(ROWS, np.float32)
    weights[[0, 4]] = 0
    if "x" in where:
        x[4] = value
    if "y" in where:
        y[4] = value
    before = x.copy(), y.copy()
    batch = whole(make(x, y, weights))
    np.testing.assert_array_equal(x, before[0])
    np.testing.assert_array_equal(y, before[1])
    expected = whole(make(X, Y, weights))
    for name, array in batch.items():
        others = np.arange(ROWS) != 4
        np.testing.assert_array_equal(array[others], expected[name][others])
        if name != "sample_weight":
            np.testing.assert_array_equal(array[4], expected[name][1])
    x[4] = np.nan
    with pytest.raises(DataError, match=r"has NaN in row 4\."):
        make(x, Y, weights + 1)


def test_zeros_stand_in_where_no_row_has_a_weight() -> None:
    x = X.copy()
    x[2] = np.nan
    batch = whole(make(x, Y, np.zeros(ROWS)))
    inputs = next(array for name, array in batch.items() if array.shape == X.shape)
    np.testing.assert_array_equal(inputs[2], np.zeros_like(X[2]))
    np.testing.assert_array_equal(inputs[3], X[3])
