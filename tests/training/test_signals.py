"""Signals that wait until a step is over."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from onnxfit.training.signals import SIGNALS, DeferredSignals

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the signals are those of POSIX")
FIRST, SECOND = (getattr(signal, name, 0) for name in ("SIGUSR1", "SIGUSR2"))


@pytest.fixture
def received() -> Iterator[list[int]]:
    """The signals that the handlers of the program have received."""
    found: list[int] = []
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: found.append(number))
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signals_that_end_or_save_a_training_wait(received: list[int]) -> None:
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
    assert {getattr(signal, name) for name in names} == set(SIGNALS)
    signals = DeferredSignals()
    installed = signals.install()
    assert installed == SIGNALS
    signals.is_busy = True
    for number in SIGNALS:
        signal.raise_signal(number)
    assert received == []
    assert signals.waiting == SIGNALS
    signals.is_busy = False
    signals.deliver()
    assert received == SIGNALS
    assert signals.waiting == []
    signals.remove(installed)


def test_a_signal_outside_of_a_step_is_passed_on_at_once(received: list[int]) -> None:
    signals = DeferredSignals()
    installed = signals.install()
    signal.raise_signal(FIRST)
    assert received == [FIRST]
    signals.remove(installed)
    signal.raise_signal(FIRST)
    assert received == [FIRST, FIRST]


def test_the_same_signal_again_comes_after_those_that_wait(received: list[int]) -> None:
    signals = DeferredSignals()
    installed = signals.install()
    signals.is_busy = True
    for number in (FIRST, SECOND):
        signal.raise_signal(number)
    assert received == []
    signal.raise_signal(FIRST)
    assert received == [FIRST, SECOND, FIRST]
    signals.remove(installed)


def test_handlers_are_replaced_once(received: list[int]) -> None:
    signals = DeferredSignals()
    installed = signals.install()
    assert signals.install() == []
    signal.raise_signal(FIRST)
    assert received == [FIRST]
    signals.remove(installed)
    assert signals.install() == SIGNALS
    signals.remove(SIGNALS)


def test_only_handlers_in_python_are_replaced(received: list[int]) -> None:
    signal.signal(FIRST, signal.SIG_IGN)
    signals = DeferredSignals()
    installed = signals.install()
    assert FIRST not in installed
    assert signal.getsignal(FIRST) is signal.SIG_IGN
    signals.remove(installed)


def test_another_thread_replaces_no_handler(received: list[int]) -> None:
    installed: list[list[int]] = []
    thread = threading.Thread(target=lambda: installed.append(DeferredSignals().install()))
    thread.start()
    thread.join()
    assert installed == [[]]


def test_a_handler_that_the_program_sets_meanwhile_stays_and_is_called(
    received: list[int],
) -> None:
    own: list[int] = []

    def handler(number: int, frame: object) -> None:
        own.append(number)

    signals = DeferredSignals()
    installed = signals.install()
    signals.is_busy = True
    signal.raise_signal(FIRST)
    signal.signal(FIRST, handler)
    signals.is_busy = False
    signals.deliver()
    signals.remove(installed)
    assert signal.getsignal(FIRST) is handler
    assert (own, received) == ([FIRST], [])


def test_a_signal_goes_to_the_system_if_the_program_says_so_meanwhile(
    received: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[int] = []
    signals = DeferredSignals()
    installed = signals.install()
    signals.is_busy = True
    signal.raise_signal(FIRST)
    signal.signal(FIRST, signal.SIG_DFL)
    with monkeypatch.context() as patched:
        patched.setattr(signal, "raise_signal", raised.append)  # it would end the tests
        signals.deliver()
    signals.remove(installed)
    assert (raised, received) == ([FIRST], [])
