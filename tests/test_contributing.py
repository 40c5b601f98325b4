"""CONTRIBUTING.md and docs/developing.md: the code block of each extension runs, and onnxfit finds
what it adds.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxfit import Trainer
from onnxfit.optimizers import Adam
from tests.gradients.rules.cases import Case, judged
from tests.models import linear, mlp

ROOT = Path(__file__).resolve().parent.parent
PATHS = (ROOT / "CONTRIBUTING.md", ROOT / "docs/developing.md")
PAGES = {path: path.read_text(encoding="utf-8") for path in PATHS}
X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
Y = np.abs(X[:, :3])


def sections() -> dict[str, list[str]]:
    """Heading -> Python blocks, of the sections on extensions."""
    found = {}
    for page in PAGES.values():
        _, *parts = re.split(r"^### (.*)$", page, flags=re.MULTILINE)
        for heading, text in zip(parts[::2], parts[1::2]):
            found[heading] = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return found


SECTIONS = sections()


def path_of(block: str) -> str:
    """The path in the first line of a block."""
    match = re.match(r"# (onnxfit/\S+\.py)\n", block)
    assert match, block
    return match[1]


IN_FILES = [h for h, (block, *_) in SECTIONS.items() if (ROOT / path_of(block)).exists()]
NEW_FILES = [h for h in SECTIONS if h not in IN_FILES]


def test_every_section_has_one_block() -> None:
    assert {heading: len(blocks) for heading, blocks in SECTIONS.items()} == dict.fromkeys(
        SECTIONS, 1
    )
    assert set(IN_FILES) == set(USES)
    assert set(NEW_FILES) == set(CHECKS)


# ------------------------------------------------------------------------------------------------
# additions to files


def trained(**settings: Any) -> Trainer:
    trainer = Trainer(mlp(), **{"loss": "mse", "optimizer": "adam", **settings})
    before = trainer.evaluate(X, Y)["loss"]
    trainer.fit(X, Y, epochs=5, batch_size=8, verbose=0)
    assert trainer.evaluate(X, Y)["loss"] < before
    return trainer


def use_loss(names: dict[str, Any]) -> None:
    trainer = Trainer(linear(4), loss=names["SquaredLogRatio"](scale=4.0), optimizer=0.1)
    x = np.abs(X)
    trainer.set_weights({name: np.abs(w) for name, w in trainer.get_weights().items()})
    y = np.exp(1.0) * (1 + trainer.predict(x)) - 1  # the logarithm of the ratio is 1
    assert trainer.evaluate(x, y)["loss"] == pytest.approx(0.25, rel=1e-5)
    assert trainer.train_on_batch(x, y)["loss"] > trainer.train_on_batch(x, y)["loss"]


def use_penalty(names: dict[str, Any]) -> None:
    with_penalty = Trainer(mlp(), loss="mse", penalty=names["L4"](0.5))
    without = Trainer(mlp(), loss="mse")
    expected = 0.5 * sum(float((w**4).sum()) for w in without.get_weights().values())
    added = with_penalty.train_on_batch(X, Y)["loss"] - without.train_on_batch(X, Y)["loss"]
    assert added == pytest.approx(expected, rel=1e-4)


def use_metric(names: dict[str, Any]) -> None:
    trainer = trained(metrics=[names["WithinTolerance"](tolerance=0.3)])
    share = (np.abs(trainer.predict(X) - Y) <= 0.3).mean()
    assert trainer.evaluate(X, Y, batch_size=7)["within_tolerance"] == pytest.approx(share)


def use_optimizer(names: dict[str, Any]) -> None:
    trainer = trained(optimizer=names["SignMomentum"](0.01))
    before = trainer.get_weights()
    trainer.train_on_batch(X, Y)
    for name, after in trainer.get_weights().items():
        steps = np.abs(after - before[name])
        assert np.all((steps < 1e-9) | (np.abs(steps - 0.01) < 1e-6))


def use_schedule(names: dict[str, Any]) -> None:
    schedule = names["SquareRootDecay"](0.1, decay_steps=1)
    assert [schedule(step) for step in (0, 3, 99)] == pytest.approx([0.1, 0.05, 0.01])
    trained(optimizer=Adam(schedule))


USES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "A gradient rule": lambda names: judged(Case("Softplus", "float[3,4] a", "y = Softplus(a)")),
    "A gradient rule of com.microsoft": lambda names: judged(
        Case(
            "QuickGelu",
            "float[2,3] a",
            "y = com.microsoft.QuickGelu<alpha=0.7>(a)",
            domains=("com.microsoft",),
        )
    ),
    "A loss": use_loss,
    "A penalty": use_penalty,
    "A metric": use_metric,
    "An optimizer": use_optimizer,
    "A schedule": use_schedule,
}


@pytest.mark.parametrize("heading", IN_FILES)
@pytest.mark.usefixtures("table_of_rules_restored")
def test_an_addition_to_a_file(heading: str) -> None:
    names: dict[str, Any] = {"__name__": "contributed"}
    sys.modules["contributed"] = sys.modules[__name__]  # dataclasses look their module up
    exec(compile(SECTIONS[heading][0], heading, "exec"), names)
    try:
        USES[heading](names)
    finally:
        del sys.modules["contributed"]


# ------------------------------------------------------------------------------------------------
# new files, in a copy of the package

PRELUDE = """
import sys
import numpy as np, onnx
import onnxfit
from onnxfit import Trainer
from tests.models import mlp
assert onnxfit.__file__.startswith(sys.argv[1]), onnxfit.__file__
x = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
y = np.abs(x[:, :3])
"""
CHECKS = {
    "A callback": """
