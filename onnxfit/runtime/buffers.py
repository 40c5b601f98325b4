"""Tensors in memory that onnxruntime reads and writes, and the training state."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from onnxruntime.capi import _pybind_state as C

from onnxfit.errors import DataError, StepError, listed_names
from onnxfit.runtime.device import CPU, Device
from onnxfit.runtime.values import Array, array_view, ort_value, read_value


class Buffer:
    """A tensor of fixed type and shape in onnxruntime's memory.

    On the host `array` is a NumPy view of that memory. On a device `array` is a copy on the
    CPU, which `sync` copies to the device.
    """

    __slots__ = ("array", "device", "value")

    def __init__(self, dtype: npt.DTypeLike, shape: Sequence[int], device: Device = CPU) -> None:
        self.device = device
        try:
            with device.calls:
                self.value = C.OrtValue.ortvalue_from_shape_and_type(
                    list(shape), np.dtype(dtype).type, device.handle
                )
        # onnxruntime raises RuntimeError when the number of bytes overflows.
        except (MemoryError, RuntimeError) as error:
            raise StepError(
                f"There is not enough memory for a tensor {np.dtype(dtype)}{list(shape)}: {error}"
            ) from None
        if device.on_host:
            self.array = array_view(self.value, np.dtype(dtype), tuple(shape))
        else:
            self.array = np.zeros(shape, dtype)

    def view(self, start: int, shape: Sequence[int]) -> Buffer:
        """Return a buffer that shares this flat buffer's memory, from element `start` on."""
        if not self.device.on_host:
            return BufferView(self, start, shape)
        size = int(np.prod(shape, dtype=np.int64))
        return Buffer.wrap(self.array[start : start + size].reshape(shape), self.device)

    @classmethod
    def wrap(cls, array: Array, device: Device) -> Buffer:
        """Return `array` itself as a buffer on the CPU, and a read-only copy on other devices."""
        buffer = cls.__new__(cls)
        buffer.device = device
        buffer.array = array
        buffer.value = ort_value(array, device)
        return buffer

    def bind_as_input(self, binding: Any, name: str) -> None:
        """Let a binding of a session read the input `name` from this buffer."""
        binding.bind_ortvalue_input(name, self.value)

    def bind_as_output(self, binding: Any, name: str) -> None:
        """Let a binding of a session write the output `name` into this buffer."""
        binding.bind_ortvalue_output(name, self.value)

    def read(self) -> Array:
        """Return a copy of the contents."""
        if self.device.on_host:
            return self.array.copy()
        return np.array(read_value(self.value))

    def write(self, array: Array) -> None:
        """Replace the contents."""
        self.array[...] = array
        self.sync()

    def sync(self) -> None:
        """Copy `array` to the device; nothing to do on the CPU."""
        if not self.device.on_host:
            with self.device.calls:
                self.value.update_inplace(self.array)

    def fetch(self) -> None:
        """Copy the contents from the device into `array`; nothing to do on the CPU."""
        if not self.device.on_host:
            self.array[...] = read_value(self.value)


class BufferView(Buffer):
    """A part of another buffer's memory on a device other than the CPU.

    onnxruntime's Python API has no OrtValue for it. A session reads it by its address, and only
    `write` changes it alone, through the CPU.
    """

    __slots__ = ("_part", "_whole")

    def __init__(self, whole: Buffer, start: int, shape: Sequence[int]) -> None:
        self.device = whole.device
        self._whole = whole
        self._part = slice(start, start + int(np.prod(shape, dtype=np.int64)))
        self.array = whole.array[self._part].reshape(shape)

    def bind_as_input(self, binding: Any, name: str) -> None:
        binding.bind_input(name, *self._location())

    def bind_as_output(self, binding: Any, name: str) -> None:
        binding.bind_output(name, *self._location())

    def _location(self) -> tuple[Any, type, list[int], int]:
        """Return device, element type, shape and address."""
        address = self._whole.value.data_ptr() + self._part.start * self.array.itemsize
        return self.device.handle, self.array.dtype.type, list(self.array.shape), address

    def read(self) -> Array:
        return self._whole.read()[self._part].reshape(self.array.shape)

    def write(self, array: Array) -> None:
        contents = self._whole.read()
        contents[self._part].reshape(self.array.shape)[...] = array
        self._whole.write(contents)


