"""BatchNormalization by the statistics of the batch, and its gradient, as one operator each.

Each of the operators of ONNX goes through the whole batch once: seven for the normalization and its
Relu, eleven for the gradient. The kernels go through it twice.

The nodes are found by what they compute: those of `load/training_form.py`, and those of their
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import helper

from onnxfit.kernels.library import DOMAIN
from onnxfit.kernels.search import NodeSearch, ResultType, needed_nodes, with_kernel_nodes

# From this number of pixels per image, the kernels take 0.3 to 0.5 of the time of the operators.
# For one pixel and for vectors they take as long, because they have a small cost per channel.
MIN_PIXELS = 16
NONE, RELU, RELU6 = range(3)  # the attribute `activation`: the function behind the kernel


def replace_batch_norms(
    graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto], types: Mapping[str, ResultType]
) -> Sequence[onnx.NodeProto]:
    """Return the nodes of a graph, with one node for each normalization by batch statistics.

    The same holds for each gradient of one. Not all nodes that are not needed any more are removed.
    The nodes are returned themselves if there is no normalization.
    """
    search = _BatchNormSearch(graph, nodes, types)
    norms = list(search.norms())
    if not norms:
        return nodes
    gradients = [found for norm in norms for found in search.gradients(norm)]
    nodes = with_kernel_nodes(nodes, gradients)
    outputs = [value.name for value in graph.output]
    search = _BatchNormSearch(graph, needed_nodes(nodes, outputs), types)
    return with_kernel_nodes(nodes, [search.kernel(norm) for norm in norms])


@dataclass(frozen=True)
class _BatchNorm:
    """The names of a normalization's values: y = (x - mean) factor + bias."""

    x: str
    scale: str
    bias: str
    epsilon: str
    mean: str
    centred: str
    variance: str
    deviation: str
    factor: str
    y: str


