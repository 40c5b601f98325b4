"""Find the floats from which the integers of a file were made, in the float file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

from onnxfit.errors import SettingError, listed_names
from onnxfit.graph.reading import ModelSource, load_model
from onnxfit.quantization.integer_weight import IntegerWeight
from onnxfit.quantization.operators import SUFFIX
from onnxfit.quantization.parameters import FLOATS, Array


def float_values(source: ModelSource, weights: Sequence[IntegerWeight]) -> dict[str, Array]:
    """Return a mapping from each integer weight's name to its original floats.

    - `source`: the float file.
    - `weights`: the integer weights.

    A float initializer belongs to the integers with its name, or its name plus `_quantized`;
    otherwise to the integers of its shape with the nearest real numbers. Raises ModelError if the
    file cannot be read, SettingError if integers have no floats of their shape.
    """
    tensors = {t.name: t for t in load_model(source).graph.initializer if t.data_type in FLOATS}
    arrays = {name: onnx.numpy_helper.to_array(tensor) for name, tensor in tensors.items()}
    chosen: dict[str, str] = {}
    for weight in weights:
        for name in (weight.name, weight.name.removesuffix(SUFFIX)):
            if name in arrays:
                chosen[weight.name] = name
                break
    for weight in weights:
        if weight.name not in chosen:
            taken = set(chosen.values())
            free = {name: array for name, array in arrays.items() if name not in taken}
            chosen[weight.name] = _nearest(weight, free)
    values = {}
    for weight in weights:
        array = arrays[chosen[weight.name]]
        shape = tuple(weight.tensor.dims)
        if array.shape != shape:
            raise SettingError(
                f"The weight {chosen[weight.name]!r} of float_model has shape {array.shape}, but"
                f" its integers {weight.name!r} in the file have shape {shape}. Pass the float"
                " model that was quantized."
            )
        values[weight.name] = array.astype(weight.parameters.scale.dtype)
    return values


def _nearest(weight: IntegerWeight, arrays: dict[str, Array]) -> str:
    """Return the name of the array of the weight's shape that is nearest to its real numbers."""
    shape = tuple(weight.tensor.dims)
    distances = {
        name: float(np.abs(array.astype(np.float64) - weight.values).mean())
        for name, array in arrays.items()
        if array.shape == shape
    }
    if not distances:
        raise SettingError(
            f"float_model has no weight of shape {shape} for the integers {weight.name!r}; its"
            f" floats are {listed_names(arrays) or 'none'}. Pass the float model that was"
            " quantized."
        )
    return min(distances, key=lambda name: distances[name])
