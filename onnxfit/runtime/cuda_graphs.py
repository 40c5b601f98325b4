"""CUDA graphs: all kernels of a run are launched at once.

onnxruntime launches every kernel of a graph by itself, which takes longer than many kernels run. It
can make a CUDA graph instead ("capture"), which later runs replay. A replay reads and writes the
same memory as the captured run. The two sets of the training state therefore have a CUDA graph
each.

onnxruntime runs the graph several times to capture it. This changes no result, because a run never
writes what it reads.

A capture that fails can leave CUDA in a state in which the process can use it no more. So only
graphs are captured that are known to succeed.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import onnx
import onnxruntime

from onnxfit.environment import is_switched_off
from onnxfit.runtime.device import Device
from onnxfit.runtime.version import onnxruntime_version

# "off" in this environment variable leaves all kernels to be launched one by one.
SWITCH = "ONNXFIT_CUDA_GRAPHS"
# Earlier versions have one CUDA graph in a session.
FIRST_VERSION = (1, 18)
# The operators of the training steps that were captured on an H100. Others may copy sizes to the
# CPU, run there, or wait for the GPU, as NonZero does.
OPERATORS = frozenset(
    [
        "Abs", "Add", "And", "Cast", "CastLike", "Clip", "Concat", "Conv", "ConvTranspose", "Div",
        "Equal", "Erf", "Exp", "Expand", "Flatten", "Floor", "Gather", "GatherElements", "Gelu",
        "Gemm", "Greater", "HardSigmoid", "LayerNormalization", "Less", "LogSoftmax", "MatMul",
        "Max", "MaxPool", "Mul", "Neg", "Not", "Or", "Pad", "Pow", "Range", "ReduceMean",
        "ReduceSum", "Relu", "Reshape", "ScatterElements", "ScatterND", "Sigmoid", "Slice",
        "Softmax", "Sqrt", "Squeeze", "Sub", "Sum", "Tanh", "Transpose", "Trilu", "Unsqueeze",
        "Where",
    ]
)  # fmt: skip
# For more tensors than this, the kernels of Concat and others read a list of addresses, which is
# copied to the GPU in every run.
MAX_TENSORS = 32


def is_capturable(model: onnx.ModelProto, device: Device) -> bool:
    """Return whether onnxruntime may capture the runs of a model."""
    return (
        device.kind == "cuda"
        and not is_switched_off(SWITCH)
        and onnxruntime_version() >= FIRST_VERSION
        and all(_is_capturable(node) for node in model.graph.node)
        and not _has_constant_output(model.graph)
    )


def _is_capturable(node: onnx.NodeProto) -> bool:
    return (
        node.domain == ""
        and node.op_type in OPERATORS
        and max(len(node.input), len(node.output)) <= MAX_TENSORS
    )


def _has_constant_output(graph: onnx.GraphProto) -> bool:
    """Return whether an output depends on no input: onnxruntime copies it, and waits."""
    computed = {value.name for value in graph.input}
    for node in graph.node:
        if not computed.isdisjoint(node.input):
            computed.update(node.output)
    return any(value.name not in computed for value in graph.output)


def keep_alive(session: Any) -> None:
    """Never delete a session that has a CUDA graph, and failed to make another one.

    CUDA refuses to delete the graph then, and onnxruntime ends the process.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))


@lru_cache
def run_options(current: int) -> Any:
    """Return the options of runs with the set `current` of the state, which has its own graph."""
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(current + 1))
    return options
