"""Resume training after a crash by running the same script again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Union

from onnxfit.callbacks.background import SavingCallback, require_adapters, require_save_freq
from onnxfit.callbacks.logs import Logs
from onnxfit.checks import check_arguments, require_at_least
from onnxfit.errors import CheckpointError, warn_user
from onnxfit.files import remove_leftovers, require_checkpoint_name, require_path

if TYPE_CHECKING:
    from onnxfit.trainer import Trainer

__all__ = ["BackupAndRestore"]


class BackupAndRestore(SavingCallback):
    """Save the training state during training, and restore it when `fit` is called again.

    - `backup_dir`: a folder for this training alone, created before the first step. It holds the
      newest backups, `backup-<number>.onnxfit`, each written by `trainer.save` in one move.
    - `save_freq`: "epoch" for a backup at the end of every epoch; a number n >= 1 for a backup
      after every n batches too.
    - `double_checkpoint`: keep the last two backups. If the newest cannot be read, a warning names
      it and the one before is restored. False keeps one.
    - `delete_checkpoint`: delete the backups when training ends normally, stopped early or not, so
      that the next `fit` begins a new training. False keeps them until you delete the folder: the
      next `fit` restores the state at the end of the last epoch and continues after it. If no epoch
      is left, or a callback had stopped training, `fit` trains nothing, and callbacks end it as
      they did the first time. This way, a script that fails between `fit` and `export` can be run
      again. With False, give each `fit` of a script its own folder. After an exception or Ctrl-C,
      backups always stay.
    - `every_n_steps`: a number n >= 1 for a backup after every n updates too (with accumulated
      gradients there are fewer updates than batches). None: no backups after updates.
    - `adapters_only`: leave the frozen model out of the backups (`trainer.save(path,
      adapters_only=True)`). The script supplies the model when it is run again.
    - `background`: whether training waits only for a copy of its state in memory, and continues
      while the copy is written. None does so if the state has at most 512 MB; a larger state is
      written without a copy, and training waits. The next backup waits for the previous one.

    The resumed fit continues at the batch after the backup, with the same order of rows and every
    callback's state: its weights equal the weights of an uninterrupted fit. Backups are written
    after monitors and checkpoints have run; the loggers that missed that event are called when
    training resumes. If the process is killed while it writes a backup, the previous backup is
    restored. With several processes, rank 0 writes and reads the backups, and sends the state to
    the others; a different number of processes can resume the training. With `average_every=k`, the
    numbers must be multiples of k.

    SettingError: a setting is out of its range, or the folder has backups of another model.
    CheckpointError: a backup could not be written, or an old one not deleted; the
    next backup or the end of training raises it if the backup is written in the background.

    >>> backup = BackupAndRestore("backup", every_n_steps=1000)
    >>> BackupAndRestore("backup", every_n_steps=0)
    Traceback (most recent call last):
        ...
    onnxfit.errors.SettingError: BackupAndRestore needs every_n_steps >= 1, got 0.
    """

    phase: ClassVar[str] = "backup"

    @check_arguments
    def __init__(
        self,
        backup_dir: Union[str, os.PathLike[str]],
        *,
        save_freq: Union[str, int] = "epoch",
        double_checkpoint: bool = True,
        delete_checkpoint: bool = True,
        every_n_steps: int | None = None,
        adapters_only: bool = False,
        background: bool | None = None,
    ) -> None:
        require_at_least("BackupAndRestore", 1, every_n_steps=every_n_steps)
        require_save_freq("BackupAndRestore", save_freq)
        require_path(backup_dir)
        require_checkpoint_name(backup_dir)
        self.backup_dir = Path(backup_dir)
        self.save_freq = save_freq
        self.double_checkpoint = double_checkpoint
        self.delete_checkpoint = delete_checkpoint
        self.every_n_steps = every_n_steps
        self.adapters_only = adapters_only
        self.background = background
        self._ended_normally = False
        # Backups of this training that can be read, the newest last.
        self._readable: list[Path] = []
        self._last_step = -1  # the step of the last backup

    @property
    def state_key(self) -> str:
        return f"BackupAndRestore({self.backup_dir})"

    def overrides(self, hook: str) -> bool:
        by_batch = self.every_n_steps is not None or self.save_freq != "epoch"
        return super().overrides(hook) and (hook != "on_train_batch_end" or by_batch)

    def prepare(self, trainer: Trainer) -> None:
        if self.adapters_only:
            require_adapters(trainer.settings)
        self._readable = []
        paths: list[Path] = []
        if trainer.is_main:
            remove_leftovers(self.backup_dir, seconds=0)
            paths = self._backups()
        names = trainer.broadcast("BackupAndRestore", [str(path) for path in reversed(paths)])
        for path in map(Path, names):
            try:
                trainer.restore(path)
            except CheckpointError as error:
                if trainer.is_main:
                    warn_user(
                        f"The backup {str(path)!r} cannot be read, so the previous backup is read"
                        f" instead. {error}"
                    )
            else:
                self._readable = [path]
                return

    def on_train_begin(self, logs: Logs) -> None:
        super().on_train_begin(logs)
        self._ended_normally = False
        self._last_step = self.trainer.global_step

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        # Loggers are about to write. Without a backup, a fit that is killed now could not tell
        # which of their lines to keep.
        if not self._readable:
            self._save()
            self.finish_save()

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        step = self.trainer.global_step
        by_step = self.every_n_steps is not None and step % self.every_n_steps == 0
        by_batch = self.may_save_mid_window(self.trainer.global_batch)
        # With accumulated gradients several batches have the same step.
        if by_batch or (by_step and step != self._last_step):
            self._save()

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        self._save()

    def on_train_end(self, logs: Logs) -> None:
        super().on_train_end(logs)
        self._ended_normally = True

    def on_exception(self, exception: BaseException) -> None:
        self._ended_normally = False

    def on_close(self) -> None:
        super().on_close()
        if self._ended_normally:
            self._ended_normally = False
            if self.delete_checkpoint:
                self._delete_all_except([])

    def _save(self) -> None:
        self.finish_save()
        self._last_step = self.trainer.global_step
        number = max((_number_of_backup(path) for path in self._backups()), default=-1) + 1
        path = self.backup_dir / f"backup-{number:06d}.onnxfit"
        snapshot = self.trainer.snapshot(adapters_only=self.adapters_only, copy=self.copies_state)
        count = 2 if self.double_checkpoint else 1

        def write() -> None:
            snapshot.write(path)
            self._readable = [*self._readable, path][-count:]
            self._delete_all_except(self._readable)

        self.save(write)

    def _backups(self) -> list[Path]:
        """Return the backups in the folder, the newest last."""
        paths = [
            path
            for path in self.backup_dir.glob("backup-*.onnxfit")
            if path.stem.removeprefix("backup-").isdecimal()
        ]
        return sorted(paths, key=_number_of_backup)

    def _delete_all_except(self, kept: list[Path]) -> None:
        try:
            for path in self._backups():
                if path not in kept:
                    path.unlink(missing_ok=True)
            if not kept and self.backup_dir.is_dir() and not any(self.backup_dir.iterdir()):
                self.backup_dir.rmdir()
        except OSError as error:
            raise CheckpointError(
                f"BackupAndRestore cannot delete old backups in {str(self.backup_dir)!r}:"
                f" {error.strerror or error}."
            ) from error


def _number_of_backup(path: Path) -> int:
    return int(path.stem.removeprefix("backup-"))
