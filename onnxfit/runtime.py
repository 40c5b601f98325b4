"""Sessions, devices, buffers, binding: the only module besides gradients/onnxruntime.py that knows onnxruntime."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnxruntime.capi import _pybind_state as C

from onnxfit.data import Batch
from onnxfit.errors import DataError, InstallationError, SettingError, StepError
from onnxfit.graph import names

Array = npt.NDArray[Any]

onnxruntime.set_default_logger_severity(3)  # warnings about graphs that we made on purpose are noise to the user


@dataclass(frozen=True)
class Device:
    """Where a step runs: `cpu`, or `cuda`, `cuda:1`, … with an onnxruntime that offers the provider."""

    kind: str
    index: int

    @staticmethod
    def parse(name: str) -> Device:
        """SettingError for a name that is none, InstallationError for a device this onnxruntime does not offer."""
        match = re.fullmatch(r"(cpu|cuda)(?::(\d+))?", name) if isinstance(name, str) else None
        if match is None:
            raise SettingError(f"device is 'cpu', 'cuda' or 'cuda:N', got {name!r}.")
        device = Device(match[1], int(match[2] or 0))
        offered = onnxruntime.get_available_providers()
        try:
            if device.provider not in offered:
                raise RuntimeError(f"this installation offers {', '.join(offered)}")
            C.OrtValue.ortvalue_from_shape_and_type([1], np.float32, device.handle)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise InstallationError(
                f"device={name!r} needs onnxruntime's {device.provider}, which is not to be had here: {reason}."
            ) from None
        return device

    @property
    def provider(self) -> str:
        return {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}[self.kind]

    @property
    def options(self) -> dict[str, str]:
        return {"device_id": str(self.index)} if self.kind != "cpu" else {}

    @property
    def handle(self) -> Any:
        return C.OrtDevice(getattr(C.OrtDevice, self.kind)(), C.OrtDevice.default_memory(), self.index)


CPU = Device("cpu", 0)


class Buffer:
    """A tensor of fixed type and shape in onnxruntime's memory; on the CPU `array` is a numpy view of that very memory."""

    __slots__ = ("array", "device", "value")

    def __init__(self, dtype: npt.DTypeLike, shape: Sequence[int], device: Device = CPU) -> None:
        self.device = device
        try:
            self.value = C.OrtValue.ortvalue_from_shape_and_type(list(shape), np.dtype(dtype).type, device.handle)
        except (MemoryError, RuntimeError) as error:  # RuntimeError: more bytes than a number can count
            raise StepError(f"There is no memory for a tensor {np.dtype(dtype)}{list(shape)}: {error}") from None
        self.array = _view(self.value, np.dtype(dtype), tuple(shape)) if device.kind == "cpu" else np.zeros(shape, dtype)

    def part(self, start: int, shape: Sequence[int]) -> Buffer:
        """A tensor that lies in the memory of this one, on the CPU."""
        return Buffer.around(self.array[start : start + int(np.prod(shape, dtype=np.int64))].reshape(shape), self.device)

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


