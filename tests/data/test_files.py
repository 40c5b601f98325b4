"""Data on disk: mapped arrays, columns of Parquet and Arrow files and folders of images train as
arrays in memory do, without being there.
"""

from __future__ import annotations

import sys
import threading
import traceback
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnxfit
from onnxfit.data import DataLoader, Prefetch, permutation, validation_split
from onnxfit.data.mapped import is_mapped, open_paths
from onnxfit.errors import DataError, InstallationError, SettingError
from tests.data.test_data import (
    FIXED,
    NAMED,
    ROWS,
    SIZE,
    W,
    X,
    Y,
    make,
    spec,
    threads,
    three_batches,
    whole,
    with_nan,
)
from tests.models import convolutional, linear, two_inputs
from tests.test_readme import blocks

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
Image = pytest.importorskip("PIL.Image")

ROOT = Path(__file__).resolve().parents[2]


# ---------------------------------------------------------------------- the same rows in files


def saved(path: Path, array: np.ndarray) -> Path:
    np.save(path, array)
    return path


def archive(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


def mapped(path: Path, array: np.ndarray) -> np.ndarray:
    return np.load(saved(path, array), mmap_mode="r")


def table(**columns: Any) -> Any:
    columns = {
        "a": X[:, 0].astype(np.float64),
        "b": X[:, 1],
        "y": Y[:, 0].astype(np.float64),
        "w": W,
    } | columns
    return pa.table({"unused": ["text"] * len(columns["a"])} | columns)


def parquet(path: Path, rows: int = 3, **columns: Any) -> Path:
    pq.write_table(table(**columns), path, row_group_size=rows)
    return path


def arrow(path: Path, rows: int = 3, compression: str | None = None) -> Path:
    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_file(
            file, table().schema, options=pa.ipc.IpcWriteOptions(compression=compression)
        ) as writer,
    ):
        writer.write_table(table(), rows)
    return path


def columns(paths: Any, **settings: Any) -> onnxfit.ParquetLoader:
    return onnxfit.ParquetLoader(
        paths, ["a", "b"], "y", "w", **{"batch_size": SIZE, "shuffle": False, **settings}
    )


def halves(folder: Path) -> Path:
    (folder / "part=1").mkdir()
    (folder / "_SUCCESS").touch()
    pq.write_table(table()[:7], folder / "0.parquet", row_group_size=2)
    pq.write_table(table()[7:], folder / "part=1" / "1.pq")
    return folder


KINDS: dict[str, Callable[[Path], tuple[Any, ...]]] = {
    "paths": lambda at: (saved(at / "x.npy", X), saved(at / "y.npy", Y), saved(at / "w.npy", W)),
    "paths as text": lambda at: (str(saved(at / "x.npy", X)), str(saved(at / "y.npy", Y)), W),
    "maps": lambda at: (mapped(at / "x.npy", X), mapped(at / "y.npy", Y[:, 0]), mapped(at / "w.npy", W[:, None])),
    "maps of other types": lambda at: (mapped(at / "x.npy", X.astype(np.int64)), mapped(at / "y.npy", Y.astype(np.float64)), W),
    "map of Fortran's layout": lambda at: (mapped(at / "x.npy", np.asfortranarray(X)), Y, W),
    "a view of a map": lambda at: (np.asarray(mapped(at / "x.npy", np.repeat(X, 2, axis=0)))[::2], Y, W),
    "bytes of a map": lambda at: (np.frombuffer(np.memmap(saved(at / "x.npy", X), mode="r", offset=128), "f4").reshape(X.shape), Y, W),
    "map beside lists": lambda at: (mapped(at / "x.npy", X), Y.tolist(), W.tolist()),
    "labels mapped": lambda at: (X, saved(at / "y.npy", Y), W),
    "dict of paths": lambda at: ({"x": saved(at / "x.npy", X)}, {"out": saved(at / "y.npy", Y)}, W),
    "list of paths": lambda at: ([str(saved(at / "x.npy", X))], [saved(at / "y.npy", Y)], W),
    "archive": lambda at: (archive(at / "all.npz", **NAMED),),
    "archive of Fortran's layout": lambda at: (archive(at / "all.npz", **{n: np.asfortranarray(a) for n, a in NAMED.items()}),),
    "archives": lambda at: (archive(at / "x.npz", x=X), archive(at / "y.npz", out=Y), W),
    "loader of paths": lambda at: (DataLoader(saved(at / "x.npy", X), saved(at / "y.npy", Y), W, batch_size=SIZE, shuffle=False),),
    "prefetching loader of maps": lambda at: (DataLoader(mapped(at / "x.npy", X), Y, W, batch_size=SIZE, shuffle=False, prefetch=2),),
    "parquet": lambda at: (columns(parquet(at / "t.parquet")),),
    "parquet in blocks": lambda at: (columns([str(parquet(at / "t.parquet"))], buffer=4, prefetch=0),),
    "parquet in one group": lambda at: (columns(parquet(at / "t.parquet", 100), buffer=3),),
    "parquet folder": lambda at: (columns(halves(at)),),
    "arrow": lambda at: (columns(arrow(at / "t.arrow")),),
    "feather": lambda at: (columns(arrow(at / "t.feather", 4, "zstd"), buffer=1),),
}  # fmt: skip
kinds = pytest.mark.parametrize("kind", KINDS)
# of which the order of rows is the same permutation as that of arrays in memory
ARRAYS = [
    kind for kind in KINDS if not any(word in kind for word in ("parquet", "arrow", "feather"))
]


