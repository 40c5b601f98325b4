"""The gradients of a step, summed over the ranks that share its batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxfit.distributed.sums import RankSum, rank_sum
from onnxfit.distributed.world import World
from onnxfit.errors import SettingError
from onnxfit.kernels.announcements import AnnouncementBoard, announcement_board
from onnxfit.runtime.buffers import Buffer, DoubleBufferedState
from onnxfit.runtime.device import CPU, Device
from onnxfit.runtime.values import Array, array_of

# Element types that every communicator sums. Others are sent as float32.
SUMMED_TYPES: tuple[np.dtype[Any], ...] = (np.dtype(np.float32), np.dtype(np.float64))
# The least size of a bucket, whose sum overlaps with the backward pass, for each rank. A sum over n
# ranks sends 2 (n - 1) messages of 1/n of a bucket, one after the other, so the buckets of many
# ranks must be larger for their messages to take longer than their latency.
MIN_BYTES_OF_BUCKET = 2**19
EXCHANGE = "the gradients of a step"


class GradientReduction:
    """Flat buffers, into which a step writes its gradients, and which the ranks sum: in place by
    messages, or into memory that the ranks of one machine share.

    There is one buffer for each element type. It also carries the loss, and the running statistics
    that each rank computes from its own rows. All ranks have the same statistics after every step.

    Where sums and computation can overlap (`World.overlaps`), gradients that are complete early
    have buffers of their own, the buckets. While the graph computes the other gradients
    (`overlapped`), a second thread sums each bucket as soon as the graph announces it. A rank whose
    graph makes no announcement, or writes gradients elsewhere, sums the same buckets after its run,
    so the sums are the same to the last bit.

    - `world`: the ranks.
    - `weights`, `statistics`: arrays of their shapes and types, by name. The weights are in the
      order in which their gradients are complete.
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
        overlaps = world.overlaps and device.kind == "cpu"
        self.buckets = _buckets(weights, MIN_BYTES_OF_BUCKET * world.size) if overlaps else []
        early = {name for bucket in self.buckets for name in bucket}
        late = {name: array for name, array in tensors.items() if name not in early}
        late_of = {t: [n for n, a in late.items() if _summed_type(a) == t] for t in SUMMED_TYPES}
        single, double = SUMMED_TYPES
        # If there are gradients, the loss is sent in the same message, in their type.
        loss_type = single if late_of[single] and not late_of[double] else double
        groups = [(tensors[bucket[0]].dtype, bucket) for bucket in self.buckets]
        groups += [(t, members) for t, members in late_of.items() if members or t == loss_type]
        # The buckets, and then a buffer of each element type, all in the order of their sums.
        self._flat: list[RankSum] = []
        parts: dict[str, tuple[Buffer, Buffer]] = {}  # of this rank, and the sums
        for i, (dtype, members) in enumerate(groups):
            has_loss = dtype == loss_type and i >= len(self.buckets)
            size = sum(tensors[name].size for name in members) + has_loss
            flat = rank_sum(world, dtype, size, shared=device.on_host)
            self._flat.append(flat)
            own, total = Buffer.wrap(flat.own, CPU), Buffer.wrap(flat.total, CPU)
            start = 0
            for name in members:
                shape = tensors[name].shape
                parts[name] = own.view(start, shape), total.view(start, shape)
                start += tensors[name].size
            if has_loss:
                self._loss = flat.own[-1:], flat.total[-1:]
        self._summed = 0  # buffers that the second thread has summed during this step
        self._is_cut_off = False  # whether a step failed after some of its sums
        places = [[parts[n][0].array.ctypes.data for n in bucket] for bucket in self.buckets]
        self._board = announcement_board(places) if places else None
        self._thread = ThreadPoolExecutor(1, "onnxfit-sums") if self._board is not None else None
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

    def announce(self, model: onnx.ModelProto, gradients: Mapping[str, str]) -> None:
        """Let a graph announce its gradients, in place, if this rank can sum them meanwhile.

        - `gradients`: the outputs of the graph with the gradients, by weight.
        """
        if self._board is not None:
            announced = [[gradients[weight] for weight in bucket] for bucket in self.buckets]
            self._board.add_announcements(model, announced)

    @contextmanager
    def overlapped(self) -> Iterator[None]:
        """Sum each bucket in a second thread when the graph that runs in this block announces it.

        The block begins with the run, and ends after it. `sum` adds up the other buffers.
        """
        if self._thread is None:
            yield
            return
        assert self._board is not None
        self._require_whole_steps()
        self._board.clear()
        with self.world.collective(EXCHANGE):
            sums = self._thread.submit(self._sum_buckets, self._board)
            try:
                try:
                    yield
                finally:
                    self._board.end()
                    wait([sums])
                sums.result()
            except BaseException:
                self._is_cut_off = self._summed > 0
                raise

    def _sum_buckets(self, board: AnnouncementBoard) -> None:
        for number, flat in enumerate(self._flat[: len(self.buckets)]):
            if not board.wait(number):
                return
            self._summed = number + 1
            self.world.sum_for_turn(EXCHANGE, flat.own)

    def _require_whole_steps(self) -> None:
        if self._is_cut_off:
            raise SettingError(
                f"A step of rank {self.world.rank} failed after the ranks had summed some of its"
                " gradients, so this rank is out of step. Correct the error of that step, and start"
                " all ranks again, such as from a checkpoint."
            )

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
        self._require_whole_steps()
        begin, self._summed = self._summed, 0
        for flat in self._flat[begin:]:
            flat.add_up(EXCHANGE)
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


def _buckets(weights: Mapping[str, Array], min_bytes: int) -> list[list[str]]:
    """Return the weights of each bucket of at least this size. Those that are left belong to none.

    The last weights are among them: their gradients are complete when the backward pass ends.
    """
    buckets: list[list[str]] = []
    for dtype in SUMMED_TYPES:
        of_type = [name for name, array in weights.items() if array.dtype == dtype]
        buckets += _split(weights, of_type, min_bytes)
    return buckets


def _split(weights: Mapping[str, Array], members: Sequence[str], min_bytes: int) -> list[list[str]]:
    buckets: list[list[str]] = [[]]
    size = 0
    for name in members:
        if size >= min_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(name)
        size += weights[name].nbytes
    return buckets[:-1]


def completion_order(graph: ir.Graph, weights: Iterable[str]) -> list[str]:
    """Return the weights in the order in which a backward pass completes their gradients.

    The gradient of a weight is complete when its first reader in the graph is differentiated, and
    the backward pass starts at the last node. Weights without a reader come first.
    """
    first_reader: dict[str, int] = {}
    for i, node in enumerate(ir.traversal.RecursiveGraphIterator(graph)):
        for value in node.inputs:
            if value is not None and value.name is not None:
                first_reader.setdefault(value.name, i)
    return sorted(weights, key=lambda name: -first_reader.get(name, len(graph)))


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
