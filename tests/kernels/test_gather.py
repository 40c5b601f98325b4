"""The gradient of a Gather of rows by one operator, and the update of plain SGD."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

import onnxfit
from onnxfit.graph.names import updated
from onnxfit.kernels import gather, library, transforms
from onnxfit.kernels.program import CODES
from onnxfit.kernels.transforms import with_kernels
from tests.kernels.sessions import (
    differentiated,
    kernel_model,
    kernel_types,
    layer_types,
    run,
)

# (shape of the indices, shape of the table)
CASES = {
    "vector": ((50,), (20, 24)),
    "batches of tokens": ((4, 30), (100, 16)),
    "one row": ((1,), (7, 33)),
    "narrow": ((300,), (500, 1)),
    "cubes": ((5, 3), (40, 3, 4)),
    "line": ((60,), (200,)),
    "many tasks": ((2000,), (3000, 40)),
    "several scatters": ((3000,), (90, 96)),
    "one thread": ((5000,), (60000, 40)),
    "sums of equal indices": ((1500,), (30000, 96)),
    "no rows": ((0,), (5, 8)),
}
KINDS = ("int64", "int32")
Feeds = dict[str, np.ndarray]


def model_of(name: str, kind: str = "int64", *, updates: bool = False) -> onnx.ModelProto:
    """y = w[i]; the gradient of w, or w less its gradient."""
    indices, table = CASES[name]
    shapes = (",".join(map(str, shape)) for shape in (indices, table, (*indices, *table[1:])))
    i, w, y = shapes
    text = f"g (float[{w}] w, {kind}[{i}] i) => (float[{y}] y) {{ y = Gather(w, i) }}"
    model = differentiated(text, ["w"])
    return with_update(model) if updates else model


def with_update(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model that computes w less its gradient instead of the gradient."""
    model.graph.node.append(onnx.helper.make_node("Sub", ["w", "w_grad"], ["next"], "update"))
    model.graph.value_info.append(model.graph.output[1])
    model.graph.output[1].name = "next"
    return model


def feeds_of(name: str, kind: str = "int64") -> Feeds:
    indices, table = CASES[name]
    rng = np.random.default_rng(0)
    numbers = rng.integers(-table[0], table[0], indices).astype(kind)
    slope = (*indices, *table[1:])
    w, dy = (rng.standard_normal(shape).astype(np.float32) for shape in (table, slope))
    w[:1] = dy[:1] = -0.0
    return {"w": w, "i": numbers, "y_grad": dy}


@pytest.mark.parametrize("updates", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_float64_and_of_the_operators(
    name: str, kind: str, updates: bool, kernels: Path
) -> None:
    plain, feeds = model_of(name, kind, updates=updates), feeds_of(name, kind)
    faster = with_kernels(plain)
    assert {node.op_type for node in faster.graph.node} - {"Reshape"} == {
        "Gather",
        "GatherGradient",
    }
    found, right = run(faster, feeds, kernels)[1], run(plain, feeds)[1]
    np.testing.assert_array_equal(found, right)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(right))
    exact = np.zeros(feeds["w"].shape)
    np.add.at(exact, feeds["i"].reshape(-1), feeds["y_grad"].reshape(-1, *exact.shape[1:]))
    exact = feeds["w"] - exact if updates else exact
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-5)


def scalar_products(shape: str, product: str = "Mul(f, x)", *, updates: bool) -> onnx.ModelProto:
    """y = the scalar products of x with rows w[i]; the gradient of w, or w less its gradient."""
    text = f"""g (float[20,24] w, int64[{shape}] i, float[{shape},24] x) => (float[{shape},1] y)
        <int64[1] last = {{-1}}> {{ f = Gather(w, i) p = {product} y = ReduceSum(p, last) }}"""
    return with_update(differentiated(text, ["w"])) if updates else differentiated(text, ["w"])


def scalar_feeds(model: onnx.ModelProto) -> Feeds:
    rng = np.random.default_rng(0)
    shapes = {
        v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input
    }
    feeds = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    return {**feeds, "i": rng.integers(-20, 20, shapes["i"])}


