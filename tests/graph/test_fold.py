"""Ifs whose condition is known are replaced by the branch that they take."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from onnxfit.graph import fold
from onnxfit.graph.fold import fold_shapes
from onnxfit.graph.model import specialize_shapes
from onnxfit.graph.weights import all_weights
from onnxfit.load.normalize import normalize
from tests.conditionals import CONDITIONS, KNOWN, nested, operators, rows, run
from tests.graph.graphs import parse

PATHS = [path for depth in (1, 2, 3) for path in itertools.product((True, False), repeat=depth)]


def normalized(model: onnx.ModelProto) -> onnx.ModelProto:
    proto = ir.to_proto(normalize(model))
    onnx.checker.check_model(proto, full_check=True)
    return proto


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_known_conditions_leave_the_nodes_of_the_branches_that_they_take(
    path: tuple[bool, ...],
) -> None:
    model, flat = nested(list(itertools.islice(itertools.cycle(KNOWN), len(path))), path)
    x, _ = rows()
    work = normalized(model)
    assert "If" not in operators(work)
    np.testing.assert_array_equal(run(work, x=x)[0], run(flat, x=x)[0])
    np.testing.assert_array_equal(run(work, x=x)[0], run(model, x=x)[0])


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("name", CONDITIONS)
def test_a_condition_is_known_without_the_batch(name: str, value: bool) -> None:
    """Inside an If on the data, and around one."""
    x, _ = rows()
    for conditions in ([name, "data"], ["data", name]):
        model, flat = nested(conditions, [value, True])
        work = normalized(model)
        assert operators(work).count("If") == (1 if name in KNOWN else 2)
        np.testing.assert_array_equal(run(work, x=x)[0], run(flat, x=x)[0])


def test_an_if_on_the_batch_is_replaced_once_its_size_is_known() -> None:
    model = normalize(
        parse(
            """<ir_version: 10, opset_import: ["": 21]> g (float[N, 4] x) => (float[A, B] y) <int64 zero = {0}, int64 one = {1}>
            { s = Shape(x)  n = Gather(s, zero)  c = Equal(n, one)  y = If(c) <then_branch = t () => (float[M] a) { a = Squeeze(x) }, else_branch = e () => (float[M, 4] b) { b = Neg(x) }> }"""
        )
    )
    assert [node.op_type for node in model.graph][-1] == "If"
    for size, operator, shape in ((1, "Squeeze", [4]), (3, "Neg", [3, 4])):
        special = specialize_shapes(model.clone(), {"x": (size, 4)})
        assert operator in [node.op_type for node in special.graph]
        assert "If" not in [node.op_type for node in special.graph]
        (output,) = special.graph.outputs
        assert (output.name, list(output.shape)) == ("y", shape)


def test_every_node_is_visited_once_and_none_of_a_branch_that_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conditions = ["an initializer", "data", "a rank"] * 4
    model, flat = nested(conditions, [True] * len(conditions))
    visited: list[ir.Node] = []
    computed = fold.computed_values

    def counting(node: ir.Node, *others: object) -> object:
        visited.append(node)
        return computed(node, *others)

    monkeypatch.setattr(fold, "computed_values", counting)
    work = ir.from_proto(onnx.shape_inference.infer_shapes(model))
    fold_shapes(work)
    assert len(visited) == len(set(visited))
    computed_names = {value.name for node in visited for value in node.outputs}
    skipped = {f"o{i}" for i, name in enumerate(conditions) if name == "data"}
    assert computed_names.isdisjoint({f"o{i}" for i in range(len(conditions))} - skipped)
    assert computed_names.issuperset({v for node in flat.graph.node for v in node.output} | skipped)


def test_floats_among_the_initializers_are_not_known_until_the_weights_are() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> g (float[N, 2] x) => (float[N, 2] y) <float w = {1}, float zero = {0}>
        { c = Greater(w, zero)  y = If(c) <then_branch = t () => (float[N, 2] a) { a = Mul(x, w) }, else_branch = e () => (float[N, 2] b) { b = Neg(x) }> }"""
    model = normalize(parse(text))
    assert [node.op_type for node in model.graph] == ["Greater", "If"]
    fold_shapes(model)
    assert [node.op_type for node in model.graph] == ["Mul", "Identity"]


