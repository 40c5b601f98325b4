"""Facts about files of strangers: kinds of inputs, states, losses, and the last layer."""

from __future__ import annotations

import json
from typing import Any

import onnx
import pytest
from click.testing import CliRunner

import onnxfit
from onnxfit.cli import main
from onnxfit.load.facts import FileFacts
from tests.models import mlp
from tests.script.files import (
    graph_network,
    image_classifier,
    line_reader,
    parsed,
    recurrent,
    transformer,
)


def facts(model: onnx.ModelProto) -> FileFacts:
    found = onnxfit.inspect(model).facts
    assert found is not None
    return found


def kinds(model: onnx.ModelProto) -> dict[str, str]:
    return {one.name: one.kind for one in facts(model).inputs}


# The type of an input, its name and its reader, and the kind that it is
INPUTS = [
    ("float[N, 4]", "x", "f = Identity(x)", "numbers"),
    ("float[N, 3, 8, 8]", "x", "f = Identity(x)", "image"),
    ("float[N, H, W, 1]", "x", "f = Identity(x)", "image"),
    ("float[N, 3, frames, 8]", "x", "f = Identity(x)", "numbers"),  # sound has frames
    ("float[N, 3, 8, 3]", "x", "f = Identity(x)", "numbers"),  # two axes may be the channels
    ("float[N, T]", "speech", "f = Identity(speech)", "signal"),
    ("float[N, n_samples]", "x", "f = Identity(x)", "signal"),
    ("float[N, 16000]", "x", "f = Identity(x)", "signal"),
    ("float[N, T]", "pad_mask", "f = Identity(pad_mask)", "mask"),
    ("int64[N, T]", "mask", "f = Cast<to = 1>(mask)", "mask"),
    ("bool[N, T]", "x", "f = Cast<to = 1>(x)", "flags"),
    ("int64[N]", "input_lengths", "f = Cast<to = 1>(input_lengths)", "lengths"),
    ("int32[N, T]", "x", "f = Cast<to = 1>(x)", "integers"),
    ("int32[N, T]", "x", "i = Cast<to = 7>(x) f = Gather(table, i)", "token ids"),
    ("int64[N, T]", "x", "f = OneHot(x, depth, ends)", "token ids"),
    ("int64", "sr", "f = Cast<to = 1>(sr)", "sample rate"),
    ("int64[1]", "Sampling_Rate", "f = Cast<to = 1>(Sampling_Rate)", "sample rate"),
    ("float", "threshold", "f = Identity(threshold)", "setting"),
]


@pytest.mark.parametrize(("kind_of_value", "name", "reader", "kind"), INPUTS)
def test_the_kind_of_an_input(kind_of_value: str, name: str, reader: str, kind: str) -> None:
    model = parsed(
        f"g (float[N, 2] base, {kind_of_value} {name}) => (float[N, 1] y, float f)"
        " <int64 depth = {7}, float[2] ends = {0, 1}, float[7, 2] table = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}>"
        f" {{ y = MatMul(base, w) {reader} }}",
        {"w": (2, 1)},
    )
    model.graph.output[1].type.tensor_type.ClearField("shape")
    found = next(one for one in facts(model).inputs if one.name == name)
    assert found.kind == kind
    assert found.below == (7 if kind == "token ids" else None)
    assert found.is_fixed == (kind in ("sample rate", "setting"))


def test_states_are_paired_with_the_outputs_that_follow_them() -> None:
    assert facts(recurrent()).state_outputs == {"hn": "h0", "cn": "c0"}
    unpaired = parsed(
        "g (float[N, 2] x, float[1, 4] hidden) => (float[N, 1] y, float[2, 4] hidden_out)"
        " { y = MatMul(x, w) hidden_out = Concat<axis = 0>(hidden, hidden) }",
        {"w": (2, 1)},
    )
    found = facts(unpaired)
    assert found.state_outputs == {}
    assert [one.is_fixed for one in found.inputs] == [False, True]  # zeros in every batch
    autoencoder = parsed(
        "g (float[N, 2] x) => (float[N, 2] x_out) { x_out = MatMul(x, w) }", {"w": (2, 2)}
    )
    assert facts(autoencoder).state_outputs == {}


# The end of a network of 3 numbers, the name of its output, and the loss
ENDS = [
    ("y = Softmax(s)", "y", "cross_entropy"),
    ("y = LogSoftmax(s)", "y", "cross_entropy"),
    ("y = Sigmoid(s)", "y", "binary_cross_entropy"),
    ("e = Exp(s) t = ReduceSum<keepdims = 1>(e, one) y = Div(e, t)", "y", "cross_entropy"),
    ("y = Identity(s)", "y", "mean_squared_error"),
    ("y = Relu(s)", "y", "mean_squared_error"),
    ("logits = Identity(s)", "logits", "cross_entropy"),
    ("y = ArgMax(s)", "y", None),
]


