"""The library of operators, compiled by CMake once from each state of kernels/ (it takes 40 s)."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from onnxfit.kernels import library
from onnxfit.runtime import compilation, session
from onnxfit.runtime.session_cache import SessionCache
from onnxfit.runtime.transform_cache import TransformCache

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels"
COMPILED = ROOT / "build" / "tests"  # kept for the next run, of any Python: `make clean` removes it


def build_library(path: Path) -> None:
    """Compile the library in a folder of its own, which remains if that fails."""
    folder = path.with_name(f"{path.stem}.{os.getpid()}")
    ninja = ["-G", "Ninja"] if shutil.which("ninja") else []
    subprocess.run(["cmake", "-S", KERNELS, "-B", folder, *ninja], check=True)
    subprocess.run(
        ["cmake", "--build", folder, "--config", "Release", "--parallel", "2"], check=True
    )
    (built,) = folder.rglob("operators.so")
    built.replace(path)
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def library_file() -> Path:
    """The compiled library: that of the checkout if no source is newer, else one compiled for this.

    Its name is a checksum of sources and compiler. The variable CXX names the compiler, as CMake
    reads it.
    """
    sources = [KERNELS / "CMakeLists.txt", *sorted((KERNELS / "src").iterdir())]
    installed = Path(library.__file__).with_name(library.LIBRARY.name)
    if "CXX" not in os.environ and installed.exists():
        newest = max(source.stat().st_mtime for source in sources)
        if installed.stat().st_mtime > newest:
            return installed
    compiler = os.environ.get("CXX", "c++")
    for program in ("cmake", shlex.split(compiler)[0]):
        if shutil.which(program) is None:
            pytest.skip(f"no {program}")  # tests/conftest.py demands a compiler in CI
    contents = compiler.encode() + b"".join(source.read_bytes() for source in sources)
    path = COMPILED / f"operators-{hashlib.sha256(contents).hexdigest()[:16]}.so"
    if not path.exists():
        build_library(path)
    return path


@pytest.fixture(autouse=True)
def without_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each graph is changed and compiled anew, since tests replace the functions that do it."""
    monkeypatch.setattr(compilation, "CACHE", TransformCache(max_bytes=0))
    monkeypatch.setattr(session, "SESSIONS", SessionCache(max_bytes=0))


@pytest.fixture
def kernels(library_file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The library, used instead of that of the checkout."""
    monkeypatch.setattr(library, "LIBRARY", library_file)
    monkeypatch.delenv(library.SWITCH, raising=False)
    library.usable_library.cache_clear()
    yield library_file
    library.usable_library.cache_clear()
