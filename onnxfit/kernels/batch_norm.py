"""BatchNormalization by the statistics of the batch, and its gradient, as one operator each.

Each of the operators of ONNX goes through the whole batch once: seven for the normalization and its
Relu, eleven for the gradient. The kernels go through it twice.

The nodes are found by what they compute: those of `load/training_form.py`, and those of their
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import onnx

from onnxfit.graph.index import attributes_of
from onnxfit.graph.match import Equation, Pattern
from onnxfit.kernels.search import (
    KernelRule,
    NodeSearch,
    ResultType,
    make_node,
    needed_nodes,
    with_kernel_nodes,
)

# From this number of pixels per image, the kernels take 0.3 to 0.5 of the time of the operators.
# For one pixel and for vectors they take as long, because they have a small cost per channel.
MIN_PIXELS = 16
NONE, RELU, RELU6 = range(3)  # the attribute `activation`: the function behind the kernel
STEEP = 1e37  # a HardSigmoid of a larger slope is 1 for every positive number


def replace_batch_norms(
    graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto], types: Mapping[str, ResultType]
) -> Sequence[onnx.NodeProto]:
    """Return the nodes of a graph, with one node for each normalization by batch statistics.

    The same holds for each gradient of one. Not all nodes that are not needed any more are removed.
    The nodes are returned themselves if there is no normalization.
    """
    search = NodeSearch(graph, nodes, types)
    norms = list(search.found(BatchNorm(), {}))
    if not norms:
        return nodes
    gradients = [node for norm in norms for node in search.rewritten(BatchNormGradient(), norm)]
    nodes = with_kernel_nodes(nodes, gradients)
    search = NodeSearch(graph, needed_nodes(nodes, search.outputs), types)
    return with_kernel_nodes(nodes, [BatchNorm().rewrite(search, norm) for norm in norms])


class BatchNorm(KernelRule):
    """y = (x - mean) factor + bias, of float32 images of known sizes."""

    result = "y"
    equations: Sequence[Equation] = (
        ("y", ("Add", ("Mul", "centred", "factor"), "bias")),
        ("centred", ("Sub", "x", "mean")),
        ("mean", ("ReduceMean", "x", "axes of x")),
        ("factor", ("Div", "scale", "deviation")),
        ("deviation", ("Sqrt", ("Add", "variance", "epsilon"))),
        ("variance", ("ReduceMean", ("Mul", "centred", "centred"), "axes of squares")),
    )

    def check(self, graph: NodeSearch, found: Mapping[str, str]) -> str:
        of_channels = graph.shape(found["mean"])
        if not all(_is_of_channels(graph, found[name]) for name in ("mean", "variance")):
            return "the mean or the variance is not that of each channel"
        if graph.number(found["epsilon"]) is None:
            return "epsilon is not a constant"
        if any(graph.shape(found[name]) != of_channels for name in ("scale", "bias")):
            return "the scale or the bias does not have one number for each channel"
        is_small = math.prod(graph.shape(found["x"])[2:]) < MIN_PIXELS
        return "the operators are as fast for small images" if is_small else ""

    def rewrite(self, graph: NodeSearch, found: Mapping[str, str]) -> onnx.NodeProto:
        """Return the node that normalizes, and computes the function behind it if possible."""
        activation, y = NONE, found["y"]
        # Exporters cast the bounds of a Clip to the type of y, which needs none of its numbers.
        readers = [node for node in graph.readers[y] if node.op_type != "CastLike"]
        if len(readers) == 1 and y not in graph.outputs:
            activation = _activation(graph, readers[0])
            y = readers[0].output[0] if activation else y
        inputs = [found[name] for name in ("x", "scale", "bias", "epsilon")]
        results = [found[name] for name in ("mean", "variance", "deviation", "factor")]
        return _node("BatchNorm", inputs, [y, *results], activation)


class BatchNormGradient(KernelRule):
    """The gradient of a normalization.

    That of x is dz factor + (x - mean) slope, minus the mean of this over the batch. The sum over
    the batch is also that of dz, times the factor, since x - mean has the sum 0.
    """

    result = "dx"
    equations: Sequence[Equation] = (
        ("product", ("Mul", "dz", "centred")),
        ("of scale", ("ReduceSum", "product", "axes of product")),
        ("total", ("Add", ("Mul", "dz", "factor"), ("Mul", "centred", "slope"))),
        ("slope", ("Mul", "per element", ("Div", ("Neg", "steepness"), "divisor"))),
        ("steepness", ("Mul", "factor", ("Div", "of scale", "deviation"))),
        ("divisor", ("Mul", "two", "deviation")),
        ("dx", ("Add", "total", ("Mul", "one part", ("Neg", "sum")))),
    )

    def check(self, graph: NodeSearch, found: Mapping[str, str]) -> str:
        if graph.shape(found["dz"]) != graph.shape(found["x"]):
            return "the gradient is repeated along an axis"
        if not _is_of_channels(graph, found["of scale"]):
            return "the gradient of the scale is not a sum over each channel"
        per_element, two, one_part = (
            graph.number(found[name]) for name in ("per element", "two", "one part")
        )
        if per_element is None or two is None or one_part is None:
            return "a factor is not a constant"
        elements = _elements_per_channel(graph, found["x"])
        if not math.isclose(per_element * elements, two, rel_tol=1e-6):
            return "the slope is not that of the variance"
        if not math.isclose(one_part * elements, 1, rel_tol=1e-6):
            return "the mean is not that of each channel"
        sums = _sums(graph, found["total"])
        for sum_ in _sums(graph, found["dz"]):
            sums += graph.results(sum_, "Mul", found["factor"])
        return "" if found["sum"] in sums else "another value than the mean is subtracted"

    def rewrite(self, graph: NodeSearch, found: Mapping[str, str]) -> onnx.NodeProto:
        dz = found["dz"]
        sums = _sums(graph, dz)
        inputs = [found[name] for name in ("x", "dz", "mean", "deviation", "factor")]
        scaled = graph.results(dz, "Mul", found["factor"])
        activation, dy = _before_mask(graph, dz, found["y"])
        inside = {found["product"], *scaled, *sums}
        if activation and {node.output[0] for node in graph.readers[dz]} == inside:
            inputs = [inputs[0], dy, *inputs[2:], found["bias"]]
        else:
            activation = NONE
        of_bias = sums[0] if len(sums) == 1 else f"{found['dx']}/sum"
        results = [found["dx"], of_bias, found["of scale"]]
        return _node("BatchNormGradient", inputs, results, activation)


# The value that is 1 where the activation of y lets pass a gradient, as gradient rules write it.
MASKS: Sequence[Pattern] = (
    ("HardSigmoid", ("Relu", "y")),
    ("HardSigmoid", ("Abs", ("Sub", "y", "clipped"))),
    ("HardSigmoid", ("Abs", ("Sub", "clipped", "y"))),
    ("Cast", ("Equal", "y", "clipped")),
    # Bounds that are not constants in the file are compared as well.
    ("Cast", ("And", ("Equal", "y", "clipped"), ("LessOrEqual", "least", "most"))),
)


def _before_mask(graph: NodeSearch, dz: str, y: str) -> tuple[int, str]:
    """Return the activation behind y whose mask makes dz of dy, and dy."""
    for pattern in () if dz in graph.outputs else MASKS:
        equations: list[Equation] = [("dz", ("Mul", "dy", "mask")), ("mask", pattern)]
        for found in graph.matcher.solutions(equations, {"dz": dz, "y": y}):
            if graph.shape(found["dy"]) == graph.shape(dz):
                activation = _masked_activation(graph, found)
                if activation:
                    return activation, found["dy"]
    return NONE, dz


def _masked_activation(graph: NodeSearch, found: Mapping[str, str]) -> int:
    """Return the activation of y whose mask was found by one of MASKS."""
    mask = graph.producers[found["mask"]]
    clip = graph.producers.get(found.get("clipped", ""))
    if mask.op_type == "HardSigmoid":
        given = attributes_of(mask)
        alpha, beta = given.get("alpha", 0), given.get("beta")
        if clip is None:
            return RELU if alpha > STEEP and beta == 0 else NONE
        if alpha >= -STEEP or beta != 1:
            return NONE
    if clip is None or clip.op_type != "Clip" or clip.input[0] != found["y"]:
        return NONE
    if "least" in found and [found["least"], found["most"]] != clip.input[1:]:
        return NONE
    return _activation(graph, clip)


def _activation(graph: NodeSearch, node: onnx.NodeProto) -> int:
    """Return the number of a node's function, if a kernel computes it."""
    if node.domain:
        return NONE
    if node.op_type == "Relu":
        return RELU
    bounds = [graph.number(name) for name in node.input[1:]]
    return RELU6 if node.op_type == "Clip" and bounds == [0, 6] else NONE


def _is_of_channels(graph: NodeSearch, result: str) -> bool:
    """Return whether a reduction has one number for each channel."""
    operand, axes = graph.axes(result, graph.producers[result].op_type)
    shape = graph.shape(operand)
    keeps_axes = graph.shape(result) == (1, *shape[1:2], *[1] * (len(shape) - 2))
    return keeps_axes and axes == [axis for axis in range(len(shape)) if axis != 1]


def _sums(graph: NodeSearch, operand: str) -> list[str]:
    """Return the sums of a value over each channel."""
    return [name for name in graph.results(operand, "ReduceSum") if _is_of_channels(graph, name)]


def _elements_per_channel(graph: NodeSearch, name: str) -> int:
    """Return the number of elements of each channel."""
    shape = graph.shape(name)
    return math.prod(shape) // shape[1]


def _node(
    op_type: str, inputs: Sequence[str], results: Sequence[str], activation: int
) -> onnx.NodeProto:
    return make_node(op_type, inputs, results, results[0], activation=activation)
