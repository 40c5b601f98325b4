"""What ranks exchange."""

import threading

import numpy as np
import pytest

from onnxfit.distributed import world as world_module
from onnxfit.distributed.messages import decode, encode
from onnxfit.distributed.world import ALONE, World
from onnxfit.errors import SettingError
from tests.distributed.threads import on_ranks


def test_values_survive_a_message():
    value = {
        "a": [1, 2.5, None, "x"],
        "b": {"c": np.arange(3.0)},
        "d": [np.zeros((2, 0), np.int64)],
    }
    back = decode(encode(value))
    assert back["a"] == value["a"]
    np.testing.assert_array_equal(back["b"]["c"], value["b"]["c"])
    assert back["d"][0].shape == (2, 0)
    assert back["d"][0].dtype == np.int64


def test_one_process_is_a_world_of_its_own():
    assert ALONE.gather("x", 3) == [3]
    assert ALONE.broadcast("x", 3) == 3
    assert ALONE.is_main


def test_every_rank_gets_what_all_passed():
    def exchange(communicator):
        world = World(communicator)
        buffer = np.full(3, world.rank + 1.0, np.float32)
        world.sum("numbers", buffer)
        return (
            buffer.tolist(),
            world.gather("ranks", {"rank": world.rank, "pad": "x" * world.rank}),
            world.broadcast("main", world.rank),
        )

    for total, ranks, main in on_ranks(3, exchange):
        assert total == [6.0, 6.0, 6.0]
        assert [r["rank"] for r in ranks] == [0, 1, 2]
        assert main == 0


def test_ranks_that_do_different_things_are_named_on_all_of_them():
    def exchange(communicator):
        world = World(communicator)
        with pytest.raises(SettingError, match="rank 0: evaluate; rank 1: the end of epoch 3"):
            world.gather("evaluate" if world.is_main else "the end of epoch 3", 1)

    on_ranks(2, exchange)


def test_ranks_that_differ_are_named():
    def exchange(communicator):
        world = World(communicator)
        with pytest.raises(SettingError, match=r"Rank 1 has seed 1, but rank 0 has 0"):
            world.require_same("settings", {"seed": world.rank})

    on_ranks(2, exchange)


def test_what_needs_all_ranks_is_refused_where_one_acts_alone():
    world = World()

    def exchange(communicator):
        world = World(communicator)
        with (
            world.forbid_collectives("CSVLogger.on_epoch_end"),
            pytest.raises(
                SettingError,
                match=r"CSVLogger\.on_epoch_end runs on rank 0 alone, but evaluate needs",
            ),
        ):
            world.gather("evaluate", 1)

    on_ranks(1, exchange)
    with world.forbid_collectives("anything"):
        assert world.gather("evaluate", 1) == [1]


def test_the_end_waits_for_ever_unless_others_may_wait_in_a_sum():
    def exchange(communicator):
        communicator.timeout = 30.0
        world = World(communicator)
        world.sum("gradients", np.ones(1))
        world.final_barrier()
        between_checks, world.timeout = world.timeout, 30.0
        world.sum("gradients", np.ones(1))
        world.gather("the end of epoch 1", 0)
        world.final_barrier()
        return between_checks, world.timeout

    assert on_ranks(2, exchange) == [(30.0, None)] * 2


def test_a_second_thread_of_a_rank_is_refused():
    """Two threads would mix the order of the exchanges, by which the ranks find each other."""

    def exchange(communicator):
        world = World(communicator)
        calls = (
            lambda: world.gather("evaluate", 1),
            lambda: world.broadcast("evaluate", 1),
            lambda: world.barrier("evaluate"),
            lambda: world.sum("evaluate", np.ones(1)),
            lambda: world.collective("evaluate").__enter__(),
        )
        refused = []

        def call_all():
            for call in calls:
                with pytest.raises(SettingError, match="evaluate needs all 2 ranks, but another"):
                    call()
                refused.append(call)

        with world.collective("fit"):
            world.barrier("inside of its own turn")
            thread = threading.Thread(target=call_all)
            thread.start()
            thread.join()
        world.gather("afterwards", 1)
        return len(refused) == len(calls), communicator.calls

    assert on_ranks(2, exchange) == [(True, 2)] * 2


def test_one_process_has_no_turns():
    with ALONE.collective("fit"):
        thread = threading.Thread(
            target=lambda: entered.append(ALONE.collective("fit").__enter__())
        )
        entered = []
        thread.start()
        thread.join()
    assert entered == [None]


@pytest.mark.parametrize("length", [0, 400, 600, 5000])
def test_short_messages_need_one_exchange(length):
    """A long one of any rank follows in a second exchange."""

    def exchange(communicator):
        world = World(communicator)
        gathered = world.gather("a", "x" * (length if world.rank == 1 else 3))
        after_gather = communicator.calls
        main = world.broadcast("b", "y" * length if world.is_main else "z" * 10_000)
        return [len(one) for one in gathered], main, after_gather, communicator.calls

    exchanges = 1 if length < 450 else 2
    expected = [3, length, 3], "y" * length, exchanges, 2 * exchanges
    assert on_ranks(3, exchange) == [expected] * 3


def test_many_ranks_send_short_messages_apart(monkeypatch):
    monkeypatch.setattr(world_module, "MAX_RANKS_WITH_SHORT_MESSAGES", 2)

    def exchange(communicator):
        world = World(communicator)
        return world.gather("a", world.rank), world.broadcast("b", world.rank), communicator.calls

    assert on_ranks(3, exchange) == [([0, 1, 2], 0, 4)] * 3


def test_a_value_that_rank_0_lacks_differs_too():
    def exchange(communicator):
        world = World(communicator)
        with pytest.raises(SettingError, match=r"Rank 1 has folder 'b', but rank 0 has None"):
            world.require_same("settings", {"folder": "b"} if world.rank else {})

    on_ranks(2, exchange)
