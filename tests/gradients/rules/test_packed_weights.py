"""Products with packed weights: against the dequantized product in float64, and in training."""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper
from onnx.numpy_helper import from_array

from onnxfit import Trainer, gradient_model
from onnxfit.errors import GradientError, ModelError
from onnxfit.gradients.rules.packed_weights import FP4, NF4, _split_bytes
from onnxfit.graph.values import GraphBuilder
from tests.gradients.rules.cases import Arrays
from tests.gradients.rules.cases.packed_weights import IS_LATER

later = pytest.mark.skipif(not IS_LATER, reason="onnxruntime 1.19 has no such kernel")
RNG = np.random.default_rng(0)


def model(
    node: onnx.NodeProto, a: tuple[int, ...], width: int, constants: Arrays, wrt: tuple[str, ...]
) -> onnx.ModelProto:
    """A model of one node, whose inputs are a and the arrays that are differentiated."""
    inputs = [helper.make_tensor_value_info("a", 1, a)]
    inputs += [helper.make_tensor_value_info(n, 1, constants[n].shape) for n in wrt if n != "a"]
    y = helper.make_tensor_value_info("y", 1, [*a[:-1], width])
    tensors = [from_array(v, n) for n, v in constants.items() if n not in wrt]
    graph = helper.make_graph([node], "g", inputs, [y], tensors)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def results(of: onnx.ModelProto, feeds: Arrays) -> Arrays:
    session = onnxruntime.InferenceSession(
        of.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds)))


