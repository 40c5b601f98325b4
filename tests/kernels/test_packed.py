"""Products with packed weights, and the gradients of their inputs, by operators of the library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.numpy_helper import from_array

import onnxfit
from onnxfit import LoRA, Trainer
from onnxfit.graph.values import GraphBuilder
from onnxfit.kernels import library, packed
from onnxfit.kernels.library import DOMAIN
from onnxfit.kernels.transforms import with_kernels
from onnxfit.runtime import session
from onnxfit.step.finish import finish
from tests.kernels.sessions import kernel_types, layer_types, run
from tests.trainable.quantized.packed_files import unpacked

Change = Callable[[onnx.NodeProto], None]


class Sizes(NamedTuple):
    """W is (n, k), in blocks along its rows."""

    n: int
    k: int
    block: int
    rows: tuple[int, ...]  # of the other factor
    bits: int = 4
    zeros: str = "absent"

    @property
    def blocks(self) -> int:
        return -(-self.k // self.block)

    def attributes(self) -> dict[str, int]:
        return {"K": self.k, "N": self.n, "bits": self.bits, "block_size": self.block}


SIZES = {
    "one number": Sizes(1, 1, 16, (1,)),
    "one row": Sizes(33, 70, 32, (1,), zeros="packed"),
    "few rows": Sizes(300, 300, 16, (2, 2), zeros="float"),
    "a tile": Sizes(40, 64, 32, (5,)),
    "several blocks": Sizes(70, 600, 64, (3, 7), zeros="packed"),
    "many columns": Sizes(600, 40, 32, (9,), zeros="float"),
    "many rows": Sizes(17, 48, 16, (530,)),
    "an odd number of zero points": Sizes(9, 90, 32, (11,), zeros="packed"),
    "8 bits": Sizes(37, 100, 32, (6,), 8, "packed"),
    "8 bits, few rows": Sizes(37, 100, 32, (3,), 8),
    "2 bits": Sizes(37, 100, 32, (6,), 2, "packed"),
    "2 bits, few rows": Sizes(37, 100, 32, (4,), 2, "float"),
}


def arrays_of(sizes: Sizes, seed: int = 0) -> dict[str, np.ndarray]:
    """The factors a and dy, the packed weight, scales, zero points if there are any, and a bias."""
    rng = np.random.default_rng(seed)
    n, bits = sizes.n, sizes.bits
    arrays = {
        "a": rng.standard_normal((*sizes.rows, sizes.k)).astype(np.float32),
        "dy": rng.standard_normal((*sizes.rows, n)).astype(np.float32),
        "b": rng.integers(0, 256, (n, sizes.blocks, sizes.block * bits // 8)).astype(np.uint8),
        "s": rng.uniform(-1, 1, (n, sizes.blocks)).astype(np.float32),
        "bias": rng.standard_normal(n).astype(np.float32),
    }
    if sizes.zeros == "packed":
        arrays["z"] = rng.integers(0, 256, (n, -(-sizes.blocks * bits // 8))).astype(np.uint8)
    elif sizes.zeros == "float":
        arrays["z"] = rng.uniform(0, 2**bits, (n, sizes.blocks)).astype(np.float32)
    return arrays


def weight_of(sizes: Sizes, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """W in float64."""
    zeros = arrays.get("z", np.full((sizes.n, sizes.blocks), 2.0 ** (sizes.bits - 1)))
    if zeros.dtype == np.uint8:
        zeros = unpacked(zeros, sizes.bits)[:, : sizes.blocks]
    levels = unpacked(arrays["b"], sizes.bits) - zeros[..., None].astype(np.float64)
    return (levels * arrays["s"][..., None]).reshape(sizes.n, -1)[:, : sizes.k]


def kernel_model(op_type: str, left: str, sizes: Sizes, bias: bool = False) -> onnx.ModelProto:
    names = [left, "b", "s", *(["z"] if sizes.zeros != "absent" else []), *(["bias"] * bias)]
    types = {"b": TensorProto.UINT8}
    types |= {"z": TensorProto.UINT8} if sizes.zeros == "packed" else {}
    node = helper.make_node(
        op_type, names, ["r"], domain=DOMAIN, has_bias=int(bias), **sizes.attributes()
    )
    inputs = [
        helper.make_tensor_value_info(name, types.get(name, TensorProto.FLOAT), None)
        for name in names
    ]
    result = helper.make_tensor_value_info("r", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "g", inputs, [result])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def results(
    sizes: Sizes, arrays: dict[str, np.ndarray], kernels: Path, threads: int = 1
) -> list[np.ndarray]:
    """y = a W^T + bias, and da = dy W."""
    found = []
    for op_type, left, bias in (
        ("PackedProduct", "a", True),
        ("PackedProductGradient", "dy", False),
    ):
        model = kernel_model(op_type, left, sizes, bias)
        feeds = {value.name: arrays[value.name] for value in model.graph.input}
        found += run(model, feeds, kernels, threads)
    return found


def assert_close(found: np.ndarray, exact: np.ndarray) -> None:
    assert found.shape == exact.shape
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-6 * np.abs(exact).max())


@pytest.mark.parametrize("name", SIZES)
def test_results_are_those_of_float64(name: str, kernels: Path) -> None:
    sizes = SIZES[name]
    arrays = arrays_of(sizes)
    w = weight_of(sizes, arrays)
    y, da = results(sizes, arrays, kernels)
    assert_close(y, arrays["a"] @ w.T + arrays["bias"])
    assert_close(da, arrays["dy"] @ w)


@pytest.mark.parametrize("threads", range(1, 9))
def test_threads_change_nothing(threads: int, kernels: Path) -> None:
    sizes = Sizes(600, 530, 32, (530,), zeros="packed")
    arrays = arrays_of(sizes, threads)
    for found, right in zip(
        results(sizes, arrays, kernels, threads), results(sizes, arrays, kernels), strict=True
    ):
        np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("rows", [2, 8])
def test_infinite_numbers_reach_their_row(rows: int, value: float, kernels: Path) -> None:
    sizes = Sizes(20, 40, 16, (rows,))
    arrays = arrays_of(sizes)
    arrays["a"][1, 39] = arrays["dy"][1, 19] = value
    for result in results(sizes, arrays, kernels):
        assert not np.isfinite(result[1]).all()
        assert np.isfinite(np.delete(result, 1, axis=0)).all()


def test_no_rows(kernels: Path) -> None:
    sizes = Sizes(20, 40, 16, (0,))
    y, da = results(sizes, arrays_of(sizes), kernels)
    assert y.shape == (0, 20)
    assert da.shape == (0, 40)


# The graphs
# --------------------------------------------------------------------------------------------------


def differentiated(sizes: Sizes, change: Change | None = None) -> onnx.ModelProto:
    """y = a W^T + bias of onnxruntime's operator, and da; the weight is a constant."""
    arrays = arrays_of(sizes)
    names = ["a", "b", "s", "z" if "z" in arrays else "", "", "bias"]
    node = helper.make_node(
        "MatMulNBits", names, ["y"], domain="com.microsoft", **sizes.attributes()
    )
    if change is not None:
        change(node)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("a", TensorProto.FLOAT, arrays["a"].shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, arrays["dy"].shape)],
        [from_array(arrays[name], name) for name in names[1:] if name],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    whole = onnxfit.gradient_model(model, ["a"], outputs="y")
    whole = onnx.shape_inference.infer_shapes(whole, data_prop=True)
    finished = finish(GraphBuilder(ir.from_proto(whole).graph))
    return onnx.shape_inference.infer_shapes(finished, data_prop=True)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """All packed weights count as large."""
    monkeypatch.setattr(packed, "MAX_PACKED_BYTES", 0)