BufferPair = tuple[Buffer, Buffer]


def _cast(array: Array, dtype: npt.DTypeLike, name: str) -> Array:
    """Return an array in another type. DataError: a number is outside the type's range."""
    try:
        with np.errstate(over="raise"):
            return array.astype(dtype, copy=False)
    except FloatingPointError:
        raise DataError(
            f"{name} contains {array.dtype} values outside the range of {np.dtype(dtype)}."
        ) from None


# The current sets of buffers at one moment, and how often each group had changed.
Savepoint = tuple[int, Mapping[str, int]]


class DoubleBufferedState:
    """The tensors that training changes, in two sets of buffers.

    A step reads one set and writes the other, then the sets swap. A step never reads the buffers
    that it writes, and sessions need no new binding. After a step that failed or reached NaN, the
    previous values are still in the other set.

    - `groups`: group name -> tensor name -> initial array. Tensors that different graphs write
      (weights; sums of gradients) are in different groups, which swap separately.
    - `device`: the device of all buffers.
    - `constants`: tensors that steps read and never change. They have one buffer each, on the CPU
      the arrays themselves. Iterating over the state skips them.
    - `fused`: name of a fused tensor -> names of tensors of one group and element type. They are
      contiguous in memory, so a graph can read and write them as one flat tensor. Iterating over
      the state yields the tensors, not the fused ones.
    - `alignment`: a number of elements; each tensor in a fused one begins at a multiple of it,
      after zeros.
    - `in_place`: groups with one set of buffers, which take half the memory. A step overwrites
      the values that it reads, and `revert` does not restore them.
    """

    def __init__(
        self,
        groups: Mapping[str, Mapping[str, Array]],
        device: Device,
        constants: Mapping[str, Array] | None = None,
        fused: Mapping[str, Sequence[str]] | None = None,
        alignment: int = 1,
        in_place: Collection[str] = (),
    ) -> None:
        self.device = device
        self._alignment = alignment
        self._in_place = frozenset(in_place)
        self.version = 0  # grows with every change
        self.changes = dict.fromkeys(groups, 0)  # group -> version of the group
        # Bit i tells which of the two sets is current for group i. This number is the key of a
        # session's binding. A group with one set has no bit.
        self.current = 0
        self._bits = {
            group: 0 if group in self._in_place else 1 << i for i, group in enumerate(groups)
        }
        self._group_of = {name: group for group, members in groups.items() for name in members}
        # Groups whose other set holds the values before the last step.
        self._undoable: set[str] = set()
        # Bits of the groups whose last swap is hidden: user code in a step sees the values before.
        self._hidden = 0
        self._constants = {
            name: Buffer.wrap(array, device) for name, array in (constants or {}).items()
        }
        arrays = {name: array for group in groups.values() for name, array in group.items()}
        self._fused: dict[str, BufferPair] = {}
        views: dict[str, BufferPair] = {}
        for name, members in (fused or {}).items():
            self._group_of[name] = self._group_of[members[0]]
            views |= self._add_fused(name, {member: arrays[member] for member in members})
        self._pairs: dict[str, BufferPair] = {}
        for name, array in arrays.items():
            self._pairs[name] = views.get(name) or self._new_pair(name, array)
            if name not in views:
                for buffer in self._pairs[name]:
                    buffer.write(array)

    def _new_pair(self, name: str, array: Array) -> BufferPair:
        """Return a tensor's buffers in both sets, which are one buffer if it has one set."""
        first = Buffer(array.dtype, array.shape, self.device)
        if self.is_in_place(name):
            return first, first
        return first, Buffer(array.dtype, array.shape, self.device)

    def _add_fused(self, name: str, members: Mapping[str, Array]) -> dict[str, BufferPair]:
        """Add a fused tensor with the elements of its members, and zeros between them.

        Return the buffers of its members, which are views of its memory.
        """
        flat = [np.pad(a.ravel(), (0, -a.size % self._alignment)) for a in members.values()]
        whole = np.concatenate(flat)
        first, second = self._new_pair(name, whole)
        self._fused[name] = first, second
        for buffer in (first, second):
            buffer.write(whole)
        views: dict[str, BufferPair] = {}
        start = 0
        for member, array in members.items():
            views[member] = first.view(start, array.shape), second.view(start, array.shape)
            start += array.size + -array.size % self._alignment
        return views

    def __contains__(self, name: object) -> bool:
        return name in self._pairs or name in self._fused or name in self._constants

    def __iter__(self) -> Iterator[str]:
        return iter(self._pairs)

    def group(self, name: str) -> str:
        """Return the group of a tensor; "" for a constant or an unknown name."""
        return self._group_of.get(name, "")

    def is_in_place(self, name: str) -> bool:
        """Return whether a tensor has one buffer, which a step overwrites."""
        return self.group(name) in self._in_place

    def buffer(self, name: str, *, current: bool = True) -> Buffer:
        """Return a tensor's buffer in the current set, or in the other one."""
        if name in self._constants:
            return self._constants[name]
        second = bool(self.current & self._bits[self._group_of[name]])
        pair = self._fused[name] if name in self._fused else self._pairs[name]
        return pair[second if current else not second]

    def swap(self, groups: Sequence[str]) -> None:
        """Make the other set of these groups the current one, after a step has written it."""
        self.version += 1
        self._undoable.update(groups)
        self._undoable -= self._in_place
        for group in groups:
            self.changes[group] += 1
            self.current ^= self._bits[group]

    def revert(self, groups: Iterable[str]) -> None:
        """Undo the last swap of these groups.

        A group that has not swapped since it was last set, reverted or committed stays unchanged.
        """
        undone = self._undoable.intersection(groups)
        self.swap(sorted(undone))
        self._undoable -= undone

    def commit(self, groups: Iterable[str]) -> None:
        """Make the last swap of these groups final: `revert` no longer undoes it."""
        self._undoable.difference_update(groups)

    def savepoint(self) -> Savepoint:
        """Return the current sets, to which `rollback` returns.

        It holds for one step: no group may swap twice after it.
        """
        return self.current, self.changes.copy()

    def rollback(self, before: Savepoint) -> None:
        """Make the sets of a savepoint current again; groups in place keep their values."""
        current, changes = before
        self._hidden = 0
        swapped = [group for group, bit in self._bits.items() if (self.current ^ current) & bit]
        written = {group for group, number in self.changes.items() if number != changes[group]}
        self.swap(swapped)
        self._undoable -= written

    def hide(self, before: Savepoint) -> None:
        """Show the values at a savepoint until `unhide`; `set` then changes both sets."""
        self._hidden = self.current ^ before[0]
        self.current = before[0]
        self.version += 1

    def unhide(self) -> None:
        """End the effect of `hide`."""
        self.current ^= self._hidden
        self._hidden = 0
        self.version += 1

    def get(self, name: str) -> Array:
        """Return a copy of a tensor."""
        return self.buffer(name).read()

    def view(self, name: str) -> Array:
        """Return a tensor as it is until the next step, read-only; on the host without a copy."""
        if not self.device.on_host:
            return self.get(name)
        view = self.buffer(name).array.view()
        view.flags.writeable = False
        return view

    def set(self, arrays: Mapping[str, Array], *, undoable: bool = False) -> None:
        """Replace some tensors. All are checked before the first is written.

        - `undoable`: whether the tensors belong to the last swap, which `revert` still undoes.

        DataError: a name, shape or type is wrong.
        """
        checked = {}
        for name, value in arrays.items():
            if name not in self._pairs:
                raise DataError(
                    f"There is no weight {name!r}. The weights are"
                    f" {listed_names(self._pairs, name)}."
                )
            old = self.buffer(name).array
            try:
                array = np.asarray(value)
            except Exception as error:  # NumPy, PyTorch and others raise different classes
                raise DataError(
                    f"{name} must be {old.dtype}{list(old.shape)}, but {type(value).__name__}"
                    f" cannot be converted to an array: {error}"
                ) from error
            if array.shape != old.shape or not np.can_cast(array.dtype, old.dtype, "same_kind"):
                raise DataError(
                    f"{name} must be {old.dtype}{list(old.shape)}, got"
                    f" {array.dtype}{list(array.shape)}."
                )
            checked[name] = _cast(array, old.dtype, name)
        self.version += 1
        if not undoable:
            self._undoable.clear()
        for name, array in checked.items():
            group = self._group_of[name]
            self.changes[group] += 1
            self.buffer(name).write(array)
            if self._bits[group] & self._hidden:
                self.buffer(name, current=False).write(array)
