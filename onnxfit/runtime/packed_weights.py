"""Packed weights that graphs read from memory that all of them share.

The kernel of MatMulNBits packs its weights anew when a session is made, and onnxruntime then frees
the ones that it was given, unless another node reads them. The backward pass does. It therefore
gets them as an input, in the memory of the model. So do products that an operator in C++
computes, because onnxruntime 1.32 copies constants while it makes a session.
"""

from __future__ import annotations

from collections.abc import Container

import onnx

from onnxfit.graph import names
from onnxfit.graph.index import tensors_of
from onnxfit.graph.replacement import replace_nodes
from onnxfit.kernels.packed import products_with_kernels


def share_packed_weights(
    model: onnx.ModelProto, shared: Container[str], device: str, *, keep_rounding: bool = False
) -> None:
    """Let the backward pass of a graph read packed weights as inputs, in place.

    The gradient of a packed weight reads it through a Where with two equal branches, so that
    onnxruntime does not take it for a constant. The input takes the place of that Where.

    - `model`: a graph of a step.
    - `shared`: the names of the inputs that may be added, those of `names.packed`.
    - `device`, `keep_rounding`: as for `use_kernels`. Packed weights that its products read become
      inputs, too.
    """
    graph = model.graph
    tensors = tensors_of(graph)
    replaced = {
        node.output[0]: node.input[1]
        for node in graph.node
        if node.op_type == "Where" and node.input[1] == node.input[2]
        if node.input[1] in tensors and names.packed(node.input[1]) in shared
    }
    others = [
        node
        for node in products_with_kernels(graph, device, keep_rounding=keep_rounding)
        if node.input[1] in tensors and names.packed(node.input[1]) in shared
    ]
    weights = dict.fromkeys([*replaced.values(), *(node.input[1] for node in others)])
    if not weights:
        return
    for node in others:
        node.input[1] = names.packed(node.input[1])
    replace_nodes(graph, [node for node in graph.node if node.output[0] not in replaced])
    for node in graph.node:
        for i, name in enumerate(node.input):
            if name in replaced:
                node.input[i] = names.packed(replaced[name])
    read = {name for node in graph.node for name in node.input}
    for name in weights:
        tensor = tensors[name]
        graph.input.append(
            onnx.helper.make_tensor_value_info(names.packed(name), tensor.data_type, tensor.dims)
        )
        if name not in read:
            graph.initializer.remove(tensor)
