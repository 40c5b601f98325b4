"""Activations are found in each of their spellings, and only there."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from scipy import special

from onnxfit import Trainer
from onnxfit.graph.activations import FoundActivation, activation_of
from onnxfit.graph.logarithms import log_probabilities_of, log_softmax_of, logits_of
from onnxfit.graph.model import infer_shapes
from onnxfit.graph.probabilities import any_number_operator, probability_operator
from onnxfit.graph.values import GraphBuilder
from tests.graph.spellings import LOG_SOFTMAXES, OTHERS, SIGMOIDS, SOFTMAXES, network

Array = np.ndarray[Any, Any]
BIAS = (0.5, -1.25)
FUNCTIONS = {
    "Sigmoid": special.expit,
    "Softmax": lambda z: special.softmax(z, axis=1),
    "LogSoftmax": lambda z: special.log_softmax(z, axis=1),
}
REGISTRY = {"Sigmoid": SIGMOIDS, "Softmax": SOFTMAXES, "LogSoftmax": LOG_SOFTMAXES}
every_spelling = pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, texts in REGISTRY.items() for name in texts]
)


def output(text: str) -> ir.Value:
    return infer_shapes(ir.from_proto(network(text, BIAS))).graph.outputs[0]


def found(body: str, declared: str = "") -> FoundActivation | None:
    text = f'<ir_version: 10, opset_import: ["": 21]> g (float[A, 4, 4] z) => (y) <{declared}>'
    model = infer_shapes(ir.from_onnx_text(f"{text} {{ {body} }}"))
    return activation_of(model.graph.outputs[0])


@every_spelling
def test_a_spelling_computes_its_activation(kind: str, name: str) -> None:
    """The registry itself is right: onnxruntime computes the function."""
    model = network(REGISTRY[kind][name], BIAS)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(0).standard_normal((5, 2)).astype(np.float32)
    (y,) = session.run(None, {"x": x})
    np.testing.assert_allclose(y, FUNCTIONS[kind](x + np.array(BIAS)), rtol=1e-5, atol=1e-6)


@every_spelling
def test_every_spelling_is_found(kind: str, name: str) -> None:
    value = output(REGISTRY[kind][name])
    if kind == "LogSoftmax":
        assert any_number_operator(value) == kind
        assert probability_operator(value) is None
    else:
        expected = {"two classes": "Sigmoid", "two classes of a softmax": "Softmax"}
        assert probability_operator(value) == expected.get(name, kind)


@pytest.mark.parametrize("text", OTHERS.values(), ids=OTHERS)
def test_what_resembles_an_activation_is_none(text: str) -> None:
    value = output(text)
    assert activation_of(value) is None
    assert probability_operator(value) is None


SUM = "e = Exp(z)  s = ReduceSum<keepdims = 0>(e, a)"


@pytest.mark.parametrize(
    ("body", "declared", "axes"),
    [
        (f"{SUM}  u = Unsqueeze(s, a)  y = Div(e, u)", "int64[1] a = {1}", (1,)),
        (f"{SUM}  u = Unsqueeze(s, a)  y = Div(e, u)", "int64[1] a = {-1}", (-1,)),
        (f"{SUM}  u = Unsqueeze(s, a)  y = Div(e, u)", "int64[2] a = {1, 2}", (1, 2)),
        (f"{SUM}  y = Div(e, s)", "int64[1] a = {0}", (0,)),
        # the sum of another row: the sizes are the same, and the axes are not
        (f"{SUM}  y = Div(e, s)", "int64[1] a = {2}", None),
        (f"{SUM}  u = Unsqueeze(s, b)  y = Div(e, u)", "int64[1] a = {1}, int64[1] b = {2}", None),
        (f"{SUM}  u = Unsqueeze(s, b)  y = Div(e, u)", "int64[1] a = {2}, int64[1] b = {1}", None),
        # a Reshape of repeated elements
        (
            "e = Exp(z)  s = ReduceSum(e, a)  f = Shape(z)  u = Expand(s, f)  r = Reshape(u, b)"
            "  y = Div(e, r)",
            "int64[1] a = {2}, int64[3] b = {-1, 4, 4}",
            None,
        ),
        # a transposed sum
        (
            "e = Exp(z)  s = ReduceSum(e, a)  t = Transpose<perm = [0, 2, 1]>(s)  y = Div(e, t)",
            "int64[1] a = {2}",
            None,
        ),
    ],
)
def test_an_element_meets_the_sum_of_its_own_row(
    body: str, declared: str, axes: tuple[int, ...] | None
) -> None:
    activation = found(body, declared)
    assert (None if activation is None else activation.axes) == axes


@pytest.mark.parametrize(
    "body",
    [
        "e = Exp(c)  s = ReduceSum(e, a)  u = Expand(s, w)  y = Div(e, u)",
        "e = Exp(c)  d = Add(e, o)  y = Reciprocal(d)",
    ],
)
def test_scores_of_another_shape_are_none(body: str) -> None:
    """The activation of one row, repeated for others, has no scores of its own shape."""
    declared = "float[1, 1, 4] c = {1, 2, 3, 4}, int64[1] a = {2}, int64[3] w = {1, 3, 1},"
    declared += " float[3, 1] o = {1, 1, 1}"
    assert found(body, declared) is None
    assert found(body.replace("u)", "s)").replace("o)", "n)"), f"{declared}, float n = {{1}}")


def test_a_maximum_of_other_rows_stays_a_part_of_the_scores() -> None:
    """Only a number for each softmax cancels."""
    softmax = "e = Exp(c)  s = ReduceSum(e, a)  y = Div(e, s)"
    own = found(f"m = ReduceMax(z, a)  c = Sub(z, m)  {softmax}", "int64[1] a = {2}")
    declared = "int64[1] a = {2}, int64[1] b = {1}"
    other = found(f"m = ReduceMax(z, b)  c = Sub(z, m)  {softmax}", declared)
    assert own is not None
    assert other is not None
    assert (own.scores.name, other.scores.name) == ("z", "c")
    assert [node.op_type for node in own.nodes] == ["ReduceMax", "Sub", "Exp", "ReduceSum", "Div"]


def test_the_summary_names_the_first_and_last_node() -> None:
    model = network(SOFTMAXES["JAX"], BIAS)
    for node in model.graph.node:
        node.name = f"jax/{node.output[0]}"
    text = " ".join(str(Trainer(model, loss="cross_entropy", weights=["b"]).summary()).split())
    assert "nodes from ReduceMax node 'jax/m' to Div node 'jax/y' compute the output as a Softmax" in text  # fmt: skip


def test_the_summary_names_nodes_that_pass_an_activation_on() -> None:
    model = network(SIGMOIDS["split and joined"], BIAS)
    for node in model.graph.node:
        node.name = node.output[0]
    text = " ".join(str(Trainer(model, loss="bce", weights=["b"]).summary()).split())
    assert "Sigmoid node 'p' computes the output through Split node 'l' and Concat node 'y'" in text


@pytest.mark.parametrize(
    "step",
    ["Neg", "Exp", "Exp Log", "Squeeze", "Cast<to = 1>", "Sigmoid", "Concat"],
)
def test_a_long_chain_is_no_activation(step: str) -> None:
    """Each chain is looked at in linear time, and without recursion; Concat doubles its columns."""
    operators = step.split(" ") if "<" not in step else [step]
    length = 20 if step == "Concat" else 1500
    nodes = []
    for i in range(length):
        operator = operators[i % len(operators)]
        inputs = f"v{i}, v{i}" if operator == "Concat" else f"v{i}"
        operator += "<axis = 1>" if operator == "Concat" else ""
        nodes.append(f"v{i + 1} = {operator}({inputs})")
    text = '<ir_version: 10, opset_import: ["": 21]> g (float[N, 3] v0) => (y)'
    model = ir.from_onnx_text(f"{text} {{ {' '.join(nodes)} y = Identity(v{length}) }}")
    graph = infer_shapes(model).graph
    op, value = GraphBuilder(graph), graph.outputs[0]
    # The last node counts, not those before it.
    assert (logits_of(op, value) is not None) == (step == "Sigmoid")
    assert (log_probabilities_of(op, value) is not None) == (step in ("Sigmoid", "Exp"))
    assert log_softmax_of(op, value) is None
    probability_operator(value)
    any_number_operator(value)
