"""Arrays in memory, and the rows of them that validate."""

from __future__ import annotations

import numpy as np
import pytest

from onnxfit.data import DataLoader, validation_split
from onnxfit.errors import DataError, SettingError
from tests.data.kinds import KINDS, ROWS, Labels, Numbered, W, X, Y, make, three_batches, whole


def test_arrays_are_brought_into_rows_once() -> None:
    """Rows taken from any other layout copy the whole array, for every batch."""
    batch, *_ = make(np.asfortranarray(X), Y[::-1], np.repeat(W, 2)[::2]).batches(0)
    assert all(array.flags.c_contiguous for _, array in batch.columns)


def test_a_batch_size_beyond_every_data_set_is_one_batch() -> None:
    (batch,) = make(X, Y, batch_size=2**62, shuffle=True).batches(0)
    assert batch.rows == ROWS


def test_labels_and_weights_are_checked_once_for_arrays_and_per_batch_for_streams() -> None:
    calls = []

    class Counting(Labels):
        def prepare(self, y: np.ndarray) -> np.ndarray:
            calls.append(len(y))
            return super().prepare(y)

    data = make(X, Y, targets={"out": Counting()})
    whole(data), whole(data)
    assert calls == [ROWS]
    calls.clear()
    whole(make(three_batches(), targets={"out": Counting()}))
    assert calls == [4, 4, 2]


@pytest.mark.parametrize(
    ("rows", "fraction", "trained"),
    [
        (10, 0.2, 8),
        (10, 0.25, 7),
        (100, 0.29, 71),
        (7, 0.5, 3),
        (3, 0.2, 2),
        (10, 0.05, 9),
        (10, 0.9, 1),
        (10, 0.7, 3),
    ],
)
def test_validation_takes_the_last_rows(rows: int, fraction: float, trained: int) -> None:
    x = np.arange(rows)
    train, validation = validation_split({"x": x, "scale": 2.0}, x + 1, x + 3, fraction)
    np.testing.assert_array_equal(train[0]["x"], x[:trained])
    np.testing.assert_array_equal(validation[0]["x"], x[trained:])
    assert train[0]["scale"] == validation[0]["scale"] == 2.0
    for part, shift in ((1, 1), (2, 3)):
        np.testing.assert_array_equal(train[part], x[:trained] + shift)
        np.testing.assert_array_equal(validation[part], x[trained:] + shift)


@pytest.mark.parametrize(
    "kind",
    [
        "arrays",
        "other layout",
        "lists of numbers",
        "foreign tensors",
        "table",
        "dicts",
        "lists of arrays",
        "one dict",
    ],
)
def test_validation_split_keeps_the_kind_of_data(kind: str) -> None:
    given = (*KINDS[kind](), None, None)[:3]
    train, validation = validation_split(*given, 0.3)
    for parts, rows in ((train, slice(0, 7)), (validation, slice(7, 10))):
        arrays = whole(make(*parts))
        np.testing.assert_array_equal(arrays["x"], X[rows])
        np.testing.assert_array_equal(arrays["y_true/out"], Y[rows])
        np.testing.assert_array_equal(arrays["sample_weight"], W[rows])


def test_validation_split_needs_rows_to_train_on_and_arrays() -> None:
    for rows, fraction, message in (
        (3, 0.99, "leaves no rows for training"),
        (3, 1e-12, "leaves no rows for validation"),
        (3, 1.0, "between 0 and 1"),
    ):
        with pytest.raises(SettingError, match=message):
            validation_split(X[:rows], Y[:rows], None, fraction)
    for data in (DataLoader(X, Y), three_batches(), Numbered(), lambda: iter(three_batches())):
        with pytest.raises(SettingError, match="validation_split can split arrays only"):
            validation_split(data, None, None, 0.5)
    with pytest.raises(DataError, match="same number of rows"):
        validation_split(X, Y[1:], None, 0.5)