@kinds
def test_files_give_the_batches_of_arrays(kind: str, tmp_path: Path) -> None:
    with make(*KINDS[kind](tmp_path)) as data:
        assert (data.rows, data.steps, data.batch_size, data.re_iterable) == (ROWS, 3, SIZE, True)
        for _ in range(2):
            batches = list(data.batches(0))
            assert [batch.rows for batch in batches] == [4, 4, 2]
            for batch, (x, y, w) in zip(batches, three_batches()):
                arrays = batch.arrays()
                buffers = {name: np.zeros_like(array) for name, array in arrays.items()}
                batch.write(buffers)
                for name, expected in (("x", x), ("y_true/out", y), ("sample_weight", w)):
                    np.testing.assert_array_equal(arrays.pop(name), expected, strict=True)
                    np.testing.assert_array_equal(buffers[name], expected, strict=True)
                assert not arrays
            assert batches[0].signature == batches[1].signature != batches[2].signature
    assert not threads()


@kinds
def test_skipping_batches_of_files_is_leaving_out_the_first(kind: str, tmp_path: Path) -> None:
    given = KINDS[kind](tmp_path)
    if isinstance(given[0], onnxfit.data.Loader):
        given[0].shuffle = True
    with make(*given, shuffle=True) as data:
        full = [batch.arrays() for batch in data.batches(3)]
        for skip in (0, 1, 2, 3):
            np.testing.assert_equal(
                [batch.arrays() for batch in data.batches(3, skip)], full[skip:]
            )


@pytest.mark.parametrize("kind", ARRAYS)
def test_rows_of_mapped_arrays_are_shuffled_as_those_in_memory(kind: str, tmp_path: Path) -> None:
    given = KINDS[kind](tmp_path)
    if isinstance(given[0], DataLoader):
        given[0].shuffle = True
    with make(*given, shuffle=True, seed=5) as data:
        for epoch in (0, 3):
            arrays, order = whole(data, epoch), permutation(5, epoch, ROWS)
            np.testing.assert_array_equal(arrays["x"], X[order])
            np.testing.assert_array_equal(arrays["y_true/out"], Y[order])
            np.testing.assert_array_equal(arrays["sample_weight"], W[order])


@kinds
def test_files_are_predicted_in_their_order(kind: str, tmp_path: Path) -> None:
    given = KINDS[kind](tmp_path)
    if isinstance(given[0], onnxfit.data.Loader):
        given[0].shuffle = True
    with make(given[0], targets={}, purpose="prediction") as data:
        arrays = whole(data)
    np.testing.assert_array_equal(arrays.pop("x"), X)
    assert not arrays


