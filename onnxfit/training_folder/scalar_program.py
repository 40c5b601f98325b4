"""The graph of a host's scalars in JSON, for hosts whose runtime has no numbers of 64 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.numpy_helper import to_array

from onnxfit.training_folder.json_numbers import with_finite_floats

PROGRAM_VERSION = 1
Json = dict[str, Any]


def described_program(model: onnx.ModelProto) -> Json:
    """Return the constants and the nodes of a graph that `cut_host_scalars` returned.

    Integers of 64 bits are texts, since many readers of JSON keep 53 bits of a number.
    """
    graph = ir.from_proto(model).graph
    constants = []
    for tensor in model.graph.initializer:
        array = to_array(tensor)
        data = array.ravel().tolist()
        if array.dtype == np.int64:
            data = [str(number) for number in data]
        constants.append(
            {"name": tensor.name, "type": str(array.dtype), "data": with_finite_floats(data)}
        )
    nodes = [
        {
            "op": node.op_type,
            "inputs": [value.name for value in node.inputs if value is not None],
            "output": node.outputs[0].name,
            "type": _type_of(node.outputs[0]),
        }
        for node in graph
    ]
    return {"version": PROGRAM_VERSION, "constants": constants, "nodes": nodes}


def _type_of(value: ir.Value) -> str:
    assert value.dtype is not None  # cut_host_scalars keeps nodes of unknown types in the step
    return str(value.dtype.numpy())