def test_tensors_of_a_branch_do_not_become_weights_of_the_file() -> None:
    model = parse(
        """<ir_version: 10, opset_import: ["": 21]> g (float[N, 2] x) => (float[N, 2] y) <bool yes = {1}, float[2] w = {3, 4}>
        { h = Mul(x, w)  y = If(yes) <then_branch = t () => (float[N, 2] a) <float[2] own = {1, 2}> { a = Mul(h, own) }, else_branch = e () => (float[N, 2] b) { b = Neg(h) }> }"""
    )
    work = normalize(model)
    assert all_weights(work) == ["w"]
    x = np.array([[1, 1], [2, 3]], np.float32)
    np.testing.assert_array_equal(run(ir.to_proto(work), x=x)[0], x * [3, 8])


def test_values_of_the_same_name_in_two_branches_stay_apart() -> None:
    branches = "then_branch = t () => (float[N, 2] a) { h = Exp(x)  a = Mul(h, k) }, else_branch = e () => (float[N, 2] b) { h = Neg(x)  b = Mul(h, k) }"
    model = parse(
        f"""<ir_version: 10, opset_import: ["": 21]> g (float[N, 2] x, bool free) => (float[N, 2] y, float[N, 2] z) <bool yes = {{1}}, bool no = {{0}}, float[2] k = {{1, 2}}>
        {{ p = If(yes) <{branches}>  q = If(no) <{branches}>  r = If(free) <{branches}>  s = Add(p, q)  y = Add(s, r)  z = Sub(p, q) }}"""
    )
    x = np.array([[1, 1], [2, 3]], np.float32)
    for free in (True, False):
        feeds = {"x": x, "free": np.array(free)}
        for found, expected in zip(run(normalized(model), **feeds), run(model, **feeds)):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("outputs", ["p, p", "p, q", "q, p"])
def test_outputs_of_the_model_keep_their_names(outputs: str) -> None:
    """Also where an If returns one value twice."""
    model = parse(
        f"""<ir_version: 10, opset_import: ["": 21]> g (float[N, 2] x) => (float[N, 2] y, float[N, 2] z) <bool yes = {{1}}>
        {{ y, z = If(yes) <then_branch = t () => (float[N, 2] {outputs.replace(", ", "1, float[N, 2] ")}2) {{ p = Exp(x)  q = Neg(x)  {outputs[0]}1 = Identity({outputs[0]})  {outputs[-1]}2 = Identity({outputs[-1]}) }},
        else_branch = e () => (float[N, 2] a, float[N, 2] b) {{ a = Neg(x)  b = Abs(x) }}> }}"""
    )
    x = np.array([[1, 1], [2, 3]], np.float32)
    work = normalized(model)
    assert [value.name for value in work.graph.output] == ["y", "z"]
    for found, expected in zip(run(work, x=x), run(model, x=x)):
        np.testing.assert_array_equal(found, expected)


def test_a_branch_that_is_not_taken_may_contradict_the_sizes() -> None:
    """With an unknown condition, the branch is entered, but it need not fit the batch."""
    squeeze = "then_branch = t () => (float[M] a) { a = Squeeze(x, axis) }, else_branch = e () => (float[M, 4] b) { b = Neg(x) }"
    for condition in ("c = Identity(no)", "m = ReduceMax<keepdims = 0>(x)  c = Less(m, far)"):
        model = normalize(
            parse(
                f"""<ir_version: 10, opset_import: ["": 21]> g (float[N, 4] x) => (float[A, B] y) <bool no = {{0}}, float far = {{-9}}, int64[1] axis = {{0}}>
                {{ {condition}  y = If(c) <{squeeze}> }}"""
            )
        )
        assert specialize_shapes(model, {"x": (3, 4)}).graph.outputs[0].name == "y"


