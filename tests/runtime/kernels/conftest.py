"""The library of operators, compiled once from each state of kernels/ (it takes 40 s)."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onnxfit.runtime.kernels import library

ROOT = Path(__file__).resolve().parents[3]
KERNELS = ROOT / "kernels"
COMPILED = ROOT / "build" / "tests"  # kept for the next run, of any Python: `make clean` removes it


@pytest.fixture(scope="session")
def library_file() -> Path:
    """The compiled library. Its name is a checksum of sources and compiler, so none is older."""
    if shutil.which(os.environ.get("CXX", "c++").split()[0]) is None:
        pytest.skip("no C++ compiler")  # tests/conftest.py demands one in CI
    sources = sorted(path for path in KERNELS.rglob("*") if path.suffix in (".cpp", ".h", ".py"))
    compiler = os.environ.get("CXX", "").encode()
    digest = hashlib.sha256(compiler + b"".join(p.read_bytes() for p in sources)).hexdigest()
    path = COMPILED / f"kernels-{digest[:16]}.so"
    if not path.exists():
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        subprocess.run([sys.executable, KERNELS / "build_library.py", unfinished], check=True)
        unfinished.replace(path)
    return path


@pytest.fixture
def kernels(library_file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The library, used instead of that of the checkout."""
    monkeypatch.setattr(library, "LIBRARY", library_file)
    monkeypatch.delenv(library.SWITCH, raising=False)
    library.usable_library.cache_clear()
    yield library_file
    library.usable_library.cache_clear()
