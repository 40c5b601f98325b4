"""Keep out what our libraries import and training never uses.

`import onnxfit` runs this module first. Of the libraries, it imports only NumPy, and changes how
onnx-ir and onnxruntime are loaded when a module first imports them.

Of 0.7 s and 134 MB that both take with onnx, a quarter of the time and 33 MB are sympy, which
onnx-ir has for arithmetic with the names of sizes; with the training build of onnxruntime another
1.5 s and 190 MB are PyTorch, wherever that is installed.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar

# Two threads that import NumPy first, by different modules of it, can break it: these modules
# import each other.
import numpy  # noqa: F401

# sympy, and the module of onnx-ir that looks into it as soon as it is loaded.
LAZY = frozenset({"sympy", "onnx_ir._symbolic_shapes"})


class _ThreadState(threading.local):
    """State of this thread that decides what its imports find."""

    def __init__(self) -> None:
        self.hidden: list[str] = []  # modules that cannot be found
        self.is_lazy = False  # whether the modules of LAZY are loaded when they are used
        self.searched: set[str] = set()  # modules that other finders look for


_state = _ThreadState()


@contextmanager
def without(name: str) -> Iterator[None]:
    """Context in which a library that tries to import a module finds that it is not installed.

    - `name`: the module. If it is imported already, it stays so. Other threads find it all the
      same, and everyone finds it afterwards.
    """
    _state.hidden.append(name)
    try:
        yield
    finally:
        _state.hidden.remove(name)


@contextmanager
def _lazily() -> Iterator[None]:
    """Context in which the modules of LAZY are loaded when something in them is asked for."""
    before, _state.is_lazy = _state.is_lazy, True
    try:
        yield
    finally:
        _state.is_lazy = before


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


class _ContextLoader(Loader):
    """Loads a module as another loader does, but in a context."""

    def __init__(self, loader: Loader, context: Callable[[], AbstractContextManager[None]]) -> None:
        self.loader = loader
        self.context = context

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the other loader, with which programs read files of a package."""
        if name == "loader" or name.startswith("__"):  # as in a copy that is not complete yet
            raise AttributeError(name)
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        with self.context():
            self.loader.exec_module(module)


class _Finder(MetaPathFinder):
    """Finder that changes how a few modules are loaded, which the finders after it find.

    It stays in `sys.meta_path`: a list that changes can hide modules from other threads. A finder
    that is put before it later, and that finds one of these modules, bypasses it.
    """

    # Package -> the context in which it is loaded.
    contexts: ClassVar[dict[str, Callable[[], AbstractContextManager[None]]]] = {
        "onnx_ir": _lazily,
        # The training build looks whether its ORTModule can be imported, and that loads PyTorch.
        "onnxruntime": lambda: without("onnxruntime.training"),
    }

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _state.hidden:
            raise ModuleNotFoundError(f"{fullname} is not needed here", name=fullname)
        is_lazy = _state.is_lazy and fullname in LAZY
        context = self.contexts.get(fullname)
        if not (is_lazy or context) or fullname in _state.searched:
            return None
        _state.searched.add(fullname)
        try:
            spec = self._found_by_others(fullname, path, target)
        finally:
            _state.searched.remove(fullname)
        if spec is not None and spec.loader is not None:
            if is_lazy and not isinstance(spec.loader, importlib.util.LazyLoader):
                spec.loader = importlib.util.LazyLoader(spec.loader)
            elif context is not None:
                spec.loader = _ContextLoader(spec.loader, context)
        return spec

    def _found_by_others(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    return spec
        return None


sys.meta_path.insert(0, _Finder())
