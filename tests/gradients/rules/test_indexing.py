"""What the cases of tests/gradients/rules/cases/indexing.py do not reach: large tables, several
threads, ties, sequences that are not known.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from onnxfit.errors import GradientError
from onnxfit.gradients.rules import indexing
from tests.gradients.rules.cases import Case, built, judged
from tests.gradients.rules.cases.indexing import CASES
from tests.gradients.rules.test_rules import (
    test_the_gradient_can_be_differentiated_again as differentiates_again,
)

ROWS = Case(
    "Gather rows",
    "float[3,2] a, float[3,5] b",
    "t = ArgMax<axis=0, keepdims=0>(b) i = Sub(t, s) y = Gather(a, i)",
    "int64[5] s = {0, 3, 0, 3, 0}",
    frozen=("b",),
)
FORMS = {  # how many elements at a time, how many may be copied: operators that write
    (2**17, 2**22): ["ScatterND"],
    (4, 2**22): ["ScatterND"] * 3,
    (1, 2**22): ["ScatterND"] * 5,
    (4, 0): ["Unique"] + ["ScatterND"] * 4,
}


def operators(case: Case) -> list[str]:
    y = np.zeros((5, 2), np.float32)
    graph = ir.from_proto(built(case.model(), ["y"], ["a"], {"y_grad": y}, runs="").model).graph
    return [n.op_type for n in graph if n.op_type in ("ScatterND", "ScatterElements", "Unique")]


@pytest.mark.parametrize("limits", FORMS)
def test_every_form_of_adding_rows_is_right_and_differentiable(
    limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows repeat, and an index of -1 meets one of 2."""
    monkeypatch.setattr(indexing, "MAX_SCATTER_ND_ELEMENTS", limits[0])
    monkeypatch.setattr(indexing, "MAX_COPIED_ELEMENTS", limits[1])
    monkeypatch.setattr(indexing, "MIN_ROW_ELEMENTS", 1)
    case = dataclasses.replace(ROWS, name=f"Gather rows {limits}")
    assert operators(case) == FORMS[limits]
    judged(case)
    differentiates_again(case)


def test_too_many_rows_are_added_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexing, "MAX_SCATTER_ND_ELEMENTS", 1)
    monkeypatch.setattr(indexing, "MAX_SCATTER_NDS", 4)
    case = dataclasses.replace(ROWS, name="Gather many rows")
    assert operators(case) == ["ScatterElements"]
    judged(case)


@pytest.mark.parametrize(
    "name", [c.name for c in CASES if c.name.startswith(("GatherND", "ScatterND"))]
)
def test_what_is_read_by_coordinates_may_be_large(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexing, "MAX_SCATTER_ND_ELEMENTS", 0)
    case = next(c for c in CASES if c.name == name)
    large = dataclasses.replace(case, name=f"{name}, large")
    judged(large)
    differentiates_again(large)


@pytest.mark.parametrize(
    ("rows", "width", "count"), [(2, 1, 2**17), (2, 1, 2**20), (2**17, 64, 2**13)]
)
def test_several_threads_lose_no_gradient(rows: int, width: int, count: int) -> None:
    """Every index is the same, and every sum a whole number, which float32 holds exactly."""
    text = (
        f'<ir_version: 8, opset_import: ["": 21]> g (float[{rows},{width}] a, int64[{count}] i) =>'
        f" (float[{count},{width}] y) {{ y = Gather(a, i) }}"
    )
    dy = np.ones((count, width), np.float32)
    model = built(onnx.parser.parse_model(text), ["y"], ["a"], {"y_grad": dy}, runs="").model
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 4
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    feeds = {"a": np.zeros((rows, width), np.float32), "i": np.zeros(count, np.int64), "y_grad": dy}
    for _ in range(20):
        total = session.run(["a_grad"], feeds)[0]
        np.testing.assert_array_equal(total[0], count)
        assert not total[1:].any()


@pytest.mark.torch
@pytest.mark.parametrize("reduction", ["add", "mul", "max", "min"])
def test_ties_and_zeros_are_shared_as_in_torch(reduction: str) -> None:
    torch = pytest.importorskip("torch")
    a = np.array([[1, 0, 2, -1], [3, 3, 0, 1]], np.float32)
    b = np.array([[1, 2, 0, 0], [3, 3, 3, 0]], np.float32)
    index = np.array([[0, 2, 2, 1], [1, 1, 0, 2]])
    dy = np.arange(1, 9, dtype=np.float32).reshape(2, 4)
    case = Case(
        "ScatterElements ties",
        "float[2,4] a, float[2,4] b",
        f'y = ScatterElements<axis=1, reduction="{reduction}">(a, i, b)',
        f"int64[2,4] i = {{{', '.join(map(str, index.reshape(-1)))}}}",
    )
    found = built(case.model(), ["y"], ["a", "b"], {"y_grad": dy}).run(
        {"a": a, "b": b, "y_grad": dy}
    )
    ta, tb = (torch.tensor(v, requires_grad=True) for v in (a, b))
    names = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
    torch.scatter_reduce(ta, 1, torch.tensor(index), tb, names[reduction]).backward(
        torch.tensor(dy)
    )
    np.testing.assert_allclose(found["a_grad"], ta.grad.numpy(), rtol=1e-6)
    np.testing.assert_allclose(found["b_grad"], tb.grad.numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            (
                "m = ArgMax<axis=0, keepdims=0>(b) s = SequenceConstruct(a, b) h = SequenceAt(s, m)"
                " y = Tanh(h)"
            ),
            "position is computed",
        ),
        (
            (
                "m = ArgMax<axis=0, keepdims=0>(b) s = SequenceConstruct(a, b) t = SequenceErase(s,"
                " m) y = ConcatFromSequence<axis=0>(t)"
            ),
            "SequenceErase .* changes the sequence is computed",
        ),
        (
            (
                "n = Abs(a) s = SplitToSequence(n, k) t = SequenceInsert(s, a) y ="
                " ConcatFromSequence<axis=0>(t)"
            ),
            "the number of parts that .* is unknown",
        ),
    ],
)
def test_what_is_not_known_of_a_sequence_is_named(body: str, reason: str) -> None:
    case = Case("Sequence", "float[N] a, float[M] b", body, "int64 k = {2}")
    with pytest.raises(GradientError, match=reason):
        built(case.model(), ["y"], ["a"], {"y_grad": np.zeros(2, np.float32)}, runs="")