@pytest.mark.parametrize("updates", [False, True])
@pytest.mark.parametrize("product", ["Mul(f, x)", "Mul(x, f)"])
@pytest.mark.parametrize("shape", ["50", "5,9", "1"])
def test_the_kernel_multiplies_the_rows_of_scalar_products(
    shape: str, product: str, updates: bool, kernels: Path
) -> None:
    plain = scalar_products(shape, product, updates=updates)
    faster = with_kernels(plain)
    (kernel,) = (node for node in faster.graph.node if node.op_type == "GatherGradient")
    assert len(kernel.input) == 3 + updates
    feeds = scalar_feeds(plain)
    found, right = run(faster, feeds, kernels)[1], run(plain, feeds)[1]
    np.testing.assert_array_equal(found, right)
    for threads in range(2, 9):
        np.testing.assert_array_equal(run(faster, feeds, kernels, threads)[1], found)


@pytest.mark.parametrize("name", ["p_grad", "row", "state"])
def test_other_products_are_computed_before(name: str, kernels: Path) -> None:
    plain = scalar_products("50", updates=False)
    (product,) = (node for node in plain.graph.node if node.name.startswith("gradient/node_1/Mul"))
    if name == "p_grad":  # a result
        plain.graph.output.append(onnx.ValueInfoProto(name=product.output[0]))
    elif name == "row":  # the factors are those of columns
        plain.graph.input[2].type.tensor_type.shape.dim[0].dim_value = 1
    else:  # an update may overwrite x before the gradient of w reads it
        x = plain.graph.input[2]
        plain.graph.node.append(onnx.helper.make_node("Neg", ["x"], [updated("x")], "update"))
        plain.graph.output.append(
            onnx.helper.make_tensor_value_info(updated("x"), x.type.tensor_type.elem_type, (50, 24))
        )
    faster = with_kernels(plain)
    (kernel,) = (node for node in faster.graph.node if node.op_type == "GatherGradient")
    assert len(kernel.input) == 2
    feeds = scalar_feeds(plain)
    for found, right in zip(run(faster, feeds, kernels), run(plain, feeds), strict=True):
        np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize(
    ("shape", "factors"), [("2,3,24", "2,1,1"), ("6,4,6", "6,1,1"), ("3,2,24", "3,2,1")]
)
def test_rows_of_another_shape_are_multiplied_before(
    shape: str, factors: str, kernels: Path
) -> None:
    text = f"""g (float[20,24] w, int64[6] i, float[{factors}] x) => (float[{shape}] y)
        <int64[3] k = {{{shape}}}> {{ f = Gather(w, i) r = Reshape(f, k) y = Mul(r, x) }}"""
    plain = differentiated(text, ["w"])
    feeds = scalar_feeds(plain)
    found = run(with_kernels(plain), feeds, kernels)[1]
    np.testing.assert_array_equal(found, run(plain, feeds)[1])


@pytest.mark.parametrize("threads", range(1, 9))
@pytest.mark.parametrize("updates", [False, True])
def test_threads_change_nothing(updates: bool, threads: int, kernels: Path) -> None:
    for name in ("many tasks", "narrow"):
        model, feeds = with_kernels(model_of(name, updates=updates)), feeds_of(name)
        found, right = (run(model, feeds, kernels, n)[1] for n in (threads, 1))
        np.testing.assert_array_equal(found, right)


def test_rows_are_added_up_before_they_are_subtracted(kernels: Path) -> None:
    """One by one, they would be lost beside a large weight."""
    model, feeds = with_kernels(model_of("vector", updates=True)), feeds_of("vector")
    feeds["i"][:] = 3
    feeds["w"][:] = 1e8
    feeds["y_grad"][:] = 1
    changed = 1e8 - run(model, feeds, kernels)[1][3].astype(np.float64)
    assert (abs(changed - 50) <= 4).all()  # half of the distance to the next float32


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("place", ["w", "y_grad"])
def test_infinite_numbers_stay_in_their_row(place: str, value: float, kernels: Path) -> None:
    model, feeds = model_of("vector", updates=True), feeds_of("vector")
    feeds[place][3] = value
    found, right = run(with_kernels(model), feeds, kernels)[1], run(model, feeds)[1]
    np.testing.assert_array_equal(found, right)
    assert np.isfinite(found).all(axis=1).sum() == len(found) - 1


