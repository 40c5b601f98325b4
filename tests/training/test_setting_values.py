"""The arguments of Trainer as JSON."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onnxfit import Trainer, losses, metrics, optimizers, penalties
from onnxfit.registry import registry
from onnxfit.training.setting_values import decode_setting, encode_setting
from tests.models import mlp

REGISTRIES = {
    "loss": (losses, losses.Loss),
    "metrics": (metrics, metrics.Metric),
    "optimizer": (optimizers, optimizers.Optimizer),
    "penalty": (penalties, penalties.Penalty),
}
CLASSES = [
    pytest.param(setting, kind, id=f"{setting}-{kind.__name__}")
    for setting, (module, base) in REGISTRIES.items()
    for kind in sorted(set(registry(module.__name__, base).values()), key=lambda k: k.__name__)
]


@pytest.mark.parametrize(("setting", "kind"), CLASSES)
def test_a_class_of_a_registry_is_stored_by_its_name(setting: str, kind: type) -> None:
    value = kind()
    encoded = encode_setting([value])
    assert encoded[0]["onnxfit:class"]["name"] == kind.__name__
    decoded = decode_setting(setting, encoded, "file")
    assert decoded == [value]
    assert type(decoded[0]) is kind


def test_a_subclass_of_the_same_name_is_custom() -> None:
    class Accuracy(metrics.Accuracy): ...

    assert encode_setting(Accuracy()) == {"onnxfit:custom": "Accuracy"}


def test_a_metric_with_the_name_of_a_loss_comes_back_from_a_checkpoint(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    chosen = [metrics.MeanSquaredError(weighted=True), metrics.R2()]
    trainer = Trainer(mlp(), loss="mse", metrics=chosen)
    loaded = Trainer.load(trainer.save(tmp_path / "c"))
    w = np.arange(8.0)
    assert loaded.evaluate(x, x[:, :3], w) == trainer.evaluate(x, x[:, :3], w)
    assert loaded.settings["metrics"] == chosen
