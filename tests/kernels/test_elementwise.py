"""Groups of elementwise nodes: no circle, the same bits, and the updates that they are made for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxfit.gradients.update import initial_slots
from onnxfit.graph import names
from onnxfit.graph.index import attributes_of
from onnxfit.kernels.program import CODES
from onnxfit.kernels.transforms import with_kernels
from onnxfit.optimizers import SGD, Adam, Optimizer
from onnxfit.optimizers.base import WeightInfo
from onnxfit.registry import registry
from tests.kernels.sessions import assert_same, kernel_types, parsed, run

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
ONE_KERNEL = {name for name, o in OPTIMIZERS.items() if o.elementwise} - {
    "sgd",
    "lion",
    "adadelta",
    "adopt",
}


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
        info = WeightInfo("weight", shape, w.dtype)
        own = optimizer.for_weights([info])["weight"].optimizer  # Muon has Adam for vectors
        for slot, value in initial_slots(own, "weight", w).items():
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
        kernel = next(node for node in nodes if node.op_type == "Elementwise")
        program = attributes_of(kernel)["program"]
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


@pytest.mark.parametrize("kind", ["float", "double"])
def test_a_sum_of_several_values_is_read_once(kind: str, kernels: Path) -> None:
    model = parsed(f"""g ({kind}[40,50] a, {kind}[40,50] b, {kind}[40,50] c, {kind}[40,50] d)
        => ({kind}[40,50] y, {kind}[40,50] z) {{ y = Sum(a, b, c, d) z = Sum(c, a, a) }}""")
    (first, second) = with_kernels(model).graph.node
    assert {first.op_type, second.op_type} == {
        "Elementwise64" if kind == "double" else "Elementwise"
    }
    assert sorted(map(len, (first.input, second.input))) == [2, 4]
    rng = np.random.default_rng(0)
    dtype = {"float": np.float32, "double": np.float64}[kind]
    feeds = {name: rng.standard_normal((40, 50)).astype(dtype) for name in "abcd"}
    assert_same(model, feeds, kernels)
    y = run(with_kernels(model), feeds, kernels)[0]
    exact = sum(feeds[name].astype(np.float64) for name in "abcd")
    np.testing.assert_allclose(y, exact, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("inputs", "body"),
    [
        ("float[3] a, float[3] b", "y = Sum(a, b)"),
        ("float[3] a, float[3] b, float[1] c", "y = Sum(a, b, c)"),
        ("int32[3] a, float[3] b", "c = Cast<to = 1>(a) y = Mean(c, b, b)"),
    ],
)
def test_other_sums_keep_their_operator(inputs: str, body: str) -> None:
    model = parsed(f"g ({inputs}) => (float[3] y) {{ {body} }}")
    assert with_kernels(model) is model


def test_a_group_is_of_one_stage() -> None:
    """Or the forward pass would wait, with its inputs in memory."""
    model = parsed(
        "g (float[3] a, float[3] b) => (float[3] z)"
        "{ u = Neg(a)  v = Mul(u, b)  w = Neg(v)  z = Mul(w, w) }"
    )
    for node, name in zip(model.graph.node, ("fc/1", "fc/2", "gradient/1", "gradient/2")):
        node.name = name
    assert kernel_types(model) == ["Elementwise", "Elementwise"]


def test_an_update_has_the_last_operators_of_a_gradient_that_nothing_else_reads() -> None:
    text = "g (float[3] a, float[3] b) => ({}) {{ u = Neg(a)  v = Mul(u, b)  z = Sub(v, b) }}"
    found = []
    for outputs in ("float[3] z", "float[3] z, float[3] v"):
        model = parsed(text.format(outputs))
        for node, name in zip(model.graph.node, ("gradient/1", "gradient/2", "optimizer/1")):
            node.name = name
        found.append([list(node.output) for node in with_kernels(model).graph.node])
    assert found == [[["z"]], [["v"], ["z"]]]


GELU = """g (float[3, 5] x, float[5, 5] w, float c) => (float[3, 5] dx) {
    u = Mul(x, c)  e = Erf(u)  h = HardSigmoid<alpha=0.5, beta=0.5>(e)  y = Mul(x, h)
    dy = MatMul(y, w)
    q = Mul(u, u)  n = Neg(q)  p = Exp(n)  t = Mul(p, u)  s = Add(h, t)  dx = Mul(dy, s) }"""


def test_cheap_results_are_computed_again_and_slow_ones_are_kept(kernels: Path) -> None:
    model = parsed(GELU, scope="gradient")
    nodes = with_kernels(model).graph.node
    forward, backward = (node for node in nodes if node.op_type == "Elementwise")
    assert list(forward.output) == ["h", "y"]  # not u, which is a product
    assert set(backward.input) == {"dy", "h", "x", "c"}
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((3, 5)), "w": rng.standard_normal((5, 5)), "c": 0.7}
    feeds = {name: np.array(value, np.float32) for name, value in feeds.items()}
    (expected,), (found,) = run(model, feeds), run(with_kernels(model), feeds, kernels)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_graphs_for_inference_are_left_to_onnxruntime() -> None:
    text = (
        "g (float[2,3,8] x, float e) => (float[2,3,1] s) <int64[1] k = {2}>"
        "{ q = Mul(x, x)  v = ReduceMean(q, k)  w = Add(v, e)  s = Sqrt(w) }"
    )
    model = parsed(text, scope="model")
    assert with_kernels(model) is model
    assert kernel_types(parsed(text)) == ["Elementwise"]


@pytest.mark.parametrize("read", ["Identity(m)", "Reshape(m, k)"])
def test_a_slot_is_not_read_again_after_the_update_may_have_overwritten_it(read: str) -> None:
    """The norm needs all of the next m, so the weight is computed by another program."""
    model = parsed(f"""g (float[3] m, float[3] grad, float[3] w, float c)
        => (float[3] q, float[3] z) <int64[1] k = {{3}}> {{
        v = {read}  old = Mul(v, c)  q = Add(old, grad)  n = Softmax(q)  t = Mul(n, old)
        z = Sub(w, t) }}""")
    assert "v" in writer_of("z", model).input
    for node in model.graph.node:
        node.input[:] = [names.updated("m") if n == "q" else n for n in node.input]
        node.output[:] = [names.updated("m") if n == "q" else n for n in node.output]
    for value in (*model.graph.output, *model.graph.value_info):
        value.name = names.updated("m") if value.name == "q" else value.name
    assert "v" not in writer_of("z", model).input


def writer_of(output: str, model: onnx.ModelProto) -> onnx.NodeProto:
    return next(node for node in with_kernels(model).graph.node if output in node.output)


def test_an_output_inside_of_an_instruction_takes_no_place_too_many(kernels: Path) -> None:
    count = 15
    scalars = ", ".join(f"float c{i}" for i in range(count))
    lines = [f"u{i} = Add(a, c{i})" for i in range(count)]
    lines += ["q = Sqrt(c)  m = Mul(s, b)  e = Add(q, t)  d = Div(m, e)  w = Sub(a, d)"]
    lines += ["v0 = Mul(w, u14)", *(f"v{i} = Mul(v{i - 1}, u{14 - i})" for i in range(1, count))]
    model = parsed(
        f"g (float[3] a, float[3] b, float[3] c, float s, float t, {scalars})"
        f" => (float[3] q, float[3] v14) {{ {'  '.join(lines)} }}"
    )
    feeds = {name: np.array([1, 2, 0.5], np.float32) for name in "abc"}
    feeds |= {n: np.array(0.5, np.float32) for n in ("s", "t", *(f"c{i}" for i in range(count)))}
    for found, right in zip(
        run(with_kernels(model), feeds, kernels), run(model, feeds), strict=True
    ):
        np.testing.assert_allclose(found, right, rtol=1e-6)


def test_a_program_with_too_many_temporaries_stays_several_operators(kernels: Path) -> None:
    count = 20
    sums = " ".join(f"u{i} = Add(a, c{i})" for i in range(count))
    tree = " ".join(
        f"v{i} = Mul({'a' if i == 0 else f'v{i - 1}'}, u{count - 1 - i})" for i in range(count)
    )
    scalars = ", ".join(f"float c{i}" for i in range(count))
    text = f"g (float[3] a, {scalars}) => (float[3] v{count - 1}) {{ {sums} {tree} }}"
    model = parsed(text)
    feeds = {"a": np.array([1, 2, -0.5], np.float32)}
    feeds |= {f"c{i}": np.array(i / 10, np.float32) for i in range(count)}
    (expected,), (found,) = run(model, feeds), run(with_kernels(model), feeds, kernels)
    np.testing.assert_array_equal(found, expected)
    assert kernel_types(model) == []


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


SIZES = {  # of the pieces of a vector
    "small": (3, 1, 5),
    "blocks": (511, 513, 1),
    "none": (0, 4, 0, 0, 3, 0),
    "tasks": (8191, 2, 20000, 7),
}


def joined(
    sizes: Sequence[int],
    update: str = "v = Mul(g, g) w_next = Sub(w, v)",
    outputs: str = "",
    kind: str = "float",
) -> onnx.ModelProto:
    """An update of the vector w by a vector g, which joins the vectors g0, g1, ..."""
    n = sum(sizes)
    parts = {f"g{i}": size for i, size in enumerate(sizes)}
    inputs = ", ".join(f"{kind}[{size}] {name}" for name, size in parts.items())
    return parsed(f"""g ({inputs}, {kind}[{n}] w) => ({kind}[{n}] w_next{outputs})
        {{ g = Concat<axis = 0>({", ".join(parts)}) {update} }}""")


def vectors(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        value.name: rng.standard_normal([dim.dim_value for dim in value.type.tensor_type.shape.dim])
        .astype(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
        for value in model.graph.input
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["float", "double"])
@pytest.mark.parametrize("size", SIZES)
def test_a_vector_is_read_where_its_pieces_are(size: str, kind: str, kernels: Path) -> None:
    plain = joined(SIZES[size], kind=kind)
    faster = with_kernels(plain)
    assert len(faster.graph.node) == 1
    for threads in (1, 2, 3, 8):
        (found,) = run(faster, vectors(plain), kernels, threads)
        np.testing.assert_array_equal(found, run(plain, vectors(plain))[0])


def test_pieces_may_have_other_shapes(kernels: Path) -> None:
    plain = parsed("""g (float[2,3] a, float[4] b, float[1,5] c, float[15] w) => (float[15] w_next)
        <int64[1] k = {-1}> { f = Reshape(a, k) h = Reshape(c, k) g = Concat<axis = 0>(f, b, h)
            v = Mul(w, w) w_next = Add(v, g) }""")
    faster = with_kernels(plain)
    assert [node.input[:] for node in faster.graph.node] == [["w", "a", "b", "c"]]
    feeds = vectors(plain)
    np.testing.assert_array_equal(run(faster, feeds, kernels)[0], run(plain, feeds)[0])


@pytest.mark.parametrize(
    ("sizes", "update", "outputs"),
    [
        ((3, 2), "v = Mul(g, g) w_next = Sub(w, v)", ", float[5] g"),
        ((3, 2), "v = Mul(g, g) w_next = Sub(w, v) n = ReduceSumSquare(g)", ", float n"),
        ((3, 2), "v = Mul(g, g) w_next = Neg(v)", ""),
        ((5,), "v = Mul(g, g) w_next = Sub(w, v)", ""),
        ((1,), "v = Mul(g, g) w_next = Sub(w, v)", ""),
    ],
    ids=["a result", "read elsewhere", "the only tensor", "one piece", "a scalar"],
)
def test_other_vectors_are_joined_before(
    sizes: tuple[int, ...], update: str, outputs: str, kernels: Path
) -> None:
    plain = joined(sizes, update, outputs)
    faster = with_kernels(plain)
    assert "Concat" in {node.op_type for node in faster.graph.node}
    for found, right in zip(
        run(faster, vectors(plain), kernels), run(plain, vectors(plain)), strict=True
    ):
        np.testing.assert_allclose(found, right, rtol=1e-6)


@pytest.mark.parametrize("first", ["u = Mul(g, s) t = Mul(x, u)", "u = Mul(x, z) t = Mul(g, u)"])
def test_a_kernel_whose_nodes_another_one_computes_again(first: str, kernels: Path) -> None:
    """A node may be in a group only for another group, which then reads its vector."""
    plain = parsed(
        f"""g (float[3] a, float[2] b, float[5] x, float[5] z, float s) => (float[5] u, float[5] q)
        {{ g = Concat<axis = 0>(a, b) {first} v = Mul(t, x) q = Add(v, z) }}"""
    )
    for node, stage in zip(plain.graph.node, ["gradient"] * 3 + ["optimizer"] * 2, strict=True):
        node.name = f"{stage}/{node.output[0]}"
    feeds = vectors(plain)
    for found, right in zip(
        run(with_kernels(plain), feeds, kernels), run(plain, feeds), strict=True
    ):
        np.testing.assert_array_equal(found, right)


def test_a_piece_that_an_update_may_overwrite_is_copied(kernels: Path) -> None:
    """An update may write its tensor before another one reads it."""
    plain = parsed(f"""g (float[4] a, float[3] b, float[7] w)
        => (float[7] "{names.updated("w")}", float[4] "{names.updated("a")}")
        {{ g = Concat<axis = 0>(a, b) v = Mul(g, w) "{names.updated("w")}" = Sub(w, v)
            u = Mul(a, a) "{names.updated("a")}" = Add(u, u) }}""")
    assert "Concat" in {node.op_type for node in with_kernels(plain).graph.node}


def test_wrong_pieces_are_refused(kernels: Path) -> None:
    faster = with_kernels(joined((3, 2)))
    faster.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 4
    with pytest.raises(Exception, match="pieces of another size"):
        run(faster, vectors(faster), kernels)
    (node,) = faster.graph.node
    (pieces,) = (each for each in node.attribute if each.name == "pieces")
    for number in (0, -1, 3, 4, 2**62):
        pieces.i = number
        with pytest.raises(Exception, match="out of range"):
            run(faster, vectors(faster), kernels)


@pytest.mark.parametrize("kind", ["float", "double"])
@pytest.mark.parametrize(
    ("shape", "small"),
    [
        ((6, 700), (6, 1)),
        ((6, 700), (700,)),
        ((6, 700), (1, 700)),
        ((5, 7, 60), (7, 1)),
        ((5, 7, 60), (5, 1, 1)),
        ((5, 7, 60), (7, 60)),
        ((3, 257, 3), (257, 1)),
    ],
)
def test_a_parameter_is_repeated_along_axes(
    kind: str, shape: tuple[int, ...], small: tuple[int, ...], kernels: Path
) -> None:
    model = parsed(f"""g ({kind}{[*shape]} a, {kind}{[*small]} s, {kind}{[*shape]} b)
        => ({kind}{[*shape]} y) {{ u = Mul(a, s)  v = Sub(b, s)  y = Div(u, v) }}""")
    assert kernel_types(model) == [{"float": "Elementwise", "double": "Elementwise64"}[kind]]
    rng = np.random.default_rng(0)
    dtype = {"float": np.float32, "double": np.float64}[kind]
    feeds = {
        name: rng.standard_normal(sizes).astype(dtype)
        for name, sizes in (("a", shape), ("s", small), ("b", shape))
    }
    for threads in (1, 3):
        assert_same(model, feeds, kernels, threads)


@pytest.mark.parametrize(
    ("small", "line"), [([2, 1, 4], "s = Identity(t)"), ([1, 3, 1], "s = Softmax(t)")]
)
def test_other_values_are_not_repeated(small: list[int], line: str) -> None:
    """A value that is repeated along an axis between its own, and one that the graph computes."""
    model = parsed(f"""g (float[2, 3, 4] a, float{small} t) => (float[2, 3, 4] y)
        {{ {line}  u = Mul(a, s)  v = Neg(u)  y = Add(u, v) }}""")
    (node,) = (n for n in with_kernels(model).graph.node if n.op_type == "Elementwise")
    assert list(node.input) == ["u"]


UNARY = ("Softmax", "Neg", "Sqrt", "Erf", "HardSigmoid")
OPERATORS = st.sampled_from(["Add", "Mul", "Max", "Sub", *UNARY])


@settings(max_examples=60)
@given(st.data())
def test_random_graphs_keep_their_results(library_file: Path, data: st.DataObject) -> None:
    values, lines = ["a", "b", "s"], []
    for i in range(data.draw(st.integers(2, 14))):
        op_type = data.draw(OPERATORS)
        count = 1 if op_type in UNARY else 2
        known = values if count == 2 else [v for v in values if v != "s"]
        read = [data.draw(st.sampled_from(known)) for _ in range(count)]
        if read == ["s", "s"]:
            read[0] = "a"
        lines.append(f"v{i} = {op_type}({', '.join(read)})")
        values.append(f"v{i}")
    results = data.draw(st.sets(st.sampled_from(values[3:]), min_size=1)) | {values[-1]}
    outputs = ", ".join(f"float[5] {name}" for name in sorted(results))
    model = parsed(f"g (float[5] a, float[5] b, float s) => ({outputs}) {{ {' '.join(lines)} }}")
    for node in model.graph.node:
        node.name = data.draw(st.sampled_from(["", "gradient/", "optimizer/"])) + node.name
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
    # Erf(NaN) is -1 in onnxruntime, and NaN in the library.
    every = onnx.ModelProto()
    every.CopyFrom(model)
    del every.graph.output[:]
    every.graph.output.extend(onnx.ValueInfoProto(name=name) for name in values[3:])
    if "Erf" in " ".join(lines) and np.isnan(run(every, feeds)).any():
        return
    for found, right in zip(run(faster, feeds, library_file), run(model, feeds), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-6)
