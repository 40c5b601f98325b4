"""Targets select weights by the names that a user knows."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from onnxfit import LoRA, ModelError, SettingError, UnknownNameError
from onnxfit.graph.records import FOLDED_FROM
from onnxfit.graph.sharing import MODULES
from onnxfit.trainable.adapters.targets import match_adapters
from tests import models
from tests.trainable.adapters.files import file_of, packed_file


def exported_block() -> onnx.ModelProto:
    """Layers as torch's exporters name them: folded, by name scopes, by node, and by parameter."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[N, 4] x) => (float[N, 4] y, float[N, 4] z) {
        q = MatMul(x, val_1) k = MatMul(q, val_2) v = MatMul(k, onnx__MatMul_7)
        o = Gemm(v, w) r = Add(o, x) z = MatMul(r, w) y = Relu(r) }"""
    )
    for index, name in ((3, "block.out_proj.weight"), (5, "head.weight")):
        model.graph.node[index].input[1] = name
    tensors = ("val_1", "val_2", "onnx__MatMul_7", "block.out_proj.weight", "head.weight")
    for name in tensors:
        array = np.eye(4, dtype=np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    folded = model.graph.initializer[0].metadata_props.add()
    folded.key, folded.value = FOLDED_FROM, "['block.q_proj.weight']"
    scopes = model.graph.node[1].metadata_props.add()
    scopes.key, scopes.value = MODULES, "['', 'block', 'block.k_proj', 'linear_1']"
    model.graph.node[2].name = "/block/v_proj/MatMul"
    return model


def matched(target: Any, model: onnx.ModelProto | None = None, rank: int = 1) -> list[str]:
    adapters = match_adapters(model or exported_block(), [LoRA(rank=rank, target=target)])
    return [adapter.weight.name for adapter in adapters]


def test_modules_have_the_names_of_before_the_export() -> None:
    adapters = match_adapters(exported_block(), [LoRA(rank=1, target="*")])
    assert [adapter.weight.module for adapter in adapters] == [
        "block.q_proj",
        "block.k_proj",
        "block.v_proj",
        "block.out_proj",
        "head",
    ]


def test_packed_integers_have_the_module_of_the_floats() -> None:
    model = packed_file()
    noted = model.graph.value_info.add(name="val_3").metadata_props.add()
    noted.key, noted.value = FOLDED_FROM, "['block.up.weight']"
    model.graph.initializer[0].name = model.graph.node[0].input[1] = "val_3_Q4"
    adapters = match_adapters(model, [LoRA(rank=1, target="*")])
    assert [adapter.weight.module for adapter in adapters] == ["block.up", "fc2", "head"]


@pytest.mark.parametrize("end", ["_Q4", "_Q8G32", "_Bnb4", "_quantized"])
def test_packed_numbers_of_a_numbered_tensor_have_the_module_of_their_node(end: str) -> None:
    model = packed_file()
    for node, name, path in zip(
        (model.graph.node[0], model.graph.node[2]),
        ("onnx::MatMul_745", "onnx::MatMul_746"),
        ("/model/layers.0/self_attn/q_proj/MatMul", "/net/net.0/seq/seq.2/seq.2.0/MatMul"),
    ):
        tensor = next(t for t in model.graph.initializer if t.name == node.input[1])
        tensor.name = node.input[1] = name + end
        node.name = path + end
    adapters = match_adapters(model, [LoRA(rank=1, target=["q_proj", "net.*"])])
    assert [adapter.weight.module for adapter in adapters] == [
        "model.layers.0.self_attn.q_proj",
        "net.0.seq.2.0",  # a Sequential repeats its own name
    ]


@pytest.mark.parametrize(
    ("target", "names"),
    [
        ("val_1", ["val_1"]),
        ("block.q_proj.weight", ["val_1"]),
        ("q_proj", ["val_1"]),
        (["q_proj", "v_proj"], ["val_1", "onnx__MatMul_7"]),
        ("/block/v_proj/MatMul", ["onnx__MatMul_7"]),
        ("block.*", ["val_1", "val_2", "onnx__MatMul_7", "block.out_proj.weight"]),
        (["*proj", "!*q_proj*", "!k_proj"], ["onnx__MatMul_7", "block.out_proj.weight"]),
        (["!block.*"], []),
        (["!q_proj"], ["val_2", "onnx__MatMul_7", "block.out_proj.weight"]),
        (None, ["val_1", "val_2", "onnx__MatMul_7", "block.out_proj.weight"]),
    ],
    ids=str,
)
def test_a_target_selects_by_any_name(target: Any, names: list[str]) -> None:
    if names:
        assert matched(target) == names
    else:
        with pytest.raises(SettingError, match="excludes every weight"):
            matched(target)


def test_all_linear_layers_but_the_last_have_adapters_and_one_alone_has_one() -> None:
    assert matched(None, models.mlp((4, 8, 8, 3))) == ["fc0.weight", "fc1.weight"]
    assert matched(None, file_of("gemm")) == ["w"]
    assert matched(None, models.two_outputs()) == ["u", "v", "t"]
    assert matched("*", models.convolutional()) == ["conv.weight", "fc.weight"]
    assert matched(None, models.convolutional()) == [
        "fc.weight"
    ]  # the last layer, and the only one


def test_fixed_filters_have_adapters_only_by_name() -> None:
    angles = 2 * np.pi * np.outer(np.arange(32), np.arange(17)) / 32
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[N, 32] x) => (float[N, 2] y) {
        s = MatMul(x, cosines)  a = Abs(s)  h = MatMul(a, u)  r = Relu(h)  y = MatMul(r, v) }"""
    )
    rng = np.random.default_rng(0)
    arrays = {
        "cosines": np.cos(angles),
        "u": rng.normal(size=(17, 4)),
        "v": rng.normal(size=(4, 2)),
    }
    for name, array in arrays.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype("f4"), name))
    assert matched(None, model) == ["u"]
    assert matched(["cosines"], model) == ["cosines"]


