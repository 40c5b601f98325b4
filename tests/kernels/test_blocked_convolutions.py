"""Depthwise convolutions in blocks of channels: the same numbers, by other nodes."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

import onnxfit
from onnxfit.kernels import blocked_convolutions
from onnxfit.kernels.blocked_convolutions import (
    DOMAIN,
    channel_block,
    with_blocked_convolutions,
)
from tests.gradients.rules.cases import built

needs_kernels = pytest.mark.skipif(channel_block() == 0, reason="no kernels for this processor")


def model_of(body: str, inputs: str) -> onnx.ModelProto:
    text = f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => (y) {{ {body} }}'
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text), data_prop=True)
    model.graph.node[0].name = "conv"
    return model


def results(model: onnx.ModelProto) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    feeds = {}
    for value in model.graph.input:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        feeds[value.name] = rng.standard_normal(shape).astype(np.float32)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, feeds)


def domains(model: onnx.ModelProto) -> set[str]:
    return {node.domain for node in model.graph.node}


@needs_kernels
@pytest.mark.parametrize(
    ("inputs", "body"),
    [
        ("float[2,16,5,6] x, float[16,1,3,3] w", "Conv<group=16, pads=[1,1,1,1]>(x, w)"),
        ("float[1,48,7,6] x, float[48,1,3,2] w, float[48] b",
         "Conv<group=48, strides=[2,1], pads=[0,1,2,1]>(x, w, b)"),
        ("float[3,32,9,4] x, float[32,1,3,3] w", "Conv<group=32, dilations=[2,1]>(x, w)"),
        ("float[2,16,6,7] x, float[16,1,5,4] w",
         'Conv<group=16, strides=[2,2], auto_pad="SAME_LOWER">(x, w)'),
        ("float[2,16,4,5] x, float[16,1,3,3] w",
         "ConvTranspose<group=16, strides=[2,2], pads=[1,1,1,1], output_padding=[1,1]>(x, w)"),
        ("float[1,32,4,3] x, float[32,1,5,2] w",
         "ConvTranspose<group=32, strides=[2,2], pads=[2,0,1,0]>(x, w)"),
        ("float[2,16,3,4] x, float[16,1,4,3] w",
         "ConvTranspose<group=16, strides=[3,1], pads=[0,1,1,1]>(x, w)"),
    ],
)  # fmt: skip
def test_blocks_change_no_number(inputs: str, body: str) -> None:
    plain = model_of(f"y = {body}", inputs)
    blocked = with_blocked_convolutions(plain, "cpu")
    assert DOMAIN in domains(blocked)
    assert domains(plain) == {""}
    for found, expected in zip(results(blocked), results(plain)):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("inputs", "body"),
    [
        ("float[2,15,5,5] x, float[15,1,3,3] w", "Conv<group=15>(x, w)"),
        ("float[n,16,5,5] x, float[16,1,3,3] w", "Conv<group=16>(x, w)"),
        ("double[2,16,5,5] x, double[16,1,3,3] w", "Conv<group=16>(x, w)"),
        # filters that read several channels
        ("float[2,32,5,6] x, float[16,32,3,3] w", "Conv<pads=[1,1,1,1]>(x, w)"),
        ("float[2,32,9,9] x, float[32,16,3,3] w", "Conv<group=2>(x, w)"),
        ("float[2,32,9,8] x, float[32,16,3,2] w", "ConvTranspose(x, w)"),
        # signals; several filters for a channel
        ("float[2,16,5] x, float[16,1,3] w", "Conv<group=16>(x, w)"),
        ("float[2,16,5,5] x, float[32,1,3,3] w", "Conv<group=16>(x, w)"),
        # no tap reaches each second pixel; a size that is no multiple of the stride; a bias; a
        # result of many pixels
        ("float[2,16,5,5] x, float[16,1,1,1] w",
         "ConvTranspose<group=16, strides=[2,2], output_padding=[1,1]>(x, w)"),
        ("float[2,16,5,5] x, float[16,1,3,3] w", "ConvTranspose<group=16, strides=[2,2]>(x, w)"),
        ("float[2,16,5,5] x, float[16,1,2,2] w, float[16] b",
         "ConvTranspose<group=16, strides=[2,2]>(x, w, b)"),
        ("float[2,16,9,16] x, float[16,1,2,2] w", "ConvTranspose<group=16, strides=[2,2]>(x, w)"),
    ],
)  # fmt: skip
def test_other_convolutions_stay(inputs: str, body: str) -> None:
    plain = model_of(f"y = {body}", inputs)
    assert with_blocked_convolutions(plain, "cpu") is plain


def test_constant_weights_are_left_to_onnxruntime() -> None:
    plain = model_of("y = Conv<group=16>(x, w)", "float[2,16,5,5] x, float[16,1,3,3] w")
    value = plain.graph.input.pop()
    weights = np.ones((16, 1, 3, 3), np.float32)
    plain.graph.initializer.append(onnx.numpy_helper.from_array(weights, value.name))
    assert with_blocked_convolutions(plain, "cpu") is plain


def test_a_processor_without_kernels_runs_the_plain_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_convolutions, "channel_block", lambda: 0)
    plain = model_of("y = Conv<group=16>(x, w)", "float[2,16,5,5] x, float[16,1,3,3] w")
    assert with_blocked_convolutions(plain, "cpu") is plain


def gradient_of(body: str, *shapes: tuple[int, ...]) -> onnx.ModelProto:
    """A graph with the gradient of the weights of a convolution alone."""
    x, w, y = shapes
    inputs = f"float{[*x]} x, float{[*w]} w"
    model = built(
        model_of(f"y = {body}", inputs), ["y"], ["w"], {"y_grad": np.zeros(y, np.float32)}, runs=""
    ).model
    del model.graph.output[:]
    model.graph.output.extend([onnx.helper.make_tensor_value_info("w_grad", 1, w)])
    model.graph.node.remove(next(node for node in model.graph.node if "y" in node.output))
    model.graph.input.remove(next(value for value in model.graph.input if value.name == "w"))
    for value in model.graph.input:
        if value.name == "y_grad":
            value.CopyFrom(onnx.helper.make_tensor_value_info("y_grad", 1, y))
    return onnx.shape_inference.infer_shapes(model, data_prop=True)


GRADIENTS = [
    ("Conv<group=16, pads=[1,1,1,1]>(x, w)", (2, 16, 4, 4), (16, 1, 3, 3), (2, 16, 4, 4)),
    ("Conv<group=16, pads=[1,1,1,1]>(x, w)", (3, 16, 9, 8), (16, 1, 3, 3), (3, 16, 9, 8)),
    ("Conv<group=32, pads=[0,1,0,1]>(x, w)", (1, 32, 1, 66), (32, 1, 1, 3), (1, 32, 1, 66)),
    ("Conv<group=16, strides=[2,2], pads=[2,1,1,1]>(x, w)",
     (2, 16, 12, 11), (16, 1, 5, 3), (2, 16, 6, 6)),
    ("Conv<group=16, dilations=[2,1]>(x, w)", (2, 16, 12, 9), (16, 1, 3, 2), (2, 16, 8, 8)),
    ("ConvTranspose<group=16, strides=[2,2], pads=[1,1,1,1], output_padding=[1,1]>(x, w)",
     (2, 16, 6, 5), (16, 1, 3, 3), (2, 16, 12, 10)),
]  # fmt: skip


@needs_kernels
@pytest.mark.parametrize(("body", "x", "w", "y"), GRADIENTS)
def test_blocks_change_no_gradient_of_weights(
    body: str, x: tuple[int, ...], w: tuple[int, ...], y: tuple[int, ...]
) -> None:
    plain = gradient_of(body, x, w, y)
    blocked = with_blocked_convolutions(plain, "cpu")
    operators = [node.op_type for node in blocked.graph.node]
    assert operators.count("ReorderInput") == 2
    assert not {"MatMul", "Mul"} & {*operators}  # what the result does not need is gone
    for found, expected in zip(results(blocked), results(plain)):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_gradients_with_pixels_that_no_window_reads_stay() -> None:
    plain = gradient_of(
        "Conv<group=16, strides=[2,2]>(x, w)", (2, 16, 4, 4), (16, 1, 1, 1), (2, 16, 2, 2)
    )
    assert with_blocked_convolutions(plain, "cpu") is plain


def test_copied_notes_are_not_used() -> None:
    plain = gradient_of(*GRADIENTS[0])
    noted = next(node for node in plain.graph.node if node.metadata_props)
    copy = plain.graph.node.add()
    copy.CopyFrom(noted)
    copy.output[0] = "copy"
    assert with_blocked_convolutions(plain, "cpu") is plain


NETWORK = """<ir_version: 10, opset_import: ["": 21]>
    g (float[2,3,12,12] x) => (float[2,16,1,1] y)
    { a = Conv(x, p)  b = Conv<group=16, pads=[1,1,1,1], strides=[2,2]>(a, w)  c = Relu(b)
      d = Conv<group=16, pads=[1,1,1,1]>(c, v)  e = Conv<pads=[1,1,1,1]>(d, u)
      y = GlobalAveragePool(e) }"""


@needs_kernels
def test_steps_are_the_same_and_saved_graphs_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(NETWORK)
    for name, shape in {
        "p": (16, 3, 1, 1),
        "w": (16, 1, 3, 3),
        "v": (16, 1, 3, 3),
        "u": (16, 16, 3, 3),
    }.items():
        weights = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weights, name))
    x = rng.standard_normal((2, 3, 12, 12)).astype(np.float32)
    y = rng.standard_normal((2, 16, 1, 1)).astype(np.float32)
    losses = []
    for block in (channel_block(), 0):
        monkeypatch.setattr(blocked_convolutions, "channel_block", lambda block=block: block)
        trainer = onnxfit.Trainer(model, loss="mse", optimizer="sgd")
        losses.append([trainer.train_on_batch(x, y)["loss"] for _ in range(3)])
        graph = onnx.ModelProto.FromString(trainer.save_onnx_graph(bytes)["train"])
        assert domains(graph) == {""}
    np.testing.assert_allclose(*losses, rtol=1e-5)
