"""Keep out what our libraries import and training never uses.

It is the first thing that `import onnxfit` does.

Of 0.7 s and 134 MB that `import onnxfit` took, a quarter of the time and 33 MB were sympy, which
onnx-ir has for arithmetic with the names of sizes; with the training build of onnxruntime another
1.5 s and 190 MB were PyTorch, wherever that is installed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _Lazily(MetaPathFinder):
    """Modules of these names are loaded when something in them is asked for."""

    # the second looks into the first as soon as it is loaded
    names = frozenset({"sympy", "onnx_ir._symbolic_shapes"})

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in self.names else None
        if spec is not None and spec.loader is not None:
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec


class _Missing(MetaPathFinder):
    """A module of this name cannot be found by the thread that made this finder."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.thread = threading.get_ident()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == self.name and threading.get_ident() == self.thread:
            raise ModuleNotFoundError(f"{fullname} is not needed here", name=fullname)
        return None


@contextmanager
def without(name: str) -> Iterator[None]:
    """Context in which a library that tries to import a module finds that it is not installed.

    - `name`: the module. If it is imported already, it stays so. Other threads find it all the
      same, and everyone finds it afterwards.
    """
    missing = _Missing(name)
    sys.meta_path.insert(0, missing)
    try:
        yield
    finally:
        sys.meta_path.remove(missing)


@contextmanager
def uninstalled(name: str) -> Iterator[None]:
    """Context in which `importlib.util.find_spec` finds no module of this name, nor does `import`.

    - `name`: the module. If it is imported already, it stays so. Unlike with `without`, other
      threads do not find it either: use it for a few imports only.
    """
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if sys.modules.get(name) is None:
            sys.modules.pop(name, None)


_lazily = _Lazily()
sys.meta_path.insert(0, _lazily)
try:
    import onnx_ir  # noqa: F401
finally:
    sys.meta_path.remove(_lazily)

# The training build looks whether its ORTModule can be imported, and loads PyTorch with that.
with without("onnxruntime.training"):
    import onnxruntime  # noqa: F401

PACKAGES = (
    "onnxfit", "onnx", "onnx-ir", "onnxruntime-training", "onnxruntime-training-cpu", "onnxruntime",
    "numpy", "safetensors", "tensorboardX", "tqdm", "click", "onnxfit-kernels",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that onnxfit uses, for bug reports."""
    # platform.platform() would start the program `uname`.
    system = "-".join((platform.system(), platform.release(), platform.machine()))
    versions = {"python": platform.python_version(), "platform": system}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
