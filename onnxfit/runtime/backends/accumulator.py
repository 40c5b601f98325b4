"""The gradients of several batches, whose mean makes one update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxfit.distributed.world import World
from onnxfit.graph import names
from onnxfit.runtime.buffers import Buffer, DoubleBufferedState
from onnxfit.runtime.device import Device
from onnxfit.runtime.reduction import sum_buffers

Array = npt.NDArray[Any]


class Accumulator:
    """The sums of the gradients of a window of batches, which wait for an update.

    - `weights`: the initial weights.
    - `size`: the number of batches in a window. It may be set later, unless it was initially 1.
    - `world`: the ranks that share every batch.
    - `device`: the device of the sums.
    - `has_parts`: whether the sums of each rank are only of its rows until the update.

    Further attributes: `enabled`, whether `size` may be above 1; `count`, the number of batches
    whose gradients wait; `state`, which has the sums; `tensors`, the first sums by name; `fused`,
    the sums in each single tensor, by name, which ranks exchange at once.
    """

    state: DoubleBufferedState

    def __init__(
        self,
        weights: Mapping[str, Array],
        size: int,
        world: World,
        device: Device,
        *,
        has_parts: bool,
    ) -> None:
        self.size = size
        self.enabled = size > 1
        self.count = 0
        self._world = world
        self._has_parts = has_parts and world.shares_gradients
        self._reduced = 0  # batches of the window when rank 0 got all gradients, else 0
        self.tensors: dict[str, Array] = {}
        if self.enabled:
            self.tensors = {names.gradient_sum(w): np.zeros_like(a) for w, a in weights.items()}
        self.fused: dict[str, Sequence[str]] = {}
        if world.shares_gradients and device.on_host:
            for dtype in dict.fromkeys(a.dtype for a in self.tensors.values()):
                members = [name for name, a in self.tensors.items() if a.dtype == dtype]
                self.fused[names.gradient_sums(str(dtype))] = members

    @property
    def is_used(self) -> bool:
        """Whether the next batch adds its gradients to the sums, instead of updating."""
        return self.size > 1 or self.count > 0

    @property
    def is_full(self) -> bool:
        """Whether the next update is due."""
        return self.count >= self.size

    def number(self, step: int) -> int:
        """Return the number of a batch, which draws random numbers of its own."""
        return step * self.size + self.count

    def add(self) -> None:
        """Count a batch whose gradients were added to the sums."""
        self._reduced = 0
        self.count += 1

    def set_to_zeros(self) -> None:
        """Set the sums to zeros."""
        for buffer in self._buffers():
            buffer.write(np.zeros((), buffer.array.dtype))

    def sum_over_ranks(self) -> None:
        """Give every rank the sums over all ranks, for the update."""
        if self.count and self._has_parts:
            sum_buffers(self._world, "the gradients of a window", self._buffers())

    @property
    def is_reduced(self) -> bool:
        """Whether rank 0 has the pending gradients of all ranks."""
        return self.count in (0, self._reduced) or not self._has_parts

    def reduce(self) -> None:
        """Sum the pending gradients of all ranks on rank 0, and set the others to zeros."""
        self.sum_over_ranks()
        self.zero_except_on_rank_0()

    def zero_except_on_rank_0(self) -> None:
        """Set the pending gradients to 0 on all ranks but rank 0.

        All ranks have the same gradients, which are the sums over all ranks.
        """
        if not (self.count and self._has_parts):
            return
        if not self._world.is_main:
            self.set_to_zeros()
        self._reduced = self.count

    def _buffers(self) -> list[Buffer]:
        return [self.state.buffer(name) for name in self.fused or self.tensors]
