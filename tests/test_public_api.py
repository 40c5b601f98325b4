"""The public names, written down in `public_api.txt`, and the description of every parameter.

After a change that is meant, write the file anew, and note the change in CHANGELOG.md:

    python -m tests.test_public_api
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SNAPSHOT = Path(__file__).with_name("public_api.txt")
MODULES = (
    "onnxfit", "onnxfit.callbacks", "onnxfit.ctc", "onnxfit.data", "onnxfit.distributed", "onnxfit.drawing", "onnxfit.errors", "onnxfit.flower", "onnxfit.gradients", "onnxfit.losses", "onnxfit.metrics",
    "onnxfit.optimizers", "onnxfit.penalties", "onnxfit.schedules", "onnxfit.sklearn", "onnxfit.tools.editing", "onnxfit.tools.quantization", "onnxfit.torch", "onnxfit.trainer",
)  # fmt: skip
# root modules that are not public, with the reason
INTERNAL = {
    "onnxfit.__main__": "runs the command line",
    "onnxfit.checks": "plumbing",
    "onnxfit.environment": "plumbing",
    "onnxfit.files": "plumbing",
    "onnxfit.folders": "plumbing",
    "onnxfit.registry": "plumbing",
}
OPTIONAL = {"onnxfit.sklearn": "sklearn", "onnxfit.torch": "torch"}  # module -> needed library

every_module = pytest.mark.parametrize("name", MODULES)


def load(name: str) -> ModuleType:
    if name in OPTIONAL:
        pytest.importorskip(OPTIONAL[name])
    return importlib.import_module(name)


def exported(module: ModuleType) -> list[str]:
    return sorted(getattr(module, "__all__", ()))


def snapshot() -> dict[str, list[str]]:
    """The names in `public_api.txt`, by module."""
    names: dict[str, list[str]] = {}
    module = ""
    for line in SNAPSHOT.read_text(encoding="utf-8").splitlines():
        if line.startswith("    "):
            names[module].append(line.strip())
        elif line:
            module = line.rstrip(":")
            names[module] = []
    return names


def write_snapshot() -> None:
    old = snapshot() if SNAPSHOT.exists() else {}
    lines = []
    for name in MODULES:
        library = OPTIONAL.get(name)
        if library is None or importlib.util.find_spec(library):
            names = exported(importlib.import_module(name))
        else:
            names = old[name]  # as it was: this environment cannot tell
        lines += [f"{name}:", *(f"    {n}" for n in names), ""]
    SNAPSHOT.write_text("\n".join(lines), encoding="utf-8")


def test_every_root_module_is_public_or_internal() -> None:
    root = Path(importlib.import_module("onnxfit").__file__ or "").parent
    modules = {f"onnxfit.{path.stem}" for path in root.glob("*.py")} - {"onnxfit.__init__"}
    assert modules <= {*MODULES, *INTERNAL}


@every_module
def test_public_names_are_those_of_the_snapshot(name: str) -> None:
    assert exported(load(name)) == snapshot()[name], "python -m tests.test_public_api"


@every_module
def test_every_exported_name_exists_once(name: str) -> None:
    module = load(name)
    assert hasattr(module, "__all__"), f"{name} has no __all__"
    assert len(set(module.__all__)) == len(module.__all__)
    assert [n for n in module.__all__ if not hasattr(module, n)] == []


@every_module
def test_every_parameter_is_described(name: str) -> None:
    missing = {line for export in exported(load(name)) for line in undescribed(load(name), export)}
    assert not missing, "not described in backticks:\n" + "\n".join(sorted(missing))


def undescribed(module: ModuleType, export: str) -> list[str]:
    """The parameters of an exported function, class or method that no docstring describes.

    A parameter of a method may be described by the method, by the method that it overrides, or by
    one of their classes. Names that a subclass gives to the `*slots` of an overridden method need
    no description. A method is reported by the name of the first class that defines it.
    """
    member = getattr(module, export)
    if inspect.isfunction(member):
        return _undescribed(f"{module.__name__}.{export}", member, [member.__doc__ or ""])
    if not inspect.isclass(member):
        return []
    package = module.__name__.split(".")[0]
    ours = [c for c in member.__mro__ if c.__module__.split(".")[0] == package]
    missing = []
    if _has_constructor(member):
        docs = [doc for c in ours for doc in (_docstring(c), _own_doc(c, "__init__"))]
        missing += _undescribed(f"{module.__name__}.{export}", member, docs)
    methods = sorted({name for c in ours for name in vars(c) if not name.startswith("_")})
    for method in methods:
        function = inspect.unwrap(inspect.getattr_static(member, method))
        function = getattr(function, "__func__", function)  # of a class method
        if inspect.isfunction(function):
            definers = [c for c in ours if method in vars(c)]
            docs = [doc for c in definers for doc in (_docstring(c), _own_doc(c, method))]
            first = definers[-1]  # the method that the others override
            where = f"{first.__module__}.{first.__qualname__}.{method}"
            if len(definers) == 1 or not _takes_any(vars(definers[-1])[method]):
                missing += _undescribed(where, function, docs)
    return missing


def _takes_any(function: Callable[..., Any]) -> bool:
    kinds = {p.kind for p in inspect.signature(function).parameters.values()}
    return inspect.Parameter.VAR_POSITIONAL in kinds


def _has_constructor(cls: type) -> bool:
    """Whether `cls` can be called, and not only by what `object`, `Exception` or a protocol does."""
    if getattr(cls, "_is_protocol", False):
        return False
    return any("__init__" in vars(c) for c in cls.__mro__ if c.__module__.startswith("onnxfit"))


def _docstring(cls: type) -> str:
    """The docstring that a class was written with: a dataclass without one gets its signature."""
    text = cls.__doc__ or ""
    return "" if text.startswith(f"{cls.__name__}(") else text


def _own_doc(cls: type, method: str) -> str:
    function = vars(cls).get(method)
    return getattr(function, "__doc__", None) or ""


def _undescribed(where: str, member: Callable[..., Any], docs: list[str]) -> list[str]:
    described = {name for text in docs for name in described_names(text)}
    return [f"{where}: {name}" for name in _parameters(member) if name not in described]


def _parameters(member: Callable[..., Any]) -> Iterator[str]:
    for name in inspect.signature(member).parameters:
        if name not in ("self", "cls") and not name.startswith("_"):
            yield name


def described_names(text: str) -> set[str]:
    """The parameters that a docstring names in backticks: `name`, `name=`, `**name`, `name=2`.

    >>> sorted(described_names("`x` and `y`, or `**kwargs` and `size=2`; not `f(z)`, nor z."))
    ['kwargs', 'size', 'x', 'y']
    """
    spans = re.findall(r"`([^`]+)`", text)
    parts = [part.strip() for span in spans for part in span.split(",")]
    found = (re.fullmatch(r"\*{0,2}(\w+)(\s*[=:].*)?", part, re.DOTALL) for part in parts)
    return {match[1] for match in found if match}


class TestTheChecks:
    """Each check reports a package that it is made for."""

    class Documented:
        """`size` and `shape`."""

        def __init__(self, size: int, shape: int) -> None: ...

        def call(self, batch: int) -> None:
            """Without a word."""

        @classmethod
        def load(cls, path: str, *, strict: bool = True) -> None:
            """From `path`."""

    class Inherited(Documented):
        def call(self, batch: int) -> None:
            """For one `batch`."""

    @staticmethod
    def function(x: int, *values: int, scale: float = 1.0, **more: int) -> None:
        """Of `x`, and of x, `values` and scale."""

    def module(self, **members: Any) -> ModuleType:
        module = ModuleType("tests.test_public_api")
        vars(module).update(members)
        return module

    def test_functions(self) -> None:
        lines = undescribed(self.module(f=self.function), "f")
        assert lines == ["tests.test_public_api.f: scale", "tests.test_public_api.f: more"]

    def test_methods(self) -> None:
        missing = undescribed(self.module(C=self.Documented), "C")
        assert [line.rpartition(".")[2] for line in missing] == ["call: batch", "load: strict"]
        missing = undescribed(self.module(D=self.Inherited), "D")
        assert [line.rpartition(".")[2] for line in missing] == ["load: strict"]
        assert "Documented.load" in missing[0]  # where it is defined

    def test_parameters_that_the_overridden_method_leaves_open(self) -> None:
        class Optimizer:
            def update(self, w: int, *slots: int) -> None:
                """Return the next `w`, and the next `slots`."""

        class Momentum(Optimizer):
            def update(self, w: int, velocity: int) -> None: ...

        Optimizer.__module__ = Momentum.__module__ = "tests.test_public_api"
        assert undescribed(self.module(Momentum=Momentum), "Momentum") == []

    def test_constructors(self) -> None:
        class Loss:
            """A loss of `scale`."""

            def __init__(self, scale: float, delta: float) -> None: ...

        Loss.__module__ = "onnxfit.losses"
        module = ModuleType("onnxfit.losses")
        module.Loss = Loss  # type: ignore[attr-defined]  # a module of this test
        assert undescribed(module, "Loss") == ["onnxfit.losses.Loss: delta"]

    def test_what_is_no_callable(self) -> None:
        assert undescribed(self.module(NAMES=("a", "b")), "NAMES") == []


if __name__ == "__main__":
    write_snapshot()