def test_a_gradient_that_is_read_again_is_computed() -> None:
    model = model_of("vector", updates=True)
    model.graph.output.append(model.graph.value_info[-1])
    assert kernel_types(model) == ["GatherGradient"]
    assert any(node.op_type == "Sub" for node in with_kernels(model).graph.node)


@pytest.mark.parametrize("inputs", [("w_grad", "w"), ("other", "w_grad"), ("w_grad", "w_grad")])
def test_other_differences_are_no_update(inputs: tuple[str, str], kernels: Path) -> None:
    model, feeds = model_of("vector", updates=True), feeds_of("vector")
    model.graph.node[-1].input[:] = inputs
    other = onnx.helper.make_tensor_value_info("other", onnx.TensorProto.FLOAT, (1, 24))
    model.graph.input.append(other)
    feeds["other"] = np.ones((1, 24), np.float32)
    faster = with_kernels(model)
    assert layer_types(model) == ["GatherGradient"]
    np.testing.assert_array_equal(run(faster, feeds, kernels)[1], run(model, feeds)[1])


def test_other_tables_keep_their_operators() -> None:
    doubles = "g (double[5,4] w, int64[3] i) => (double[3,4] y) { y = Gather(w, i) }"
    columns = "g (float[5,4] w, int64[3] i) => (float[5,3] y) { y = Gather<axis = 1>(w, i) }"
    unknown = "g (float[n,4] w, int64[3] i) => (float[3,4] y) { y = Gather(w, i) }"
    for text in (doubles, columns, unknown):
        assert kernel_types(differentiated(text, ["w"])) == []


def test_a_copied_gradient_keeps_its_operators() -> None:
    model = model_of("vector")
    noted = next(node for node in model.graph.node if node.metadata_props)
    model.graph.node.add().CopyFrom(noted)
    model.graph.node[-1].output[0] = "copy"
    assert kernel_types(model) == []


def test_vanished_indices_are_noticed() -> None:
    model = model_of("vector")
    for node in model.graph.node:
        node.input[:] = ["renamed" if name == "i" else name for name in node.input]
    assert kernel_types(model) == []


@pytest.mark.parametrize("number", [20, -21, 2**40])
@pytest.mark.parametrize("updates", [False, True])
def test_indices_out_of_range_are_refused(number: int, updates: bool, kernels: Path) -> None:
    model, feeds = with_kernels(model_of("vector", updates=updates)), feeds_of("vector")
    (reader,) = (node for node in model.graph.node if node.op_type == "Gather")
    model.graph.node.remove(reader)  # it would refuse them
    del model.graph.output[0]
    feeds["i"][7] = number
    with pytest.raises(Exception, match="index that the table does not have"):
        run(model, feeds, kernels)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dy": np.zeros((3, 5), np.float32)}, "one for each index"),
        ({"dy": np.zeros((2, 4), np.float32)}, "one for each index"),
        ({"dy": np.zeros((4, 3), np.float32)}, "one for each index"),
        ({"table": np.zeros((4, 4), np.float32)}, "table of its shape"),
        ({"table": np.zeros((5, 4), np.float64)}, "table of its shape"),
        ({"i": np.zeros(3, np.float32)}, "int32 or int64"),
        ({"dy": np.zeros((3, 4), np.float64)}, "float32 rows"),
        ({"more": np.zeros(1, np.float32)}, "a table, and factors"),
        ({"factors": np.zeros(4, np.float32)}, "factors, one for each index"),
        ({"factors": np.zeros(3, np.float64)}, "factors, one for each index"),
    ],
)
def test_wrong_inputs_are_refused(change: Feeds, message: str, kernels: Path) -> None:
    shapes = {"dy": (3, 4), "table": (5, 4)}
    feeds = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    feeds = {"i": np.zeros(3, np.int64), **feeds, **change}
    model = kernel_model("GatherGradient", feeds, ["next"])
    for value in model.graph.input:
        kind = onnx.helper.np_dtype_to_tensor_dtype(feeds[value.name].dtype)
        value.type.tensor_type.elem_type = kind
    attributes = {"shape": (5, 4), "has_factors": int("factors" in change)}
    model.graph.node[0].attribute.extend(map(onnx.helper.make_attribute, *zip(*attributes.items())))
    with pytest.raises(Exception, match=message):
        run(model, feeds, kernels)


