"""Compiled graphs: sessions bound to the training state, and sessions that keep nothing between
calls.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import weakref
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnxruntime.capi import _pybind_state as C

from onnxfit.data import Batch
from onnxfit.errors import StepError
from onnxfit.graph import names
from onnxfit.runtime.buffers import Buffer, DoubleBufferedState
from onnxfit.runtime.device import Device
from onnxfit.runtime.values import Array, ort_value

# warnings about graphs that we made on purpose are noise to the user
onnxruntime.set_default_logger_severity(3)


def compile_model(
    model: onnx.ModelProto,
    device: Device,
    threads: int | None,
    what: str,
    *,
    pausable: bool = False,
    busy_wait: bool = False,
) -> Any:
    """An onnxruntime session;

    StepError that says which graph did not compile and which node was to blame.

    `pausable`: a TrainingAgent will stop in the middle of a run, of which others may begin before
    it goes on. `busy_wait`: its threads look out for the next run between two runs, which saves 4 %
    of a small step, and takes the processor from every other session and library: where four graphs
    take turns, and none waits for another's threads to sleep, a step took up to 3.5 times as long
    (transformer, two cores).
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors come as exceptions
    if pausable:
        # what waits must not be written over
        options.enable_mem_pattern = options.enable_mem_reuse = False
        # weights are inputs, and change
        options.add_session_config_entry("session.disable_prepacking", "1")
    if not busy_wait:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=[(device.provider, device.options)]
        )
    except Exception as error:  # onnxruntime raises its own classes, all of them plain Exceptions
        raise StepError(_explain(f"onnxruntime cannot compile the {what} graph", error)) from error
    _sessions.add(session._sess)
    return session


def _first_run(device: Device) -> Any:
    """Options for the first run with a binding; None for none.

    It learns what memory the graph needs, piece by piece, and the next takes that as one block:
    what the first took is given back, up to a fifth of all that the process has. 32-bit systems
    have nothing to give back, and call it an error.
    """
    if device.kind != "cpu" or sys.maxsize < 2**32:
        return None
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


_sessions: weakref.WeakSet[Any] = weakref.WeakSet()


def _keep_for_good() -> None:
    """In a forked process: the sessions it was born with run, but have no threads to end there, and
    would crash it.
    """
    for session in _sessions:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))


if hasattr(os, "register_at_fork"):  # as in DataLoader workers
    os.register_at_fork(after_in_child=_keep_for_good)


def _explain(what: str, error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    node = re.search(
        r"[Nn]ode[^:'(]*[:(]?\s*[Nn]ame:'([^']+)'|Node \(([^)]+)\)|node with name '([^']+)'|Node,"
        r" \(\"([^\"]+)\"",
        text,
    )
    name = next((g for g in node.groups() if g), None) if node else None
    maker = f" (node {name!r}, made by {_maker(name)})" if name else ""
    return f"{what}{maker}: {text}"


def _maker(node: str) -> str:
    """Who made a node, by the scope in its name."""
    if node.startswith("gradient/"):
        return f"the gradient of {node.split('/', 1)[1].rsplit('/', 1)[0]!r}"
    scopes = {
        "loss/": "the loss",
        "penalty/": "the penalty",
        "optimizer/": "the optimizer",
        "train/": "the training form",
    }
    if "_Grad/" in node or node.endswith("_Grad"):
        return "the gradient"
    return next((who for scope, who in scopes.items() if node.startswith(scope)), "the model")


class BoundSession:
    """One compiled graph bound to the state, to buffers for its batch, and to buffers for the
    scalars it reports.

    `feeds` holds the numpy view of every input that is not state: write them, then `run`; what it
    reports is then in `scalars`. Inputs in `given`, and those whose size only a batch tells, come
    with every run instead, as numpy arrays or OrtValues, and are read where they lie.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        state: DoubleBufferedState,
        device: Device,
        threads: int | None,
        what: str,
        *,
        writes: bool = False,
        given: Collection[str] = (),
        reuse: bool = False,
        busy_wait: bool = False,
    ) -> None:
        """`writes`: outputs that are the next state go there.

        `reuse`: the other outputs of known size are overwritten by the next run.
        """
        self.model = model
        self._what = what
        self._state = state
        self._session = compile_model(model, device, threads, what, busy_wait=busy_wait)._sess
        self._device = device
        self._reads = [v.name for v in model.graph.input if v.name in state]
        self._writes = {
            v.name: base
            for v in model.graph.output
            if writes and (base := _state_of(v.name)) in state
        }
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
        # what each binding's open inputs are, kept alive
        self._bound: dict[int, dict[str, tuple[Any, Any]]] = {}
        self._last_bound: dict[str, tuple[Any, Any]] = {}
        self._run = self._session.run_with_iobinding
        # something has to be done before each run
        self._prepares = bool(device.kind != "cpu" or self.open_inputs or self._new)

    def run(self, values: Mapping[str, Any] | None = None) -> None:
        """One run with what is in `feeds`, and `values` for open inputs; the state swaps only if it
        succeeds.
        """
        state = self._state
        binding, options = self._bindings.get(state.parity), None
        if binding is None:
            binding, options = (
                self._bindings.setdefault(state.parity, self._bind()),
                _first_run(self._device),
            )
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
        """The outputs that are neither state nor scalars, of the last run, as OrtValues; no later
        run touches them unless `reuse` said so.
        """
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
        return {
            **{name: buffer.value for name, buffer in self._feeds.items()},
            **{n: v for n, (_, v) in self._last_bound.items()},
        }

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

    def _rebind(
        self, binding: Any, bound: dict[str, tuple[Any, Any]], values: Mapping[str, Any]
    ) -> None:
        """Bind inputs that are not bound already.

        Address, shape and type make one: memory that is freed may come back as another tensor.
        """
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
            # anew each time: onnxruntime would write into the last run's result
            binding.bind_output(name, self._device.handle)


class StatelessSession:
    """A compiled graph that takes every value with the call and holds none after it, so that
    several threads may call it at once.
    """

    def __init__(
        self, model: onnx.ModelProto, device: Device, threads: int | None, what: str
    ) -> None:
        self._what = what
        self._device = device
        self._session = compile_model(model, device, threads, what)._sess
        self.inputs = tuple(v.name for v in model.graph.input)
        # a model may list an output twice
        self.outputs = tuple(dict.fromkeys(v.name for v in model.graph.output))

    def __call__(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Output -> OrtValue, from input -> OrtValue."""
        try:
            # three times as fast as a new binding, but all it gives is in the CPU's memory
            if self._device.kind == "cpu":
                return dict(
                    zip(
                        self.outputs,
                        self._session.run_with_ort_values(dict(values), list(self.outputs), None),
                    )
                )
            binding = C.SessionIOBinding(self._session)
            for name, value in values.items():
                binding.bind_ortvalue_input(name, value)
            for name in self.outputs:
                binding.bind_output(name, self._device.handle)
            self._session.run_with_iobinding(binding, None)
            return dict(zip(self.outputs, binding.get_outputs()))
        except Exception as error:
            raise StepError(_explain(f"The {self._what} pass failed", error)) from error


def _state_of(output: str) -> str:
    suffix = names.updated("")
    return output[: -len(suffix)] if output.endswith(suffix) else ""


def _static_shape(value: onnx.ValueInfoProto) -> tuple[int, ...] | None:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape") or not all(d.HasField("dim_value") for d in tensor.shape.dim):
        return None
    return tuple(d.dim_value for d in tensor.shape.dim)


def _dtype(value: onnx.ValueInfoProto) -> np.dtype[Any]:
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
