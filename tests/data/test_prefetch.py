"""Batches prepared by a thread in the background."""

from __future__ import annotations

import _thread
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import pytest

import onnxfit
from onnxfit.callbacks import LambdaCallback
from onnxfit.data import Batch, DataLoader, Prefetch, Source
from onnxfit.data import prefetch as prefetching_module
from onnxfit.data.prefetch import PrefetchedSource, PrefetchIterator
from onnxfit.errors import SettingError
from tests.data.kinds import X, Y, make, threads, three_batches
from tests.models import linear


def test_the_background_thread_ends_with_the_pass_with_close_and_when_a_pass_is_left() -> None:
    loader = DataLoader(X, Y, batch_size=1, prefetch=2)
    list(loader)
    assert not threads()
    running = iter(loader)
    next(running)
    assert threads()
    loader.close()
    assert not threads()
    data = make(DataLoader(X, Y, batch_size=1, prefetch=2))
    first, second = data.batches(0), data.batches(0)
    next(first), next(second)
    assert len(threads()) == 2
    data.close()
    assert not threads()
    with make(DataLoader(X, Y, batch_size=1, prefetch=2)) as data:
        for _ in data.batches(0):
            break
    assert not threads()


def test_the_thread_is_never_further_ahead_than_told() -> None:
    made: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(10):
            made.append(number)
            yield number

    ahead = PrefetchIterator(numbers(), 3)
    for taken in range(10):
        assert next(ahead) == taken
        assert len(made) <= taken + 1 + 3
    assert next(ahead, None) is None
    assert next(ahead, None) is None