def _view(value: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if size == 0:
        return np.zeros(shape, dtype)
    memory = (ctypes.c_uint8 * size).from_address(value.data_ptr())
    memory.owner = value  # type: ignore[attr-defined]  # a view that outlives the buffer keeps the memory
    return np.ctypeslib.as_array(memory).view(dtype).reshape(shape)


class State:
    """Everything training changes, in two sets: a step reads one set and writes the other, then they swap.

    So no step reads what it writes, nothing is bound anew, and a step that failed or went to NaN has spoiled nothing: the last values
    are in the other set. Tensors that different graphs write (with accumulated gradients: weights and sums) swap apart: a group each.
    `constants` are read as the others are, but nothing changes them; they have one set, on the CPU the arrays themselves, and no iteration
    over the state comes to them, or to `packs`: names of several tensors of a group and type, which lie one after the other in memory, so
    that a graph can read and write them as one. Only the CPU has packs.
    """

    def __init__(
        self,
        groups: Mapping[str, Mapping[str, Array]],
        device: Device,
        constants: Mapping[str, Array] | None = None,
        packs: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.device = device
        self.version = 0  # grows with every change
        self.changes = dict.fromkeys(groups, 0)  # the same for each group
        self.parity = 0  # which of the two sets is the current one: a bit for each group
        self._group_of = {name: group for group, members in groups.items() for name in members}
        self._bits = {group: 1 << i for i, group in enumerate(groups)}
        self._undoable: set[str] = set()  # groups whose other set holds what was before the last step
        self._pairs: dict[str, tuple[Buffer, Buffer]] = {}
        self._constants = {name: Buffer.around(array, device) for name, array in (constants or {}).items()}
        self._packs: dict[str, tuple[Buffer, Buffer]] = {}
        placed: dict[str, tuple[Buffer, Buffer]] = {}
        arrays = {name: array for group in groups.values() for name, array in group.items()}
        for pack, members in (packs or {}).items():
            flat = np.concatenate([arrays[name].ravel() for name in members])
            self._packs[pack] = (Buffer(flat.dtype, flat.shape, device), Buffer(flat.dtype, flat.shape, device))
            self._group_of[pack] = self._group_of[members[0]]
            start = 0
            for name in members:
                first, second = (buffer.part(start, arrays[name].shape) for buffer in self._packs[pack])
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
        return name in self._pairs or name in self._packs or name in self._constants

    def __iter__(self) -> Iterator[str]:
        return iter(self._pairs)

    def group(self, name: str) -> str:
        return self._group_of.get(name, "")

    def buffer(self, name: str, *, current: bool = True) -> Buffer:
        if name in self._constants:
            return self._constants[name]
        second = bool(self.parity & self._bits[self._group_of[name]])
        pair = self._packs[name] if name in self._packs else self._pairs[name]
        return pair[second if current else not second]

    def swap(self, groups: Sequence[str]) -> None:
        self.version += 1
        self._undoable.update(groups)
        for group in groups:
            self.changes[group] += 1
            self.parity ^= self._bits[group]

    def revert(self, groups: Iterable[str]) -> None:
        """Take groups back to before the last swap; nothing happens to one that was not swapped since it was set or reverted."""
        undone = self._undoable.intersection(groups)
        self.swap(sorted(undone))
        self._undoable -= undone

    def settle(self, groups: Iterable[str]) -> None:
        """The last swap of these groups can no longer be reverted."""
        self._undoable -= set(groups)

    def get(self, name: str) -> Array:
        return self.buffer(name).read()

    def set(self, arrays: Mapping[str, Array]) -> None:
        """Replace some tensors; all are checked before the first is written. DataError for a wrong name, shape or type."""
        checked = {}
        for name, array in arrays.items():
            if name not in self._pairs:
                raise DataError(f"There is no weight {name!r}; there are {', '.join(self._pairs)}.")
            have, given = self.buffer(name).array, np.asarray(array)
            if given.shape != have.shape or not np.can_cast(given.dtype, have.dtype, "same_kind"):
                raise DataError(f"{name} is {have.dtype}{list(have.shape)}, got {given.dtype}{list(given.shape)}.")
            checked[name] = given
        self.version += 1
        self._undoable.clear()
        for name, given in checked.items():
            self.changes[self._group_of[name]] += 1
            self.buffer(name).write(given)


def compile_model(
    model: onnx.ModelProto, device: Device, threads: int | None, what: str, *, stops: bool = False, spins: bool = False
) -> Any:
    """An onnxruntime session; StepError that says which graph did not compile and which node was to blame.

    `stops`: a TrainingAgent will stop in the middle of a run, of which others may begin before it goes on. `spins`: its threads look out for
    the next run between two runs, which saves 4 % of a small step, and takes the processor from every other session and library: where
    four graphs take turns, and none waits for another's threads to sleep, a step took up to 3.5 times as long (transformer, two cores).
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors come as exceptions
    if stops:
        options.enable_mem_pattern = options.enable_mem_reuse = False  # what waits must not be written over
        options.add_session_config_entry("session.disable_prepacking", "1")  # weights are inputs, and change
    if not spins:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=[(device.provider, device.options)])
    except Exception as error:  # onnxruntime raises its own classes, all of them plain Exceptions
        raise StepError(_explain(f"onnxruntime cannot compile the {what} graph", error)) from error
    _sessions.add(session._sess)
    return session


def _first_run(device: Device) -> Any:
    """Options for the first run with a binding; None for none.

    It learns what memory the graph needs, piece by piece, and the next takes that as one block: what the first took is given back, up to a
    fifth of all that the process has. 32-bit systems have nothing to give back, and call it an error.
    """
    if device.kind != "cpu" or sys.maxsize < 2**32:
        return None
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


_sessions: weakref.WeakSet[Any] = weakref.WeakSet()


def _keep_for_good() -> None:
    """In a forked process: the sessions it was born with run, but have no threads to end there, and would crash it."""
    for session in _sessions:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))


if hasattr(os, "register_at_fork"):  # as in DataLoader workers
    os.register_at_fork(after_in_child=_keep_for_good)


def _explain(what: str, error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    node = re.search(
        r"[Nn]ode[^:'(]*[:(]?\s*[Nn]ame:'([^']+)'|Node \(([^)]+)\)|node with name '([^']+)'|Node, \(\"([^\"]+)\"", text
    )
    name = next((g for g in node.groups() if g), None) if node else None
    maker = f" (node {name!r}, made by {_maker(name)})" if name else ""
    return f"{what}{maker}: {text}"


def _maker(node: str) -> str:
    """Who made a node, by the scope in its name."""
    if node.startswith("gradient/"):
        return f"the gradient of {node.split('/', 1)[1].rsplit('/', 1)[0]!r}"
    scopes = {"loss/": "the loss", "penalty/": "the penalty", "optimizer/": "the optimizer", "train/": "the training form"}
    if "_Grad/" in node or node.endswith("_Grad"):
        return "the gradient"
    return next((who for scope, who in scopes.items() if node.startswith(scope)), "the model")


class Runner:
    """One compiled graph bound to the state, to buffers for its batch, and to buffers for the scalars it reports.

    `feeds` holds the numpy view of every input that is not state: write them, then `run`; what it reports is then in `scalars`. Inputs in
    `given`, and those whose size only a batch tells, come with every run instead, as numpy arrays or OrtValues, and are read where they lie.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        state: State,
        device: Device,
        threads: int | None,
        what: str,
        *,
        writes: bool = False,
        given: Collection[str] = (),
        reuse: bool = False,
        spins: bool = False,
    ) -> None:
        """`writes`: outputs that are the next state go there. `reuse`: the other outputs of known size are overwritten by the next run."""
        self.model = model
        self._what = what
        self._state = state
        self._session = compile_model(model, device, threads, what, spins=spins)._sess
        self._device = device
        self._reads = [v.name for v in model.graph.input if v.name in state]
        self._writes = {v.name: base for v in model.graph.output if writes and (base := _state_of(v.name)) in state}
        self._written = sorted({state.group(n) for n in self._writes.values()})
        self._feeds: dict[str, Buffer] = {}
        self.open_inputs: list[str] = []  # inputs that come with every run
        self.binds = 0  # of such inputs, so far
        for value in model.graph.input:
            if value.name not in state:
                shape = _static_shape(value)
                if shape is None or value.name in given:
                    self.open_inputs.append(value.name)
                else:
                    self._feeds[value.name] = Buffer(_dtype(value), shape, device)
        self._scalars: dict[str, Buffer] = {}
        self.predictions: list[str] = []
        self._results: dict[str, Buffer] = {}
        for value in model.graph.output:
            if value.name in self._writes:
                continue
            if _static_shape(value) == () and names.reserved(value.name):
                self._scalars[value.name] = Buffer(_dtype(value), ())
            elif value.name not in self.predictions:  # a model may list an output twice
                self.predictions.append(value.name)
                shape = _static_shape(value)
                if reuse and shape is not None:
                    self._results[value.name] = Buffer(_dtype(value), shape, device)
        self._new = [name for name in self.predictions if name not in self._results]
        self.feeds = {name: buffer.array for name, buffer in self._feeds.items()}
        self.scalars = {name: buffer.array for name, buffer in self._scalars.items()}
        self._bindings: dict[int, Any] = {}
        self._bound: dict[int, dict[str, tuple[Any, Any]]] = {}  # what each binding's open inputs are, kept alive
        self._last_bound: dict[str, tuple[Any, Any]] = {}
        self._run = self._session.run_with_iobinding
        self._prepares = bool(device.kind != "cpu" or self.open_inputs or self._new)  # something has to be done before each run

    def run(self, values: Mapping[str, Any] | None = None) -> None:
        """One run with what is in `feeds`, and `values` for open inputs; the state swaps only if it succeeds."""
        state = self._state
        binding, options = self._bindings.get(state.parity), None
        if binding is None:
            binding, options = self._bindings.setdefault(state.parity, self._bind()), _first_run(self._device)
        if self._prepares:
            for buffer in self._feeds.values():
                buffer.sync()
            self._last_bound = self._bound.setdefault(state.parity, {})
            self._rebind(binding, self._last_bound, values or {})
        try:
            self._run(binding, options)
        except Exception as error:
            raise StepError(_explain(f"The {self._what} step failed", error)) from error
        self._last = binding
        if self._written:
            state.swap(self._written)

    def outputs(self) -> dict[str, Any]:
        """The outputs that are neither state nor scalars, of the last run, as OrtValues; no later run touches them unless `reuse` said so."""
        found = {name: buffer.value for name, buffer in self._results.items()}
        if self._new:
            values = self._last.get_outputs()
            found |= {name: values[self._positions[name]] for name in self._new}
        return found

    def prediction(self) -> dict[str, Array]:
        """Copies of these outputs."""
        return {name: np.array(value.numpy()) for name, value in self.outputs().items()}

    def inputs(self) -> dict[str, Any]:
        """What the last run read besides the state, as `run` takes it."""
        return {**{name: buffer.value for name, buffer in self._feeds.items()}, **{n: v for n, (_, v) in self._last_bound.items()}}

    def fed(self, batch: Batch) -> Mapping[str, Array]:
        """The arrays of the batch that was just run, from the buffers where they are there."""
        return batch.arrays() if self.open_inputs else self.feeds

    def _bind(self) -> Any:
        state, binding = self._state, C.SessionIOBinding(self._session)
        for name in self._reads:
            binding.bind_ortvalue_input(name, state.buffer(name).value)
        for name, buffer in self._feeds.items():
            binding.bind_ortvalue_input(name, buffer.value)
        order = []
        for name, base in self._writes.items():
            binding.bind_ortvalue_output(name, state.buffer(base, current=False).value)
            order.append(name)
        for name, buffer in self._scalars.items():
            binding.bind_ortvalue_output(name, buffer.value)
            order.append(name)
        for name, buffer in self._results.items():
            binding.bind_ortvalue_output(name, buffer.value)
            order.append(name)
        self._positions = {name: i for i, name in enumerate((*order, *self._new))}
        return binding

    def _rebind(self, binding: Any, bound: dict[str, tuple[Any, Any]], values: Mapping[str, Any]) -> None:
        """Bind inputs that are not bound already. Address, shape and type make one: memory that is freed may come back as another tensor."""
        for name in self.open_inputs:
            value = values[name]
            if name in bound and bound[name][1] is value and not isinstance(value, np.ndarray):
                continue  # an array may have been given another shape in place
            if isinstance(value, np.ndarray):
                value = np.require(value, requirements="C")
                key = value.__array_interface__["data"][0], value.shape, value.dtype
            else:
                key = value.data_ptr(), tuple(value.shape()), value.element_type()
            if name not in bound or bound[name][0] != key:
                given = ort_value(value, self._device) if isinstance(value, np.ndarray) else value
                binding.bind_ortvalue_input(name, given)
                self.binds += 1
            bound[name] = key, value  # kept, since onnxruntime borrows numpy's memory
        for name in self._new:
            binding.bind_output(name, self._device.handle)  # anew each time: onnxruntime would write into the last run's result


class Call:
    """A compiled graph that takes every value with the call and holds none after it, so that several threads may call it at once."""

    def __init__(self, model: onnx.ModelProto, device: Device, threads: int | None, what: str) -> None:
        self._what = what
        self._device = device
        self._session = compile_model(model, device, threads, what)._sess
        self.inputs = tuple(v.name for v in model.graph.input)
        self.outputs = tuple(dict.fromkeys(v.name for v in model.graph.output))  # a model may list an output twice

    def __call__(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Output -> OrtValue, from input -> OrtValue."""
        try:
            if self._device.kind == "cpu":  # three times as fast as a new binding, but all it gives is in the CPU's memory
                return dict(zip(self.outputs, self._session.run_with_ort_values(dict(values), list(self.outputs), None)))
            binding = C.SessionIOBinding(self._session)
            for name, value in values.items():
                binding.bind_ortvalue_input(name, value)
            for name in self.outputs:
                binding.bind_output(name, self._device.handle)
            self._session.run_with_iobinding(binding, None)
            return dict(zip(self.outputs, binding.get_outputs()))
        except Exception as error:
            raise StepError(_explain(f"The {self._what} pass failed", error)) from error


def from_dlpack(capsule: object, boolean: bool) -> Any:
    """An OrtValue that shares the memory of a DLPack capsule and keeps it alive; booleans arrive as bytes."""
    return C.OrtValue.from_dlpack(capsule, boolean)


def ort_value(array: Array, device: Device) -> Any:
    """An array as onnxruntime sees it: on the CPU it borrows the array's memory, which must live on."""
    return C.OrtValue.ortvalue_from_numpy(array, device.handle)


def is_ort_value(value: Any) -> bool:
    return isinstance(value, (onnxruntime.OrtValue, C.OrtValue))


def inner_value(value: Any) -> Any:
    """The value inside of what a caller gives as an OrtValue."""
    value = getattr(value, "_ortvalue", value)
    if not isinstance(value, C.OrtValue):
        raise DataError(f"Expected a numpy array or an onnxruntime.OrtValue, got {type(value).__name__}.")
    return value


def public_value(value: Any) -> onnxruntime.OrtValue:
    """A value as onnxruntime's users know it."""
    return onnxruntime.OrtValue(value)


def look(value: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Element type and shape of an array or OrtValue."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value.element_type())), tuple(value.shape())


def array_of(value: Any) -> Array:
    """An OrtValue as a numpy array: a view where it is in the CPU's memory, else a copy."""
    if value.device_name().lower() != "cpu" or value.data_type() == "tensor(string)":
        return np.asarray(value.numpy())
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value.element_type()))
    return _view(value, dtype, tuple(value.shape()))


def _state_of(output: str) -> str:
    suffix = names.following("")
    return output[: -len(suffix)] if output.endswith(suffix) else ""


def _static_shape(value: onnx.ValueInfoProto) -> tuple[int, ...] | None:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape") or not all(d.HasField("dim_value") for d in tensor.shape.dim):
        return None
    return tuple(d.dim_value for d in tensor.shape.dim)


def _dtype(value: onnx.ValueInfoProto) -> np.dtype[Any]:
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
