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
    with pytest.raises(SettingError, match="exactly one output with labels, the model has 2"):
        make(X, [Y, Y], targets={"u": Labels("u"), "v": Labels("v")}, class_weight={0: 1.0})