@pytest.mark.parametrize("kind", [kind for kind in ARRAYS if "loader" not in kind])
def test_files_are_cut_to_validate(kind: str, tmp_path: Path) -> None:
    given = (*KINDS[kind](tmp_path), None, None)[:3]
    for parts, rows in zip(validation_split(*given, 0.3), (slice(0, 7), slice(7, 10))):
        arrays = whole(make(*parts))
        np.testing.assert_array_equal(arrays["x"], X[rows])
        np.testing.assert_array_equal(arrays["y_true/out"], Y[rows])


@pytest.mark.parametrize("kind", ["paths", "archive", "parquet", "arrow"])
def test_weights_trained_on_files_are_those_trained_on_arrays(kind: str, tmp_path: Path) -> None:
    def trained(*data: Any) -> np.ndarray:
        trainer = onnxfit.Trainer(linear(2), loss="mse", optimizer="sgd", seed=1)
        trainer.fit(*data, epochs=2, batch_size=SIZE, shuffle=False, verbose=0)
        return trainer.get_weights()["w"]

    given = KINDS[kind](tmp_path)
    if kind == "archive":
        given = (archive(tmp_path / "named.npz", x=X, y=Y, sample_weight=W),)
    np.testing.assert_array_equal(trained(*given), trained(X, Y, W))


# ---------------------------------------------------------------------- mapped arrays


def test_what_is_mapped_and_what_is_a_copy_of_it(tmp_path: Path) -> None:
    array = mapped(tmp_path / "x.npy", X)
    for view in (
        array,
        array[2:],
        array.T,
        np.asarray(array),
        np.asarray(array)[:, 0],
        array.reshape(-1),
        array.view(np.int32),
    ):
        assert is_mapped(view)
    for copy in (
        X,
        X[2:],
        array.copy(),
        array + 1,
        array[[1, 2]],
        np.array(array),
        [array],
        None,
        3.0,
    ):
        assert not is_mapped(copy)
    assert all(map(is_mapped, open_paths(archive(tmp_path / "all.npz", **NAMED)).values()))
    names = ["cat", "dog.npy.txt"]
    assert open_paths(names) is names


def test_an_archives_arrays_are_those_numpy_reads(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.random((5, 3, 2)), "b/c": np.asfortranarray(rng.random((4, 3)).astype(">f4")), "ü" * 90: np.arange(7, dtype=np.int8),
        "scalar": np.float32(3.5), "empty": np.zeros((0, 3), np.float32), "yes": np.array([True, False]),
    }  # fmt: skip
    for name, found in open_paths(archive(tmp_path / "all.npz", **arrays)).items():
        np.testing.assert_array_equal(found, arrays.pop(name), strict=True)
    assert not arrays


def test_a_pass_over_a_map_needs_memory_for_some_batches_only(tmp_path: Path) -> None:
    """A quarter of a gigabyte, as doubles, which is cast, checked for NaN and shuffled: a copy
    would have 128 million bytes.
    """
    rows, features, batch = 8192, 4096, 64
    np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float64, (rows, features))[-1] = 1.0
    np.lib.format.open_memmap(tmp_path / "y.npy", "w+", np.int64, (rows, 1))[-1] = 2
    trainer = onnxfit.Trainer(linear(features), loss="mse", optimizer="sgd")
    # sessions are made
    trainer.train_on_batch(
        np.zeros((batch, features), np.float32), np.zeros((batch, 1), np.float32)
    )
    settings = {"verbose": 0, "validation_split": 0.25, "batch_size": batch, "epochs": 1}
    tracemalloc.start()
    try:
        with pytest.warns(UserWarning, match="float64"):
            trainer.fit(tmp_path / "x.npy", tmp_path / "y.npy", **settings)
        loader = DataLoader(tmp_path / "x.npy", tmp_path / "y.npy", batch_size=batch, prefetch=2)
        assert len(list(map(len, loader))) == 128
        with pytest.warns(UserWarning, match="float64"):
            evaluated = trainer.evaluate(loader)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 24e6, "a batch is 2 MB as doubles and 1 MB as floats"
    assert evaluated["loss"] == pytest.approx(4 / rows, rel=1e-5), (
        "all weights are 0, for only the last row, which validates, is not"
    )


