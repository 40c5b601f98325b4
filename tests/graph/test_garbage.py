"""The garbage collector pauses while a graph is built, and goes on afterwards."""

from __future__ import annotations

import gc
import weakref

import pytest

from onnxfit.graph.garbage import gc_disabled


class Cycle:
    """An object that only the collector of cycles can free."""

    def __init__(self) -> None:
        self.itself = self


def test_collection_goes_on_after_an_error() -> None:
    @gc_disabled()
    def fail() -> None:
        assert not gc.isenabled()
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with gc_disabled():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_collection_follows() -> None:
    with gc_disabled():
        stays, cycle = [object], Cycle()
        dropped = weakref.ref(cycle)
        del cycle
    assert dropped() is None
    assert any(each is stays for each in gc.get_objects(generation=2))
