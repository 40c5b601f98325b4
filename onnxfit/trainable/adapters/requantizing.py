"""Merge adapters into packed weights, and pack the sums again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import onnx

from onnxfit.errors import SettingError, listed_names
from onnxfit.graph.index import tensors_of
from onnxfit.graph.subgraphs import read_by
from onnxfit.trainable.adapters.adapter import Adapter, Array
from onnxfit.trainable.quantized.packed_weights import OPERATOR, SCALE, WEIGHT, ZERO_POINT
from onnxfit.trainable.quantized.packing import repacked


def repacked_weights(
    model: onnx.ModelProto, adapters: Sequence[Adapter], arrays: Mapping[str, Array]
) -> dict[str, onnx.TensorProto]:
    """Return the initializers of packed weights with their adapters merged, by name.

    - `model`: a model without functions.
    - `adapters`: the adapters of packed weights.
    - `arrays`: the arrays of all adapters, by name.

    SettingError: the integers of a weight cannot be packed again.
    """
    tensors = tensors_of(model.graph)
    changed: dict[str, onnx.TensorProto] = {}
    for one in adapters:
        nodes = [model.graph.node[reader.index] for reader in one.weight.readers]
        _require_own_tensors(model, one.weight.name, nodes)
        changed |= repacked(nodes[0], tensors, partial(one.merged, arrays=arrays))
    return changed


def _require_own_tensors(
    model: onnx.ModelProto, name: str, readers: Sequence[onnx.NodeProto]
) -> None:
    """Raise SettingError unless only MatMulNBits read the weight, and alike."""
    problem = ""
    if any(node.op_type != OPERATOR for node in readers):
        problem = f"only a {OPERATOR} can be packed again"
    elif len({tuple(node.input[WEIGHT : ZERO_POINT + 1]) for node in readers}) > 1:
        problem = "its layers have different scales"
    else:
        layers = {id(node) for node in readers}
        outside = (node for node in model.graph.node if id(node) not in layers)
        read_outside = {name for node in outside for name in read_by(node)}
        shared = read_outside.intersection(readers[0].input[SCALE : ZERO_POINT + 1]) - {""}
        if shared:
            problem = f"other layers read {listed_names(sorted(shared))}"
    if problem:
        raise SettingError(
            f"adapters='requantized' cannot merge the adapter of {name!r}: {problem}. Use"
            " adapters='merged', which keeps the adapter as nodes."
        )
