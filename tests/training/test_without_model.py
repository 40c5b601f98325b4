"""A checkpoint of adapters alone lacks the model, and goes on beside the same one only."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.numpy_helper import from_array, to_array

from onnxfit import CheckpointError, LoRA, SettingError, Trainer
from onnxfit.callbacks import BackupAndRestore, EarlyStopping, LambdaCallback, ModelCheckpoint
from onnxfit.training import checkpoint
from tests import models
from tests.builds import every_way
from tests.trainable.adapters.test_adapted import (
    LABELS,
    X,
    fitted,
    mlp_trainer,
    trainer_of,
    weights_equal,
)

SIZES = (4, 8, 8, 3)
LORAS = {
    "plain": LoRA(rank=2, dropout=0.3),
    "pissa with dora": LoRA(rank=2, dropout=0.3, init="pissa", dora=True),
}


@every_way
@pytest.mark.parametrize("lora", LORAS)
def test_a_fit_resumes_bit_by_bit(tmp_path: Path, way: dict[str, str], lora: str) -> None:
    settings = {"adapters": LORAS[lora], "accumulate": 2, "weights": "fc2.*", **way}
    whole, part = (mlp_trainer(**settings) for _ in range(2))
    stopping = {"monitor": "loss", "patience": 9}
    whole.fit(X, LABELS, epochs=4, batch_size=8, verbose=0, callbacks=EarlyStopping(**stopping))
    path = tmp_path / "part.ckpt"
    saving = [ModelCheckpoint(path, adapters_only=True), EarlyStopping(**stopping)]
    part.fit(X, LABELS, epochs=2, batch_size=8, verbose=0, callbacks=saving)
    assert checkpoint.load(path, {}).model is None
    resumed = Trainer.load(path, model_onnx=models.mlp(SIZES))
    resumed.fit(X, LABELS, epochs=4, batch_size=8, verbose=0, callbacks=EarlyStopping(**stopping))
    assert weights_equal(whole, resumed)
    assert whole.history.history == resumed.history.history


def test_the_file_holds_what_trains_and_no_model(tmp_path: Path) -> None:
    model = models.mlp((4, 400, 400, 3))
    trainer = fitted(trainer_of(model, LoRA(rank=2)), X)
    sizes = {
        only: trainer.save(tmp_path / f"{only}.ckpt", adapters_only=only).stat().st_size
        for only in (False, True)
    }
    trained = sum(array.nbytes for array in trainer.get_weights().values())
    assert sizes[True] < 3 * trained + 8000  # Adam has two slots
    assert sizes[False] - sizes[True] > 400 * 400 * 4
    with zipfile.ZipFile(tmp_path / "True.ckpt") as archive:
        assert sorted(archive.namelist()) == ["onnxfit.json", "state.safetensors"]


def test_backups_of_adapters_are_restored(tmp_path: Path) -> None:
    whole = mlp_trainer()
    whole.fit(X, LABELS, epochs=3, batch_size=8, verbose=0)
    folder = tmp_path / "backup"

    def interrupt(epoch: int, logs: Any) -> None:
        if epoch == 1:
            raise KeyboardInterrupt

    part = mlp_trainer()
    backup = BackupAndRestore(folder, adapters_only=True, every_n_steps=3)
    callbacks = [backup, LambdaCallback(on_epoch_begin=interrupt)]
    with pytest.raises(KeyboardInterrupt):
        part.fit(X, LABELS, epochs=3, batch_size=8, verbose=0, callbacks=callbacks)
    assert all(checkpoint.load(path, {}).model is None for path in folder.iterdir())
    other = models.mlp(SIZES)
    with_another_number(other)
    trainer = Trainer(other, loss="cross_entropy", optimizer="adam", adapters=LORAS["plain"])
    with pytest.raises(SettingError, match="has adapters for another model"):
        trainer.fit(X, LABELS, verbose=0, callbacks=BackupAndRestore(folder))
    again = mlp_trainer()
    again.fit(X, LABELS, epochs=3, batch_size=8, verbose=0, callbacks=BackupAndRestore(folder))
    assert weights_equal(whole, again)


# ---------------------------------------------------------------------- the base


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    trainer = fitted(trainer_of(models.mlp(SIZES), LoRA(rank=2)), X)
    return trainer.save(tmp_path / "a.ckpt", adapters_only=True)


def with_another_number(model: onnx.ModelProto) -> None:
    array = to_array(model.graph.initializer[3]).copy()
    array.flat[0] += 1e-6
    model.graph.initializer[3].CopyFrom(from_array(array, model.graph.initializer[3].name))


def with_another_node(model: onnx.ModelProto) -> None:
    node = next(node for node in model.graph.node if node.op_type == "Tanh")
    node.op_type = "Sigmoid"


@pytest.mark.parametrize("change", [with_another_number, with_another_node])
def test_another_base_is_refused(saved: Path, change: Callable[[onnx.ModelProto], None]) -> None:
    other = models.mlp(SIZES)
    change(other)
    with pytest.raises(SettingError, match="has adapters for another model: the SHA-256"):
        Trainer.load(saved, model_onnx=other)
    trainer = trainer_of(other, LoRA(rank=2))
    before = trainer.get_weights()
    with pytest.raises(SettingError, match="has adapters for another model: the SHA-256"):
        trainer.restore(saved)
    assert all(np.array_equal(array, before[name]) for name, array in trainer.get_weights().items())


def test_the_base_is_known_by_its_numbers(saved: Path, tmp_path: Path) -> None:
    """A file on the disk, with other documentation, and numbers as fields."""
    model = models.mlp(SIZES)
    model.producer_name = "another"
    model.doc_string = model.graph.doc_string = "text"
    tensor = model.graph.initializer[0]
    array = to_array(tensor)
    tensor.ClearField("raw_data")
    tensor.float_data.extend(array.reshape(-1).tolist())
    onnx.save(model, tmp_path / "base.onnx")
    loaded = Trainer.load(saved, model_onnx=tmp_path / "base.onnx")
    trainer = trainer_of(model, LoRA(rank=2))
    trainer.restore(saved)
    assert weights_equal(loaded, trainer)


def test_the_model_is_given_where_it_is_missing_alone(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"without the model\. Pass.*\n?.*model_onnx="):
        Trainer.load(saved)
    with pytest.raises(CheckpointError, match=r"without the model\. Load it with"):
        checkpoint.load(saved, {}).trained_model()
    whole = trainer_of(models.mlp(SIZES), LoRA(rank=2)).save(tmp_path / "b.ckpt")
    with pytest.raises(SettingError, match="already contains a model, which model_onnx="):
        Trainer.load(whole, model_onnx=models.mlp(SIZES))


def test_a_file_with_neither_model_nor_fingerprint_is_refused(saved: Path) -> None:
    with zipfile.ZipFile(saved) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    for base in (None, 3):
        info = json.loads(entries["onnxfit.json"])
        info["base"] = base
        entries["onnxfit.json"] = json.dumps(info).encode()
        with zipfile.ZipFile(saved, "w") as archive:
            for name, data in entries.items():
                archive.writestr(name, data)
        with pytest.raises(CheckpointError):
            Trainer.load(saved, model_onnx=models.mlp(SIZES))


@pytest.mark.parametrize(
    "callback",
    [
        lambda path: ModelCheckpoint(path / "a", adapters_only=True),
        lambda path: BackupAndRestore(path / "a", adapters_only=True),
    ],
    ids=["ModelCheckpoint", "BackupAndRestore"],
)
def test_a_trainer_without_adapters_has_none_to_save(
    tmp_path: Path, callback: Callable[[Path], Any]
) -> None:
    trainer = Trainer(models.mlp(SIZES), loss="cross_entropy")
    with pytest.raises(SettingError, match=r"this trainer has no adapters\. Remove adapters_only"):
        trainer.fit(X, LABELS, verbose=0, callbacks=callback(tmp_path))
    assert trainer.global_step == 0
    with pytest.raises(SettingError, match="this trainer has no adapters"):
        trainer.save(tmp_path / "a", adapters_only=True)
    with pytest.raises(SettingError, match="both save_weights_only=True and adapters_only=True"):
        ModelCheckpoint("a", adapters_only=True, save_weights_only=True)
    assert not list(tmp_path.iterdir())
