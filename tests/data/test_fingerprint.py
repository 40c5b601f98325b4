"""Fingerprints: equal for the same data, and cheap."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxfit.data import Bucket, ImageFolder
from onnxfit.data.fingerprint import MAX_BYTES_PER_END, checksum, fingerprint_of
from tests.data.files import FILE_KINDS, columns, parquet, saved
from tests.data.kinds import KINDS, ROWS, W, X, Y, kinds, make, spec, with_nan


@kinds
def test_the_same_data_has_the_same_fingerprint(kind: str) -> None:
    prints = [make(*KINDS[kind]()).fingerprint() for _ in range(2)]
    assert prints[0] == prints[1] == json.loads(json.dumps(prints[0]))
    assert prints[0]["steps"] in (3, None)
    assert "object at" not in str(prints[0])


def different_ends() -> np.ndarray:
    x = X.copy()
    x[-1, -1] = 7
    return x


DIFFERENT: dict[str, Callable[[], Any]] = {
    "values at the end": lambda: make(different_ends(), Y, W),
    "labels": lambda: make(X, Y + 1, W),
    "weights": lambda: make(X, Y, W + 1),
    "no weights": lambda: make(X, Y),
    "rows": lambda: make(X[:8], Y[:8], W[:8]),
    "order of columns": lambda: make(X[:, ::-1], Y, W),
    "batch size": lambda: make(X, Y, W, batch_size=5),
    "seed": lambda: make(X, Y, W, shuffle=True, seed=2),
    "no order": lambda: make(X, Y, W),
    "other data": lambda: make([(X, Y, W)]),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_other_data_has_another_fingerprint(kind: str) -> None:
    expected = make(X, Y, W, shuffle=True, seed=1).fingerprint()
    assert DIFFERENT[kind]().fingerprint() != expected


def test_a_fingerprint_names_what_differs() -> None:
    found = make(X, Y, shuffle=True, seed=3).fingerprint()
    assert found.pop("column x")[:2] == ["float32", [10, 2]]
    assert found.pop("column y_true/out")[:2] == ["float32", [10, 1]]
    assert found.pop("columns") == ["x", "y_true/out"]
    assert found == {"kind": "ArraySource", "rows": 10, "steps": 3, "batch_size": 4, "seed": 3}


class Counting(np.ndarray):
    """Counts the bytes that are read of it."""

    read = 0

    def tobytes(self, *arguments: Any) -> bytes:
        Counting.read += self.nbytes
        return super().tobytes(*arguments)


@pytest.mark.parametrize("shape", [(100_000, 3), (2, 500_000), (50_000,), (70, 300, 4)])
def test_only_the_ends_of_large_arrays_are_read(shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    Counting.read = 0
    first = fingerprint_of([("x", array.view(Counting))])
    assert Counting.read <= 2 * MAX_BYTES_PER_END
    changed = array.copy()
    changed.flat[array.size // 2] = -1
    assert fingerprint_of([("x", changed)]) == first
    for end in (0, -1):
        changed = array.copy()
        changed.flat[end] = -1
        assert fingerprint_of([("x", changed)]) != first


def test_arrays_without_rows_and_of_any_layout_have_a_fingerprint() -> None:
    large = np.arange(60_000.0).reshape(300, 200)
    prints = [fingerprint_of([("x", a)]) for a in (large, np.asfortranarray(large), large.tolist())]
    assert prints[0] == prints[1] == prints[2]
    assert fingerprint_of([("x", np.zeros((0, 3)))])["column x"] == ["float64", [0, 3], 0]
    assert fingerprint_of([("x", np.float32(2))]) != fingerprint_of([("x", np.float32(3))])
    assert checksum("ab", "c") != checksum("a", "bc")


def test_files_have_fingerprints(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    ends = [make(*FILE_KINDS["paths"](tmp_path / name)).fingerprint() for name in ("a", "b")]
    assert ends[0] == ends[1]
    other = make(saved(tmp_path / "z.npy", with_nan(X, 5)), Y, W).fingerprint()
    assert other != ends[0]
    tables = [make(columns(parquet(tmp_path / "t.parquet", rows))) for rows in (3, 3, 5)]
    assert tables[0].fingerprint() == tables[1].fingerprint()
    assert tables[0].fingerprint() != tables[2].fingerprint()  # other groups have another order
    two = make(columns([tmp_path / "t.parquet"] * 2, batch_size=8)).fingerprint()
    assert two["rows of files"] == [ROWS, ROWS]


def test_folders_of_images_have_fingerprints_of_their_names(tmp_path: Path) -> None:
    images = pytest.importorskip("PIL.Image")
    for root, name in (("a", "1"), ("b", "1"), ("c", "2")):
        (tmp_path / root / "cat").mkdir(parents=True)
        images.new("RGB", (3, 3)).save(tmp_path / root / "cat" / f"{name}.png")
    a, b, c = (
        make(ImageFolder(tmp_path / root, (3, 2)), inputs=[spec("x", "N", 3, 3, 2)]).fingerprint()
        for root in "abc"
    )
    assert a == b != c


def test_every_file_of_a_folder_counts(tmp_path: Path) -> None:
    """Two machines may see other files where a file system is slow to agree."""
    pytest.importorskip("PIL.Image")
    prints = []
    for root in ("a", "b", "c"):
        folder = tmp_path / root / "cat"
        folder.mkdir(parents=True)
        for number in range(100):
            (folder / f"{number:02}{'x' * (root == 'c' and number == 50)}.png").touch()
        prints.append(ImageFolder(tmp_path / root, (3, 2)).fingerprint())
    assert prints[0] == prints[1] != prints[2]


def test_padded_rows_have_fingerprints() -> None:
    def fingerprint(*texts: list[int]) -> dict[str, Any]:
        inputs = [spec("input_ids", "N", "T", dtype="int64")]
        return make(Bucket([*texts]), inputs=inputs, targets={}).fingerprint()

    first = fingerprint([1, 2], [3], [4, 5, 6])
    assert first == fingerprint([1, 2], [3], [4, 5, 6])
    assert first["kind"] == "Bucket"
    for other in ([[1, 2], [3], [4, 5, 7]], [[1, 2], [3, 3], [4, 5, 6]], [[2, 2], [3], [4, 5, 6]]):
        assert fingerprint(*other) != first
