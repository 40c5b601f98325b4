"""The settings for files of integers, checked, and in checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnxfit import Quantization, SettingError, Trainer
from tests.quantization.integer_files import integer_file


def test_names_are_a_tuple() -> None:
    assert Quantization().weights is None
    assert Quantization(weights="w").weights == Quantization(weights=["w"]).weights == ("w",)
    with pytest.raises(SettingError, match="weights is a name, or a list of names"):
        Quantization(weights=3)
    with pytest.raises(SettingError, match="unexpected keyword argument 'weight'"):
        Quantization(weight="w")


@pytest.mark.parametrize("setting", [None, Quantization(), Quantization(weights=["w*", "!b"])])
def test_checkpoints_hold_them(tmp_path: Path, setting: Quantization | None) -> None:
    trainer = Trainer(integer_file(), loss="mse", quantization=setting)
    loaded = Trainer.load(trainer.save(tmp_path / "c"))
    assert loaded.settings["quantization"] == setting
    assert list(loaded.get_weights()) == list(trainer.get_weights())
