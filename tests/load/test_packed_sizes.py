"""Packed weights of the wrong size are refused before onnxruntime reads beyond their end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.numpy_helper import from_array

from onnxfit import LoRA, ModelError, Quantization, Trainer, gradient_model
from onnxfit.graph.model import OnnxModel
from tests.cli.helpers import refused
from tests.trainable.quantized.packed_files import BLOCK, BLOCKS, K, N, packed_file


def with_tensor(model: onnx.ModelProto, name: str, array: Any) -> onnx.ModelProto:
    (tensor,) = (t for t in model.graph.initializer if t.name == name)
    tensor.CopyFrom(from_array(array, name))
    return model


def with_groups(groups: np.ndarray[Any, Any]) -> onnx.ModelProto:
    model = packed_file()
    model.graph.initializer.append(from_array(groups, "g"))
    model.graph.node[0].input[4] = "g"
    return model


def of_floats(weight: int = K * N // 2, scales: int = K * N // BLOCK) -> onnx.ModelProto:
    """y = x W^T with a MatMulBnb4."""
    model = packed_file()
    node = helper.make_node(
        "MatMulBnb4", ["x", "q", "s"], ["y"], "multiply", domain="com.microsoft", K=K, N=N,
        block_size=BLOCK, quant_type=1,
    )  # fmt: skip
    model.graph.node[0].CopyFrom(node)
    del model.graph.initializer[2:]
    with_tensor(model, "q", np.zeros(weight, np.uint8))
    return with_tensor(model, "s", np.ones(scales, np.float32))


def in_a_branch(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same file with its node in both branches of an If, which read the outer tensors."""
    (node,) = model.graph.node
    del model.graph.node[:]
    branches = {}
    for name in ("then_branch", "else_branch"):
        inner = onnx.NodeProto()
        inner.CopyFrom(node)
        inner.output[0] = name
        out = [helper.make_tensor_value_info(name, 1, None)]
        branches[name] = helper.make_graph([inner], name, [], out)
    model.graph.initializer.append(from_array(np.array(True), "condition"))
    model.graph.node.append(helper.make_node("If", ["condition"], ["y"], **branches))
    return model


def in_a_function(model: onnx.ModelProto) -> onnx.ModelProto:
    (node,) = model.graph.node
    names = [name for name in node.input if name]
    function = helper.make_function(
        "own", "Product", names, ["y"], [node], list(model.opset_import)
    )
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("own", 1))
    model.graph.node[0].CopyFrom(helper.make_node("Product", names, ["y"], domain="own"))
    return model


