"""Log the speed, CPU time and memory of training."""

from __future__ import annotations

import sys
from time import monotonic, process_time
from typing import ClassVar

from onnxfit.callbacks.callback import Callback
from onnxfit.callbacks.logs import Logs

__all__ = ["DeviceStats"]


class DeviceStats(Callback):
    """Log samples per second, CPU use and memory at the end of every epoch.

    - `samples_per_second`: rows trained, divided by the seconds of the epoch without its
      validation.
    - `cpu_percent`: CPU time of the process, divided by the time that passed, in percent; 100 means
      one core busy all the time.
    - `memory_megabytes`: memory of the process in RAM (RSS), in 10^6 bytes. On macOS this is the
      peak; on Windows it is absent.

    Loggers and History record these values like every metric. With several processes, `cpu_percent`
    and `memory_megabytes` are measured on rank 0, and the rows of all processes are counted.

    >>> stats = DeviceStats()
    """

    logs_figures: ClassVar[bool] = True

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        self._samples_before = self.trainer.samples_seen
        self._epoch_began = monotonic()
        self._cpu_before = process_time()
        self._validation_seconds = 0.0

    def on_test_begin(self, logs: Logs) -> None:
        self._validation_began = monotonic()

    def on_test_end(self, logs: Logs) -> None:
        self._validation_seconds = monotonic() - self._validation_began

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        seconds = max(monotonic() - self._epoch_began, 1e-9)
        training_seconds = max(seconds - self._validation_seconds, 1e-9)
        samples = self.trainer.samples_seen - self._samples_before
        self.trainer.log("samples_per_second", samples / training_seconds)
        self.trainer.log("cpu_percent", 100 * (process_time() - self._cpu_before) / seconds)
        memory = _resident_bytes()
        if memory is not None:
            self.trainer.log("memory_megabytes", memory / 1e6)


def _resident_bytes() -> float | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return float(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return float(peak if sys.platform == "darwin" else peak * 1024)
