"""`gradient_model`, `register`, and what the driver sees to: forks, broadcasting, types, captures,
errors.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxfit import GradientError, StepError, Trainer, UnknownNameError, gradient_model
from onnxfit.gradients import NoGradientError, register
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.runtime.compilation import compile_model
from onnxfit.runtime.device import CPU
from tests.builds import needs_builder

PLAIN = {"", "ai.onnx"}


def parse(graph: str, *domains: str) -> onnx.ModelProto:
    imports = ", ".join(['"": 21', *(f'"{d}": 1' for d in domains)])
    model = onnx.parser.parse_model(f"<ir_version: 10, opset_import: [{imports}]> {graph}")
    onnx.checker.check_model(model)
    return model


def run(model: onnx.ModelProto, **feeds: object) -> dict[str, np.ndarray]:
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    arrays = {
        name: (
            np.asarray(value)
            if np.asarray(value).dtype == np.int64 and name == "i"
            else np.asarray(value, np.float32)
        )
        for name, value in feeds.items()
    }
    return dict(zip((o.name for o in model.graph.output), session.run(None, arrays)))


LAYER = (
    "g (float[2,3] x) => (float[2,4] y, float[2,4] h) <float[3,4] w = {1,2,3,4,5,6,7,8,9,10,11,12}>"
    " { h = MatMul(x, w) y = Tanh(h) }"
)


class TestSignature:
    def test_every_float_output_input_and_weight(self) -> None:
        model = gradient_model(parse(LAYER))
        assert [i.name for i in model.graph.input] == ["x", "y_grad", "h_grad"]
        assert [o.name for o in model.graph.output] == ["y", "h", "x_grad", "w_grad"]
        assert {node.domain for node in model.graph.node} <= PLAIN
        x, dy, dh = np.full((2, 3), 0.02), np.ones((2, 4)), np.full((2, 4), 0.5)
        found = run(model, x=x, y_grad=dy, h_grad=dh)
        w = np.arange(1, 13).reshape(3, 4)
        dh = dh + dy * (1 - np.tanh(x @ w) ** 2)
        np.testing.assert_allclose(found["x_grad"], dh @ w.T, rtol=1e-5)
        np.testing.assert_allclose(found["w_grad"], x.T @ dh, rtol=1e-5)

    def test_what_is_asked_for(self) -> None:
        model = gradient_model(parse(LAYER), ["w"], outputs=["h"])
        assert [i.name for i in model.graph.input] == ["x", "h_grad"]
        assert [o.name for o in model.graph.output] == ["y", "h", "w_grad"]
        assert not any("x_grad" in node.output for node in model.graph.node)

    def test_the_model_given_is_not_touched(self) -> None:
        model = parse(LAYER)
        before = model.SerializeToString(deterministic=True)
        gradient_model(model)
        assert model.SerializeToString(deterministic=True) == before

    def test_a_scalar_weight_and_an_integer_input(self) -> None:
        model = gradient_model(
            parse(
                "g (float[3] x, int64[2] i) => (float[2] y) <float a = {2}> { s = Mul(x, a) y ="
                " Gather(s, i) }"
            ),
            ["x", "a"],
        )
        found = run(model, x=[1, 2, 3], i=np.array([2, 2]), y_grad=[1, 10])
        np.testing.assert_allclose(found["x_grad"], [0, 0, 22])
        assert found["a_grad"].shape == ()
        assert found["a_grad"] == 33

    @needs_builder
    def test_both_sources_agree(self) -> None:
        x, dy, dh = np.full((2, 3), 0.02), np.ones((2, 4)), np.full((2, 4), 0.5)
        ours, theirs = (
            (
                run(gradient_model(parse(LAYER), gradient=g), x=x, y_grad=dy, h_grad=dh)
                if g == "onnx"
                else _unchecked(LAYER, x, dy, dh)
            )
            for g in ("onnx", "onnxruntime")
        )
        for name in ours:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5)

    @pytest.mark.parametrize(
        ("settings", "error", "message"),
        [
            ({"wrt": "v"}, UnknownNameError, "No float input or initializer is called 'v'"),
            ({"outputs": "z"}, UnknownNameError, "No float output is called 'z'"),
            ({"gradient": "torch"}, UnknownNameError, "No gradient source is called 'torch'"),
            ({"outputs": []}, ValueError, "selects nothing to differentiate"),
        ],
    )
    def test_names_that_do_not_exist(self, settings, error, message) -> None:
        with pytest.raises(error, match=message):
            gradient_model(parse(LAYER), **settings)

    def test_what_does_not_depend(self) -> None:
        model = parse("g (float[2] a, float[2] b) => (float[2] y) { c = Floor(b) y = Add(a, c) }")
        with pytest.raises(GradientError, match="y does not depend on b in a differentiable way"):
            gradient_model(model, ["a", "b"])
        assert [o.name for o in gradient_model(model).graph.output] == ["y", "a_grad"]
        with pytest.raises(GradientError, match="no float output"):
            gradient_model(parse("g (float[2] a) => (int64[1] y) { y = Shape(a) }"))

    def test_sequences_and_optionals_are_no_tensors_of_floats(self) -> None:
        model = parse(
            "g (float[N,2] x) => (seq(float[N,2]) s, float[N,2] y) { y = Tanh(x) s ="
            " SequenceConstruct(y, x) }"
        )
        assert [o.name for o in gradient_model(model).graph.output] == ["s", "y", "x_grad"]
        with pytest.raises(UnknownNameError, match="No float output is called 's'"):
            gradient_model(model, outputs="s")
        model = parse(
            "g (seq(float[N,2]) s, optional(float[2]) o, float[2] x) => (float[M,2] y) { c ="
            " ConcatFromSequence<axis=0>(s) d = OptionalGetElement(o) e = Mul(c, x) y = Add(e, d) }"
        )
        assert [o.name for o in gradient_model(model).graph.output] == ["y", "x_grad"]
        with pytest.raises(UnknownNameError, match="No float input or initializer is called 's'"):
            gradient_model(model, "s")


def _unchecked(text: str, x: np.ndarray, dy: np.ndarray, dh: np.ndarray) -> dict[str, np.ndarray]:
    model = gradient_model(
        parse(text), gradient="onnxruntime"
    )  # has operators of the training build, which the checker does not know
    session = onnxruntime.InferenceSession(model.SerializeToString())
    feeds = {n: a.astype(np.float32) for n, a in (("x", x), ("y_grad", dy), ("h_grad", dh))}
    return dict(zip((o.name for o in model.graph.output), session.run(None, feeds)))


class TestBodies:
    @pytest.mark.parametrize(
        "draw",
        [
            "RandomNormalLike(h)",
            "RandomUniform<shape=[2]>()",
            "Bernoulli(h)",
            "Dropout(h, ratio, training)",
        ],
    )
    def test_random_numbers_in_a_body_are_refused(self, draw: str) -> None:
        """The gradient computes the body again, and would draw others than the forward pass did."""
        text = f"""g (float[2] x, bool c) => (float[2] y) <float ratio = {{0.5}}, bool training = {{1}}> {{ y = If (c)
            <then_branch = t () => (float[2] a) {{ h = Tanh(x) r = {draw} a = Mul(h, r) }},
             else_branch = e () => (float[2] b) {{ b = Tanh(x) }}> }}"""
        op_type = draw.split("(")[0].split("<")[0]
        with pytest.raises(
            GradientError,
            match=(
                rf"If '.*': its body draws random numbers \({op_type} .*Fix: draw the numbers"
                r" outside"
            ),
        ):
            gradient_model(parse(text), "x", gradient="onnx")

    def test_a_dropout_of_inference_in_a_body_passes(self) -> None:
        text = """g (float[2] x, bool c) => (float[2] y) <float ratio = {0.5}, bool training = {0}> { y = If (c)
            <then_branch = t () => (float[2] a) { r = Dropout(x, ratio, training) a = Mul(x, r) },
             else_branch = e () => (float[2] b) { b = Dropout(x) }> }"""
        model = gradient_model(parse(text), "x", gradient="onnx")
        feeds = {"x": np.array([2, 3], np.float32), "y_grad": np.ones(2, np.float32)}
        session = onnxruntime.InferenceSession(model.SerializeToString())
        np.testing.assert_allclose(
            session.run(["x_grad"], {**feeds, "c": np.array(True)})[0], [4, 6]
        )
        np.testing.assert_allclose(
            session.run(["x_grad"], {**feeds, "c": np.array(False)})[0], [1, 1]
        )

    def test_a_loop_over_a_value_of_unknown_rank(self) -> None:
        text = """g (float[A,B] x, int64 n, bool c) => (float[M] y) { q = Squeeze(x) y = Loop (n, c, q)
            <body = b (int64 i, bool go, float[M] s) => (bool on, float[M] t) { on = Identity(go) m = Mul(s, q) t = Tanh(m) }> }"""
        with pytest.raises(
            GradientError,
            match=(
                r"Loop '.*': the rank of a value that its body uses is unknown. Fix: use static shapes"
            ),
        ):
            gradient_model(parse(text), "x", gradient="onnx")


def test_a_value_clipped_by_itself_below_crossed_bounds_has_its_gradient_once() -> None:
    model = parse("g (float x) => (float y) <float low = {-0.5}> { y = Clip(x, low, x) }")
    for x in (-0.75, 0.25):
        assert run(gradient_model(model, gradient="onnx"), x=x, y_grad=1)["x_grad"] == 1


class TestHigherOrder:
    def test_three_times(self) -> None:
        """y = x^4: 4 x^3, 12 x^2, 24 x."""
        model = parse("g (float[N] x) => (float[N] y) { s = Mul(x, x) y = Mul(s, s) }")
        for output in ("y", "x_grad", "x_grad_2"):
            model = gradient_model(model, "x", outputs=output)
        x, one = np.array([1, -2, 0.5], np.float32), np.ones(3, np.float32)
        found = run(model, x=x, **{i.name: one for i in model.graph.input if i.name != "x"})
        assert [o.name for o in model.graph.output] == ["y", "x_grad", "x_grad_2", "x_grad_3"]
        for name, expected in (("x_grad", 4 * x**3), ("x_grad_2", 12 * x**2), ("x_grad_3", 24 * x)):
            np.testing.assert_allclose(found[name], expected, rtol=1e-5)

    def test_a_gradient_penalty_trains(self) -> None:
        """A critic is pushed towards slope 1 everywhere (Gulrajani et al. 2017): the loss holds a
        gradient, and is differentiated.
        """
        critic = parse(
            """g (float[N,2] x) => (float[N,1] y) <float[2,8] a = {0.5,-1,0.3,0.2,0.1,-0.7,0.9,-0.4,0.6,0.8,-0.3,0.4,0.2,-0.5,0.1,0.7},
               float[8] b = {0,0.1,0,-0.1,0,0.2,0,0},
               float[8,1] c = {1,-0.5,0.4,0.3,0.2,0.6,0.7,-0.9}> { h = MatMul(x, a) i = Add(h, b) t = Tanh(i) y = MatMul(t, c) }"""
        )
        model = gradient_model(critic, "x")
        helper = onnx.helper
        for proto in (
            helper.make_node("Mul", ["x_grad", "x_grad"], ["squared"]),
            helper.make_node("ReduceSum", ["squared", "one_axis"], ["norm2"], keepdims=0),
            helper.make_node("Sqrt", ["norm2"], ["norm"]),
            helper.make_node("Sub", ["norm", "unit"], ["off"]),
            helper.make_node("Mul", ["off", "off"], ["off2"]),
            helper.make_node("ReduceMean", ["off2"], ["loss"], keepdims=0),
        ):
            model.graph.node.append(proto)
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "one_axis"))
        model.graph.initializer.append(
            onnx.numpy_helper.from_array(np.array(1, np.float32), "unit")
        )
        del model.graph.output[:]
        model.graph.output.append(helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, []))
        trainer = Trainer(model, ["a", "b", "c"], optimizer="adam", gradient="onnx")
        trainer.learning_rate = 0.02
        batch = {
            "x": np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32),
            "y_grad": np.ones((64, 1), np.float32),
        }
        first = trainer.train_on_batch(batch)["loss"]
        for _ in range(150):
            last = trainer.train_on_batch(batch)["loss"]
        assert first > 0.1
        assert last < 0.02 * first


@pytest.mark.usefixtures("table_of_rules_restored")
class TestRegister:
    MODEL = "g (float[3] x) => (float[3] y) { h = Round(x) y = Mul(h, h) }"

    def test_a_rule_where_there_is_none(self) -> None:
        """Rounding, straight through (Bengio et al. 2013)."""
        with pytest.raises(GradientError, match="does not depend on x"):
            gradient_model(parse(self.MODEL), "x")

        @register("Round")
        def straight_through(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Value:
            return dy

        found = run(gradient_model(parse(self.MODEL), "x"), x=[0.4, 1.6, -2.7], y_grad=[1, 1, 1])
        np.testing.assert_allclose(found["x_grad"], [0, 4, -6])

    def test_a_rule_in_place_of_another(self) -> None:
        @register("Tanh")
        def reversed_(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Value:
            return -dy

        found = run(
            gradient_model(parse("g (float[2] x) => (float[2] y) { y = Tanh(x) }")),
            x=[0.1, 0.2],
            y_grad=[1, 2],
        )
        np.testing.assert_allclose(found["x_grad"], [-1, -2])

    def test_an_operator_of_another_domain_with_attributes_and_an_absent_input(self) -> None:
        @register("NGramRepeatBlock", "com.microsoft")
        def block(
            op: GraphBuilder,
            ids: Value,
            scores: Value,
            extra: Value | None,
            y: Value,
            dy: Value,
            *,
            ngram_size: int,
            depth: int = 7,
        ):
            assert (extra, ngram_size, depth) == (None, 2, 7)
            return None, dy * 2, None

        text = """g (int64[1,3] i, float[1,4] x) => (float[1,4] y) <float one = {1}>
            { r = com.microsoft.NGramRepeatBlock<ngram_size = 2>(i, x) y = Mul(r, one) }"""
        model = onnx.parser.parse_model(
            f'<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]> {text}'
        )
        model.graph.value_info.append(onnx.helper.make_tensor_value_info("r", 1, [1, 4]))
        made = gradient_model(model, "x", gradient="onnx")
        session = onnxruntime.InferenceSession(made.SerializeToString())
        feeds = {
            "i": np.array([[0, 1, 2]]),
            "x": np.ones((1, 4), np.float32),
            "y_grad": np.full((1, 4), 3, np.float32),
        }
        np.testing.assert_allclose(session.run(["x_grad"], feeds)[0], np.full((1, 4), 6))

    def test_a_signature_that_is_none_of_a_rule(self) -> None:
        with pytest.raises(
            TypeError,
            match=r"op, its inputs, its outputs, and 'd' \+ name.*shrink has \(op, x, y, g\)",
        ):

            @register("Shrink")
            def shrink(op, x, y, g):
                return g

    def test_too_few_entries_and_a_wrong_shape_are_the_rules_fault(self) -> None:
        @register("Mul")
        def mul(op: GraphBuilder, a: Value, b: Value, y: Value, dy: Value) -> Value:
            return dy

        model = parse("g (float[2] a, float[2] b) => (float[2] y) { y = Mul(a, b) }")
        with pytest.raises(
            GradientError, match="The rule of Mul returned 1 entries for the 2 inputs"
        ):
            gradient_model(model)

        @register("Mul")
        def again(op: GraphBuilder, a: Value, b: Value, y: Value, dy: Value):
            return op.ReduceSum(dy, keepdims=0), dy

        with pytest.raises(
            GradientError,
            match=r"The rule of Mul returned a gradient of shape \(\) for an input of shape \(2,\)",
        ):
            gradient_model(model)

    def test_all_that_refuse_are_named_at_once(self) -> None:
        @register("Tanh")
        def tanh(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Value:
            raise NoGradientError("it is Tuesday", "wait")

        @register("Sin")
        def sin(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Value:
            raise NoGradientError("it is dark")

        model = parse("g (float[2] x) => (float[2] y) { h = Tanh(x) k = Exp(h) y = Sin(k) }")
        with pytest.raises(
            GradientError, match=r"(?s)Tanh.*it is Tuesday. Fix: wait.*Sin.*it is dark. Fix: freeze"
        ) as error:
            gradient_model(model, gradient="onnx")
        assert "Exp" not in str(error.value)


class TestDriver:
    def test_a_value_used_many_times(self) -> None:
        model = gradient_model(
            parse(
                "g (float[2] x) => (float[2] y) { a = Mul(x, x) b = Mul(a, x) c = Add(a, b) y ="
                " Add(c, x) }"
            )
        )
        x = np.array([2, 3], np.float32)
        np.testing.assert_allclose(
            run(model, x=x, y_grad=np.ones(2))["x_grad"], 2 * x + 3 * x**2 + 1
        )

    @pytest.mark.parametrize("sizes", ["2,3", "A,B"])
    def test_the_first_layer_asks_for_no_gradient_of_the_data(self, sizes: str) -> None:
        model = gradient_model(
            parse(
                f"g (float[{sizes}] x) => (float[M,N] y) <float[3,2] w = {{1,2,3,4,5,6}}> {{ h ="
                " MatMul(x, w) y = Tanh(h) }"
            ),
            "w",
        )
        products = [n.op_type for n in model.graph.node if n.op_type in ("MatMul", "Gemm")]
        assert len(products) == 2  # forward, and the weight's gradient

    def test_mixed_types(self) -> None:
        model = gradient_model(
            parse("g (float[2] x) => (double[2] y) { d = Cast<to=11>(x) y = Mul(d, d) }")
        )
        session = onnxruntime.InferenceSession(model.SerializeToString())
        (found,) = session.run(
            ["x_grad"], {"x": np.array([2, 3], np.float32), "y_grad": np.ones(2)}
        )
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, [4, 6])

    def test_sizes_that_broadcast_only_at_run_time(self) -> None:
        model = gradient_model(
            parse("g (float[A,B] a, float[C,D] b) => (float[E,F] y) { y = Mul(a, b) }")
        )
        a, b = np.arange(3, dtype=np.float32)[:, None], np.arange(1, 3, dtype=np.float32)[None]
        found = run(model, a=a, b=b, y_grad=np.ones((3, 2)))
        np.testing.assert_allclose(found["a_grad"], np.full((3, 1), 3))
        np.testing.assert_allclose(found["b_grad"], np.full((1, 2), 3))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "(float[2] a) => (float[2] y) { b = my.domain.Swish(a) y = Tanh(b) }",
            r"Swish 'node': there is no rule for my.domain::Swish",
        ),
        (
            "(float[2] a) => (float[2] y) { s = SequenceConstruct(a, a) y = my.domain.Pick(s) }",
            r"there is no rule for my.domain::Pick",
        ),
    ],
)
def test_what_blocks_is_named(text: str, message: str) -> None:
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21, "my.domain": 1]> g {text}'
    )
    with pytest.raises(GradientError, match=message):
        gradient_model(model)


def test_half_precision_is_differentiated() -> None:
    model = gradient_model(parse("g (float16[2,3] a) => (float16[2,3] y) { y = Mul(a, a) }"))
    half = np.float16
    a, dy = np.arange(6, dtype=half).reshape(2, 3), np.full((2, 3), 3, half)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    (found,) = session.run(["a_grad"], {"a": a, "y_grad": dy})
    assert found.dtype == half
    np.testing.assert_array_equal(found, 2 * a * dy)


def test_an_error_of_onnxruntime_tells_whose_gradient_failed() -> None:
    model = gradient_model(parse("g (float[2,3] a) => (float[2,3] y) { [squash] y = Tanh(a) }"))
    made = next(node for node in model.graph.node if node.name.startswith("gradient/"))
    made.op_type = "Einsum"
    with pytest.raises(StepError, match=r"made by the gradient of 'squash'"):
        compile_model(model, CPU, None, "train")
