"""The error about nodes that block the gradient: callers read which, without a second build."""

from __future__ import annotations

import pickle

import onnx
import onnx_ir as ir
import pytest

from onnxfit.errors import GradientError
from onnxfit.gradients import BlockedError, backward, gradient_source
from onnxfit.graph.model import normalize

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


def test_one_build_differentiates_and_finds_blockers(monkeypatch: pytest.MonkeyPatch) -> None:
    builds = []
    original = backward.gradients
    monkeypatch.setattr(backward, "gradients", lambda *args: builds.append(1) or original(*args))
    with pytest.raises(BlockedError) as info:
        gradient_source("onnx").add_gradients(blocked(), "loss", ["w"])
    assert info.value.blockers
    assert len(builds) == 1