def test_what_goes_wrong_in_the_background_is_raised_in_the_loop_with_its_traceback() -> None:
    class Failing(Source):
        purpose = "training"

        def batches(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
            yield from make(X, Y).batches(0)
            raise self.deep_inside()

        def deep_inside(self) -> Exception:
            raise OSError("the disk is gone")

    data = PrefetchedSource(Failing(), 8)
    batches = data.batches(0)
    assert [next(batches).rows for _ in range(3)] == [4, 4, 2], "what was ready before is not lost"
    with pytest.raises(OSError, match="the disk is gone") as caught:
        next(batches)
    assert any(
        frame.name == "deep_inside" for frame in traceback.extract_tb(caught.value.__traceback__)
    )
    assert not threads()


def test_batches_are_made_while_the_loop_is_busy() -> None:
    """No clock: the source waits for the loop to be in its step, and the loop, in its step, for the
    source to have made the next batch.
    """
    made, working = [threading.Event() for _ in range(4)], threading.current_thread()

    def batches() -> Iterator[Any]:
        for event, batch in zip(made, [*three_batches(), three_batches()[0]]):
            assert threading.current_thread() is not working
            event.set()
            yield batch

    with make(Prefetch(batches, depth=1)) as data:
        for updated, _ in zip([*made[1:], None], data.batches(0)):
            assert updated is None or updated.wait(10), "the next batch is made during the step"


class Interrupted:
    """Batches by number, the last of which fails."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> Any:
        if number == 2:
            try:
                raise OSError("no such disk")
            except OSError as error:
                raise RuntimeError(f"batch {number} is lost") from error
        return three_batches()[number]


@pytest.mark.parametrize("data", [Interrupted(), lambda: map(Interrupted().__getitem__, range(3))])
def test_what_goes_wrong_in_any_source_is_raised_with_its_cause(data: Any) -> None:
    prefetching = Prefetch(data)
    for passed in (iter(prefetching), make(prefetching).batches(0)):
        with pytest.raises(RuntimeError, match="batch 2 is lost") as caught:
            list(passed)
        assert "__getitem__" in [
            frame.name for frame in traceback.extract_tb(caught.value.__traceback__)
        ]
        assert isinstance(caught.value.__cause__, OSError)
        assert not threads()
    trainer = onnxfit.Trainer(linear(2), loss="mse")
    with pytest.raises(RuntimeError, match="batch 2 is lost"):
        trainer.fit(prefetching, epochs=2, verbose=0)
    assert not threads()


def test_a_generator_that_is_prefetched_is_closed_in_its_thread_and_one_of_the_callers_left_open() -> (
    None
):
    closed: list[threading.Thread] = []

    def batches() -> Iterator[Any]:
        try:
            while True:
                yield three_batches()[0]
        finally:
            closed.append(threading.current_thread())

    for begin in (iter, lambda data: make(data).batches(0)):
        running = begin(Prefetch(batches))
        next(running)
        running.close()
        assert len(closed) == 1
        assert closed.pop() is not threading.current_thread()
    theirs = batches()
    for begin in (iter, lambda data: make(data).batches(0)):
        running = begin(Prefetch(theirs))
        next(running)
        running.close()
        assert len(next(theirs)) == 3
    assert not closed
    assert not threads()


def test_close_ends_the_thread_of_a_pass_under_way() -> None:
    prefetching = Prefetch(three_batches(), depth=1)
    running = iter(prefetching)
    next(running)
    assert threads()
    prefetching.close()
    assert not threads()
    assert list(running) == []
    assert len(prefetching) == 3


def test_fit_ends_the_threads_it_began() -> None:
    trainer = onnxfit.Trainer(linear(2), loss="mse")
    data = Prefetch([(x, y) for x, y, _ in three_batches()])
    assert (
        len(
            trainer.fit(
                data,
                epochs=3,
                steps_per_epoch=2,
                validation_data=data,
                validation_steps=1,
                verbose=0,
            ).epoch
        )
        == 3
    )
    assert not threads()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X,), r"DataLoader\(X, y, prefetch=2\)"),
        (({"x": X},), "DataLoader"),
        ((three_batches(), 0), "depth >= 1, got 0"),
    ],
)
def test_what_prefetch_is_not_for(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Prefetch(*arguments)
    with pytest.raises(SettingError, match="Prefetch returns batches"):
        make(Prefetch(three_batches()), Y)


class Stuck:
    """Batches, the second of which comes when `goes_on` is set."""

    def __init__(self) -> None:
        self.waits = threading.Event()
        self.goes_on = threading.Event()
        self.readers = 0

    def __iter__(self) -> Iterator[Any]:
        self.readers += 1
        assert self.readers == 1, "two threads iterate at once"
        try:
            yield three_batches()[0]
            self.waits.set()
            self.goes_on.wait()
            yield three_batches()[1]
        finally:
            self.readers -= 1


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stuck]:
    """A source that is stuck until the test has ended, or for a minute, which the test notices."""
    monkeypatch.setattr(prefetching_module, "MAX_CLOSE_SECONDS", 0.01)
    source = Stuck()
    failsafe = threading.Timer(60, source.goes_on.set)
    failsafe.daemon = True
    failsafe.start()
    yield source
    failsafe.cancel()
    source.goes_on.set()
    for thread in threading.enumerate():
        if thread.name == "onnxfit prefetch":
            thread.join()


def test_an_interrupt_does_not_wait_for_a_source_that_is_stuck(stuck: Stuck) -> None:
    stepped = threading.Event()

    def interrupt() -> None:
        stuck.waits.wait()
        stepped.wait()
        _thread.interrupt_main()

    trainer = onnxfit.Trainer(linear(2), loss="mse")
    helper = threading.Thread(target=interrupt)
    helper.start()
    after_a_step = LambdaCallback(on_train_batch_end=lambda *_: stepped.set())
    # A shell that starts the tests in the background lets them ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(Prefetch(stuck), verbose=0, callbacks=[after_a_step])
    finally:
        signal.signal(signal.SIGINT, before)
    assert not stuck.goes_on.is_set()
    helper.join()
    assert trainer.global_step == 1


def test_closing_does_not_wait_for_a_source_that_is_stuck(stuck: Stuck) -> None:
    data = make(Prefetch(stuck))
    batches = data.batches(0)
    next(batches)
    stuck.waits.wait()
    data.close()
    assert not stuck.goes_on.is_set()
    assert threads()
    assert list(batches) == []


def test_the_next_iteration_begins_when_a_stuck_one_has_ended(stuck: Stuck) -> None:
    prefetching = Prefetch(stuck)
    running = iter(prefetching)
    next(running)
    stuck.waits.wait()
    prefetching.close()
    release = threading.Timer(0.05, stuck.goes_on.set)
    release.start()
    assert len(list(prefetching)) == 2
    with make(prefetching) as data:
        assert len(list(data.batches(0))) == 2
    assert not threads()


def test_a_process_ends_while_a_source_is_stuck() -> None:
    code = """
import threading
import numpy as np
from onnxfit.data import Prefetch
waits = threading.Event()
def batches():
    yield np.zeros(2)
    waits.set()
    threading.Event().wait()
running = iter(Prefetch(batches))
next(running)
waits.wait()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
