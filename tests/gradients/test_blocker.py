"""Nodes that block the gradient, and the error that lists them."""

from __future__ import annotations

import pickle

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxfit.errors import GradientError
from onnxfit.gradients import BlockedError, Blocker, backward, gradient_source
from onnxfit.graph.values import GraphBuilder
from onnxfit.load.normalize import normalize
from tests.gradients.rules.cases import OLDER, Case, families

BLOCKED = """<ir_version: 10, opset_import: ["": 21, "my.domain": 1]>
    g (float[2] x, float[2] w) => (float[2] y, float loss) {
        a = Mul(x, w) b = my.domain.Swish(a) c = Tanh(b) y = my.domain.Gate(c)
        loss = ReduceSum<keepdims = 0>(y) }"""


def blocked() -> ir.Model:
    return normalize(onnx.parser.parse_model(BLOCKED))


@pytest.mark.parametrize("gradient", ["onnx", "auto"])
def test_the_error_has_the_blockers(gradient: str) -> None:
    source = gradient_source(gradient)
    expected = source.blockers(blocked(), "loss", ["w"])
    assert [b.op_type for b in expected] == ["Swish", "Gate"]
    with pytest.raises(BlockedError) as info:
        source.add_gradients(blocked(), "loss", ["w"])
    assert info.value.blockers == tuple(expected)
    assert isinstance(info.value, GradientError)
    assert all(str(b) in str(info.value) for b in expected)
    with pytest.raises(BlockedError) as info:
        source.add_pullback(blocked(), ["y"], ["w"])
    assert [b.op_type for b in info.value.blockers][:1] == ["Swish"]


def test_it_survives_pickling() -> None:
    with pytest.raises(BlockedError) as info:
        backward.add_gradients(blocked(), "loss", ["w"])
    copy = pickle.loads(pickle.dumps(info.value))
    assert str(copy) == str(info.value)
    assert copy.blockers == info.value.blockers


def with_sum_as_loss(case: Case, shapes: str) -> ir.Model:
    model = normalize(case.model(shapes))
    op = GraphBuilder(model.graph)
    outputs = [op.wrap(v) for v in model.graph.outputs if v.name in case.outputs]
    total = op.constant(0.0)
    for output in outputs:
        total = total + op.cast(op.ReduceSum(output, keepdims=0), total.dtype)
    op.output("loss", op.Reshape(total, op.constant(np.zeros(0, np.int64))))
    return model


@pytest.mark.parametrize("shapes", ["static", "any"])
@pytest.mark.parametrize("family", families())
def test_blockers_are_those_of_the_gradient_that_is_built(family: str, shapes: str) -> None:
    """`blockers` calls each rule on its own, and only one of the nodes that look alike."""
    for case in families()[family]:
        if case.domains or (OLDER and case.body.startswith("y = GroupNormalization")):
            continue  # the type of an output is unknown before its operator is decomposed
        model = with_sum_as_loss(case, shapes)
        found = backward.blockers(model.clone(), "loss", case.wrt)
        try:
            backward.add_gradients(model, "loss", case.wrt)
            expected: tuple[Blocker, ...] = ()
        except BlockedError as error:
            expected = error.blockers
        assert tuple(found) == expected, case.name


def test_each_of_several_equal_nodes_is_named() -> None:
    layers = "".join(f"h{i} = my.domain.Swish(h{i - 1}) " for i in range(1, 4))
    text = f"""<ir_version: 10, opset_import: ["": 21, "my.domain": 1]>
        g (float[2] h0) => (float loss) {{ {layers} loss = ReduceSum<keepdims = 0>(h3) }}"""
    found = backward.blockers(normalize(onnx.parser.parse_model(text)), "loss", ["h0"])
    assert [blocker.op_type for blocker in found] == ["Swish"] * 3
    assert len({blocker.node for blocker in found}) == 3


def test_equal_nodes_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    rule = backward._input_gradients
    monkeypatch.setattr(
        backward, "_input_gradients", lambda tape, *args: calls.append(1) or rule(tape, *args)
    )
    layers = "".join(f"h{i} = Tanh(h{i - 1}) " for i in range(1, 101))
    text = f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[2] h0) => (float loss) {{ {layers} loss = ReduceSum<keepdims = 0>(h100) }}"""
    assert not backward.blockers(normalize(onnx.parser.parse_model(text)), "loss", ["h0"])
    assert len(calls) == 2  # a Tanh and the ReduceSum