def momentum_of(table: tuple[int, int], count: int, kind: str = "int64") -> onnx.ModelProto:
    """y = w[i]; an update of w and of a moment m by the gradient of w."""
    rows, columns = table
    text = f"""g (float[{rows},{columns}] w, {kind}[{count}] i, float[{rows},{columns}] m)
        => (float[{count},{columns}] y) {{ y = Gather(w, i) }}"""
    model = differentiated(text, ["w"])
    for op_type, inputs, output in (
        ("Add", ["m", "w_grad"], "m_next"),
        ("Sub", ["w", "m_next"], "w_next"),
    ):
        node = onnx.helper.make_node(op_type, inputs, [output], f"optimizer/{output}")
        model.graph.node.append(node)
        value = onnx.helper.make_tensor_value_info(output, onnx.TensorProto.FLOAT, table)
        model.graph.output.append(value)
    model.graph.value_info.append(model.graph.output[1])
    del model.graph.output[1]
    return model


def momentum_feeds(table: tuple[int, int], count: int, kind: str = "int64") -> Feeds:
    rng = np.random.default_rng(0)
    indices = rng.integers(-table[0], table[0], count)
    indices[: count // 2] %= 30  # rows that several indices have
    w, m = (rng.standard_normal(table, np.float32) for _ in range(2))
    dy = rng.standard_normal((count, table[1]), np.float32)
    return {"w": w, "m": m, "i": indices.astype(kind), "y_grad": dy}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("table", "count"), [((20000, 64), 500), ((3001, 350), 1500)])
def test_an_update_reads_the_rows_of_a_large_table(
    table: tuple[int, int], count: int, kind: str, kernels: Path
) -> None:
    plain, feeds = momentum_of(table, count, kind), momentum_feeds(table, count, kind)
    faster = with_kernels(plain)
    assert [n.op_type for n in faster.graph.node] == ["Gather", "ElementwiseOfRows"]
    found, right = run(faster, feeds, kernels)[1:], run(plain, feeds)[1:]
    for each, expected in zip(found, right, strict=True):
        np.testing.assert_array_equal(each, expected)
    moment = feeds["m"].astype(np.float64)
    np.add.at(moment, feeds["i"], feeds["y_grad"])
    np.testing.assert_allclose(found[0], moment, rtol=0, atol=1e-5)
    np.testing.assert_allclose(found[1], feeds["w"] - moment, rtol=0, atol=2e-5)
    for threads in range(2, 9):
        for each, expected in zip(run(faster, feeds, kernels, threads)[1:], found, strict=True):
            np.testing.assert_array_equal(each, expected)


def test_infinite_rows_stay_in_their_rows(kernels: Path) -> None:
    feeds = momentum_feeds((20000, 64), 500)
    feeds["y_grad"][7, 5], feeds["y_grad"][499, 6] = np.nan, np.inf
    found = run(with_kernels(momentum_of((20000, 64), 500)), feeds, kernels)[1]
    places = {(feeds["i"][7] % 20000, 5), (feeds["i"][499] % 20000, 6)}
    assert {*zip(*np.nonzero(~np.isfinite(found)))} == places


@pytest.mark.parametrize(
    ("table", "count"), [((16000, 64), 500), ((20000, 60), 500), ((20000, 64), 10001)]
)
def test_other_updates_read_the_whole_gradient(table: tuple[int, int], count: int) -> None:
    """The table is small, has few columns, or has an index for most of its rows."""
    assert kernel_types(momentum_of(table, count)) == ["GatherGradient", "Elementwise"]


