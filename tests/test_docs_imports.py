"""The README, the guides and the examples teach public names only.

Every import and every attribute chain that begins with `onnxfit` must end in a name of the `__all__`
of a public module, or in a public attribute of such a name.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PUBLIC_MODULES = {
    "onnxfit",
    "onnxfit.callbacks",
    "onnxfit.ctc",
    "onnxfit.data",
    "onnxfit.distributed",
    "onnxfit.errors",
    "onnxfit.flower",
    "onnxfit.gradients",
    "onnxfit.losses",
    "onnxfit.metrics",
    "onnxfit.optimizers",
    "onnxfit.penalties",
    "onnxfit.schedules",
    "onnxfit.sklearn",
    "onnxfit.torch",
}
NEEDS = {"onnxfit.sklearn": "sklearn", "onnxfit.torch": "torch"}
PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
FOR_DEVELOPERS = ("docs/architecture.md", "docs/developing.md")  # they are about modules
EXAMPLES = sorted(f"examples/{example.name}" for example in (ROOT / "examples").glob("*.py"))


def python_blocks(page: str) -> Iterator[str]:
    """The Python blocks of a page, each pushed down to its own lines."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for match in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield "\n" * text.count("\n", 0, match.start(1)) + match[1]


def used_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The lines and the full dotted names of all that code imports or reads of onnxfit."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "onnxfit":
                    yield node.lineno, alias.name
                    full = alias.name if alias.asname else "onnxfit"
                    names[alias.asname or "onnxfit"] = full
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "onnxfit":
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield node.lineno, f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        parts: list[str] = []
        value: ast.AST = node
        while isinstance(value, ast.Attribute):
            parts.insert(0, value.attr)
            value = value.value
        if parts and isinstance(value, ast.Name) and value.id in names:
            yield node.lineno, ".".join([names[value.id], *parts])


def mentioned_names(page: str) -> Iterator[tuple[int, str]]:
    """The lines and the dotted names in the code spans of a page's text."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), text, flags=re.M | re.S)
    for number, line in enumerate(text.splitlines(), 1):
        for span in re.findall(r"`([^`]+)`", line):
            for name in re.findall(r"(?<![\w./-])onnxfit(?:\.[A-Za-z_]\w*)+", span):
                yield number, name


def is_public(name: str) -> bool:
    """Whether a dotted name leads from public module to exported name to public attributes."""
    module = "onnxfit"
    rest = name.split(".")[1:]
    while rest and f"{module}.{rest[0]}" in PUBLIC_MODULES:
        module = f"{module}.{rest.pop(0)}"
    if not rest:
        return True
    exported = importlib.import_module(module)
    names = getattr(exported, "__all__", None)
    if names is None:
        own = vars(exported).items()
        names = [key for key, value in own if getattr(value, "__module__", None) == module]
    member, *attributes = rest
    if member not in names and member != "__version__":
        return False
    return not any(attribute.startswith("_") for attribute in attributes)


def needs_missing_library(name: str) -> bool:
    return any(
        name.startswith(f"{module}.") and importlib.util.find_spec(library) is None
        for module, library in NEEDS.items()
    )


def private_names(names: Iterator[tuple[int, str]]) -> list[str]:
    return [
        f"line {line}: {name}"
        for line, name in names
        if not needs_missing_library(name) and not is_public(name)
    ]


@pytest.mark.parametrize("page", [page for page in PAGES if page not in FOR_DEVELOPERS])
def test_blocks_of_a_page_use_public_names(page: str) -> None:
    assert not [
        name
        for block in python_blocks(page)
        for name in private_names(used_names(ast.parse(block)))
    ]


@pytest.mark.parametrize("page", [page for page in PAGES if page not in FOR_DEVELOPERS])
def test_a_page_speaks_of_public_names(page: str) -> None:
    assert not private_names(mentioned_names(page))


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_uses_public_names(example: str) -> None:
    tree = ast.parse((ROOT / example).read_text(encoding="utf-8"))
    assert not private_names(used_names(tree))


@pytest.mark.parametrize(
    ("code", "private"),
    [
        ("import onnxfit\nonnxfit.Trainer.load\nonnxfit.optimizers.SGD(0.1)", []),
        ("from onnxfit import losses\nlosses.Huber", []),
        ("import onnxfit.data as d\nd.DataLoader", []),
        ("import onnxfit\nonnxfit.trainer.Trainer", ["onnxfit.trainer.Trainer"]),
        ("from onnxfit.trainer import Trainer", ["onnxfit.trainer.Trainer"]),
        ("import onnxfit.graph.values", ["onnxfit.graph.values"]),
        ("from onnxfit import losses\nlosses.np", ["onnxfit.losses.np"]),
        ("import onnxfit\nonnxfit.Trainer._source", ["onnxfit.Trainer._source"]),
    ],
)
def test_private_names_are_noticed(code: str, private: list[str]) -> None:
    names = {name for _, name in used_names(ast.parse(code)) if not is_public(name)}
    assert {name for name in names if name in private} == set(private)
    assert bool(names) == bool(private)