spikes = onnxfit.callbacks.LossSpikes(factor=0.0)
assert "LossSpikes" in onnxfit.callbacks.__all__
Trainer(mlp(), loss="mse").fit(x, y, epochs=3, verbose=0, callbacks=[spikes])
assert spikes.epochs == [1, 2], spikes.epochs
""",
    "A data source": """
import sqlite3
from onnxfit.data.sqlite import SQLiteQuery
with sqlite3.connect("rows.db") as connection:
    connection.execute("create table points (a real, b real, c real, d real, y real)")
    connection.executemany("insert into points values (?, ?, ?, ?, ?)", np.c_[x, y[:, :1]].tolist())
connection.close()
query = SQLiteQuery("rows.db", "select * from points")
trainer = Trainer(mlp((4, 8, 1)), loss="mse", optimizer="adam")
trainer.fit(query, epochs=2, batch_size=10, verbose=0)
assert trainer.samples_seen == 64, trainer.samples_seen
assert abs(trainer.evaluate(query)["loss"] - trainer.evaluate(x, y[:, :1])["loss"]) < 1e-6
""",
    "A backend": """
trainers = [Trainer(mlp(), loss="mse", backend=name) for name in ("timed", "full")]
for trainer in trainers:
    trainer.fit(x, y, batch_size=8, verbose=0)
assert len(trainers[0]._training.backend.seconds) == 4
np.testing.assert_equal(trainers[0].get_weights(), trainers[1].get_weights())
""",
    "A graph rewrite": """
import onnx.parser
import onnx_ir as ir
from onnxfit.step.rewrites import REWRITES
rewrite = next(r for r in REWRITES if r.__name__ == "drop_double_negation")
model = ir.from_proto(onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    g (float[2] x) => (float[2] y) { a = Neg(x) b = Neg(a) y = Abs(b) }'''))
rewrite(model.graph)
assert [(n.op_type, n.inputs[0].name) for n in model.graph][-1] == ("Abs", "x")
Trainer(mlp(), loss="mse").fit(x, y, verbose=0)
""",
    "A command of the command line": """
import subprocess
onnx.save(mlp(), "model.onnx")
command = [sys.executable, "-m", "onnxfit"]
result = subprocess.run([*command, "count", "model.onnx"], capture_output=True, text=True)
assert result.stdout == "67\\n", result  # 4 * 8 + 8 + 8 * 3 + 3
listed = subprocess.run([*command, "--help"], capture_output=True, text=True).stdout
assert "Count the weights of a model." in listed
""",
}


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of onnxfit that has every new file, and the models of the tests."""
    folder = tmp_path_factory.mktemp("extended")
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "onnxfit", folder / "onnxfit", ignore=skipped)
    (folder / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "models.py", folder / "tests")
    for heading in NEW_FILES:
        block = SECTIONS[heading][0]
        (folder / path_of(block)).write_text(block, encoding="utf-8")
    return folder


@pytest.mark.parametrize("heading", NEW_FILES)
def test_a_new_file_is_all_that_it_takes(
    heading: str, extended: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(extended))
    command = [sys.executable, "-W", "error", "-c", PRELUDE + CHECKS[heading], str(extended)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# ------------------------------------------------------------------------------------------------
# the rest of the pages


@pytest.mark.parametrize("page", PAGES.values(), ids=[path.stem for path in PAGES])
def test_the_targets_exist(page: str) -> None:
    rules = "".join(
        (ROOT / file).read_text("utf-8") for file in ("Makefile", "slow.mk", "js/rules.mk")
    )
    targets = set(re.findall(r"^([a-z/-]+):", rules, re.MULTILINE))
    named = re.findall(r"\bmake ((?:[a-z/-]+ ?)+)", "\n".join(re.findall(r"`(make .*?)`", page)))
    assert named
    assert {target for names in named for target in names.split()} <= targets


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_files_it_names_exist(path: Path) -> None:
    """tests/test_readme.py checks links."""
    named = r"`((?:onnxfit|tests|docs|scripts|benchmarks|examples|kernels)/[\w/.-]+)`"
    paths = re.findall(named, PAGES[path])
    assert paths
    assert [name for name in paths if not (ROOT / name).exists()] == []
