"""Quantized values in a graph of QuantizeLinear and DequantizeLinear nodes."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import numpy as np
import onnx

from onnxfit.errors import ModelError
from onnxfit.graph.index import GraphIndex
from onnxfit.trainable.quantized.operators import (
    integer_type,
    is_conversion,
    is_dequantize,
    is_quantize,
    numbers_of,
    wrong_type,
)
from onnxfit.trainable.quantized.parameters import FLOATS, LIMITS, Array, QuantizationParameters


@dataclass(frozen=True, eq=False)
class Origin:
    """The origin of a quantized value.

    - `name`: the value that the first QuantizeLinear reads; the integers, if they are constant.
    - `parameters`: the parameters of each pair of QuantizeLinear and DequantizeLinear since; empty
      for a value that is not quantized.
    - `integers`: the integers of a constant.
    """

    name: str
    parameters: tuple[QuantizationParameters, ...] = ()
    integers: Array | None = None


class QuantizedGraph(GraphIndex):
    """A graph, and the origins of its values."""

    @property
    def layers(self) -> list[onnx.NodeProto]:
        """The nodes that compute, in the order of the graph."""
        return [
            node for node in self.nodes if node.op_type != "Constant" and not is_conversion(node)
        ]

    def rounded_values(self) -> dict[str, Origin]:
        """Return the outputs of DequantizeLinear that are not constants, with their origins."""
        origins = {
            name: self.origin(name)
            for name, node in self.producers.items()
            if is_dequantize(node) and node.input[0] not in self.constants
        }
        return {n: o for n, o in origins.items() if o.parameters and o.integers is None}

    def origin(self, name: str) -> Origin:
        """Return where the value `name` comes from, across QuantizeLinear and DequantizeLinear.

        ModelError: parameters are not constants, or an element type has no integers.
        """
        dequantize = self.producers.get(name)
        if dequantize is None or not is_dequantize(dequantize):
            return Origin(name)
        source = dequantize.input[0]
        if source in self.constants:
            tensor = self.constants[source]
            parameters = self._parameters(dequantize, tensor.data_type)
            integers = numbers_of(tensor)
            _require_fit(dequantize, parameters, integers)
            return Origin(source, (parameters,), integers)
        quantize = self.producers.get(source)
        if quantize is None or not is_quantize(quantize):
            return Origin(name)  # another node computes these integers
        parameters = self._parameters(quantize)
        value = quantize.input[0]
        if value in self.constants:  # a weight in floats that is quantized when the graph runs
            floats = numbers_of(self.constants[value])
            _require_fit(quantize, parameters, floats)
            return Origin(value, (parameters,), parameters.quantized(floats))
        before = self.origin(value)
        return Origin(before.name, (*before.parameters, parameters), before.integers)

    def _parameters(self, node: onnx.NodeProto, default_type: int = 0) -> QuantizationParameters:
        """Return the parameters of a node.

        - `default_type`: the type of the integers, if neither an attribute nor the zero point has
          it; 0 stands for that of the operator.
        """
        numbers = {a.name: a.i for a in node.attribute}
        scale = self._parameter(node, 1, FLOATS)
        if not np.isfinite(scale).all():
            raise ModelError(f"{node.op_type} {node.name!r} has a scale that is NaN or infinite.")
        zero_point, own_type = None, 0
        if len(node.input) > 2 and node.input[2]:
            zero_point = self._parameter(node, 2, LIMITS)
            own_type = self.constants[node.input[2]].data_type
        element_type = integer_type(own_type, numbers, default_type)
        if element_type not in LIMITS:
            raise wrong_type(node, element_type)
        return QuantizationParameters.of(scale, zero_point, element_type, numbers)

    def _parameter(self, node: onnx.NodeProto, position: int, types: Container[int]) -> Array:
        name = node.input[position]
        if name not in self.constants:
            raise ModelError(
                f"{node.op_type} {node.name!r} reads {name!r}, which is computed at run time."
                " Expected a constant scale and zero point, as static quantization writes them."
            )
        tensor = self.constants[name]
        if tensor.data_type not in types:
            raise wrong_type(node, tensor.data_type)
        return numbers_of(tensor)


def _require_fit(node: onnx.NodeProto, parameters: QuantizationParameters, values: Array) -> None:
    if not parameters.fits(values.shape):
        shapes = [list(array.shape) for array in (parameters.scale, parameters.zero_point, values)]
        raise ModelError(
            f"{node.op_type} {node.name!r} has scales of shape {shapes[0]}, zero points of shape"
            f" {shapes[1]} and axis={parameters.axis}, which do not fit its tensor of shape"
            f" {shapes[2]}."
        )
