"""`add_biases`: zero biases where an exporter dropped them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.helper as oh
import pytest

import onnxfit
from onnxfit import Trainer
from tests.tools.editing.graphs import (
    array_of,
    model_of,
    names_of,
    node,
    noted,
    ones,
    random,
    run,
    zeros,
)


def sizes_of_new(model: onnx.ModelProto, **feeds: np.ndarray) -> dict[str, tuple[int, ...]]:
    """The tensors that `add_biases` adds; the outputs stay the same, and each of them trains."""
    biased = onnxfit.add_biases(model)
    onnx.checker.check_model(biased, full_check=True)
    assert all(map(np.array_equal, run(model, **feeds), run(biased, **feeds)))
    assert onnxfit.add_biases(biased).SerializeToString() == biased.SerializeToString()
    new = names_of(biased) - names_of(model)
    assert all(not array_of(biased, name).any() for name in new)
    assert new <= set(Trainer(biased, loss="mse").get_weights())
    # one element for each channel or feature: the outputs move by it
    shifted = onnx.ModelProto()
    shifted.CopyFrom(biased)
    for tensor in shifted.graph.initializer:
        if tensor.name in new:
            shift = np.arange(1, tensor.dims[0] + 1, dtype=np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(shift, tensor.name))
    assert new <= {""} or not np.allclose(run(biased, **feeds)[0], run(shifted, **feeds)[0])
    return {name: array_of(biased, name).shape for name in new}


def test_convolutions_get_one_element_for_each_channel() -> None:
    nodes = [
        node("Conv", "x c.weight", "c", group=2),
        node("ConvTranspose", "c t.weight", "y", group=2),
    ]
    tensors = {"c.weight": random(6, 2, 3, 3), "t.weight": random(6, 4, 2, 2)}
    model = model_of(nodes, tensors, {"x": ("N", 4, 6, 6)}, {"y": ("N", 8, 5, 5)})
    assert sizes_of_new(model, x=random(2, 4, 6, 6)) == {"c.bias": (6,), "t.bias": (8,)}


@pytest.mark.parametrize("transposed", [0, 1])
def test_a_gemm_gets_one_element_for_each_feature(transposed: int) -> None:
    weight = random(3, 5) if transposed else random(5, 3)
    nodes = [node("Gemm", "x kernel", "y", name="/dense/Gemm", transB=transposed, beta=0.5)]
    model = model_of(nodes, {"kernel": weight}, {"x": ("N", 5)}, {"y": ("N", 3)})
    assert sizes_of_new(model, x=random(2, 5)) == {"dense.bias": (3,)}
    assert not [a for a in onnxfit.add_biases(model).graph.node[0].attribute if a.name == "beta"]


def test_a_product_gets_an_add_and_keeps_its_name() -> None:
    nodes = [node("Transpose", "w", "t"), node("MatMul", "x t", "y")]
    model = model_of(nodes, {"w": random(3, 5)}, {"x": ("N", 4, 5)}, {"y": ("N", 4, 3)})
    assert sizes_of_new(model, x=random(2, 4, 5)) == {"y.bias": (3,)}
    assert onnxfit.add_biases(model).graph.node[-1].output[0] == "y"


def test_layers_that_have_a_bias_or_need_none_stay() -> None:
    nodes = [
        node("MatMul", "x w", "p"),
        node("Add", "p b", "h"),
        node("Gemm", "h v", "g"),
        node("BatchNormalization", "g s z z s", "n"),
        node("MatMul", "n n", "y"),  # no weight
    ]
    tensors = {"w": random(3, 3), "b": random(1, 3), "v": random(3, 3), "s": ones(3), "z": zeros(3)}
    model = model_of(nodes, tensors, {"x": (3, 3)}, {"y": (3, 3)})
    assert sizes_of_new(model, x=random(3, 3)) == {}


def test_layers_with_one_weight_share_the_bias() -> None:
    nodes = [node("Gemm", "x fc.weight", "h"), node("Gemm", "h fc.weight", "y")]
    model = model_of(nodes, {"fc.weight": random(3, 3)}, {"x": ("N", 3)}, {"y": ("N", 3)})
    assert sizes_of_new(model, x=random(2, 3)) == {"fc.bias": (3,)}


def test_the_notes_of_the_exporter_decide() -> None:
    scope = "['', '{}', 'linear']"
    nodes = [
        noted(node("Gemm", "x a.weight", "h"), modules=scope.format("a"), rule="RemoveOptionalBiasFromGemm"),
        noted(node("Gemm", "h b.weight", "i"), modules=scope.format("b")),
        noted(node("MatMul", "i c.weight", "y"), modules=scope.format("c")),
    ]  # fmt: skip
    tensors = {f"{name}.weight": random(3, 3, seed=i) for i, name in enumerate("abc")}
    model = model_of(nodes, tensors, {"x": ("N", 3)}, {"y": ("N", 3)})
    assert sizes_of_new(model, x=random(2, 3)) == {"a.bias": (3,)}


def test_a_layer_in_a_body_reads_a_bias_of_the_main_graph() -> None:
    def branch(weight: str, out: str) -> onnx.GraphProto:
        info = oh.make_tensor_value_info(out, onnx.TensorProto.FLOAT, None)
        return oh.make_graph([node("MatMul", f"x {weight}", out)], "body", [], [info])

    nodes = [oh.make_node("If", ["flag"], ["y"], then_branch=branch("u", "a"), else_branch=branch("v", "b"))]  # fmt: skip
    tensors = {"u": random(2, 2), "v": random(2, 2, seed=1)}
    model = model_of(nodes, tensors, {"x": ("N", 2), "flag": ()}, {"y": ("N", 2)})
    model.graph.input[1].type.tensor_type.elem_type = onnx.TensorProto.BOOL
    feeds = {"x": random(3, 2), "flag": np.array(True)}
    assert sizes_of_new(model, **feeds) == {"a.bias": (2,), "b.bias": (2,)}


def test_half_precision_stays() -> None:
    model = model_of([node("Gemm", "x w", "y")], {"w": random(2, 2)}, {"x": (3, 2)}, {"y": (3, 2)})
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    half = onnx.numpy_helper.from_array(random(2, 2).astype(np.float16), "w")
    model.graph.initializer[0].CopyFrom(half)
    assert array_of(onnxfit.add_biases(model), "y.bias").dtype == np.float16


def test_a_bias_behind_a_cast_is_seen_as_keras_exports_it() -> None:
    nodes = [
        node("MatMul", "x w", "p"),
        node("Cast", "p", "c", to=onnx.TensorProto.FLOAT),
        node("Add", "c b", "y"),
    ]
    model = model_of(nodes, {"w": random(5, 3), "b": zeros(3)}, {"x": ("N", 5)}, {"y": ("N", 3)})
    assert sizes_of_new(model, x=random(2, 5)) == {}


def test_a_normalization_with_channels_last_has_the_bias_as_keras_exports_it() -> None:
    nodes = [
        node("Conv", "x k", "c"),
        node("Transpose", "c", "t", perm=[0, 2, 3, 1]),
        node("Cast", "t", "f", to=onnx.TensorProto.FLOAT),
        node("Mul", "f scale", "m"),
        node("Sub", "m shift", "y"),
    ]
    tensors = {"k": random(4, 2, 1, 1), "scale": random(1, 1, 1, 4), "shift": random(1, 1, 1, 4)}
    model = model_of(nodes, tensors, {"x": ("N", 2, 3, 3)}, {"y": ("N", 3, 3, 4)})
    assert sizes_of_new(model, x=random(2, 2, 3, 3)) == {}
    nodes[-1] = node("Sub", "shift m", "y")  # minus the layer, plus a constant
    model = model_of(nodes, tensors, {"x": ("N", 2, 3, 3)}, {"y": ("N", 3, 3, 4)})
    assert sizes_of_new(model, x=random(2, 2, 3, 3)) == {}


def test_a_layer_behind_a_cast_still_gets_its_bias() -> None:
    nodes = [
        node("MatMul", "x w", "p"),
        node("Cast", "p", "c", to=onnx.TensorProto.FLOAT),
        node("Mul", "c scale", "s"),
        node("Relu", "s", "r"),
        node("Add", "r b", "y"),
    ]
    tensors = {"w": random(5, 3), "scale": random(3), "b": zeros(3)}
    model = model_of(nodes, tensors, {"x": ("N", 5)}, {"y": ("N", 3)})
    assert sizes_of_new(model, x=random(2, 5)) == {"p.bias": (3,)}
