"""The order of rows, and their division into batches of a size that the model may fix."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxfit.data import DataLoader, permutation
from onnxfit.data.order import check_fixed, checked_batch_size
from onnxfit.errors import DataError, SettingError
from onnxfit.graph.spec import TensorSpec
from tests.data.kinds import FIXED, NAMED, Columns, X, Y, make, three_batches


@given(
    rows=st.integers(1, 60),
    size=st.integers(1, 70),
    seed=st.integers(-(2**63), 2**65),
    epoch=st.integers(0, 9),
    drop_last=st.booleans(),
)
@settings(max_examples=60)
def test_every_row_comes_once_an_epoch(
    rows: int, size: int, seed: int, epoch: int, drop_last: bool
) -> None:
    x = np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)
    settings = {
        "shuffle": True,
        "batch_size": size,
        "seed": seed,
        "drop_last": drop_last,
        "targets": {},
        "purpose": "prediction",
    }
    if drop_last and size > rows:
        with pytest.raises(DataError, match="drop_last=True would drop"):
            make(x, **settings)
        return
    data = make(x, **settings)
    batches = [batch.arrays()["x"] for batch in data.batches(epoch)]
    assert len(batches) == data.steps
    seen = np.concatenate(batches)[:, 0] / 2
    assert len(set(seen)) == len(seen) == (rows - rows % size if drop_last else rows)
    assert all(len(batch) == size for batch in batches[:-1])
    again = (
        np.concatenate([batch.arrays()["x"] for batch in make(x, **settings).batches(epoch)])[:, 0]
        / 2
    )
    np.testing.assert_array_equal(seen, again)


def test_the_order_depends_on_seed_and_epoch() -> None:
    orders = {tuple(permutation(seed, epoch, 50)) for seed in (0, 1, 2**40) for epoch in range(4)}
    assert len(orders) == 12
    assert tuple(range(50)) not in orders


def in_python(seed: int, epoch: int, rows: int, block: int) -> list[int]:
    """Return the order by whole numbers of Python, as docs/data.md defines it."""

    def mix(x: int) -> int:
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        return x ^ x >> 16

    def key(start: int) -> int:
        for number in (seed, epoch, block):
            for word in (number % 2**32, number // 2**32 % 2**32):
                start = mix((start + word + 0x9E3779B9) % 2**32)
        return start

    return sorted(range(rows), key=lambda row: mix((mix((row + key(0)) % 2**32) + key(1)) % 2**32))


@given(
    seed=st.integers(-(2**63), 2**65),
    epoch=st.integers(0, 2**40),
    rows=st.integers(0, 40),
    block=st.integers(0, 9),
)
@settings(max_examples=40)
def test_the_order_is_that_of_the_documentation(
    seed: int, epoch: int, rows: int, block: int
) -> None:
    assert permutation(seed, epoch, rows, block).tolist() == in_python(seed, epoch, rows, block)


def test_every_order_comes_equally_often() -> None:
    orders = [tuple(permutation(s, e, 4)) for s in range(30) for e in range(30)]
    counts = Counter(orders)
    assert len(counts) == 24
    expected = len(orders) / 24
    assert 6 < sum((n - expected) ** 2 / expected for n in counts.values()) < 56  # 1e-4 quantiles


def test_a_row_comes_anywhere_and_after_any_other() -> None:
    orders = np.array([permutation(seed, 1, 40) for seed in range(1000)])
    counts = np.array([np.bincount(column, minlength=40) for column in orders.T])
    assert 0.85 < ((counts - 25) ** 2 / 25).sum() / 39**2 < 1.15
    assert 900 < (np.diff(orders, axis=1) == 1).sum() * 40 / 39 < 1100
    others = np.array([permutation(seed, 2, 40) for seed in range(1000)])
    assert 900 < (orders == others).sum() < 1100


def test_a_fixed_batch_dimension_needs_batches_of_that_size() -> None:
    with pytest.raises(DataError, match=r"x: float32\[4, 2\] is fixed.*Pass batch_size=4, and drop the last 2 rows with "
                       r"DataLoader\(x, y, batch_size=4, drop_last=True\)"):  # fmt: skip
        make(X, Y, inputs=FIXED, batch_size=4)
    with pytest.raises(
        DataError,
        match=(
            r"every batch needs 4 rows, but got batches of 5 rows from 8 rows\. Pass"
            r" batch_size=4\. To allow any batch size, use onnxfit\.dynamic_batch\(model\)"
        ),
    ):
        make(X[:8], Y[:8], inputs=FIXED, batch_size=5)
    with pytest.raises(DataError, match="has only 3 rows"):
        make(X[:3], Y[:3], inputs=FIXED, batch_size=4)
    with pytest.raises(DataError, match="batch_size=4"):
        make(Columns(NAMED), inputs=FIXED, batch_size=4)
    with pytest.raises(
        DataError, match=r"In batch 2 .* this batch has 2 rows\. Pass batches of 4.*drop_last=True"
    ):
        list(make(three_batches(), inputs=FIXED).batches(0))


@pytest.mark.parametrize("rows", [1, 8])
def test_a_batch_dimension_of_0_has_no_rows(rows: int) -> None:
    fixed = TensorSpec("x", np.dtype(np.float32), (0, 4))
    with pytest.raises(DataError, match=r"batch dimension of input x: float32\[0, 4\] is 0"):
        check_fixed(fixed, rows, 4, False, "training")


def test_a_fixed_batch_dimension_that_is_met() -> None:
    for data in (
        make(X[:8], Y[:8], inputs=FIXED, batch_size=4),
        make(X[:4], Y[:4], inputs=FIXED, batch_size=2**62),
        make(DataLoader(X, Y, batch_size=4, drop_last=True), inputs=FIXED),
        make(three_batches()[:2], inputs=FIXED),
    ):
        assert {batch.rows for batch in data.batches(0)} == {4}


def test_blocks_of_an_epoch_have_orders_of_their_own() -> None:
    orders = [permutation(1, 2, 50, block).tolist() for block in range(3)]
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == [*range(50)] for order in orders)
    assert permutation(1, 2, 50, 1).tolist() == orders[1]


@pytest.mark.parametrize("size", [0, -3])
def test_a_batch_has_at_least_one_row(size: int) -> None:
    with pytest.raises(SettingError, match=f"batch_size must be >= 1, got {size}"):
        checked_batch_size(size)


@pytest.mark.parametrize(("rows", "size"), [(4, 4), (4, 32), (8, 4)])
def test_a_fixed_batch_may_be_all_of_the_data(rows: int, size: int) -> None:
    fixed = TensorSpec("x", np.dtype(np.float32), (4, 1))
    check_fixed(fixed, rows, size, False, "training")
    with pytest.raises(DataError, match="every batch needs 4 rows"):
        check_fixed(fixed, 8, size + 1, False, "training")
