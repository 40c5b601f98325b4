"""Files of onnxruntime-genai's own builder train, go back, and are served with adapters by it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime_genai as genai
import pytest

from onnxfit import LoRA, Trainer
from onnxfit.optimizers import Adam
from tests.genai.families import (
    FAMILIES,
    PRECISIONS,
    VOCABULARY,
    build,
    folder_of,
    network_of,
    save,
    teach_copying,
)

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "language_model.py"
LENGTH, PROMPT = 9, 6
SPACE = 16  # tokens that the caches have room for
ROWS = 16
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("genai")


def counting(step: int) -> dict[str, Array]:
    """Rows that count by a step."""
    first = np.random.default_rng(step).integers(0, VOCABULARY, (ROWS, 1))
    ids = (first + step * np.arange(LENGTH)) % VOCABULARY
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def trained(model: Path, step: int, **settings: Any) -> Trainer:
    trainer = Trainer(model, loss="causal_lm", optimizer=Adam(0.01), threads=1, **settings)
    rows = counting(step)
    losses = trainer.fit(rows, rows["input_ids"], epochs=12, batch_size=8, verbose=0).history[
        "loss"
    ]
    assert losses[-1] < 0.9 * losses[0]
    return trainer


class Served:
    """A folder in onnxruntime-genai, with adapters by name."""

    def __init__(self, folder: Path, **adapters: Path) -> None:
        self.model = genai.Model(str(folder))
        self.adapters = genai.Adapters(self.model)
        for name, path in adapters.items():
            self.adapters.load(str(path), name)

    def logits(self, rows: Array, adapter: str | None = None) -> Array:
        """Those of all tokens: of a prompt at once, and then token by token, with caches."""
        return np.stack([self.logits_of_row(row[None].astype(np.int32), adapter) for row in rows])

    def logits_of_row(self, ids: Array, adapter: str | None) -> Array:
        params = genai.GeneratorParams(self.model)
        params.set_search_options(max_length=SPACE)
        generator = genai.Generator(self.model, params)
        if adapter is not None:
            generator.set_active_adapter(self.adapters, adapter)
        found = []
        for piece in np.split(ids, range(PROMPT, LENGTH), axis=1):
            generator.append_tokens(np.ascontiguousarray(piece))
            found.append(generator.get_output("logits").reshape(-1, VOCABULARY))
        return np.concatenate(found)


def with_model(source: Path, folder: Path) -> Path:
    """A copy of a folder without its model, and the path that the model is to have."""
    shutil.copytree(source, folder)
    for path in folder.glob("model.onnx*"):
        path.unlink()
    return folder / "model.onnx"


def operators(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(path, load_external_data=False).graph.node]


def assert_close(found: Array, expected: Array) -> None:
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def assert_base(family: str, found: Array, base: Array) -> None:
    if family == "gemma2":  # onnxruntime fuses its last MatMul and Div where no adapter is between
        assert_close(found, base)
    else:
        assert np.array_equal(found, base)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_weights_train_and_go_back(family: str, folders: Path, tmp_path: Path) -> None:
    source = folder_of(family, "fp32", folders)
    trainer = trained(source / "model.onnx", 1)
    path = with_model(source, tmp_path / "served")
    trainer.export(path)
    assert operators(path) == operators(source / "model.onnx")
    rows = counting(1)
    assert_close(Served(path.parent).logits(rows["input_ids"]), trainer.predict(rows))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_train_and_are_served(
    family: str, precision: str, folders: Path, tmp_path: Path
) -> None:
    """One base with two adapters of different ranks, and the merged file of one of them."""
    source = folder_of(family, precision, folders)
    path = with_model(source, tmp_path / "served")
    trainers = {
        f"by{step}": trained(
            source / "model.onnx", step, adapters=LoRA(rank=4 * step, target="*", dropout=0.05)
        )
        for step in (1, 2)
    }
    trainers["by1"].export(path, adapters="inputs")
    adapters = {
        name: trainer.export_adapter(path.with_name(f"{name}.onnx_adapter"))
        for name, trainer in trainers.items()
    }
    rows = counting(3)
    ids = rows["input_ids"]
    base, served = Served(source).logits(ids), Served(path.parent, **adapters)
    assert_base(family, served.logits(ids), base)
    for name in ("by1", "by2", "by1"):
        expected = trainers[name].predict(rows)
        assert_close(served.logits(ids, name), expected)
        assert np.abs(expected - base).max() > 0.1
    assert_base(family, served.logits(ids), base)

    merged = with_model(source, tmp_path / "merged")
    trainers["by2"].export(merged)
    assert_close(Served(merged.parent).logits(ids), trainers["by2"].predict(rows))
    again = Trainer(source / "model.onnx", adapters=LoRA.load(adapters["by2"]), threads=1)
    assert_close(again.predict(rows), trainers["by2"].predict(rows))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_example_is_served(precision: str, tmp_path: Path) -> None:
    network = network_of("llama")
    teach_copying(network)
    folder = build(save(network, tmp_path / "network"), tmp_path / precision, precision)
    result = subprocess.run(
        [sys.executable, str(EXAMPLE), str(folder)], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    print(result.stdout)
    lines = result.stdout.splitlines()
    assert lines[0] == "served by onnxruntime-genai"
    copied, (name, least) = lines[2].split()[1], lines[-1].split()
    assert name == "least"
    assert float(copied.rstrip("%")) > 90
    assert float(least.rstrip("%")) > 80
