"""Weights that several nodes read: what is said of them, and when."""

from __future__ import annotations

import json
import warnings

import numpy as np
import onnx
import onnx.helper as oh
import onnx.parser
import pytest

import onnxfit
from onnxfit import Trainer
from onnxfit.graph.sharing import merged_weights
from tests.models import mlp
from tests.tools.editing.graphs import (
    fresh_network,
    model_of,
    node,
    noted,
    ones,
    random,
    zeros,
)


def trainer_of(model: onnx.ModelProto, **settings) -> Trainer:
    return Trainer(model, loss="mse", **settings)


def dense(*layers: tuple[str, str, str], **tensors: np.ndarray) -> onnx.ModelProto:
    """Gemms of 3 features, one after another: name, weight, bias."""
    nodes, x = [], "x"
    for name, weight, bias in layers:
        nodes.append(node("Gemm", f"{x} {weight} {bias}", f"{name}.out", name=name))
        x = f"{name}.out"
    nodes.append(node("Relu", x, "y"))
    return model_of(nodes, tensors, {"x": ("N", 3)}, {"y": ("N", 3)})


def test_a_merged_bias_and_scale_are_one_warning_at_the_line_of_the_user() -> None:
    with pytest.warns(UserWarning, match=r"onnxfit\.untie") as caught:
        trainer_of(fresh_network())
    assert len(caught) == 1
    assert "'n1.weight', 'b.bias' are weights of several layers" in str(caught[0].message)
    assert caught[0].filename == __file__


def test_a_weight_that_is_not_trained_does_not_warn() -> None:
    trainer_of(fresh_network(), weights=["*", "!n1.weight", "!b.bias"])


def test_the_warning_counts_what_it_does_not_name() -> None:
    layers, tensors = [], {}
    for i in range(7):
        for half in "ab":
            layers.append((f"l{i}{half}", f"w{i}{half}", f"bias{i}"))
            tensors[f"w{i}{half}"] = random(3, 3, seed=len(layers))
        tensors[f"bias{i}"] = zeros(3)
    with pytest.warns(UserWarning, match="'bias4' and 2 more are weights") as caught:
        trainer_of(dense(*layers, **tensors))
    assert "bias5" not in str(caught[0].message)


def loop() -> onnx.ModelProto:
    """A bias that the body of a Loop reads in each iteration."""

    def info(name: str, kind: int, shape: tuple) -> onnx.ValueInfoProto:
        return oh.make_tensor_value_info(name, kind, shape)

    real, flag = onnx.TensorProto.FLOAT, onnx.TensorProto.BOOL
    body = oh.make_graph(
        [node("Identity", "cond", "cond_out"), node("Gemm", "h w b", "h_out")], "body",
        [info("i", onnx.TensorProto.INT64, ()), info("cond", flag, ()), info("h", real, (2, 3))],
        [info("cond_out", flag, ()), info("h_out", real, (2, 3))],
    )  # fmt: skip
    nodes = [oh.make_node("Loop", ["times", "", "x"], ["y"], body=body)]
    tensors = {"w": random(3, 3), "b": zeros(3), "times": np.array(3)}
    return model_of(nodes, tensors, {"x": (2, 3)}, {"y": (2, 3)})


def tied_embedding() -> onnx.ModelProto:
    nodes = [node("Gather", "table tokens", "e"), node("Gather", "table tokens", "f"), node("Add", "e f", "s"), node("Transpose", "table", "t"), node("MatMul", "s t", "y")]  # fmt: skip
    return model_of(nodes, {"table": random(7, 4)}, {"tokens": ("N",)}, {"y": ("N", 7)}, integers=["tokens"])  # fmt: skip


def block_called_twice() -> onnx.ModelProto:
    nodes = [
        node("LayerNormalization", "x s z", "n1"),
        node("Gemm", "n1 w b", "g1"),
        node("Relu", "g1", "r"),
        node("LayerNormalization", "r s z", "n2"),
        node("Gemm", "n2 w b", "y"),
    ]
    tensors = {"s": ones(3), "z": zeros(3), "w": random(3, 3), "b": zeros(3)}
    return model_of(nodes, tensors, {"x": ("N", 3)}, {"y": ("N", 3)})


def norm_called_twice() -> onnx.ModelProto:
    """One LayerNorm at two ends of a network, as torch's exporter notes it."""
    notes = {
        "modules": "['', 'norm', 'layer_norm']",
        "classes": "['m.Net', 'torch.nn.modules.normalization.LayerNorm', 'aten']",
    }
    nodes = [
        noted(node("LayerNormalization", "x s z", "n1"), **notes),
        node("Gemm", "n1 w", "g"),
        noted(node("LayerNormalization", "g s z", "y"), **notes),
    ]
    return model_of(nodes, {"s": ones(3), "z": zeros(3), "w": random(3, 3)}, {"x": ("N", 3)}, {"y": ("N", 3)})  # fmt: skip


LEGITIMATE = {
    "loop": loop,
    "tied embedding": tied_embedding,
    "block called twice": block_called_twice,
    "norm called twice": norm_called_twice,
    "layer called twice": lambda: dense(("a", "w", "b"), ("c", "w", "b"), w=random(3, 3), b=zeros(3)),
    "matrix of two layers": lambda: dense(("a", "w", "b"), ("c", "w", "d"), w=random(3, 3), b=random(3), d=zeros(3)),
    "trained bias of two layers": lambda: dense(("a", "u", "b"), ("c", "v", "b"), u=random(3, 3), v=random(3, 3, seed=1), b=random(3)),
    "nothing shared": mlp,
}  # fmt: skip


