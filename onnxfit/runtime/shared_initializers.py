"""Initializers that a session reads from memory that several sessions share."""

from __future__ import annotations

from typing import Any

import onnx

from onnxfit.graph.shared_tensors import array_of, contents_of, whole_model
from onnxfit.graph.subgraphs import nodes_of
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
