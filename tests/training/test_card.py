"""A model card has the fields of the Hub, and says what the trainer knows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnxfit import Trainer
from onnxfit.callbacks import EarlyStopping
from onnxfit.errors import SettingError
from tests.models import mlp

RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 4)).astype(np.float32)
Y = RNG.integers(0, 3, 20)
TASK = {"pipeline_tag": "tabular-classification", "datasets": ["flowers"]}


def trainer(**metadata: str) -> Trainer:
    model = mlp()
    onnx.helper.set_model_props(model, metadata)
    return Trainer(model, loss="cross_entropy", optimizer="adam", metrics=["accuracy"], seed=5)


def front(card: str) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    fields: dict[str, Any] = yaml.safe_load(card.split("---\n")[1])
    return fields


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, {}),
        ({"model_license": "Apache-2.0", "license": "MIT"}, {"license": "apache-2.0"}),
        ({"License": "MIT"}, {"license": "mit"}),
        ({"license": "Ours: ask"}, {"license": "other", "license_name": "Ours: ask"}),
    ],
)
def test_the_license_is_inherited(metadata: dict[str, str], expected: dict[str, str]) -> None:
    card = trainer(**metadata).card()
    assert front(card) == {"library_name": "onnxfit", "tags": ["onnx"], **expected}
    assert front(trainer(**metadata).card(license="bsd"))["license"] == "bsd"


def test_an_untrained_model() -> None:
    card = trainer().card(model_name="Digits | 3")
    assert "\n# Digits | 3\n" in card
    assert "float32[N, 4]" in card
    assert "## Figures" not in card
    assert "## Training" not in card
    assert "## Origin" not in card


def test_a_trained_model(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one = trainer()
    history = one.fit(X, Y, epochs=3, batch_size=4, validation_split=0.2, verbose=0).history
    card = one.card(tmp_path / "README.md", **TASK)
    assert (tmp_path / "README.md").read_text() == card
    assert (tmp_path / "README_figures.png").read_bytes().startswith(b"\x89PNG")
    assert "![The metrics over the epochs](README_figures.png)" in card
    metrics = [{"type": name, "value": history[f"val_{name}"][-1]} for name in ("loss", "accuracy")]
    (result,) = front(card)["model-index"][0]["results"]
    assert result["metrics"] == metrics
    assert result["dataset"] == {"type": "flowers", "name": "flowers", "split": "validation"}
    assert result["task"] == {"type": "tabular-classification"}
    assert "model-index" not in front(one.card(datasets=["flowers"]))
    row = next(line for line in card.splitlines() if line.startswith("| 3 | "))
    assert row.split(" | ")[1] == f"{history['loss'][-1]:.4f}"
    assert "| x | float32 | [16, 4] | " in card
    assert "| 3 | 16 | 4 | 12 | 12 |" in card
    assert "- seed: 5\n" in card
    assert "onnxfit verify" in card


def test_figures_of_another_epoch_are_no_result() -> None:
    one = trainer()
    stopping = EarlyStopping("loss", mode="max", patience=2, restore_best_weights=True)
    one.fit(X, Y, epochs=9, batch_size=4, validation_split=0.2, verbose=0, callbacks=[stopping])
    card = one.card(**TASK)
    assert "model-index" not in front(card)
    assert "A callback restored the weights after batch 4, so the last row" in card


def test_many_epochs_and_weights_from_outside() -> None:
    one = trainer()
    one.fit(X, Y, epochs=23, verbose=0, validation_split=0.2)
    assert "model-index" in front(one.card(**TASK))
    one.set_weights({name: array + 1 for name, array in one.get_weights().items()})
    card = one.card(**TASK)
    assert "model-index" not in front(card)
    assert "| 23 | " in card
    assert "\n| 3 | " not in card
    assert "The last 20 of 23 epochs." in card
    assert "set_weights changed the state after batch 23" in card
    assert "onnxfit verify" not in card


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    one = trainer()
    one.fit(X, Y, epochs=1, verbose=0)
    assert "![" not in one.card(tmp_path / "README.md")
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def test_wrong_arguments() -> None:
    with pytest.raises(SettingError, match="The field license of a model card must be text"):
        trainer().card(license={1})
    with pytest.raises(SettingError, match=r"\.onnx is the suffix of an ONNX model"):
        trainer().card("card.onnx")