BOTH = ["PackedProduct", "PackedProductGradient"]


@pytest.mark.parametrize("zeros", ["absent", "packed", "float"])
@pytest.mark.parametrize("k", [64, 50])
@pytest.mark.usefixtures("large")
def test_operators_compute_what_those_of_onnxruntime_do(k: int, zeros: str, kernels: Path) -> None:
    sizes = Sizes(24, k, 32, (2, 5), zeros=zeros)
    plain = differentiated(sizes)
    faster = with_kernels(plain)
    assert [node.op_type for node in faster.graph.node if node.domain == DOMAIN] == BOTH
    assert "DequantizeLinear" not in {node.op_type for node in faster.graph.node}
    arrays = arrays_of(sizes, 1)
    feeds = {value.name: arrays["a" if value.name == "a" else "dy"] for value in plain.graph.input}
    for found, right in zip(run(faster, feeds, kernels), run(plain, feeds), strict=True):
        assert_close(found, right)


def test_small_weights_keep_the_product_of_onnxruntime() -> None:
    assert kernel_types(differentiated(Sizes(24, 64, 32, (5,)))) == ["PackedProductGradient"]


@pytest.mark.parametrize(
    ("level", "kept", "expected"),
    [(0, True, BOTH), (1, True, BOTH), (4, True, ["PackedProductGradient"]), (4, False, BOTH)],
)
@pytest.mark.usefixtures("large")
def test_a_product_that_rounds_its_activations_may_be_kept(
    level: int, kept: bool, expected: list[str]
) -> None:
    def change(node: onnx.NodeProto) -> None:
        node.attribute.append(helper.make_attribute("accuracy_level", level))

    model = differentiated(Sizes(24, 64, 32, (5,)), change)
    assert layer_types(model, keep_rounding=kept) == expected