def test_maps_are_checked_before_the_first_step_and_batch_by_batch(tmp_path: Path) -> None:
    x, y = mapped(tmp_path / "x.npy", X), saved(tmp_path / "y.npy", Y)
    with pytest.raises(DataError, match=r"unequal numbers of rows: x has 10, y for out has 9"):
        make(x, Y[1:])
    with pytest.raises(DataError, match=r"x: float32\[N, 2\] got an array of shape \(1, 1\)"):
        make(y, Y)
    with pytest.raises(DataError, match="no labels"):
        make(x)
    with pytest.raises(DataError, match="empty"):
        make(
            {"x": open_paths(archive(tmp_path / "none.npz", x=X[:0]))["x"]},
            mapped(tmp_path / "y.npy", Y)[:0],
        )
    with pytest.raises(DataError, match="Pass batch_size=4; drop_last=True"):
        make(x, Y, inputs=FIXED, batch_size=4)
    with pytest.raises(DataError, match="10 rows are fewer than batch_size=11"):
        make(x, Y, batch_size=11, drop_last=True)
    with pytest.raises(SettingError, match="class_weight or sample_weight"):
        make(x, Y, W, class_weight={0: 1.0})
    data = make(mapped(tmp_path / "nan.npy", with_nan(X, 7)), Y)
    with pytest.raises(
        DataError, match=r"In batch 1 of the training data: x: float32\[N, 2\] is NaN in row 3"
    ):
        list(data.batches(0))
    with pytest.warns(UserWarning, match="'x' is float64 and was converted to float32") as record:
        whole(make(mapped(tmp_path / "double.npy", X.astype(np.float64)), Y))
    assert len(record) == 1, "not for every batch"


def test_class_weights_and_several_inputs_of_maps(tmp_path: Path) -> None:
    classes = np.arange(ROWS) % 2
    arrays = whole(
        make(
            mapped(tmp_path / "x.npy", X), saved(tmp_path / "y.npy", classes), class_weight={1: 3.0}
        )
    )
    np.testing.assert_array_equal(arrays["sample_weight"], np.where(classes == 1, 3, 1))
    both = [spec("a", "N", 2), spec("b", "N", 1), spec("scale")]
    given = {"a": tmp_path / "x.npy", "b": Y[:, 0], "scale": np.float32(0.5)}
    arrays = [
        batch.arrays()
        for batch in make(given, inputs=both, targets={}, purpose="prediction").batches(0)
    ]
    np.testing.assert_array_equal(np.concatenate([batch["b"] for batch in arrays]), Y)
    assert [batch["scale"] for batch in arrays] == [0.5] * 3
    arrays = whole(make([tmp_path / "x.npy", Y], inputs=both[:2], targets={}, purpose="prediction"))
    np.testing.assert_array_equal(arrays["a"], X)


def test_files_that_cannot_be_mapped(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "small.npz", x=X)
    with pytest.raises(DataError, match=r"small.npz' is compressed.*np\.savez "):
        make(tmp_path / "small.npz", Y)
    for name, contents in (("objects", np.array([{}, []], object)),):
        np.save(tmp_path / f"{name}.npy", contents)
        np.savez(tmp_path / f"{name}.npz", x=contents)
        for suffix in (".npy", ".npz"):
            with pytest.raises(
                DataError, match=f"{name}{suffix}' cannot be mapped into memory: .*Python objects"
            ):
                make(tmp_path / f"{name}{suffix}", Y)
    (tmp_path / "broken.npy").write_bytes(b"text")
    (tmp_path / "broken.npz").write_bytes(b"text")
    for name in ("broken.npy", "broken.npz"):
        with pytest.raises(DataError, match=f"{name}' cannot be mapped"):
            DataLoader(tmp_path / name)
    with pytest.raises(DataError, match=r"table.csv' is a path.*ParquetLoader.*ImageFolder"):
        make(X, tmp_path / "table.csv")
    with pytest.raises(FileNotFoundError, match=r"nowhere\.npy"):
        make("nowhere.npy", Y)


# ---------------------------------------------------------------------- Parquet and Arrow

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
        with pytest.raises(DataError, match="1000 rows are fewer than batch_size=5000"):
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


