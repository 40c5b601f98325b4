"""Sums over ranks in shared memory equal those by messages, and messages take their place."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from onnxfit.distributed import sums
from onnxfit.distributed.sums import MessageSum, SharedSum, rank_sum
from onnxfit.distributed.world import World
from tests.distributed.threads import on_ranks

has_folder = pytest.mark.skipif(
    not os.path.isdir(sums.FOLDER), reason="the system has no folder in memory"
)


def numbers(rank: int, size: int, dtype: str, step: int) -> np.ndarray:
    return np.random.default_rng([rank, step]).standard_normal(size).astype(dtype)


@has_folder
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [sums.MIN_ELEMENTS, 5 * sums.ELEMENTS_OF_PART + 3])
def test_shared_memory_holds_the_sums_of_messages(ranks, dtype, size):
    def summed(communicator):
        own = rank_sum(World(communicator), dtype, size)
        totals = []
        for step in range(3):
            own.own[:] = numbers(communicator.rank, size, dtype, step)
            own.add_up("a sum")
            totals.append(own.total.copy())
            # The numbers of a rank stay its own: only the total is shared.
            np.testing.assert_array_equal(own.own, numbers(communicator.rank, size, dtype, step))
        return type(own), totals

    for kind, totals in on_ranks(ranks, summed):
        assert kind is SharedSum
        for step, total in enumerate(totals):
            expected = numbers(0, size, dtype, step)
            for rank in range(1, ranks):
                expected += numbers(rank, size, dtype, step)
            np.testing.assert_array_equal(total, expected)


@has_folder
def test_no_file_is_left(monkeypatch, tmp_path):
    monkeypatch.setattr(sums, "FOLDER", str(tmp_path))
    kinds = on_ranks(2, lambda c: type(rank_sum(World(c), "float32", 5000)))
    assert kinds == [SharedSum, SharedSum]
    assert not list(tmp_path.iterdir())


def without_room(descriptor: int, begin: int, size: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("why", ["no folder", "no room", "no access on one rank"])
def test_all_ranks_send_messages_where_one_lacks_the_memory(monkeypatch, tmp_path, why):
    monkeypatch.setattr(sums, "FOLDER", str(tmp_path / ("none" if why == "no folder" else "")))
    if why == "no room":
        monkeypatch.setattr(os, "posix_fallocate", without_room, raising=False)
    mapped = sums._map_file

    def map_file(path: str, size: int, calls: list[int] = []):  # noqa: B006
        calls.append(1)
        return mapped(path, size) if len(calls) == 1 else None

    if why == "no access on one rank":
        monkeypatch.setattr(sums, "_map_file", map_file)

    def summed(communicator):
        own = rank_sum(World(communicator), "float32", 5000)
        own.own[:] = communicator.rank + 1
        own.add_up("a sum")
        return type(own), own.total.copy()

    for kind, total in on_ranks(2, summed):
        assert kind is MessageSum
        assert (total == 3).all()
    assert not list(Path(tmp_path).iterdir())


@pytest.mark.parametrize("changed", ["compression", "local_size", "size"])
def test_what_shared_memory_cannot_do_is_sent(changed):
    def kind(communicator):
        if changed == "compression":
            communicator.compression = "float16"
        if changed == "local_size":
            communicator.local_size = 1  # each rank on a machine of its own
        world = World(communicator)
        return type(rank_sum(world, "float32", sums.MIN_ELEMENTS - (changed == "size")))

    assert on_ranks(2, kind) == [MessageSum, MessageSum]
    assert type(rank_sum(World(), "float32", 10**5)) is MessageSum


@has_folder
def test_numbers_beyond_the_range_become_infinite_without_a_warning(recwarn):
    def summed(communicator):
        own = rank_sum(World(communicator), "float32", sums.MIN_ELEMENTS)
        own.own[:] = 3e38
        own.add_up("a sum")
        return own.total.copy()

    assert np.isinf(on_ranks(2, summed)).all()
    assert not recwarn.list
