"""The library of operators in the package onnxfit-kernels, if it is installed.

It is loaded from that package alone: no file that onnxfit reads can name another one.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

import numpy as np
import onnx
import onnxruntime
from onnx import helper

from onnxfit.errors import warn_user

DOMAIN = "onnxfit.kernels"
INTERFACE = 11  # of the library: the operators and their attributes
SWITCH = "ONNXFIT_KERNELS"  # "off" in this variable of the environment: operators of ONNX alone
UPGRADE = 'Install the newest version: pip install --upgrade "onnxfit[fast]".'


def library_path() -> str | None:
    """Return the path of the library; None if it is not installed, switched off, or unusable.

    A library that cannot be used is reported by one warning.
    """
    return None if os.environ.get(SWITCH) == "off" else usable_library()


@cache
def usable_library() -> str | None:
    """Return the path of the installed library; None, with a warning, if it does not work here."""
    try:
        import onnxfit_kernels
    except ImportError:
        return None
    path, interface = str(onnxfit_kernels.LIBRARY), onnxfit_kernels.INTERFACE
    problem = "it is for another version of onnxfit" if interface != INTERFACE else _problem(path)
    if problem:
        warn_user(
            "onnxfit-kernels cannot be used, and training continues without it:"
            f" {problem}.\n{UPGRADE} To avoid this warning, uninstall it or set {SWITCH}=off."
        )
        return None
    return path


@cache
def has_products(path: str) -> bool:
    """Return whether a library has its products of matrices compiled for this processor."""
    lanes = ctypes.CDLL(path).product_lanes
    lanes.restype = ctypes.c_int
    return bool(lanes())


def _problem(path: str) -> str | None:
    """Return why a library does not work with this onnxruntime; None if it does."""
    value = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2]) for name in "xy"]
    node = helper.make_node(
        "Elementwise",
        ["x"],
        ["y"],
        domain=DOMAIN,
        program=[0, 1, 0, 0],
        temporaries=0,
        tensors=1,
        pieces=1,
    )
    graph = helper.make_graph([node], "probe", value[:1], value[1:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    try:
        options.register_custom_ops_library(path)
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        (y,) = session.run(None, {"x": np.array([1, 2], np.float32)})
    except Exception as error:  # onnxruntime raises its own classes, all of them plain Exceptions
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return None if y.tolist() == [2, 4] else "its results are wrong"
