"""The gradients that wait for an update: counted, and summed over ranks."""

from __future__ import annotations

import numpy as np
import pytest

from onnxfit.distributed.world import ALONE, World
from onnxfit.graph import names
from onnxfit.runtime.backends.accumulator import Accumulator
from onnxfit.runtime.buffers import DoubleBufferedState
from onnxfit.runtime.device import CPU
from tests.distributed.threads import ThreadCommunicator, on_ranks

WEIGHTS = {
    "w": np.zeros((2, 3), np.float32),
    "b": np.zeros(3, np.float64),
    "v": np.zeros(1, np.float32),
}


def accumulator(size: int, world: World = ALONE, *, has_parts: bool = True) -> Accumulator:
    made = Accumulator(WEIGHTS, size, world, CPU, has_parts=has_parts)
    made.state = DoubleBufferedState({"sums": made.tensors}, CPU, fused=made.fused)
    return made


def test_a_window_is_full_after_its_batches() -> None:
    window = accumulator(3)
    seen = []
    for _ in range(3):
        seen.append((window.is_used, window.is_full, window.number(5)))
        window.add()
    assert seen == [(True, False, 15), (True, False, 16), (True, False, 17)]
    assert window.is_full
    window.size = 1  # the rest of a window is still added to its sums
    assert window.is_used


def test_without_a_window_there_are_no_sums() -> None:
    window = accumulator(1)
    assert not window.enabled
    assert not window.is_used
    assert window.tensors == {}
    assert window.fused == {}


@pytest.mark.parametrize("has_parts", [True, False])
def test_rank_0_gets_all_gradients_once(has_parts: bool) -> None:
    def train(communicator: ThreadCommunicator) -> list[object]:
        window = accumulator(4, World(communicator), has_parts=has_parts)
        steps: list[object] = [window.is_reduced]
        window.add()
        for name, array in window.tensors.items():
            window.state.buffer(name).write(array + communicator.rank + 1)
        steps.append(window.is_reduced)
        window.reduce()
        steps.append(window.is_reduced)
        sums = {name: window.state.get(name) for name in window.tensors}
        steps.append([array.flat[0] for array in sums.values()])
        window.add()
        steps.append(window.is_reduced)
        window.sum_over_ranks()
        steps.append(window.state.get(names.gradient_sum("w")).flat[0])
        return steps

    first, second = on_ranks(2, train)
    if has_parts:
        assert first == [True, False, True, [3, 3, 3], False, 3]
        assert second == [True, False, True, [0, 0, 0], False, 3]
    else:  # every rank has them anyway
        assert first == [True, True, True, [1, 1, 1], True, 1]
        assert second == [True, True, True, [2, 2, 2], True, 2]
