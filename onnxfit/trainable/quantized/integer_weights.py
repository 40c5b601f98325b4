"""Find the integer weights of a file, and reject those that cannot be trained."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from onnxfit.checks import matching_names
from onnxfit.errors import ModelError, SettingError, listed_names
from onnxfit.graph.index import tensors_of
from onnxfit.graph.shared_tensors import array_of
from onnxfit.graph.subgraphs import nodes_of, subgraph_protos
from onnxfit.load.completion import MICROSOFT, opset_of
from onnxfit.trainable.quantized.integer_weight import IntegerWeight
from onnxfit.trainable.quantized.operators import (
    SUFFIX,
    TRANSPOSED,
    is_conversion,
    is_dequantize,
    numbers_of,
    wrong_type,
)
from onnxfit.trainable.quantized.parameters import FLOATS, LIMITS, QuantizationParameters

# element types of ONNX's own DequantizeLinear -> the first opset that has them
FIRST_OPSETS: dict[int, int] = {
    onnx.TensorProto.INT4: 21,
    onnx.TensorProto.UINT4: 21,
    onnx.TensorProto.INT16: 21,
    onnx.TensorProto.UINT16: 21,
}


@dataclass(frozen=True)
class _Read:
    """A node that reads an initializer.

    - `dequantizes`: whether it is a DequantizeLinear of the initializer, in the main graph.
    """

    node: onnx.NodeProto
    dequantizes: bool


def integer_names(model: onnx.ModelProto) -> list[str]:
    """Return the names of the integers that a DequantizeLinear reads, in the model's order.

    - `model`: the model. Integers that its functions or subgraphs read are omitted.
    """
    graph = model.graph
    outputs = {value.name for value in graph.output}
    read = {node.input[0] for node in graph.node if is_dequantize(node)}
    constant = {n.input[0] for n in graph.node if n.input and outputs.intersection(n.output)}
    return [
        tensor.name
        for tensor in graph.initializer
        if tensor.data_type in LIMITS and tensor.name in read
        if tensor.name not in outputs | constant  # a constant that is an output cannot train
    ]


def select_integers(names: Sequence[str], patterns: Sequence[str] | None) -> list[str]:
    """Return the names that patterns select, in their order.

    - `patterns`: names and fnmatch patterns, where `"!pattern"` excludes; None for all.

    UnknownNameError: a pattern matches nothing.
    """
    if patterns is None:
        return list(names)
    inclusions = [p for p in patterns if not p.startswith("!") or p in names]
    exclusions = [p[1:] for p in patterns if p not in inclusions]
    selected = set() if inclusions else set(names)
    for pattern in inclusions:
        selected |= matching_names(pattern, names, "integer weight")
    for pattern in exclusions:
        selected -= matching_names(pattern, names, "integer weight")
    return [name for name in names if name in selected]


def integer_weights(model: onnx.ModelProto, names: Collection[str]) -> list[IntegerWeight]:
    """Return integers that a DequantizeLinear reads, in the model's order.

    - `model`: the model.
    - `names`: some of its `integer_names`.

    Scales of blocks may be negative. ModelError: another scale is not positive, a scale is not an
    initializer, or integers are read in two ways.
    """
    if not names:
        return []
    tensors = tensors_of(model.graph)
    chosen = {*names}
    reads = _readers_of(model.graph, chosen)
    _check_scales(model.graph, tensors)
    return [
        _integer_weight(model, tensors, name, reads[name]) for name in tensors if name in chosen
    ]


def _readers_of(graph: onnx.GraphProto, names: set[str]) -> dict[str, list[_Read]]:
    """Return a mapping from each name to the nodes that read it."""
    reads: dict[str, list[_Read]] = {}
    for node in graph.node:
        for position, name in enumerate(node.input):
            if name in names:
                read = _Read(node, position == 0 and is_dequantize(node))
                reads.setdefault(name, []).append(read)
    bodies = (body for node in graph.node for a in node.attribute for body in subgraph_protos(a))
    for body in bodies:
        for node in nodes_of(body):
            for name in names.intersection(node.input):
                reads.setdefault(name, []).append(_Read(node, dequantizes=False))
    return reads


def _check_scales(graph: onnx.GraphProto, tensors: Mapping[str, onnx.TensorProto]) -> None:
    """Raise ModelError for a scale that is not a positive number.

    The scale of a block may be negative: onnxruntime's quantizer maps the largest number of a block
    to the integer -8, which has no positive counterpart.
    """
    for node in graph.node:
        scale = tensors.get(node.input[1]) if is_conversion(node) else None
        if scale is None:
            continue
        if scale.data_type not in FLOATS:
            raise wrong_type(node, scale.data_type)
        numbers = array_of(scale).astype(np.float64)
        in_blocks = any(a.name == "block_size" and a.i > 0 for a in node.attribute)
        sizes = np.abs(numbers) if in_blocks else numbers
        wrong = numbers[~(np.isfinite(sizes) & (sizes > 0))]
        if wrong.size:
            raise ModelError(
                f"The scale {scale.name!r} of {node.op_type} {node.name!r} contains"
                f" {wrong.flat[0]:g}, but a scale must be positive and finite. Quantize the float"
                " model again."
            )


def _integer_weight(
    model: onnx.ModelProto,
    tensors: Mapping[str, onnx.TensorProto],
    name: str,
    reads: Sequence[_Read],
) -> IntegerWeight:
    others = [read.node for read in reads if not read.dequantizes]
    if others:
        listed = listed_names(f"{node.op_type} {node.name!r}" for node in others)
        raise ModelError(
            f"The integers {name!r} are read by a DequantizeLinear and by {listed}, but only"
            " integers read by DequantizeLinear alone can be trained. Exclude them with"
            f" quantization=onnxfit.Quantization(weights={'!' + name!r})."
        )
    found = [_integer_weight_of(model, tensors, tensors[name], read.node) for read in reads]
    first = found[0]
    for other, read in zip(found[1:], reads[1:]):
        if first.parameters != other.parameters:
            raise ModelError(
                f"The integers {name!r} are read through two scales: by {reads[0].node.name!r}"
                f" with {first.scale_name!r} and by {read.node.name!r} with {other.scale_name!r}."
                " Give each DequantizeLinear its own integers, or use one scale."
            )
    return first


def _integer_weight_of(
    model: onnx.ModelProto,
    tensors: Mapping[str, onnx.TensorProto],
    tensor: onnx.TensorProto,
    node: onnx.NodeProto,
) -> IntegerWeight:
    """Return the integer weight that a DequantizeLinear reads."""
    arguments = [*node.input, "", ""][1:3]
    for role, name in zip(("scale", "zero point"), arguments):
        if name and name not in tensors:
            raise ModelError(
                f"The {role} {name!r} of the integers {tensor.name!r} is not an initializer: it is"
                " computed. Make it an initializer, or exclude the integers"
                f" with quantization=onnxfit.Quantization(weights={'!' + tensor.name!r})."
            )
    _check_opset(model, tensor, node)
    scale_name, zero_point_name = arguments
    if zero_point_name and tensors[zero_point_name].data_type not in LIMITS:
        raise wrong_type(node, tensors[zero_point_name].data_type)
    parameters = QuantizationParameters.of(
        numbers_of(tensors[scale_name]),
        numbers_of(tensors[zero_point_name]) if zero_point_name else None,
        tensor.data_type,
        {a.name: a.i for a in node.attribute},
    )
    if not parameters.fits(tuple(tensor.dims)):
        raise ModelError(
            f"The scale {scale_name!r} of shape {parameters.scale.shape}, or its zero point, does"
            f" not fit the integers {tensor.name!r} of shape {tuple(tensor.dims)} along axis"
            f" {parameters.axis}."
        )
    return IntegerWeight(tensor, parameters, scale_name, zero_point_name, node.domain)


def _check_opset(model: onnx.ModelProto, tensor: onnx.TensorProto, node: onnx.NodeProto) -> None:
    version = opset_of(model) or 0
    first = FIRST_OPSETS.get(tensor.data_type, 0)
    if node.domain != MICROSOFT and version < first:
        kind = onnx.TensorProto.DataType.Name(tensor.data_type).lower()
        raise ModelError(
            f"The integers {tensor.name!r} are {kind}, which DequantizeLinear reads from opset"
            f" {first} on, but the file has opset {version}. Quantize the float model again with"
            f" opset {first}."
        )


def float_twins(
    model: onnx.ModelProto, weights: Sequence[IntegerWeight]
) -> Iterator[tuple[str, str]]:
    """Yield the float initializers that the model also reads as integers, and the integers."""
    read = {name for node in nodes_of(model.graph) for name in node.input}
    shapes = {
        tensor.name: tuple(tensor.dims)
        for tensor in model.graph.initializer
        if tensor.name in read and tensor.data_type not in LIMITS
    }
    for weight in weights:
        stem = weight.name.removesuffix(SUFFIX)
        shape = tuple(weight.tensor.dims)
        name = stem.removesuffix(TRANSPOSED)
        if name != stem:
            shape = shape[::-1]
        if stem != weight.name and shapes.get(name) == shape:
            yield name, weight.name


def refuse_float_twins(model: onnx.ModelProto, weights: Sequence[IntegerWeight]) -> None:
    """Raise SettingError for weights that the model reads both as integers and as floats."""
    twins = list(float_twins(model, weights))
    if twins:
        raise SettingError(
            f"The file contains {listed_names(name for name, _ in twins)} twice, as floats and as"
            f" integers (*{SUFFIX}), which would be trained separately. Quantize both uses, or"
            " train only the floats with"
            f" quantization=onnxfit.Quantization(weights={'!' + twins[0][1]!r})."
        )
