"""Types of the values in a graph that is compiled."""

from __future__ import annotations

from typing import NamedTuple

import onnx


class ResultType(NamedTuple):
    """The element type and the shape of a value; sizes are numbers, or names."""

    element: int
    shape: tuple[int | str, ...]

    @property
    def is_scalar(self) -> bool:
        return all(size == 1 for size in self.shape)


def declared_types(graph: onnx.GraphProto) -> dict[str, ResultType]:
    """Return the types of the values whose type and shape a graph declares."""
    types = {}
    for value in (*graph.input, *graph.value_info, *graph.output):
        tensor = value.type.tensor_type
        if tensor.HasField("shape"):
            sizes = tuple(dim.dim_value or dim.dim_param for dim in tensor.shape.dim)
            if all(sizes):
                types[value.name] = ResultType(tensor.elem_type, sizes)
    for constant in graph.initializer:
        types[constant.name] = ResultType(constant.data_type, tuple(constant.dims))
    return types
