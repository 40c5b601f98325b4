"""`replace_head`: a new last layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.helper as oh
import pytest

import onnxfit
from onnxfit import Trainer
from onnxfit.errors import ModelError, SettingError, UnknownNameError
from tests.graph.spellings import CONSTANTS, SOFTMAXES
from tests.models import convolutional, mlp
from tests.tools.editing.graphs import array_of, model_of, names_of, node, random, run, zeros


def size_of(model: onnx.ModelProto, output: int = 0) -> list[int | str]:
    dims = model.graph.output[output].type.tensor_type.shape.dim
    return [dim.dim_param or dim.dim_value for dim in dims]


def replaced(model: onnx.ModelProto, *, classes: int = 7, **settings) -> onnx.ModelProto:
    before = model.SerializeToString()
    changed = onnxfit.replace_head(model, classes=classes, **settings)
    assert model.SerializeToString() == before
    onnx.checker.check_model(changed, full_check=True)
    return changed


def test_a_network_of_gemms() -> None:
    model = mlp((4, 8, 3))
    changed = replaced(model)
    assert names_of(changed) == names_of(model)
    assert array_of(changed, "fc1.weight").shape == (8, 7)
    assert array_of(changed, "fc1.bias").shape == (7,)
    assert size_of(changed) == ["N", 7]
    for name in ("fc0.weight", "fc0.bias"):
        assert np.array_equal(array_of(changed, name), array_of(model, name))
    bound = 1 / np.sqrt(8)  # as torch.nn.Linear begins
    values = np.concatenate(
        [array_of(changed, "fc1.weight").ravel(), array_of(changed, "fc1.bias")]
    )
    assert bound / 2 < np.abs(values).max() <= bound
    history = Trainer(changed, loss="cross_entropy", optimizer=0.1).fit(
        random(20, 4), np.arange(20) % 7, verbose=0
    )
    assert np.isfinite(history.history["loss"]).all()


def test_the_seed_decides() -> None:
    model = mlp((4, 8, 3))
    same, again, other = replaced(model), replaced(model), replaced(model, seed=1)
    assert same.SerializeToString() == again.SerializeToString() != other.SerializeToString()


def test_a_cast_before_the_bias_as_keras_exports_it() -> None:
    model = model_of(
        [
            node("MatMul", "x w", "p"),
            node("Cast", "p", "c", to=onnx.TensorProto.FLOAT),
            node("Add", "c b", "s"),
            node("Cast", "s", "d", to=onnx.TensorProto.FLOAT),
            node("Softmax", "d", "y"),
        ],
        {"w": random(4, 3), "b": random(3)},
        {"x": ["N", 4]},
        {"y": ["N", 3]},
    )
    model.graph.value_info.extend(
        oh.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", 3]) for name in "pcsd"
    )
    changed = replaced(model)
    assert array_of(changed, "w").shape == (4, 7)
    assert array_of(changed, "b").shape == (7,)
    assert size_of(changed) == ["N", 7]
    (y,) = run(changed, x=random(5, 4))
    assert y.shape == (5, 7)


def test_a_cast_that_something_else_reads_is_no_part_of_the_head() -> None:
    model = model_of(
        [
            node("MatMul", "x w", "p"),
            node("Cast", "p", "c", to=onnx.TensorProto.FLOAT),
            node("Add", "c b", "s"),
            node("Softmax", "s", "y"),
        ],
        {"w": random(4, 3), "b": random(3)},
        {"x": ["N", 4]},
        {"y": ["N", 3], "c": ["N", 3]},
    )
    with pytest.raises(ModelError, match="computed by Add"):
        onnxfit.replace_head(model, 7, output="y")


@pytest.mark.parametrize("ending", ["Softmax", "Sigmoid", "Identity", "LogSoftmax"])
def test_what_follows_is_kept(ending: str) -> None:
    nodes = [node("MatMul", "x w", "p"), node("Add", "b p", "s"), node("Flatten", "s", "f"), node(ending, "f", "y")]  # fmt: skip
    model = model_of(nodes, {"w": random(4, 3), "b": random(3)}, {"x": ("N", 4)}, {"y": ("N", 3)})
    changed = replaced(model)
    assert [n.op_type for n in changed.graph.node] == ["MatMul", "Add", "Flatten", ending]
    assert array_of(changed, "b").shape == (7,)
    assert run(changed, x=random(2, 4))[0].shape == (2, 7)


def squeezenet() -> onnx.ModelProto:
    nodes = [
        node("Conv", "x classifier.weight classifier.bias", "c"),
        node("Relu", "c", "r"),
        node("GlobalAveragePool", "r", "p"),
        node("Flatten", "p", "y"),
    ]
    tensors = {"classifier.weight": random(10, 4, 1, 1), "classifier.bias": random(10)}
    return model_of(nodes, tensors, {"x": ("N", 4, 6, 6)}, {"y": ("N", 10)})


def test_the_convolution_at_the_end_of_a_squeezenet() -> None:
    changed = replaced(squeezenet())
    assert array_of(changed, "classifier.weight").shape == (7, 4, 1, 1)
    assert run(changed, x=random(2, 4, 6, 6))[0].shape == (2, 7)
    assert size_of(changed) == ["N", 7]


@pytest.mark.parametrize("transposed", [False, True])
def test_the_layout_of_the_weight_is_kept(transposed: bool) -> None:
    nodes = [node("Gemm", "x w", "y", transB=int(transposed))]
    weight = random(3, 4) if transposed else random(4, 3)
    changed = replaced(model_of(nodes, {"w": weight}, {"x": ("N", 4)}, {"y": ("N", 3)}))
    assert array_of(changed, "w").shape == ((7, 4) if transposed else (4, 7))
    assert names_of(changed) == {"w"}, "the old head has no bias"


def test_an_embedding_that_the_head_was_tied_to_stays() -> None:
    nodes = [node("Gather", "table tokens", "e"), node("Transpose", "table", "t"), node("MatMul", "e t", "y", name="/head/MatMul")]  # fmt: skip
    model = model_of(nodes, {"table": random(9, 4)}, {"tokens": ("N",)}, {"y": ("N", 9)}, integers=["tokens"])  # fmt: skip
    changed = replaced(model)
    assert np.array_equal(array_of(changed, "table"), array_of(model, "table"))
    assert array_of(changed, "head.weight").shape == (4, 7)
    assert "Transpose" not in {n.op_type for n in changed.graph.node}


def test_a_reshape_gets_the_new_number() -> None:
    nodes = [node("Gemm", "x w", "g"), node("Reshape", "g shape", "y")]
    tensors = {"w": random(4, 6), "shape": np.array([-1, 1, 6])}
    changed = replaced(model_of(nodes, tensors, {"x": ("N", 4)}, {"y": ("N", 1, 6)}))
    assert run(changed, x=random(2, 4))[0].shape == (2, 1, 7)
    assert size_of(changed) == ["N", 1, 7]


def test_every_output_after_the_head_is_declared_anew() -> None:
    nodes = [
        node("Gemm", "x w b", "logits"),
        node("Softmax", "logits", "p"),
        node("Relu", "x", "r"),
    ]
    outputs = {"logits": ("N", 3), "p": ("N", 3), "r": ("N", 3)}
    model = model_of(nodes, {"w": random(3, 3), "b": zeros(3)}, {"x": ("N", 3)}, outputs)
    with pytest.raises(SettingError, match=r"3 outputs\. Pass the output with the head"):
        onnxfit.replace_head(model, 7)
    with pytest.raises(UnknownNameError, match="No output is called 'q'"):
        onnxfit.replace_head(model, 7, output="q")
    changed = replaced(model, output="p")
    assert [size_of(changed, i) for i in range(3)] == [["N", 7], ["N", 7], ["N", 3]]


def test_a_convolutional_network_and_a_file(tmp_path: Path) -> None:
    onnx.save(convolutional(), tmp_path / "m.onnx")
    changed = onnxfit.replace_head(tmp_path / "m.onnx", 2)
    assert run(changed, x=random(2, 1, 8, 8))[0].shape == (2, 2)


def no_head(*nodes: onnx.NodeProto, **tensors: np.ndarray) -> onnx.ModelProto:
    return model_of(nodes, tensors, {"x": (2, 2)}, {"y": (2, 2)})


REFUSED = {
    "is computed by LayerNormalization 'norm'": no_head(node("LayerNormalization", "x s b", "y", "norm"), s=zeros(2), b=zeros(2)),
    "no Gemm, MatMul or Conv computes it": no_head(node("Relu", "x", "y")),
    "LayerNormalization 'norm' reads its result": model_of([node("Gemm", "x w", "h"), node("LayerNormalization", "h s b", "z", "norm"), node("Relu", "h", "y")], {"w": random(2, 2), "s": zeros(2), "b": zeros(2)}, {"x": (2, 2)}, {"y": (2, 2), "z": (2, 2)}),
    "because a later node needs": model_of([node("Gemm", "x w", "h"), node("Squeeze", "h one", "y")], {"w": random(2, 1), "one": np.array([1])}, {"x": (2, 2)}, {"y": (2,)}),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_has_no_head_is_refused(message: str) -> None:
    with pytest.raises(ModelError, match=message):
        onnxfit.replace_head(REFUSED[message], 7, output="y")


@pytest.mark.parametrize("settings", [{"classes": 0}, {"classes": 2.5}, {"classes": True}, {"classes": 3, "seed": -1}])  # fmt: skip
def test_impossible_numbers_are_refused(settings: dict) -> None:
    with pytest.raises(SettingError, match=r"a whole number,.*, got"):
        onnxfit.replace_head(mlp(), **settings)


def test_a_head_in_a_function_is_refused() -> None:
    dense = oh.make_function("mine", "Dense", ["x", "w"], ["y"], [node("MatMul", "x w", "y")], [oh.make_opsetid("", 17)])  # fmt: skip
    model = mlp()
    model.opset_import.append(oh.make_opsetid("mine", 1))
    model.functions.append(dense)
    model.graph.node.append(oh.make_node("Dense", ["y", "w"], ["z"], domain="mine"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(random(3, 3), "w"))
    model.graph.output[0].name = "z"
    with pytest.raises(ModelError, match="computed by Dense"):
        onnxfit.replace_head(model, 7)


KEEPING = {
    "Gemm": [node("Gemm", "x w b", "y")],
    "Gemm, one bias for all": [node("Gemm", "x w one", "y")],
    "Gemm, transposed": [node("Gemm", "x t b", "y", transB=1)],
    "MatMul and Add": [node("MatMul", "x w", "p"), node("Add", "row p", "y")],
    "MatMul without a bias": [node("MatMul", "x w", "y")],
}  # fmt: skip


def keeping(name: str) -> onnx.ModelProto:
    weight = random(4, 3)
    tensors = {"w": weight, "t": weight.T.copy(), "b": random(3), "row": random(1, 3), "one": random(1)}  # fmt: skip
    used = {value for n in KEEPING[name] for value in n.input}
    tensors = {key: array for key, array in tensors.items() if key in used}
    return model_of(KEEPING[name], tensors, {"x": ("N", 4)}, {"y": ("N", 3)})


@pytest.mark.parametrize("name", KEEPING)
def test_old_classes_are_kept(name: str) -> None:
    model, x = keeping(name), random(5, 4)
    old = run(model, x=x)[0]
    assert np.allclose(run(replaced(model, classes=5, keep=True), x=x)[0][:, :3], old, atol=1e-6)
    assert np.allclose(run(replaced(model, classes=3, keep=True), x=x)[0], old, atol=1e-6)
    chosen = run(replaced(model, classes=4, keep=[2, 0, 2]), x=x)[0]
    assert np.allclose(chosen[:, :3], old[:, [2, 0, 2]], atol=1e-6)
    fresh = run(replaced(model, classes=4, keep=[]), x=x)[0]
    assert np.array_equal(fresh, run(replaced(model, classes=4), x=x)[0])
    assert not np.allclose(fresh[:, :3], old, atol=1e-2)


def test_old_classes_of_a_tied_weight_are_copied() -> None:
    nodes = [node("Gather", "table tokens", "e"), node("Transpose", "table", "t"), node("MatMul", "e t", "y", name="/head/MatMul")]  # fmt: skip
    model = model_of(nodes, {"table": random(9, 4)}, {"tokens": ("N",)}, {"y": ("N", 9)}, integers=["tokens"])  # fmt: skip
    changed = replaced(model, classes=11, keep=True)
    assert np.array_equal(array_of(changed, "head.weight")[:, :9], array_of(model, "table").T)


def test_old_classes_of_a_convolution_are_kept() -> None:
    model = squeezenet()
    x = random(2, 4, 6, 6)
    kept = run(replaced(model, classes=12, keep=[9, 1]), x=x)[0]
    assert np.allclose(kept[:, :2], run(model, x=x)[0][:, [9, 1]], atol=1e-6)


# The two classes of the last spelling have a slice each.
@pytest.mark.parametrize("name", [name for name in SOFTMAXES if name != "two classes"])
def test_a_spelled_softmax_is_kept(name: str) -> None:
    """The kept classes share what the new class leaves of the probability."""
    text = f"""<ir_version: 10, opset_import: ["": 17]>
        g (float[N, 4] x) => (float[N, 2] y)
        <float[4, 2] weight = {{{", ".join(map(str, random(8).tolist()))}}}, {CONSTANTS}>
        {{ z = MatMul(x, weight) {SOFTMAXES[name]} }}"""
    model, x = onnx.parser.parse_model(text), random(5, 4)
    changed = onnxfit.replace_head(model, 3, keep=True)
    new, old = run(changed, x=x)[0], run(model, x=x)[0]
    assert new.shape == (5, 3)
    assert np.allclose(new.sum(axis=1), 1, atol=1e-6)
    assert np.allclose(new[:, :2], old * (1 - new[:, 2:]), atol=1e-6)


@pytest.mark.parametrize(
    ("classes", "keep", "message"),
    [
        (2, True, r"keep=True keeps the 3 old classes.*or more, got 2\. To select"),
        (2, [0, 1, 2], "keep lists 3 classes, but the new layer has 2"),
        (7, [3], r"whole numbers from 0 to 2, got \[3\]"),
        (7, [-1], "whole numbers from 0 to 2"),
        (7, [0.5], "whole numbers from 0 to 2"),
        (7, [[0]], "whole numbers from 0 to 2"),
        (7, "ab", "whole numbers from 0 to 2, got 'ab'"),
        (7, [True, False, True], "whole numbers from 0 to 2"),
        (7, 2, "whole numbers from 0 to 2, got 2"),
        (7, [[0], [1, 2]], "whole numbers from 0 to 2"),
        (7, None, "whole numbers from 0 to 2, got None"),
    ],
)
def test_impossible_choices_of_old_classes_are_refused(
    classes: int, keep: object, message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        onnxfit.replace_head(mlp((4, 8, 3)), classes, keep=keep)