def from_a_constant(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same file with its packed weight in a Constant."""
    (tensor,) = (t for t in model.graph.initializer if t.name == "q")
    model.graph.node.insert(0, helper.make_node("Constant", [], ["q"], value=tensor))
    model.graph.initializer.remove(tensor)
    return model


def small_weight() -> onnx.ModelProto:
    return with_tensor(packed_file(), "q", np.zeros((1, 1, 8), np.uint8))


def of_unknown_size() -> onnx.ModelProto:
    """The packed weight are the nonzero numbers of a tensor: their count is known when it runs."""
    model = packed_file()
    flags = np.zeros(K, bool)
    model.graph.initializer.append(from_array(flags, "flags"))
    model.graph.node.insert(0, helper.make_node("Compress", ["q", "flags"], ["some"]))
    model.graph.node[1].input[1] = "some"
    return model


GROUPS = (np.arange(K) // BLOCK).astype(np.int32)
FITTING: dict[str, Callable[[], onnx.ModelProto]] = {
    **{f"zero points {z}": lambda z=z: packed_file(zeros=z) for z in ("absent", "packed", "float")},
    "flat": lambda: packed_file(zeros="packed", flat=True),
    "groups": lambda: with_groups(GROUPS),
    "padded groups": lambda: with_groups(np.arange(BLOCKS * BLOCK, dtype=np.int32) // BLOCK),
    "floats": of_floats,
    "branch": lambda: in_a_branch(packed_file()),
    "function": lambda: in_a_function(packed_file()),
    "constant": lambda: from_a_constant(packed_file()),
}
WRONG: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    "weight": (small_weight, "packed weights 'q' of MatMulNBits 'multiply' have 8 elements.*144"),
    "large weight": (
        lambda: with_tensor(packed_file(), "q", np.zeros(145, np.uint8)), "have 145 elements"),
    "scales": (
        lambda: with_tensor(packed_file(), "s", np.ones(2, np.float32)), "scales 's'.* 2 .* 18"),
    "packed zero points": (
        lambda: with_tensor(packed_file(zeros="packed"), "z", np.zeros(2, np.uint8)),
        "zero points 'z' .* 2 .* 12"),
    "float zero points": (
        lambda: with_tensor(packed_file(zeros="float"), "z", np.zeros(2, np.float32)),
        "zero points 'z' .* 2 .* 18"),
    "few groups": (lambda: with_groups(GROUPS[:4]), "index of groups 'g'.*40 whole"),
    "groups beyond the last": (lambda: with_groups(GROUPS + 1), "from 0 to 2"),
    "negative groups": (lambda: with_groups(GROUPS - 1), "from 0 to 2"),
    "bytes of floats": (lambda: of_floats(weight=2), "packed weights 'q' of MatMulBnb4.* 2 .*120"),
    "scales of floats": (lambda: of_floats(scales=2), "scales 's' of MatMulBnb4.* 2 .*15"),
    "branch": (lambda: in_a_branch(small_weight()), "'q' of MatMulNBits"),
    "function": (lambda: in_a_function(small_weight()), "'q'.* of MatMulNBits"),
    "constant": (lambda: from_a_constant(small_weight()), "'q' of MatMulNBits"),
    "computed": (of_unknown_size, "'some' of MatMulNBits.*unknown number"),
}  # fmt: skip
quiet = pytest.mark.filterwarnings("ignore:.*quantized")


@quiet
@pytest.mark.parametrize("name", FITTING)
def test_packed_weights_of_the_right_size_are_used(name: str) -> None:
    trainer = Trainer(FITTING[name]())
    assert trainer.predict(np.ones((2, K), np.float32)).shape == (2, N)


@quiet
@pytest.mark.parametrize("name", WRONG)
def test_packed_weights_of_the_wrong_size_are_refused(name: str) -> None:
    make, message = WRONG[name]
    with pytest.raises(ModelError, match=message) as caught:
        Trainer(make())
    assert str(caught.value).count("\n") <= 3


def opened_by_the_command_line(model: onnx.ModelProto, folder: Path) -> None:
    onnx.save(model, folder / "m.onnx")
    np.save(folder / "x.npy", np.ones((2, K), np.float32))
    raise ModelError(refused("predict", str(folder / "m.onnx"), "-d", str(folder / "x.npy")))


def opened_by_torch(model: onnx.ModelProto, _: Path) -> None:
    pytest.importorskip("torch")
    from onnxfit.torch import OnnxModule

    OnnxModule(model)


def opened_from_a_checkpoint(model: onnx.ModelProto, folder: Path) -> None:
    """A checkpoint contains its model, which is not read from a file of its own."""
    trainer = Trainer(packed_file(), ["b"], loss="mse")
    trainer._training.trainable = replace(trainer._training.trainable, file=OnnxModel(model))
    trainer.save(folder / "a.ckpt")
    Trainer.load(folder / "a.ckpt")


ENTRANCES: dict[str, Callable[[onnx.ModelProto, Path], object]] = {
    "quantization": lambda model, _: Trainer(model, loss="mse", quantization=Quantization()),
    "biases": lambda model, _: Trainer(model, ["b"], loss="mse"),
    "LoRA": lambda model, _: Trainer(model, loss="mse", adapters=LoRA(rank=2)),
    "gradient": lambda model, _: gradient_model(model, ["x"]),
    "command line": opened_by_the_command_line,
    "PyTorch": opened_by_torch,
    "checkpoint": opened_from_a_checkpoint,
}


@quiet
@pytest.mark.parametrize("name", ENTRANCES)
def test_every_entrance_refuses_them(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'q' of MatMulNBits 'multiply' have 8 elements"):
        ENTRANCES[name](small_weight(), tmp_path)
