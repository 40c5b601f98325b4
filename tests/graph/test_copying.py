"""A copy of a model is equal to it and independent of it."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from onnxfit.graph.model import clone
from onnxfit.load.normalize import normalize
from tests.graph.graphs import parse
from tests.models import convolutional, mlp, two_inputs, two_outputs

BRANCHES = """<ir_version: 10, opset_import: ["": 21]>
    g (bool c, float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = If(c) <
        then_branch = t () => (float[2] a) { a = Mul(x, w) },
        else_branch = e () => (float[2] b) { b = Neg(x) }> }"""
OPTIONAL = """<ir_version: 10, opset_import: ["": 21]>
    g (float[N, 4] x, float top) => (float[N, 4] y, float[N, 4] x) { y = Clip(x, , top) }"""
MODELS = {
    "perceptron": mlp(),
    "convolutions": convolutional(dropout=0.5),
    "two inputs": two_inputs(),
    "two outputs": two_outputs(),
    "branches": parse(BRANCHES),
    "absent input, and an input that is an output": parse(OPTIONAL),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_copy_is_that_of_onnx_ir(name: str) -> None:
    model = normalize(MODELS[name])
    for node in model.graph:
        node.metadata_props["layer"] = f"layer of {node.name}"
        node.outputs[0].metadata_props["role"] = "output"
    model.graph.metadata_props["maker"] = "test"
    assert ir.to_proto(clone(model)) == ir.to_proto(model.clone())


@pytest.mark.parametrize("name", MODELS)
def test_a_changed_copy_leaves_the_model_as_it_was(name: str) -> None:
    model = normalize(MODELS[name])
    before = ir.to_proto(model)
    copy = clone(model)
    for node in copy.graph:
        node.name = f"{node.name}/copy"
        node.metadata_props["layer"] = "changed"
        for value in node.outputs:
            value.name = f"{value.name}/copy"
            value.shape = ir.Shape([7])
            value.metadata_props["role"] = "changed"
        for i in range(len(node.inputs)):
            node.replace_input_with(i, None)
        node.attributes.clear()
    copy.graph.outputs.clear()
    copy.graph.initializers.clear()
    copy.graph.opset_imports[""] = 20
    after = ir.to_proto(model)
    assert after == before
