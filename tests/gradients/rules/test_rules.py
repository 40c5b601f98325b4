"""Every rule of the table, in every configuration its cases have: right in float64, close in
float32, for any sizes, and twice.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxfit.gradients.backward import gradients
from onnxfit.gradients.blocker import refuse
from onnxfit.graph.values import GraphBuilder
from onnxfit.load.normalize import normalize
from tests.gradients.rules.cases import (
    Arrays,
    Case,
    Run,
    built,
    built_in_double,
    families,
    in_double,
    judged,
    meets_differences,
    no_judge,
    runner,
    same,
)

CASES = [
    pytest.param(case, id=f"{family}: {case.name}")
    for family, cases in families().items()
    for case in cases
]
# The scope puts the tests of a case side by side: a process judges a case once for all of them.
every_case = pytest.mark.parametrize("case", CASES, scope="module")


def test_names_are_unique() -> None:
    names = [p.id for p in CASES]
    assert len(names) == len(set(names)), sorted(n for n in names if names.count(n) > 1)


@every_case
def test_the_gradient_meets_central_differences_in_float64(case: Case) -> None:
    judged(case)


@every_case
@pytest.mark.parametrize("shapes", ["static", "batch", "any"])
def test_the_gradient_in_float32_is_close_for_any_sizes(case: Case, shapes: str) -> None:
    if shapes not in case.shapes:
        pytest.skip("the case says why")
    feeds, arriving, expected = judged(case)
    graph = built(case.model(shapes), case.outputs, case.wrt, arriving)
    found = graph.run({**feeds, **arriving})
    same(found, expected, list(expected), 1e-3, f"{shapes} sizes")
    for name in case.wrt:
        assert found[f"{name}_grad"].dtype == np.float32


@pytest.mark.table
@pytest.mark.parametrize(
    "case", [p for p in CASES if p.values[0].twice and not p.values[0].single], scope="module"
)
def test_the_gradient_can_be_differentiated_again(case: Case) -> None:
    """The same laws for the gradient graph itself, by its inputs and by the arriving gradients."""
    feeds, arriving, expected = judged(case)
    first = list(expected)
    work = normalize(built_in_double(case))
    op = GraphBuilder(work.graph)
    values = {v.name: v for v in work.graph.inputs}
    outer = {}
    for i, value in enumerate(list(work.graph.outputs)):
        if value.name in first:
            outer[i] = op.input(f"{value.name}_grad", np.float64, expected[value.name].shape)
    found, blocking = gradients(op, outer, [values[n] for n in (*case.wrt, *arriving)])
    refuse(blocking)
    for value, gradient in found.items():  # an operator that is linear in an input has none for it
        op.output(f"{value.name}_second", gradient)
    given = in_double({**feeds, **arriving})
    rng = np.random.default_rng(3)
    seeds = {f"{n}_grad": np.asarray(rng.uniform(0.5, 1.5, expected[n].shape)) for n in first}
    run = first_that_runs(ir.to_proto(work), {**given, **seeds})
    results = run({**given, **seeds})
    second = {
        n: results[f"{n}_second"] if f"{n}_second" in results else np.zeros_like(given[n])
        for n in (*case.wrt, *arriving)
    }
    meets_differences(run, first, list(second), given, seeds, second, tolerance=1e-5)


def first_that_runs(graph: onnx.ModelProto, feeds: Arrays) -> Run:
    try:
        run = runner(graph, "onnxruntime")
        run(feeds)
        return run
    except Exception:  # no kernel for float64
        run = runner(graph, "reference")
    try:
        run(feeds)
    except Exception as error:
        no_judge(str(error))
    return run
