"""The README's Python runs, block after block, as a reader would type it; what it says in comments comes true."""

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"


def blocks() -> list[str]:
    """The Python blocks, each pushed down to its own lines, so that a traceback names the README's."""
    text = README.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return ["\n" * text.count("\n", 0, match.start(1)) + match[1] for match in found]


@pytest.mark.usefixtures("table_of_rules_restored")
def test_python_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "readme"}
    assert len(blocks()) > 3
    for block in blocks():
        exec(compile(block, str(README), "exec"), namespace)


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", README.read_text(encoding="utf-8"))
    missing = [target for target in targets if "://" not in target and not (README.parent / target).exists()]
    assert targets
    assert not missing
