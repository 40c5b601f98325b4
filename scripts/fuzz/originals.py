"""Undamaged files: checkpoints, the folder of a training on the command line, tables and images."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from onnxfit import LoRA, Trainer
from onnxfit.callbacks import CSVLogger, EarlyStopping, LambdaCallback, ReduceLROnPlateau
from onnxfit.optimizers import SGD, Adam
from onnxfit.schedules import Cosine
from scripts.fuzz.commands import call, model_and_data
from scripts.fuzz.data import SMALL
from scripts.fuzz.kinds import callback_states, cli_notes, images
from tests.models import convolutional, mlp


def _unfinished_fit(trainer: Trainer, rows: int, path: Path, **x: Any) -> bytes:
    """Return a checkpoint from the middle of the second epoch, with the states of callbacks."""

    def save(batch: int, logs: object) -> None:
        if trainer.epoch == 1 and batch == 1:
            trainer.save(path)

    callbacks = [
        EarlyStopping("loss"),
        ReduceLROnPlateau("loss"),
        LambdaCallback(on_train_batch_end=save),
        CSVLogger(path.with_suffix(".csv")),
    ]
    trainer.fit(**x, epochs=2, batch_size=rows // 3, callbacks=callbacks, verbose=0)
    return path.read_bytes()


def originals(folder: Path) -> dict[str, bytes]:
    """Return the files by name; some are written in `folder`. Without pyarrow or Pillow, there are
    no tables or images.
    """
    files = _checkpoints(folder)
    with _inside(folder):
        return {
            **files,
            **_states(),
            **_training(),
            **_adapters(),
            **_training_folders(),
            **_tables(),
            **_images(),
        }


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    previous = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(previous)


def _states() -> dict[str, bytes]:
    """Return a checkpoint with the states of all callbacks that keep one."""
    trainer = Trainer(
        mlp(), loss="cross_entropy", optimizer=SGD(0.05, momentum=0.9, ema_momentum=0.9), threads=1
    )

    def save(epoch: int, logs: object) -> None:
        trainer.save("callbacks")

    callbacks = [new() for new in callback_states.CALLBACKS]
    callback_states.fit(trainer, [*callbacks, LambdaCallback(on_epoch_end=save)], epochs=2)
    return {"callbacks": Path("callbacks").read_bytes()}


def _training() -> dict[str, bytes]:
    """Return what `onnxfit fit` leaves in its folder."""
    for name, data in model_and_data().items():
        Path(name).write_bytes(data)
    if call(*cli_notes.TRAINING) != "ran":
        raise RuntimeError("`onnxfit fit` failed.")
    files = {name: Path(name).read_bytes() for name in ("run/last.onnxfit", "run/log.csv")}
    note = Path(cli_notes.NOTE).read_text().replace(os.getcwd(), cli_notes.HERE)
    return {**files, cli_notes.NOTE: note.encode()}


def _adapters() -> dict[str, bytes]:
    """Return adapters in the files of PEFT and of onnxruntime, of one batch of training."""
    file = "damaged.onnx_adapter"
    settings = {
        "lora": LoRA(2, 3.0, dropout=0.1),
        "dora": LoRA(2, dora=True),
        "loaded": [LoRA(1, target="fc0*", scaling="alpha/sqrt(r)"), LoRA(3, target="fc1*")],
    }
    paths = []
    for name, adapters in settings.items():
        trainer = Trainer(mlp(), loss="cross_entropy", adapters=adapters, threads=1)
        trainer.train_on_batch(SMALL["X"], SMALL["y"])
        paths += trainer.export_adapter(name).iterdir()
        if name == "lora":
            paths.append(trainer.export_adapter(file))
    return {path.as_posix(): path.read_bytes() for path in paths}


def _training_folders() -> dict[str, bytes]:
    """Return the files of training folders, with and without adapters."""
    files = {}
    for name, adapters in (("folder", None), ("folder of adapters", LoRA(2))):
        trainer = Trainer(mlp(), loss="cross_entropy", optimizer=Adam(), adapters=adapters)
        trainer.train_on_batch(SMALL["X"], SMALL["y"])
        folder = trainer.export_training(name, batch_size=5)
        files |= {path.as_posix(): path.read_bytes() for path in folder.iterdir()}
    return files


def _tables() -> dict[str, bytes]:
    try:
        import pyarrow
        from pyarrow import feather, parquet
    except ImportError:
        return {}
    columns = dict(zip("abcd", SMALL["X"].T)) | {"y": SMALL["y"]}
    table = pyarrow.table({name: pyarrow.array(column) for name, column in columns.items()})
    files = {}
    for name, write in {
        "table.parquet": lambda file: parquet.write_table(table, file, row_group_size=5),
        "table.arrow": lambda file: feather.write_feather(table, file, chunksize=5),
    }.items():
        file = io.BytesIO()
        write(file)
        files[name] = file.getvalue()
    return files


def _images() -> dict[str, bytes]:
    try:
        from PIL import Image
    except ImportError:
        return {}
    pixels = np.random.default_rng(0).integers(0, 255, (16, 16, 3)).astype(np.uint8)
    files = {}
    for kind in images.FORMATS:
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, kind)
        files[f"image.{kind}"] = file.getvalue()
    return files


def _checkpoints(folder: Path) -> dict[str, bytes]:
    """Return checkpoints: two of unfinished fits with the states of callbacks, one of none."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 4)).astype(np.float32), np.arange(12) % 3
    images = rng.normal(size=(12, 1, 8, 8)).astype(np.float32)
    adam = Trainer(
        mlp(),
        loss="cross_entropy",
        optimizer=Adam(ema_momentum=0.9),
        metrics=["accuracy"],
        penalty={"fc*": {"l1": 0.1}},
    )
    network = Trainer(
        convolutional(),
        loss="cross_entropy",
        optimizer=SGD(momentum=0.9),
        backend="forward_backward",
        accumulate=2,
        clip_norm=1.0,
    )
    scheduled = Trainer(mlp(), loss="cross_entropy", optimizer=Adam(learning_rate=Cosine(0.1, 10)))
    return {
        "adam": _unfinished_fit(adam, 12, folder / "adam", x=x, y=y),
        "network": _unfinished_fit(network, 12, folder / "network", x=images, y=y),
        "scheduled": scheduled.save(folder / "scheduled").read_bytes(),
    }