def test_sizes_in_a_loop_are_those_of_any_iteration() -> None:
    """The file declares the first size of a state that grows."""
    model = parse(
        """<ir_version: 10, opset_import: ["": 21]> g (float[1, 2] x) => (float[A, 2] y) <int64 n = {3}, bool yes = {1}, int64 zero = {0}, int64 one = {1}>
        { y = Loop(n, yes, x) <body = b (int64 i, bool c, float[1, 2] s) => (bool d, float[1, 2] t) { d = Identity(c)  z = Shape(s)  k = Gather(z, zero)  f = Equal(k, one)
          p = If(f) <then_branch = u () => (float[A, 2] a) { a = Exp(s) }, else_branch = v () => (float[A, 2] e) { e = Neg(s) }>
          q = If(yes) <then_branch = w () => (float[A, 2] o) { o = Identity(p) }, else_branch = h () => (float[A, 2] j) { j = Neg(s) }>  t = Concat<axis = 0>(q, q) }> }"""
    )
    x = np.array([[0.1, 0.2]], np.float32)
    work = normalize(model)
    fold_shapes(work)
    proto = ir.to_proto(work)
    assert operators(proto).count("If") == 1
    found, expected = (ReferenceEvaluator(m).run(None, {"x": x})[0] for m in (proto, model))
    np.testing.assert_array_equal(found, expected)


