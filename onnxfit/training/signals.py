"""Signals that wait until the training state is consistent."""

from __future__ import annotations

# Without the enums of the module `signal`, which take ten times as long.
import _signal  # type: ignore[import-not-found]
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

NAMES = ("SIGINT", "SIGTERM", "SIGBREAK", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
SIGNALS = [int(getattr(signal, name)) for name in NAMES if hasattr(signal, name)]


class DeferredSignals:
    """Handlers of signals that wait while `is_busy` is true.

    A handler that raises an exception in the middle of a step, as Ctrl-C does, or saves a
    checkpoint, would find weights without their counters. A signal that arrives meanwhile is passed
    on to the handler of the program by `deliver`; the same signal a second time is passed on at
    once, for a step that hangs. Only handlers written in Python are replaced.
    """

    def __init__(self) -> None:
        self.is_busy = False
        self.waiting: list[int] = []  # signals that arrived while busy
        self._previous: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._handler = self._receive  # one object, to compare with

    def install(self) -> list[int]:
        """Replace the handlers of the main thread; return the signals for `remove`."""
        if threading.get_ident() != threading.main_thread().ident:
            return []
        installed: list[int] = []
        for number in SIGNALS:
            handler = _signal.getsignal(number)
            if callable(handler) and handler is not self._handler:
                self._previous[number] = handler
                _signal.signal(number, self._handler)
                installed.append(number)
        return installed

    def remove(self, numbers: Iterable[int]) -> None:
        """Restore the handlers, except where the program has set another one since."""
        for number in numbers:
            if _signal.getsignal(number) is self._handler:
                _signal.signal(number, self._previous[number])

    def deliver(self) -> None:
        """Pass waiting signals on; call it when `is_busy` has become false."""
        while self.waiting:
            self._pass_on(self.waiting.pop(0), None)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.is_busy and number not in self.waiting:
            self.waiting.append(number)
            return
        self.deliver()
        self._pass_on(number, frame)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        handler = _signal.getsignal(number)
        if handler is self._handler:
            handler = self._previous[number]
        if callable(handler):
            handler(number, frame)
        else:  # the program has chosen the system's handler since
            signal.raise_signal(number)
