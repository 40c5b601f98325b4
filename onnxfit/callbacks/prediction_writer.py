"""Write predictions to files, batch by batch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar, Union

import numpy as np

from onnxfit.callbacks.callback import Callback
from onnxfit.callbacks.logs import Logs
from onnxfit.checks import check_arguments
from onnxfit.errors import CheckpointError
from onnxfit.files import write_atomically

__all__ = ["PredictionWriter"]


class PredictionWriter(Callback):
    """Write every batch of `trainer.predict` to its own file.

    - `output_dir`: the folder of the files `batch-000000.npz`, `batch-000001.npz`, ... Each file
      maps output name -> array, and is written atomically.

    Files of an earlier prediction are replaced. When this prediction ends, earlier files beyond its
    last batch are deleted. CheckpointError: the folder cannot be written.

    >>> writer = PredictionWriter("predictions")  # for trainer.predict(x, callbacks=[writer])
    """

    phase: ClassVar[str] = "logger"

    @check_arguments
    def __init__(self, output_dir: Union[str, os.PathLike[str]]) -> None:
        self.output_dir = Path(output_dir)
        self._written = 0

    @property
    def state_key(self) -> str:
        return f"PredictionWriter({self.output_dir})"

    def on_predict_begin(self, logs: Logs) -> None:
        self._written = 0

    def on_predict_batch_end(self, batch: int, logs: Logs) -> None:
        arrays: dict[str, Any] = dict(self.trainer.predicted)
        write_atomically(self._path(batch), lambda file: np.savez(file, **arrays))
        self._written = batch + 1

    def on_predict_end(self, logs: Logs) -> None:
        batch = self._written
        while self._path(batch).exists():
            batch += 1
        try:
            # The last file goes first. A call that does not finish then leaves no gap, behind which
            # the next call would find no files.
            while batch > self._written:
                batch -= 1
                self._path(batch).unlink()
        except OSError as error:
            raise CheckpointError(
                f"PredictionWriter cannot delete {str(self._path(batch))!r}, a file of an earlier"
                f" prediction: {error.strerror or error}."
            ) from error

    def _path(self, batch: int) -> Path:
        return self.output_dir / f"batch-{batch:06d}.npz"
