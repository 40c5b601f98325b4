"""Loaders: in `fit`, and iterated by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest

from onnxfit.data import DataLoader, permutation
from onnxfit.data.loader import Loader
from onnxfit.data.order import batch_indices
from onnxfit.errors import DataError, SettingError
from tests.data.kinds import OUT, ROWS, SIZE, Tensor, W, X, Y, make, three_batches, whole


def test_the_loader_overrules_the_arguments_of_fit() -> None:
    data = make(
        DataLoader(X, Y, batch_size=5, shuffle=True, seed=7, drop_last=True),
        batch_size=3,
        shuffle=False,
        seed=1,
    )
    assert (data.steps, data.batch_size) == (2, 5)
    np.testing.assert_array_equal(whole(data, 4)["x"], X[permutation(7, 4, ROWS)])
    without_seed = make(DataLoader(X, Y, batch_size=5), seed=1)
    np.testing.assert_array_equal(whole(without_seed, 4)["x"], X[permutation(1, 4, ROWS)])


@pytest.mark.parametrize("purpose", ["evaluation", "prediction"])
def test_a_shuffling_loader_is_evaluated_in_the_order_of_its_rows(purpose: str) -> None:
    np.testing.assert_array_equal(
        whole(
            make(DataLoader(X, Y), purpose=purpose, targets={} if purpose == "prediction" else OUT)
        )["x"],
        X,
    )


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_the_loader_gives_batches_built_like_its_data(prefetch: int) -> None:
    loader = DataLoader(
        {"a": X, "b": Y}, [Y, Tensor(W)], W, batch_size=SIZE, shuffle=False, prefetch=prefetch
    )
    batches = list(loader)
    assert len(batches) == len(loader) == 3
    for (x, y, w), (a, b, c) in zip(batches, three_batches()):
        np.testing.assert_equal(x, {"a": a, "b": b})
        np.testing.assert_equal(y, [b, c])
        np.testing.assert_equal(w, c)
    assert [len(batch) for batch in DataLoader(X)] == [1]
    assert [len(batch) for batch in DataLoader(X, Y, batch_size=6, drop_last=True)] == [2]


def seen(loader: DataLoader) -> list[list[float]]:
    return [x[:, 0].tolist() for x, _ in loader]


def test_each_whole_pass_of_the_loader_is_the_next_epoch() -> None:
    loader = DataLoader(X, Y, batch_size=3, seed=5)
    passes = [seen(loader) for _ in range(3)]
    assert passes == [
        [X[rows, 0].tolist() for rows in np.split(permutation(5, epoch, ROWS), [3, 6, 9])]
        for epoch in range(3)
    ]
    loader.set_epoch(1)
    assert seen(loader) == passes[1]
    assert seen(DataLoader(X, Y, batch_size=3)) == seen(DataLoader(X, Y, batch_size=3, seed=0)), (
        "no seed stands for 0"
    )


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("taken", range(5))
def test_a_loader_goes_on_where_its_state_was_taken(taken: int, prefetch: int) -> None:
    settings = {"batch_size": 3, "prefetch": prefetch}
    whole_run = DataLoader(X, Y, seed=5, **settings)
    expected = [*seen(whole_run), *seen(whole_run)]
    loader = DataLoader(X, Y, seed=5, **settings)
    first = [x[:, 0].tolist() for x, _ in islice(loader, taken)]
    loader.close()
    other = DataLoader(X, Y, seed=6, **settings)
    other.load_state_dict(loader.state_dict())
    assert first + seen(other) == expected[:4]
    assert seen(other) == expected[4:]


def test_a_loader_refuses_the_state_of_other_data() -> None:
    with pytest.raises(SettingError, match=", but this loader has"):
        DataLoader(X, Y).load_state_dict(DataLoader(X[1:], Y[1:]).state_dict())
    with pytest.raises(SettingError, match=", but this loader has"):
        DataLoader(X, Y).load_state_dict(DataLoader(X, Y, batch_size=3).state_dict())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"X": X, "y": Y[1:]}, DataError, r"the same number of rows, but X has 10, y has 9\."),
        ({"X": {"a": X, "b": X[1:]}}, DataError, r"X\['a'\] has 10, X\['b'\] has 9"),
        ({"X": X[:0]}, DataError, "empty"),
        (
            {"X": X, "batch_size": 11, "drop_last": True},
            DataError,
            r"10 rows do not fill a batch of batch_size=11\.",
        ),
        ({"X": X, "sample_weight": W}, DataError, "without labels"),
        ({"X": X, "batch_size": -1}, SettingError, r"batch_size must be >= 1, got -1\."),
        (
            {"X": X, "prefetch": -1},
            SettingError,
            r"prefetch must be a number of batches >= 0, got -1\.",
        ),
        ({"X": ["a", "b"]}, DataError, "X has element type <U1"),
    ],
)
def test_a_loader_checks_its_data_when_it_is_made(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        DataLoader(**arguments)


def test_an_iteration_that_is_broken_off_begins_its_epoch_anew() -> None:
    loader = DataLoader(X, Y, batch_size=SIZE, seed=1)
    epochs = [[x.tolist() for x, _ in loader] for _ in range(2)]
    loader.load_state_dict({**loader.state_dict(), "epoch": 1, "batch": 2})
    next(iter(loader))
    assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (1, 3)
    assert [x.tolist() for x, _ in loader] == epochs[1]


def test_set_epoch_begins_at_its_first_batch() -> None:
    loader = DataLoader(X, Y, batch_size=SIZE, seed=1)
    next(iter(loader))
    loader.set_epoch(3)
    assert (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (3, 0)
    loader.load_state_dict({**loader.state_dict(), "batch": 1})
    loader.set_epoch(3)
    assert len([*loader]) == len(loader)


def test_a_seed_of_0_is_a_seed() -> None:
    data = make(DataLoader(X, Y, batch_size=5, seed=0), seed=7)
    np.testing.assert_array_equal(whole(data, 4)["x"], X[permutation(0, 4, ROWS)])


def test_a_scalar_is_the_same_in_every_batch() -> None:
    loader = DataLoader({"x": X, "factor": np.float32(3)}, batch_size=SIZE, shuffle=False)
    assert [x["factor"] for (x,) in loader] == [3] * len(loader)


def test_another_batch_size_leaves_the_callers_loader_alone() -> None:
    class Rows(Loader):
        def batches(self, epoch: int, skip: int, seed: int | None) -> Iterator[tuple[Any, ...]]:
            for index in batch_indices(self.rows, self.batch_size, len(self), seed, epoch, skip):
                yield X[index], Y[index]

    loader = Rows(ROWS, SIZE, False, None, False, 0)
    data = make(loader)
    other = data.with_batch_size(3, drop_last=True)
    assert (loader.batch_size, loader.drop_last) == (SIZE, False)
    assert [batch.rows for batch in other.batches(0)] == [3] * (ROWS // 3)
    assert sum(batch.rows for batch in data.batches(0)) == ROWS
