"""Tensors in memory that onnxruntime reads and writes, and the training state made of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from onnxruntime.capi import _pybind_state as C

from onnxfit.errors import DataError, StepError
from onnxfit.runtime.device import CPU, Device
from onnxfit.runtime.values import Array, array_view, ort_value


class Buffer:
    """A tensor of fixed type and shape in onnxruntime's memory; on the CPU `array` is a numpy view
    of that very memory.
    """

    __slots__ = ("array", "device", "value")

    def __init__(self, dtype: npt.DTypeLike, shape: Sequence[int], device: Device = CPU) -> None:
        self.device = device
        try:
            self.value = C.OrtValue.ortvalue_from_shape_and_type(
                list(shape), np.dtype(dtype).type, device.handle
            )
        except (
            MemoryError,
            RuntimeError,
        ) as error:  # RuntimeError: more bytes than a number can count
            raise StepError(
                f"There is no memory for a tensor {np.dtype(dtype)}{list(shape)}: {error}"
            ) from None
        self.array = (
            array_view(self.value, np.dtype(dtype), tuple(shape))
            if device.kind == "cpu"
            else np.zeros(shape, dtype)
        )

    def part(self, start: int, shape: Sequence[int]) -> Buffer:
        """A tensor that lies in the memory of this one, on the CPU."""
        return Buffer.around(
            self.array[start : start + int(np.prod(shape, dtype=np.int64))].reshape(shape),
            self.device,
        )

    @classmethod
    def around(cls, array: Array, device: Device) -> Buffer:
        """On the CPU the array itself as a buffer, elsewhere a copy that is not to be written."""
        buffer = cls.__new__(cls)
        buffer.device, buffer.array = device, array
        buffer.value = ort_value(array, device)
        return buffer

    def read(self) -> Array:
        """A copy of the contents."""
        return self.array.copy() if self.device.kind == "cpu" else np.array(self.value.numpy())

    def write(self, array: Array) -> None:
        self.array[...] = array
        self.sync()

    def sync(self) -> None:
        """Bring to the device what was written into `array`; nothing to do on the CPU."""
        if self.device.kind != "cpu":
            self.value.update_inplace(self.array)


class DoubleBufferedState:
    """Everything training changes, in two sets: a step reads one set and writes the other, then
    they swap.

    So no step reads what it writes, nothing is bound anew, and a step that failed or went to NaN
    has spoiled nothing: the last values are in the other set. Tensors that different graphs write
    (with accumulated gradients: weights and sums) swap apart: a group each. `constants` are read as
    the others are, but nothing changes them; they have one set, on the CPU the arrays themselves,
    and no iteration over the state comes to them, or to `fused`: names of several tensors of a
    group and type, which lie one after the other in memory, so that a graph can read and write them
    as one. Only the CPU has packs.
    """

    def __init__(
        self,
        groups: Mapping[str, Mapping[str, Array]],
        device: Device,
        constants: Mapping[str, Array] | None = None,
        fused: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.device = device
        self.version = 0  # grows with every change
        self.changes = dict.fromkeys(groups, 0)  # the same for each group
        self.parity = 0  # which of the two sets is the current one: a bit for each group
        self._group_of = {name: group for group, members in groups.items() for name in members}
        self._bits = {group: 1 << i for i, group in enumerate(groups)}
        # groups whose other set holds what was before the last step
        self._undoable: set[str] = set()
        self._pairs: dict[str, tuple[Buffer, Buffer]] = {}
        self._constants = {
            name: Buffer.around(array, device) for name, array in (constants or {}).items()
        }
        self._fused_weights: dict[str, tuple[Buffer, Buffer]] = {}
        placed: dict[str, tuple[Buffer, Buffer]] = {}
        arrays = {name: array for group in groups.values() for name, array in group.items()}
        for fused_name, members in (fused or {}).items():
            flat = np.concatenate([arrays[name].ravel() for name in members])
            self._fused_weights[fused_name] = (
                Buffer(flat.dtype, flat.shape, device),
                Buffer(flat.dtype, flat.shape, device),
            )
            self._group_of[fused_name] = self._group_of[members[0]]
            start = 0
            for name in members:
                first, second = (
                    buffer.part(start, arrays[name].shape)
                    for buffer in self._fused_weights[fused_name]
                )
                placed[name] = first, second
                start += arrays[name].size
        for name, array in arrays.items():
            self._pairs[name] = placed.get(name) or (
                Buffer(array.dtype, array.shape, device),
                Buffer(array.dtype, array.shape, device),
            )
            for buffer in self._pairs[name]:
                buffer.write(array)

    def __contains__(self, name: str) -> bool:
        return name in self._pairs or name in self._fused_weights or name in self._constants

    def __iter__(self) -> Iterator[str]:
        return iter(self._pairs)

    def group(self, name: str) -> str:
        return self._group_of.get(name, "")

    def buffer(self, name: str, *, current: bool = True) -> Buffer:
        if name in self._constants:
            return self._constants[name]
        second = bool(self.parity & self._bits[self._group_of[name]])
        pair = self._fused_weights[name] if name in self._fused_weights else self._pairs[name]
        return pair[second if current else not second]

    def swap(self, groups: Sequence[str]) -> None:
        self.version += 1
        self._undoable.update(groups)
        for group in groups:
            self.changes[group] += 1
            self.parity ^= self._bits[group]

    def revert(self, groups: Iterable[str]) -> None:
        """Take groups back to before the last swap; nothing happens to one that was not swapped
        since it was set or reverted.
        """
        undone = self._undoable.intersection(groups)
        self.swap(sorted(undone))
        self._undoable -= undone

    def commit(self, groups: Iterable[str]) -> None:
        """The last swap of these groups can no longer be reverted."""
        self._undoable -= set(groups)

    def get(self, name: str) -> Array:
        return self.buffer(name).read()

    def set(self, arrays: Mapping[str, Array]) -> None:
        """Replace some tensors; all are checked before the first is written.

        DataError for a wrong name, shape or type.
        """
        checked = {}
        for name, array in arrays.items():
            if name not in self._pairs:
                raise DataError(f"There is no weight {name!r}; there are {', '.join(self._pairs)}.")
            have, given = self.buffer(name).array, np.asarray(array)
            if given.shape != have.shape or not np.can_cast(given.dtype, have.dtype, "same_kind"):
                raise DataError(
                    f"{name} is {have.dtype}{list(have.shape)}, got"
                    f" {given.dtype}{list(given.shape)}."
                )
            checked[name] = given
        self.version += 1
        self._undoable.clear()
        for name, given in checked.items():
            self.changes[self._group_of[name]] += 1
            self.buffer(name).write(given)