@pytest.mark.parametrize(("end", "name", "loss"), ENDS)
def test_the_loss_of_an_output(end: str, name: str, loss: str | None) -> None:
    kind = "int64[N, 1]" if "ArgMax" in end else "float[N, 3]"
    model = parsed(
        f"g (float[N, 2] x) => ({kind} {name}) <int64[1] one = {{1}}>"
        f" {{ s = MatMul(x, w) {end.replace('ArgMax', 'ArgMax<axis = 1>')} }}",
        {"w": (2, 3)},
    )
    (output,) = facts(model).outputs
    assert output.loss == loss
    assert output.reason


def test_scores_of_token_ids_have_the_loss_of_a_language_model() -> None:
    (output,) = facts(transformer()).outputs
    assert output.loss == "causal_lm"
    assert kinds(transformer()) == {"input_ids": "token ids", "attention_mask": "mask"}


def test_only_sequences_of_classes_from_images_or_sounds_may_be_texts() -> None:
    assert [one.alternatives for one in facts(line_reader()).outputs] == [("ctc",)]
    assert [one.alternatives for one in facts(image_classifier()).outputs] == [()]


def test_numbers_of_a_last_layer_may_be_scores() -> None:
    assert [one.alternatives for one in facts(mlp()).outputs] == [("cross_entropy",)]
    assert [one.alternatives for one in facts(mlp((4, 1))).outputs] == [("binary_cross_entropy",)]
    assert [one.alternatives for one in facts(graph_network()).outputs] == [
        ("binary_cross_entropy",)
    ]


def test_the_last_layer_is_found_behind_other_nodes() -> None:
    assert facts(mlp((4, 8, 8, 3))).last_layer == ("fc2.weight", "fc2.bias")
    transposed = parsed(
        "g (float[N, 2] x) => (float[N, 4] y)"
        " { a = MatMul(x, w) t = Transpose(v) b = MatMul(a, t) c = Add(b, bias) y = Softmax(c) }",
        {"w": (2, 3), "v": (4, 3), "bias": (4,)},
    )
    assert facts(transposed).last_layer == ("v", "bias")


def test_origin_and_licence_come_from_the_file() -> None:
    model = mlp()
    model.producer_name, model.producer_version = "exporter", "1.2"
    assert facts(model).origin == ("Made by exporter 1.2, opset 17; no licence in its metadata.")
    model.metadata_props.add(key="License", value="CC-BY-4.0")
    model.opset_import.add(domain="unused", version=3)
    assert facts(model).origin == (
        "Made by exporter 1.2, opset 17; licence in its metadata: CC-BY-4.0."
    )


def test_json_has_the_facts(tmp_path: Any) -> None:
    onnx.save(recurrent(), tmp_path / "m.onnx")
    done = CliRunner().invoke(main, ["inspect", str(tmp_path / "m.onnx"), "--json"])
    found = json.loads(done.stdout)["facts"]
    assert [one["kind"] for one in found["inputs"]] == ["signal", "state", "state", "sample rate"]
    assert found["outputs"][0]["loss"] == "binary_cross_entropy"


@pytest.mark.parametrize("producer", ["tf2onnx", "keras", "pytorch", ""])
def test_an_export_of_tensorflow_says_what_it_left_out(producer: str) -> None:
    model = parsed(
        "g (float[N, 2] x) => (float[N, 4] y) { h = MatMul(x, w) r = Relu(h) y = MatMul(r, v) }",
        {"w": (2, 3), "v": (3, 4)},
    )
    model.producer_name, model.producer_version = producer, "1.16"
    says = producer in ("tf2onnx", "keras")
    lines = " ".join(onnxfit.inspect(model).facts.exporter)
    assert "onnxfit.add_dropout(model, rate)" in lines
    assert ("2 layers have no bias" in lines) == says
    assert ("wrote it as a scale and a shift" in lines) == says
    summary = " ".join(onnxfit.Trainer(model, loss="mse").summary().split())
    missing = (
        f"exporter {producer} 1.16: no Dropout, no BatchNormalization, 2 layers without a bias"
    )
    assert (missing in summary) == says
    whole = onnxfit.add_dropout(onnxfit.add_biases(model), 0.1)
    summary = " ".join(onnxfit.Trainer(whole, loss="mse").summary().split())
    assert ("no BatchNormalization; see onnxfit" in summary) == says
    assert "no Dropout" not in summary
    assert "without a bias" not in summary