class _BatchNormSearch(NodeSearch):
    """A search for nodes by what they compute."""

    def norms(self) -> Iterator[_BatchNorm]:
        """Yield each normalization of float32 images of known sizes by the batch."""
        for node in self.nodes:
            if node.op_type == "Add" and not node.domain:
                norm = self._norm(node)
                if norm is not None and self._is_faster(norm):
                    yield norm

    def _norm(self, add: onnx.NodeProto) -> _BatchNorm | None:
        """Return the normalization whose last node is an Add."""
        product, bias = add.input
        centred, factor = self.operands(product, "Mul")
        x, mean = self.operands(centred, "Sub")
        scale, deviation = self.operands(factor, "Div")
        (sum_,) = self.operands(deviation, "Sqrt")
        variance, epsilon = self.operands(sum_, "Add")
        square = self._reduced(variance, "ReduceMean")
        if not square or self.operands(square, "Mul") != (centred, centred):
            return None
        if self._reduced(mean, "ReduceMean") != x or self.number(epsilon) is None:
            return None
        of_channels = self.shape(mean)
        if any(self.shape(name) != of_channels for name in (scale, bias)):
            return None
        y = add.output[0]
        return _BatchNorm(x, scale, bias, epsilon, mean, centred, variance, deviation, factor, y)

    def _is_faster(self, norm: _BatchNorm) -> bool:
        return math.prod(self.shape(norm.x)[2:]) >= MIN_PIXELS

    def kernel(self, norm: _BatchNorm) -> onnx.NodeProto:
        """Return the node that normalizes, and computes the function behind it if possible."""
        activation, y = NONE, norm.y
        # Exporters cast the bounds of a Clip to the type of y, which needs none of its numbers.
        readers = [node for node in self.readers[y] if node.op_type != "CastLike"]
        if len(readers) == 1 and y not in self.outputs:
            (reader,) = readers
            activation = self._activation(reader)
            y = reader.output[0] if activation else y
        inputs = [norm.x, norm.scale, norm.bias, norm.epsilon]
        results = [y, norm.mean, norm.variance, norm.deviation, norm.factor]
        return _node("BatchNorm", inputs, results, activation)

    def _activation(self, node: onnx.NodeProto) -> int:
        """Return the number of a node's function, if a kernel computes it."""
        if node.domain:
            return NONE
        if node.op_type == "Relu":
            return RELU
        bounds = [self.number(name) for name in node.input[1:]]
        return RELU6 if node.op_type == "Clip" and bounds == [0, 6] else NONE

    def gradients(self, norm: _BatchNorm) -> Iterator[onnx.NodeProto]:
        """Yield a node for the gradient of a normalization, if it is in the graph."""
        for product in self.readers[norm.centred]:
            if product.op_type == "Mul" and len(set(product.input)) == 2:
                (dz,) = set(product.input) - {norm.centred}
                kernel = self._gradient(norm, product, dz)
                if kernel is not None:
                    yield kernel

    def _gradient(
        self, norm: _BatchNorm, product: onnx.NodeProto, dz: str
    ) -> onnx.NodeProto | None:
        """Return the node of a gradient, of which `product` is dz (x - mean).

        The gradient of x is dz factor + (x - mean) slope, minus the mean of that over the batch.
        """
        if self.shape(dz) != self.shape(norm.x):
            return None
        sums = self._sums(product.output[0])
        scaled = self.results(dz, "Mul", norm.factor)
        if len(sums) != 1 or len(scaled) != 1:
            return None
        for total in self.results(scaled[0], "Add"):
            (other,) = set(self.operands(total, "Add")) - {scaled[0]} or {""}
            slopes = set(self.operands(other, "Mul")) - {norm.centred}
            if len(slopes) == 1 and self._is_slope(slopes.pop(), sums[0], norm):
                dx = self._without_mean(total, dz, norm)
                if dx:
                    return self._gradient_kernel(norm, product, dz, scaled[0], (dx, sums[0]))
        return None

    def _gradient_kernel(
        self,
        norm: _BatchNorm,
        product: onnx.NodeProto,
        dz: str,
        scaled: str,
        results: tuple[str, str],
    ) -> onnx.NodeProto:
        dx, product_sum = results
        sums = self._sums(dz)
        inputs = [norm.x, dz, norm.mean, norm.deviation, norm.factor]
        inside = {product.output[0], scaled, *sums}
        activation, dy = self._masked(dz, norm)
        if activation and {node.output[0] for node in self.readers[dz]} == inside:
            inputs[1:2] = [dy]
            inputs.append(norm.bias)
        else:
            activation = NONE
        of_bias = sums[0] if len(sums) == 1 else f"{dx}/sum"
        return _node("BatchNormGradient", inputs, [dx, of_bias, product_sum], activation)

    def _masked(self, dz: str, norm: _BatchNorm) -> tuple[int, str]:
        """Return the activation behind y whose mask makes dz of dy, and dy."""
        if dz in self.outputs:
            return NONE, dz
        operands = self.operands(dz, "Mul")
        for dy, mask in (operands, operands[::-1]):
            activation = self._mask(mask, norm.y)
            if activation and self.shape(dy) == self.shape(dz):
                return activation, dy
        return NONE, dz

    def _mask(self, mask: str, z: str) -> int:
        """Return the activation of z that lets pass a gradient where a value is 1."""
        node = self.producers.get(mask)
        if node is not None and node.op_type == "HardSigmoid":
            attributes = {a.name: a.f for a in node.attribute}
            (result,) = node.input
            alpha, beta = attributes.get("alpha", 0), attributes.get("beta")
            if alpha > 1e37 and beta == 0:
                return RELU if self.operands(result, "Relu") == (z,) else NONE
            (difference,) = self.operands(result, "Abs")
            if alpha < -1e37 and beta == 1:
                return self._activation_equal_to(z, self.operands(difference, "Sub"))
            return NONE
        (is_unclipped,) = self.operands(mask, "Cast")
        # Bounds that are not constants in the file are compared as well.
        is_equal, has_order = self.operands(is_unclipped, "And")
        bounds = list(self.operands(has_order, "LessOrEqual"))
        compared = self.operands(is_equal or is_unclipped, "Equal")
        return self._activation_equal_to(z, compared, bounds if is_equal else None)

    def _activation_equal_to(
        self, z: str, compared: Sequence[str], bounds: Sequence[str] | None = None
    ) -> int:
        """Return the activation whose result is compared with z.

        `bounds` are its bounds; None accepts any.
        """
        for name in self.results(z, "Clip"):
            clip = self.producers[name]
            if {*compared} - {z} == {name} and bounds in (None, clip.input[1:]):
                return self._activation(clip)
        return NONE

    def _is_slope(self, slope: str, product_sum: str, norm: _BatchNorm) -> bool:
        """Return whether a value is -product_sum factor / (n deviation^2), as rules write it."""
        factor, quotient = self.scaled(slope)
        dividend, divisor = self.operands(quotient, "Div")
        double, deviation = self.scaled(divisor)
        (product,) = self.operands(dividend, "Neg")
        terms = set(self.operands(product, "Mul"))
        if deviation != norm.deviation or norm.factor not in terms or len(terms) != 2:
            return False
        (of_scale,) = terms - {norm.factor}
        if self.operands(of_scale, "Div") != (product_sum, norm.deviation):
            return False
        return math.isclose(factor * self._elements(norm.x), double, rel_tol=1e-6)

    def _without_mean(self, total: str, dz: str, norm: _BatchNorm) -> str:
        """Return the name of `total` minus its mean over the batch, if it is computed.

        The sum of `total` is also that of dz, times the factor, since x - mean has the sum 0.
        """
        of_dz = [name for s in self._sums(dz) for name in self.results(s, "Mul", norm.factor)]
        sums = [*self._sums(total), *of_dz]
        negative = [name for sum_ in sums for name in self.results(sum_, "Neg")]
        for mean in [name for value in negative for name in self.results(value, "Mul")]:
            factor, _ = self.scaled(mean)
            if math.isclose(factor * self._elements(total), 1, rel_tol=1e-6):
                for dx in self.results(total, "Add", mean):
                    return dx
        return ""

    def _reduced(self, result: str, op_type: str) -> str:
        """Return the value that a node reduces to one number for each channel."""
        operand, axes = self.axes(result, op_type)
        shape = self.shape(operand)
        if len(shape) < 2:
            return ""
        of_channel = [axis for axis in range(len(shape)) if axis != 1]
        keeps_axes = self.shape(result) == (1, shape[1], *[1] * (len(shape) - 2))
        return operand if keeps_axes and axes == of_channel else ""

    def _sums(self, operand: str) -> list[str]:
        """Return the sums of a value over each channel."""
        results = self.results(operand, "ReduceSum")
        return [result for result in results if self._reduced(result, "ReduceSum")]

    def _elements(self, name: str) -> int:
        """Return the number of elements of each channel."""
        shape = self.shape(name)
        return math.prod(shape) // shape[1]


def _node(
    op_type: str, inputs: Sequence[str], results: Sequence[str], activation: int
) -> onnx.NodeProto:
    return helper.make_node(
        op_type, inputs, results, results[0], domain=DOMAIN, activation=activation
    )
