"""Rules and operators with forms of their own for a device: the same judges judge them."""

from __future__ import annotations

import re
from typing import Any

import onnx_ir as ir
import pytest

from onnxfit.gradients.backward import gradients
from onnxfit.gradients.blocker import refuse
from onnxfit.graph.values import GraphBuilder
from onnxfit.load.normalize import normalize
from onnxfit.step.device_forms import FORMS, use_forms_of_device
from tests.gradients.rules.cases import Case, judged, runner, same
from tests.gradients.rules.test_rules import CASES

# Operators whose gradient has a form for a device, and layers whose operators have one.
WITH_FORMS = {
    "cuda": ("BatchNormalization", "Conv", "InstanceNormalization", *FORMS["cuda"]),
    "npu": ("Gather", "MaxPool", "GlobalMaxPool", *FORMS["npu"]),
    "webgpu": ("Gather", "GatherElements", "MaxPool", "GlobalMaxPool", *FORMS["webgpu"]),
}


def cases_with_forms(device: str) -> list[Any]:
    operators = re.compile(rf"\b({'|'.join(WITH_FORMS[device])})\b")
    return [
        pytest.param(device, *p.values, id=f"{device}-{p.id}")
        for p in CASES
        if operators.search(p.values[0].body)
    ]


@pytest.mark.table
@pytest.mark.parametrize(("device", "case"), [p for d in WITH_FORMS for p in cases_with_forms(d)])
@pytest.mark.parametrize("shapes", ["static", "any"])
def test_the_forms_for_a_device_meet_the_judges(device: str, case: Case, shapes: str) -> None:
    if shapes not in case.shapes:
        pytest.skip("the case says why")
    feeds, arriving, expected = judged(case)
    work = normalize(case.model(shapes))
    op = GraphBuilder(work.graph, device=device)
    values = {v.name: v for v in work.graph.inputs}
    given = {}
    for i, value in enumerate(list(work.graph.outputs)):
        if value.name in case.outputs:
            array = arriving[f"{value.name}_grad"]
            given[i] = op.input(f"{value.name}_grad", array.dtype, [None] * array.ndim)
    found, blocking = gradients(op, given, [values[name] for name in case.wrt])
    refuse(blocking)
    for name in case.wrt:
        op.output(f"{name}_grad", found[values[name]])
    use_forms_of_device(op)
    results = runner(ir.to_proto(work), "onnxruntime")({**feeds, **arriving})
    same(results, expected, list(expected), 1e-3, f"{shapes} sizes")
