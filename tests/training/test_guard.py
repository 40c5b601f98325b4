"""Guards of the training state: what may run inside of what, and when signals and threads wait."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from onnxfit.errors import SettingError
from onnxfit.training.guard import Advance, TrainingGuard


@pytest.fixture(autouse=True)
def received() -> Iterator[list[int]]:
    """The times that the program has received Ctrl-C."""
    found: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: found.append(number))
    yield found
    signal.signal(signal.SIGINT, before)


def in_thread(function: Callable[[], Any]) -> Any:
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def is_free(advance: Advance) -> bool:
    """Whether another thread may save now."""

    def take() -> bool:
        taken = advance.lock.acquire(blocking=False)
        if taken:
            advance.lock.release()
        return taken

    return bool(in_thread(take))


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


# ---------------------------------------------------------------- Advance


def test_signals_and_threads_wait_for_the_end_of_an_advance(received: list[int]) -> None:
    guard = TrainingGuard()
    advance = guard.advancing
    with guard:
        with advance, advance:
            ctrl_c()
            assert not is_free(advance)
        assert received == [signal.SIGINT]
        assert is_free(advance)
        ctrl_c()
        assert len(received) == 2


def test_an_inner_advance_ends_nothing(received: list[int]) -> None:
    guard = TrainingGuard()
    advance = guard.advancing
    with guard, advance:
        with advance:
            ctrl_c()
        assert received == []
        assert not is_free(advance)


def test_an_advance_inside_of_a_busy_block_keeps_signals_waiting(received: list[int]) -> None:
    """While a fit closes its callbacks, for example."""
    guard = TrainingGuard()
    with guard:
        guard.advancing.signals.is_busy = True
        with guard.advancing:
            ctrl_c()
        assert received == []
        assert guard.advancing.signals.is_busy
    assert received == [signal.SIGINT]


def test_a_call_inside_of_a_busy_block_keeps_signals_waiting(received: list[int]) -> None:
    guard = TrainingGuard()
    with guard:
        guard.advancing.signals.is_busy = True
        with guard:
            ctrl_c()
            assert guard.advancing.signals.is_busy
        assert received == []
    assert received == [signal.SIGINT]


def test_a_paused_advance_lets_signals_and_threads_in(received: list[int]) -> None:
    guard = TrainingGuard()
    advance = guard.advancing
    with guard, advance:
        ctrl_c()
        with advance.paused():
            assert received == [signal.SIGINT]
            ctrl_c()
            assert len(received) == 2
            assert is_free(advance)
        ctrl_c()
        assert len(received) == 2
        assert not is_free(advance)
    assert len(received) == 3
    assert is_free(advance)


def test_a_reset_leaves_contexts_that_were_not_ended(received: list[int]) -> None:
    guard = TrainingGuard()
    guard.advancing.__enter__()  # and a second Ctrl-C comes before `__exit__`
    guard.in_step = guard.in_metrics = True
    with guard:
        assert not (guard.in_step)
        assert not (guard.in_metrics)
        assert is_free(guard.advancing)
        ctrl_c()
        assert received == [signal.SIGINT]


# ---------------------------------------------------------------- TrainingGuard


def refusal(context: Any) -> str:
    try:
        with context:
            return ""
    except SettingError as error:
        return str(error)


def test_only_one_thread_trains() -> None:
    guard = TrainingGuard()
    with guard:
        with guard:  # the same thread may
            pass
        assert in_thread(lambda: refusal(guard)).startswith("Another thread is training")
        assert in_thread(lambda: refusal(guard.fitting())).startswith("Another thread is training")
    assert in_thread(lambda: refusal(guard)) == ""


def test_no_step_starts_inside_of_another() -> None:
    guard = TrainingGuard()
    with guard:
        guard.in_step = True
        assert refusal(guard).startswith("A training step cannot start inside another step")
        guard.in_step = False
        assert refusal(guard) == ""


def test_only_one_fit_runs() -> None:
    guard = TrainingGuard()
    assert not guard.fit_runs
    with guard:
        assert not guard.fit_runs
        assert refusal(guard.fitting()) == ""
    with guard.fitting():
        assert guard.fit_runs
        assert in_thread(lambda: guard.fit_runs)
        assert refusal(guard.fitting()).startswith("fit is already running")
        assert refusal(guard) == ""
    assert not guard.fit_runs


def test_a_call_that_ended_without_cleaning_up_blocks_nothing() -> None:
    """Ctrl-C may come between the call and its `__exit__`."""
    guard = TrainingGuard()

    def interrupted(context: Any) -> None:
        context.__enter__()

    for context in (guard, guard.fitting()):
        in_thread(lambda context=context: interrupted(context))
        assert not guard.fit_runs
        assert refusal(guard.fitting()) == ""


def test_the_outermost_call_installs_and_removes_handlers() -> None:
    before = signal.getsignal(signal.SIGINT)
    guard = TrainingGuard()
    with guard:
        during = signal.getsignal(signal.SIGINT)
        assert during != before
        with guard.fitting():
            assert signal.getsignal(signal.SIGINT) == during
        assert signal.getsignal(signal.SIGINT) == during
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("nested", [False, True])
def test_a_signal_that_ends_a_finished_call_is_announced(nested: bool) -> None:
    events: list[str] = []

    def interrupt(number: int, frame: object) -> None:
        events.append("raised")
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    guard = TrainingGuard()

    def train() -> None:
        with guard:
            guard.on_late_signal = lambda: events.append("late")
            guard.advancing.signals.is_busy = True
            ctrl_c()
            if nested:
                with guard:
                    pass
            assert events == []

    with pytest.raises(KeyboardInterrupt):
        train()
    assert events == ["raised", "late"]
    assert guard.on_late_signal is None
    assert refusal(guard) == ""
