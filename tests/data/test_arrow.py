"""Columns of files become arrays, or one error names file and column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnxfit
from onnxfit.errors import DataError, SettingError
from tests.data.files import columns, parquet, table
from tests.data.kinds import FIXED, X, Y, make, threads

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def test_columns_become_arrays(tmp_path: Path) -> None:
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(
        np.arange(60, dtype=np.float32).reshape(10, 2, 3)
    )
    path = parquet(
        tmp_path / "t.parquet",
        4,
        lists=[[1.0, 2.0]] * 10,
        large=pa.array([[1, 2]] * 10, pa.large_list(pa.int32())),
        fixed=pa.array([[1.0, 2.0]] * 10, pa.list_(pa.float64(), 2)),
        nested=[[[1, 2, 3], [4, 5, 6]]] * 10,
        tensors=tensors,
        yes=[True, False] * 5,
        ids=np.arange(10),
        coded=pa.array([7, 8] * 5).dictionary_encode(),
    )

    def first(inputs: Any, **settings: Any) -> Any:
        return next(
            iter(onnxfit.ParquetLoader(path, inputs, shuffle=False, batch_size=6, **settings))
        )[0]

    np.testing.assert_array_equal(first("a"), X[:6, 0], strict=True)
    np.testing.assert_array_equal(first("a", dtype=None), X[:6, 0].astype(np.float64), strict=True)
    np.testing.assert_array_equal(
        first("b", dtype="float64"), X[:6, 1].astype(np.float64), strict=True
    )
    np.testing.assert_array_equal(first(["b"]), X[:6, 1:], strict=True)
    for name in ("lists", "fixed"):
        np.testing.assert_array_equal(
            first(name), np.tile(np.array([1, 2], np.float32), (6, 1)), strict=True
        )
    np.testing.assert_array_equal(
        first("large"), np.tile(np.array([1, 2], np.int32), (6, 1)), strict=True
    )
    np.testing.assert_array_equal(
        first("nested"), np.tile(np.arange(1, 7).reshape(2, 3), (6, 1, 1)), strict=True
    )
    np.testing.assert_array_equal(
        first("tensors"), np.arange(36, dtype=np.float32).reshape(6, 2, 3), strict=True
    )
    np.testing.assert_array_equal(first("yes"), np.tile([True, False], 3), strict=True)
    np.testing.assert_array_equal(first("ids"), np.arange(6), strict=True)
    np.testing.assert_array_equal(first("coded"), np.tile([7, 8], 3), strict=True)
    beside = np.stack([np.arange(6), np.full(6, 1), np.full(6, 2), X[:6, 0]], axis=1).astype(
        np.float32
    )
    np.testing.assert_array_equal(first(["ids", "lists", "a"]), beside, strict=True)
    both = first({"left": "a", "right": ["b"]})
    np.testing.assert_array_equal(both["left"], X[:6, 0])
    np.testing.assert_array_equal(both["right"], X[:6, 1:])


COLUMNS_REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "no column": ({}, {"inputs": ["a", "z"]}, DataError, r"has no column 'z'\. Its columns are 'unused', 'a', 'b'"),
    "no label": ({}, {"labels": "label"}, DataError, "has no column 'label'"),
    "text": ({}, {"inputs": "unused"}, DataError, r"column 'unused' of '.*t\.parquet' has element type object"),
    "nulls": ({"a": [1.0, None] * 5}, {}, DataError, r"column 'a' of '.*t\.parquet' has nulls"),
    "nulls in lists": ({"a": [[1.0, None]] * 10}, {"inputs": "a"}, DataError, "column 'a' .* has nulls"),
    "ragged": ({"a": [[1.0], [1.0, 2.0]] * 5}, {"inputs": "a"}, DataError, "column 'a' .* lists of different lengths: 1, 2"),
    "ragged over groups": ({"a": [[1.0]] * 3 + [[1.0, 2.0]] * 7}, {"inputs": "a", "buffer": 9, "shuffle": False}, DataError,
                           r"column 'a' has rows of different shapes: \(1,\), \(2,\)"),
    "too large": ({"a": [1e300] * 10}, {}, DataError, r"column 'a' .*the range of float32\."),
    "weights alone": ({}, {"labels": None, "sample_weight": "w"}, DataError, r"without labels\."),
    "buffer": ({}, {"buffer": 0}, SettingError, "needs buffer >= 1, got 0"),
    "batch size": ({}, {"batch_size": 0}, SettingError, r"batch_size must be >= 1, got 0\."),
    "prefetch": ({}, {"prefetch": -1}, SettingError, r"0, got -1\."),
    "dtype": ({}, {"dtype": "int64"}, SettingError, r"type, got int64\."),
    "no inputs": ({}, {"inputs": []}, SettingError, "got an empty list of columns"),
}  # fmt: skip


@pytest.mark.parametrize("case", COLUMNS_REFUSED)
def test_columns_that_are_refused(case: str, tmp_path: Path) -> None:
    written, arguments, error, message = COLUMNS_REFUSED[case]
    path = parquet(tmp_path / "t.parquet", **written)
    with pytest.raises(error, match=message):
        list(onnxfit.ParquetLoader(path, **{"inputs": ["a", "b"], "labels": "y", **arguments}))
    assert not threads()


def test_files_of_columns_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"text")
    (tmp_path / "broken.arrow").write_bytes(b"text")
    for name in ("broken.parquet", "broken.arrow"):
        with pytest.raises(DataError, match=rf"{name}' cannot be read: "):
            columns(tmp_path / name)
    with pytest.raises(DataError, match=r"is unknown\. Expected one of \.parquet"):
        columns(tmp_path / "t.csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"Found no rows in '.*empty'"):
        columns(tmp_path / "empty")
    pq.write_table(table()[:0], tmp_path / "none.parquet")
    with pytest.raises(DataError, match=r"Found no rows in '.*none\.parquet'"):
        columns(tmp_path / "none.parquet")
    for name in ("nowhere.parquet", "nowhere.arrow"):
        with pytest.raises(DataError, match="nowhere"):
            columns(tmp_path / name)
    loader = columns(parquet(tmp_path / "t.parquet", 100), batch_size=4, seed=0)
    with pytest.raises(
        DataError,
        match=(
            r"Pass batch_size=4, and drop the last 2 rows with ParquetLoader\(\.\.\.,"
            r" batch"
        ),
    ):
        make(loader, inputs=FIXED)
    with pytest.raises(SettingError, match=r"ParquetLoader returns batches.*Remove the argument y"):
        make(loader, Y)
    good = (tmp_path / "t.parquet").read_bytes()
    # the end, which was read first, is whole
    (tmp_path / "t.parquet").write_bytes(bytes(200) + good[200:])
    with pytest.raises(DataError, match=r"t\.parquet' cannot be read"):
        list(loader)