def unpacked(packed: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    numbers = [packed >> shift & 2**bits - 1 for shift in range(0, 8, bits)]
    return np.stack(numbers, axis=-1).reshape(*packed.shape[:-1], -1)


def check(
    given: onnx.ModelProto, feeds: Arrays, wrt: tuple[str, ...], product: Callable[..., Any]
) -> None:
    """The forward pass is the model's own, bit by bit, and the gradients are central differences
    of `product` in float64, which is linear in each argument.
    """
    (y,) = results(given, feeds).values()
    dy = RNG.normal(size=y.shape).astype(np.float32)
    written = gradient_model(given, list(wrt), gradient="onnx")
    assert given.graph.node[0].op_type in {node.op_type for node in written.graph.node}
    found = results(written, {**feeds, "y_grad": dy})
    np.testing.assert_array_equal(found["y"], y)
    at = {name: array.astype(np.float64) for name, array in feeds.items()}
    np.testing.assert_allclose(product(**at), y, rtol=1e-4, atol=1e-4)
    for name in wrt:
        direction = RNG.normal(size=at[name].shape)
        up, down = (product(**{**at, name: at[name] + sign * direction}) for sign in (1, -1))
        slope = float(((up - down) / 2 * dy).sum())
        gradient = found[f"{name}_grad"]
        assert gradient.shape == feeds[name].shape
        products = gradient * direction
        assert abs(products.sum() - slope) <= 1e-5 * np.abs(products).sum()


@pytest.mark.parametrize(
    ("bits", "size", "columns", "zeros"),
    [
        *((4, size, 2 * size, "absent") for size in (16, 32, 64, 128, 256)),
        (4, 32, 90, "absent"),
        (4, 16, 48, "packed"),  # three zero points in two bytes
        (4, 32, 90, "packed"),
        (4, 32, 90, "float"),
        *(pytest.param(8, 16, 48, zeros, marks=later) for zeros in ("absent", "packed")),
        pytest.param(8, 32, 90, "absent", marks=later),
        *(pytest.param(2, 16, 48, zeros, marks=later) for zeros in ("absent", "packed", "float")),
        pytest.param(2, 32, 90, "packed", marks=later),
    ],
)
def test_integers(bits: int, size: int, columns: int, zeros: str) -> None:
    rows, count = 3, -(-columns // size)
    b = RNG.integers(0, 256, (rows, count, size * bits // 8)).astype(np.uint8)
    constants = {"b": b, "s": RNG.uniform(0.5, 1.5, (rows, count)).astype(np.float32)}
    wrt = ["a", "s", "bias"]
    zero: Any = 2 ** (bits - 1)
    if zeros == "packed":
        packed = RNG.integers(0, 256, (rows, -(-count * bits // 8))).astype(np.uint8)
        constants["z"] = packed
        zero = unpacked(packed, bits)[:, :count, None].astype(np.float64)
    elif zeros == "float":
        constants["z"] = RNG.uniform(1, 9, (rows, count)).astype(np.float32)
        wrt.append("z")
    constants["bias"] = RNG.normal(size=rows).astype(np.float32)
    levels = unpacked(b, bits).astype(np.float64)

    def product(a: Any, s: Any, bias: Any, z: Any = None) -> Any:
        shift = zero if z is None else z[:, :, None]
        weights = ((levels - shift) * s[:, :, None]).reshape(rows, -1)[:, :columns]
        return a @ weights.T + bias

    names = ["a", "b", "s", "z" if "z" in constants else "", "", "bias"]
    node = helper.make_node(
        "MatMulNBits", names, ["y"], domain="com.microsoft", K=columns, N=rows, bits=bits,
        block_size=size,
    )  # fmt: skip
    a = RNG.normal(size=(2, 4, columns)).astype(np.float32)
    feeds = {"a": a, **{n: constants[n] for n in wrt if n != "a"}}
    check(model(node, a.shape, rows, constants, tuple(wrt)), feeds, tuple(wrt), product)


@pytest.mark.parametrize("quant_type", [0, 1])
@pytest.mark.parametrize(("rows", "columns", "size"), [(4, 32, 16), (5, 32, 64), (3, 7, 16)])
def test_floats_of_4_bits(quant_type: int, rows: int, columns: int, size: int) -> None:
    b = RNG.integers(0, 256, -(-rows * columns // 2)).astype(np.uint8)
    count = -(-rows * columns // size)
    constants = {"b": b, "s": RNG.uniform(0.5, 1.5, count).astype(np.float32)}
    levels = (NF4 if quant_type else FP4)[np.stack([b >> 4, b & 15], 1).ravel()][: rows * columns]

    def product(a: Any, s: Any) -> Any:
        return a @ (levels * np.repeat(s, size)[: rows * columns]).reshape(rows, columns).T

    node = helper.make_node(
        "MatMulBnb4", ["a", "b", "s"], ["y"], domain="com.microsoft", K=columns, N=rows,
        block_size=size, quant_type=quant_type,
    )  # fmt: skip
    a = RNG.normal(size=(2, 4, columns)).astype(np.float32)
    feeds = {"a": a, "s": constants["s"]}
    check(model(node, a.shape, rows, constants, ("a", "s")), feeds, ("a", "s"), product)


def test_the_table_of_quantiles_is_that_of_a_normal_distribution() -> None:
    """bitsandbytes' create_normal_map: 8 quantiles above zero, 7 below, from a tail of 0.0323."""
    quantile = NormalDist().inv_cdf
    above = [quantile(p) for p in np.linspace(0.9677083, 0.5, 9)[:-1]]
    below = [-quantile(p) for p in np.linspace(0.9677083, 0.5, 8)[:-1]]
    table = np.sort([*below, 0, *above])
    np.testing.assert_allclose(NF4, table / table.max(), atol=1e-6)


def test_the_table_of_floats_has_two_bits_of_exponent_and_one_of_mantissa() -> None:
    """A code has three bits, e e m, and its number is 2^(4 - e) (1 + m / 2), divided by the greatest.
    The numbers with e = 0 are 0 and 1/16 instead.
    """
    codes = np.arange(8)
    numbers = 2.0 ** (4 - (codes >> 1)) * (1 + (codes & 1) / 2)
    numbers[:2] = [0, 1 / 16]
    np.testing.assert_allclose(FP4[:8], numbers / numbers.max(), rtol=1e-12)
    np.testing.assert_array_equal(FP4[8:], -FP4[:8])


@later
@pytest.mark.parametrize("kind", ["uint4", "int4", "uint8"])
@pytest.mark.parametrize(("gathered", "quantized"), [(0, 1), (1, 1), (0, 0)])
def test_rows_of_a_table(kind: str, gathered: int, quantized: int) -> None:
    if kind == "uint8" and (gathered, quantized) != (0, 1):
        pytest.skip("the kernel gathers bytes along the first axis alone, in blocks of the last")
    low, high = (-8, 8) if kind == "int4" else (0, 16)
    levels = RNG.integers(low, high, (20, 40))
    zeros = RNG.integers(low, high, (20, 3) if quantized else (2, 40))
    scales = RNG.uniform(0.5, 1.5, zeros.shape).astype(np.float32)
    if kind == "uint8":
        zeros = np.full_like(zeros, 8)  # three zero points in a row do not fill bytes
        data = from_array((levels[:, ::2] | levels[:, 1::2] << 4).astype(np.uint8), "d")
    else:
        code = onnx.TensorProto.DataType.Value(kind.upper())
        data = helper.make_tensor("d", code, levels.shape, levels.ravel())
    names = ["d", "i", "s", *(["z"] if kind != "uint8" else [])]
    node = helper.make_node(
        "GatherBlockQuantized", names, ["y"], domain="com.microsoft", gather_axis=gathered,
        quantize_axis=quantized, block_size=16,
    )  # fmt: skip
    indices = RNG.integers(0, levels.shape[gathered], (2, 3))

    def rows(s: Any) -> Any:
        spread = [np.repeat(v, 16, axis=quantized)[:20, :40] for v in (zeros, s)]
        return np.take((levels - spread[0]) * spread[1], indices, axis=gathered)

    given = model(node, (1,), 1, {"i": indices, "s": scales}, ("s",))
    del given.graph.input[0]
    given.graph.output[0].type.tensor_type.ClearField("shape")
    given.graph.initializer.append(data)
    if kind != "uint8":
        given.graph.initializer.append(helper.make_tensor("z", code, zeros.shape, zeros.ravel()))
    check(given, {"s": scales}, ("s",), rows)
    work = ir.from_proto(gradient_model(given, ["s"], gradient="onnx"))
    (y,) = (v for v in work.graph.outputs if v.name == "y")
    assert y.shape == rows(scales).shape


def test_the_gradient_can_be_differentiated_again() -> None:
    """da = dy W is linear in the scales and in dy."""
    b = RNG.integers(0, 256, (3, 2, 8)).astype(np.uint8)
    node = helper.make_node(
        "MatMulNBits", ["a", "b", "s"], ["y"], domain="com.microsoft", K=32, N=3, bits=4,
        block_size=16,
    )  # fmt: skip
    scales = RNG.uniform(0.5, 1.5, (3, 2)).astype(np.float32)
    given = model(node, (2, 32), 3, {"b": b, "s": scales}, ("a", "s"))
    first = gradient_model(given, ["a"], gradient="onnx")
    second = gradient_model(first, ["s"], outputs=["a_grad"], gradient="onnx")
    a, dy, ddy = (RNG.normal(size=n).astype(np.float32) for n in ((2, 32), (2, 3), (2, 32)))
    feeds = {"a": a, "s": scales, "y_grad": dy, "a_grad_grad": ddy}
    found = results(second, feeds)["s_grad"]
    levels = unpacked(b, 4).astype(np.float64) - 8
    expected = ((dy.T.astype(np.float64) @ ddy).reshape(3, 2, 16) * levels).sum(2)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_groups_by_index_are_refused() -> None:
    node = helper.make_node(
        "MatMulNBits", ["a", "b", "s", "", "g"], ["y"], domain="com.microsoft", K=32, N=3, bits=4,
        block_size=16,
    )  # fmt: skip
    constants = {
        "b": np.zeros((3, 2, 8), np.uint8),
        "s": np.ones((3, 2), np.float32),
        "g": np.arange(32, dtype=np.int32) // 16,
    }
    with pytest.raises(GradientError, match="4 bits with g_idx"):
        gradient_model(model(node, (2, 32), 3, constants, ("a",)), ["a"], gradient="onnx")


@pytest.mark.parametrize("bits", [2, 4])
def test_cuda_which_has_no_operators_for_bits_splits_bytes_by_a_table(bits: int) -> None:
    packed = np.arange(256, dtype=np.uint8)
    split = []
    for device in ("cpu", "cuda"):
        graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g")
        op = GraphBuilder(graph, device=device)
        planes = _split_bytes(op, op.input("packed", np.uint8, (256,)), bits)
        for i, plane in enumerate(planes):
            op.output(f"plane{i}", plane)
        proto = ir.to_proto(ir.Model(graph, ir_version=10))
        operators = {node.op_type for node in proto.graph.node}
        assert operators.isdisjoint({"BitShift", "BitwiseAnd"}) == (device == "cuda")
        split.append(np.stack(list(results(proto, {"packed": packed}).values()), axis=-1))
    np.testing.assert_array_equal(*split)
    np.testing.assert_array_equal(split[0].ravel(), unpacked(packed, bits))


def layers(width: int = 32, **settings: int) -> onnx.ModelProto:
    """Two layers of packed weights with an adapter beside each; the first is off the gradient
    path."""
    rng = np.random.default_rng(0)
    nodes, tensors, x = [], [], "x"
    for i in range(2):
        tensors += [
            from_array(rng.integers(0, 256, (width, 2, width // 4)).astype(np.uint8), f"b{i}"),
            from_array(rng.uniform(0.01, 0.02, (width, 2)).astype(np.float32), f"s{i}"),
            from_array(rng.normal(size=(width, 2)).astype(np.float32) / 6, f"A{i}"),
            from_array(np.zeros((2, width), np.float32), f"B{i}"),
        ]
        nodes += [
            helper.make_node(
                "MatMulNBits", [x, f"b{i}", f"s{i}"], [f"q{i}"], domain="com.microsoft", K=width,
                N=width, bits=4, block_size=width // 2, **settings,
            ),
            helper.make_node("MatMul", [x, f"A{i}"], [f"xA{i}"]),
            helper.make_node("MatMul", [f"xA{i}", f"B{i}"], [f"xAB{i}"]),
            helper.make_node("Add", [f"q{i}", f"xAB{i}"], [f"h{i}"]),
            helper.make_node("Tanh", [f"h{i}"], [f"y{i}"]),
        ]  # fmt: skip
        x = f"y{i}"
    ends = [helper.make_tensor_value_info(name, 1, ["N", width]) for name in ("x", x)]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], tensors)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


@pytest.mark.filterwarnings("ignore:.*quantized")
def test_adapters_train_beside_packed_weights_which_stay_as_they_are() -> None:
    given = layers()
    trainer = Trainer(given, ["A*", "B*"], loss="mse", optimizer="adam")
    x = np.random.default_rng(1).normal(size=(16, 32)).astype(np.float32)
    before = trainer.evaluate(x, np.tanh(x), verbose=0)
    trainer.fit(x, np.tanh(x), epochs=3, batch_size=8, verbose=0)
    assert trainer.evaluate(x, np.tanh(x), verbose=0) != before
    after = trainer.export(None)
    tensors = {t.name: t.SerializeToString() for t in given.graph.initializer}
    changed = {t.name for t in after.graph.initializer if tensors[t.name] != t.SerializeToString()}
    assert changed == {"A0", "B0", "A1", "B1"}
    assert [n.op_type for n in after.graph.node] == [n.op_type for n in given.graph.node]
    np.testing.assert_allclose(results(after, {"x": x})["y1"], trainer.predict(x), atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*quantized")
def test_scales_are_trained_if_they_are_named_and_not_otherwise() -> None:
    assert sorted(Trainer(layers(), loss="mse").get_weights()) == ["A0", "A1", "B0", "B1"]
    assert sorted(Trainer(layers(), ["s*"], loss="mse").get_weights()) == ["s0", "s1"]


@pytest.mark.filterwarnings("ignore:.*quantized")
def test_scales_train_although_the_kernel_that_rounds_activations_wants_constants() -> None:
    """It computes garbage with scales that are inputs; the training pass does not round."""
    x = np.random.default_rng(1).normal(size=(16, 32)).astype(np.float32)
    losses, predictions = [], []
    for level in (0, 4):
        given = layers(accuracy_level=level)
        trainer = Trainer(given, ["s*"], loss="mse", optimizer="sgd")
        predictions.append(trainer.predict(x))
        np.testing.assert_array_equal(predictions[-1], results(given, {"x": x})["y1"])
        losses.append(trainer.fit(x, x, epochs=3, verbose=0).history["loss"])
    assert np.abs(predictions[0] - predictions[1]).max() > 1e-4  # level 4 rounds
    assert losses[0] == losses[1]
    np.testing.assert_allclose(losses[0][0], ((predictions[0] - x) ** 2).mean(), rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "value"),
    [("K", None), ("K", [1, 2]), ("K", -3), ("N", None), ("N", "x"), ("block_size", 0),
     ("block_size", 1.5), ("bits", 4.0), ("bits", 3), ("K", 2**40), ("block_size", 8)],
)  # fmt: skip
def test_attributes_of_other_types_and_sizes_are_refused(name: str, value: Any) -> None:
    """ONNX's checker does not look at them."""
    given = layers()
    for node in given.graph.node:
        for i in reversed([i for i, a in enumerate(node.attribute) if a.name == name]):
            del node.attribute[i]
            if value is not None:
                node.attribute.append(helper.make_attribute(name, value))
    for weights in (["A*"], ["s*"]):
        with pytest.raises((GradientError, ModelError), match="MatMulNBits"):
            Trainer(given, weights, loss="mse")


@later
@pytest.mark.parametrize(
    "settings", [{"gather_axis": 5}, {"bits": 0}, {"block_size": "x"}, {"quantize_axis": 1.5}]
)
def test_attributes_of_a_table_are_refused(settings: dict[str, Any]) -> None:
    node = helper.make_node(
        "GatherBlockQuantized", ["d", "i", "s"], ["y"], domain="com.microsoft",
        **{"bits": 4, "block_size": 16, **settings},
    )  # fmt: skip
    constants = {"i": np.zeros(3, np.int64), "s": np.ones((2, 2), np.float32)}
    given = model(node, (1,), 1, constants, ("s",))
    given.graph.output[0].type.tensor_type.ClearField("shape")
    given.graph.initializer.append(from_array(np.zeros((2, 16), np.uint8), "d"))
    with pytest.raises(GradientError, match=r"GatherBlockQuantized|rank of output"):
        gradient_model(given, ["s"], gradient="onnx")
