"""Sessions of compiled graphs: bound to the training state, or stateless."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnxruntime.capi import _pybind_state as C

from onnxfit.data import Batch
from onnxfit.errors import StepError
from onnxfit.graph import names
from onnxfit.runtime.buffers import Buffer, DoubleBufferedState
from onnxfit.runtime.compilation import compile_model, explain_error
from onnxfit.runtime.cuda_graphs import is_capturable, keep_alive, run_options
from onnxfit.runtime.device import CPU, Device
from onnxfit.runtime.memory import trim_malloc
from onnxfit.runtime.session_cache import SESSIONS
from onnxfit.runtime.shared_initializers import share_packed_weights
from onnxfit.runtime.values import Array, copied_arrays, numpy_dtype, ort_value

# A tensor without elements, in the place of an input that a binding no longer keeps.
_NOTHING = C.OrtValue.ortvalue_from_shape_and_type([0], np.float32, CPU.handle)


def _first_run_options(device: Device) -> Any:
    """Return the options of a binding's first run; None for the default ones.

    The first run allocates tensor by tensor and learns the graph's memory pattern, which later runs
    allocate as one block. Returning the first run's arena saves up to a fifth of the process's
    memory. 32-bit onnxruntime has no such arena and rejects the option.
    """
    if device.kind != "cpu" or sys.maxsize < 2**32:
        return None
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


class BoundSession:
    """A compiled graph bound to the training state and to buffers for its batch and its scalars.

    Write the arrays of `feeds` (NumPy views of the inputs' buffers), call `run`, and read `scalars`
    (views of the scalar outputs that the step adds) and `outputs`.

    - `model`: the graph. Inputs named like a tensor of the state read that tensor. The graph is
      changed: its backward pass reads packed weights from the state, and so do the products that
      operators in C++ compute.
    - `state`, `device`, `threads`: as for `compile_model`.
    - `name`: the name of the graph in error messages.
    - `writes`: outputs called `names.updated(<tensor of the state>)` are written into the state.
    - `per_run_inputs`: inputs whose values `run` gets as NumPy arrays or OrtValues, without a copy.
      Inputs of unknown size are always included.
    - `overwrite_outputs`: the next run overwrites outputs of known size, which saves allocations.
    - `input_buffers`: input -> the buffer that it is read from.
    - `output_buffers`: output -> the buffer that it is written into. `outputs` omits them.
    - `taken_outputs`: outputs that `take_outputs` returns, and `outputs` omits.
    - `busy_wait`, `uses_integers`, `shares_arena`: as for `compile_model`.
    - `captures`: whether runs launch a CUDA graph, if that is possible.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        state: DoubleBufferedState,
        device: Device,
        threads: int | None,
        name: str,
        *,
        writes: bool = False,
        per_run_inputs: Collection[str] = (),
        overwrite_outputs: bool = False,
        input_buffers: Mapping[str, Buffer] | None = None,
        output_buffers: Mapping[str, Buffer] | None = None,
        taken_outputs: Collection[str] = (),
        busy_wait: bool = False,
        uses_integers: bool = False,
        shares_arena: bool = False,
        captures: bool = False,
    ) -> None:
        # The current set of the state -> the binding that reads it, and the key and value of each
        # per-run input in that binding. Keeping the values keeps their memory alive.
        self._bindings: dict[int, Any] = {}
        self._bound: dict[int, dict[str, tuple[Any, Any]]] = {}
        self._last_binding: Any = None
        self._session: Any = None
        self._run: Any = None
        self._name = name
        self._state = state
        self._device = device
        # Kept here, because a session may be freed when the interpreter ends and modules are empty.
        self._calls = device.calls
        self._is_alone = not device.on_host
        share_packed_weights(model, state, device.kind, keep_rounding=uses_integers)
        self._shares_arena = shares_arena
        self._input_buffers = dict(input_buffers or {})
        self._sort_inputs(model.graph, per_run_inputs)
        self._given_buffers = dict(output_buffers or {})
        self._taken_outputs = dict.fromkeys(taken_outputs)
        # A CUDA graph always reads and writes the same memory.
        self._captures = captures and not self.per_run_inputs and is_capturable(model, device)
        self._sort_outputs(model.graph, writes, overwrite_outputs)
        self._captures &= not self._allocated_outputs
        compile_again = partial(
            _compiled,
            model,
            device,
            threads,
            name,
            busy_wait=busy_wait,
            uses_integers=uses_integers,
            shares_arena=shares_arena,
        )
        # Kept while capturing may fail, because it has the whole model.
        self._compile: Callable[..., Any] | None = compile_again
        self._start(compile_again)
        self.feeds = {name: buffer.array for name, buffer in self._feeds.items()}
        self.scalars = {name: buffer.array for name, buffer in self._scalars.items()}
        self.binds = 0  # number of per-run inputs bound so far
        self._last_bound: dict[str, tuple[Any, Any]] = {}
        self._prepares_runs = bool(
            not device.on_host or self.per_run_inputs or self._allocated_outputs
        )

    def __del__(self) -> None:
        self._release_session()

    def _release_session(self) -> None:
        """Free the bindings before the session, whose provider owns memory of theirs."""
        self._bindings.clear()
        self._last_binding = None
        with self._calls:
            self._session = self._run = None

    def _sort_inputs(self, graph: onnx.GraphProto, per_run_inputs: Collection[str]) -> None:
        self._state_inputs: list[str] = []
        self.per_run_inputs: list[str] = []
        self._feeds: dict[str, Buffer] = {}
        for value in graph.input:
            shape = _static_shape(value)
            if value.name in self._input_buffers:
                continue
            if value.name in self._state:
                self._state_inputs.append(value.name)
            elif shape is None or value.name in per_run_inputs:
                self.per_run_inputs.append(value.name)
            else:
                self._feeds[value.name] = Buffer(_dtype(value), shape, self._device)

    def _sort_outputs(self, graph: onnx.GraphProto, writes: bool, overwrite_outputs: bool) -> None:
        self._state_outputs: dict[str, str] = {}  # output -> the tensor of the state it updates
        self._scalars: dict[str, Buffer] = {}
        self._output_buffers: dict[str, Buffer] = {}
        self._allocated_outputs: list[str] = []  # onnxruntime allocates them in every run
        self.predictions: list[str] = []
        for value in graph.output:
            shape = _static_shape(value)
            updated = _updated_tensor(value.name)
            if writes and updated in self._state:
                self._state_outputs[value.name] = updated
            elif shape == () and names.is_added(value.name):
                device = self._device if self._captures else CPU
                self._scalars[value.name] = Buffer(_dtype(value), (), device)
            elif value.name in self._given_buffers or value.name in self._taken_outputs:
                pass  # not a prediction
            elif value.name in self.predictions:
                pass  # a model may list an output twice
            else:
                self.predictions.append(value.name)
                if (overwrite_outputs or self._captures) and shape is not None:
                    self._output_buffers[value.name] = Buffer(_dtype(value), shape, self._device)
                else:
                    self._allocated_outputs.append(value.name)
        self._written_groups = sorted({self._state.group(n) for n in self._state_outputs.values()})

    def _start(self, compile_again: Callable[..., Any]) -> None:
        """Compile the graph, so that its runs launch a CUDA graph if that is possible."""
        self._release_session()
        try:
            session = compile_again(captures=self._captures)
        except StepError:
            if not self._captures:
                raise
            # A node has no kernel on the device.
            self._captures = False
            session = compile_again()
        if not self._captures:
            self._compile = None
        self._session = session
        self._run = session.run_with_iobinding

    def _run_alone(self, binding: Any, options: Any) -> None:
        """Run, and read the scalars, while no other thread uses the device."""
        with self._calls:
            self._run(binding, options)
            for buffer in self._scalars.values():
                buffer.fetch()

    def run(self, values: Mapping[str, Any] | None = None) -> None:
        """Run once on the contents of `feeds`. The state swaps only if the run succeeds.

        `values` are the per-run inputs, as NumPy arrays or OrtValues.
        """
        state = self._state
        binding = self._bindings.get(state.current)
        options = None
        if binding is None:
            # The C library still has the memory that was freed after building and compiling the
            # graph, often in pieces that are too small for the large blocks of a run.
            trim_malloc()
        if binding is None or self._device.copies_inputs:
            binding = self._bind()
            self._bindings[state.current] = binding
            self._bound[state.current] = {}
            if not self._shares_arena:  # such a session has no pattern to learn
                options = _first_run_options(self._device)
        if self._prepares_runs:
            for buffer in self._feeds.values():
                buffer.sync()
            self._last_bound = self._bound[state.current]
            self._bind_per_run(binding, self._last_bound, values or {})
        if self._captures:
            options = run_options(state.current)
        # A run that fails may have overwritten the values to which `revert` returns.
        state.commit(self._written_groups)
        try:
            if self._is_alone:
                self._run_alone(binding, options)
            else:
                self._run(binding, options)
        except Exception as error:
            if not self._captures:
                raise StepError(explain_error(f"The {self._name} step failed", error)) from error
        else:
            self._last_binding = binding
            if self._written_groups:
                state.swap(self._written_groups)
            return
        # Perhaps only the capturing failed.
        del binding
        self._run_without_capture(values)

    def _run_without_capture(self, values: Mapping[str, Any] | None) -> None:
        """Compile again, without CUDA graphs, and run."""
        assert self._compile is not None  # kept for this
        if len(self._bindings) > 1:
            keep_alive(self._session)
        self._captures = False
        self._start(self._compile)
        self.run(values)

    def outputs(self) -> dict[str, Any]:
        """Return the last run's outputs other than state and scalars, as OrtValues.

        No later run changes them, except with `overwrite_outputs` or a CUDA graph.
        """
        outputs = {name: buffer.value for name, buffer in self._output_buffers.items()}
        if self._allocated_outputs:
            values = self._last_binding.get_outputs()
            outputs |= {name: values[self._positions[name]] for name in self._allocated_outputs}
        return outputs

    def take_outputs(self) -> dict[str, Any]:
        """Return the last run's `taken_outputs` as OrtValues, which the session no longer keeps."""
        values = self._last_binding.get_outputs()
        taken = {name: values[self._positions[name]] for name in self._taken_outputs}
        for name in taken:
            self._last_binding.bind_output(name, self._device.handle)
        return taken

    def release_inputs(self) -> None:
        """Stop keeping the per-run inputs of earlier runs, also of those that failed."""
        for current, bound in self._bound.items():
            for name in bound:
                self._bindings[current].bind_ortvalue_input(name, _NOTHING)
            bound.clear()

    def prediction(self) -> dict[str, Array]:
        """Return copies of `outputs` as arrays."""
        return copied_arrays(self.outputs())

    def inputs(self) -> dict[str, Any]:
        """Return the inputs of the last run other than state, in the types that `run` takes."""
        return {
            **{name: buffer.value for name, buffer in self._feeds.items()},
            **{name: value for name, (_, value) in self._last_bound.items()},
        }

    def inputs_of(self, batch: Batch) -> Mapping[str, Array]:
        """Return the arrays of `batch`, which was just run. Arrays in buffers are not copied."""
        return batch.arrays() if self.per_run_inputs else self.feeds

    def _bind(self) -> Any:
        """Return a binding that reads the current set of the state and writes the other one."""
        state = self._state
        binding = C.SessionIOBinding(self._session)
        for name in self._state_inputs:
            state.buffer(name).bind_as_input(binding, name)
        for name, buffer in {**self._feeds, **self._input_buffers}.items():
            binding.bind_ortvalue_input(name, buffer.value)
        outputs = {
            **{
                name: state.buffer(tensor, current=False)
                for name, tensor in self._state_outputs.items()
            },
            **self._scalars,
            **self._output_buffers,
            **self._given_buffers,
        }
        for name, buffer in outputs.items():
            buffer.bind_as_output(binding, name)
        for name in self._taken_outputs:
            binding.bind_output(name, self._device.handle)
        order = (*outputs, *self._taken_outputs, *self._allocated_outputs)
        self._positions = {name: i for i, name in enumerate(order)}
        return binding

    def _bind_per_run(
        self, binding: Any, bound: dict[str, tuple[Any, Any]], values: Mapping[str, Any]
    ) -> None:
        """Bind the per-run inputs that differ from those in `bound`.

        Inputs are compared by address, shape and type, because freed memory may be reused for
        another tensor. Arrays are always copied to the memory of another device.
        """
        for name in self.per_run_inputs:
            value = values[name]
            is_array = isinstance(value, np.ndarray)
            if name in bound and bound[name][1] is value and not is_array:
                continue  # not for arrays, whose shape may have been set in place
            if is_array:
                value = np.asarray(value, order="C")
                key = value.__array_interface__["data"][0], value.shape, value.dtype
            else:
                key = value.data_ptr(), tuple(value.shape()), value.element_type()
            is_copied = is_array and self._is_alone
            if name not in bound or bound[name][0] != key or is_copied:
                bindable = ort_value(value, self._device) if is_array else value
                binding.bind_ortvalue_input(name, bindable)
                self.binds += 1
            bound[name] = key, value  # kept, because onnxruntime borrows numpy's memory
        for name in self._allocated_outputs:
            # A new binding for each run: otherwise onnxruntime overwrites the output of the last
            # run.
            binding.bind_output(name, self._device.handle)