@pytest.mark.parametrize("name", LEGITIMATE)
def test_what_is_shared_on_purpose_does_not_warn(name: str) -> None:
    model = LEGITIMATE[name]()
    settings = {"loss": "cross_entropy"} if name == "tied embedding" else {"loss": "mse"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Trainer(model, **settings)


MERGED = {
    "biases": (dense(("a", "u", "b"), ("c", "v", "b"), u=random(3, 3), v=random(3, 3, seed=1), b=zeros(3)), ["b"]),
    "norms without notes": (
        model_of(
            [node("LayerNormalization", "x s z", "n"), node("Gemm", "n w", "g"), node("LayerNormalization", "g s z", "y")],
            {"s": ones(3), "z": zeros(3), "w": random(3, 3)}, {"x": ("N", 3)}, {"y": ("N", 3)},
        ), ["s", "z"],
    ),
    "a bias after MatMul and of a norm": (
        model_of(
            [node("MatMul", "x w", "p"), node("Add", "p z", "h"), node("LayerNormalization", "h s z", "y")],
            {"s": random(3), "z": zeros(3), "w": random(3, 3)}, {"x": ("N", 3)}, {"y": ("N", 3)},
        ), ["z"],
    ),
    "a module that torch copied": (
        model_of(
            [noted(node("Gemm", f"{x} {w} b", y), modules=f"['', 'layers.{i}', 'linear']") for i, (x, w, y) in enumerate(("xuh", "hvy"))],
            {"u": random(3, 3), "v": random(3, 3, seed=1), "b": random(3)}, {"x": ("N", 3)}, {"y": ("N", 3)},
        ), ["b"],
    ),
    "copies by Identity": (
        model_of(
            [node("Identity", "a.weight", "b.weight"), node("Gemm", "x a.weight", "h"), node("Gemm", "h b.weight", "y")],
            {"a.weight": random(3, 3)}, {"x": ("N", 3)}, {"y": ("N", 3)},
        ), ["a.weight"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MERGED)
def test_what_an_exporter_merged_is_found(name: str) -> None:
    model, expected = MERGED[name]
    weights = [tensor.name for tensor in model.graph.initializer]
    assert merged_weights(model, weights) == expected
    untied = onnxfit.untie(model)
    assert merged_weights(untied, [tensor.name for tensor in untied.graph.initializer]) == []


def test_summary_and_inspect_count_the_nodes() -> None:
    model = fresh_network()
    with pytest.warns(UserWarning, match="untie"):
        trainer = trainer_of(model)
    shared = [line for line in trainer.summary().splitlines() if ", used " in line]
    assert sorted(line.split()[0] for line in shared) == ["bias", "n1.weight"]
    assert any("bias" in line and "used 3×" in line for line in shared)
    assert any("weight" in line and "used 2×" in line for line in shared)
    report = onnxfit.inspect(model)
    assert report.shared == (("b.bias", 3), ("n1.weight", 2)) == trainer.inspect().shared
    assert str(report).endswith("b.bias is used by 3 nodes.\nn1.weight is used by 2 nodes.")
    assert "used by" not in str(onnxfit.inspect(onnxfit.untie(model)))


def test_inspect_names_five_shared_weights_and_counts_the_others() -> None:
    tensors = {f"b{i}": zeros(3) for i in range(7)}
    layers = []
    for i in range(14):
        layers.append((f"l{i}", f"w{i}", f"b{i % 7}"))
        tensors[f"w{i}"] = random(3, 3, seed=i)
    text = str(onnxfit.inspect(dense(*layers, **tensors)))
    assert text.count("is used by 2 nodes") == 5
    assert text.endswith("2 more weights are used by several nodes.")


def test_the_report_is_data() -> None:
    from dataclasses import asdict

    assert json.loads(json.dumps(asdict(onnxfit.inspect(fresh_network()))))["shared"][0] == [
        "b.bias",
        3,
    ]


def test_a_node_that_reads_the_shape_alone_is_no_use() -> None:
    # torch's exporter computes the bias of a Conv from the shape of the weight if optimize=False
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[N, 2] x) => (float[N, 3] y, int64[2] sizes, int64 size)
        <float[2, 3] w = {1, 2, 3, 4, 5, 6}>
        { y = MatMul(x, w)  sizes = Shape(w)  size = Size(w) }""")
    assert "used by" not in str(onnxfit.inspect(model))
    assert ", used " not in Trainer(model, loss={"y": "mse"}).summary()


def embedding_and_head(head: np.ndarray) -> onnx.ModelProto:
    return model_of(
        [node("Gather", "table i", "h"), node("MatMul", "h head", "y")],
        {"table": random(5, 3), "head": head},
        {"i": ("N",)},
        {"y": ("N", head.shape[1])},
        integers=["i"],
    )


def test_a_transposed_copy_of_a_table_warns() -> None:
    model = embedding_and_head(random(5, 3).T.copy())
    with pytest.warns(UserWarning, match=r"onnxfit\.tie\(model, \{'head': 'table'\}\)") as caught:
        Trainer(model, loss="cross_entropy")
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Trainer(onnxfit.tie(model, {"head": "table"}), loss="cross_entropy")
        Trainer(model, ["head"], loss="cross_entropy")  # the table is not trained


@pytest.mark.parametrize(
    "head",
    [random(3, 5, seed=1), np.append(random(5, 3).T, random(3, 1), axis=1)],
    ids=["other values", "another size"],
)
def test_a_head_that_is_no_copy_does_not_warn(head: np.ndarray) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Trainer(embedding_and_head(head), loss="cross_entropy")


def test_constant_matrices_are_no_copies() -> None:
    model = embedding_and_head(zeros(3, 5))
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(zeros(5, 3), "table"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Trainer(model, ["table", "head"], loss="cross_entropy")
