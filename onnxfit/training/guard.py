"""Guards of the training state: one thread trains, and a step happens as a whole or not at all."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from onnxfit.errors import SettingError
from onnxfit.training.signals import DeferredSignals


class Advance:
    """Context in which the training state changes as a whole.

    Weights, counters, sums and position then belong to the same batch for everyone else: other
    threads that save wait for `lock`, and signals wait for the end. It may be entered again inside.
    Take `lock` before the lock of a backend.
    """

    def __init__(self) -> None:
        self.signals = DeferredSignals()
        self.lock = threading.RLock()
        self._depth = 0
        self._was_busy = False

    def __enter__(self) -> None:
        if not self._depth:
            self._was_busy = self.signals.is_busy
            self.signals.is_busy = True
            self.lock.acquire()
        self._depth += 1

    def __exit__(self, *exception: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.lock.release()
            self.signals.is_busy = self._was_busy
            if self.signals.waiting and not self._was_busy:
                self.signals.deliver()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let user code run that may be undone: signals arrive, and other threads may save."""
        depth, self._depth = self._depth, 0
        self.lock.release()
        self.signals.is_busy = False
        try:
            self.signals.deliver()
            yield
        finally:
            self.signals.is_busy = True
            self.lock.acquire()
            self._depth = depth

    def reset(self) -> None:
        """Reset contexts whose `__exit__` was cut short by a second Ctrl-C."""
        self.signals.is_busy = False
        if self._depth:
            self._depth = 0
            self.lock = threading.RLock()


class Call:
    """A running call that trains: its thread, its frame, and the signals whose handlers it set."""

    __slots__ = ("frame", "is_fit", "signals", "thread")

    def __init__(self, frame: FrameType, *, is_fit: bool) -> None:
        self.thread = threading.get_ident()
        self.frame = frame
        self.is_fit = is_fit
        self.signals: list[int] = []

    @property
    def is_running(self) -> bool:
        """Whether the frame is on the stack of its thread.

        Ctrl-C can end a call before its own cleaning up, so a flag alone could stay set for ever.
        """
        frame = sys._current_frames().get(self.thread)
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is not None


class TrainingGuard:
    """Context manager: only the current thread may train, and not from inside a step.

    `in_step` tells whether a step is running. User code inside a step (a metric, `on_gradients`)
    may call the trainer. `advancing` is the context in which the state changes. `on_late_signal` is
    called before a signal is raised that arrived when `fit` had ended.

    SettingError: another thread is training, or a step is running. The guard does not wait for the
    other thread, because the weights would then depend on the order in which threads run.
    """

    def __init__(self) -> None:
        self.in_step = False
        self.in_metrics = False  # of the running step
        self.advancing = Advance()
        self.on_late_signal: Callable[[], None] | None = None
        self._calls: list[Call] = []  # the innermost last
        # Guards `_calls`. It is re-entrant, because a signal handler may acquire it.
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self.begin(Call(sys._getframe(1), is_fit=False))

    def __exit__(self, *exception: object) -> None:
        self.end(self._calls[-1])

    def fitting(self) -> Fitting:
        """Allow only one fit. SettingError: a fit is running in this or in another thread."""
        return Fitting(self)

    @property
    def fit_runs(self) -> bool:
        """Whether a fit is running in any thread."""
        return any(call.is_fit and call.is_running for call in self._calls)

    def begin(self, call: Call) -> None:
        """Note a call, and let signals wait for the end of each step. Errors: see the class."""
        with self._lock:
            if self._calls:
                self._calls = [other for other in self._calls if other.is_running]
                self._require_idle(call)
            is_first = not self._calls
            self._calls.append(call)
        if is_first:
            self.in_step = self.in_metrics = False
            self.advancing.reset()
            call.signals = self.advancing.signals.install()

    def _require_idle(self, call: Call) -> None:
        if any(other.thread != call.thread for other in self._calls):
            raise SettingError(
                "Another thread is training this Trainer. Wait until it has finished, or use a"
                " separate Trainer in each thread. Other threads may predict and evaluate during"
                " training."
            )
        if self._calls and self.in_step:
            raise SettingError(
                "A training step cannot start inside another step. Inside on_gradients and"
                " metrics, only predict and evaluate may be called. Train in another hook, such as"
                " on_train_batch_end."
            )
        if call.is_fit and any(other.is_fit for other in self._calls):
            raise SettingError(
                "fit is already running. A callback may call evaluate, predict and"
                " train_on_batch. For another fit, use a separate Trainer."
            )

    def end(self, call: Call) -> None:
        """Remove a call, and restore the handlers of signals."""
        with self._lock:
            self._calls.remove(call)
        signals, is_last = self.advancing.signals, not self._calls
        try:
            signals.remove(call.signals)
            if is_last:
                signals.is_busy = False
                signals.deliver()
        except BaseException:
            if self.on_late_signal is not None:
                self.on_late_signal()
            raise
        finally:
            if is_last:
                self.on_late_signal = None


class Fitting:
    """Context of a running `fit`."""

    def __init__(self, guard: TrainingGuard) -> None:
        self._guard = guard
        self._call: Call | None = None

    def __enter__(self) -> None:
        self._call = Call(sys._getframe(1), is_fit=True)
        self._guard.begin(self._call)

    def __exit__(self, *exception: object) -> None:
        assert self._call is not None
        self._guard.end(self._call)
