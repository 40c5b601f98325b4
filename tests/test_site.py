"""What the documentation site makes of docstrings, and the pages that lead to all others."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def docstrings() -> ModuleType:
    sys.path.insert(0, str(ROOT / "scripts"))
    return importlib.import_module("markdown_docstrings")


@pytest.mark.parametrize(
    ("markdown", "restructured"),
    [
        ("`delta` is $x^2$.", "\\ ``delta``\\  is \\ :math:`x^2`\\ ."),
        (
            "`Huber` and `losses.Huber`",
            "\\ :py:obj:`Huber <onnxfit.losses.Huber>`\\  and "
            "\\ :py:obj:`losses.Huber <onnxfit.losses.Huber>`\\ ",
        ),
        (
            "See [the paper](https://arxiv.org/abs/1).",
            "See `the paper <https://arxiv.org/abs/1>`__.",
        ),
        ("Settings:\n- one\n- two", "Settings:\n\n- one\n- two"),
        ("It is\n$$ a\n  b $$.", "It is\n\n.. math:: a b"),
        (">>> f('`$')\n1", ">>> f('`$')\n1"),
    ],
)
def test_docstrings_become_restructured_text(
    docstrings: ModuleType, markdown: str, restructured: str
) -> None:
    targets = {"Huber": "onnxfit.losses.Huber", "losses.Huber": "onnxfit.losses.Huber"}
    assert docstrings.restructured(markdown, targets) == restructured


def test_every_page_is_on_the_site() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^([\w-]+)$", index, re.M))
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index", "reference"}
    assert pages <= listed


def test_links_follow_a_page_to_another_place(docstrings: ModuleType) -> None:
    links = importlib.import_module("repository_links")  # the fixture made it importable
    page = "[a](docs/start.md#install) ![b](docs/images/step.svg) [c](https://x.org) [d](none.md)\n"
    page += "```python\ncalls[0](README.md)\n```\n"
    moved = links.relinked(page, "", lambda path, anchor, picture: f"/{path}{anchor}{picture:d}")
    assert moved == (
        "[a](/docs/start.md#install0) ![b](/docs/images/step.svg1) [c](https://x.org) [d](none.md)\n"
        "```python\ncalls[0](README.md)\n```\n"
    )
    assert links.relinked("[a](../SECURITY.md)", "docs", lambda *_: "x") == "[a](x)"


def test_formulas_have_spaces_around_functions_and_none_around_bars(docstrings: ModuleType) -> None:
    spaced = importlib.import_module("mathml_spaces").spaced
    space = '<mspace width="0.167em" />'
    product = "<mi>y</mi><mi>log</mi><mi>q</mi>"
    assert spaced(product) == f"<mi>y</mi>{space}<mi>log</mi>{space}<mi>q</mi>"
    assert spaced("<mi>log</mi><mo>(</mo>") == "<mi>log</mi><mo>(</mo>"
    bar = '<mo stretchy="false">&#x0007C;</mo>'
    assert spaced(bar) == '<mo lspace="0" rspace="0" stretchy="false">&#x0007C;</mo>'
    assert spaced("<mo>&#x0002B;</mo>") == "<mo>&#x0002B;</mo>"