def test_an_operator_of_another_domain_selects_no_sizes() -> None:
    """Not even if it has the name of one that does, and no inputs."""
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["": 21, "own": 1]> g (float[N, 4] x) => (float[N, 4] y, int64[1] n)
        { s = Shape(x)  n = own.Gather()  m = own.Slice(s)  y = Neg(x) }"""
    )
    fold_shapes(model)
    assert [node.op_type for node in model.graph] == ["Shape", "Gather", "Slice", "Neg"]


VECTOR, MATRIX = np.arange(1, 7), np.arange(6).reshape(2, 3)
BOOLS = np.array([[True], [False]])
INTS = np.array([0, 2], np.int32)
# An operator, its attributes, and its inputs; None is an omitted one
FORMULA_CASES: list[tuple[str, dict[str, object], list[object]]] = [
    ("Concat", {"axis": 0}, [VECTOR, [7], []]),
    ("Concat", {"axis": -1}, [MATRIX, MATRIX]),
    ("Concat", {"axis": 2}, [MATRIX, MATRIX]),
    ("Concat", {"axis": 0}, [VECTOR, MATRIX]),
    ("Concat", {"axis": 0}, [np.array(1), np.array(2)]),
    ("Expand", {}, [VECTOR[:1], [4]]),
    ("Expand", {}, [MATRIX, [1]]),
    ("Expand", {}, [MATRIX, [4, 1, 1]]),
    ("Expand", {}, [BOOLS, [2, 3]]),
    ("Expand", {}, [np.array(3), [2, 2]]),
    ("Expand", {}, [VECTOR, [5]]),
    ("Expand", {}, [VECTOR[:1], [0]]),
    ("Gather", {}, [VECTOR, np.array(2)]),
    ("Gather", {}, [MATRIX, [-1]]),
    ("Gather", {"axis": 1}, [MATRIX, [[0, 2], [1, -3]]]),
    ("Gather", {"axis": -1}, [MATRIX, INTS]),
    ("Gather", {}, [VECTOR, [6]]),
    ("Reshape", {}, [MATRIX, [3, 2]]),
    ("Reshape", {}, [MATRIX, [-1]]),
    ("Reshape", {}, [MATRIX, [0, -1, 1]]),
    ("Reshape", {}, [MATRIX, [6, 1, 0]]),
    ("Reshape", {}, [MATRIX, [4]]),
    ("Reshape", {}, [VECTOR[:1], []]),
    ("Reshape", {"allowzero": 1}, [np.zeros((0, 3), np.int64), [3, 0]]),
    ("Reshape", {"allowzero": 1}, [MATRIX, [0, 6]]),
    ("Slice", {}, [VECTOR, [1], [3]]),
    ("Slice", {}, [VECTOR, [-2], [2**63 - 1]]),
    ("Slice", {}, [VECTOR, [-1], [-(2**63)], [0], [-1]]),
    ("Slice", {}, [VECTOR, [5], [0], [-1], [-2]]),
    ("Slice", {}, [MATRIX, [1, 0], [2, 2]]),
    ("Slice", {}, [MATRIX, [1], [3], [1]]),
    ("Slice", {}, [MATRIX, [0, 0], [2, 3], None, [1, 2]]),
    ("Slice", {}, [MATRIX, [9], [3], INTS[:1]]),
    ("Slice", {}, [MATRIX, [0], [1], [2]]),
    ("Squeeze", {}, [MATRIX[:1, :1]]),
    ("Squeeze", {}, [MATRIX[:1, :1], [0]]),
    ("Squeeze", {}, [MATRIX[:1, :1], [-1]]),
    ("Squeeze", {}, [MATRIX, [0]]),
    ("Unsqueeze", {}, [np.array(4), [0]]),
    ("Unsqueeze", {}, [VECTOR, [0, -1]]),
    ("Unsqueeze", {}, [VECTOR, [3]]),
    ("Unsqueeze", {}, [VECTOR, [0, 0]]),
    ("Constant", {"value": onnx.numpy_helper.from_array(MATRIX)}, []),
    ("Constant", {"value": onnx.numpy_helper.from_array(np.float32(0.1))}, []),
    ("Constant", {"value_ints": [1, 2]}, []),
    ("Constant", {"value_int": 3}, []),
    ("Constant", {"value_float": 0.1}, []),
    ("Constant", {"value_string": "text"}, []),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op_type", "attributes", "values"), FORMULA_CASES, ids=lambda v: str(v)[:20]
)
def test_a_node_is_computed_as_by_the_reference(
    op_type: str,
    attributes: dict[str, object],
    values: list[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = {
        "" if v is None else f"x{i}": np.zeros(0) if v is None else np.array(v, getattr(v, "dtype", np.int64))
        for i, v in enumerate(values)
    }  # fmt: skip
    proto = onnx.helper.make_node(op_type, [*inputs], ["y"], **attributes)
    node = ir.serde.deserialize_node(proto)
    feeds = {name: array for name, array in inputs.items() if name}

    def computed() -> object:
        try:
            return fold.evaluate(node, feeds, 21)[0]
        except Exception:  # as `fold_shapes` expects of any error
            return None

    found = computed()
    monkeypatch.setattr(fold, "FORMULAS", {})
    monkeypatch.setattr(fold, "_has_formula", lambda node, opset: False)
    expected = computed()
    if expected is None:
        assert found is None
    else:
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
        assert np.shape(found) == np.shape(expected)


def test_shapes_of_common_exports_need_no_reference_implementation() -> None:
    """Its import takes longer than the rest of many trainers."""
    code = """
import sys, numpy as np, onnx, onnxfit
model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    g (float[n, 4, 2] x) => (float[n, 8] y) <float[8, 8] w, int64[1] i = {0}, int64[1] last = {-1}> {
        s = Shape(x)  n = Gather(s, i)  r = Concat <axis = 0> (n, last)
        f = Reshape(x, r)  y = MatMul(f, w) }''')
model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(8, dtype=np.float32), "w"))
trainer = onnxfit.Trainer(model, loss="mse")
trainer.train_on_batch(np.ones((3, 4, 2), np.float32), np.ones((3, 8), np.float32))
assert "onnx.reference.ops" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
