"""Log what training asks of the machine."""

from __future__ import annotations

import sys
from time import monotonic, process_time

from onnxfit.callbacks.callback import Callback
from onnxfit.callbacks.logs import Logs

__all__ = ["DeviceStats"]


class DeviceStats(Callback):
    """Adds to the logs of every epoch's end:

    `samples_per_second`, `cpu_percent` and `memory_megabytes`.

    - `samples_per_second`: rows trained on, by the time the epoch took without its validation.
    - `cpu_percent`: the process's CPU time by the time that passed, 100 for one core at work all
      along.
    - `memory_megabytes`: the memory the process holds in RAM (RSS, in 10^6 bytes); on macOS the
      most it ever held; absent on Windows.

    Loggers and History have them as they have every figure.
    """

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        self._samples = self.trainer.samples_seen
        self._began, self._worked = monotonic(), process_time()
        self._tested = 0.0

    def on_test_begin(self, logs: Logs) -> None:
        self._test_began = monotonic()

    def on_test_end(self, logs: Logs) -> None:
        self._tested = monotonic() - self._test_began

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        seconds = max(monotonic() - self._began, 1e-9)
        log = self.trainer.log
        log(
            "samples_per_second",
            (self.trainer.samples_seen - self._samples) / max(seconds - self._tested, 1e-9),
        )
        log("cpu_percent", 100 * (process_time() - self._worked) / seconds)
        memory = _resident_bytes()
        if memory is not None:
            log("memory_megabytes", memory / 1e6)


def _resident_bytes() -> float | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return float(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return float(most if sys.platform == "darwin" else most * 1024)
