"""Data that gives batches one by one: batches with numbers, iterables, generators, torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from onnxfit.data import permutation
from onnxfit.errors import DataError
from tests.data.kinds import (
    KINDS,
    ROWS,
    SIZE,
    Iterable,
    Numbered,
    W,
    X,
    Y,
    make,
    three_batches,
    whole,
)


def test_numbered_batches_are_shuffled_as_batches_and_told_of_the_epochs_end() -> None:
    numbered = Numbered()
    data = make(numbered, shuffle=True, seed=3)
    for epoch in range(3):
        order = permutation(3, epoch, 3)
        np.testing.assert_array_equal(
            whole(data, epoch)["x"], np.concatenate([three_batches()[i][0] for i in order])
        )
    assert numbered.ended == 3
    next(data.batches(3))
    assert numbered.ended == 3, "a pass that was left early has no end"


def test_foreign_loaders_are_told_the_epoch() -> None:
    loader = Iterable(three_batches())
    data = make(loader)
    whole(data, 5)
    whole(data, 6)
    assert loader.epochs == [5, 6]


def test_a_generator_is_good_for_one_epoch() -> None:
    data = make(KINDS["generator"]()[0])
    assert not data.re_iterable
    data.require_re_iterable(1)
    with pytest.raises(
        DataError, match=r"is needed for 3 epochs.*function that returns the generator"
    ):
        data.require_re_iterable(3)
    assert len(whole(data)["x"]) == ROWS, "asking took no batch"
    with pytest.raises(DataError, match=r"no batch.*used"):
        next(data.batches(1))


def test_a_generator_of_the_callers_is_left_open_and_one_of_ours_is_closed() -> None:
    closed = []

    def batches() -> Iterator[Any]:
        try:
            yield from three_batches()
        finally:
            closed.append(True)

    theirs = batches()
    running = make(theirs).batches(0)
    next(running)
    running.close()  # type: ignore[attr-defined]
    assert not closed
    assert len(next(theirs)) == 3
    running = make(batches).batches(0)
    next(running)
    running.close()  # type: ignore[attr-defined]
    assert closed == [True]


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
def test_torch_data() -> None:
    torch = pytest.importorskip("torch")
    x, y, w = (torch.from_numpy(array) for array in (X, Y, W))
    dataset = torch.utils.data.TensorDataset(x, y, w)
    expected = whole(make(X, Y, W))
    loader = torch.utils.data.DataLoader(dataset, batch_size=SIZE)
    data = make(loader)
    assert (data.steps, data.batch_size, data.re_iterable) == (3, SIZE, True)
    for _ in range(2):
        np.testing.assert_equal(whole(data), expected)
    np.testing.assert_equal(whole(make(x, y, w)), expected)
    assert list(whole(make(loader, targets={}, purpose="prediction"))) == ["x"]
    with pytest.raises(
        DataError, match=r"torch Dataset \(TensorDataset\).*torch.utils.data.DataLoader"
    ):
        make(dataset)
    with pytest.raises(DataError, match="requires grad"):
        make(x.clone().requires_grad_(), y)


def test_an_iterator_is_advanced_by_what_is_skipped() -> None:
    batches = [(X[:2], Y[:2]), (X[2:5], Y[2:5]), (X[5:6], Y[5:6])]
    assert [batch.rows for batch in make(iter(batches)).batches(0, 1)] == [3, 1]