def test_a_pattern_without_a_match_names_the_nearest_weights() -> None:
    with pytest.raises(UnknownNameError, match=r"'block\.q_porj'. Did you mean 'block\.q_proj'"):
        matched("block.q_porj")
    with pytest.raises(UnknownNameError, match=r"'fc0\.bias'"):
        matched("fc0.bias", models.mlp())


def test_a_weight_has_one_adapter() -> None:
    loras = [LoRA(rank=1, target="*_proj"), LoRA(rank=2, target="q*")]
    with pytest.raises(SettingError, match=r"'val_1'.*rank=1.*and.*rank=2"):
        match_adapters(exported_block(), loras)


def test_a_rank_above_the_smaller_side_is_refused() -> None:
    assert matched("fc1.weight", models.mlp((4, 8, 3)), rank=3)
    with pytest.raises(
        SettingError,
        match=r"rank must be at most 3, the smaller side of weight 'fc1\.weight', got 4",
    ):
        matched("fc1.weight", models.mlp((4, 8, 3)), rank=4)


@pytest.mark.parametrize(
    "nodes",
    [
        "y = MatMul(w, x)",
        "s = Add(w, w) y = MatMul(x, s)",
        "r = Relu(w) h = MatMul(x, w) y = MatMul(h, r)",
        "y = Gemm<transA = 1>(x, w)",
        "y = Gather<axis = 1>(w, i)",
        "y = Identity(w) h = MatMul(x, y)",
    ],
)
def test_a_weight_that_an_adapter_cannot_follow_has_none(nodes: str) -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[4, 4] x, int64[4] i) => (float[A, B] y) {{ {nodes} }}"""
    )
    weight = onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32), "w")
    model.graph.initializer.append(weight)
    with pytest.raises(ModelError, match="no weight that can have an adapter"):
        matched("*", model)


def test_a_grouped_convolution_has_no_adapter() -> None:
    model = file_of("conv")
    model.graph.node[0].attribute.append(onnx.helper.make_attribute("group", 2))
    with pytest.raises(ModelError, match=r"Conv \(with group=1\)"):
        matched("*", model)
