"""Values with arithmetic, reading models, choosing weights, and the training form."""

from __future__ import annotations

import statistics

import numpy as np
import onnx
import onnx.parser
import onnx.reference
import onnx_ir as ir
import onnxruntime
import pytest

from onnxfit import Trainer
from onnxfit.errors import ModelError, SettingError, UnknownNameError
from onnxfit.graph.model import normalize, specialize_shapes, with_initializers
from onnxfit.graph.opset import IR_VERSION, OPSET
from onnxfit.graph.random import normal, uniform
from onnxfit.graph.reading import read_model
from onnxfit.graph.training_form import to_evaluation_form, to_training_form, updated_statistics
from onnxfit.graph.values import GraphBuilder
from onnxfit.graph.weights import all_weights, select_weights

LINEAR = (
    '<ir_version: 8, opset_import: ["": 17]> line (float[N, 2] x) => (float[N, 1] y) <float[2, 1] w'
    " = {1, 2}, float[1] b = {3}>"
)


def parse(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(text)


def linear() -> onnx.ModelProto:
    return parse(LINEAR + " { s = MatMul(x, w)  y = Add(s, b) }")


def empty(*inputs: tuple[str, type, tuple[int | str, ...]]) -> tuple[GraphBuilder, list]:
    op = GraphBuilder(ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="g"))
    return op, [op.input(*i) for i in inputs]


def run(op: GraphBuilder, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    proto = ir.to_proto(ir.Model(op.graph, ir_version=IR_VERSION))
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds)))


class TestValues:
    def test_arithmetic_is_numpy_arithmetic(self) -> None:
        op, (x, y) = empty(("x", np.float32, (3,)), ("y", np.float32, (3,)))
        a, b = np.array([1.0, -2, 3], np.float32), np.array([2.0, 4, 0.5], np.float32)

        def formula(x, y):  # the very same expression on values and on arrays
            return ((2 - x) * y / (abs(x) + 1) - -x) ** 2 + 2**y

        op.output("z", formula(x, y))
        np.testing.assert_allclose(run(op, x=a, y=b)["z"], formula(a, b), rtol=1e-6)

    @pytest.mark.parametrize(
        ("symbol", "numpy"),
        [(">", np.greater), ("<", np.less), (">=", np.greater_equal), ("<=", np.less_equal)],
    )
    def test_comparisons(self, symbol: str, numpy: np.ufunc) -> None:
        op, (x,) = empty(("x", np.float32, (3,)))
        op.output("z", eval(f"x {symbol} 1", {"x": x}))
        values = np.array([0, 1, 2], np.float32)
        np.testing.assert_array_equal(run(op, x=values)["z"], numpy(values, 1))

    def test_a_number_takes_the_type_it_meets(self) -> None:
        _op, (x, n) = empty(("x", np.float64, (3,)), ("n", np.int64, (3,)))
        assert (x * 0.1).dtype == np.float64
        assert (n + 1).dtype == np.int64

    def test_equal_constants_are_one_initializer(self) -> None:
        op, (x,) = empty(("x", np.float32, (3,)))
        op.output("z", x * 2 + 2)
        assert len(op.graph.initializers) == 1

    def test_shapes_are_known_while_building(self) -> None:
        op, (x,) = empty(("x", np.float32, ("N", 4)))
        assert op.ReduceSum(x, [1], keepdims=0).shape == ("N",)
        assert op.Reshape(x, [-1, 2, 2]).rank == 3

    def test_shapes_that_cannot_meet_are_refused_where_they_meet(self) -> None:
        _op, (x, y) = empty(("x", np.float32, (3,)), ("y", np.float32, (4,)))
        with pytest.raises(ValueError, match=r"Add does not accept"):
            x + y

    def test_an_output_may_also_be_used(self) -> None:
        op, (x,) = empty(("x", np.float32, (2,)))
        y = x * 3
        op.output("a", y)
        op.output("b", y)  # once more under another name
        op.output("c", x)  # an input as output
        op.output("d", y + 1)
        found = run(op, x=np.array([1, 2], np.float32))
        assert {k: v.tolist() for k, v in found.items()} == {
            "a": [3, 6],
            "b": [3, 6],
            "c": [1, 2],
            "d": [4, 7],
        }

    @pytest.mark.parametrize("outputs", [0, -1, True, 1.0, "2"])
    def test_a_number_of_outputs_is_a_whole_number_from_1_on(self, outputs: object) -> None:
        op, (x,) = empty(("x", np.float32, (4,)))
        with pytest.raises(ValueError, match=f"_outputs={outputs!r} of Split.*1 or more"):
            op.Split(x, _outputs=outputs, num_outputs=2)
        assert not len(op.graph)

    def test_more_outputs_than_an_operator_has_are_refused(self) -> None:
        op, (x,) = empty(("x", np.float32, (4,)))
        with pytest.raises(ValueError, match="_outputs=3 of TopK: the operator has 2 at most"):
            op.TopK(x, [2], _outputs=3)
        assert not len(op.graph)
        assert [v.dtype for v in op.TopK(x, [2], _outputs=2)] == [np.float32, np.int64]

    def test_one_output_of_several_may_be_asked_for(self) -> None:
        op, (x,) = empty(("x", np.float32, (4,)))
        (values,) = op.TopK(x, [2], _outputs=1)
        assert values.shape == (2,)
        assert len(values.ir.producer().outputs) == 2
        assert len(op.Split(x, _outputs=4, num_outputs=4)) == 4
        assert len(op.Anything(x, _domain="test", _outputs=3)) == 3


