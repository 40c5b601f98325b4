"""Compile a graph: its changes for onnxruntime, and the options of its session."""

from __future__ import annotations

import ctypes
import os
import re
import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import onnx
import onnxruntime

from onnxfit.environment import warn_of_mixed_distributions
from onnxfit.errors import StepError
from onnxfit.graph import names
from onnxfit.graph.scopes import maker_of
from onnxfit.graph.subgraphs import nodes_of
from onnxfit.kernels.library import register
from onnxfit.kernels.transforms import INTEGER_TRANSFORMS, TRANSFORMS
from onnxfit.load.completion import opset_of
from onnxfit.load.opset import OPSET
from onnxfit.load.runtime_support import newest_opset
from onnxfit.runtime.device import Device
from onnxfit.runtime.kernel_opset import kernel_opset
from onnxfit.runtime.memory import plan_memory, share_arena, trim_malloc
from onnxfit.runtime.node_order import bytes_of_values, compilation_order
from onnxfit.runtime.ort_optimizers import useless_optimizers
from onnxfit.runtime.shared_initializers import share_initializers
from onnxfit.runtime.transform_cache import CACHE

CAPTURING = {"enable_cuda_graph": "1"}  # options of the execution provider
MIN_BYTES_TO_TRIM = 2**24  # of a serialized graph

# Warnings about graphs that onnxfit builds on purpose would only distract the user.
onnxruntime.set_default_logger_severity(3)


def compile_model(
    model: onnx.ModelProto,
    device: Device,
    threads: int | None,
    name: str,
    *,
    pausable: bool = False,
    busy_wait: bool = False,
    uses_integers: bool = False,
    shares_arena: bool = False,
    captures: bool = False,
    entries: Mapping[str, str] | None = None,
) -> Any:
    """Return an onnxruntime session for a model.

    StepError: the graph does not compile; the message has its `name`, and the node that caused it.

    - `threads`: threads that share an operator; None leaves the number to onnxruntime.
    - `pausable`: whether a TrainingAgent stops in the middle of a run, and other runs may start
      before it continues.
    - `busy_wait`: whether the session's threads spin between two runs, which saves 4 % of a small
      step. They block the processor for every other session and library: with four alternating
      graphs, a step took up to 3.5 times as long (transformer, two cores).
    - `uses_integers`: whether onnxruntime uses its integer kernels between DequantizeLinear and
      QuantizeLinear, as for a quantized file. Training does not use them, because gradients belong
      to the floats that the integers represent. Moreover, onnxruntime 1.31 moves QuantizeLinear
      into the backward pass, and writes nodes there that do not compile.
    - `shares_arena`: whether the values of a run are in the arena that all such sessions share.
    - `captures`: whether the session makes CUDA graphs of its runs. It does not compile if a node
      has no kernel on the device.
    - `entries`: further entries of the session's configuration.
    """
    if names.SEED in {value.name for value in model.graph.input} and not device.draws:
        raise StepError(
            f"device={device.kind!r} cannot train a model with dropout or noise: it has no 64-bit"
            " integers, and would draw the same random numbers in every step. Use another device,"
            " such as device='cpu'."
        )
    warn_of_mixed_distributions()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors come as exceptions
    if pausable:
        # Another run must not overwrite the values of a paused one.
        options.enable_mem_pattern = False
        options.enable_mem_reuse = False
        # Weights are inputs and change, so a prepacked copy would be out of date.
        options.add_session_config_entry("session.disable_prepacking", "1")
    in_memory = bytes_of_values(model.graph)
    plan_memory(model, in_memory, options)
    if shares_arena:
        share_arena(options)
    if not busy_wait:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    if not uses_integers:
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    for key, value in (entries or {}).items():
        options.add_session_config_entry(key, value)
    if threads is not None:
        options.intra_op_num_threads = threads
    if not pausable:  # a TrainingAgent reads values by their names
        transforms = INTEGER_TRANSFORMS if uses_integers else TRANSFORMS
        model = CACHE.transform(model, device.kind, transforms)
        register(model, options)
    model, shared = share_initializers(model, device, options)
    older = (
        device.forms == "cuda"
        or (uses_integers and quantizes(model))
        or _is_too_new(opset_of(model) or 0)
    )
    with compilation_order(model, in_memory), kernel_opset(model) if older else nullcontext():
        serialized = model.SerializeToString()
    try:
        with device.calls:
            session = device.start_session(
                serialized, options, CAPTURING if captures else {}, useless_optimizers(model)
            )
    except Exception as error:  # onnxruntime raises its own classes, all of them plain Exceptions
        raise StepError(
            explain_error(f"onnxruntime cannot compile the {name} graph", error)
        ) from error
    size = len(serialized) + sum(one.nbytes for one in shared if isinstance(one, np.ndarray))
    del serialized
    if size > MIN_BYTES_TO_TRIM:
        trim_malloc()
    _sessions[session._sess] = shared
    return session


def _is_too_new(opset: int) -> bool:
    """Return whether onnxruntime does not read an opset.

    A file may have it: its training step is built in an older opset, and `predict` runs the file.
    """
    return opset > OPSET and opset > newest_opset()


def quantizes(model: onnx.ModelProto) -> bool:
    """Return whether a model has a QuantizeLinear."""
    return any(node.op_type == "QuantizeLinear" for node in nodes_of(model.graph))


# Session -> the objects whose memory it reads.
_sessions: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def _keep_inherited_sessions() -> None:
    """Keep the sessions of the parent process alive in a forked process.

    They still run there, but without threads: onnxruntime crashes when it deletes them.
    """
    for session in _sessions:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))


if hasattr(os, "register_at_fork"):  # as in DataLoader workers
    os.register_at_fork(after_in_child=_keep_inherited_sessions)


def explain_error(problem: str, error: Exception) -> str:
    """Return a message with onnxruntime's first line, the node in it, and the node's origin."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    node = re.search(
        r"[Nn]ode[^:'(]*[:(]?\s*[Nn]ame:'([^']+)'|Node \(([^)]+)\)|node with name '([^']+)'|Node,"
        r" \(\"([^\"]+)\"",
        text,
    )
    name = next((group for group in node.groups() if group), None) if node else None
    maker = f" (node {name!r}, made by {maker_of(name)})" if name else ""
    return f"{problem}{maker}: {text}"