class StatelessSession:
    """A compiled graph that receives every value with the call and keeps nothing afterwards.

    Several threads may call it at once. `inputs` and `outputs` are the graph's names. `device`,
    `threads`, `name` and `uses_integers` are as for `compile_model`.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        device: Device,
        threads: int | None,
        name: str,
        *,
        uses_integers: bool = False,
    ) -> None:
        self._name = name
        self._device = device
        self._session = compile_model(
            model, device, threads, name, uses_integers=uses_integers
        )._sess
        self._first_run: Any = _first_run_options(device)
        self.inputs = tuple(v.name for v in model.graph.input)
        # A model may list an output twice.
        self.outputs = tuple(dict.fromkeys(v.name for v in model.graph.output))

    def __call__(
        self, values: Mapping[str, Any], outputs: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Return the outputs by name as OrtValues, for inputs by name as OrtValues.

        `outputs` lists the requested outputs; None requests all.
        """
        wanted = self.outputs if outputs is None else outputs
        options, self._first_run = self._first_run, None
        try:
            # On the host, this takes a third of the time of a new binding. On a device, it would
            # copy the outputs to the CPU.
            if self._device.on_host:
                results = self._session.run_with_ort_values(dict(values), list(wanted), options)
            else:
                results = self._run_with_binding(values, wanted)
        except Exception as error:
            raise StepError(explain_error(f"The {self._name} pass failed", error)) from error
        return dict(zip(wanted, results))

    def predict(self, batch: Batch) -> dict[str, Array]:
        """Return copies of the outputs for a batch, as arrays."""
        arrays = {name: np.asarray(array, order="C") for name, array in batch.arrays().items()}
        return copied_arrays(
            self({name: ort_value(arrays[name], self._device) for name in self.inputs})
        )

    def _run_with_binding(self, values: Mapping[str, Any], outputs: Sequence[str]) -> Any:
        with self._device.calls:
            binding = C.SessionIOBinding(self._session)
            for name, value in values.items():
                binding.bind_ortvalue_input(name, value)
            for name in outputs:
                binding.bind_output(name, self._device.handle)
            self._session.run_with_iobinding(binding, None)
            return binding.get_outputs()


def _compiled(
    model: onnx.ModelProto, device: Device, threads: int | None, name: str, **settings: Any
) -> Any:
    """Return a session for a graph, with other trainers if it is small and runs on one thread.

    The arguments are those of `compile_model`.
    """

    def compile_graph() -> Any:
        return compile_model(model, device, threads, name, **settings)._sess

    if device.kind != "cpu" or threads != 1:
        return compile_graph()
    return SESSIONS.session(model, tuple(settings.items()), compile_graph)


def _updated_tensor(output: str) -> str:
    """Return the tensor of the state that an output updates, by its name; "" for none."""
    suffix = names.updated("")
    return output[: -len(suffix)] if output.endswith(suffix) else ""


def _static_shape(value: onnx.ValueInfoProto) -> tuple[int, ...] | None:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape") or not all(d.HasField("dim_value") for d in tensor.shape.dim):
        return None
    return tuple(d.dim_value for d in tensor.shape.dim)


def _dtype(value: onnx.ValueInfoProto) -> np.dtype[Any]:
    return numpy_dtype(value.type.tensor_type.elem_type)
