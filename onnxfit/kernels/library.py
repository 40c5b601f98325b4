"""The library of operators in C++, which lies beside this module if it was compiled.

No other library is loaded: no file that onnxfit reads can name one.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import helper

from onnxfit.environment import is_switched_off
from onnxfit.errors import warn_user
from onnxfit.kernels.program import CODES

Array = npt.NDArray[Any]
DOMAIN = "onnxfit.kernels"
SWITCH = "ONNXFIT_KERNELS"  # "off" in this variable of the environment: operators of ONNX alone
LIBRARY = Path(__file__).with_name("operators.so")  # on every platform


def library_path() -> str | None:
    """Return the path of the library; None if it was not compiled, is switched off, or is unusable.

    A library that cannot be used is reported by one warning.
    """
    return None if is_switched_off(SWITCH) else usable_library()


@dataclass(frozen=True)
class LibraryStatus:
    """Whether this process uses the operators.

    - `state`: "used", or why they are not.
    - `detail`: the reason for the state, or the operators that are not used; may be empty.
    """

    state: Literal["used", "switched off", "missing", "unusable"]
    detail: str = ""


def status() -> LibraryStatus:
    """Return whether the operators are used, and the reason if they are not."""
    if is_switched_off(SWITCH):
        return LibraryStatus("switched off", f"by the environment variable {SWITCH}")
    if not LIBRARY.exists():
        return LibraryStatus("missing", f"{LIBRARY.name} was not compiled")
    problem = _problem(str(LIBRARY))
    if problem is not None:
        return LibraryStatus("unusable", problem)
    if not has_products(str(LIBRARY)):
        return LibraryStatus("used", "except for matrix products, which need AVX2")
    return LibraryStatus("used")


@cache
def usable_library() -> str | None:
    """Return the path of the compiled library; None, with a warning, if it does not work here."""
    if not LIBRARY.exists():
        return None
    path = str(LIBRARY)
    problem = _problem(path)
    if problem:
        warn_user(
            "onnxfit's operators in C++ cannot be used, and training continues without them:"
            f" {problem}.\nRun pip install --force-reinstall --no-deps onnxfit, or set"
            f" {SWITCH}=off to avoid this warning."
        )
        return None
    return path


def register(model: onnx.ModelProto, options: Any) -> None:
    """Let a session with these options run a model that may have operators of the library."""
    if any(opset.domain == DOMAIN for opset in model.opset_import):
        options.register_custom_ops_library(library_path())


@cache
def has_products(path: str) -> bool:
    """Return whether a library has its products of matrices compiled for this processor."""
    lanes = ctypes.CDLL(path).product_lanes
    lanes.restype = ctypes.c_int
    return bool(lanes())


class PairInstructions(IntEnum):
    """Instructions that multiply numbers of bfloat16, as in kernels/src/instruction_set.h."""

    NONE = 0
    AVX512_BF16 = 1
    AMX = 2


def pair_instructions() -> PairInstructions:
    """Return the instructions for bfloat16 of the library on this processor; NONE without it."""
    path = library_path()
    return PairInstructions(ctypes.CDLL(path).pair_instructions_used() if path is not None else 0)


def _problem(path: str) -> str | None:
    """Return why a library does not work with this onnxruntime; None if it does."""
    # A library of an older onnxfit numbers the instructions otherwise.
    program = [CODES["Round"], 1, 0]
    attributes: dict[str, Any] = {"program": program, "temporaries": 0, "tensors": 1, "pieces": 1}
    node = helper.make_node("Elementwise", ["x"], ["y"], domain=DOMAIN, **attributes)
    node.attribute.append(helper.make_attribute("spread", [], attr_type=onnx.AttributeProto.INTS))
    try:
        y = run_node(node, np.array([0.6, 2.4], np.float32), path)
    except Exception as error:  # onnxruntime raises its own classes, all of them plain Exceptions
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return None if y.tolist() == [1, 2] else "its results are wrong"


def run_node(node: onnx.NodeProto, x: Array, library: str = "") -> Array:
    """Return what onnxruntime computes with a node from x to y, which have one shape.

    - `library`: the path of the library with the operator.
    """
    value = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, x.shape) for name in "xy"]
    graph = helper.make_graph([node], "probe", value[:1], value[1:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(node.domain, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    if library:
        options.register_custom_ops_library(library)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    y: Array = session.run(None, {"x": x})[0]
    return y
