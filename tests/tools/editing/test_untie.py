"""`untie`: each layer its own weights, and the same outputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.helper as oh
import pytest

import onnxfit
from onnxfit.errors import ModelError, UnknownNameError
from tests.tools.editing.graphs import (
    array_of,
    fresh_network,
    model_of,
    names_of,
    node,
    noted,
    ones,
    random,
    run,
    zeros,
)


def same_outputs(before: onnx.ModelProto, after: onnx.ModelProto, **feeds: np.ndarray) -> bool:
    onnx.checker.check_model(after, full_check=True)
    return all(map(np.array_equal, run(before, **feeds), run(after, **feeds)))


def test_a_fresh_network_gets_its_own_weights() -> None:
    model = fresh_network()
    before = model.SerializeToString()
    untied = onnxfit.untie(model)
    assert model.SerializeToString() == before
    assert names_of(untied) - names_of(model) == {"n1.bias", "n2.weight", "n2.bias"}
    assert names_of(model) <= names_of(untied)
    assert "Identity" not in {n.op_type for n in untied.graph.node}
    assert same_outputs(model, untied, x=random(5, 6))


def test_a_second_time_changes_nothing() -> None:
    untied = onnxfit.untie(fresh_network())
    assert onnxfit.untie(untied).SerializeToString() == untied.SerializeToString()


def test_a_model_without_sharing_stays_byte_identical() -> None:
    model = model_of(
        [node("MatMul", "x w", "y")], {"w": random(2, 2)}, {"x": (3, 2)}, {"y": (3, 2)}
    )
    model.metadata_props.add(key="author", value="me")
    assert onnxfit.untie(model).SerializeToString() == model.SerializeToString()


def language_model() -> onnx.ModelProto:
    """An embedding whose table is the weight of the last layer, too."""
    nodes = [
        node("Gather", "table tokens", "e"),
        node("Transpose", "table", "t", perm=[1, 0]),
        node("MatMul", "e t", "y", name="head/MatMul"),
    ]
    return model_of(
        nodes, {"table": random(7, 4)}, {"tokens": ("N",)}, {"y": ("N", 7)}, integers=["tokens"]
    )


def test_the_table_of_an_embedding_stays_tied_unless_it_is_named() -> None:
    model = language_model()
    assert names_of(onnxfit.untie(model)) == {"table"}
    untied = onnxfit.untie(model, names="table")
    assert len(names_of(untied)) == 2
    assert same_outputs(model, untied, tokens=np.array([0, 6, 3]))


def test_tables_of_zeros_were_merged() -> None:
    nodes = [node("Gather", "zeros tokens", "a", name="/a/Gather"), node("Gather", "zeros tokens", "b", name="/b/Gather"), node("Sub", "a b", "y")]  # fmt: skip
    model = model_of(
        nodes, {"zeros": zeros(7, 4)}, {"tokens": ("N",)}, {"y": ("N", 4)}, integers=["tokens"]
    )
    assert names_of(onnxfit.untie(model)) == {"zeros", "b.weight"}


def called_twice(scale: np.ndarray) -> onnx.ModelProto:
    """A block of LayerNorm and Linear, called twice; then another Linear with the same bias."""
    nodes = [
        node("LayerNormalization", "x scale zeros", "n1"),
        node("Gemm", "n1 w zeros", "g1"),
        node("LayerNormalization", "g1 scale zeros", "n2"),
        node("Gemm", "n2 w zeros", "g2"),
        node("Gemm", "g2 v zeros", "y", name="last/Gemm"),
    ]
    tensors = {"scale": scale, "zeros": zeros(4), "w": random(4, 4), "v": random(4, 4, seed=1)}
    return model_of(nodes, tensors, {"x": ("N", 4)}, {"y": ("N", 4)})


@pytest.mark.parametrize("scale", [ones(4), random(4)], ids=["ones", "trained"])
def test_a_layer_that_is_called_twice_keeps_its_weights(scale: np.ndarray) -> None:
    model = called_twice(scale)
    untied = onnxfit.untie(model)
    assert same_outputs(model, untied, x=random(5, 4))
    first, second, third, fourth, last = untied.graph.node
    assert first.input[1:] == third.input[1:]
    assert second.input[1:] == fourth.input[1:]
    assert len({first.input[2], second.input[2], last.input[2]}) == 3
    assert onnxfit.untie(untied).SerializeToString() == untied.SerializeToString()


def scopes(*modules: str, leaf: str = "torch.nn.modules.normalization.LayerNorm") -> dict[str, str]:
    return {"modules": str(["", *modules, "layer_norm"]), "classes": str(["m.Net", *["m.B"] * (len(modules) - 1), leaf, "aten"])}  # fmt: skip


def test_the_notes_of_the_exporter_decide() -> None:
    nodes = [
        noted(node("LayerNormalization", "x ones zeros", "a"), **scopes("encoder", "encoder.norm")),
        node("Gemm", "a w", "b"),
        noted(node("LayerNormalization", "b ones zeros", "c"), **scopes("encoder", "encoder.norm")),
        noted(node("LayerNormalization", "c ones zeros", "y"), **scopes("norm")),
    ]
    tensors = {"ones": ones(4), "zeros": zeros(4), "w": random(4, 4)}
    model = model_of(nodes, tensors, {"x": ("N", 4)}, {"y": ("N", 4)})
    untied = onnxfit.untie(model)
    assert names_of(untied) == {"ones", "zeros", "w", "norm.weight", "norm.bias"}
    assert untied.graph.node[0].input[1:] == untied.graph.node[2].input[1:] == ["ones", "zeros"]
    assert same_outputs(model, untied, x=random(5, 4))


def test_statistics_and_weights_of_a_norm_part() -> None:
    nodes = [node("BatchNormalization", "x ones zeros zeros ones", "a", name="bn1/BN"), node("BatchNormalization", "a ones zeros zeros ones", "y", name="bn2/BN")]  # fmt: skip
    model = model_of(nodes, {"ones": ones(2), "zeros": zeros(2)}, {"x": ("N", 2)}, {"y": ("N", 2)})
    untied = onnxfit.untie(model)
    assert len({name for n in untied.graph.node for name in n.input[1:]}) == 8
    assert {"bn2.running_mean", "bn2.running_var", "bn2.weight", "bn2.bias"} <= names_of(untied)
    assert same_outputs(model, untied, x=random(5, 2))


def test_bodies_read_their_own_copies() -> None:
    def branch(weight: str, name: str) -> onnx.GraphProto:
        out = oh.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
        return oh.make_graph(
            [node("Gemm", f"x {weight} bias", name, name=f"{name}/Gemm")], "body", [], [out]
        )

    nodes = [
        oh.make_node(
            "If", ["flag"], ["y"], then_branch=branch("u", "a"), else_branch=branch("v", "b")
        )
    ]
    tensors = {"u": random(2, 2), "v": random(2, 2, seed=1), "bias": zeros(2)}
    model = model_of(nodes, tensors, {"x": ("N", 2), "flag": ()}, {"y": ("N", 2)})
    model.graph.input[1].type.tensor_type.elem_type = onnx.TensorProto.BOOL
    untied = onnxfit.untie(model)
    assert names_of(untied) - names_of(model) in ({"a.bias"}, {"b.bias"})
    for flag in (True, False):
        assert same_outputs(model, untied, x=random(5, 2), flag=np.array(flag))


def test_a_call_of_a_function_is_one_use() -> None:
    body = [node("MatMul", "x w", "p"), node("Add", "p b", "y")]
    dense = oh.make_function(
        "mine", "Dense", ["x", "w", "b"], ["y"], body, [oh.make_opsetid("", 17)]
    )
    nodes = [oh.make_node("Dense", ["x", "u", "bias"], ["h"], domain="mine"), oh.make_node("Dense", ["h", "v", "bias"], ["y"], domain="mine")]  # fmt: skip
    tensors = {"u": random(2, 2), "v": random(2, 2, seed=1), "bias": zeros(2)}
    model = model_of(nodes[:0], tensors, {"x": ("N", 2)}, {})
    model.graph.node.extend(nodes)
    model.graph.output.append(oh.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ("N", 2)))
    model.opset_import.append(oh.make_opsetid("mine", 1))
    model.functions.append(dense)
    untied = onnxfit.untie(model)
    assert len({call.input[2] for call in untied.graph.node}) == 2
    assert all(map(np.array_equal, run(model, x=random(5, 2)), run(untied, x=random(5, 2))))


def test_names_select_and_exclude() -> None:
    model = called_twice(ones(4))
    assert len(names_of(onnxfit.untie(model, "w"))) == 5
    assert names_of(onnxfit.untie(model, "!zer*")) == names_of(model)
    assert len(names_of(onnxfit.untie(model, ["*", "!zeros"]))) == 6
    with pytest.raises(UnknownNameError, match="Did you mean 'scale'"):
        onnxfit.untie(model, ["sclae"])
    with pytest.raises(ModelError, match="There is no file"):
        onnxfit.untie("missing.onnx")


def test_external_data_is_read_and_old_files_stay_valid(tmp_path: Path) -> None:
    model = fresh_network()
    onnx.save(
        model, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0, location="w.bin"
    )
    untied = onnxfit.untie(tmp_path / "m.onnx")
    assert np.array_equal(array_of(untied, "head.weight"), array_of(fresh_network(), "head.weight"))
    old = model_of([node("Add", "x b", "h", name="a/Add"), node("Gemm", "h w b", "g"), node("Gemm", "g v b", "y")], {"b": zeros(2), "w": random(2, 2), "v": random(2, 2, seed=1)}, {"x": ("N", 2)}, {"y": ("N", 2)}, opset=8)  # fmt: skip
    old.ir_version = 3  # initializers are inputs
    for tensor in old.graph.initializer:
        old.graph.input.append(
            oh.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        )
    untied = onnxfit.untie(old)
    assert len(names_of(untied)) > 3
    onnx.checker.check_model(untied)
