"""The operators that a folder for compilers of inference may use, and the check of its graphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx
import onnx_ir as ir

from onnxfit.errors import UnsupportedError, listed_names
from onnxfit.gradients.building import constant_elements, static_shape
from onnxfit.graph.fold import fold_shapes
from onnxfit.graph.scopes import MODEL, maker_of, stage_of
from onnxfit.graph.subgraphs import subgraphs_of
from onnxfit.graph.values import GraphBuilder
from onnxfit.step.device_forms import use_forms_of_device
from onnxfit.step.finish import prune

# docs/training-folder.md has the list too.
OPERATORS = frozenset(
    {
        "Abs", "Add", "And", "ArgMax", "AveragePool", "Cast", "Ceil", "Clip", "Concat", "Cos",
        "Div", "Elu", "Equal", "Erf", "Exp", "Expand", "Flatten", "Floor", "Gather", "Gelu", "Gemm",
        "GlobalAveragePool", "GlobalMaxPool", "Greater", "GreaterOrEqual", "HardSwish", "Identity",
        "LeakyRelu", "Less", "LessOrEqual", "Log", "LogSoftmax", "MatMul", "Max", "MaxPool", "Min",
        "Mul", "Neg", "Not", "Or", "PRelu", "Pad", "Pow", "Reciprocal", "ReduceMax", "ReduceMean",
        "ReduceMin", "ReduceSum", "Relu", "Reshape", "Resize", "Selu", "Sigmoid", "Sign", "Sin",
        "Slice", "Softmax", "Softplus", "Softsign", "Split", "Sqrt", "Squeeze", "Sub", "Tanh",
        "Tile", "Transpose", "Unsqueeze", "Where",
    }
)  # fmt: skip
TYPES = frozenset({ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL})
# Operators whose inputs after the first are sizes, axes or positions, which must be constants.
WITH_CONSTANTS = frozenset(
    {
        "Expand", "Pad", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "Reshape", "Resize",
        "Slice", "Split", "Squeeze", "Tile", "Unsqueeze",
    }
)  # fmt: skip


def with_inference_operators(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a graph for the device "npu" with every size known and no arithmetic of sizes."""
    work = ir.from_proto(model)
    fold_shapes(work)
    op = GraphBuilder(work.graph, device="npu")
    use_forms_of_device(op)
    finished = ir.to_proto(prune(op))
    finished.producer_name = model.producer_name
    return finished


def require_inference_operators(graphs: Mapping[str, onnx.ModelProto]) -> None:
    """Raise UnsupportedError if a graph has a node outside the list, and name each such node."""
    found = dict.fromkeys(line for name in graphs for line in outside(graphs[name]))
    if found:
        raise UnsupportedError(
            "export_training(target='npu') has operators of inference only, and cannot express"
            f" {listed_names(found)}. Replace these parts, or use target='onnxruntime'. The"
            " page 'The training folder' in docs lists the operators."
        )


def outside(model: onnx.ModelProto) -> Iterator[str]:
    """Yield each operator that compilers of inference need not know, its origin, and the reason.

    A node is inside if its operator is in `OPERATORS`, its outputs have known sizes and a type in
    `TYPES`, it has one output (Split may have several), and its sizes, axes and positions are
    constants.
    """
    op = GraphBuilder(ir.from_proto(model).graph)
    for node in op.graph:
        reason = _reason(op, node)
        if reason is not None:
            name = node.name or ""
            shown = f" {name!r}" if stage_of(name) == MODEL else ""
            yield f"{node.op_type}{shown} in {maker_of(name)} ({reason})"


def _reason(op: GraphBuilder, node: ir.Node) -> str | None:
    """Return the reason why a node is outside the list; None if it is inside."""
    if node.domain != "":
        return f"the domain {node.domain}"
    if subgraphs_of(node):
        return "control flow"
    if node.op_type not in OPERATORS:
        return "not in the list"
    if len([value for value in node.outputs if value.name]) > 1 and node.op_type != "Split":
        return "several outputs"
    values = [value for value in node.outputs if value.name]
    if any(static_shape(op.wrap(value)) is None for value in values):
        return "its sizes depend on data"
    wrong = [str(value.dtype) for value in values if value.dtype not in TYPES]
    if wrong:
        return f"its type is {wrong[0]}"
    parameters = node.inputs[1:] if node.op_type in WITH_CONSTANTS else ()
    if any(value is not None and constant_elements(op.wrap(value)) is None for value in parameters):
        return "a size, an axis or a position is computed"
    return None
