"""Rounded values as floats: the same bits as QuantizeLinear and DequantizeLinear, and as training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper

import onnxfit
from onnxfit.graph.index import attributes_of
from onnxfit.kernels import transforms
from onnxfit.kernels.transforms import with_kernels
from tests.kernels.sessions import run

Array = npt.NDArray[Any]
LIMITS = {"INT8": (-128, 127), "UINT8": (0, 255), "INT4": (-8, 7), "UINT4": (0, 15)}


def rounding(
    shape: tuple[int, ...],
    kind: str,
    scales: Array,
    zeros: list[int] | None,
    *,
    readers: int = 1,
    scope: str = "optimizer",
    **attributes: int,
) -> onnx.ModelProto:
    """y = x rounded to integers and back, for each of some readers; `scope` is that of a step."""
    names = ["s"] if zeros is None else ["s", "z"]
    nodes = [helper.make_node("QuantizeLinear", ["x", *names], ["q"], "round", **attributes)]
    outputs = [f"y{i}" for i in range(readers)]
    nodes += [
        helper.make_node("DequantizeLinear", ["q", *names], [y], f"back{y}", **attributes)
        for y in outputs
    ]
    nodes.append(helper.make_node("Identity", ["x"], ["w"], f"{scope}/w"))
    floats = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in ("x", *outputs, "w")
    ]
    tensors = [onnx.numpy_helper.from_array(scales.astype(np.float32), "s")]
    element = getattr(TensorProto, kind)
    if zeros is not None:
        tensors.append(helper.make_tensor("z", element, scales.shape, zeros))
    info = helper.make_tensor_value_info("q", element, shape)
    graph = helper.make_graph(nodes, "g", floats[:1], floats[1:], tensors, value_info=[info])
    opsets = [helper.make_opsetid("", 21)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def values(shape: tuple[int, ...], kind: str, scale: float) -> Array:
    """Floats around each integer, halves, and numbers far outside."""
    low, high = LIMITS[kind]
    rng = np.random.default_rng(0)
    x = rng.uniform(low - 9, high + 9, shape).astype(np.float32) * np.float32(scale)
    halves = (np.arange(low - 3, high + 3) + 0.5) * scale
    special = np.float32([*halves, 0.0, -0.0, -0.2 * scale, 1e30, -1e30, np.inf, -np.inf])
    flat = x.ravel()
    flat[: special.size] = special[: flat.size]
    return x


CASES = {
    "int8": ((40, 30), "INT8", np.array(0.1), [0], {}),
    "int8 of a vector with one element": ((40, 30), "INT8", np.array([0.1]), [3], {"axis": 0}),
    "uint8 without zero point": ((40, 30), "UINT8", np.array(0.1), None, {}),
    "uint8": ((40, 30), "UINT8", np.array(0.07), [131], {}),
    "int8 in rows": ((3, 700), "INT8", np.array([0.1, 0.3, 2]), [0, 0, 0], {"axis": 0}),
    "uint8 in rows": ((3, 700), "UINT8", np.array([0.1, 0.3, 2]), [9, 128, 0], {"axis": 0}),
    "int4 in columns": ((700, 3), "INT4", np.array([0.1, 0.3, 2]), [0, 0, 0], {"axis": 1}),
    "channels": ((5, 3, 4, 20), "INT8", np.array([0.1, 0.3, 2]), [1, -2, 3], {"axis": 1}),
    "from the last axis": ((70, 30), "INT4", np.full(30, 0.1), [1, -2, 3] * 10, {"axis": -1}),
    "blocks of rows": (
        (64, 30), "INT4", np.full((4, 30), -0.2), [0] * 120, {"axis": 0, "block_size": 16},
    ),
    "an incomplete block": (
        (50, 30), "UINT4", np.full((4, 30), 0.2), [8, 7, 6] * 40, {"axis": 0, "block_size": 16},
    ),
    "blocks of columns": (
        (30, 64), "INT4", np.full((30, 4), 0.2), [0] * 120, {"axis": 1, "block_size": 16},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_rounded_floats_have_the_bits_of_integers(name: str, kernels: Path) -> None:
    shape, kind, scales, zeros, attributes = CASES[name]
    model = rounding(shape, kind, scales, zeros, **attributes)
    faster = with_kernels(model)
    types = [node.op_type for node in faster.graph.node]
    assert "Elementwise" in types
    assert not {"QuantizeLinear", "DequantizeLinear", "Gather"} & {*types}
    x = values(shape, kind, float(abs(scales).flat[0]))
    (expected, _), (found, _) = run(model, {"x": x}), run(faster, {"x": x}, kernels)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))


def test_nan_stays_nan(kernels: Path) -> None:
    """Its integer is undefined, and would hide that a training diverges."""
    model = with_kernels(rounding((2, 2), "INT8", np.array(1.0), [0]))
    x = np.float32([[np.nan, 1], [2, 3]])
    found, _ = run(model, {"x": x}, kernels)
    np.testing.assert_array_equal(found, x)


def test_several_readers_share_the_integers(kernels: Path) -> None:
    model = rounding((4, 300), "INT8", np.array(0.1), [2], readers=2)
    one = onnx.numpy_helper.from_array(np.float32(1), "one")  # as for the gradient of a scale
    model.graph.initializer.append(one)
    model.graph.node[2].input[1] = "one"
    faster = with_kernels(model)
    assert "DequantizeLinear" not in {node.op_type for node in faster.graph.node}
    x = values((4, 300), "INT8", 0.1)
    for found, expected in zip(run(faster, {"x": x}, kernels), run(model, {"x": x})):
        np.testing.assert_array_equal(found, expected)


def incomplete_block() -> onnx.ModelProto:
    """Blocks along the last axis, the last of which is not whole."""
    return rounding((30, 50), "INT4", np.full((30, 4), 0.2), [0] * 120, axis=1, block_size=16)


def read_elsewhere() -> onnx.ModelProto:
    model = rounding((4, 30), "INT8", np.array(0.1), [0])
    model.graph.output.append(model.graph.value_info[0])
    return model


def other_zero_point() -> onnx.ModelProto:
    model = rounding((4, 30), "INT8", np.array(0.1), [0])
    model.graph.initializer.append(helper.make_tensor("other", TensorProto.INT8, [], [1]))
    model.graph.node[1].input[2] = "other"
    return model


def computed_zero_point() -> onnx.ModelProto:
    model = rounding((4, 30), "INT8", np.array(0.1), [0])
    del model.graph.initializer[1]
    model.graph.input.append(helper.make_tensor_value_info("z", TensorProto.INT8, []))
    return model


def inference() -> onnx.ModelProto:
    return rounding((4, 30), "INT8", np.array(0.1), [0], scope="model")


def wide() -> onnx.ModelProto:
    """Integers that float32 does not represent."""
    model = rounding((4, 30), "INT8", np.array(0.1), [0])
    model.graph.value_info[0].type.tensor_type.elem_type = TensorProto.INT32
    model.graph.initializer[1].data_type = TensorProto.INT32
    return model


@pytest.mark.parametrize(
    "make",
    [incomplete_block, read_elsewhere, other_zero_point, computed_zero_point, inference, wide],
)
def test_other_roundings_stay(make: Any) -> None:
    model = make()
    types = [node.op_type for node in with_kernels(model).graph.node]
    assert types[:2] == ["QuantizeLinear", "DequantizeLinear"]


def network(axis: int, width: int = 40) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    w = {"w1": rng.standard_normal((16, width)), "w2": rng.standard_normal((width, 3))}
    w |= {"b1": np.zeros(width), "b2": np.zeros(3)}
    transposed = int(axis == 0)
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[n, 16] x) => (float[n, 3] y) {{
            h = Gemm<transB={transposed}>(x, w1, b1)  a = Relu(h)
            y = Gemm<transB={transposed}>(a, w2, b2) }}""")
    for name, array in w.items():
        array = array.T if transposed else array
        model.graph.initializer.append(
            onnx.numpy_helper.from_array(np.ascontiguousarray(array, np.float32), name)
        )
    return model


