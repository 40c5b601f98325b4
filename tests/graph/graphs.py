"""Small graphs and models, and how to run them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime

from onnxfit.graph.values import GraphBuilder
from onnxfit.load.opset import IR_VERSION, OPSET

LINEAR = (
    '<ir_version: 8, opset_import: ["": 17]> line (float[N, 2] x) => (float[N, 1] y) <float[2, 1] w'
    " = {1, 2}, float[1] b = {3}>"
)


def parse(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(text)


def linear() -> onnx.ModelProto:
    return parse(LINEAR + " { s = MatMul(x, w)  y = Add(s, b) }")


def empty(*inputs: tuple[str, type, tuple[int | str, ...]]) -> tuple[GraphBuilder, list]:
    op = GraphBuilder(ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="g"))
    return op, [op.input(*i) for i in inputs]


def run(op: GraphBuilder, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    proto = ir.to_proto(ir.Model(op.graph, ir_version=IR_VERSION))
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds)))
