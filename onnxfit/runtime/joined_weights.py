"""Thousands of small weights, which a step reads and writes as a few tensors.

onnxruntime compares the name of every value with those of all inputs and outputs of a graph when it
creates a session, and searches all outputs again in every step. Both times are the number of nodes
times the number of weights. Weights of one shape are therefore one input, which a Split divides,
and one output, which a Concat joins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx.helper import make_node

from onnxfit.graph import names, scopes

Array = npt.NDArray[Any]

# Few weights are read one by one: the searches are short, and a Split and a Concat copy weights.
MIN_WEIGHTS_TO_JOIN = 1000
# Large weights are read one by one, because copying them would take long.
MAX_ELEMENTS_TO_JOIN = 2**12


def weights_to_join(weights: Mapping[str, Array]) -> list[list[str]]:
    """Group small weights of one type and shape; a group has at least MIN_WEIGHTS_TO_JOIN."""
    alike: dict[Any, list[str]] = {}
    for name, w in weights.items():
        if w.ndim and 0 < w.size <= MAX_ELEMENTS_TO_JOIN:
            alike.setdefault((w.dtype, w.shape), []).append(name)
    return [group for group in alike.values() if len(group) >= MIN_WEIGHTS_TO_JOIN]


def join_weights(model: onnx.ModelProto, joined: Mapping[str, Sequence[str]]) -> onnx.ModelProto:
    """Return the graph of a step, changed in place, with joined tensors in the place of weights.

    - `joined`: the name of a flat tensor -> the weights of one type and shape whose elements it
      has. It replaces them as an input, and their next values as an output.
    """
    graph = model.graph
    for name, members in joined.items():
        weight = next(v for v in graph.input if v.name == members[0]).type.tensor_type
        shape = [dim.dim_value for dim in weight.shape.dim]
        next_values = [names.updated(member) for member in members]
        flat = [len(members) * math.prod(shape)]
        inside = [
            *_replace_values(graph.input, members, name, weight.elem_type, flat),
            *_replace_values(
                graph.output, next_values, names.updated(name), weight.elem_type, flat
            ),
        ]
        shapes = {"whole": [len(members) * shape[0], *shape[1:]], "flat": flat}
        for key, sizes in shapes.items():
            graph.initializer.append(
                onnx.numpy_helper.from_array(np.array(sizes, np.int64), f"{name}/{key}")
            )
        scope = scopes.update_of(name)
        before, after = f"{name}/read", f"{name}/written"
        inside += [
            onnx.helper.make_tensor_value_info(value, weight.elem_type, shapes["whole"])
            for value in (before, after)
        ]
        graph.value_info.extend(inside)
        # Nodes are in the order in which they run.
        for position, node in enumerate(
            [
                make_node("Reshape", [name, f"{name}/whole"], [before], f"{scope}/Reshape"),
                make_node("Split", [before], members, f"{scope}/Split", num_outputs=len(members)),
            ]
        ):
            graph.node.insert(position, node)
        flatten = f"{scope}/Flatten"
        graph.node.extend(
            [
                make_node("Concat", next_values, [after], f"{scope}/Concat", axis=0),
                make_node("Reshape", [after, f"{name}/flat"], [names.updated(name)], flatten),
            ]
        )
    return model


def _replace_values(
    values: Any, removed: Sequence[str], name: str, element_type: int, shape: Sequence[int]
) -> list[onnx.ValueInfoProto]:
    """Replace inputs or outputs of a graph by one, in place, and return copies of the removed ones.

    The others keep their order.
    """
    absent = set(removed)
    kept, copies = [], []
    for value in values:
        if value.name in absent:
            copies.append(onnx.ValueInfoProto.FromString(value.SerializeToString()))
        else:
            kept.append(value)
    del values[:]
    values.extend([*kept, onnx.helper.make_tensor_value_info(name, element_type, shape)])
    return copies
