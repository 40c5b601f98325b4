"""Build DequantizeLinear, a float operator and QuantizeLinear instead of an integer operator.

`conversion` registers a function for each operator; `qoperators.to_qdq` calls it for every node.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Container
from typing import Any

import numpy as np
import onnx

from onnxfit.graph.index import GraphIndex, attributes_of
from onnxfit.graph.replacement import Array, NodeReplacement
from onnxfit.graph.shared_tensors import array_of
from onnxfit.graph.subgraphs import nodes_of

# The input of an operator with the element type of its first output. The output of any other
# operator of quantized numbers has the type of its first input.
TYPED_BY = {
    "QGemm": 8,
    "QLinearConcat": 1,
    "QLinearConv": 7,
    "QLinearMatMul": 7,
    "QLinearWhere": 8,
    "QuantizeLinear": 2,
}


class NotConvertibleError(Exception):
    """An integer operator cannot be converted; the message is the reason."""


class IntegerGraph(GraphIndex):
    """A graph with integer operators, and the types of its values."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        super().__init__(graph)
        self.names = {*self.tensors, *(value.name for value in graph.input)}
        self.names.update(name for n in nodes_of(graph) for name in (n.name, *n.output))
        self.shared: dict[tuple[Any, ...], str] = {}  # values that several conversions use
        self._declared = {v.name: v.type.tensor_type for v in (*graph.value_info, *graph.input)}

    def array(self, name: str) -> Array | None:
        """Return an initializer or the tensor of a Constant; None for any other value."""
        tensor = self.constants.get(name)
        return None if tensor is None else array_of(tensor)

    def gather_of_initializer(self, name: str) -> onnx.NodeProto | None:
        """Return the Gather that takes a value from an initializer; None for any other value."""
        node = self.producers.get(name)
        if node is None or node.op_type != "Gather" or len(node.input) != 2:
            return None
        return node if node.input[0] in self.tensors else None

    def origin(self, name: str, moving: Container[str]) -> onnx.NodeProto | None:
        """Return the node that computes a value, before operators that only move its elements."""
        seen: set[str] = set()
        node = self.producers.get(name)
        # a file may contain a circle
        while node is not None and node.op_type in moving and node.input and name not in seen:
            seen.add(name)
            name = node.input[0]
            node = self.producers.get(name)
        return node

    def rank(self, name: str) -> int | None:
        """Return the number of dimensions of a value; None if unknown."""
        if name in self.tensors:
            return len(self.tensors[name].dims)
        declared = self._declared.get(name)
        has_shape = declared is not None and declared.HasField("shape")
        return len(declared.shape.dim) if declared is not None and has_shape else None

    def element_type(self, name: str) -> int | None:
        """Return the element type of a quantized value as ONNX counts them; None if unknown."""
        seen: set[str] = set()
        while name not in seen:
            seen.add(name)
            if name in self.tensors:
                return int(self.tensors[name].data_type)
            declared = self._declared.get(name)
            if declared is not None and declared.elem_type:
                return int(declared.elem_type)
            node = self.producers.get(name)
            if node is None:
                return None
            position = TYPED_BY.get(node.op_type, 0)
            name = node.input[position] if position < len(node.input) else ""
            if not name and node.op_type == "QuantizeLinear":
                return onnx.TensorProto.UINT8
        return None


