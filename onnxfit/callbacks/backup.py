"""Go on after a crash where training stood, by running the same script again."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Union

from onnxfit.callbacks.background import SavingCallback
from onnxfit.callbacks.logs import Logs
from onnxfit.errors import CheckpointError, SettingError
from onnxfit.files import remove_leftovers

if TYPE_CHECKING:
    from onnxfit.trainer import Trainer

__all__ = ["BackupAndRestore"]

KEPT = 2  # the newest, and the one before in case the disk spoiled it


class BackupAndRestore(SavingCallback):
    """Saves the training state into `folder` as training goes, and takes it back when `fit` is
    called again after an interruption.

    - `folder`: of this training alone; made before the first step. It holds the two newest backups,
      `backup-<number>.onnxfit`, each written by `trainer.save` in one move. If the newest cannot be
      read, a warning names it and the one before is taken.
    - `every_n_steps` >= 1: a backup after every so many updates, besides the one at the end of
      every epoch; None for the latter only.
    - `background`: training waits only for a copy of its state in memory, and goes on while that is
      written; for a backup that takes longer than the way to the next one, it waits there. False:
      it waits for each.

    The restored fit goes on at the batch that follows the backup, in the order of rows it had, with
    every callback's state: its weights are those of a fit that was never interrupted. A backup is
    written after monitors and checkpoints have dealt with the event; loggers that were not told of
    it any more are told when training goes on. What is killed while a backup is written goes on
    from the one before. When training ends normally, stopped early or not, the backups are deleted,
    so that the next `fit` begins afresh; after an exception or Ctrl-C they stay. SettingError: a
    setting out of its range, or backups of another model in the folder. CheckpointError: a backup
    could not be written; in the background, it comes with the next one or at the end of training.

    >>> BackupAndRestore("backup", every_n_steps=0)
    Traceback (most recent call last):
        ...
    onnxfit.errors.SettingError: BackupAndRestore needs every_n_steps >= 1, got 0.
    """

    phase: ClassVar[str] = "backup"

    def __init__(
        self,
        folder: Union[str, os.PathLike[str]],
        every_n_steps: int | None = None,
        background: bool = True,
    ) -> None:
        if every_n_steps is not None and not every_n_steps >= 1:
            raise SettingError(f"BackupAndRestore needs every_n_steps >= 1, got {every_n_steps}.")
        self.folder = Path(folder)
        self.every_n_steps = every_n_steps
        self.background = background
        self._ended = False
        self._good: list[Path] = []  # backups of this training that can be read, the newest last
        self._step = -1  # at the last backup

    @property
    def state_key(self) -> str:
        return f"BackupAndRestore({self.folder})"

    def listens(self, hook: str) -> bool:
        return super().listens(hook) and (
            hook != "on_train_batch_end" or self.every_n_steps is not None
        )

    def prepare(self, trainer: Trainer) -> None:
        self._good = []
        remove_leftovers(self.folder, seconds=0)
        for path in reversed(self._backups()):
            try:
                trainer.restore(path)
            except CheckpointError as error:
                warnings.warn(
                    f"The backup {str(path)!r} cannot be read; the one before is tried. {error}",
                    UserWarning,
                    stacklevel=3,
                )
            else:
                self._good = [path]
                return

    def on_train_begin(self, logs: Logs) -> None:
        self._ended = False
        self._step = self.trainer.global_step

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        # loggers are about to write, and a fit that is killed before its first backup would not
        # know what
        if not self._good:
            self._save()
            self.finish_save()

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        step = self.trainer.global_step
        if self.every_n_steps is not None and step != self._step and step % self.every_n_steps == 0:
            self._save()

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        self._save()

    def on_train_end(self, logs: Logs) -> None:
        super().on_train_end(logs)
        self._ended = True

    def on_exception(self, exception: BaseException) -> None:
        self._ended = False

    def on_close(self) -> None:
        super().on_close()
        if self._ended:
            self._ended = False
            self._delete_all_but([])

    def _save(self) -> None:
        self.finish_save()
        self._step = self.trainer.global_step
        number = max((_number(path) for path in self._backups()), default=-1) + 1
        path, snapshot = self.folder / f"backup-{number:06d}.onnxfit", self.trainer.snapshot()

        def write() -> None:
            snapshot.write(path)
            self._good = [*self._good, path][-KEPT:]
            self._delete_all_but(self._good)

        self.save(write)

    def _backups(self) -> list[Path]:
        """The backups in the folder, the newest last."""
        found = [
            path
            for path in self.folder.glob("backup-*.onnxfit")
            if path.stem.removeprefix("backup-").isdecimal()
        ]
        return sorted(found, key=_number)

    def _delete_all_but(self, kept: list[Path]) -> None:
        for path in self._backups():
            if path not in kept:
                path.unlink(missing_ok=True)
        if not kept and self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("backup-"))