class TestReadingModels:
    def test_path_bytes_and_proto_give_the_same(self, tmp_path) -> None:
        model = linear()
        path = tmp_path / "m.onnx"
        onnx.save(model, path)
        for source in (model, model.SerializeToString(), path, str(path)):
            assert read_model(source).SerializeToString() == model.SerializeToString()

    def test_the_callers_model_is_not_touched(self) -> None:
        model = linear()
        before = model.SerializeToString()
        normalize(read_model(model)).graph.initializers.pop("w")
        assert model.SerializeToString() == before

    def test_external_data_is_read_from_a_path_and_refused_in_a_bare_proto(self, tmp_path) -> None:
        path = tmp_path / "m.onnx"
        model = linear()
        model.graph.initializer[0].CopyFrom(
            onnx.numpy_helper.from_array(np.array([[1], [2]], np.float32), "w")
        )
        onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
        assert onnx.numpy_helper.to_array(read_model(path).graph.initializer[0]).tolist() == [
            [1],
            [2],
        ]
        with pytest.raises(ModelError, match=r"keeps weights in other files.*pass the path"):
            read_model(onnx.load(path, load_external_data=False))

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("nowhere.onnx", r"There is no file 'nowhere.onnx'"),
            (b"not a model", r"the 11 bytes given is not an ONNX model"),
            (b"", r"not a valid ONNX model"),
            (3, r"A model is a path, bytes or an onnx.ModelProto, got int"),
        ],
    )
    def test_what_is_no_model_is_one_clear_error(self, source, message) -> None:
        with pytest.raises(ModelError, match=message):
            read_model(source)

    @pytest.mark.parametrize("opset", range(12, onnx.defs.onnx_opset_version() + 1))
    def test_every_opset_from_12_is_brought_to_the_working_one(self, opset: int) -> None:
        model = parse(
            LINEAR.replace("17", str(opset)).replace("ir_version: 8", "ir_version: 10")
            + " { s = MatMul(x, w)  t = Add(s, b) y = Softmax(t) }"
        )
        work = ir.to_proto(normalize(read_model(model)))
        assert (work.opset_import[0].version, work.ir_version) == (OPSET, IR_VERSION)
        x = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
        session = onnxruntime.InferenceSession(
            work.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        (expected,) = onnx.reference.ReferenceEvaluator(model).run(None, {"x": x})
        np.testing.assert_allclose(session.run(None, {"x": x})[0], expected, rtol=1e-6)

    @pytest.mark.parametrize(
        "body",
        [
            "y = RMSNormalization(x, w)",
            "h = Swish<alpha=1.5>(x) y = Mul(h, w)",
            "y = Attention<is_causal=1, q_num_heads=2, kv_num_heads=1>(x, k, k)",
            "a = RotaryEmbedding<num_heads=1>(x, c, c, p) y = Add(a, w)",
            "n = LayerNormalization(x, w) d = Clip(n, , one) y = Softmax(d)",
        ],
    )
    @pytest.mark.parametrize("opset", [23, 24, 25])
    def test_operators_that_came_later_are_written_in_their_definitions(
        self, body: str, opset: int
    ) -> None:
        if "Swish" in body and opset == 23:
            opset = 24
        model = parse(
            f"""<ir_version: 11, opset_import: ["": {opset}]> g (float[2, 3, 4] x) => (float[2, 3, 4] y)
            <float[4] w = {{1, 2, 3, 4}}, float[3, 2] c = {{0.1, 0.2, 0.3, 0.4, 0.5, 0.6}}, int64[2, 3] p = {{0, 1, 2, 2, 0, 1}}, float one = {{1}},
            float[2, 3, 2] k = {{1, 2, 3, 4, 5, 6, 7, 8, 9, 8, 7, 6}}> {{ {body} }}"""
        )
        x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
        work = normalize(read_model(model))
        assert work.graph.opset_imports[""] == OPSET
        session = onnxruntime.InferenceSession(
            ir.to_proto(work).SerializeToString(), providers=["CPUExecutionProvider"]
        )
        (expected,) = onnx.reference.ReferenceEvaluator(model).run(None, {"x": x})
        np.testing.assert_allclose(session.run(None, {"x": x})[0], expected, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize(
        "body",
        [
            "y = TensorScatter(x, x)",
            (
                "y = If (b) <then_branch = t () => (float[2, 4] a) { a = Swish(x) }, else_branch ="
                " e () => (float[2, 4] o) { o = Identity(x) }>"
            ),
        ],
    )
    def test_a_later_operator_without_a_definition_is_named(self, body: str) -> None:
        model = parse(
            '<ir_version: 11, opset_import: ["": 24]> g (float[2, 4] x, bool b) => (float[2, 4] y)'
            f" <float[4] w = {{1, 1, 1, 1}}> {{ {body} }}"
        )
        with pytest.raises(
            ModelError,
            match=(
                r"^(TensorScatter|Swish) '.*' came with an opset after 21.*Export the model again"
            ),
        ):
            normalize(read_model(model))

    def test_an_opset_that_cannot_be_converted_is_named(self) -> None:
        model = parse(
            '<ir_version: 8, opset_import: ["": 1]> g (float[2, 4] x) => (float[2, 8] y) { y ='
            " Upsample<height_scale = 1.0, width_scale = 2.0>(x) }"
        )
        with pytest.raises(
            ModelError, match=r"opset is 1; training builds on opset 21.*cannot convert it"
        ):
            normalize(read_model(model))

    @pytest.mark.parametrize("indices", ["1, 3", "0, 1, 1, 1"])
    def test_a_sparse_constant_is_its_dense_form(self, indices: str) -> None:
        places = [int(i) for i in indices.split(",")]
        rows = 2 if len(places) == 4 else 1
        make = onnx.helper.make_tensor
        sparse = onnx.helper.make_sparse_tensor(
            make("v", 1, [2], [5.0, 6.0]),
            make("i", 7, [2] if rows == 1 else [2, 2], places),
            [4] if rows == 1 else [2, 2],
        )
        model = parse(
            '<ir_version: 8, opset_import: ["": 17]> g (float x) => (float[N] y) { c = Identity(x) '
            " y = Add(x, c) }"
        )
        model.graph.node[0].CopyFrom(
            onnx.helper.make_node("Constant", [], ["c"], sparse_value=sparse)
        )
        work = normalize(read_model(model))
        (found,) = onnx.reference.ReferenceEvaluator(ir.to_proto(work)).run(
            None, {"x": np.float32(1)}
        )
        np.testing.assert_array_equal(found, [1, 6, 1, 7] if rows == 1 else [[1, 6], [1, 7]])

    def test_functions_are_inlined(self) -> None:
        model = parse(
            """<ir_version: 10, opset_import: ["": 21, "mine": 1]> g (float[N] x) => (float[N] y)
            <float[1] w = {2}> { y = mine.Scale(x, w) }
            <domain: "mine", opset_import: ["": 21]> Scale (a, b) => (c) { c = Mul(a, b) }"""
        )
        assert [n.op_type for n in normalize(read_model(model)).graph] == ["Mul"]

    @pytest.mark.parametrize(
        ("body", "count"),
        [
            ("s = SplitToSequence<axis = 1>(x, sizes)  a = SequenceAt(s, one)  b = SequenceAt(s, last)  z = Sub(b, a)", 0),
            ("s = SplitToSequence<axis = 1>(x, two)  a = SequenceAt(s, one)  z = Neg(a)", 0),
            ("s = SplitToSequence<axis = 1, keepdims = 0>(x)  a = SequenceAt(s, one)  z = Neg(a)", 0),
            ("s = SplitToSequence<axis = 1>(x)  a = SequenceAt(s, one)  n = SequenceLength(s)  m = CastLike(n, a)  z = Mul(a, m)", 0),
            ("e = SequenceEmpty()  s = SequenceInsert(e, x)  n = Neg(x)  t = SequenceInsert(s, n)  u = SequenceInsert(t, x, last)"
             "  v = SequenceErase(u, one)  w = Identity(v)  z = ConcatFromSequence<axis = 1>(w)", 0),
            ("n = Neg(x)  s = SequenceConstruct(x, n)  z = ConcatFromSequence<axis = 0, new_axis = 1>(s)", 0),
            # not known which
            ("n = Neg(x)  s = SequenceConstruct(x, n)  i = ArgMax<keepdims = 0>(k)  z = SequenceAt(s, i)", 2),
        ],
    )  # fmt: skip
    def test_sequences_of_known_length_are_their_tensors(self, body, count) -> None:
        model = parse(
            f"""<ir_version: 10, opset_import: ["": 21]> g (float[2, 5] x, float[3] k) => (float[M, K] y)
            <int64[3] sizes = {{1, 2, 2}}, int64 one = {{1}}, int64 last = {{-1}}, int64 two = {{2}}> {{ {body} y = Flatten(z) }}"""
        )
        work = ir.to_proto(normalize(read_model(model)))
        assert sum("Sequence" in n.op_type for n in work.graph.node) == count
        feeds = {
            "x": np.arange(10, dtype=np.float32).reshape(2, 5),
            "k": np.array([1, 2, 3], np.float32),
        }
        feeds = {v.name: feeds[v.name] for v in work.graph.input}
        if "i = " in body:
            feeds["k"] = np.array([2, 3, 1], np.float32)
        expected = onnx.reference.ReferenceEvaluator(model).run(None, feeds)
        np.testing.assert_array_equal(
            onnx.reference.ReferenceEvaluator(work).run(None, feeds)[0], expected[0]
        )

    def test_static_shapes_reach_every_value(self) -> None:
        model = parse(
            '<ir_version: 10, opset_import: ["": 21]> g (float[N, 3, H, W] x) => (float[N, K] y)'
            " <float[1] w = {2}> { s = Mul(x, w) y = Flatten(s) }"
        )
        special = specialize_shapes(normalize(read_model(model)), {"x": (5, 3, 4, 2)})
        assert [list(v.shape) for v in special.graph.outputs] == [[5, 24]]

    def test_the_parts_of_a_split_have_the_rank_of_the_whole(self) -> None:
        text = (
            '<ir_version: 10, opset_import: ["": 21]> g (float[N, 4] x, int64[2] k) => (float[N, A]'
            " a, float[N, B] b) "
        )
        model = normalize(parse(text + "{ p, q = Split<axis = -1>(x, k)  a = Neg(p)  b = Neg(q) }"))
        assert [
            [str(d) for d in v.shape[:1]] + [len(v.shape)] for v in model.graph.node(0).outputs
        ] == [["N", 2], ["N", 2]]

    def test_ranks_are_known_for_any_size_of_the_batch(self) -> None:
        """An exporter writes axes as arithmetic of constants, which ONNX's inference does not do."""
        model = parse(
            """<ir_version: 10, opset_import: ["": 21]> g (float[N, 2, H, W] x) => (float[A, B] y)
            <int64[1] line = {-1}, float[2, 2] w = {1, 2, 3, 4}>
            { two = Constant<value = int64[2] {2, 3}>()  axes = Reshape(two, line)  m = ReduceMean<keepdims = 0>(x, axes)  y = MatMul(m, w) }"""
        )
        special = specialize_shapes(normalize(read_model(model)), {})
        assert {
            node.op_type: [str(d) for d in node.outputs[0].shape or ()] for node in special.graph
        } == {
            "ReduceMean": ["N", "2"],
            "MatMul": ["N", "2"],
        }

    def test_only_the_named_initializers_change(self) -> None:
        model = linear()
        changed = with_initializers(model, {"w": np.array([[5], [6]], np.float32)})
        assert onnx.numpy_helper.to_array(changed.graph.initializer[0]).tolist() == [[5], [6]]
        assert (
            changed.graph.initializer[1].SerializeToString()
            == model.graph.initializer[1].SerializeToString()
        )
        assert changed.graph.node == model.graph.node


MIXED = """<ir_version: 10, opset_import: ["": 21]> g (float[N, 2, 4, 4] x) => (float[N, 2, 4, 4] y)
  <float[2] scale = {1, 1}, float[2] bias = {0, 0}, float[2] mean = {0, 0}, float[2] var = {1, 1}, float low = {0}, float half = {0.5},
   float[2, 1, 1] gain = {1, 2}, float[1] mask = {-inf}, int64[1] axes = {1}>
  { n = BatchNormalization(x, scale, bias, mean, var)  c = Clip(n, low)  h = Mul(c, half)  g = Mul(h, gain)  m = Max(g, mask)
    u = Unsqueeze(m, axes)  y = Squeeze(u, axes) }"""


class TestChoosingWeights:
    def test_constants_settings_statistics_and_masks_are_no_weights(self) -> None:
        assert all_weights(normalize(parse(MIXED))) == ["scale", "bias", "gain"]

    @pytest.mark.parametrize(
        ("note", "chosen"),
        [
            (None, ["table"]),
            (("kind", "PARAMETER"), ["table", "temperature"]),
            (("kind", "BUFFER"), []),
            (("kind", "CONSTANT_TENSOR"), []),
            (("folded", "['layer.weight', 'val_3']"), ["table", "temperature"]),
            (("folded", "['model.embed_tokens.embed_scale']"), []),
            (("folded", "['class_token', 'val_3']"), ["table"]),
            (("folded", "['zeros', 'val_3', 'slice_12', 'value_0_2', 'clone']"), []),
            (
                (
                    "folded",
                    "['attn.lifted_tensor_7', 'fill', '_to_copy_1', 'scalar_tensor_default']",
                ),
                [],
            ),
            (("folded", "['model.rotary_emb.inv_freq', 'cos_1', 'cat']"), []),
            (("folded", "garbage("), ["table"]),
        ],
    )
    @pytest.mark.parametrize("opset", [20, OPSET])
    def test_what_torchs_exporter_notes_is_believed(self, note, chosen, opset) -> None:
        model = parse(
            f"""<ir_version: 10, opset_import: ["": {opset}]> g (float[N, 2] x) => (float[N, 2] y)
            <float[2, 2] table = {{0, 1, 2, 3}}, float temperature = {{2}}, float[2] other = {{1, 2}}>
            {{ a = MatMul(x, table)  b = Mul(a, temperature)  y = Add(b, other) }}"""
        )
        keys = {
            "kind": "pkg.torch.export.graph_signature.InputSpec.kind",
            "folded": "pkg.onnxscript.optimizer.folded_from",
        }
        for name, shape in (("table", [2, 2]), ("temperature", [])) if note else ():
            model.graph.value_info.append(
                onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
            )
            model.graph.value_info[-1].metadata_props.add(key=keys[note[0]], value=note[1])
        assert all_weights(normalize(read_model(model))) == [*chosen, "other"]

    @pytest.mark.parametrize(
        ("patterns", "chosen"),
        [
            (None, ["scale", "bias", "gain"]),
            (["gain", "bias"], ["bias", "gain"]),
            ("*a*", ["scale", "bias", "half", "gain", "mask"]),
            (["!bias"], ["scale", "gain"]),
            (["!bias", "b*", "gain"], ["gain"]),
            (["half"], ["half"]),
        ],
    )
    def test_names_patterns_exclusions_in_any_order(self, patterns, chosen) -> None:
        assert select_weights(normalize(parse(MIXED)), patterns) == chosen

    def test_a_name_with_brackets_is_a_name(self) -> None:
        model = parse(LINEAR + " { s = MatMul(x, w)  y = Add(s, b) }")
        model.graph.initializer[0].name = model.graph.node[0].input[1] = "w[0]"
        assert select_weights(normalize(model), "w[0]") == ["w[0]"]

    def test_a_pattern_that_matches_nothing_suggests(self) -> None:
        with pytest.raises(
            UnknownNameError,
            match=r"No weight is called 'baias'. Did you mean 'bias'\? Known: bias, gain, scale",
        ):
            select_weights(normalize(parse(MIXED)), ["baias"])

    def test_statistics_cannot_be_trained(self) -> None:
        with pytest.raises(SettingError, match=r"'mean' is a running statistic"):
            select_weights(normalize(parse(MIXED)), ["mean"])

    def test_nothing_left(self) -> None:
        with pytest.raises(SettingError, match=r"leaves nothing to train"):
            select_weights(normalize(parse(MIXED)), ["bias", "!b*"])

    def test_a_model_without_float_weights(self) -> None:
        model = parse(
            '<ir_version: 10, opset_import: ["": 21]> g (float[N] x) => (float[N] y) { c ='
            " Constant<value = float[1] {2}>()  y = Mul(x, c) }"
        )
        with pytest.raises(
            ModelError, match=r"no float weights.*1 Constant nodes cannot be trained"
        ):
            select_weights(normalize(model), None)

    def test_weights_inside_a_body_are_pointed_at(self) -> None:
        model = parse(
            """<ir_version: 10, opset_import: ["": 21]> g (float[2] x, bool c) => (float[2] y) { y = If (c)
            <then_branch = t () => (float[2] a) <float[2] w = {1, 2}> { a = Mul(x, w) }, else_branch = e () => (float[2] b) { b = Neg(x) }> }"""
        )
        with pytest.raises(
            ModelError,
            match=(
                r"no float weights.*The 1 initializers inside the bodies .* lift them into the main"
                r" graph"
            ),
        ):
            select_weights(normalize(model), None)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize(("op_type", "opset"), [("Upsample", 9), ("Resize", 10)])
def test_old_resizing_is_converted_as_it_was(op_type: str, opset: int, mode: str) -> None:
    model = parse(
        f"""<ir_version: 5, opset_import: ["": {opset}]> g (float[1,1,3,4] x) => (float[1,1,6,10] y) <float[4] scales = {{1, 1, 2, 2.5}}>
            {{ y = {op_type}<mode = "{mode}">(x, scales) }}"""
    )
    x = np.random.default_rng(0).normal(size=(1, 1, 3, 4)).astype(np.float32)
    before, after = (
        onnxruntime.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]).run(
            None, {"x": x}
        )[0]
        for m in (model, ir.to_proto(normalize(model)))
    )
    np.testing.assert_allclose(after, before, atol=1e-6)


