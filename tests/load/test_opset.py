"""Files of older opsets are raised to the opset of their graphs; newer ones may stay newer."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import onnxruntime
import pytest

from onnxfit import Trainer
from onnxfit.errors import ModelError
from onnxfit.graph.inference import MIN_KNOWN_OPSET
from onnxfit.graph.weights import all_weights
from onnxfit.load import opset as opset_module
from onnxfit.load.normalize import normalize
from onnxfit.load.opset import IR_VERSION, MORE_TYPES, OPSET
from onnxfit.load.reading import read_model
from tests.graph.graphs import LINEAR, parse


class TestOpsets:
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

    def test_an_opset_that_cannot_be_converted_is_named(self) -> None:
        model = parse(
            '<ir_version: 8, opset_import: ["": 1]> g (float[2, 4] x) => (float[2, 8] y) { y ='
            " Upsample<height_scale = 1.0, width_scale = 2.0>(x) }"
        )
        with pytest.raises(
            ModelError,
            match=r"has opset 1, .* cannot convert to opset 21: .* again with opset 13 or later\.$",
        ):
            normalize(read_model(model))


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


class TestOperatorsThatStayTheSame:
    @pytest.mark.parametrize("op_type", sorted(MORE_TYPES))
    def test_newer_versions_only_add_types_and_optional_attributes(self, op_type: str) -> None:
        new = onnx.defs.get_schema(op_type, OPSET)
        for version in range(MIN_KNOWN_OPSET, OPSET):
            old = onnx.defs.get_schema(op_type, version)
            assert [(i.name, i.option) for i in old.inputs] == [
                (i.name, i.option) for i in new.inputs
            ]
            assert len(old.outputs) == len(new.outputs)
            for name, attribute in new.attributes.items():
                if name in old.attributes:
                    assert old.attributes[name].default_value == attribute.default_value
                else:
                    assert not attribute.required

    @pytest.mark.parametrize("version", range(MIN_KNOWN_OPSET, OPSET))
    def test_the_converter_would_give_the_same_graph(
        self, version: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = parse(
            f"""<ir_version: 8, opset_import: ["": {version}]>
            g (float[N, 2, 1] x) => (float[N, 2] y) <float[2, 2] w = {{1, 2, 3, 4}}> {{
                i = Identity(x)  axes = Constant<value = int64[1] {{2}}>()  s = Squeeze(i, axes)
                sizes = Shape(s)  r = Reshape(s, sizes)  t = Transpose<perm = [0, 1]>(r)
                m = MatMul(t, w)  c = Cast<to = 11>(m)  d = Cast<to = 1>(c)
                u = Unsqueeze(d, axes)  f = Flatten(u)  e = Tanh(f)  y = Add(e, e) }}"""
        )
        proto = read_model(model).whole()
        graph = ir.to_proto(normalize(proto)).graph
        monkeypatch.setattr(opset_module, "_is_same_in_both", lambda model, version: False)
        converted = ir.to_proto(normalize(proto)).graph
        for each in (graph, converted):
            del each.value_info[:]  # the converter may lose names of sizes
        assert graph == converted

    def test_an_operator_that_changed_is_converted(self) -> None:
        model = parse(
            """<ir_version: 8, opset_import: ["": 17]> g (float[2, 3] x) => (float[2, 1] y)
            { y = ReduceMean<axes = [1]>(x) }"""
        )
        (node,) = [n for n in normalize(model).graph if n.op_type == "ReduceMean"]
        assert len(node.inputs) == 2


CHANNELS = 4
OPERATORS = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Pow": np.power,
    "PRelu": lambda x, s: np.where(x > 0, x, x * s),
}  # fmt: skip
SHAPES = [
    ((2, CHANNELS, 3), 1, (CHANNELS,)),
    ((2, CHANNELS, CHANNELS), 1, (CHANNELS,)),
    ((2, CHANNELS, 5, CHANNELS), 1, (CHANNELS,)),
    ((2, CHANNELS), 1, (CHANNELS,)),
    ((2, CHANNELS, 3), 1, (1,)),
    ((2, 3, CHANNELS, CHANNELS), 1, (3, CHANNELS)),
    ((2, 3, CHANNELS), 2, (CHANNELS,)),
]
# The slopes of a PRelu belong to axis 1.
ALIGNED = [
    (op_type, *shapes)
    for op_type in OPERATORS
    for shapes in (SHAPES[:-2] if op_type == "PRelu" else SHAPES)
]


@pytest.mark.table
@pytest.mark.parametrize("opset", [3, 5, 6])
@pytest.mark.parametrize("backend", ["full", "forward_backward"])
@pytest.mark.parametrize(("op_type", "shape", "axis", "second"), ALIGNED)
def test_old_operators_broadcast_along_their_axis(
    shape: tuple[int, ...],
    axis: int,
    second: tuple[int, ...],
    op_type: str,
    backend: str,
    opset: int,
) -> None:
    """Opset 7 aligns the last axes; before, an axis said where the second input begins.

    The gradient of the second input is that of the formula, by finite differences.
    """
    attributes = {} if op_type == "PRelu" else {"broadcast": 1, "axis": axis}
    make = onnx.helper
    graph = make.make_graph(
        [make.make_node(op_type, ["x", "s"], ["y"], **attributes)],
        "old",
        [make.make_tensor_value_info("x", 1, shape), make.make_tensor_value_info("s", 1, second)],
        [make.make_tensor_value_info("y", 1, shape)],
        [
            onnx.numpy_helper.from_array(
                np.linspace(0.5, 1.5, np.prod(second)).reshape(second).astype(np.float32), "s"
            )
        ],
    )
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", opset)], ir_version=3)
    onnx.checker.check_model(model)
    rng = np.random.default_rng(0)
    x = rng.uniform(0.2, 1, shape)
    x *= rng.choice([-1, 1], shape) if op_type == "PRelu" else 1
    y = rng.normal(size=shape)
    aligned = (*second, *[1] * (len(shape) - axis - len(second)))

    def outputs(s: np.ndarray) -> np.ndarray:
        return OPERATORS[op_type](x, s.reshape(aligned))

    trainer = Trainer(model, loss="mse", optimizer=1.0, weights=["s"], backend=backend)
    s = trainer.get_weights()["s"].astype(float)
    x32, y32 = x.astype(np.float32), y.astype(np.float32)
    np.testing.assert_allclose(trainer.predict_on_batch(x32), outputs(s), rtol=1e-5)

    def loss(s: np.ndarray) -> float:
        return float(((outputs(s) - y) ** 2).mean())

    steps = 1e-6 * np.eye(s.size).reshape(-1, *second)
    gradient = [(loss(s + step) - loss(s - step)) / 2e-6 for step in steps]
    trainer.train_on_batch(x32, y32)
    moved = s - trainer.get_weights()["s"]
    np.testing.assert_allclose(moved.ravel(), gradient, rtol=1e-3, atol=1e-5)
