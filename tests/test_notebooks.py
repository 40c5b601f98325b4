"""The notebooks run from top to bottom, and hold what their cells print and draw."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def notebooks() -> ModuleType:
    sys.path.insert(0, str(ROOT / "scripts"))
    return importlib.import_module("notebooks")


def kinds(outputs: list[dict]) -> list[tuple[str, ...]]:
    return [(output["output_type"], *output.get("data", {})) for output in outputs]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(
    notebooks: ModuleType, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("matplotlib", "sklearn"):
        pytest.importorskip(module)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    cells = [cell for cell in notebooks.load(path)["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 3
    for cell in cells:
        assert kinds(notebooks.run(notebooks.source(cell), namespace)) == kinds(cell["outputs"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_becomes_a_page(notebooks: ModuleType, path: Path, tmp_path: Path) -> None:
    text = notebooks.page(path, tmp_path)
    assert text.startswith("# ")
    pictures = {picture.name for picture in tmp_path.glob("*.png")}
    assert pictures
    assert all(f"]({name})" in text for name in pictures)


def test_a_cell_shows_what_it_prints_and_its_last_expression(notebooks: ModuleType) -> None:
    pytest.importorskip("matplotlib")
    code = (
        "class Table:\n    def _repr_html_(self):\n        return '<b>7</b>'\nprint('a')\nTable()"
    )
    printed, shown = notebooks.run(code, {})
    assert printed["text"] == ["a\n"]
    assert shown["data"]["text/html"] == ["<b>7</b>"]
    assert len(notebooks.run(f"{code};", {})) == 1  # a semicolon hides the value
    with pytest.raises(ZeroDivisionError):
        notebooks.run("1 / 0", {})