@pytest.mark.parametrize("opset", [18, 20])
def test_a_group_normalization_that_scales_groups_is_converted_as_it_was(opset: int) -> None:
    text = f"""<ir_version: 8, opset_import: ["": {opset}]> g (float[N,4,3] x) => (float[N,4,3] y) <float[2] s = {{1, 2}}, float[2] b = {{0, 1}}>
        {{ y = GroupNormalization<num_groups = 2>(x, s, b) }}"""
    x = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)
    groups = x.reshape(2, 2, 6)
    n = (groups - groups.mean(2, keepdims=True)) / np.sqrt(groups.var(2, keepdims=True) + 1e-5)
    expected = (n * np.array([[1], [2]]) + np.array([[0], [1]])).reshape(2, 4, 3)
    work = normalize(parse(text))
    assert all_weights(work) == ["s", "b"]
    session = onnxruntime.InferenceSession(
        ir.to_proto(work).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    np.testing.assert_allclose(session.run(None, {"x": x})[0], expected, atol=1e-5)
    assert Trainer(parse(text), loss="mse", gradient="onnx").train_on_batch(x, x)["loss"] > 0


def test_arrays_stand_on_the_left_of_logic_too() -> None:
    op, (x,) = empty(("x", np.float32, (3,)))
    op.output("both", np.array([True, False, True]) & (x > 0))
    op.output("either", np.array([True, False, False]) | (x > 0))
    found = run(op, x=np.array([1, 1, -1], np.float32))
    assert found["both"].tolist() == [True, False, False]
    assert found["either"].tolist() == [True, True, False]


class TestRandom:
    @staticmethod
    def draw(
        seed: int, step: int, stream: int = 0, shape: tuple[int, ...] = (64, 1000)
    ) -> np.ndarray:
        op, (x, s, t) = empty(
            ("x", np.float32, ("N", "M")), ("seed", np.int64, ()), ("step", np.int64, ())
        )
        op.output("u", uniform(op, op.shape(x), s, t, stream))
        return run(op, x=np.zeros(shape, np.float32), seed=np.array(seed), step=np.array(step))["u"]

    def test_uniform_on_the_unit_interval(self) -> None:
        u = self.draw(0, 0).ravel()
        assert u.min() >= 0
        assert u.max() < 1
        counts, _ = np.histogram(u, 100, (0, 1))
        chi2 = ((counts - u.size / 100) ** 2 / (u.size / 100)).sum()
        assert 60 < chi2 < 145  # 99 degrees of freedom: 0.1 % and 99.9 % quantiles

    def test_neighbours_are_uncorrelated(self) -> None:
        first, second = self.draw(3, 10), self.draw(3, 11)
        draws = [first, np.roll(first, 1), second, self.draw(4, 10), self.draw(3, 10, 1)]
        correlation = np.corrcoef([d.ravel() for d in draws]) - np.eye(5)
        assert np.abs(correlation).max() < 5 / np.sqrt(first.size)

    def test_a_function_of_seed_step_and_stream(self) -> None:
        assert np.array_equal(self.draw(1, 2), self.draw(1, 2))
        assert (
            len(
                {
                    self.draw(*key, shape=(1, 4)).tobytes()
                    for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**40, 7, 3))
                }
            )
            == 5
        )

    def test_the_hash_is_lowbias32(self) -> None:
        def mix(x: np.ndarray) -> np.ndarray:
            x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
            x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
            return x ^ (x >> 16)

        with np.errstate(over="ignore"):
            key = mix(
                np.uint32([5]) + mix(mix(np.uint32([9]) + np.uint32(0x9E3779B9)) + np.uint32(2))
            )
            expected = (mix(mix(np.arange(20, dtype=np.uint32)) + key) >> 8) * np.float32(2**-24)
        np.testing.assert_array_equal(self.draw(9, 5, 2, (1, 20))[0], expected)


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
            '<ir_version: 10, opset_import: ["": 21]> g (float[N, 5000] x) => (float[N, M] y) { r'
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
    BRANCH = """g (float[N, 3, 5] x) => (float[N, 3, 5] y) <float ratio = {0.5}, bool chosen = {1}> {
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
            (SCAN, r"Dropout '.*' inside Scan '.*' cannot be trained: it would draw the same numbers"),
            (BRANCH.replace("Dropout(x, ratio)", "BatchNormalization(x, s, s, s, s)").replace("float ratio = {0.5}", "float[3] s = {1, 1, 1}"),
             r"BatchNormalization '.*' inside If '.*' cannot follow the batches.*batch_norm='frozen'"),
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
