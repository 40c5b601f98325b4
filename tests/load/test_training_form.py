"""BatchNormalization, Dropout and random numbers in training and evaluation."""

from __future__ import annotations

import statistics
import warnings
from typing import Any

import numpy as np
import onnx.parser
import onnx.reference
import pytest

from onnxfit import Trainer
from onnxfit.errors import ModelError
from onnxfit.graph.random import normal
from onnxfit.graph.values import GraphBuilder
from onnxfit.load.normalize import normalize
from onnxfit.load.training_form import to_evaluation_form, to_training_form, updated_statistics
from tests.graph.graphs import empty, parse, run

NORM = """<ir_version: 10, opset_import: ["": 21]> g (float[N, 3, 5] x) => (float[N, 3, 5] y)
  <float[3] scale = {1, 2, 3}, float[3] bias = {0, 1, -1}, float[3] mean = {0.5, 0, -1}, float[3] var = {1, 2, 4}>
  { y = BatchNormalization<epsilon = 0.01, momentum = 0.8>(x, scale, bias, mean, var) }"""


class TestTrainingForm:
    x = np.random.default_rng(1).normal(1, 2, (4, 3, 5)).astype(np.float32)

    @staticmethod
    def op(text: str) -> GraphBuilder:
        return GraphBuilder(normalize(parse(text)).graph)

    def train(self, op: GraphBuilder, weights, batch_norm="train"):
        seed, step = op.input("seed", np.int64, ()), op.input("step", np.int64, ())
        for name, value in to_training_form(op, weights, batch_norm, seed, step).items():
            op.output(f"{name}/next", value)
        return run(op, x=self.x, seed=np.array(0), step=np.array(0))

    def test_batch_statistics_and_running_statistics_follow_the_specification(self) -> None:
        found = self.train(self.op(NORM), ["scale"])
        expected = onnx.reference.ReferenceEvaluator(
            parse(
                NORM.replace("(float[N, 3, 5] y)", "(float[N, 3, 5] y, float[3] m, float[3] v)")
                .replace("y = Batch", "y, m, v = Batch")
                .replace("0.8>", "0.8, training_mode = 1>")
            )
        ).run(None, {"x": self.x})
        for name, value in zip(("y", "mean/next", "var/next"), expected):
            np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=1e-6)

    @pytest.mark.parametrize(("weights", "batch_norm"), [([], "train"), (["scale"], "frozen")])
    def test_frozen_is_the_inference_form(self, weights, batch_norm) -> None:
        found = self.train(self.op(NORM), weights, batch_norm)
        (expected,) = onnx.reference.ReferenceEvaluator(parse(NORM)).run(None, {"x": self.x})
        np.testing.assert_allclose(found["y"], expected, rtol=1e-5, atol=1e-6)
        assert list(found) == ["y"]

    def test_which_statistics_a_step_updates(self) -> None:
        model = normalize(parse(NORM))
        assert updated_statistics(model, ["bias"], "train") == ["mean", "var"]
        assert (
            updated_statistics(model, ["bias"], "frozen")
            == updated_statistics(model, ["other"], "train")
            == []
        )

    def test_dropout_keeps_the_mean_and_drops_its_share(self) -> None:
        text = (
            '<ir_version: 10, opset_import: ["": 21]> g (float[N, 3, 5] x) => (float[N, 3, 5] y)'
            " <float ratio = {0.25}> { y = Dropout(x, ratio) }"
        )
        op = self.op(text)
        seed, step = op.input("seed", np.int64, ()), op.input("step", np.int64, ())
        to_training_form(op, [], "train", seed, step)
        y = run(op, x=np.ones((400, 3, 5), np.float32), seed=np.array(0), step=np.array(0))["y"]
        assert set(np.unique(y)) == {np.float32(0), np.float32(1 / 0.75)}
        assert abs((y == 0).mean() - 0.25) < 0.02

    @pytest.mark.parametrize("ratio", [2.0**-18, 0.05, 0.1, 0.5, 2 / 3, 0.999999, 1.0])
    def test_a_constant_ratio_drops_the_same_elements_as_a_ratio_that_is_an_input(
        self, ratio: float
    ) -> None:
        found = []
        share = np.array(ratio, np.float32)
        given = f"<float ratio = {{{ratio!r}}}>"
        for inputs, constants in (("", given), (", float ratio", "")):
            op = self.op(
                f'<ir_version: 10, opset_import: ["": 21]> g (float[N, 1000] x{inputs}) =>'
                f" (float[N, 1000] y) {constants} {{ y = Dropout(x, ratio) }}"
            )
            seed, step = op.input("seed", np.int64, ()), op.input("step", np.int64, ())
            to_training_form(op, [], "train", seed, step)
            feeds = {"ratio": share} if inputs else {}
            x = np.ones((300, 1000), np.float32)
            y = run(op, x=x, seed=np.array(0), step=np.array(0), **feeds)["y"]
            found.append(y)
        np.testing.assert_array_equal(found[0], found[1])
        assert abs((found[0] == 0).mean() - ratio) < 0.005

    @pytest.mark.parametrize(
        ("node", "mean", "deviation"),
        [
            ("RandomNormalLike<mean = 2.0, scale = 3.0>(x)", 2.0, 3.0),
            ("RandomNormal<shape = [4, 5000]>()", 0.0, 1.0),
            ("RandomUniformLike<low = -1.0, high = 5.0>(x)", 2.0, 6 / np.sqrt(12)),
            ("RandomUniform<shape = [4, 5000]>()", 0.5, 1 / np.sqrt(12)),
            ("Bernoulli(x)", 0.3, np.sqrt(0.21)),
        ],
    )
    def test_what_is_random_has_its_distribution_and_repeats_by_seed_and_step(
        self, node: str, mean: float, deviation: float
    ) -> None:
        text = (
            '<ir_version: 10, opset_import: ["": 21]> g (float[N, 5000] x) => (float[K, M] y) { r'
            f" = {node} y = Identity(r) }}"
        )
        op = self.op(text)
        seed, step = op.input("seed", np.int64, ()), op.input("step", np.int64, ())
        to_training_form(op, [], "train", seed, step)
        x = np.full((4, 5000), 0.3, np.float32)
        draws = [
            run(op, x=x, seed=np.array(a), step=np.array(b))["y"]
            for a, b in ((0, 0), (0, 0), (1, 0), (0, 1))
        ]
        assert abs(draws[0].mean() - mean) < 5 * deviation / np.sqrt(20000)
        assert abs(draws[0].std() - deviation) < 0.03 * deviation
        np.testing.assert_array_equal(draws[0], draws[1])
        for other in draws[2:]:
            assert abs(np.corrcoef(draws[0].ravel(), other.ravel())[0, 1]) < 0.04

    def test_normal_numbers_are_normal(self) -> None:
        op, (x, s, t) = empty(
            ("x", np.float32, ("N",)), ("seed", np.int64, ()), ("step", np.int64, ())
        )
        op.output("z", normal(op, op.shape(x), s, t, 0))
        z = np.sort(run(op, x=np.zeros(20000, np.float32), seed=np.array(0), step=np.array(0))["z"])
        expected = np.array([statistics.NormalDist().cdf(v) for v in z])
        # Kolmogorov and Smirnov, 0.1 %
        assert np.abs(expected - np.arange(20000) / 20000).max() < 1.95 / np.sqrt(20000)

    def test_a_dropout_of_nothing_draws_nothing(self) -> None:
        text = (
            '<ir_version: 10, opset_import: ["": 21]> g (float[N, 3, 5] x) => (float[N, 3, 5] y)'
            " <float ratio = {0}> { y = Dropout(x, ratio) }"
        )
        op = self.op(text)
        to_training_form(
            op, [], "train", op.input("seed", np.int64, ()), op.input("step", np.int64, ())
        )
        assert [node.op_type for node in op.graph] == ["Identity"]

    LOOP = """g (float[N, 3, 5] x) => (float[K, N, 3, 5] y) <float ratio = {0.5}, int64 trips = {3}, bool yes = {1}> {
        y = Loop (trips, yes) <body = pass (int64 i, bool go) => (bool go_on, float[N, 3, 5] d) { go_on = Identity(go)  d = Dropout(x, ratio) }> }"""
    BRANCH = """g (float[N, 3, 5] x) => (float[N, 3, 5] y) <float ratio = {0.5}, int64 none = {0}> {
        size = Size(x)  chosen = Greater(size, none)
        y = If (chosen) <then_branch = t () => (float[N, 3, 5] d) { d = Dropout(x, ratio) },
        else_branch = e () => (float[N, 3, 5] z) { z = Neg(x) }> }"""
    SCAN = """g (float[N, 3, 5] x) => (float[N, 3, 5] y) <float ratio = {0.5}> {
        y = Scan<num_scan_inputs = 1, body = step (float[3, 5] a) => (float[3, 5] b) { b = Dropout(a, ratio) }>(x) }"""

    @pytest.mark.parametrize("text", [LOOP, BRANCH], ids=["Loop", "If"])
    def test_a_dropout_inside_a_body_draws_by_seed_step_and_iteration(self, text: str) -> None:
        op = self.op('<ir_version: 10, opset_import: ["": 21]> ' + text)
        seed, step = op.input("seed", np.int64, ()), op.input("step", np.int64, ())
        to_training_form(op, [], "train", seed, step)
        x = np.ones((200, 3, 5), np.float32)
        draws = [
            run(op, x=x, seed=np.array(a), step=np.array(b))["y"]
            for a, b in ((0, 0), (0, 0), (1, 0), (0, 1))
        ]
        np.testing.assert_array_equal(draws[0], draws[1])
        different = [draws[0], *draws[2:]] if draws[0].ndim == 3 else [*draws[0], *draws[2]]
        for mask in different:
            assert set(np.unique(mask)) == {0, 2}
            assert abs(mask.mean() - 1) < 0.1
        assert (
            np.abs(np.corrcoef([mask.ravel() for mask in different]) - np.eye(len(different)))
            < 0.08
        ).all()
        to_evaluation = self.op('<ir_version: 10, opset_import: ["": 21]> ' + text)
        to_evaluation_form(to_evaluation)
        assert (run(to_evaluation, x=x)["y"] == 1).all()

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            (SCAN, r"Dropout '.*' inside Scan '.*' cannot be trained: it would draw the same random numbers"),
            (BRANCH.replace("Dropout(x, ratio)", "BatchNormalization(x, s, s, s, s)").replace("float ratio = {0.5}", "float[3] s = {1, 1, 1}"),
             r"BatchNormalization '.*' inside If '.*' cannot use batch statistics.*batch_norm='frozen'"),
        ],
    )  # fmt: skip
    def test_what_has_no_training_form_inside_a_body(self, body: str, message: str) -> None:
        op = self.op('<ir_version: 10, opset_import: ["": 21]> ' + body)
        with pytest.raises(ModelError, match=message):
            to_training_form(
                op, ["s"], "train", op.input("seed", np.int64, ()), op.input("step", np.int64, ())
            )

    @pytest.mark.parametrize("mode", ["", ", mode"])
    def test_evaluation_never_drops(self, mode: str) -> None:
        text = f"""<ir_version: 10, opset_import: ["": 21]> g (float[N, 3, 5] x) => (float[N, 3, 5] y)
            <float ratio = {{0.25}}, bool mode = {{1}}> {{ y = Dropout(x, ratio{mode}) }}"""
        op = self.op(text)
        to_evaluation_form(op)
        np.testing.assert_array_equal(run(op, x=self.x)["y"], self.x)

    def test_evaluation_uses_running_statistics_whatever_the_file_says(self) -> None:
        op = self.op(NORM.replace("0.8>", "0.8, training_mode = 1>"))
        to_evaluation_form(op)
        (expected,) = onnx.reference.ReferenceEvaluator(parse(NORM)).run(None, {"x": self.x})
        np.testing.assert_allclose(run(op, x=self.x)["y"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ratio", [np.nan, np.inf, -0.5, 1.5])
def test_a_ratio_that_is_no_probability_is_refused(ratio: float) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[N,3] x) => (float[N,3] y)'
        " <float[3] w = {1,2,3}, bool mode = {1}> { h = Mul(x, w)  y = Dropout(h, ratio, mode) }"
    )
    model.graph.initializer.append(
        onnx.numpy_helper.from_array(np.array(ratio, np.float32), "ratio")
    )
    x = np.ones((2, 3), np.float32)
    with pytest.raises(ModelError, match="expected a number from 0 to 1"):
        Trainer(model, loss="mse").train_on_batch(x, x)


