"""Operators whose meaning or form changed between opsets 3 and 13 predict and train as before.

onnxruntime runs the original file from opset 7 on. For an earlier opset, it runs the same operator
in the form of opset 8, which `modern` writes by hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from onnxfit import ModelError, Trainer
from onnxfit.graph.model import inferred_model

Array = np.ndarray[Any, Any]
ORT_OPSET = 7  # the first that onnxruntime runs
IMAGE = (2, 4, 6, 6)
SEQUENCE = (5, 2, 4)


def numbers(*shape: int) -> Array:
    return np.random.default_rng(len(shape)).uniform(0.2, 1.5, shape).astype(np.float32)


def integers(*values: int) -> Array:
    return np.array(values, np.int64)


@dataclass(frozen=True)
class Case:
    """An operator in the form of old opsets.

    - `text`: nodes that compute y, a tensor of rank `rank`, from k.
    - `opsets`: the opsets that have this form.
    - `modern`: the same nodes in opset 8; None if they are the same without `dropped` attributes.
    """

    text: str
    opsets: tuple[int, ...]
    constants: dict[str, Array] = field(default_factory=dict)
    modern: str | None = None
    shape: tuple[int, ...] = IMAGE
    rank: int = 4


DROPPED = {"broadcast", "consumed_inputs", "is_test", "output_sequence"}
CHANNELS = {"s": numbers(4), "b": numbers(4), "m": numbers(4), "v": numbers(4)}


def recurrent(op_type: str, gates: int, opsets: tuple[int, ...], attributes: str) -> Case:
    """A recurrent operator with 3 hidden units."""
    constants = {
        "W": numbers(1, 3 * gates, 4) - 0.8,
        "R": numbers(1, 3 * gates, 3) - 0.8,
        "B": numbers(1, 6 * gates) - 0.8,
    }
    text = f"y = {op_type}<hidden_size = 3{attributes}>(k, W, R, B)"
    return Case(text, opsets, constants, shape=SEQUENCE)


CASES = {
    "BatchNormalization": Case(
        "y = BatchNormalization<is_test = 1, consumed_inputs = [0, 0, 0, 1, 1]>(k, s, b, m, v)",
        (3, 5),
        CHANNELS,
    ),
    "BatchNormalization is_test": Case(
        "y = BatchNormalization<is_test = 1, spatial = 1>(k, s, b, m, v)", (6,), CHANNELS
    ),
    "BatchNormalization spatial": Case(
        "y = BatchNormalization<spatial = 1>(k, s, b, m, v)", (7, 8), CHANNELS
    ),
    "BatchNormalization of a matrix": Case(
        "p = GlobalAveragePool(k)  f = Flatten(p)"
        "  y = BatchNormalization<spatial = 0>(f, s, b, m, v)",
        (7, 8),
        CHANNELS,
        rank=2,
    ),
    "Dropout is_test": Case("y = Dropout<is_test = 1, ratio = 0.0>(k)", (3, 6)),
    "Dropout": Case("y, mask = Dropout<ratio = 0.0>(k)", (7, 10)),
    "Upsample": Case('y = Upsample<mode = "linear", scales = [1.0, 1.0, 2.0, 2.0]>(k)', (7, 8)),
    "Upsample nearest": Case(
        'y = Upsample<mode = "nearest", scales = [1.0, 1.0, 2.0, 3.0]>(k)', (7, 8)
    ),
    "Upsample 9": Case(
        'y = Upsample<mode = "linear">(k, c)', (9,), {"c": np.array([1, 1, 2, 2], np.float32)}
    ),
    "Reshape": Case(
        "y = Reshape<shape = [0, -1]>(k)", (3, 4), {"c": integers(0, -1)}, "y = Reshape(k, c)", rank=2
    ),
    "Reshape 5": Case("y = Reshape(k, c)", (5, 8), {"c": integers(0, -1)}, rank=2),
    "Pad": Case("y = Pad<pads = [0, 0, 1, 2, 0, 0, 3, 4], value = 0.5>(k)", (3, 9, 10)),
    "Pad reflect": Case('y = Pad<pads = [0, 0, 1, 2, 0, 0, 3, 1], mode = "reflect">(k)', (9, 10)),
    "Slice": Case("y = Slice<starts = [1, 0], ends = [3, 9999], axes = [1, 2]>(k)", (3, 9)),
    "Clip": Case("y = Clip<min = 0.5, max = 1.0>(k)", (3, 6, 10)),
    "Clip from below": Case("y = Clip<min = 0.5>(k)", (6, 10)),
    "Softmax": Case("y = Softmax(k)", (3, 11, 12)),
    "Softmax of images": Case("y = Softmax<axis = 2>(k)", (3, 11, 12)),
    "LogSoftmax": Case("y = LogSoftmax(k)", (3, 11, 12)),
    "ReduceSum": Case("y = ReduceSum<axes = [2], keepdims = 0>(k)", (3, 11, 12), rank=3),
    "Squeeze": Case("u = Unsqueeze<axes = [1]>(k)  y = Squeeze<axes = [1]>(u)", (3, 11, 12)),
    "Split": Case("a, y = Split<axis = 1, split = [1, 3]>(k)", (3, 11, 12)),
    "Split in halves": Case("a, y = Split<axis = 1>(k)", (3, 11, 12)),
    "Cast to a name": Case(
        'a = Cast<to = "DOUBLE">(k)  y = Cast<to = "FLOAT">(a)',
        (3, 5),
        modern="a = Cast<to = 11>(k)  y = Cast<to = 1>(a)",
    ),
    "Cast": Case("a = Cast<to = 11>(k)  y = Cast<to = 1>(a)", (6, 8)),
    "Concat": Case("y = Concat(k, k)", (3,), modern="y = Concat<axis = 1>(k, k)"),
    "TopK": Case("y, i = TopK<k = 2, axis = 1>(k)", (3, 9)),
    "TopK 10": Case("y, i = TopK<axis = 1>(k, c)", (10,), {"c": integers(2)}),
    "AveragePool": Case(
        "y = AveragePool<kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]>(k)",
        (3, 6, 7, 9),
    ),
    "MaxPool": Case(
        "y = MaxPool<kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]>(k)", (3, 7, 9)
    ),
    "InstanceNormalization": Case(
        "y = InstanceNormalization<consumed_inputs = [0, 0, 0]>(k, s, b)",
        (3,),
        {"s": numbers(4), "b": numbers(4)},
    ),
    "LeakyRelu": Case("n = Neg(k)  y = LeakyRelu<alpha = 0.2>(n)", (3, 6, 8)),
    "Elu": Case("n = Neg(k)  y = Elu<alpha = 0.7, consumed_inputs = [0]>(n)", (3,)),
    "HardSigmoid": Case("y = HardSigmoid<alpha = 0.3>(k)", (3, 6)),
    "Max": Case("n = Exp(k)  y = Max(k, n)", (3, 6, 8)),
    "Mean": Case("n = Exp(k)  y = Mean(k, n)", (3, 6, 8)),
    "Tile": Case(
        "y = Tile(k, c, d)",
        (3, 5),
        {"c": np.array(2, np.float32), "d": np.array(1, np.float32), "e": integers(1, 2, 1, 1)},
        "y = Tile(k, e)",
    ),
    "Tile 6": Case("y = Tile(k, e)", (6, 8), {"e": integers(1, 2, 1, 1)}),
    "Gather": Case("y = Gather<axis = 1>(k, c)", (3, 11), {"c": integers(0, 3)}),
    "Flatten": Case("y = Flatten(k)", (3, 9), rank=2),
    "Gemm broadcast": Case(
        "f = Flatten(k)  y = Gemm<broadcast = 1, alpha = 0.5, beta = 2.0>(f, B, c)",
        (3, 6),
        {"B": numbers(144, 3), "c": numbers(3)},
        rank=2,
    ),
    "Gemm": Case(
        "f = Flatten(k)  y = Gemm<alpha = 0.5, beta = 2.0>(f, B, c)",
        (7, 9, 11),
        {"B": numbers(144, 3), "c": numbers(3)},
        rank=2,
    ),
    "a weight of Constant and Reshape": Case(
        "w = Constant<value = float[4] {1.5, -0.5, 0.25, 2}>()"
        "  c = Constant<value = int64[4] {1, 4, 1, 1}>()  W = Reshape(w, c)  y = Conv(k, W)",
        (5, 8),
    ),
    "a weight of ConstantOfShape": Case(
        "c = Constant<value = int64[4] {1, 4, 1, 1}>()"
        "  W = ConstantOfShape<value = float[1] {0.5}>(c)  y = Conv(k, W)",
        (9, 11),
    ),
    "Scatter": Case(
        "y = Scatter<axis = 1>(k, i, u)",
        (9, 10),
        {"i": np.zeros((2, 1, 6, 6), np.int64), "u": numbers(2, 1, 6, 6)},
    ),
    "LSTM 6": recurrent("LSTM", 4, (3, 6), ", output_sequence = 1"),
    "GRU 6": recurrent("GRU", 3, (3, 6), ", output_sequence = 1"),
    "RNN 6": recurrent("RNN", 1, (3, 6), ", output_sequence = 1"),
    "LSTM": recurrent("LSTM", 4, (7, 13), ""),
    "GRU": recurrent("GRU", 3, (7, 13), ", linear_before_reset = 1"),
}  # fmt: skip


def build(case: Case, opset: int, scale: Array) -> onnx.ModelProto:
    """The operator after a product of the input with `scale`, an initializer."""
    attributes = "<broadcast = 1, axis = 1>" if opset < ORT_OPSET else ""
    model = onnx.parser.parse_model(f"""<ir_version: 4, opset_import: ["": {opset}]>
        g () => () {{ k = Mul{attributes}(x, t)  {case.text} }}""")
    constants = {"t": scale, **case.constants}
    graph = model.graph
    graph.input.append(helper.make_tensor_value_info("x", 1, case.shape))
    sizes = [f"size{i}" for i in range(case.rank)]
    graph.output.append(helper.make_tensor_value_info("y", 1, sizes))
    for name, array in constants.items():
        tensor = numpy_helper.from_array(array, name)
        graph.initializer.append(tensor)
        graph.input.append(helper.make_tensor_value_info(name, tensor.data_type, array.shape))
    return model


def modern(case: Case, opset: int, scale: Array) -> onnx.ModelProto:
    """The file itself if onnxruntime runs its opset, else the same operators in opset 8."""
    if opset >= ORT_OPSET:
        return build(case, opset, scale)
    newest = Case(case.modern or case.text, (8,), case.constants, None, case.shape, case.rank)
    model = build(newest, 8, scale)
    for node in model.graph.node:
        for attribute in [each for each in node.attribute if each.name in DROPPED]:
            node.attribute.remove(attribute)
    return model


def expected(case: Case, opset: int, scale: Array, x: Array) -> Array:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    model = modern(case, opset, scale).SerializeToString()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    (y,) = session.run(["y"], {"x": x})
    return np.asarray(y)


@pytest.mark.parametrize(
    ("name", "opset"), [(name, opset) for name, case in CASES.items() for opset in case.opsets]
)
def test_an_old_operator_predicts_what_it_did(name: str, opset: int) -> None:
    case = CASES[name]
    x, scale = numbers(*case.shape), numbers(*case.shape[1:])
    predicted = Trainer(build(case, opset, scale)).predict_on_batch(x)
    y = predicted["y"] if isinstance(predicted, dict) else predicted
    np.testing.assert_allclose(y, expected(case, opset, scale, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_an_old_operator_has_its_gradient(name: str) -> None:
    """The derivative of the mean of squares along one direction, by differences of onnxruntime."""
    case = CASES[name]
    opset = case.opsets[0]
    x, scale = numbers(*case.shape), numbers(*case.shape[1:])
    rng = np.random.default_rng(7)
    target = rng.standard_normal(expected(case, opset, scale, x).shape).astype(np.float32)
    trainer = Trainer(
        build(case, opset, scale),
        loss={"y": "mse"},
        optimizer=1.0,
        weights=["t"],
        batch_norm="frozen",
    )
    trainer.train_on_batch(x, {"y": target})
    gradient = scale - trainer.get_weights()["t"]
    direction = rng.standard_normal(scale.shape).astype(np.float32)

    def loss(step: float) -> float:
        y = expected(case, opset, scale + np.float32(step) * direction, x).astype(float)
        return float(((y - target) ** 2).mean())

    slope = (loss(3e-4) - loss(-3e-4)) / 6e-4
    assert float((gradient * direction).sum()) == pytest.approx(slope, rel=1e-2, abs=1e-3)


def test_statistics_of_each_element_are_refused() -> None:
    case = Case(
        "y = BatchNormalization<spatial = 0>(k, s, b, m, v)",
        (7,),
        {name: numbers(4, 6, 6) for name in "sbmv"},
    )
    with pytest.raises(ModelError, match=r"has spatial=0, .* set the attribute to 1"):
        Trainer(build(case, 7, numbers(4, 6, 6)))


def test_a_tile_of_computed_tiles_is_refused() -> None:
    case = Case("c = Constant<value = float {2}>()  d = Exp(c)  y = Tile(k, d, c)", (5,))
    with pytest.raises(ModelError, match=r"Tile .* of opset 5 needs an input of known rank"):
        Trainer(build(case, 5, numbers(4, 6, 6)))


def test_ranks_of_old_files_are_inferred_where_operators_have_their_present_form() -> None:
    """A Reshape of opset 11 reads its sizes, whose number is the rank; before opset 5, it has them
    as an attribute.
    """
    text = (
        '<ir_version: 4, opset_import: ["": 11]> g (float[2, 6] x, int64[3] sizes) => (float[] y)'
        " { y = Reshape(x, sizes) }"
    )
    model = onnx.parser.parse_model(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    (y,) = inferred_model(model).graph.outputs
    assert y.shape is not None
    assert len(y.shape) == 3
    model.opset_import[0].version = 4
    model.graph.node[0].input.pop()
    model.graph.node[0].attribute.append(onnx.helper.make_attribute("shape", [3, 4]))
    inferred_model(model)  # raises no error
