"""Find the floats from which the integers of a file were made, in the float file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx

from onnxfit.errors import SettingError, listed_names
from onnxfit.graph.index import GraphIndex
from onnxfit.load.reading import ModelSource, load_model
from onnxfit.trainable.quantized.integer_weight import IntegerWeight
from onnxfit.trainable.quantized.operators import SUFFIX, TRANSPOSED
from onnxfit.trainable.quantized.parameters import FLOATS, Array

# The distance from 1 to the next number of each float type
PRECISION: dict[int, float] = {
    onnx.TensorProto.DOUBLE: 2.0**-52,
    onnx.TensorProto.FLOAT: 2.0**-23,
    onnx.TensorProto.FLOAT16: 2.0**-10,
    onnx.TensorProto.BFLOAT16: 2.0**-7,
}


def float_values(source: ModelSource, weights: Sequence[IntegerWeight]) -> dict[str, Array]:
    """Return a mapping from each integer weight's name to its original floats, in its shape.

    - `source`: the float file.
    - `weights`: the integer weights.

    A float constant may belong to integers if it has their shape, as it is or with its last two
    axes exchanged, and if rounding may give the integers. Among these constants, the one with the
    name of the integers (without `_quantized` and `_Transposed`) is chosen, or else the nearest to
    their real numbers. ModelError: the file cannot be read. SettingError: integers have no floats.
    """
    tensors = {
        name: tensor
        for name, tensor in GraphIndex(load_model(source).graph).constants.items()
        if tensor.data_type in FLOATS
    }
    arrays = {name: onnx.numpy_helper.to_array(tensor) for name, tensor in tensors.items()}
    return {
        weight.name: _floats_of(weight, arrays, tensors).astype(weight.parameters.scale.dtype)
        for weight in weights
    }


def _floats_of(
    weight: IntegerWeight,
    arrays: Mapping[str, Array],
    tensors: Mapping[str, onnx.TensorProto],
) -> Array:
    """Return the floats of integers, in the shape of the integers. SettingError: there are none."""
    names = _names_before(weight)
    for name in filter(arrays.__contains__, names):
        for floats in _oriented(arrays[name], weight):
            if _may_round(weight, floats, tensors[name]):
                return floats
    nearest: Array | None = None
    nearest_distance = np.inf
    for name, array in arrays.items():
        for floats in _oriented(array, weight):
            distance = float(np.abs(floats.astype(np.float64) - weight.values).mean())
            if distance < nearest_distance and _may_round(weight, floats, tensors[name]):
                nearest, nearest_distance = floats, distance
    if nearest is None:
        raise _no_float_error(weight, arrays, [name for name in names if name in arrays])
    return nearest


def _names_before(weight: IntegerWeight) -> list[str]:
    """Return the names that the floats of integers may have, the likeliest first."""
    stem = weight.name.removesuffix(SUFFIX)
    return list(dict.fromkeys((weight.name, stem, stem.removesuffix(TRANSPOSED))))


def _oriented(array: Array, weight: IntegerWeight) -> Iterator[Array]:
    """Yield an array, and the array with its last two axes exchanged, in the integers' shape.

    `quantize_dynamic` exchanges the axes of the weights of Gemm and LSTM.
    """
    shape = tuple(weight.tensor.dims)
    if array.shape == shape:
        yield array
    if array.ndim > 1 and (exchanged := np.swapaxes(array, -1, -2)).shape == shape:
        yield exchanged


def _may_round(weight: IntegerWeight, floats: Array, tensor: onnx.TensorProto) -> bool:
    precision = PRECISION[tensor.data_type]
    return weight.parameters.may_round(floats, weight.integers, precision)


def _no_float_error(
    weight: IntegerWeight, arrays: Mapping[str, Array], named: Sequence[str]
) -> SettingError:
    shape = tuple(weight.tensor.dims)
    fix = "Pass the float model that was quantized."
    if named and not [*_oriented(arrays[named[0]], weight)]:
        return SettingError(
            f"The weight {named[0]!r} of float_model has shape {arrays[named[0]].shape}, but its"
            f" integers {weight.name!r} in the file have shape {shape}. {fix}"
        )
    near = named or [name for name, array in arrays.items() if [*_oriented(array, weight)]]
    if near:
        listed = listed_names(map(repr, near))
        return SettingError(
            f"The integers {weight.name!r} of the file are not those of {listed} in float_model:"
            f" rounding moves a float by less than one step of the integers. {fix} If a tool"
            " changed it before quantization, or the integers were trained since, pass no"
            " float_model."
        )
    return SettingError(
        f"float_model has no weight of shape {shape} for the integers {weight.name!r}; its"
        f" floats are {listed_names(arrays) or 'none'}. {fix}"
    )
