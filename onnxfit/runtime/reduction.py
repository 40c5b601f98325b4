"""The gradients of a step, summed over the ranks that share its batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from onnxfit.distributed.sums import rank_sum
from onnxfit.distributed.world import World
from onnxfit.runtime.buffers import Buffer, DoubleBufferedState
from onnxfit.runtime.device import CPU, Device
from onnxfit.runtime.values import Array, array_of

# Element types that every communicator sums. Others are sent as float32.
SUMMED_TYPES: tuple[np.dtype[Any], ...] = (np.dtype(np.float32), np.dtype(np.float64))


class GradientReduction:
    """One flat buffer for each element type. A step writes its gradients there, and the ranks sum
    them: in place by messages, or into memory that the ranks of one machine share.

    The same buffer also carries the loss, and the running statistics that each rank computes from
    its own rows. All ranks have the same statistics after every step.

    - `world`: the ranks.
    - `weights`, `statistics`: arrays of their shapes and types, by name.
    - `device`: the device of the gradients. On the CPU nothing is copied.

    `buffers` has the part of each weight's gradient, by the weight's name. `sums` has the part that
    gets the sum over all ranks, which only `own_sums` copies into memory that may be written.
    """

    def __init__(
        self,
        world: World,
        weights: Mapping[str, Array],
        statistics: Mapping[str, Array],
        device: Device,
    ) -> None:
        self.world = world
        tensors = {**weights, **statistics}
        sizes = dict.fromkeys(SUMMED_TYPES, 0)
        starts: dict[str, int] = {}
        for name, array in tensors.items():
            dtype = _summed_type(array)
            starts[name] = sizes[dtype]
            sizes[dtype] += array.size
        single, double = SUMMED_TYPES
        # If there are gradients, the loss is sent in the same message, in their type.
        loss_type = single if sizes[single] and not sizes[double] else double
        sizes[loss_type] += 1
        self._flat = {
            dtype: rank_sum(world, dtype, size, shared=device.on_host)
            for dtype, size in sizes.items()
            if size
        }
        own = {dtype: Buffer.wrap(flat.own, CPU) for dtype, flat in self._flat.items()}
        total = {dtype: Buffer.wrap(flat.total, CPU) for dtype, flat in self._flat.items()}
        self._loss = own[loss_type].array[-1:], total[loss_type].array[-1:]
        # The part of this rank, and the sums.
        parts = {
            name: tuple(
                flat[_summed_type(array)].view(starts[name], array.shape) for flat in (own, total)
            )
            for name, array in tensors.items()
        }
        self._statistics = {
            name: (parts[name][0].array, parts[name][1].array) for name in statistics
        }
        # Gradients outside the flat buffers are copied into them: weight -> its parts.
        self._copied: dict[str, tuple[Array, Array]] = {}
        self.buffers: dict[str, Buffer] = {}
        self.sums: dict[str, Buffer] = {}
        for name, array in weights.items():
            self.buffers[name], self.sums[name] = parts[name]
            if not device.on_host or array.dtype not in SUMMED_TYPES:
                self._copied[name] = parts[name][0].array, parts[name][1].array
                self.buffers[name] = self.sums[name] = Buffer(array.dtype, array.shape, device)

    def take(self, gradients: Mapping[str, Any]) -> None:
        """Copy gradients (weight -> array or OrtValue) into the buffers, unless already there."""
        for name, value in gradients.items():
            if value is not self.buffers[name].value:
                array = value if isinstance(value, np.ndarray) else array_of(value)
                self.buffers[name].write(array)

    def mean(self, gradients: Mapping[str, Any]) -> dict[str, Any]:
        """Return the mean of all ranks' gradients, as OrtValues by weight."""
        self.take(gradients)
        buffers = {name: self.buffers[name] for name in gradients}
        sum_buffers(self.world, "apply_gradients", buffers.values())
        for buffer in buffers.values():
            buffer.write(buffer.read() / self.world.size)
        return {name: buffer.value for name, buffer in buffers.items()}

    def clear(self) -> None:
        """Set all gradients to 0, for a rank without a row."""
        for buffer in self.buffers.values():
            buffer.write(np.zeros((), buffer.array.dtype))

    def sum(self, share: float, loss: float, state: DoubleBufferedState) -> float:
        """Sum the gradients of all ranks, average the statistics, and return the sum of losses.

        - `share`: this rank's rows, divided by those of the whole batch.
        - `loss`: this rank's summand of the loss.
        - `state`: has the running statistics, which get the mean over all rows.
        """
        statistics = {name: state.buffer(name) for name in self._statistics}
        for name, (own, _) in self._copied.items():
            own[...] = array_of(self.buffers[name].value)
        for name, (own, _) in self._statistics.items():
            np.multiply(_contents(statistics[name]), share, out=own, casting="same_kind")
        own_loss, whole_loss = self._loss
        own_loss[0] = loss
        for flat in self._flat.values():
            flat.add_up("the gradients of a step")
        for name, (_, total) in self._copied.items():
            self.buffers[name].write(total)
        for name, (_, total) in self._statistics.items():
            statistics[name].write(total)
        return float(whole_loss[0])

    def own_sums(self) -> dict[str, Any]:
        """Return the summed gradients in `buffers`, which callbacks may change on each rank."""
        for name, buffer in self.buffers.items():
            if buffer is not self.sums[name]:
                buffer.write(self.sums[name].array)
        return {name: buffer.value for name, buffer in self.buffers.items()}


def sum_buffers(world: World, name: str, buffers: Iterable[Buffer]) -> None:
    """Sum some buffers over all ranks; `name` is the name of the exchange."""
    for buffer in buffers:
        array = _contents(buffer)
        summed = array.astype(_summed_type(array), copy=False)
        world.sum(name, summed)
        if summed is not buffer.array:
            buffer.write(summed)


def _contents(buffer: Buffer) -> Array:
    """Return the contents of a buffer: on the CPU its memory, else a copy."""
    return buffer.array if buffer.device.on_host else buffer.read()


def _summed_type(array: Array) -> np.dtype[Any]:
    return array.dtype if array.dtype in SUMMED_TYPES else SUMMED_TYPES[0]


def average_state(world: World, state: DoubleBufferedState) -> None:
    """Replace every float of the state by its mean over all ranks, as part of the last step."""
    flat: dict[np.dtype[Any], list[Array]] = {}
    arrays = {name: state.get(name) for name in state}
    arrays = {name: array for name, array in arrays.items() if array.dtype.kind == "f"}
    for array in arrays.values():
        flat.setdefault(_summed_type(array), []).append(array.ravel())
    sums = {}
    for dtype, parts in flat.items():
        sums[dtype] = np.concatenate(parts).astype(dtype, copy=False)
        world.sum("the average of the weights", sums[dtype])
        sums[dtype] /= world.size
    starts = dict.fromkeys(sums, 0)
    averages = {}
    for name, array in arrays.items():
        dtype = _summed_type(array)
        part = sums[dtype][starts[dtype] : starts[dtype] + array.size]
        averages[name] = part.reshape(array.shape).astype(array.dtype)
        starts[dtype] += array.size
    state.set(averages, undoable=True)
