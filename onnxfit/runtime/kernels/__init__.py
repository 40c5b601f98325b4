"""Operators of the package onnxfit-kernels, in the place of several operators of ONNX.

They are put into a copy of a graph when it is compiled for the CPU. Saved graphs keep plain ONNX
operators. Without the package, nothing changes.
"""

from __future__ import annotations

import onnx
from onnx import helper

from onnxfit.runtime.kernels.elementwise import fuse_elementwise
from onnxfit.runtime.kernels.library import DOMAIN, library_path

__all__ = ["library_path", "with_kernels"]


def with_kernels(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model with operators of the library.

    A model in which none can be used is returned itself.
    """
    graph = fuse_elementwise(model.graph)
    if graph is None:
        return model
    faster = onnx.ModelProto()
    faster.CopyFrom(model)
    del faster.graph.node[:]
    faster.graph.node.extend(graph)
    faster.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return faster
