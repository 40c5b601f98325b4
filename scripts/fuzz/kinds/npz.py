"""NumPy's files: the archive, the headers of its arrays, and pickled objects."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import warnings
import zipfile
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from scripts.fuzz.attempt import Attempt, Stage
from scripts.fuzz.byte_mutations import WORDS, mutated_bytes
from scripts.fuzz.data import SMALL, read_as_commands_do, small_trainer
from scripts.fuzz.sandbox import PATHS

HEADERS = (
    "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000, 1000000), }",
    "{'descr': '<f4', 'fortran_order': True, 'shape': (250000000000, 4), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (400000000, 4), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387904, 4), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387904, 4611686018427387904), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (0, 9223372036854775807, 9223372036854775807), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (-3, 4), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (-1, -48), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (12.0, 4), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (True, 4), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "1," * 100 + "), }",
    "{'descr': '<f4', 'fortran_order': 3, 'shape': (12, 4), }",
    "{'descr': '|O', 'fortran_order': False, 'shape': (12, 4), }",
    "{'descr': '|V1000000000000', 'fortran_order': False, 'shape': (12, 4), }",
    "{'descr': '<U2000000000', 'fortran_order': False, 'shape': (1,), }",
    "{'descr': '|S0', 'fortran_order': False, 'shape': (1000000000000,), }",
    "{'descr': '<M8[ns]', 'fortran_order': False, 'shape': (12, 2), }",
    "{'descr': '<c8', 'fortran_order': False, 'shape': (12, 2), }",
    "{'descr': '>f4', 'fortran_order': False, 'shape': (12, 4), }",
    "{'descr': [('a', '<f4'), ('b', '|O')], 'fortran_order': False, 'shape': (12,), }",
    "{'descr': [('a', '<f4', (1000000000000,))], 'fortran_order': False, 'shape': (12,), }",
    "{'descr': __import__('os'), 'fortran_order': False, 'shape': (12, 4), }",
    "{'descr': '<f4', 'shape': (12, 4), }", "{}", "[]", "", "(" * 3000, "[" * 300 + "]" * 300, "-" * 3000 + "1", "\0", "9" * 6000,
)  # fmt: skip
NAMES = (
    *PATHS,
    *WORDS,
    "X.npy",
    "X",
    ".npy",
    "../X.npy",
    "/X.npy",
    "sample_weight.npy",
    "X.npy.npy",
)


class _Bomb:
    """Makes a folder where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


class NumPyFiles(Attempt):
    share: ClassVar[int] = 9

    def make(self, rng: random.Random, originals: Mapping[str, bytes]) -> None:
        self.original = rng.choice(("npz", "npz", "npy"))
        self.mapped = rng.random() < 0.5  # read by Trainer, or by the command line
        self.main = f"damaged.{self.original}"
        if self.original == "npy":
            data = _damaged_npy(_npy(SMALL["X"]), rng)
        else:
            data = _damaged_npz(rng)
        self.files = {self.main: data, "y.npy": _npy(SMALL["y"])}

    def run(self, rng: random.Random, stage: Stage) -> str:
        stage("read")
        if self.mapped:
            small_trainer().predict(self.main, batch_size=5)
        else:
            paths = [self.main, "y.npy"] if self.original == "npy" else [self.main]
            read_as_commands_do(paths)
        return "read"


def _npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(array))
    return file.getvalue()


def _with_header(header: str, content: bytes, rng: random.Random) -> bytes:
    """Return a .npy file with this header; its version and length may be wrong."""
    version = rng.choice((1, 1, 1, 2, 2, 3, 9))
    text = header.encode("latin1" if version < 3 else "utf8") + b"\n"
    length = len(text) if rng.random() < 0.9 else rng.choice((0, 65535, 1))
    size = struct.pack("<H" if version == 1 else "<I", min(length, 65535))
    return b"\x93NUMPY" + bytes((version, 0)) + size + text + content


def _damaged_npy(data: bytes, rng: random.Random) -> bytes:
    kind = rng.randrange(5)
    if kind <= 1:
        return mutated_bytes(data, rng)
    if kind == 2:
        return _npy(np.array([_Bomb(), 1], dtype=object))
    if kind == 3:
        return pickle.dumps(_Bomb())
    content = rng.choice((data[-192:], b"", b"\0" * 192, rng.randbytes(4096)))
    return _with_header(rng.choice(HEADERS), content, rng)


def _damaged_npz(rng: random.Random) -> bytes:
    names = {"X": "X", "y": "y"}
    compression = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2))
    entries = [(f"{names[name]}.npy", _npy(array)) for name, array in SMALL.items()]
    kind = rng.randrange(6)
    index = rng.randrange(len(entries))
    name, data = entries[index]
    if kind <= 2:
        entries[index] = (name, _damaged_npy(data, rng))
    elif kind == 3:
        entries[index] = (rng.choice(NAMES), data)
    elif kind == 4:
        entries.append(entries[index])
    archived = io.BytesIO()
    with zipfile.ZipFile(archived, "w", compression) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about entries of the same name
        for name, data in entries:
            archive.writestr(zipfile.ZipInfo(name or "e"), data, compression)
    if kind == 5:
        return mutated_bytes(archived.getvalue(), rng)
    return archived.getvalue()