@pytest.mark.usefixtures("large")
def test_training_does_not_round_activations(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But predictions are those of the exported file."""
    exact = trained("full")
    found = trained("full", level=4)
    np.testing.assert_allclose(found["losses"], exact["losses"], rtol=1e-5)
    monkeypatch.setenv(library.SWITCH, "off")
    deployed = onnxfit.Trainer(found["exported"], ["s1"], loss="mse").predict(X)
    np.testing.assert_array_equal(found["predicted"], deployed)


@pytest.mark.parametrize("missing", ["K", "N", "block_size"])
@pytest.mark.usefixtures("large")
def test_an_attribute_that_is_missing_is_left_to_onnxruntime(missing: str) -> None:
    model = stack()
    for node in model.graph.node:
        kept = [attribute for attribute in node.attribute if attribute.name != missing]
        del node.attribute[:]
        node.attribute.extend(kept)
    assert with_kernels(model) is model


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.usefixtures("large")
def test_inputs_that_are_missing_are_left_to_onnxruntime(count: int) -> None:
    model = stack()
    for node in model.graph.node:
        if node.op_type == "MatMulNBits":
            del node.input[count:]
    assert layer_types(model) == []


@pytest.mark.usefixtures("large")
def test_another_processor_keeps_the_operators_of_onnxruntime() -> None:
    model = differentiated(Sizes(24, 64, 32, (5,)))
    assert with_kernels(model, products=False) is model


@pytest.mark.usefixtures("large")
def test_other_types_keep_their_operators() -> None:
    model = differentiated(Sizes(24, 64, 32, (5,)))
    (scales,) = (tensor for tensor in model.graph.initializer if tensor.name == "s")
    half = numpy_helper.to_array(scales).astype(np.float16)
    scales.CopyFrom(from_array(half, "s"))
    assert layer_types(model) == []


@pytest.mark.usefixtures("large")
def test_the_file_needs_no_shapes_of_values() -> None:
    assert kernel_types(stack()) == ["PackedProduct"] * 3


# Training
# --------------------------------------------------------------------------------------------------


def stack(level: int = 0) -> onnx.ModelProto:
    """Three layers of 4 bits; `level`: their accuracy_level."""
    nodes, tensors = [], []
    for i in range(3):
        arrays = arrays_of(Sizes(48, 48, 16, (1,), zeros="packed"), i)
        tensors += [
            from_array(arrays["b"], f"w{i}"),
            from_array(arrays["s"] / 64, f"s{i}"),
            from_array(arrays["z"], f"z{i}"),
        ]
        names = [f"h{i}", f"w{i}", f"s{i}", f"z{i}"]
        product = helper.make_node(
            "MatMulNBits", names, [f"m{i}"], f"m{i}", domain="com.microsoft",
            K=48, N=48, bits=4, block_size=16, accuracy_level=level,
        )  # fmt: skip
        nodes += [product, helper.make_node("Tanh", [f"m{i}"], [f"h{i + 1}"], f"t{i}")]
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 48]) for name in ("h0", "h3")
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "stack", [x], [y], tensors)
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


X = np.random.default_rng(0).standard_normal((20, 48)).astype(np.float32)


def trained(backend: str, weights: list[str] | None = None, level: int = 0) -> dict[str, Any]:
    """The results of a training with adapters."""
    adapters = LoRA(rank=2, target=["w0", "w2"])
    trainer = Trainer(
        stack(level),
        weights,
        loss="mse",
        optimizer="adam",
        adapters=adapters,
        backend=backend,
        seed=0,
    )
    history = trainer.fit(X, X, epochs=4, batch_size=8, verbose=0)
    return {
        "losses": history.history["loss"],
        "evaluated": trainer.evaluate(X, X)["loss"],
        "predicted": trainer.predict(X),
        "exported": trainer.export(),
        "packed": [t.raw_data for t in trainer.export().graph.initializer if t.name == "w1"],
    }


@pytest.mark.parametrize("backend", ["full", "forward_backward", "in_place"])
@pytest.mark.parametrize("weights", [None, ["s1"]], ids=["adapters", "scales"])
@pytest.mark.usefixtures("large")
def test_training_is_the_same(
    backend: str, weights: list[str] | None, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = trained(backend, weights)
    monkeypatch.setenv(library.SWITCH, "off")
    right = trained(backend, weights)
    np.testing.assert_allclose(found["losses"], right["losses"], rtol=1e-5)
    np.testing.assert_allclose(found["evaluated"], right["evaluated"], rtol=1e-5)
    np.testing.assert_allclose(found["predicted"], right["predicted"], atol=1e-5)
    assert (
        found["packed"] == right["packed"] == [arrays_of(Sizes(48, 48, 16, (1,)), 1)["b"].tobytes()]
    )


@pytest.mark.parametrize("switch", ["on", "off"])
@pytest.mark.usefixtures("large", "kernels")
def test_graphs_with_kernels_have_no_packed_constants(
    switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants: dict[str, set[str]] = {}
    compiles = session.compile_model

    def noting(
        model: onnx.ModelProto, device: Any, threads: Any, name: str, **settings: Any
    ) -> Any:
        constants[name] = {tensor.name for tensor in model.graph.initializer} & {"w0", "w1", "w2"}
        return compiles(model, device, threads, name, **settings)

    monkeypatch.setattr(session, "compile_model", noting)
    monkeypatch.setenv(library.SWITCH, switch)
    trained("full")
    expected = set() if switch == "on" else {"w0", "w1", "w2"}
    assert constants["train"] == constants["predict"] == expected


# Errors
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": (3, 41)}, "inputs of PackedProduct"),
        ({"a": ()}, "inputs of PackedProduct"),
        ({"b": (20, 3, 7)}, "inputs of PackedProduct"),
        ({"s": (20, 4)}, "inputs of PackedProduct"),
        ({"z": (20, 3)}, "inputs of PackedProduct"),
        ({"bias": (21,)}, "inputs of PackedProduct"),
        ({"block_size": 24}, "attributes of PackedProduct"),
        ({"block_size": 0}, "attributes of PackedProduct"),
        ({"bits": 3}, "attributes of PackedProduct"),
        ({"K": 0}, "attributes of PackedProduct"),
        ({"N": -1}, "attributes of PackedProduct"),
        ({"N": 2**40}, "attributes of PackedProduct"),
    ],
)
def test_wrong_inputs_are_refused(change: dict[str, Any], message: str, kernels: Path) -> None:
    sizes = Sizes(20, 40, 16, (3,), zeros="packed")
    model = kernel_model("PackedProduct", "a", sizes, bias=True)
    feeds = {name: a for name, a in arrays_of(sizes).items() if name != "dy"}
    for name, value in change.items():
        if name in feeds:
            feeds[name] = np.zeros(value, feeds[name].dtype)
        for attribute in model.graph.node[0].attribute:
            if attribute.name == name:
                attribute.i = value
    with pytest.raises(Exception, match=message):
        run(model, feeds, kernels)
