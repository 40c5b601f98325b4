"""Conversion between float32 and float16 by onnxruntime, whose Cast uses processor instructions."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnxruntime.capi import _pybind_state as C

from onnxfit.load.opset import IR_VERSION, empty_graph
from onnxfit.runtime.compilation import compile_model
from onnxfit.runtime.device import CPU


class CastConverter:
    """A `Float16Converter` of two graphs with one Cast each.

    They are compiled at the first use.

    - `threads`: threads that share a Cast; None leaves the number to onnxruntime.
    """

    def __init__(self, threads: int | None) -> None:
        self._threads = threads
        self._sessions: dict[np.dtype[Any], Any] = {}

    def narrow(self, numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
        """Return the numbers as float16, infinite outside its range."""
        out = np.empty(numbers.shape, np.float16)
        self._cast(numbers, out)
        return out

    def widen(self, numbers: npt.NDArray[np.float16], out: npt.NDArray[np.float32]) -> None:
        """Write the numbers into `out`, which has as many elements."""
        self._cast(numbers, out)

    def _cast(self, numbers: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        if not numbers.size:
            return
        if out.dtype not in self._sessions:
            model = cast_graph(numbers.dtype, out.dtype)
            self._sessions[out.dtype] = compile_model(model, CPU, self._threads, "Cast")._sess
        session = self._sessions[out.dtype]
        binding = C.SessionIOBinding(session)
        shape = [numbers.size]
        # By address: the binding and the arrays live only for this run.
        binding.bind_input("x", CPU.handle, numbers.dtype.type, shape, numbers.ctypes.data)
        binding.bind_output("y", CPU.handle, out.dtype.type, shape, out.ctypes.data)
        session.run_with_iobinding(binding, None)


def convert_by_casts(communicator: Any, threads: int | None) -> None:
    """Let a communicator that compresses its sums convert with onnxruntime.

    - `communicator`: a Communicator, or None.
    - `threads`: as for `CastConverter`.
    """
    if getattr(communicator, "compression", None) is not None:
        communicator.converter = CastConverter(threads)


def cast_graph(given: np.dtype[Any], wanted: np.dtype[Any]) -> onnx.ModelProto:
    """Return a graph that casts a vector `x` of any size to another element type, as `y`."""
    op = empty_graph("cast")
    op.output("y", op.cast(op.input("x", given, ("N",)), wanted))
    return ir.to_proto(ir.Model(op.graph, ir_version=IR_VERSION))
