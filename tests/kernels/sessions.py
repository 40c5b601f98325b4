"""Graphs with and without the operators of the library, run side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime

import onnxfit
from onnxfit.graph.values import GraphBuilder
from onnxfit.kernels.library import DOMAIN
from onnxfit.kernels.transforms import with_kernels
from onnxfit.step.finish import finish


def parsed(text: str, scope: str = "optimizer") -> onnx.ModelProto:
    """A model whose nodes stand in a scope, with the types of all values."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')
    for i, node in enumerate(model.graph.node):
        node.name = f"{scope}/{i}"
    return onnx.shape_inference.infer_shapes(model, data_prop=True)


def run(
    model: onnx.ModelProto,
    feeds: Mapping[str, np.ndarray],
    library: Path | None = None,
    threads: int = 1,
) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    if library is not None:
        options.register_custom_ops_library(str(library))
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, {name: np.asarray(value) for name, value in feeds.items()})


def kernel_types(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in with_kernels(model).graph.node if node.domain == DOMAIN]


def layer_kernels(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The kernels of layers in a model that has them already: not Product and Elementwise."""
    nodes = [node for node in model.graph.node if node.domain == DOMAIN]
    return [node for node in nodes if not node.op_type.startswith(("Elementwise", "Product"))]


def layer_types(model: onnx.ModelProto, **settings: bool) -> list[str]:
    return [node.op_type for node in layer_kernels(with_kernels(model, **settings))]


def assert_same(
    model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], library: Path, threads: int = 1
) -> None:
    """The kernels, of which there is at least one, compute the same.

    These are the same bits, except behind a Sqrt, which onnxruntime does not round correctly.
    """
    rtol = 1e-6 if any(node.op_type == "Sqrt" for node in model.graph.node) else 0
    faster = with_kernels(model)
    assert any(node.domain == DOMAIN for node in faster.graph.node)
    expected = run(model, feeds, threads=threads)
    for found, right in zip(run(faster, feeds, library, threads), expected, strict=True):
        np.testing.assert_allclose(found, right, rtol=rtol, atol=0)


def differentiated(text: str, wrt: Sequence[str]) -> onnx.ModelProto:
    """The gradients of a model's output y, as a step computes them, with the types of all values."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')
    whole = onnxfit.gradient_model(onnx.shape_inference.infer_shapes(model), wrt, outputs="y")
    whole = onnx.shape_inference.infer_shapes(whole, data_prop=True)
    finished = finish(GraphBuilder(ir.from_proto(whole).graph))
    return onnx.shape_inference.infer_shapes(finished, data_prop=True)


def random_feeds(model: onnx.ModelProto, seed: int = 0) -> dict[str, np.ndarray]:
    """Normally distributed float32 inputs."""
    rng = np.random.default_rng(seed)
    shapes = {
        v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input
    }
    return {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}


def kernel_model(
    op_type: str, inputs: Mapping[str, np.ndarray], outputs: Sequence[str]
) -> onnx.ModelProto:
    """One operator of the library, whose float32 tensors have unknown shapes."""
    node = onnx.helper.make_node(op_type, list(inputs), outputs, domain=DOMAIN)
    sources, results = (
        [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names]
        for names in (inputs, outputs)
    )
    graph = onnx.helper.make_graph([node], "g", sources, results)
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid(DOMAIN, 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
