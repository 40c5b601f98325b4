"""Every recipe of docs/exporting.md gives a file that trains, with as many weights as the page says.

The sections in QUICK run with the other tests. ONNXFIT_SLOW=1 runs the others too, whose exporters
take seconds to import: `make exports`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "exporting.md"
SLOW = os.environ.get("ONNXFIT_SLOW") == "1"
SETUP, TRAPS = "A network with every trap", "Traps and fixes"
# section -> the packages that its code imports, and Keras's backends
QUICK = {
    "torch, older exporter": ["torch"],
    "scikit-learn": ["torch", "sklearn", "skl2onnx"],
    TRAPS: [],
}
OTHERS = {
    ("torch", ""): ["torch", "onnxscript"],
    ("transformers", ""): ["torch", "onnxscript", "transformers"],
    ("optimum", ""): ["torch", "optimum.onnx"],
    ("Keras", "torch"): ["torch", "onnxscript", "keras"],
    ("Keras", "tensorflow"): ["torch", "tf2onnx", "keras", "tensorflow"],
    ("tf2onnx", "tensorflow"): ["torch", "tf2onnx", "keras", "tensorflow"],
}


def blocks(section: str) -> list[str]:
    """Return the Python blocks of a section, each pushed down to its own lines."""
    text = PAGE.read_text(encoding="utf-8")
    start = text.index(f"\n## {section}\n")
    end = text.find("\n## ", start + 1)
    found = re.finditer(r"^```python\n(.*?)^```", text[start:end], re.M | re.S)
    return ["\n" * (text.count("\n", 0, start + m.start(1))) + m[1] for m in found]


def run(section: str) -> None:
    """Run the code of a section, behind the page's network where the section uses it."""
    namespace: dict[str, object] = {"__name__": "page"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the exporters; a file with traps has some, too
        for block in [*(blocks(SETUP) if section != TRAPS else []), *blocks(section)]:
            exec(compile(block, str(PAGE), "exec"), namespace)


def need(packages: list[str]) -> None:
    for package in packages:
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            found = None
        if found is None:
            pytest.skip(f"{package} is not installed")


def test_every_section_with_code_is_run() -> None:
    text = PAGE.read_text(encoding="utf-8")
    sections = re.findall(r"^## (.*)$", text, re.M)
    with_code = [section for section in sections if blocks(section)]
    assert set(with_code) == {SETUP, *QUICK, *(section for section, _ in OTHERS)}
    assert len(re.findall(r"^```python$", text, re.M)) == sum(map(len, map(blocks, sections)))


@pytest.mark.torch
@pytest.mark.parametrize("section", QUICK)
def test_a_recipe_gives_a_file_that_trains(
    section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(QUICK[section])
    monkeypatch.chdir(tmp_path)
    run(section)


@pytest.mark.skipif(not SLOW, reason="`make exports` runs it")
@pytest.mark.parametrize(("section", "backend"), OTHERS)
def test_a_recipe_of_a_large_library_gives_a_file_that_trains(
    section: str, backend: str, tmp_path: Path
) -> None:
    need(OTHERS[section, backend])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"KERAS_BACKEND": backend} if backend else {}
    code = f"from tests import test_exporting; test_exporting.run({section!r})"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-4000:]
