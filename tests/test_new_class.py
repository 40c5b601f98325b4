"""examples/stories/new_class.py: its files and the numbers made of them, without the model."""

from __future__ import annotations

import csv
import gzip
import io
import json
import pickle
import sqlite3
import tarfile
import wave
import zipfile
from configparser import ConfigParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

pytest.importorskip("PIL")
pytest.importorskip("yaml")
from PIL import Image

from examples.stories import new_class


def test_features_are_the_two_ends_of_a_file() -> None:
    data = bytes(range(33, 127)) * 50
    found = new_class.features(b"\n \t" + data + b" \r\n")
    assert found.dtype == np.int32
    assert bytes(found[:1024].tolist()) == data[:1024]
    assert bytes(found[1024:].tolist()) == data[-1024:]


def test_features_of_a_short_file_are_padded() -> None:
    found = new_class.features(b" a b ")
    assert bytes(found[:4].tolist()) == b"a b "
    assert set(found[4:1024].tolist()) == {256}
    assert bytes(found[-4:].tolist()) == b" a b"
    assert set(found[1024:-4].tolist()) == {256}
    assert set(new_class.features(b"").tolist()) == {256}


def test_white_space_is_looked_for_in_one_block_only() -> None:
    found = new_class.features(b" " * 5000 + b"ab")
    assert found[0] == 256
    assert found[-1] == ord("b")


def test_files_of_the_new_type() -> None:
    rng = np.random.default_rng(0)
    files = [new_class.hike(rng).decode() for _ in range(50)]
    assert len(set(files)) == 50
    assert 20 < sum(file.startswith("%HIKE ") for file in files) < 45
    assert {line[0] for file in files for line in file.splitlines()} == set("%@>!~")
    assert new_class.hike(np.random.default_rng(0)).decode() == files[0]


def names_in_tar(data: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return archive.getnames()


def frames_of(data: bytes) -> int:
    with wave.open(io.BytesIO(data)) as sound:
        return sound.getnframes()


READERS = {
    "json": lambda data: json.loads(data)["rows"],
    "xml": lambda data: list(ElementTree.fromstring(data)),
    "csv": lambda data: list(csv.reader(io.StringIO(data.decode()))),
    "zip": lambda data: zipfile.ZipFile(io.BytesIO(data)).namelist(),
    "tar": names_in_tar,
    "gzip": gzip.decompress,
    "sql": lambda data: sqlite3.connect(":memory:").executescript(data.decode()),
    "pickle": pickle.loads,
    "npy": lambda data: np.load(io.BytesIO(data)).size,
    "wav": frames_of,
    "png": lambda data: Image.open(io.BytesIO(data)).format == "PNG",
    "jpeg": lambda data: Image.open(io.BytesIO(data)).format == "JPEG",
    "gif": lambda data: Image.open(io.BytesIO(data)).format == "GIF",
    "python": lambda data: compile(data, "", "exec"),
}


@pytest.mark.parametrize("label", READERS)
def test_files_of_old_types_are_of_their_type(label: str) -> None:
    write = {**new_class.SHOWN, **new_class.NOT_SHOWN}[label]
    rng = np.random.default_rng(0)
    files = [write(rng) for _ in range(3)]
    assert len(set(files)) == 3
    assert all(READERS[label](file) for file in files)


def test_an_ini_file_has_sections() -> None:
    parser = ConfigParser(strict=False)
    parser.read_string(new_class.as_ini(np.random.default_rng(0)).decode())
    assert parser.sections()[0] == "main"


def test_no_file_of_a_folder_is_read_twice(tmp_path: Path) -> None:
    for i in range(5):
        (tmp_path / f"{i}.py").write_bytes(str(i).encode() * 600)
    (tmp_path / "short.py").write_bytes(b"1")
    read = new_class.files_of(tmp_path, "*.py")
    rng = np.random.default_rng(0)
    assert {read(rng)[0] for _ in range(5)} == set(b"01234")


def test_training_and_test_are_of_different_files() -> None:
    labels = [*new_class.SHOWN, *new_class.NOT_SHOWN, new_class.NEW]
    training, tests = new_class.collect(labels, np.random.default_rng(0))
    shown = {labels.index(label) for label in (*new_class.SHOWN, new_class.NEW)}
    assert set(training[1].tolist()) == shown
    new, old, others = (set(y.tolist()) for _, y in tests.values())
    assert new | old == shown
    assert others == set(range(len(labels))) - shown
    seen = {row.tobytes() for row in training[0]}
    assert len(seen) == len(training[0])
    assert not any(row.tobytes() in seen for x, _ in tests.values() for row in x)
