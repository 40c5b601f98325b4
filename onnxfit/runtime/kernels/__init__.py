"""Operators in C++, instead of several operators of ONNX.

They are put into a copy of a graph when it is compiled for the CPU. Saved graphs keep plain ONNX
operators. Without the compiled library, nothing changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import helper

from onnxfit.graph.subgraphs import remove_unused_nodes
from onnxfit.runtime.kernels.library import DOMAIN, has_products, library_path
from onnxfit.runtime.kernels.types import declared_types

__all__ = ["library_path", "products_with_kernels", "use_kernels", "with_kernels"]


def use_kernels(model: onnx.ModelProto, options: Any, *, keep_rounding: bool) -> onnx.ModelProto:
    """Return the model with the operators in C++, and register these with a session.

    `options` are those of the session, and `keep_rounding` is as for `with_kernels`. Without the
    library, or if none of its operators can be used, the model itself is returned.
    """
    library = library_path()
    if library is None:
        return model
    faster = with_kernels(model, has_products(library), keep_rounding=keep_rounding)
    if faster is not model:
        options.register_custom_ops_library(library)
    return faster


def products_with_kernels(model: onnx.ModelProto, *, keep_rounding: bool) -> list[onnx.NodeProto]:
    """Return the products with packed weights that `use_kernels` would replace."""
    from onnxfit.runtime.kernels.packed import product_kernels

    library = library_path()
    if library is None or not has_products(library):
        return []
    types = declared_types(model.graph)
    pairs = product_kernels(model.graph.node, types, keep_rounding=keep_rounding)
    return [node for node, _ in pairs]


def with_kernels(
    model: onnx.ModelProto, products: bool = True, *, keep_rounding: bool = True
) -> onnx.ModelProto:
    """Return a copy of a model with operators of the library.

    A model in which no operator can be used is returned itself.

    - `products`: whether the operators that multiply matrices can be used: Product, and those for
      dense convolutions, loops, packed weights and factors of low rank.
    - `keep_rounding`: whether products with packed weights whose `accuracy_level` lets onnxruntime
      round their activations keep doing so, as in the deployed file.
    """
    # Imported late: the modules serve training on the CPU alone.
    from onnxfit.runtime.kernels.batch_norm import replace_batch_norms
    from onnxfit.runtime.kernels.convolutions import replace_convolutions
    from onnxfit.runtime.kernels.elementwise import fuse_elementwise
    from onnxfit.runtime.kernels.gather import replace_gather_gradients
    from onnxfit.runtime.kernels.layer_norm import replace_layer_norms
    from onnxfit.runtime.kernels.low_rank import replace_low_rank_gradients
    from onnxfit.runtime.kernels.max_pool import replace_pool_gradients
    from onnxfit.runtime.kernels.packed import replace_packed_products
    from onnxfit.runtime.kernels.products import replace_products
    from onnxfit.runtime.kernels.scan import replace_scans
    from onnxfit.runtime.kernels.softmax import replace_softmaxes

    types = declared_types(model.graph)
    declared = set(types)
    original: Sequence[onnx.NodeProto] = list(model.graph.node)
    nodes = replace_convolutions(model.graph, original, with_dense=products)
    nodes = replace_scans(model.graph, nodes, types) if products else nodes
    if products:
        nodes = replace_packed_products(nodes, types, keep_rounding=keep_rounding)
    nodes = replace_low_rank_gradients(model.graph, nodes, types) if products else nodes
    nodes = replace_pool_gradients(nodes, types)
    nodes = replace_gather_gradients(model.graph, nodes, types)
    nodes = replace_batch_norms(model.graph, nodes, types)
    nodes = replace_layer_norms(model.graph, nodes, types)
    nodes = replace_softmaxes(model.graph, nodes, types)
    nodes = replace_products(model.graph, nodes, types) if products else nodes
    nodes = fuse_elementwise(model.graph, nodes, types)
    if nodes is original:
        return model
    faster = onnx.ModelProto()
    faster.CopyFrom(model)
    del faster.graph.node[:]
    faster.graph.node.extend(nodes)
    # onnxruntime plans the memory of values of known size.
    faster.graph.value_info.extend(
        helper.make_tensor_value_info(name, *types[name]) for name in types if name not in declared
    )
    remove_unused_nodes(faster.graph)
    faster.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return faster
