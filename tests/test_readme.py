"""The Python of the README and of the guides runs, block after block, as a reader would type it;
what it says in comments comes true.
"""

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from onnxfit.cli import main
from tests.models import mlp

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    "README.md",
    "docs/guide.md",
    "docs/adapters.md",
    "docs/browser.md",
    "docs/browser-from-nothing.md",
    "docs/from-onnxcustom.md",
    "docs/callbacks.md",
    "docs/chat.md",
    "docs/checkpoints.md",
    "docs/coming-from.md",
    "docs/customize.md",
    "docs/data.md",
    "docs/fine-tuning.md",
    "docs/language-models.md",
    "docs/mixed-precision.md",
    "docs/objectives.md",
    "docs/pytorch.md",
    "docs/quantization-report.md",
    "docs/quantization.md",
    "docs/recipes.md",
    "docs/start.md",
    "docs/tabular.md",
    "docs/tensorboard.md",
    "docs/text.md",
    "docs/training-folder.md",
    "docs/troubleshooting.md",
    "docs/verify.md",
]
WITH_TORCH = ["docs/pytorch.md", "docs/start.md"]
MAX_README_LINES = 120
MAX_LINES_BEFORE_CODE = 25
every_page = pytest.mark.parametrize("page", PAGES)
every_page_with_links = pytest.mark.parametrize(
    "page",
    [
        *PAGES,
        "CONTRIBUTING.md",
        "benchmarks/decisions/README.md",
        "docs/architecture.md",
        "docs/benchmarks.md",
        "docs/developing.md",
        "docs/devices.md",
        "docs/exporting.md",
        "docs/federated.md",
        "docs/gallery.md",
        "docs/reference.md",
        "docs/versions.md",
        "js/README.md",
    ],
)


def blocks(page: str) -> list[str]:
    """The Python blocks, each pushed down to its own lines, so that a traceback names the page's."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return ["\n" * text.count("\n", 0, match.start(1)) + match[1] for match in found]


def write_files_of_the_reader(folder: Path) -> None:
    """Write the model and the data that the README takes for granted."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(100, 4)).astype(np.float32)
    onnx.save(mlp(), folder / "model.onnx")
    np.save(folder / "X.npy", X)
    np.save(folder / "y.npy", (X.sum(axis=1) > 0).astype(np.int64))


@pytest.mark.parametrize(
    "page",
    [
        *(page for page in PAGES if page not in WITH_TORCH),
        # torch warns of itself
        *(
            pytest.param(page, marks=[pytest.mark.torch, pytest.mark.filterwarnings("default")])
            for page in WITH_TORCH
        ),
    ],
)
@pytest.mark.usefixtures("table_of_rules_restored")
def test_python_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page == "docs/browser-from-nothing.md":
        pytest.importorskip("onnxscript.nn")
    if page in WITH_TORCH:
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    write_files_of_the_reader(tmp_path)
    namespace: dict[str, object] = {"__name__": "page"}
    assert blocks(page)
    for block in blocks(page):
        if Path("training/state.safetensors").exists():  # docs/browser.md: the page's download
            shutil.copy("training/state.safetensors", "state.safetensors")
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


def headings(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    text = page.read_text(encoding="utf-8")
    return {
        re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-")
        for h in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }


@every_page_with_links
def test_links_to_headings_lead_to_them(page: str) -> None:
    path = ROOT / page
    text = path.read_text(encoding="utf-8")
    found = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", text)
    missing = [
        f"{target}#{anchor}"
        for target, anchor in found
        if anchor not in headings(path.parent / target if target else path)
    ]
    assert not missing


def test_the_readme_is_short_and_shows_code_at_once() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_README_LINES
    assert lines.index("```python") < MAX_LINES_BEFORE_CODE


def test_the_command_of_the_readme_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_files_of_the_reader(tmp_path)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shell = re.search(r"^```sh\nonnxfit (.*?)\n```", text, re.MULTILINE)
    assert shell
    result = CliRunner().invoke(main, shlex.split(shell[1]))
    assert result.exit_code == 0, result.output
    assert onnx.load(tmp_path / "trained.onnx").graph.output
