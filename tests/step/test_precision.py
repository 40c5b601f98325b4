"""Mixed precision: the operators that compute in half precision, and their gradients."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnxfit.gradients.backward import gradients
from onnxfit.gradients.blocker import refuse
from onnxfit.graph.model import normalize
from onnxfit.graph.values import GraphBuilder
from onnxfit.step.finish import finish
from onnxfit.step.precision import OPERATORS, autocast
from tests.gradients.rules.cases import Arrays, Case, families, runner, seeds

HALVES = {"bf16": ir.DataType.BFLOAT16, "fp16": ir.DataType.FLOAT16}
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}
half_types = pytest.mark.parametrize("precision", HALVES)


def in_the_table(case: Case) -> bool:
    """Whether a node of the case is in the table; a body around it would keep it in float32."""
    nodes = [node for node in case.model().graph.node if not any(a.HasField("g") for a in node.attribute)]  # fmt: skip
    return any(node.op_type in OPERATORS for node in nodes)


CASES = [
    pytest.param(case, id=f"{family}: {case.name}")
    for family, cases in families().items()
    for case in cases
    if in_the_table(case)
]


def rounded(arrays: Arrays, half: ir.DataType) -> Arrays:
    """The arrays, whose floats are numbers of the half type."""
    return {
        name: array.astype(half.numpy()).astype(np.float32) if array.dtype == np.float32 else array
        for name, array in arrays.items()
    }


def narrow_inputs(op: GraphBuilder, half: ir.DataType) -> None:
    """Cast the inputs of a graph, as if another node had computed them in half precision."""
    with op.replacing(op.graph.node(0)):
        for value in [v for v in op.graph.inputs if v.dtype == ir.DataType.FLOAT]:
            uses = list(value.uses())
            cast = op.cast(op.wrap(value), half.numpy())
            for node, i in uses:
                node.replace_input_with(i, cast.ir)


def with_gradients(case: Case, feeds: Arrays, half: ir.DataType | None) -> Arrays:
    """Outputs and gradients of a case; in mixed precision, its inputs come in the half type."""
    arriving = seeds(case, runner(case.model(), "onnxruntime")(feeds))
    work = normalize(case.model())
    op = GraphBuilder(work.graph)
    inputs = {v.name: v for v in work.graph.inputs}
    if half is not None:
        narrow_inputs(op, half)
        autocast(op, half, ())
    given = {
        i: op.input(f"{value.name}_grad", np.float32, arriving[f"{value.name}_grad"].shape)
        for i, value in enumerate(list(work.graph.outputs))
        if value.name in case.outputs
    }
    found, blocking = gradients(op, given, [inputs[name] for name in case.wrt])
    refuse(blocking)
    for name in case.wrt:
        op.output(f"{name}_grad", found[inputs[name]])
    return runner(finish(op), "onnxruntime")({**feeds, **arriving})


@half_types
@pytest.mark.parametrize("case", CASES, scope="module")
def test_outputs_and_gradients_differ_from_float32_by_rounding(case: Case, precision: str) -> None:
    half = HALVES[precision]
    feeds = rounded(case.feeds(), half)
    expected = with_gradients(case, feeds, None)
    found = with_gradients(case, feeds, half)
    for name, array in expected.items():
        assert found[name].dtype == np.float32
        error = np.linalg.norm(found[name].astype(np.float64) - array)
        scale = np.linalg.norm(array)
        assert error <= 8 * ROUNDING[precision] * scale + 1e-6, (name, error / scale)
