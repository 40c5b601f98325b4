"""`dynamic_batch` on small graphs: the result equals the original row by row, or an error names the
node in the way.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

from onnxfit import DataError, ModelError, SettingError, Trainer, UnknownNameError, dynamic_batch
from onnxfit.tools.editing import row_check
from onnxfit.tools.editing.batch_axis_propagation import BatchAxisPropagation

HEADER = '<ir_version: 8, opset_import: ["": 17]> '
CONV = "<float[4, 3, 1, 1] w, float[4, 2] v>"
RNG = np.random.default_rng(0)

# Each maps `x`, whose batch is `B`, to `y`, which has a row for each row of x.
GRAPHS = {
    "reshape": "(float[B, 3, 2, 2] x) => (float[B, 12] y) <int64[2] s = {B, 12}> { y = Reshape(x, s) }",
    "reshape with -1 elsewhere": (
        "(float[B, 3, 4] x) => (float[B, 12] y) <int64[2] s = {B, -1}> { y = Reshape(x, s) }"
    ),
    "-1 would count the batch": (
        "(float[B, 6, 4] x) => (float[B, 6, 2, 2] y) <int64[4] s = {B, -1, 2, 2}>"
        " { y = Reshape(x, s) }"
    ),
    "a zero that is a size": (
        "(float[B, 3, 4] x) => (float[B, 12] y) <int64[2] s = {B, 12}>"
        " { y = Reshape <allowzero = 1> (x, s) }"
    ),
    "heads merged with the batch": (
        "(float[B, 3, 4] x) => (float[B, 3, 4] y)"
        " <int64[4] s = {B, 3, 2, 2}, int64[3] m = {H, 3, 2}, int64[4] u = {B, 2, 3, 2},"
        " int64[3] back = {B, 3, 4}> {"
        " a = Reshape(x, s)  b = Transpose <perm = [0, 2, 1, 3]> (a)  c = Reshape(b, m)"
        " t = Transpose <perm = [0, 2, 1]> (c)  p = MatMul(c, t)  q = Softmax(p)  d = MatMul(q, c)"
        " e = Reshape(d, u)  f = Transpose <perm = [0, 2, 1, 3]> (e)  y = Reshape(f, back) }"
    ),
    "steps first": (
        "(float[B, 5, 4] x) => (float[B, 5, 4] y)"
        " <int64[2] flat = {L, 4}, int64[3] back = {5, B, 4}, float[4, 4] w> {"
        " a = Transpose <perm = [1, 0, 2]> (x)  b = Reshape(a, flat)  c = Gemm(b, w)"
        " d = Reshape(c, back)  y = Transpose <perm = [1, 0, 2]> (d) }"
    ),
    "computed sizes": (
        "(float[B, 3, 4] x) => (float[B, 12] y) <int64[1] b = {B}, int64[1] n = {12}>"
        " { s = Concat <axis = 0> (b, n)  y = Reshape(x, s) }"
    ),
    "expand": (
        "(float[B, 1, 4] x) => (float[B, 3, 4] y) <int64[3] s = {B, 3, 4}> { y = Expand(x, s) }"
    ),
    "a token before each row": (
        "(float[B, 2, 3] x) => (float[B, 3, 3] y) <float[B, 1, 3] token = {TOKEN}>"
        " { y = Concat <axis = 1> (token, x) }"
    ),
    "slice of all rows": (
        "(float[B, 3] x) => (float[B, 2] y)"
        " <int64[2] starts = {0, 1}, int64[2] ends = {B, 3}, int64[2] axes = {0, 1}>"
        " { y = Slice(x, starts, ends, axes) }"
    ),
    "resize to sizes": (
        "(float[B, 2, 2, 2] x) => (float[B, 2, 4, 4] y) <int64[4] sizes = {B, 2, 4, 4}>"
        ' { y = Resize <mode = "nearest"> (x, , , sizes) }'
    ),
    "gather elements": (
        "(float[B, 3] x) => (float[B, 2] y) <int64[B, 2] i = {PAIRS}>"
        " { y = GatherElements <axis = 1> (x, i) }"
    ),
    "indices that begin with the row": (
        "(float[B, 3] x) => (float[B, 2] y) <int64[B, 2, 2] i = {ROWS}> { y = GatherND(x, i) }"
    ),
    "row numbers beside computed columns": (
        "(float[B, 3] x) => (float[B, 1] y) <int64[B, 1, 1] rows = {NUMBERS}, int64[1] two = {2}>"
        " { a = ArgMax <axis = 1> (x)  c = Unsqueeze(a, two)  i = Concat <axis = -1> (rows, c)"
        " y = GatherND(x, i) }"
    ),
    "as_strided": (
        "(float[B, 3, 2, 2] x) => (float[B, 3] y) <int64[1] all = {-1}, int64[B, 3] i = {STRIDED}>"
        " { m = ReduceMean <axes = [2, 3], keepdims = 0> (x)  f = Reshape(m, all)"
        " y = Gather <axis = 0> (f, i) }"
    ),
    "initial state": (
        "(float[B, 4, 3] x) => (float[B, 4, 1, 2] y)"
        " <float[1, 8, 3] w, float[1, 8, 2] r, float[1, B, 2] h = {STATE}> {"
        " a = Transpose <perm = [1, 0, 2]> (x)"
        " b, last, cell = LSTM <hidden_size = 2> (a, w, r, , , h)"
        " y = Transpose <perm = [2, 0, 1, 3]> (b) }"
    ),
    "two outputs": (
        "(float[B, 3] x) => (float[B, 3] y, float[B] z) <int64[1] one = {B}>"
        " { y = Relu(x)  s = ReduceSum <keepdims = 0> (x, axes)  z = Reshape(s, one) }"
    ).replace("<int64[1] one", "<int64[1] axes = {1}, int64[1] one"),
}  # fmt: skip


def model_of(graph: str, rows: int) -> onnx.ModelProto:
    words = {
        "TOKEN": ", ".join(["1, 2, 3"] * rows),
        "PAIRS": ", ".join(["0, 2"] * rows),
        "ROWS": ", ".join(f"{i}, 0, {i}, 2" for i in range(rows)),
        "NUMBERS": ", ".join(map(str, range(rows))),
        "STRIDED": ", ".join(map(str, range(3 * rows))),
        "STATE": ", ".join(["0.5, -1"] * rows),
        "B": str(rows),
        "H": str(2 * rows),
        "L": str(5 * rows),
    }
    for word, text in words.items():
        graph = "".join(text if part == word else part for part in _words(graph))
    model = onnx.parser.parse_model(f"{HEADER} g {graph}")
    for tensor in _declared_initializers(model):
        shape = tuple(d.dim_value for d in tensor.type.tensor_type.shape.dim)
        array = RNG.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, tensor.name))
        model.graph.value_info.remove(tensor)
    return model


def _words(text: str) -> list[str]:
    return re.split(r"(\b[A-Z]+\b)", text)


def _declared_initializers(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """The parser makes a declared tensor without values a value_info."""
    made = {name for node in model.graph.node for name in node.output}
    return [v for v in model.graph.value_info if v.name not in made]


def run(model: onnx.ModelProto, **feeds: np.ndarray) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, feeds)


def sizes(value: onnx.ValueInfoProto) -> list[Any]:
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


# Each maps `x`, whose batch is 1, to `y`, which has no axis for it.
SQUEEZED = {
    "as the last node": (
        "(float[1, 3] x) => (float[3] y) <int64[1] axes = {0}> { y = Squeeze(x, axes) }"
    ),
    "all axes of size 1": "(float[1, 1, 3] x) => (float[3] y) { y = Squeeze(x) }",
    "to one number": "(float[1, 1] x) => (float y) { s = Squeeze(x)  y = Sigmoid(s) }",
    "before a softmax": (
        "(float[1, 2, 3] x) => (float[2, 3] y) <int64[1] axes = {0}>"
        " { s = Squeeze(x, axes)  y = Softmax <axis = 0> (s) }"
    ),
    "before slices": (
        "(float[1, 4] x) => (float[4] y) <int64[1] a = {0}, int64[1] b = {2}, int64[1] c = {4}> {"
        " s = Squeeze(x, a)  l = Slice(s, a, b, a)  r = Slice(s, b, c, a)  n = Neg(r)"
        " y = Concat <axis = 0> (n, l) }"
    ),
    "before a sum": (
        "(float[1, 4, 3] x) => (float[3] y) <int64[1] a = {0}>"
        " { s = Squeeze(x, a)  y = ReduceSum <keepdims = 0> (s, a) }"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SQUEEZED)
def test_a_batch_of_one_row_that_is_squeezed_becomes_the_first_axis(name: str) -> None:
    original = model_of(SQUEEZED[name], 1)
    edited = dynamic_batch(original)
    onnx.checker.check_model(edited, full_check=True)
    assert sizes(edited.graph.output[0]) == ["batch", *sizes(original.graph.output[0])]
    shape = [d.dim_value for d in original.graph.input[0].type.tensor_type.shape.dim]
    x = RNG.standard_normal((4, *shape[1:])).astype(np.float32)
    expected = np.stack([run(original, x=x[i : i + 1])[0] for i in range(4)])
    np.testing.assert_allclose(run(edited, x=x)[0], expected, rtol=1e-5)
    assert run(edited, x=x[:1])[0].shape == expected[:1].shape


def test_the_squeeze_of_an_old_opset_keeps_the_batch() -> None:
    graph = "g (float[1, 4, 1] x) => (float[4] y) { y = Squeeze <axes = [0, 2]> (x) }"
    edited = dynamic_batch(
        onnx.parser.parse_model('<ir_version: 7, opset_import: ["": 11]>' + graph)
    )
    x = RNG.standard_normal((3, 4, 1)).astype(np.float32)
    np.testing.assert_array_equal(run(edited, x=x)[0], x[..., 0])


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", GRAPHS)
def test_equals_the_original_row_by_row(name: str, rows: int) -> None:
    original = model_of(GRAPHS[name], rows)
    before = original.SerializeToString()
    edited = dynamic_batch(original)
    assert original.SerializeToString() == before, "the original changed"
    onnx.checker.check_model(edited, full_check=True)
    for value in (*edited.graph.input, *edited.graph.output):
        assert "batch" in sizes(value)
    shape = [d.dim_value for d in original.graph.input[0].type.tensor_type.shape.dim]
    x = RNG.standard_normal((4, *shape[1:])).astype(np.float32)
    chunks = [run(original, x=x[i : i + rows]) for i in range(0, 4, rows)]
    for i, output in enumerate(run(edited, x=x)):
        np.testing.assert_allclose(output, np.concatenate([c[i] for c in chunks]), rtol=1e-5)


FLAT = "(float[1, 3, 2, 2] x) => (float[1, 2] y) <int64[2] s = {1, 12}, float[12, 2] w> { a = Reshape(x, s)  y = MatMul(a, w) }"


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_trains_as_the_dynamic_model_does(backend: str) -> None:
    fixed = model_of(FLAT, 1)
    dynamic = onnx.ModelProto()
    dynamic.CopyFrom(fixed)
    for value in (dynamic.graph.input[0], dynamic.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_param = "N"
    (sizes_of_reshape,) = (t for t in dynamic.graph.initializer if t.name == "s")
    sizes_of_reshape.CopyFrom(onnx.numpy_helper.from_array(np.array([-1, 12]), "s"))
    x = RNG.standard_normal((8, 3, 2, 2)).astype(np.float32)
    y = RNG.standard_normal((8, 2)).astype(np.float32)
    weights = []
    for model, setting in ((fixed, True), (dynamic, False)):
        trainer = Trainer(model, loss="mse", backend=backend, dynamic_batch=setting)
        trainer.fit(x, y, batch_size=4, epochs=2, verbose=0)
        weights.append(trainer.get_weights()["w"])
    np.testing.assert_array_equal(*weights)


def test_a_checkpoint_resumes_with_any_batch(tmp_path: Any) -> None:
    trainer = Trainer(model_of(FLAT, 1), loss="mse", dynamic_batch=True)
    trainer.save(tmp_path / "t.onnxfit")
    loaded = Trainer.load(tmp_path / "t.onnxfit")
    x = RNG.standard_normal((4, 3, 2, 2)).astype(np.float32)
    np.testing.assert_array_equal(loaded.predict(x), trainer.predict(x))


def test_the_error_of_a_fixed_batch_names_the_way_out() -> None:
    x = np.zeros((8, 3, 2, 2), np.float32)
    trainer = Trainer(model_of(FLAT, 1), loss="mse")
    with pytest.raises(DataError, match=r"onnxfit\.dynamic_batch\(model\).*dynamic_batch=True"):
        trainer.fit(x, np.zeros((8, 2), np.float32), batch_size=4)
    with pytest.raises(SettingError, match="dynamic_batch must be True or False, got 'yes'"):
        Trainer(model_of(FLAT, 1), loss="mse", dynamic_batch="yes")


IN_THE_WAY = {
    "rows against each other": (
        "(float[1, 3] x) => (float[1, 1] y)"
        " { t = Transpose <perm = [1, 0]> (x)  y = MatMul(x, t) }",
        r"MatMul 'MatMul_y': its output is \(1, 1\) for 1 rows, and \(3, 3\)",
    ),
    "a mean of all rows": (
        "(float[1, 3] x) => (float[1, 3] y)"
        " { m = ReduceMean <axes = [0], keepdims = 1> (x)  y = Sub(x, m) }",
        r"y would differ from the original, first at ReduceMean 'ReduceMean_m'\.",
    ),
    "one row of many": (
        "(float[1, 3] x) => (float[3] y) <int64 i = {0}> { y = Gather <axis = 0> (x, i) }",
        r"no output has the batch axis of x; the batch axis is lost at Gather 'Gather_y'",
    ),
    "different rows in a constant": (
        "(float[2, 3] x) => (float[2, 3] y) <float[2, 1] c = {1, 2}> { y = Add(x, c) }",
        r"Add 'Add_y': its input 'c' has 2 different entries along axis 0",
    ),
}


@pytest.mark.parametrize("name", IN_THE_WAY)
def test_an_error_names_the_node_in_the_way(name: str) -> None:
    graph, message = IN_THE_WAY[name]
    with pytest.raises(ModelError, match=message) as info:
        dynamic_batch(model_of(graph, 1))
    assert len(str(info.value).splitlines()) <= 4


def _attention_layers(layers: int, end: str) -> onnx.ModelProto:
    """Layers whose Reshapes have several axes that may be the batch, and then `end`."""
    nodes = []
    for i in range(layers):
        nodes.append(
            f"a{i} = Reshape(x{i}, heads)  b{i} = Transpose <perm = [0, 2, 1, 3]> (a{i})"
            f" c{i} = Reshape(b{i}, flat)  d{i} = Softmax(c{i})  x{i + 1} = Reshape(d{i}, back)"
        )
    return model_of(
        "(float[1, 3, 4] x0) => (float[A, Z] y) <int64[4] heads = {1, 3, 2, 2},"
        f" int64[3] flat = {{2, 3, 2}}, int64[3] back = {{1, 3, 4}}, int64[2] rows = {{1, 12}}>"
        f" {{ {' '.join(nodes)} z = Reshape(x{layers}, rows)  {end} }}",
        1,
    )


def test_a_node_in_the_way_is_found_without_walking_the_graph_for_each_axis(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    visited = 0
    visit = BatchAxisPropagation._visit

    def counting(walk: BatchAxisPropagation, *nodes: Any) -> None:
        nonlocal visited
        visited += 1
        visit(walk, *nodes)

    monkeypatch.setattr(BatchAxisPropagation, "_visit", counting)
    model = _attention_layers(40, "t = Transpose(z)  y = MatMul(z, t)")
    with pytest.raises(ModelError, match=r"MatMul 'MatMul_y': its output is \(1, 1\) for 1 rows"):
        dynamic_batch(model)
    assert visited < 3 * len(model.graph.node)


def test_an_axis_that_loses_the_batch_does_not_hide_the_node_in_the_way() -> None:
    graph = (
        "(float[1, 4] x) => (float[1, 1] y) <int64[3] s = {1, 1, 4}, int64[1] last = {4}> {"
        " a = Reshape(x, s)  b = Reshape(a, last)  t = Transpose(a)  c = MatMul(t, a)"
        " y = ReduceMean <axes = [0, 1, 2], keepdims = 0> (c) }"
    )
    with pytest.raises(ModelError, match="because of MatMul 'MatMul_c'"):
        dynamic_batch(model_of(graph, 1))


def test_a_batch_of_no_rows_cannot_be_changed() -> None:
    text = "(float[0, 3] x) => (float[0, 3] y) { y = Relu(x) }"
    with pytest.raises(ModelError, match="batch size of input 'x' is 0, along axis 0"):
        dynamic_batch(model_of(text, 1))


def test_several_inputs_and_their_axes() -> None:
    two = "(float[1, 3] a, float[1, 3] b) => (float[1, 3] y) { y = Add(a, b) }"
    edited = dynamic_batch(model_of(two, 1), name="N")
    assert [sizes(v) for v in (*edited.graph.input, *edited.graph.output)] == [["N", 3]] * 3
    table = (
        "(float[1, 3] a, float[2, 3] t) => (float[1, 2] y) { s = Transpose(t)  y = MatMul(a, s) }"
    )
    with pytest.raises(ModelError, match=r"have different batch sizes: a 1 .*, t 2 along"):
        dynamic_batch(model_of(table, 1))
    edited = dynamic_batch(model_of(table, 1), axes={"t": None})
    assert [sizes(v) for v in edited.graph.input] == [["batch", 3], [2, 3]]
    columns = "(float[3, 1] a) => (float[3, 1] y) { y = Relu(a) }"
    edited = dynamic_batch(model_of(columns, 1), axes={"a": -1})
    assert sizes(edited.graph.output[0]) == [3, "batch"]


def test_the_batch_of_an_initial_state_is_axis_1() -> None:
    graph = (
        "(float[4, 1, 3] x, float[1, 1, 2] h) => (float[4, 1, 1, 2] y)"
        " <float[1, 6, 3] w, float[1, 6, 2] r>"
        " { y, last = GRU <hidden_size = 2> (x, w, r, , , h) }"
    )
    edited = dynamic_batch(model_of(graph, 1), axes={"x": 1})
    assert [sizes(v) for v in edited.graph.input] == [[4, "batch", 3], [1, "batch", 2]]
    assert sizes(edited.graph.output[0]) == [4, 1, "batch", 2]


def test_wrong_axes_are_refused() -> None:
    model = model_of(FLAT, 1)
    with pytest.raises(UnknownNameError, match="No input is called 'X'"):
        dynamic_batch(model, axes={"X": 0})
    with pytest.raises(
        SettingError, match=r"axes\['x'\] must be a whole number from -4 to 3, or None"
    ):
        dynamic_batch(model, axes={"x": 4})
    with pytest.raises(ModelError, match="no input with a batch axis"):
        dynamic_batch(model, axes={"x": None})


def test_a_dynamic_model_is_returned_as_it_is() -> None:
    model = onnx.parser.parse_model(HEADER + "g (float[N, 3] x) => (float[N, 3] y) { y = Relu(x) }")
    assert dynamic_batch(model) == model


def test_a_renamed_dimension_is_mended_too() -> None:
    model = model_of(FLAT, 1)
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_param = "N"
    x = RNG.standard_normal((3, 3, 2, 2)).astype(np.float32)
    assert run(dynamic_batch(model), x=x)[0].shape == (3, 2)


def test_open_sizes_beside_the_batch_stay_open() -> None:
    graph = (
        "(float[1, L, 4] x) => (float[1, L, 2, 2] y) <int64[4] s = {1, -1, 2, 2}>"
        " { y = Reshape(x, s) }"
    )
    model = onnx.parser.parse_model(f"{HEADER} g {graph}")
    edited = dynamic_batch(model)
    assert sizes(edited.graph.input[0]) == ["batch", "L", 4]
    assert run(edited, x=np.zeros((3, 7, 4), np.float32))[0].shape == (3, 7, 2, 2)


# ---------------------------------------------------------------------- Ifs


BRANCHES = (
    "y = If(c) <then_branch = t () => (float[1, 2, 2] a) { a = Reshape(x, s) },"
    " else_branch = e () => (float[1, 2, 2] b) { n = Neg(x)  b = Reshape(n, s) }>"
)
IF_INPUTS = (
    "(float[1, 4] x, int64 rate) => (float[1, 2, 2] y) <int64 r = {8}, int64[3] s = {1, 2, 2}>"
)


@pytest.mark.parametrize("rate", [8, 9])
def test_a_fixed_input_leaves_one_branch_of_an_if(rate: int) -> None:
    original = model_of(f"{IF_INPUTS} {{ c = Equal(rate, r)  {BRANCHES} }}", 1)
    edited = dynamic_batch(original, fixed_inputs={"rate": rate})
    assert [value.name for value in edited.graph.input] == ["x"]
    x = RNG.standard_normal((3, 4)).astype(np.float32)
    single = [run(original, x=x[i : i + 1], rate=np.array(rate))[0] for i in range(3)]
    np.testing.assert_array_equal(run(edited, x=x)[0], np.concatenate(single))


def test_an_if_in_the_way_is_named_with_its_condition() -> None:
    original = model_of(f"{IF_INPUTS} {{ c = Equal(rate, r)  {BRANCHES} }}", 1)
    with pytest.raises(ModelError) as info:
        dynamic_batch(original)
    message = str(info.value)
    assert "because of If 'If_y'" in message
    assert "its condition 'c' is unknown, because it depends on 'rate'" in message
    assert "dynamic_batch(model, fixed_inputs={'rate': ...})" in message


def test_a_loop_whose_body_accepts_any_batch_stays() -> None:
    graph = (
        "(float[1, 4] x) => (float[1, 4] y) <int64 n = {3}, bool go = {1}> {"
        " y = Loop(n, go, x) <body = b (int64 i, bool c, float[1, 4] s) => (bool d, float[1, 4] t)"
        " { d = Identity(c)  t = Add(s, s) }> }"
    )
    edited = dynamic_batch(model_of(graph, 1))
    assert sizes(edited.graph.output[0]) == ["batch", 4]
    x = RNG.standard_normal((3, 4)).astype(np.float32)
    np.testing.assert_array_equal(run(edited, x=x)[0], 8 * x)


def test_a_dynamic_file_with_an_if_is_returned_unchanged() -> None:
    graph = (
        "(float[N, 4] x, int64 rate) => (float[N, 4] y) <int64 r = {8}> { c = Equal(rate, r)"
        " y = If(c) <then_branch = t () => (float[N, 4] a) { a = Relu(x) },"
        " else_branch = e () => (float[N, 4] b) { b = Neg(x) }> }"
    )
    original = onnx.parser.parse_model(f"{HEADER} g {graph}")
    assert dynamic_batch(original) == original


def test_an_if_on_the_rank_is_folded_and_one_on_the_batch_is_not() -> None:
    rank = (
        "(float[1, 4] x) => (float[1, 2, 2] y) <int64 two = {2}, int64[3] s = {1, 2, 2}>"
        f" {{ h = Shape(x)  k = Size(h)  c = Equal(k, two)  {BRANCHES} }}"
    )
    x = RNG.standard_normal((3, 4)).astype(np.float32)
    edited = dynamic_batch(model_of(rank, 1))
    assert "If" not in [node.op_type for node in edited.graph.node]
    np.testing.assert_array_equal(run(edited, x=x)[0], x.reshape(3, 2, 2))
    batch = (
        "(float[1, 4] x) => (float[1, 2, 2] y)"
        " <int64 one = {1}, int64[3] s = {1, 2, 2}, int64 zero = {0}>"
        f" {{ h = Shape(x)  k = Gather(h, zero)  c = Equal(k, one)  {BRANCHES} }}"
    )
    with pytest.raises(ModelError, match=r"If 'If_y': .* it is computed from inputs with a batch"):
        dynamic_batch(model_of(batch, 1))


# ---------------------------------------------------------------------- dynamic files


def test_a_file_that_runs_with_any_batch_is_returned_although_sizes_look_fixed() -> None:
    graph = (
        "(float[N, 3, 4] x) => (float[N, 1, 4] y) <int64[3] s = {1, 1, 4}, float[1, 1, 4] k>"
        " { m = Expand(k, s)  a = ReduceMean <axes = [1]> (x)  y = Mul(a, m) }"
    )
    original = model_of(graph, 1)
    assert dynamic_batch(original) == original


def test_the_name_of_a_size_tells_the_batch_axis() -> None:
    graph = (
        "(float[batch, 3] x, float[2, batch, 3] state) => (float[batch, 3] y)"
        " <int64 i = {0}, int64[2] s = {1, 3}>"
        " { g = Gather(state, i)  a = Add(x, g)  y = Reshape(a, s) }"
    )
    edited = dynamic_batch(model_of(graph, 1))
    assert [sizes(v) for v in edited.graph.input] == [["batch", 3], [2, "batch", 3]]
    x, state = (RNG.standard_normal(s).astype(np.float32) for s in ((3, 3), (2, 3, 3)))
    np.testing.assert_allclose(run(edited, x=x, state=state)[0], x + state[0], rtol=1e-6)


def test_an_output_with_a_wrong_rank_is_declared_as_it_is() -> None:
    graph = (
        "(float[1, 6, 4] x) => (float[1, steps] y) <int64[3] s = {1, 6, 4}> { y = Reshape(x, s) }"
    )
    assert sizes(dynamic_batch(model_of(graph, 1)).graph.output[0]) == ["batch", 0, 0]


def test_rounding_of_a_nearly_singular_input_is_no_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = "(int64[1, 64] x) => (float[1, 64] y) { y = Cast <to = 1> (x) }"
    close, calls = row_check.is_close, []

    def rounding(array: Any, expected: Any, factor: float = 1.0) -> bool:
        """Small integers differ by more than the tolerance, but by less than 50 times as much."""
        calls.append(float(expected.max()))
        return close(array, expected) and (expected.max() > 1 or factor > 1)

    monkeypatch.setattr(row_check, "is_close", rounding)
    assert sizes(dynamic_batch(model_of(graph, 1)).graph.output[0]) == ["batch", 64]
    assert max(calls) > 1


def test_rows_merged_after_another_axis_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = (
        "(float[1, 3, 4] x) => (float[3, 4] y) <int64[2] s = {3, 4}>"
        " { t = Transpose <perm = [1, 0, 2]> (x)  y = Reshape(t, s) }"
    )
    x = RNG.standard_normal((2, 3, 4)).astype(np.float32)
    edited = dynamic_batch(model_of(graph, 1))
    np.testing.assert_array_equal(run(edited, x=x)[0], x.transpose(1, 0, 2).reshape(6, 4))
    monkeypatch.setattr(row_check, "is_close", lambda *_: False)
    with pytest.raises(ModelError, match="y would differ from the original"):
        dynamic_batch(model_of(graph, 1))
