"""Quantized values in a graph of QuantizeLinear and DequantizeLinear nodes."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from onnxfit.errors import ModelError

Array = npt.NDArray[Any]

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
DOMAINS = ("", "ai.onnx", "com.microsoft")
DEFAULT_AXIS = 1  # of both operators
FLOATS = {
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.DOUBLE,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
}
# element type -> the smallest and the largest integer
INTEGER_RANGES: dict[int, tuple[int, int]] = {
    onnx.TensorProto.INT4: (-8, 7),
    onnx.TensorProto.UINT4: (0, 15),
    onnx.TensorProto.INT8: (-(2**7), 2**7 - 1),
    onnx.TensorProto.UINT8: (0, 2**8 - 1),
    onnx.TensorProto.INT16: (-(2**15), 2**15 - 1),
    onnx.TensorProto.UINT16: (0, 2**16 - 1),
    onnx.TensorProto.INT32: (-(2**31), 2**31 - 1),
}


@dataclass(frozen=True, eq=False)
class Quantizer:
    r"""Map between floats and integers, $q = \mathrm{clip}(\mathrm{round}(x / s) + z)$.

    - `scale`, `zero_point`: s and z: one number, one for each index of the dimension `axis`, or one
      for each block of `block_size` indices of that dimension.
    - `element_type`: the type of the integers, a key of `INTEGER_RANGES`.
    """

    scale: Array
    zero_point: Array
    element_type: int
    axis: int = DEFAULT_AXIS
    block_size: int = 0

    @property
    def key(self) -> tuple[object, ...]:
        """A value that is equal for equal maps."""
        parameters = (self.scale.tobytes(), self.zero_point.tobytes(), self.scale.shape)
        return (*parameters, self.element_type, self.axis, self.block_size)

    @property
    def type_name(self) -> str:
        """The name of the type of the integers, such as "int8"."""
        return str(onnx.TensorProto.DataType.Name(self.element_type)).lower()

    def quantize(self, x: Array) -> Array:
        """Return the integers of floats; a half is rounded to the even integer."""
        low, high = INTEGER_RANGES[self.element_type]
        rounded = np.rint(x / self._spread(self.scale, x.shape))
        shifted = rounded + self._spread(self.zero_point, x.shape)
        return np.asarray(np.clip(shifted, low, high).astype(np.int32))

    def dequantize(self, integers: Array) -> Array:
        """Return the floats of integers, (q - z) · s, in the type of the scale."""
        centered = integers - self._spread(self.zero_point, integers.shape)
        scale = self._spread(self.scale, integers.shape)
        return np.asarray(centered.astype(self.scale.dtype) * scale)

    def clipped(self, x: Array) -> int:
        """Return how many floats are more than half a step beyond the smallest or largest integer.

        Half a step is what rounding takes in any case. A scale may be negative, as it is where the
        largest value of a block of 4 bits becomes -8.
        """
        low, high = INTEGER_RANGES[self.element_type]
        scale = self._spread(self.scale, x.shape).astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):  # a scale of zero
            steps = x / scale + self._spread(self.zero_point, x.shape)
        return int(np.count_nonzero((steps < low - 0.5) | (steps > high + 0.5)))

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether there is a scale and a zero point for each element of a tensor."""
        if self.scale.size != 1 and not -len(shape) <= self.axis < len(shape):
            return False
        try:
            shapes = [self._spread(p, shape).shape for p in (self.scale, self.zero_point)]
            return np.broadcast_shapes(shape, *shapes) == shape
        except (ValueError, IndexError, ArithmeticError):  # another rank or size
            return False

    def _spread(self, parameter: Array, shape: tuple[int, ...]) -> Array:
        """Return scales or zero points in a shape that broadcasts with arrays of `shape`."""
        if parameter.size == 1:
            return parameter.reshape(())
        axis = self.axis % len(shape)
        if self.block_size:
            repeated = np.repeat(parameter, min(self.block_size, shape[axis]), axis)
            return repeated.take(np.arange(shape[axis]), axis)
        return parameter.reshape([-1 if i == axis else 1 for i in range(len(shape))])


@dataclass(frozen=True, eq=False)
class Origin:
    """The value that quantized floats come from.

    - `name`: the value that the first QuantizeLinear reads; the integers, where they are constant.
    - `quantizers`: the pairs of QuantizeLinear and DequantizeLinear on the way, none for a value
      that is not quantized.
    - `integers`: the integers of a constant.
    """

    name: str
    quantizers: tuple[Quantizer, ...] = ()
    integers: Array | None = None


