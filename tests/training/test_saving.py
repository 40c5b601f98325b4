"""What a trainer writes into its checkpoints, and takes from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from onnxfit import Trainer
from onnxfit.callbacks import (
    BackupAndRestore,
    Callback,
    EarlyStopping,
    LambdaCallback,
    ModelCheckpoint,
)
from onnxfit.cli.job import CheckpointLayout
from onnxfit.errors import CheckpointError, SettingError
from onnxfit.training import checkpoint
from tests.helpers import column
from tests.models import linear

X, Y = column(1, 2, 3), column(0, 0, 0)


def new(**settings: Any) -> Trainer:
    return Trainer(linear(w=1), loss="mse", **{"optimizer": 0.01, **settings})


def numbers(model: onnx.ModelProto) -> dict[str, Any]:
    return {t.name: onnx.numpy_helper.to_array(t).tolist() for t in model.graph.initializer}


def fit(trainer: Trainer, *callbacks: Callback, **settings: Any) -> Trainer:
    trainer.fit(X, Y, **{"batch_size": 1, "verbose": 0, **settings}, callbacks=list(callbacks))
    return trainer


def test_a_fit_that_has_ended_leaves_no_states_of_callbacks(tmp_path: Path) -> None:
    """The next fit is another one, also where the checkpoint is written at the end of the last."""
    trainer = new()
    save = LambdaCallback(on_train_end=lambda logs: trainer.save(tmp_path / "c"))
    fit(trainer, EarlyStopping("loss", patience=9), save, epochs=2)
    loaded = Trainer.load(tmp_path / "c")
    stopping = EarlyStopping("loss", patience=9)
    fit(loaded, stopping, epochs=1)
    assert stopping.best_epoch == 0
    assert loaded.history.epoch == [0]


def test_the_model_has_the_current_numbers_of_trained_weights(tmp_path: Path) -> None:
    """Everything else in it is as it was given; and so it is in a file of graphs."""
    given = linear(w=1, b=2)
    trainer = Trainer(given, weights="w", loss="mse", optimizer=0.01)
    assert numbers(trainer.model) == numbers(given)
    trainer.set_weights({"w": [[7]]})
    files = trainer.save_onnx_graph(tmp_path)
    for model in (trainer.model, onnx.load(tmp_path / files["model"])):
        assert numbers(model) == {"w": [[7]], "b": numbers(given)["b"]}
        del model.graph.initializer[:]
        bare = onnx.ModelProto.FromString(given.SerializeToString())
        del bare.graph.initializer[:]
        assert model == bare
    trainer.model.graph.initializer[0].name = "another"  # it is a copy
    assert numbers(trainer.export()).keys() == {"w", "b"}


def test_losses_of_epochs_and_the_history_come_back(tmp_path: Path) -> None:
    trainer = fit(new(metrics=["mae"]), epochs=2)
    loaded = Trainer.load(trainer.save(tmp_path / "c"))
    assert loaded.train_losses_ == trainer.train_losses_
    assert len(loaded.train_losses_) == 2
    assert loaded.history.history == trainer.history.history
    assert (loaded.epoch, loaded.global_step) == (2, 6)


def test_a_checkpoint_does_not_change_with_the_training_after_it(tmp_path: Path) -> None:
    snapshots = []

    def keep(batch: int, logs: Any) -> None:
        snapshots.append((trainer.snapshot(), trainer.get_state(), dict(logs)))

    trainer = new(metrics=["mae", "auc"], accumulate=2, optimizer="adam")
    labels = column(0, 1, 0)
    trainer.fit(
        X, labels, batch_size=1, verbose=0, callbacks=[LambdaCallback(on_train_batch_end=keep)]
    )
    for snapshot, state, logs in snapshots:
        contents = checkpoint.load(snapshot.write(tmp_path / "c"), {})
        assert contents.state["counters"] == state["counters"]
        assert contents.state["weights"]["w"].item() == state["weights"]["w"].item()
        loss, rows = contents.tracker["loss"]
        assert loss / rows == pytest.approx(logs["loss"])
        assert len(contents.tracker["metrics"]["auc"]["_batches"]) == rows


def test_restore_is_not_for_a_running_fit(tmp_path: Path) -> None:
    path = new().save(tmp_path / "c")
    trainer = new()
    restore = LambdaCallback(on_epoch_begin=lambda epoch, logs: trainer.restore(path))
    with pytest.raises(SettingError, match="restore sets the position where fit begins"):
        fit(trainer, restore)
    trainer.restore(path)


def test_a_checkpoint_of_a_newer_format_says_to_upgrade(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = new().save(tmp_path / "c")
    Trainer.load(path)
    monkeypatch.setattr(checkpoint, "FORMAT", 0)
    with pytest.raises(
        CheckpointError,
        match=rf"'{path}' has format 1, from a newer version of onnxfit. This version reads formats up to 0\.",
    ):
        Trainer.load(path)
    trainer = new()
    with pytest.raises(CheckpointError, match="Upgrade"):
        trainer.restore(path)


FOREIGN = [".onnx", ".keras", ".h5", ".hdf5", ".pt", ".PTH", ".pkl", ".npz", ".pb", ".safetensors"]


@pytest.mark.parametrize("suffix", FOREIGN)
@pytest.mark.parametrize(
    "write",
    [
        lambda path: new().save(path),
        lambda path: new().snapshot().write(path),
        lambda path: ModelCheckpoint(path),
        lambda path: ModelCheckpoint(path.with_stem("{epoch:02d}-{val_loss:.3f}"), top_k=2),
        lambda path: BackupAndRestore(path),
        lambda path: CheckpointLayout(str(path)),
    ],
)
def test_a_checkpoint_is_not_named_like_another_file(
    tmp_path: Path, write: Callable[[Path], object], suffix: str
) -> None:
    message = rf"a checkpoint.*, but \{suffix.lower()} is the suffix of .*Name the file '.*\.ckpt'"
    with pytest.raises(SettingError, match=message):
        write(tmp_path / f"model{suffix}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [".keras", ".weights.h5", ".pt", ".npz", ".safetensors", ".ort"])
@pytest.mark.parametrize(
    "write",
    [lambda path: new().export(path), lambda path: new().model_snapshot().write(path)],
)
def test_a_model_is_not_named_like_another_file(
    tmp_path: Path, write: Callable[[Path], object], suffix: str
) -> None:
    with pytest.raises(SettingError, match=r"contain an ONNX model.*Name the file 'model.*\.onnx'"):
        write(tmp_path / f"model{suffix}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [".keras", ".weights.h5", ".pt", ".npz"])
def test_weights_are_not_named_like_another_file(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(SettingError, match=r"contain weights.*\.safetensors'.*\.onnx writes the"):
        ModelCheckpoint(tmp_path / f"model{suffix}", save_weights_only=True)
