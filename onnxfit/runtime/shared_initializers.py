"""Weights that graphs read from memory that all of them share.

The kernel of MatMulNBits packs its weights anew when a session is made, and onnxruntime then frees
the ones that it was given, unless another node reads them. The backward pass does. It therefore
gets them as an input, in the memory of the model. So do products that an operator in C++
computes, because onnxruntime 1.32 copies constants while it makes a session.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import onnx

from onnxfit.graph import names
from onnxfit.graph.index import tensors_of
from onnxfit.graph.replacement import replace_nodes
from onnxfit.graph.shared_tensors import array_of, contents_of, whole_model
from onnxfit.graph.subgraphs import nodes_of
from onnxfit.kernels.packed import products_with_kernels
from onnxfit.runtime.device import Device
from onnxfit.runtime.values import ort_value, wrap_ort_value
from onnxfit.runtime.version import onnxruntime_version

# The products with packed weights: that of onnxruntime, and those in C++ (`kernels`).
PRODUCTS = ("MatMulNBits", "PackedProduct", "PackedProductGradient")


def share_initializers(
    model: onnx.ModelProto, device: Device, options: Any
) -> tuple[onnx.ModelProto, list[Any]]:
    """Let a session on the CPU read the arrays that a model refers to, without copies of them.

    onnxruntime needs each array twice: as an external initializer, whose values its graph
    optimizers read, and as an initializer, which its kernels read. With the first alone, kernels
    get a copy. Without it, onnxruntime 1.32 searches for a file. onnxruntime 1.19 does not, but
    copies external initializers while the session is made, so packed weights are not among them.

    Measured for 24 products (MatMulNBits) of 2048 x 2048 in 4 bits, whose kernels pack their own
    copy of 0.8 times the bytes of the file: a session keeps 0.98 times these bytes instead of 3.01
    (onnxruntime 1.19) and 0.99 instead of 2.19 (1.32).

    - `options`: those of the session.

    Returns the model to compile, and the objects to keep alive as long as the session. For other
    devices, the model is a copy with all arrays in it.
    """
    if device.kind != "cpu":
        return whole_model(model), []
    tensors = [t for t in model.graph.initializer if contents_of(t) is not None]
    if not tensors:
        return model, []
    arrays = {tensor.name: array_of(tensor) for tensor in tensors}
    values = {name: wrap_ort_value(ort_value(array, device)) for name, array in arrays.items()}
    kernels_only = _packed_weights(model) if onnxruntime_version() == (1, 19) else ()
    external = [name for name in values if name not in kernels_only]
    if external:
        options.add_external_initializers(external, [values[name] for name in external])
    for name, value in values.items():
        options.add_initializer(name, value)
    return model, [*arrays.values(), *values.values()]


def _packed_weights(model: onnx.ModelProto) -> set[str]:
    """Return the inputs of PRODUCTS other than the first that no other node reads.

    No graph optimizer reads their values.
    """
    packed: set[str] = set()
    others = {value.name for value in model.graph.output}
    for node in nodes_of(model.graph):
        is_product = node.op_type in PRODUCTS
        packed.update(node.input[1:] if is_product else ())
        others.update(node.input[:1] if is_product else node.input)
    return packed - others


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
