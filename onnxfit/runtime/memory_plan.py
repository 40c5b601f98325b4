"""The graphs in which onnxruntime must not plan the memory of values, or not all of it."""

from __future__ import annotations

import math

import onnx
import onnxruntime

from onnxfit.graph.subgraphs import nodes_of, subgraph_protos
from onnxfit.runtime.node_order import MAX_BYTES_IN_MEMORY

FOUR_BITS = frozenset({onnx.TensorProto.INT4, onnx.TensorProto.UINT4})
# A step takes up to a tenth longer without reused memory, so a smaller sum keeps it.
MAX_TERMS = 1000


def plan_memory(
    model: onnx.ModelProto, bytes_of_values: float, options: onnxruntime.SessionOptions
) -> None:
    """Turn off the plans of onnxruntime that a graph must not have.

    No value gets the memory of an earlier value:

    - In a graph that makes integers of four bits. onnxruntime gives their memory to tensors of the
      same shape with a byte for each element, and writes beyond its end (onnxruntime/pull/32611).
    - In a graph with large values whose memory is planned. A value would get the memory of an
      earlier value of its size. The plan for all memory then takes the two for one value, which
      nothing else may overlap in the meantime.
    - In a graph with a very large sum, such as the gradient of a weight that is read thousands of
      times. Its terms wait while memory of another size becomes free, and onnxruntime searches all
      of that for each term. This graph has no plan for all memory either: making it is a search for
      each value among all others. With 8,192 terms, the first step takes 4 seconds instead of 19.

    `bytes_of_values` is the result of the function of that name for the graph.
    """
    has_large_sum = any(len(node.input) > MAX_TERMS for node in model.graph.node)
    if has_large_sum or makes_four_bits(model) or _plans(model.graph, bytes_of_values):
        options.enable_mem_reuse = False
    if has_large_sum:
        options.enable_mem_pattern = False


def _plans(graph: onnx.GraphProto, bytes_of_values: float) -> bool:
    """Return whether onnxruntime plans the memory of a graph's values, and they are large in total.

    It plans the memory of values of known size. It does not plan those of a subgraph.
    """
    if not MAX_BYTES_IN_MEMORY < bytes_of_values < math.inf:
        return False
    return not any(subgraph_protos(a) for node in graph.node for a in node.attribute)


def makes_four_bits(model: onnx.ModelProto) -> bool:
    """Return whether a QuantizeLinear of a model may write integers of four bits.

    They have the type of the zero point. If the model does not declare it, integers of four bits
    that the model declares elsewhere count.
    """
    quantizers = [node for node in nodes_of(model.graph) if node.op_type == "QuantizeLinear"]
    if not quantizers:
        return False
    graph = model.graph
    declared = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        declared[value.name] = value.type.tensor_type.elem_type
    four_bits = not FOUR_BITS.isdisjoint(declared.values())
    for node in quantizers:
        if any(a.name == "output_dtype" and a.i in FOUR_BITS for a in node.attribute):
            return True
        zero_point = node.input[2] if len(node.input) > 2 else ""
        if zero_point and (
            declared[zero_point] in FOUR_BITS if zero_point in declared else four_bits
        ):
            return True
    return False
