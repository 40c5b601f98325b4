"""The Python of the README and of the guides runs, block after block, as a reader would type it;
what it says in comments comes true.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    "README.md",
    "docs/from-onnxcustom.md",
    "docs/callbacks.md",
    "docs/coming-from.md",
    "docs/data.md",
    "docs/tensorboard.md",
]
every_page = pytest.mark.parametrize("page", PAGES)
every_page_with_links = pytest.mark.parametrize(
    "page", [*PAGES, "docs/exporting.md", "docs/reference.md"]
)


def blocks(page: str) -> list[str]:
    """The Python blocks, each pushed down to its own lines, so that a traceback names the page's."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return ["\n" * text.count("\n", 0, match.start(1)) + match[1] for match in found]


@every_page
@pytest.mark.usefixtures("table_of_rules_restored")
def test_python_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "page"}
    assert len(blocks(page)) > 3
    for block in blocks(page):
        exec(compile(block, str(ROOT / page), "exec"), namespace)


@every_page_with_links
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    missing = [
        target
        for target in targets
        if "://" not in target and not ((ROOT / page).parent / target).exists()
    ]
    assert targets
    assert not missing


@every_page_with_links
def test_links_within_a_page_lead_to_its_headings(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    headings = {
        re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-")
        for h in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= headings