def test_a_gradient_that_something_else_reads_is_computed() -> None:
    model = momentum_of((20000, 64), 500)
    model.graph.output.append(model.graph.value_info[-1])
    assert kernel_types(model) == ["GatherGradient", "Elementwise"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dy": np.zeros((3, 5), np.float32)}, "one for each index"),
        ({"dy": np.zeros((3, 4), np.float64)}, "one for each index"),
        ({"x": np.zeros((0, 4), np.float32)}, "one for each index"),
        ({"i": np.zeros(3, np.float32)}, "int32 or int64"),
        ({"i": np.full(3, 5)}, "index that the table does not have"),
        ({"pieces": 1}, "attributes of Elementwise"),
    ],
)
def test_wrong_rows_are_refused(change: dict[str, object], message: str, kernels: Path) -> None:
    x, dy = np.zeros((5, 4), np.float32), np.zeros((3, 4), np.float32)
    given = {"x": x, "i": np.zeros(3, np.int64), "dy": dy, "pieces": 2, **change}
    pieces = given.pop("pieces")
    model = kernel_model("ElementwiseOfRows", given, ["y"])  # type: ignore[arg-type]
    for value in model.graph.input:
        kind = onnx.helper.np_dtype_to_tensor_dtype(given[value.name].dtype)  # type: ignore[attr-defined]
        value.type.tensor_type.elem_type = kind
    program = [CODES["Add"], 2, 0, 1]
    attributes = {"program": program, "temporaries": 0, "tensors": 2, "pieces": pieces}
    attribute = model.graph.node[0].attribute
    attribute.extend(map(onnx.helper.make_attribute, *zip(*attributes.items())))
    ints = onnx.AttributeProto.INTS
    attribute.append(onnx.helper.make_attribute("spread", [], attr_type=ints))
    with pytest.raises(Exception, match=message):
        run(model, given, kernels)  # type: ignore[arg-type]


def embedding_model(rows: int, columns: int, rng: np.random.Generator) -> onnx.ModelProto:
    """Two rows of a table w, as one row, times a column v."""
    text = """<ir_version: 10, opset_import: ["": 21]> g (int64[n,2] i) => (float[n,1] y)
        { e = Gather(w, i) f = Flatten(e) y = MatMul(f, v) }"""
    model = onnx.parser.parse_model(text)
    for name, shape in (("w", (rows, columns)), ("v", (2 * columns, 1))):
        array = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


@pytest.mark.parametrize("backend", ["full", "forward_backward", "in_place"])
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "rmsprop"])
def test_training_of_a_large_table_is_the_same(
    optimizer: str, backend: str, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    model = embedding_model(17000, 64, rng)
    x, y = rng.integers(0, 17000, (64, 2)), rng.standard_normal((64, 1)).astype(np.float32)
    x[:20] = 3
    weights: dict[str, np.ndarray] = {}
    kinds: list[str] = []
    original = transforms.fuse_elementwise

    def counted(*arguments: object) -> object:
        nodes = original(*arguments)  # type: ignore[arg-type]
        kinds.extend(node.op_type for node in nodes if node.op_type == "ElementwiseOfRows")
        return nodes

    monkeypatch.setattr(transforms, "fuse_elementwise", counted)
    for switch in ("", "off"):
        monkeypatch.setenv(library.SWITCH, switch)
        trainer = onnxfit.Trainer(model, loss="mse", optimizer=optimizer, backend=backend)
        for _ in range(4):
            trainer.train_on_batch(x, y)
        weights[switch] = trainer.get_weights()["w"]
    assert kinds == ["ElementwiseOfRows"] * (backend == "full")
    np.testing.assert_allclose(weights[""], weights["off"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["full", "forward_backward", "in_place"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_training_is_the_same(
    optimizer: str, backend: str, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    model = embedding_model(30, 8, rng)
    x, y = rng.integers(0, 30, (64, 2)), rng.standard_normal((64, 1)).astype(np.float32)
    weights: dict[str, np.ndarray] = {}
    inputs: list[int] = []
    original = gather.replace_gather_gradients

    def counted(*arguments: object) -> object:
        nodes = original(*arguments)  # type: ignore[arg-type]
        inputs.extend(len(node.input) for node in nodes if node.op_type == "GatherGradient")
        return nodes

    monkeypatch.setattr(transforms, "replace_gather_gradients", counted)
    for switch in ("", "off"):
        monkeypatch.setenv(library.SWITCH, switch)
        trainer = onnxfit.Trainer(model, loss="mse", optimizer=optimizer, backend=backend)
        for _ in range(5):
            trainer.train_on_batch(x, y)
        weights[switch] = trainer.get_weights()["w"]
    assert inputs == [3 if (optimizer, backend) == ("sgd", "full") else 2]
    np.testing.assert_allclose(weights[""], weights["off"], rtol=1e-5, atol=1e-6)
