"""Tools that change files with weights in Constant nodes."""

from __future__ import annotations

import onnx

import onnxfit
from onnxfit.graph.subgraphs import nodes_of
from onnxfit.load.reading import load_model
from tests import models
from tests.constants import constants_of, trained, with_constants


def test_a_new_head() -> None:
    model = with_constants(models.mlp())
    changed = onnxfit.replace_head(model, 7)
    kinds = [node.op_type for node in changed.graph.node]
    assert kinds == [node.op_type for node in model.graph.node]
    assert constants_of(changed)["fc1.weight"].shape == (8, 7)
    assert set(onnxfit.Trainer(changed, loss="mse").get_weights()) == set(constants_of(model))


def test_ties() -> None:
    model = with_constants(models.mlp((4, 4, 4)))
    tied = onnxfit.tie(model, {"fc0.weight": "fc1.weight"})
    onnx.checker.check_model(tied)
    assert set(constants_of(tied)) == {"fc0.bias", "fc1.weight", "fc1.bias"}
    trainer = trained(tied)
    assert set(trainer.get_weights()) == {"fc0.bias", "fc1.weight", "fc1.bias"}
    untied = onnxfit.untie(tied, "fc1.weight")
    onnx.checker.check_model(untied)
    assert len(onnxfit.Trainer(untied, loss="mse").get_weights()) == 4


def test_transposed_ties() -> None:
    model = with_constants(models.mlp((4, 8, 4)))
    tied = onnxfit.tie(model, {"fc0.weight": "fc1.weight"})
    onnx.checker.check_model(tied)
    assert trained(tied).get_weights()["fc1.weight"].shape == (8, 4)


def test_biases() -> None:
    model = with_constants(models.linear(3, 2, 0.5))
    changed = onnxfit.add_biases(model)
    onnx.checker.check_model(changed)
    assert [node.op_type for node in changed.graph.node] == ["Constant", "MatMul", "Add"]
    assert len(onnxfit.Trainer(changed, loss="mse").get_weights()) == 2


def test_other_tools() -> None:
    model = with_constants(models.mlp())
    before = load_model(model)
    assert "fc0.weight" in onnxfit.draw(model)
    graph = onnxfit.add_loss(model, "mse")
    assert {value.name for value in graph.graph.output} == {"y", "train/loss"}
    assert load_model(model) == before
    assert all(not n.output[0].startswith("onnxfit") for n in nodes_of(graph.graph))