class QdqBuilder(NodeReplacement):
    """The nodes in QDQ form that replace one integer operator.

    The methods raise NotConvertibleError if the file does not determine how a value is quantized.
    """

    def __init__(self, node: onnx.NodeProto, graph: IntegerGraph) -> None:
        super().__init__(node, graph.names)
        self.graph = graph
        self.replaced = [node]  # the nodes that the new ones replace
        self.bypassed: list[onnx.NodeProto] = []  # nodes whose output the new ones do not use
        self._shared = ChainMap[tuple[Any, ...], str]({}, graph.shared)

    def inputs(self, count: int) -> list[str]:
        """Return the first inputs of the node, "" for each that is absent."""
        names = list(self.node.input[:count])
        return names + [""] * (count - len(names))

    def take(self, attribute: str, default: int) -> int:
        """Return an attribute that the float operator does not have, and remove it."""
        value = self.attributes.pop(attribute, default)
        if not isinstance(value, int):
            raise NotConvertibleError(f"its attribute {attribute} is not an integer")
        return value

    def apply(self, op_type: str, *inputs: str, output: str | None = None, domain: str = "") -> str:
        """Add the float operator, with the attributes of the node."""
        return self(op_type, *inputs, output=output, domain=domain, **self.attributes)

    def dequantize(
        self, value: str, scale: str, zero_point: str, *, axis: int | None = None
    ) -> str:
        """Return scale (value - zero_point).

        A scale with several entries belongs to `axis`; None allows one entry alone.
        """
        scales = self._scales(value, scale, axis)
        axis = axis if scales.size > 1 else None
        zero_point = self._zero_points(value, zero_point, scales)
        return self.dequantize_by(value, scale, zero_point, axis)

    def dequantize_by(
        self, value: str, scale: str, zero_point: str, axis: int | None = None
    ) -> str:
        """Return scale (value - zero_point), whose scale may be computed when the graph runs.

        A quantized value is dequantized once, however many nodes use it. If Gather takes its rows
        from an initializer, the whole initializer is dequantized, so that its integers can be
        trained.
        """
        gather = self.graph.gather_of_initializer(value) if axis is None else None
        if gather is not None:
            return self._once(
                ("Gather", value, scale, zero_point),
                lambda: self.gather(gather, scale, zero_point),
            )
        return self._once(
            ("DequantizeLinear", value, scale, zero_point, axis),
            lambda: self("DequantizeLinear", value, scale, zero_point, axis=axis),
        )

    def gather(
        self, node: onnx.NodeProto, scale: str, zero_point: str, output: str | None = None
    ) -> str:
        """Return the rows that a Gather takes from a quantized table."""
        self.bypassed.append(node)
        table = self.dequantize_by(node.input[0], scale, zero_point)
        return self("Gather", table, node.input[1], output=output, **attributes_of(node))

    def dequantize_bias(self, bias: str, x_scale: str, w_scale: str) -> str:
        """Return x_scale w_scale bias, for an int32 bias without a zero point; "" for no bias.

        A w_scale with several entries belongs to the last axis of the bias.
        """
        if not bias:
            return ""
        scales = self._scales(bias, x_scale, None).reshape(()) * self._scales(bias, w_scale, 0)
        axis = None
        if scales.size > 1:
            dims = self.graph.tensors[bias].dims if bias in self.graph.tensors else ()
            if not dims or dims[-1] != scales.size:
                raise NotConvertibleError(
                    f"its bias {bias!r} is not an initializer with an entry for each of the"
                    f" {scales.size} scales in {w_scale!r}"
                )
            axis = len(dims) - 1
        scale = self._once(
            ("scale of a bias", bias, x_scale, w_scale),
            lambda: self.initializer(f"{bias}/scale", scales),
        )
        return self.dequantize_by(bias, scale, "", axis)

    def quantize(self, y: str, scale: str, zero_point: str, like: str) -> None:
        """Add y / scale + zero_point, rounded and clamped, as the node's output.

        Without a zero point, the output has the element type of the quantized value `like`.
        """
        scales = self._scales(self.node.output[0], scale, None)
        if zero_point:
            zero_point = self._zero_points(self.node.output[0], zero_point, scales)
        else:
            zero_point = self._zero_of_type(like)
        self("QuantizeLinear", y, scale, zero_point, output=self.node.output[0])

    def commit(self) -> None:
        """Let later conversions use the values that this one shares."""
        self.graph.shared.update(self._shared.maps[0])

    def _scales(self, value: str, scale: str, axis: int | None) -> Array:
        scales = self.graph.array(scale)
        if scales is None:
            raise NotConvertibleError(
                f"the scale {scale!r} of {value!r} is computed when the model runs"
            )
        if scales.dtype.kind != "f":
            raise NotConvertibleError(f"the scale {scale!r} of {value!r} is not a float")
        if scales.ndim > 1 or (axis is None and scales.size != 1) or scales.size == 0:
            raise NotConvertibleError(f"the scale {scale!r} of {value!r} has shape {scales.shape}")
        return scales

    def _zero_points(self, value: str, zero_point: str, scales: Array) -> str:
        """Return zero points in the shape of the scales, as DequantizeLinear requires."""
        if not zero_point:
            return ""
        array = self.graph.array(zero_point)
        if array is None:
            raise NotConvertibleError(
                f"the zero point {zero_point!r} of {value!r} is computed when the model runs"
            )
        if array.dtype.kind not in "iu" or array.size == 0:
            raise NotConvertibleError(
                f"the zero point {zero_point!r} of {value!r} is not an integer"
            )
        if array.ndim <= 1 and array.size == scales.size:
            return zero_point
        if (array != array.flat[0]).any():
            raise NotConvertibleError(
                f"the zero point {zero_point!r} of {value!r} has shape {array.shape}, but its"
                f" scale has shape {scales.shape}"
            )
        return self._once(
            ("zero points", zero_point, scales.shape),
            lambda: self.initializer(
                f"{zero_point}/expanded", np.full(scales.shape, array.flat[0], array.dtype)
            ),
        )

    def _zero_of_type(self, like: str) -> str:
        element_type = self.graph.element_type(like)
        if element_type is None:
            raise NotConvertibleError(
                f"its output has no zero point, and the element type of {like!r} is unknown"
            )
        if element_type == onnx.TensorProto.UINT8:
            return ""  # the default of QuantizeLinear
        dtype = onnx.helper.tensor_dtype_to_np_dtype(element_type)
        return self._once(
            ("zero", element_type),
            lambda: self.initializer(f"{dtype.name}/zero_point", np.zeros((), dtype)),
        )

    def _once(self, key: tuple[Any, ...], make: Callable[[], str]) -> str:
        """Return the value of a key; build it if no conversion has built it yet."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]


Conversion = Callable[[QdqBuilder], None]
# by domain and operator type
CONVERSIONS: dict[tuple[str, str], Conversion] = {}


def conversion(op_type: str, domain: str = "") -> Callable[[Conversion], Conversion]:
    """Register the function that converts an operator to QDQ form.

    The function adds to its builder the nodes that compute the node's outputs under their names.
    It adds none to leave a node that has the QDQ form, and raises NotConvertibleError to leave any
    other node.
    """

    def register(function: Conversion) -> Conversion:
        CONVERSIONS[domain, op_type] = function
        return function

    return register
