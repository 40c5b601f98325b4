"""The law of loggers: one that cannot write warns once, and training goes on. Checkpoints and data
that the user asked for raise an error that names the path and the reason.

A limit on the size of files stands for a full disk: the system then writes a part, and refuses.
"""

from __future__ import annotations

import json
import resource
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import onnxfit
from onnxfit.callbacks import (
    BackupAndRestore,
    Callback,
    CSVLogger,
    JSONLLogger,
    LearningRateFinder,
    MLflowLogger,
    ModelCheckpoint,
    PredictionWriter,
    TensorBoard,
)
from onnxfit.callbacks.write_guard import WriteGuard
from onnxfit.errors import CheckpointError, SettingError
from tests.callbacks.helpers import X, Y, fit, rows

LOGGERS: dict[str, Callable[[Path], Callback]] = {
    "CSVLogger": CSVLogger,
    "JSONLLogger": JSONLLogger,
    "TensorBoard": TensorBoard,
}
every_logger = pytest.mark.parametrize("name", LOGGERS)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let the system refuse to make a file larger than `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class FullDisk(Callback):
    """A disk that is full in some epochs, from 0, when `path` has room for `room` more bytes.

    The phase of monitors is before that of loggers.
    """

    def __init__(self, logger: Callback, path: Path, epochs: set[int], room: int) -> None:
        self.path = path
        self.epochs = epochs
        self.room = room
        write = logger.on_epoch_end

        def write_to_the_disk(epoch: int, logs: Any) -> None:
            if epoch not in epochs:
                write(epoch, logs)
                return
            with files_of_at_most(self.size() + self.room):
                write(epoch, logs)

        logger.on_epoch_end = write_to_the_disk  # type: ignore[method-assign]

    def size(self) -> int:
        files = self.path.rglob("*") if self.path.is_dir() else [self.path]
        return max((path.stat().st_size for path in files if path.is_file()), default=0)


def writing_warnings(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if "cannot write" in str(w.message)]


@every_logger
def test_a_logger_that_cannot_write_at_all_warns_once_and_names_file_and_reason(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "file").write_text("no folder")
    logger = LOGGERS[name](tmp_path / "file" / "log")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on = fit(logger, epochs=3, validation_data=(X, Y))
    assert len(on.history.epoch) == 3
    (message,) = writing_warnings(caught)
    assert message.startswith(f"{name} cannot write '{tmp_path / 'file' / 'log'}': ")
    assert "older" in message or "directory" in message  # a folder, in either spelling
    with pytest.warns(RuntimeWarning, match="cannot write"):  # once in each fit
        fit(logger, epochs=1)


@every_logger
@pytest.mark.parametrize("room", [0, 5])
def test_a_full_disk_leaves_no_part_of_a_row_and_the_missing_rows_follow(
    tmp_path: Path, name: str, room: int
) -> None:
    path = tmp_path / "log"
    logger = LOGGERS[name](path)
    disk = FullDisk(logger, path, {1, 2}, room)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(disk, logger, epochs=5, validation_data=(X, Y))
    assert len(writing_warnings(caught)) == 1
    assert epochs_in(path) == [1, 2, 3, 4, 5]


@every_logger
def test_a_disk_that_stays_full_ends_the_file_with_a_whole_row(tmp_path: Path, name: str) -> None:
    path = tmp_path / "log"
    logger = LOGGERS[name](path)
    disk = FullDisk(logger, path, {2, 3}, 5)
    close = logger.on_close

    def close_on_a_full_disk() -> None:
        with files_of_at_most(disk.size() + 5):
            close()

    logger.on_close = close_on_a_full_disk  # type: ignore[method-assign]
    with pytest.warns(RuntimeWarning, match=f"{name} cannot write"):
        fit(disk, logger, epochs=4)
    assert epochs_in(path) == [1, 2]


def epochs_in(path: Path) -> list[int]:
    """The epochs of the losses in the files of a logger, all of which can be read."""
    if path.is_dir():
        loading = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
        (file,) = (path / "train").iterdir()
        events = list(loading.EventFileLoader(str(file)).Load())
        return [e.step for e in events for v in e.summary.value if v.tag == "loss/epoch_loss"]
    text = path.read_text()
    assert text.endswith("\n")
    lines = [json.loads(line) for line in text.splitlines()] if text[0] == "{" else rows(path)
    return [int(line["epoch"]) for line in lines]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (CSVLogger, "epoch,loss\n0,1,2\n"),
        (CSVLogger, "loss\n1\n"),
        (CSVLogger, b"\xff\xfe\n"),
        (JSONLLogger, "broken\n"),
        (JSONLLogger, "[1]\n"),
        (JSONLLogger, b"\xff\xfe\n"),
    ],
)
def test_a_file_of_another_kind_is_not_continued(
    tmp_path: Path, kind: Any, text: str | bytes
) -> None:
    path = tmp_path / "log"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SettingError, match=f"was not written by {kind.__name__}"):
        fit(kind(path, append=True), epochs=1)


@pytest.mark.parametrize("failing", ["create_run", "log_metric", "set_terminated", "log_artifact"])
def test_mlflow_that_fails_is_a_warning(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    called: list[str] = []

    class Client:
        def __init__(self, tracking_uri: str | None = None) -> None:
            pass

        def __getattr__(self, name: str) -> Callable[..., Any]:
            def call(*arguments: Any, **settings: Any) -> Any:
                called.append(name)
                if name == failing:
                    raise ConnectionError("the server is down")
                return SimpleNamespace(experiment_id="0", info=SimpleNamespace(run_id="run"))

            return call

    module = ModuleType("mlflow")
    module.MlflowClient = Client  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(MLflowLogger(tracking_uri="http://mlflow", log_model=True), epochs=3)
    (message,) = writing_warnings(caught)
    assert message.startswith("MLflowLogger cannot write 'http://mlflow': the server is down")
    assert failing in called


@pytest.mark.parametrize(
    "make",
    [
        lambda path: ModelCheckpoint(path / "a.ckpt"),
        lambda path: ModelCheckpoint(path / "a.safetensors", save_weights_only=True),
        lambda path: ModelCheckpoint(path / "a.onnx", save_weights_only=True, background=False),
        BackupAndRestore,
    ],
)
def test_a_checkpoint_that_cannot_be_written_raises(tmp_path: Path, make: Any) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(CheckpointError, match=r"file.* cannot be written: .*is a file, not a fold"):
        fit(make(tmp_path / "file"), epochs=3)
    with files_of_at_most(10), pytest.raises(CheckpointError, match=r"cannot be written: .*large"):
        fit(make(tmp_path / "new"), epochs=3)


def test_predictions_and_plots_that_cannot_be_written_raise(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    on = fit(epochs=1)
    with pytest.raises(CheckpointError, match="is a file, not a folder"):
        on.predict(X, callbacks=[PredictionWriter(tmp_path / "file")])
    pytest.importorskip("matplotlib")
    finder = LearningRateFinder(steps=4)
    fit(finder, epochs=1)
    with pytest.raises(CheckpointError, match="is a file, not a folder"):
        finder.plot(tmp_path / "file" / "a.png")


@pytest.mark.parametrize("template", ["{epoch:zz}", "{loss:d}", "{loss!q}"])
def test_a_template_that_cannot_be_filled_is_refused(tmp_path: Path, template: str) -> None:
    with pytest.raises(SettingError, match=r"cannot be filled|No field of the filepath"):
        fit(ModelCheckpoint(f"{tmp_path}/{template}.ckpt"), epochs=1)


def test_a_guard_lets_other_errors_pass() -> None:
    guard = WriteGuard("Logger", "a.csv")
    with pytest.raises(ZeroDivisionError), guard:
        raise ZeroDivisionError
    assert onnxfit.OnnxfitError not in guard.errors
