"""Programs of the operator Elementwise: each instruction, and programs that are wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from onnxfit.graph.index import attributes_of
from onnxfit.kernels.library import DOMAIN
from onnxfit.kernels.program import CODES, OPERATORS, PATTERNS
from onnxfit.kernels.transforms import with_kernels
from tests.kernels.sessions import assert_same, parsed, run

TYPES = {"float": np.float32, "double": np.float64}
# Operators that onnxruntime computes by approximations of its own.
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "Exp": np.exp,
    "Erf": np.vectorize(math.erf),
    "Tanh": np.tanh,
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "HardSigmoid": lambda x: np.clip(0.3 * x + 0.4, 0, 1),
}
SPECIAL = [0.0, -0.0, 1.0, -1.5, 3e-39, 1e38, np.inf, -np.inf, np.nan]


def special_pairs(dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """Every pair of special numbers, in two vectors."""
    a, b = np.meshgrid(np.array(SPECIAL, dtype), np.array(SPECIAL, dtype))
    return a.ravel(), b.ravel()


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("op_type", [name for name in OPERATORS if name not in FUNCTIONS])
def test_an_operator_has_the_bits_of_onnx(op_type: str, kind: str, kernels: Path) -> None:
    a, b = special_pairs(TYPES[kind])
    if op_type == "Sqrt":  # onnxruntime has no denormal numbers there, and NaN for infinity
        a = a[np.isfinite(a) & (abs(a) != 3e-39)]
    a = a.astype(TYPES[kind])
    b = b[: len(a)]
    n = len(a)
    operands = {
        1: ["a"],
        2: ["a, b", "a, s", "s, a"],
        3: ["a, s, s"],
    }[OPERATORS[op_type]]
    for operand in operands:
        # a second operator, since one alone stays as it is
        model = parsed(
            f"g ({kind}[{n}] a, {kind}[{n}] b, {kind} s) => ({kind}[{n}] y, {kind}[{n}] z)"
            f"{{ y = {op_type}({operand})  z = Mul(y, b) }}"
        )
        for s in SPECIAL:
            with np.errstate(all="ignore"):
                assert_same(model, {"a": a, "b": b, "s": np.array(s, TYPES[kind])}, kernels)
            if "s" not in operand:
                break


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_that_of_numpy(name: str, kind: str, kernels: Path) -> None:
    dtype = TYPES[kind]
    attributes = "<alpha=0.3, beta=0.4>" if name == "HardSigmoid" else ""
    # a second operator, since one alone stays as it is
    model = parsed(
        f"g ({kind}[n] a) => ({kind}[n] y, {kind}[n] z) {{ y = {name}{attributes}(a)  z = Neg(y) }}"
    )
    steps = [np.linspace(-10, 10, 20_001), np.linspace(-104, 89, 2_000), SPECIAL, [-1e38, 88.8]]
    a = np.concatenate(steps).astype(dtype)
    y, z = run(with_kernels(model), {"a": a}, kernels)
    with np.errstate(all="ignore"):
        expected = FUNCTIONS[name](a.astype(np.float64))
        expected = expected.astype(dtype)
    # The smallest numbers have fewer digits; HardSigmoid is a difference near 0.
    atol = {"Exp": 1.5e-45, "HardSigmoid": 2e-7}.get(name, 1.2e-38)
    np.testing.assert_allclose(y, expected, rtol=2.5e-7, atol=atol)
    np.testing.assert_array_equal(z, -y)


TREES = {
    "SCALE_ADD": ["v = Mul(s, a)  y = Add(v, b)"],
    "SUB_SCALED": ["v = Mul(b, s)  y = Sub(a, v)"],
    "AVERAGE": ["v = Mul(s, a)  w = Mul(t, b)  y = Add(w, v)"],
    "AVERAGE_OF_SQUARES": ["q = Mul(b, b)  v = Mul(s, a)  w = Mul(t, q)  y = Add(v, w)"],
    "NORMALIZED_STEP": ["r = Sqrt(c)  d = Add(r, t)  v = Mul(s, b)  q = Div(v, d)  y = Sub(a, q)"],
    "ROUNDED": [
        f"d = Div(a, {scale})  r = Round(d)  i = Clip(r, s, t)  z = Add(i, u)  y = Mul(z, {scale})"
        for scale in ("b", "u")
    ],
    "STRAIGHT_THROUGH": [
        f"{inside}  d = Sub(i, b)  e = Abs(d)  h = HardSigmoid<alpha=-0.7, beta=0.9>(e)"
        f"  x = Mul(a, {scale})  z = Mul(h, x)  y = Div(z, {scale})"
        for inside in (
            "i = Clip(b, s, t)",
            "m = Max(b, s)  i = Min(m, c)",
            "m = Max(b, c)  i = Min(m, a)",
        )
        for scale in ("c", "u")
    ],
}
FUSED = [(name, tree) for name, trees in TREES.items() for tree in trees]


def test_every_pattern_has_a_tree() -> None:
    assert TREES.keys() == {name for name, *_ in PATTERNS}


# onnxruntime has no HardSigmoid of float64.
@pytest.mark.parametrize(
    ("name", "tree", "kind"),
    [
        (*each, kind)
        for each in FUSED
        for kind in TYPES
        if (each[0], kind) != ("STRAIGHT_THROUGH", "double")
    ],
)
def test_several_operators_are_one_instruction(
    name: str, tree: str, kind: str, kernels: Path
) -> None:
    text = "g (T[n] a, T[n] b, T[n] c, T s, T t, T u) => (T[n] y) { tree }"
    model = parsed(text.replace("T", kind).replace("tree", tree))
    node = with_kernels(model).graph.node[-1]  # after its constants
    assert attributes_of(node)["program"][0] == CODES[name]
    (operands,) = {len(operands) for other, _, operands in PATTERNS if other == name}
    assert len(attributes_of(node)["program"]) == 2 + operands
    rng = np.random.default_rng(0)
    for n in (1, 2, 511, 512, 513, 8193, 20001):
        feeds = {k: rng.standard_normal(n).astype(TYPES[kind]) for k in "abc"}
        feeds |= {k: np.array(rng.random(), TYPES[kind]) for k in "stu"}
        feeds["c"] = abs(feeds["c"])
        if name == "NORMALIZED_STEP":  # of terms of one sign, the rounding of Sqrt stays small
            feeds = {k: abs(v) for k, v in feeds.items()} | {"a": -abs(feeds["a"])}
        if name == "ROUNDED":
            feeds |= {"a": 9 * feeds["a"], "s": feeds["s"] - 5, "t": feeds["t"] + 4}
        assert_same(model, feeds, kernels)
    a, b = special_pairs(TYPES[kind])
    for s in SPECIAL:
        feeds = {"a": a, "b": b, "c": b[::-1].copy()}
        feeds |= {k: TYPES[kind](v) for k, v in (("s", s), ("t", 2), ("u", s))}
        if name not in ("NORMALIZED_STEP", "ROUNDED", "STRAIGHT_THROUGH"):
            assert_same(model, {k: np.asarray(v) for k, v in feeds.items()}, kernels)


def test_a_value_that_is_read_elsewhere_stays_apart(kernels: Path) -> None:
    model = parsed(
        "g (float[3] a, float[3] b, float s) => (float[3] u, float[3] y)"
        "{ u = Mul(s, a)  y = Add(u, b) }"
    )
    (node,) = with_kernels(model).graph.node
    assert node.output == ["u", "y"]
    x = np.arange(3, dtype=np.float32)
    assert_same(model, {"a": x, "b": x + 1, "s": np.array(3, np.float32)}, kernels)


@pytest.mark.parametrize("threads", range(1, 9))
def test_threads_change_nothing(threads: int, kernels: Path) -> None:
    model = parsed(
        "g (float[n] a, float[n] b, float s) => (float[n] y, float[n] z)"
        "{ u = Div(a, b)  y = Sub(u, s)  v = Max(u, y)  z = Mul(v, v) }"
    )
    rng = np.random.default_rng(threads)
    feeds = {k: rng.random(100_003).astype(np.float32) for k in "ab"}
    assert_same(model, {**feeds, "s": np.array(0.5, np.float32)}, kernels, threads)


@pytest.mark.parametrize(
    ("program", "temporaries", "message"),
    [
        ([99, 2, 0, 1], 0, "out of range"),  # an unknown instruction
        ([-1, 2, 0, 1], 0, "out of range"),
        ([0, 2, 0], 0, "out of range"),  # cut off
        ([0, 2, 0, 1], -1, "out of range"),
        ([0, 2, 0, 1], 17, "too many temporaries"),
        ([0, 2, 0, 7], 0, "unknown operand"),
        ([0, 2, -1, 1], 0, "unknown operand"),
        ([0, 9, 0, 1], 0, "unknown result"),
        ([0, -1, 0, 1], 0, "unknown result"),
        ([0, 0, 0, 1], 0, "writes an input"),
        ([0, 2, 0, 3], 1, "before it is written"),
        ([0, 3, 0, 1], 1, "does not write an output"),
        ([], 0, "does not write an output"),
        ([CODES["SUB_SCALED"], 2, 0, 1, 0], 0, "in the place of a tensor"),
    ],
)
def test_a_wrong_program_is_refused(
    program: list[int], temporaries: int, message: str, kernels: Path
) -> None:
    x = np.arange(3, dtype=np.float32)
    with pytest.raises(Exception, match=message):
        run(elementwise(program, temporaries), {"a": x, "b": x}, kernels)


@pytest.mark.parametrize(
    ("spread", "message"),
    [
        ([1], "out of range"),
        ([1, 1, 1, 1], "out of range"),  # of more inputs than there are
        ([0, 1], "no elements to repeat"),
        ([1, 0], "no elements to repeat"),
    ],
)
def test_wrong_spread_inputs_are_refused(spread: list[int], message: str, kernels: Path) -> None:
    x = np.arange(3, dtype=np.float32)
    model = elementwise([CODES["Add"], 2, 0, 1], 0, spread)
    with pytest.raises(Exception, match=message):
        run(model, {"a": x, "b": x}, kernels)
    good = elementwise([CODES["Add"], 2, 0, 1], 0, [1, 2])
    with pytest.raises(Exception, match="spread input is empty"):
        run(good, {"a": x, "b": x[:0]}, kernels)
    (y,) = run(good, {"a": x, "b": x[1:]}, kernels)
    assert y.tolist() == [1, 2, 4]


def test_inputs_of_other_sizes_are_refused(kernels: Path) -> None:
    feeds = {"a": np.zeros(3, np.float32), "b": np.zeros(4, np.float32)}
    with pytest.raises(Exception, match="another shape than the first"):
        run(elementwise([0, 2, 0, 1], 0), feeds, kernels)


def elementwise(
    program: list[int], temporaries: int, spread: Sequence[int] = ()
) -> onnx.ModelProto:
    """y = program(a, b), where b may be spread."""
    a, b, y = (helper.make_tensor_value_info(k, onnx.TensorProto.FLOAT, [None]) for k in "aby")
    node = helper.make_node(
        "Elementwise",
        ["a", "b"],
        ["y"],
        domain=DOMAIN,
        temporaries=temporaries,
        pieces=1,
        tensors=1 if spread else 2,
    )
    for name, numbers in (("program", program), ("spread", spread)):
        ints = onnx.AttributeProto.INTS
        node.attribute.append(helper.make_attribute(name, numbers, attr_type=ints))
    graph = helper.make_graph([node], "g", [a, b], [y])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def test_the_root_is_that_of_ieee_754(kernels: Path) -> None:
    text = "g (float[6] a) => (float[6] y) { u = Sqrt(a)  y = Abs(u) }"
    a = np.array([0, 3e-39, 2, np.inf, -1, np.nan], np.float32)
    with np.errstate(all="ignore"):
        expected = np.abs(np.sqrt(a))
    (found,) = run(with_kernels(parsed(text)), {"a": a}, kernels)
    np.testing.assert_array_equal(found, expected)
