"""The library of operators, compiled from kernels/src once for all processes of a test run."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from onnxfit.runtime.kernels import library

KERNELS = Path(__file__).resolve().parents[3] / "kernels"


@pytest.fixture(scope="session")
def library_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled library."""
    if shutil.which(os.environ.get("CXX", "c++").split()[0]) is None:
        pytest.skip("no C++ compiler")  # tests/conftest.py demands one in CI
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # of all processes
    sources = sorted(path for path in KERNELS.rglob("*") if path.suffix in (".cpp", ".h", ".py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    path = base / f"kernels-{digest[:16]}.so"
    if not path.exists():
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        subprocess.run([sys.executable, KERNELS / "build_library.py", unfinished], check=True)
        unfinished.replace(path)
    return path


@pytest.fixture
def kernels(library_file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package onnxfit-kernels as if it were installed."""
    package = ModuleType("onnxfit_kernels")
    package.LIBRARY, package.INTERFACE = library_file, library.INTERFACE
    monkeypatch.setitem(sys.modules, "onnxfit_kernels", package)
    monkeypatch.delenv(library.SWITCH, raising=False)
    library.usable_library.cache_clear()
    yield library_file
    library.usable_library.cache_clear()