BATCH_NORM = """<ir_version: 8, opset_import: ["": 17]>
    g (float[N, 3] x) => (float[N, 2] y)
    <float[3] s = {{1, 1, 1}}, float[3] b = {{0, 0, 0}}, float[3] mean = {{0, 0, {mean}}},
     float[3] var = {{1, 1, 1}}, float[3, 2] v = {{1, 2, 3, 4, 5, 6}}>
    {{ n, m2, v2 = BatchNormalization<training_mode = 1>(x, s, b, mean, var)
       y = MatMul(n, v) }}"""


@pytest.mark.parametrize(
    ("mean", "settings", "warns"),
    [
        (0, {"weights": ["v"]}, True),
        (0, {"batch_norm": "frozen"}, True),
        (0, {"loss": None}, True),  # it can only predict
        (0, {}, False),  # training measures the statistics
        (0.5, {"weights": ["v"]}, False),  # they have been measured
    ],
)
def test_a_batch_norm_without_measured_statistics_warns(
    mean: float, settings: dict[str, Any], warns: bool
) -> None:
    """The file normalizes by the batch; `predict` would use means of 0 and variances of 1."""
    model = onnx.parser.parse_model(BATCH_NORM.format(mean=mean))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Trainer(model, **{"loss": "mse", **settings})
    messages = [str(w.message) for w in caught]
    assert len(messages) == warns
    assert all("normalizes by the batch in the file" in message for message in messages)
