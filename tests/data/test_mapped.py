"""Arrays on disk train as arrays in memory do, without being there."""

from __future__ import annotations

import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

import onnxfit
from onnxfit.data import DataLoader, permutation, validation_split
from onnxfit.data.mapped import is_mapped, open_paths
from onnxfit.errors import DataError, SettingError
from tests.data.files import ARRAYS, FILE_KINDS, archive, mapped, saved
from tests.data.kinds import FIXED, NAMED, ROWS, W, X, Y, make, spec, whole, with_nan
from tests.models import linear


@pytest.mark.parametrize("kind", ARRAYS)
def test_rows_of_mapped_arrays_are_shuffled_as_those_in_memory(kind: str, tmp_path: Path) -> None:
    given = FILE_KINDS[kind](tmp_path)
    if isinstance(given[0], DataLoader):
        given[0].shuffle = True
    with make(*given, shuffle=True, seed=5) as data:
        for epoch in (0, 3):
            arrays, order = whole(data, epoch), permutation(5, epoch, ROWS)
            np.testing.assert_array_equal(arrays["x"], X[order])
            np.testing.assert_array_equal(arrays["y_true/out"], Y[order])
            np.testing.assert_array_equal(arrays["sample_weight"], W[order])


@pytest.mark.parametrize("kind", [kind for kind in ARRAYS if "loader" not in kind])
def test_files_are_cut_to_validate(kind: str, tmp_path: Path) -> None:
    given = (*FILE_KINDS[kind](tmp_path), None, None)[:3]
    for parts, rows in zip(validation_split(*given, 0.3), (slice(0, 7), slice(7, 10))):
        arrays = whole(make(*parts))
        np.testing.assert_array_equal(arrays["x"], X[rows])
        np.testing.assert_array_equal(arrays["y_true/out"], Y[rows])


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


def test_maps_are_checked_before_the_first_step_and_batch_by_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnxfit.data.adapter.MAX_SILENT_BYTES", 0)
    x, y = mapped(tmp_path / "x.npy", X), saved(tmp_path / "y.npy", Y)
    with pytest.raises(
        DataError, match=r"the same number of rows, but x has 10, y for out has 9\."
    ):
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
    with pytest.raises(
        DataError,
        match=r"Pass batch_size=4, and drop the last 2 rows with DataLoader\(x, y, batch_size=4, drop_last=True",
    ):
        make(x, Y, inputs=FIXED, batch_size=4)
    with pytest.raises(DataError, match="10 rows do not fill a batch of batch_size=11"):
        make(x, Y, batch_size=11, drop_last=True)
    with pytest.raises(SettingError, match="class_weight or sample_weight"):
        make(x, Y, W, class_weight={0: 1.0})
    data = make(mapped(tmp_path / "nan.npy", with_nan(X, 7)), Y)
    with pytest.raises(
        DataError, match=r"In batch 1 of the training data: x: float32\[N, 2\] has NaN in row 3"
    ):
        list(data.batches(0))
    with pytest.warns(UserWarning, match="'x' was converted from float64 to float32") as record:
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
    with pytest.raises(DataError, match=r"nowhere\.npy"):
        make("nowhere.npy", Y)


def npy(header: str, content: bytes = b"") -> bytes:
    """A .npy file with this header."""
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + content


HOSTILE_HEADERS = {
    "more than there is": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,)}", bytes(99)),
    "more than numbers go": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387904, 4)}", bytes(99)),
    "of nothing": npy("{'descr': '|S0', 'fortran_order': False, 'shape': (1000000000000,)}", bytes(99)),
    "negative": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, -4)}", bytes(99)),
    "not a header": npy("(" * 300),
    "no end": npy("{'descr': ("),
    "numbers": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (True, 4, 1.5)}", bytes(99)),
    "version": b"\x93NUMPY\x09\x00" + bytes(200),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_HEADERS)
def test_a_header_is_not_believed(name: str, tmp_path: Path) -> None:
    (tmp_path / "h.npy").write_bytes(HOSTILE_HEADERS[name])
    with zipfile.ZipFile(tmp_path / "h.npz", "w") as file:
        file.writestr("x.npy", HOSTILE_HEADERS[name])
    for path in ("h.npy", "h.npz"):
        with pytest.raises(DataError, match=f"{path}' cannot be mapped"):
            open_paths(tmp_path / path)
