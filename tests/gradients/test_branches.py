"""The error about an If with a branch that cannot be differentiated: it names what decides."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import onnxfit
from onnxfit import Trainer
from onnxfit.errors import GradientError, ModelError

# A branch with an operator that has no rule, and one that has.
NETWORK = """<ir_version: 10, opset_import: ["": 21, "my.domain": 1]>
    g (float[N, 3] x{inputs}) => (float[N, 1] y)
    <float[3, 1] w = {{1, 2, 3}}, float[3, 1] v = {{1, 1, 2}}>
    {{ {condition}
      y = If(c) <
        then_branch = then () => (float[N, 1] a) {{ a = MatMul(x, w) }},
        else_branch = other () => (float[N, 1] b) {{ d = MatMul(x, v)  e = my.domain.Odd(d)  b = Neg(e) }}> }}"""


def constant(kind: str, number: str) -> str:
    return f"k = Constant<value = {kind} {{{number}}}>()  "


# condition: (inputs, nodes, what the reason says, the fix)
CONDITIONS = {
    "a setting": (
        ", int64 sr",
        constant("int64", "16000") + "c = Equal(sr, k)",
        "depends on the input 'sr'",
        "fixed_inputs={'sr': 16000}",
    ),
    "a flag": (
        ", bool fast",
        "c = Identity(fast)",
        "depends on the input 'fast'",
        "fixed_inputs={'fast': value}",
    ),
    "two settings": (
        ", int64 sr, float[1] level",
        constant("int64", "5") + "z = CastLike(level, sr)  n = Add(sr, z)  c = Greater(n, k)",
        "depends on the inputs 'sr', 'level'",
        "fixed_inputs={'sr': value, 'level': value}",
    ),
    "data": (
        "",
        constant("float", "0") + "s = ReduceSum<keepdims = 0>(x)  c = Greater(s, k)",
        "depends on the input 'x'",
        "export the model",
    ),
    "a weight": (
        "",
        constant("float", "0") + "s = ReduceSum<keepdims = 0>(w)  c = Greater(s, k)",
        "",
        "",
    ),
}


def network(condition: str, inputs: str = "") -> onnx.ModelProto:
    return onnx.parser.parse_model(NETWORK.format(condition=condition, inputs=inputs))


@pytest.mark.parametrize("name", CONDITIONS)
def test_the_error_names_the_inputs_that_decide(name: str) -> None:
    inputs, condition, reason, fix = CONDITIONS[name]
    model = network(condition, inputs)
    with pytest.raises(GradientError) as info:
        Trainer(model, loss="mse")
    message = str(info.value)
    assert reason in message
    assert fix in message
    assert ("fixed_inputs" in message) == ("fixed_inputs" in fix)
    assert "Odd" in message
    blockers = onnxfit.inspect(model).blockers
    assert str(blockers[0]) in message
    assert [b.op_type for b in blockers] == (["If"] if reason else ["Odd"])


def test_the_number_that_selects_the_other_branch_is_in_the_fix() -> None:
    model = network(constant("int64", "16000") + "c = Equal(sr, k)", ", int64 sr")
    with pytest.raises(GradientError, match=r"fixed_inputs=\{'sr': 16000\}"):
        Trainer(model, loss="mse")
    trainer = Trainer(model, loss="mse", optimizer=0.1, fixed_inputs={"sr": 16000})
    x = np.array([[1, 2, 3], [0, 1, 1]], np.float32)
    w = np.array([[1], [2], [3]], np.float32)
    trainer.train_on_batch(x, np.zeros((2, 1), np.float32))
    expected = w - 0.1 * x.T @ (x @ w)
    np.testing.assert_allclose(trainer.get_weights()["w"], expected, rtol=1e-5)
    other = network(constant("int64", "16000") + "same = Equal(sr, k)  c = Not(same)", ", int64 sr")
    with pytest.raises(GradientError, match=r"fixed_inputs=\{'sr': value\}"):
        Trainer(other, loss="mse")


def test_the_outer_if_is_named_and_the_inner_node() -> None:
    inner = NETWORK.replace(
        "d = MatMul(x, v)  e = my.domain.Odd(d)  b = Neg(e)",
        """b = If(inner) <
            then_branch = deep () => (float[N, 1] f) {{ f = MatMul(x, v) }},
            else_branch = deeper () => (float[N, 1] h) {{ d = MatMul(x, v)  h = my.domain.Odd(d) }}>""",
    )
    model = onnx.parser.parse_model(
        inner.format(condition="c = Identity(outer)", inputs=", bool outer, bool inner")
    )
    (blocker,) = onnxfit.inspect(model).blockers
    assert "the input 'outer'" in blocker.reason
    assert blocker.reason.count("Odd") == 2  # the node, and the reason that it has no rule
    assert "fixed_inputs={'outer': value}" in blocker.fix


@pytest.mark.parametrize("backend", ["full", "forward_backward", "in_place"])
def test_sizes_select_the_branch_of_a_batch(backend: str) -> None:
    """The model trains with batches that take the branch with a gradient, and with no others."""
    condition = constant("int64", "1") + (
        "s = Shape<start = 0, end = 1>(x)  q = Squeeze(s)  c = Greater(q, k)"
    )
    model = network(condition)
    trainer = Trainer(model, loss="mse", optimizer=0.1, backend=backend)
    x = np.array([[1, 2, 3], [0, 1, 1]], np.float32)
    w = np.array([[1], [2], [3]], np.float32)
    y = np.zeros((2, 1), np.float32)
    step: Any = trainer.train_on_batch(x, y)
    np.testing.assert_allclose(step["loss"], np.mean((x @ w) ** 2), rtol=1e-5)
    np.testing.assert_allclose(trainer.get_weights()["w"], w - 0.1 * x.T @ (x @ w), rtol=1e-5)
    before = trainer.get_weights()["w"]
    with pytest.raises((GradientError, ModelError), match="Odd"):
        trainer.train_on_batch(x[:1], y[:1])
    assert np.array_equal(trainer.get_weights()["w"], before)
    (blocker,) = onnxfit.inspect(model).blockers
    assert "depends on the sizes of 'x'" in blocker.reason
    assert blocker.needs_sizes