@pytest.mark.parametrize("backend", ["full", "forward_backward", "in_place"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("axis", [0, 1])
def test_training_has_the_bits_of_integers(
    axis: int, kind: str, backend: str, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((48, 16)).astype(np.float32), rng.integers(0, 3, 48)
    file = onnxfit.quantize(network(axis), x, weights=kind, verbose=0)

    def trained() -> tuple[dict[str, Array], bytes]:
        trainer = onnxfit.Trainer(
            file, loss="cross_entropy", optimizer=onnxfit.optimizers.Adam(0.02), backend=backend
        )
        trainer.fit(x, y, epochs=4, batch_size=16, verbose=0)
        return dict(trainer.get_weights()), trainer.export().SerializeToString(deterministic=True)

    weights, exported = trained()
    replaced = []

    def keep(graph: Any, nodes: Any, types: Any) -> Any:
        replaced.append(any(node.op_type == "QuantizeLinear" for node in nodes))
        return nodes

    monkeypatch.setattr(transforms, "replace_roundings", keep)
    expected, same = trained()
    assert any(replaced)
    assert weights.keys() == expected.keys()
    for name, array in weights.items():
        np.testing.assert_array_equal(array, expected[name])
    assert exported == same


def test_the_mask_of_a_weight_is_part_of_its_update(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = []

    def recorded(model: onnx.ModelProto, *arguments: Any, **settings: Any) -> onnx.ModelProto:
        graphs.append(with_kernels(model, *arguments, **settings))
        return graphs[-1]

    monkeypatch.setattr(transforms, "with_kernels", recorded)
    x = np.random.default_rng(0).standard_normal((48, 16)).astype(np.float32)
    file = onnxfit.quantize(network(1, 9000), x, verbose=0)
    onnxfit.Trainer(file, loss="cross_entropy", optimizer="adam").train_on_batch(
        x, np.zeros(48, int)
    )
    (step,) = (g.graph for g in graphs if any(n.name.startswith("optimizer") for n in g.graph.node))
    names = {node.op_type for node in step.node}
    assert not {"QuantizeLinear", "DequantizeLinear", "Max", "Min", "Clip"} & names
    updates = [n for n in step.node if any(name.endswith("/next") for name in n.output)]
    assert any(attributes_of(node).get("spread") for node in updates)