COLUMNS_REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "no column": ({}, {"inputs": ["a", "z"]}, DataError, r"t\.parquet' has no column 'z'; it has 'unused', 'a', 'b'"),
    "no label": ({}, {"labels": "label"}, DataError, "has no column 'label'"),
    "text": ({}, {"inputs": "unused"}, DataError, r"column 'unused' of '.*t\.parquet' has element type object"),
    "nulls": ({"a": [1.0, None] * 5}, {}, DataError, r"column 'a' of '.*t\.parquet' has nulls"),
    "nulls in lists": ({"a": [[1.0, None]] * 10}, {"inputs": "a"}, DataError, "column 'a' .* has nulls"),
    "ragged": ({"a": [[1.0], [1.0, 2.0]] * 5}, {"inputs": "a"}, DataError, "column 'a' .* lists of different lengths: 1, 2"),
    "ragged over groups": ({"a": [[1.0]] * 3 + [[1.0, 2.0]] * 7}, {"inputs": "a", "buffer": 9, "shuffle": False}, DataError,
                           r"column 'a' has rows of different shapes: \(1,\), \(2,\)"),
    "too large": ({"a": [1e300] * 10}, {}, DataError, r"column 'a' .*beyond the range of float32"),
    "weights alone": ({}, {"labels": None, "sample_weight": "w"}, DataError, "weights without labels"),
    "buffer": ({}, {"buffer": 0}, SettingError, "needs buffer >= 1, got 0"),
    "batch size": ({}, {"batch_size": 0}, SettingError, "batch_size is at least 1, got 0"),
    "prefetch": ({}, {"prefetch": -1}, SettingError, "0 or more, got -1"),
    "dtype": ({}, {"dtype": "int64"}, SettingError, "type of floats, got int64"),
    "no inputs": ({}, {"inputs": []}, SettingError, "names of columns wherever"),
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
    with pytest.raises(DataError, match=r"t\.csv' is none of \.parquet"):
        columns(tmp_path / "t.csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"No rows in '.*empty'"):
        columns(tmp_path / "empty")
    pq.write_table(table()[:0], tmp_path / "none.parquet")
    with pytest.raises(DataError, match=r"No rows in '.*none\.parquet'"):
        columns(tmp_path / "none.parquet")
    for name in ("nowhere.parquet", "nowhere.arrow"):
        with pytest.raises(FileNotFoundError, match="nowhere"):
            columns(tmp_path / name)
    loader = columns(parquet(tmp_path / "t.parquet", 100), batch_size=4, seed=0)
    with pytest.raises(
        DataError,
        match=(
            r"Pass batch_size=4; drop_last=True leaves out the last 2 rows: ParquetLoader\(\.\.\.,"
            r" batch"
        ),
    ):
        make(loader, inputs=FIXED)
    with pytest.raises(SettingError, match=r"ParquetLoader gives batches.*leave out y"):
        make(loader, Y)
    good = (tmp_path / "t.parquet").read_bytes()
    # the end, which was read first, is whole
    (tmp_path / "t.parquet").write_bytes(bytes(200) + good[200:])
    with pytest.raises(DataError, match=r"t\.parquet' cannot be read"):
        list(loader)


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


# ---------------------------------------------------------------------- folders of images

COLOURS = {"cat": (200, 0, 100), "dog": (0, 255, 51)}


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Four of cats, two of dogs, each of one colour, the first channel of which tells them apart."""
    root = tmp_path / "pictures"
    for name, number in (("dog", 2), ("cat", 4)):
        (root / name / "more").mkdir(parents=True)
        for i in range(number):
            folder = root / name / "more" if i == 0 else root / name
            red, green, blue = COLOURS[name]
            Image.new("RGB", (5 + i, 9), (red + i, green, blue)).save(
                folder / (f"{i}.PNG" if i else "0.bmp")
            )
    (root / "cat" / "notes.txt").write_text("no image")
    (root / "cat" / ".hidden.png").write_text("no image")
    (root / ".cache").mkdir()
    (root / "beside.png").write_text("no image")
    return root


def test_folders_are_classes_and_images_nchw(pictures: Path) -> None:
    loader = onnxfit.ImageFolder(pictures, (3, 2), batch_size=4, shuffle=False)
    assert loader.classes == ("cat", "dog")
    assert loader.labels.tolist() == [0, 0, 0, 0, 1, 1]
    assert [file.name for file in loader.files] == [
        "1.PNG",
        "2.PNG",
        "3.PNG",
        "0.bmp",
        "1.PNG",
        "0.bmp",
    ]
    (x, y), (_, second) = loader
    assert (x.shape, x.dtype, y.dtype) == ((4, 3, 3, 2), np.float32, np.int64)
    assert (y.tolist(), second.tolist()) == ([0] * 4, [1] * 2)
    np.testing.assert_allclose(x[0, :, 1, 1], np.array([201, 0, 100]) / 255, rtol=1e-6)
    assert not threads()


def test_images_of_their_own_size_are_their_values(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)
    Image.fromarray(values).save(tmp_path / "0.png")
    mean, std = np.array([0.1, 0.2, 0.3], np.float32), np.array([0.5, 1, 2], np.float32)
    ((x,),) = onnxfit.ImageFolder(tmp_path, (4, 6), mean=mean.tolist(), std=std.tolist())
    np.testing.assert_allclose(
        x[0], ((values / 255.0 - mean) / std).transpose(2, 0, 1), rtol=1e-5, atol=1e-6
    )
    ((raw,),) = onnxfit.ImageFolder(tmp_path, (4, 6), std=1 / 255)
    np.testing.assert_allclose(raw[0], values.transpose(2, 0, 1), rtol=1e-6)
    ((grey,),) = onnxfit.ImageFolder(tmp_path, (4, 6), channels=1)
    np.testing.assert_allclose(grey[0, 0] * 255, values @ [0.299, 0.587, 0.114], atol=1)
    ((alpha,),) = onnxfit.ImageFolder(tmp_path, (4, 6), channels=4)
    assert alpha.shape == (1, 4, 4, 6)
    np.testing.assert_array_equal(alpha[0, 3], 1)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr"])
def test_images_of_every_mode_are_converted(mode: str, tmp_path: Path) -> None:
    image = Image.new("RGB", (3, 3), (255, 255, 255)).convert(mode)
    settings = {"transparency": bytes([0] * 10)} if mode == "P" else {}
    image.save(tmp_path / ("0.tif" if mode in ("CMYK", "YCbCr") else "0.png"), **settings)
    for channels in (1, 3):
        ((x,),) = onnxfit.ImageFolder(tmp_path, (3, 3), channels=channels)
        np.testing.assert_allclose(x, np.ones((1, channels, 3, 3)), atol=0.01)


def test_a_cropped_image_keeps_its_proportions(tmp_path: Path) -> None:
    values = np.zeros((10, 30), np.uint8)
    values[:, 10:20] = 255  # the middle third
    Image.fromarray(values).save(tmp_path / "0.png")
    ((cropped,),) = onnxfit.ImageFolder(tmp_path, (5, 5), channels=1, crop=True)
    np.testing.assert_allclose(cropped, 1, atol=0.13)  # the filter sees a little beyond the edge
    ((squeezed,),) = onnxfit.ImageFolder(tmp_path, (5, 5), channels=1)
    assert squeezed[0, 0, 0, 0] == 0
    ((wide,),) = onnxfit.ImageFolder(tmp_path, (2, 6), channels=1)
    np.testing.assert_allclose(wide[0, 0], np.tile([0, 0, 1, 1, 0, 0], (2, 1)), atol=0.3)


def test_images_are_shuffled_by_seed_and_epoch_and_predicted_in_order(pictures: Path) -> None:
    loader = onnxfit.ImageFolder(pictures, (2, 2), batch_size=4, seed=3)
    plain = np.concatenate([x for x, _ in onnxfit.ImageFolder(pictures, (2, 2), shuffle=False)])
    for epoch in range(2):
        x, y = (np.concatenate(part) for part in zip(*loader))
        order = permutation(3, epoch, 6)
        np.testing.assert_array_equal(x, plain[order])
        np.testing.assert_array_equal(y, loader.labels[order])
    with make(loader, inputs=[spec("x", "N", 3, 2, 2)], targets={}, purpose="prediction") as data:
        np.testing.assert_array_equal(whole(data)["x"], plain)


def test_classes_may_be_chosen_and_ordered(pictures: Path) -> None:
    (pictures / "bird").mkdir()
    assert onnxfit.ImageFolder(pictures, (2, 2)).labels.tolist() == [
        1,
        1,
        1,
        1,
        2,
        2,
    ], "a folder without images has its number"
    chosen = onnxfit.ImageFolder(pictures, (2, 2), classes=["dog", "cat"])
    assert chosen.classes == ("dog", "cat")
    assert chosen.labels.tolist() == [0, 0, 1, 1, 1, 1]
    with pytest.raises(DataError, match="has no folder 'fish'; there are 'bird', 'cat', 'dog'"):
        onnxfit.ImageFolder(pictures, (2, 2), classes=["cat", "fish"])


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_image_that_cannot_be_decoded_is_named(pictures: Path, prefetch: int) -> None:
    def fails(message: str) -> None:
        with pytest.raises(DataError, match=message):
            list(onnxfit.ImageFolder(pictures, (2, 2), prefetch=prefetch))
        images = make(
            onnxfit.ImageFolder(pictures, (2, 2), prefetch=prefetch),
            inputs=[spec("x", "N", 3, 2, 2)],
        )
        with images as data, pytest.raises(DataError, match=message):
            list(data.batches(0))
        assert not threads()

    broken = pictures / "cat" / "1.PNG"
    whole_file = broken.read_bytes()
    broken.write_bytes(whole_file[:-25])
    fails(r"1\.PNG' cannot be read as an image: .*trunc")
    broken.write_bytes(b"text")
    fails(r"1\.PNG' cannot be read as an image: cannot identify")
    Image.fromarray(np.full((2, 2), 60000, np.uint16)).save(broken, "png")
    fails(r"1\.PNG' has more than 8 bits a channel \(mode I")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 3}, r"size=\(height, width\), got 3"),
        ({"size": (3, 0)}, r"at least 1, got \(3, 0\)"),
        ({"channels": 2}, "channels 1 .* got 2"),
        ({"std": 0}, "std > 0, got 0"),
        ({"mean": (1, 2)}, r"mean to be a number, or one for each of 3 channels, got \(1, 2\)"),
        ({"std": float("nan")}, "std to be a number"),
        ({"batch_size": 0}, "batch_size is at least 1"),
    ],
)
def test_impossible_settings_of_images(
    pictures: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        onnxfit.ImageFolder(pictures, **{"size": (2, 2), **settings})


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no images \(\.bmp"):
        onnxfit.ImageFolder(tmp_path, (2, 2))
    with pytest.raises(FileNotFoundError):
        onnxfit.ImageFolder(tmp_path / "nowhere", (2, 2))


def test_a_network_learns_images_from_a_folder(pictures: Path) -> None:
    trainer = onnxfit.Trainer(
        convolutional(),
        loss="cross_entropy",
        optimizer=onnxfit.optimizers.Adam(learning_rate=0.01),
        metrics=["accuracy"],
    )
    loader = onnxfit.ImageFolder(pictures, (8, 8), channels=1, batch_size=3)
    trainer.fit(loader, epochs=20, verbose=0)
    x, y = (
        np.concatenate(part)
        for part in zip(*onnxfit.ImageFolder(pictures, (8, 8), channels=1, shuffle=False))
    )
    assert trainer.evaluate(loader) == pytest.approx(trainer.evaluate(x, y, batch_size=3))
    np.testing.assert_allclose(trainer.predict(loader), trainer.predict(x), rtol=1e-5, atol=1e-6)
    assert trainer.evaluate(loader)["accuracy"] == 1


# ---------------------------------------------------------------------- what is not installed


@pytest.mark.parametrize(
    ("library", "extra", "made"),
    [
        ("pyarrow", "parquet", lambda at: columns(at / "t.parquet")),
        ("PIL", "images", lambda at: onnxfit.ImageFolder(at, (2, 2))),
    ],
)
def test_a_missing_library_is_asked_for(
    library: str, extra: str, made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InstallationError, match=rf'pip install "onnxfit\[{extra}\]"'):
        made(tmp_path)


# ---------------------------------------------------------------------- prefetching anything


def test_batches_are_made_while_the_loop_is_busy() -> None:
    """No clock: the source waits for the loop to be in its step, and the loop, in its step, for the
    source to have made the next batch.
    """
    made, working = [threading.Event() for _ in range(4)], threading.current_thread()

    def batches() -> Iterator[Any]:
        for event, batch in zip(made, [*three_batches(), three_batches()[0]]):
            assert threading.current_thread() is not working
            event.set()
            yield batch

    with make(Prefetch(batches, depth=1)) as data:
        for updated, _ in zip([*made[1:], None], data.batches(0)):
            assert updated is None or updated.wait(10), "the next batch is made during the step"


class Interrupted:
    """Batches by number, the last of which fails."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> Any:
        if number == 2:
            try:
                raise OSError("no such disk")
            except OSError as error:
                raise RuntimeError(f"batch {number} is lost") from error
        return three_batches()[number]


@pytest.mark.parametrize("data", [Interrupted(), lambda: map(Interrupted().__getitem__, range(3))])
def test_what_goes_wrong_in_any_source_is_raised_with_its_cause(data: Any) -> None:
    prefetching = Prefetch(data)
    for passed in (iter(prefetching), make(prefetching).batches(0)):
        with pytest.raises(RuntimeError, match="batch 2 is lost") as caught:
            list(passed)
        assert "__getitem__" in [
            frame.name for frame in traceback.extract_tb(caught.value.__traceback__)
        ]
        assert isinstance(caught.value.__cause__, OSError)
        assert not threads()
    trainer = onnxfit.Trainer(linear(2), loss="mse")
    with pytest.raises(RuntimeError, match="batch 2 is lost"):
        trainer.fit(prefetching, epochs=2, verbose=0)
    assert not threads()


def test_a_generator_that_is_prefetched_is_closed_in_its_thread_and_one_of_the_callers_left_open() -> (
    None
):
    closed: list[threading.Thread] = []

    def batches() -> Iterator[Any]:
        try:
            while True:
                yield three_batches()[0]
        finally:
            closed.append(threading.current_thread())

    for begin in (iter, lambda data: make(data).batches(0)):
        running = begin(Prefetch(batches))
        next(running)
        running.close()
        assert len(closed) == 1
        assert closed.pop() is not threading.current_thread()
    theirs = batches()
    for begin in (iter, lambda data: make(data).batches(0)):
        running = begin(Prefetch(theirs))
        next(running)
        running.close()
        assert len(next(theirs)) == 3
    assert not closed
    assert not threads()


def test_close_ends_the_thread_of_a_pass_under_way() -> None:
    prefetching = Prefetch(three_batches(), depth=1)
    running = iter(prefetching)
    next(running)
    assert threads()
    prefetching.close()
    assert not threads()
    assert list(running) == []
    assert len(prefetching) == 3


def test_fit_ends_the_threads_it_began() -> None:
    trainer = onnxfit.Trainer(linear(2), loss="mse")
    data = Prefetch([(x, y) for x, y, _ in three_batches()])
    assert (
        len(
            trainer.fit(
                data,
                epochs=3,
                steps_per_epoch=2,
                validation_data=data,
                validation_steps=1,
                verbose=0,
            ).epoch
        )
        == 3
    )
    assert not threads()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X,), r"DataLoader\(X, y, prefetch=2\)"),
        (({"x": X},), "DataLoader"),
        ((three_batches(), 0), "depth >= 1, got 0"),
    ],
)
def test_what_prefetch_is_not_for(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Prefetch(*arguments)
    with pytest.raises(SettingError, match="Prefetch gives batches"):
        make(Prefetch(three_batches()), Y)


# ---------------------------------------------------------------------- the page about data


def test_the_blocks_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page, namespace = "docs/data.md", {"__name__": "page"}
    assert len(blocks(page)) > 5
    for block in blocks(page):
        exec(compile(block, str(ROOT / page), "exec"), namespace)
