"""The settings for files of integers, checked, and in checkpoints."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from onnxfit import CheckpointError, Distillation, Quantization, SettingError, Trainer
from onnxfit.callbacks import LambdaCallback
from onnxfit.cli import main
from onnxfit.optimizers import Adam
from tests.trainable.quantized import integer_files as files
from tests.trainable.quantized.integer_files import integer_file

X = files.rows(20)
Y = np.random.default_rng(2).integers(0, files.COLUMNS, 20)


def test_names_are_a_tuple() -> None:
    assert Quantization().weights is None
    assert Quantization(weights="w").weights == Quantization(weights=["w"]).weights == ("w",)
    with pytest.raises(SettingError, match="weights must be a name or a list of names"):
        Quantization(weights=3)
    with pytest.raises(SettingError, match="unexpected keyword argument 'weight'"):
        Quantization(weight="w")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scales": "lerned"}, "scales must be 'fixed' or 'learned', got 'lerned'"),
        ({"scales": None}, "scales must be 'fixed' or 'learned', got None"),
        ({"observe": -1}, "whole number >= 0 and <= 1000000000, got -1"),
        ({"observe": 1.5}, "observe to be a whole number"),
        ({"observe": True}, "observe to be a whole number"),
        ({"observe": "3"}, "observe to be a whole number"),
        ({"observe": 10**30}, "observe to be a whole number"),
        ({"scales": "learned", "observe": 3}, "Train with observe first, export the file"),
    ],
    ids=str,
)
def test_other_values_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Quantization(**settings)


@pytest.mark.parametrize(
    "setting",
    [
        None,
        Quantization(),
        Quantization(weights=["w*", "!b"]),
        Quantization(scales="learned"),
        Quantization(observe=np.int64(3)),
    ],
)
def test_checkpoints_hold_them(tmp_path: Path, setting: Quantization | None) -> None:
    trainer = Trainer(integer_file(), loss="mse", quantization=setting)
    loaded = Trainer.load(trainer.save(tmp_path / "c"))
    assert loaded.settings["quantization"] == setting
    assert list(loaded.get_weights()) == list(trainer.get_weights())


# ---------------------------------------------------------------------- a teacher


def test_a_teacher_has_a_temperature_and_a_weight() -> None:
    setting = Distillation("float.onnx")
    assert (setting.temperature, setting.weight) == (2.0, 0.5)
    assert Distillation("f", weight=np.float32(0)).weight == 0
    for wrong in ({"temperature": 0}, {"temperature": np.inf}, {"temperature": "2"}):
        with pytest.raises(SettingError, match="temperature > 0"):
            Distillation("f", **wrong)
    for weight in (-0.1, 1.1, np.nan, "1"):
        with pytest.raises(SettingError, match="weight >= 0 and <= 1"):
            Distillation("f", weight=weight)
    with pytest.raises(SettingError, match=r"teacher must be a path, bytes or an onnx\.ModelProto"):
        Distillation(3)
    with pytest.raises(SettingError, match="has no teacher"):
        Trainer(integer_file(), loss="mse", teacher=Distillation(temperature=3))


def with_teacher() -> Distillation:
    """The teacher is the file itself, with other integers."""
    return Distillation(integer_file(seed=7), temperature=3, weight=0.8)


def taught(**settings: Any) -> Trainer:
    settings = {"teacher": with_teacher(), **settings}
    return Trainer(integer_file(), loss="cross_entropy", optimizer=Adam(0.01), **settings)


def fit(trainer: Trainer, **settings: Any) -> None:
    trainer.fit(X, Y, epochs=3, batch_size=8, verbose=0, **settings)


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_a_fit_resumes_exactly_with_the_same_teacher(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "c"
    whole = taught(backend=backend)

    def save(batch: int, logs: Any) -> None:
        if whole.global_step == 4:
            whole.save(path)

    fit(whole, callbacks=[LambdaCallback(on_train_batch_end=save)])
    loaded = Trainer.load(path, teacher=integer_file(seed=7))  # with its settings
    restored = taught(backend=backend)
    restored.restore(path)
    for other in (loaded, restored):
        fit(other)
        assert other.history.history == whole.history.history
        for name, array in whole.get_weights().items():
            np.testing.assert_array_equal(other.get_weights()[name], array)


def test_a_checkpoint_asks_for_the_teacher(tmp_path: Path) -> None:
    path = taught(quantization=Quantization("w")).save(tmp_path / "c")
    with pytest.raises(CheckpointError, match="trained with a teacher, which a checkpoint"):
        Trainer.load(path)
    loaded = Trainer.load(path, teacher=integer_file(seed=7))
    assert loaded.settings["teacher"] == Distillation(temperature=3, weight=0.8)
    assert list(loaded.get_weights()) == ["w"]
    # without a teacher, training goes on by labels alone
    assert Trainer.load(path, teacher=None).settings["teacher"] is None


def test_a_checkpoint_holds_nothing_of_the_teacher(tmp_path: Path) -> None:
    secret = tmp_path / "secret-teacher.onnx"
    onnx.save(integer_file(seed=7), secret)
    path = taught(teacher=secret).save(tmp_path / "c.onnxfit")
    plain = taught(teacher=None).save(tmp_path / "p.onnxfit")
    with zipfile.ZipFile(path) as one, zipfile.ZipFile(plain) as other:
        assert b"secret" not in one.read("onnxfit.json")
        assert one.namelist() == other.namelist()
        for name in one.namelist():
            assert name == "onnxfit.json" or one.read(name) == other.read(name)
    # the model in it needs no teacher
    result = CliRunner().invoke(main, ["export", str(path), "-o", str(tmp_path / "t.onnx")])
    assert result.exit_code == 0, result.output
    assert onnx.load(tmp_path / "t.onnx") == integer_file()


def test_a_checkpoint_cannot_name_a_file_to_read(tmp_path: Path) -> None:
    onnx.save(integer_file(seed=7), tmp_path / "other.onnx")
    path = taught(quantization=Quantization(), teacher=None).save(tmp_path / "c")
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    info = json.loads(entries["onnxfit.json"])
    settings = {"float_model": str(tmp_path / "other.onnx")}
    info["settings"]["quantization"] = {
        "onnxfit:class": {"name": "Quantization", "settings": settings}
    }
    entries["onnxfit.json"] = json.dumps(info).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    with pytest.raises(CheckpointError, match="settings name a file to read"):
        Trainer.load(path)
