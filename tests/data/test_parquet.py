"""Columns of Parquet and Arrow files."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnxfit
from onnxfit.errors import DataError
from tests.data.files import parquet
from tests.data.kinds import ROWS, X, make, spec, threads, whole
from tests.models import two_inputs

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


MANY = 1000


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """A thousand rows, numbered, in two files of groups of 70 and 130 rows."""
    numbers = pa.table({"n": np.arange(MANY)})
    pq.write_table(numbers[:400], tmp_path / "0.parquet", row_group_size=70)
    pq.write_table(numbers[400:], tmp_path / "1.parquet", row_group_size=130)
    return tmp_path


def seen(loader: onnxfit.ParquetLoader) -> list[np.ndarray]:
    return [x for (x,) in loader]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    ("size", "buffer"),
    [(32, 200), (200, 32), (64, 64), (1, 10**9), (7, 1), (5000, 333), (100, 130), (1000, 1000)],
)
def test_every_row_of_the_files_comes_once_an_epoch(
    many: Path, size: int, buffer: int, drop_last: bool
) -> None:
    settings = {"batch_size": size, "buffer": buffer, "drop_last": drop_last, "seed": 3}
    if drop_last and size > MANY:
        with pytest.raises(DataError, match=r"1000 rows do not fill a batch of batch_size=5000\."):
            onnxfit.ParquetLoader(many, "n", **settings)
        return
    loader = onnxfit.ParquetLoader(many, "n", **settings)
    passes = [seen(loader) for _ in range(2)]
    for batches in passes:
        assert len(batches) == len(loader)
        assert all(len(batch) == min(size, MANY) for batch in batches[:-1])
        rows = np.concatenate(batches)
        assert len(np.unique(rows)) == len(rows) == (MANY - MANY % size if drop_last else MANY)
    loader.set_epoch(1)
    np.testing.assert_equal(seen(loader), passes[1])
    assert not np.array_equal(*map(np.concatenate, passes))
    ordered = onnxfit.ParquetLoader(many, "n", shuffle=False, **settings)
    np.testing.assert_array_equal(np.concatenate(seen(ordered)), np.arange(len(rows)))


def test_rows_are_mixed_within_the_buffer_and_groups_among_all(many: Path) -> None:
    rows = np.concatenate(seen(onnxfit.ParquetLoader(many, "n", buffer=250, seed=0)))
    assert {len(np.unique(rows[i : i + 250])) for i in range(0, MANY, 250)} == {250}
    bounds = [*range(0, 400, 70), *range(400, MANY, 130)]  # where groups begin
    groups = np.searchsorted(bounds, rows, side="right")
    in_blocks = [set(groups[i : i + 250].tolist()) for i in range(0, MANY, 250)]
    assert all(2 <= len(block) <= 6 for block in in_blocks)
    assert max(map(max, in_blocks[:2])) > 6, "groups of the second file come early"
    steps = np.abs(np.diff(rows[:250]))
    assert (steps == 1).mean() < 0.05
    orders = {
        tuple(np.concatenate(seen(onnxfit.ParquetLoader(many, "n", seed=s)))[:20]) for s in range(5)
    }
    assert len(orders) == 5


def test_every_block_of_the_buffer_has_an_order_of_its_own(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": np.arange(MANY)}), tmp_path / "t.parquet")
    rows = np.concatenate(
        seen(onnxfit.ParquetLoader(tmp_path / "t.parquet", "n", buffer=300, seed=0))
    )
    blocks_of_rows = [rows[start : start + 300] - start for start in range(0, MANY, 300)]
    orders = [np.argsort(np.argsort(block))[:100] for block in blocks_of_rows]
    for number, (block, order) in enumerate(zip(blocks_of_rows, orders)):
        np.testing.assert_array_equal(np.sort(block), np.arange(300 if number < 3 else 100))
        assert not np.array_equal(block, np.sort(block))
        assert not any(np.array_equal(order, other) for other in orders[:number])


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("taken", [0, 3, 10])
def test_a_loader_of_files_goes_on_where_its_state_was_taken(
    many: Path, taken: int, prefetch: int
) -> None:
    settings = {"batch_size": 100, "buffer": 130, "prefetch": prefetch}
    expected = np.concatenate(seen(onnxfit.ParquetLoader(many, "n", seed=5, **settings)))
    loader = onnxfit.ParquetLoader(many, "n", seed=5, **settings)
    running = iter(loader)
    first = [next(running)[0] for _ in range(taken)]
    loader.close()
    other = onnxfit.ParquetLoader(many, "n", **settings)
    other.load_state_dict(loader.state_dict())
    np.testing.assert_array_equal(
        np.concatenate([*first, *seen(other)]) if taken < 10 else np.concatenate(first), expected
    )
    assert not threads()


def test_several_inputs_train_from_columns(tmp_path: Path) -> None:
    a, b = np.cos(np.arange(ROWS)), np.sin(np.arange(ROWS))
    path = parquet(tmp_path / "t.parquet", a=a, b=b, y=2 * a - b)
    trainer = onnxfit.Trainer(
        two_inputs(), loss="mse", optimizer=onnxfit.optimizers.SGD(learning_rate=0.1)
    )
    loader = onnxfit.ParquetLoader(path, {"left": "a", "right": "b"}, {"y": "y"}, batch_size=5)
    history = trainer.fit(loader, epochs=100, validation_data=loader, verbose=0)
    assert history.history["val_loss"][-1] < 1e-2 * history.history["val_loss"][0]


def test_a_table_of_arrow_feeds_by_its_columns() -> None:
    given, inputs = pa.table({"b": X[:, 1], "a": X[:, 0]}), [spec("a", "N", 1), spec("b", "N", 1)]
    arrays = whole(make(given, inputs=inputs, targets={}, purpose="prediction"))
    np.testing.assert_array_equal(arrays["a"], X[:, :1])


def test_a_pass_over_files_needs_memory_for_the_buffer_only(tmp_path: Path) -> None:
    with pq.ParquetWriter(
        tmp_path / "t.parquet", pa.schema({"x": pa.list_(pa.float32(), 256)})
    ) as writer:
        for _ in range(16):
            values = pa.array(np.zeros(2**19, np.float32))
            writer.write_table(pa.table({"x": pa.FixedSizeListArray.from_arrays(values, 256)}))
    # 32 MB, of which 1 MB is mixed
    loader = onnxfit.ParquetLoader(tmp_path / "t.parquet", "x", buffer=1024)
    pool = pa.default_memory_pool()
    before = pool.bytes_allocated()
    tracemalloc.start()
    try:
        rows, most = 0, 0
        for (x,) in loader:
            rows += len(x)
            most = max(most, pool.bytes_allocated() - before)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert rows == len(loader.files) * 16 * 2048
    assert peak < 8e6
    assert most < 16e6


def test_a_group_without_all_of_its_rows_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyarrow raises no error if the header of a damaged page has fewer rows than its group."""
    pq.write_table(pa.table({"n": np.arange(9)}), tmp_path / "table.parquet", row_group_size=3)
    read = pq.ParquetFile.iter_batches

    def without_two_rows(*arguments: Any, **settings: Any) -> Iterator[Any]:
        for batch in read(*arguments, **settings):
            yield batch.slice(2)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", without_two_rows)
    with pytest.raises(DataError, match=r"row group 0 has 1 rows, but .* metadata says 3\."):
        seen(onnxfit.ParquetLoader(tmp_path, "n", batch_size=2, shuffle=False))
