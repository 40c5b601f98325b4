"""Normalizing and specializing a model."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import pytest

from onnxfit.graph.model import specialize_shapes, with_initializers
from onnxfit.load.normalize import normalize
from onnxfit.load.reading import read_model
from tests.graph.graphs import linear, parse


class TestNormalizing:
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

    def test_elements_of_a_sequence_share_no_unknown_size(self) -> None:
        # Parts of two rows: the last part of an odd number of rows has one.
        model = parse(
            """<ir_version: 10, opset_import: ["": 21]> g (float[N, M] x) => (float[R, M] y)
            <int64 two = {2}, int64 first = {0}, int64 last = {-1}>
            { s = SplitToSequence(x, two) a = SequenceAt(s, first) b = SequenceAt(s, last)
            y = Mul(a, b) }"""
        )
        values = {v.name: v for node in normalize(read_model(model)).graph for v in node.outputs}
        for name in ("a", "b"):
            rows, columns = values[name].shape
            assert rows == ir.SymbolicDim(None)
            assert columns == "M"  # of the input, the same in all parts

    def test_static_shapes_reach_every_value(self) -> None:
        model = parse(
            '<ir_version: 10, opset_import: ["": 21]> g (float[N, 3, H, W] x) => (float[N, K] y)'
            " <float[1] w = {2}> { s = Mul(x, w) y = Flatten(s) }"
        )
        special = specialize_shapes(normalize(read_model(model)), {"x": (5, 3, 4, 2)})
        assert [list(v.shape) for v in special.graph.outputs] == [[5, 24]]

    def test_the_declared_type_of_an_unknown_operator_is_kept(self) -> None:
        model = parse("""<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
            g (float[N, 3] x) => (float[N, K] y) <float[N, 3] t, float[1] w = {2}>
            { t = com.microsoft.CDist<metric = "euclidean">(x, x)  s = Mul(t, w)  y = Flatten(s) }""")
        special = specialize_shapes(normalize(read_model(model)), {"x": (3, 3)})
        values = {value.name: value for node in special.graph for value in node.outputs}
        assert {values[name].dtype for name in ("t", "s", "y")} == {ir.DataType.FLOAT}
        assert len(values["s"].shape) == 2

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
