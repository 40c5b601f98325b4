"""Keep out what our libraries import and training never uses.

`import onnxfit` runs this module first. It imports no library itself: it only changes how onnx-ir
and onnxruntime are loaded when a module first imports them.

Of 0.7 s and 134 MB that both take with onnx, a quarter of the time and 33 MB are sympy, which
onnx-ir has for arithmetic with the names of sizes; with the training build of onnxruntime another
1.5 s and 190 MB are PyTorch, wherever that is installed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import ClassVar


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


@contextmanager
def _lazily() -> Iterator[None]:
    """Context in which the modules of `_Lazily.names` are imported lazily."""
    finder = _Lazily()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _ContextLoader(Loader):
    """Loads a module as another loader does, but in a context."""

    def __init__(self, loader: Loader, context: Callable[[], AbstractContextManager[None]]) -> None:
        self.loader = loader
        self.context = context

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        with self.context():
            self.loader.exec_module(module)


class _FirstImport(MetaPathFinder):
    """Packages of these names are loaded in a context when they are first imported."""

    contexts: ClassVar[dict[str, Callable[[], AbstractContextManager[None]]]] = {
        "onnx_ir": _lazily,
        # The training build looks whether its ORTModule can be imported, and that loads PyTorch.
        "onnxruntime": lambda: without("onnxruntime.training"),
    }

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        context = self.contexts.get(fullname)
        if context is None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ContextLoader(spec.loader, context)
        return spec


sys.meta_path.insert(0, _FirstImport())

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