@dataclass(eq=False)
class QuantizedGraph:
    """A graph, and the origins of its values."""

    graph: onnx.GraphProto
    tensors: Mapping[str, onnx.TensorProto] = field(init=False)
    producers: Mapping[str, onnx.NodeProto] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = constants_of(self.graph)
        self.producers = {name: node for node in self.graph.node for name in node.output if name}

    @property
    def layers(self) -> list[onnx.NodeProto]:
        """The nodes that compute, in the order of the graph."""
        return [
            node
            for node in self.graph.node
            if node.op_type != "Constant"
            and not is_operator(node, QUANTIZE)
            and not is_operator(node, DEQUANTIZE)
        ]

    def rounded_values(self) -> dict[str, Origin]:
        """Return the outputs of DequantizeLinear that are no constants, with their origins."""
        origins = {
            name: self.origin(name)
            for name, node in self.producers.items()
            if is_operator(node, DEQUANTIZE) and node.input[0] not in self.tensors
        }
        return {n: o for n, o in origins.items() if o.quantizers and o.integers is None}

    def origin(self, name: str) -> Origin:
        """Return where the value `name` comes from, across QuantizeLinear and DequantizeLinear.

        ModelError for parameters that are no constants, or a type without integers.
        """
        dequantize = self.producers.get(name)
        if dequantize is None or not is_operator(dequantize, DEQUANTIZE):
            return Origin(name)
        source = dequantize.input[0]
        if source in self.tensors:
            tensor = self.tensors[source]
            quantizer = self._quantizer(dequantize, tensor.data_type)
            integers = _array(tensor)
            _require_fit(dequantize, quantizer, integers)
            return Origin(source, (quantizer,), integers)
        quantize = self.producers.get(source)
        if quantize is None or not is_operator(quantize, QUANTIZE):
            return Origin(name)  # integers that another node computes
        quantizer = self._quantizer(quantize)
        value = quantize.input[0]
        if value in self.tensors:  # a weight in floats that is quantized when the graph runs
            floats = _array(self.tensors[value])
            _require_fit(quantize, quantizer, floats)
            return Origin(value, (quantizer,), quantizer.quantize(floats))
        before = self.origin(value)
        return Origin(before.name, (*before.quantizers, quantizer), before.integers)

    def _quantizer(self, node: onnx.NodeProto, default_type: int = 0) -> Quantizer:
        """Return the map of a node.

        - `default_type`: the type of the integers, if neither an attribute nor the zero point has
          it; 0 stands for that of the operator.
        """
        numbers = {a.name: a.i for a in node.attribute}
        element_type = numbers.get("output_dtype", 0) or default_type or onnx.TensorProto.UINT8
        scale = self._parameter(node, 1, FLOATS)
        if not np.isfinite(scale).all():
            raise ModelError(f"{node.op_type} {node.name!r} has a scale that is NaN or infinite.")
        zero_point: Array = np.zeros(scale.shape, np.int64)
        if len(node.input) > 2 and node.input[2]:
            zero_point = self._parameter(node, 2, INTEGER_RANGES).astype(np.int64)
            element_type = self.tensors[node.input[2]].data_type
        if element_type not in INTEGER_RANGES:
            raise _wrong_type(node, element_type)
        block_size = max(numbers.get("block_size", 0), 0)
        return Quantizer(
            scale, zero_point, element_type, numbers.get("axis", DEFAULT_AXIS), block_size
        )

    def _parameter(self, node: onnx.NodeProto, position: int, types: Container[int]) -> Array:
        name = node.input[position]
        if name not in self.tensors:
            raise ModelError(
                f"{node.op_type} {node.name!r} reads {name!r}, which is computed when the model"
                " runs: expected a constant scale and zero point, as static quantization writes"
                " them."
            )
        tensor = self.tensors[name]
        if tensor.data_type not in types:
            raise _wrong_type(node, tensor.data_type)
        return _array(tensor)


def is_operator(node: onnx.NodeProto, operator: str) -> bool:
    """Return whether a node is a QuantizeLinear, or a DequantizeLinear, with its inputs."""
    is_known = node.op_type == operator and node.domain in DOMAINS
    return is_known and len(node.input) >= 2 and len(node.output) == 1


def _array(tensor: onnx.TensorProto) -> Array:
    """Return the values of a tensor; integers of 4 bits as those of 8."""
    array = onnx.numpy_helper.to_array(tensor)
    is_small = tensor.data_type in (onnx.TensorProto.INT4, onnx.TensorProto.UINT4)
    return np.asarray(array.astype(np.int8) if is_small else array)


def _require_fit(node: onnx.NodeProto, quantizer: Quantizer, values: Array) -> None:
    if not quantizer.fits(values.shape):
        raise ModelError(
            f"{node.op_type} {node.name!r} has scales of shape {list(quantizer.scale.shape)}, zero"
            f" points of {list(quantizer.zero_point.shape)} and axis={quantizer.axis}, which do not"
            f" fit its tensor of shape {list(values.shape)}."
        )


def _wrong_type(node: onnx.NodeProto, element_type: int) -> ModelError:
    known = onnx.TensorProto.DataType
    name = known.Name(element_type) if element_type in known.values() else element_type
    return ModelError(
        f"{node.op_type} {node.name!r} has a tensor of type {name}, expected integers of 4, 8, 16"
        " or 32 bits, and scales that are floats."
    )


def constants_of(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Return the initializers and the tensors of Constant nodes, by name."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            constants[node.output[0]] = node.attribute[0].t
    return constants
