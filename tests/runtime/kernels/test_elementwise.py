"""Groups of elementwise nodes: no circle, the same bits, and the updates that they are made for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxfit.gradients.update import initial_slots
from onnxfit.optimizers import SGD, Adam, Optimizer
from onnxfit.registry import registry
from onnxfit.runtime.kernels import with_kernels
from onnxfit.runtime.kernels.program import CODES
from tests.runtime.kernels.sessions import kernel_types, parsed, run

OPTIMIZERS = {
    **{name: kind() for name, kind in registry("onnxfit.optimizers", Optimizer).items()},
    "momentum": SGD(0.1, momentum=0.9),
    "nesterov": SGD(0.1, momentum=0.9, nesterov=True),
    "dampened": SGD(0.1, momentum=0.9, dampening=0.3),
    "amsgrad": Adam(0.1, amsgrad=True),
    "decayed": Adam(0.1, weight_decay=0.1),
    "averaged": Adam(0.1, ema_momentum=0.9),
}
# Kernels in place of the operators of an update. Those of others are reductions, or one operator.
ONE_KERNEL = {name for name, o in OPTIMIZERS.items() if o.elementwise} - {"sgd", "lion", "adadelta"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_update_of_every_optimizer_is_the_same(name: str, kernels: Path) -> None:
    optimizer = OPTIMIZERS[name]
    for shape in ((7,), (3, 5), (33, 513)):
        model = optimizer.build_onnx_function(shape)
        faster = with_kernels(model)
        rng = np.random.default_rng(0)
        w = rng.standard_normal(shape).astype(np.float32)
        feeds = {"weight": w, "gradient": rng.standard_normal(shape).astype(np.float32)}
        feeds["learning_rate"] = np.array(0.1, np.float32)
        for slot, value in initial_slots(optimizer, "weight", w).items():
            feeds[f"weight/{slot}"] = np.asarray(value + rng.random(value.shape), value.dtype)
        feeds["step"] = np.array(3)
        feeds = {v.name: feeds[v.name] for v in model.graph.input}
        for found, right in zip(run(faster, feeds, kernels), run(model, feeds), strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", sorted(ONE_KERNEL))
def test_an_elementwise_update_is_one_kernel(name: str) -> None:
    assert kernel_types(OPTIMIZERS[name].build_onnx_function((3, 5))) == ["Elementwise"]


def test_adam_and_momentum_need_one_instruction_for_each_result() -> None:
    expected = {
        "adam": ["AVERAGE", "AVERAGE_OF_SQUARES", "NORMALIZED_STEP"],
        "momentum": ["SCALE_ADD", "SUB_SCALED"],
    }
    for name, instructions in expected.items():
        nodes = with_kernels(OPTIMIZERS[name].build_onnx_function((3, 5))).graph.node
        program = list(next(n for n in nodes if n.op_type == "Elementwise").attribute[0].ints)
        lengths = {"SUB_SCALED": 5, "SCALE_ADD": 5, "NORMALIZED_STEP": 7}
        for instruction in instructions:
            assert program[0] == CODES[instruction]
            program = program[lengths.get(instruction, 6) :]
        assert program == []


def test_float64_is_fused_and_integers_are_not() -> None:
    body = "{ u = Add(a, a)  y = Mul(u, a) }"
    found = {
        kind: kernel_types(parsed(f"g ({kind}[3] a) => ({kind}[3] y) {body}"))
        for kind in ("float", "double", "int32", "float16")
    }
    assert found == {
        "float": ["Elementwise"],
        "double": ["Elementwise64"],
        "int32": [],
        "float16": [],
    }


def test_operators_of_the_model_itself_stay(kernels: Path) -> None:
    text = "g (float[3] a) => (float[3] y) { u = Add(a, a)  y = Mul(u, a) }"
    assert kernel_types(parsed(text, scope="encoder")) == []
    assert kernel_types(parsed(text)) == ["Elementwise"]


def test_a_model_without_groups_is_returned_itself() -> None:
    model = parsed("g (float[3] a) => (float[3] y) { y = Add(a, a) }")
    assert with_kernels(model) is model


def test_a_node_outside_separates_a_group() -> None:
    # z needs u by way of s, which needs all elements of u
    text = (
        "g (float[3] a) => (float[3] z)"
        "{ t = Mul(a, a)  u = Add(t, a)  s = Softmax(u)  v = Mul(s, s)  z = Add(u, v) }"
    )
    model = parsed(text)
    assert [n.op_type for n in with_kernels(model).graph.node] == [
        "Elementwise",
        "Softmax",
        "Elementwise",
    ]


OPERATORS = st.sampled_from(["Add", "Mul", "Max", "Sub", "Softmax", "Neg", "Sqrt"])


@settings(max_examples=60)
@given(st.data())
def test_random_graphs_keep_their_results(library_file: Path, data: st.DataObject) -> None:
    values, lines = ["a", "b", "s"], []
    for i in range(data.draw(st.integers(2, 14))):
        op_type = data.draw(OPERATORS)
        count = 1 if op_type in ("Softmax", "Neg", "Sqrt") else 2
        known = values if count == 2 else [v for v in values if v != "s"]
        read = [data.draw(st.sampled_from(known)) for _ in range(count)]
        if read == ["s", "s"]:
            read[0] = "a"
        lines.append(f"v{i} = {op_type}({', '.join(read)})")
        values.append(f"v{i}")
    results = data.draw(st.sets(st.sampled_from(values[3:]), min_size=1)) | {values[-1]}
    outputs = ", ".join(f"float[5] {name}" for name in sorted(results))
    model = parsed(f"g (float[5] a, float[5] b, float s) => ({outputs}) {{ {' '.join(lines)} }}")
    feeds = {
        "a": np.array([1, -2, 0.5, 3, 0], np.float32),
        "b": np.array([0.1, 7, -1, 2, 4], np.float32),
        "s": np.array(0.75, np.float32),
    }
    faster = with_kernels(model)
    seen = set(feeds)
    for node in faster.graph.node:
        assert seen.issuperset(node.input)
        seen.update(node.output)
    for found, right in zip(run(faster, feeds, library_file), run(model, feeds), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5)
