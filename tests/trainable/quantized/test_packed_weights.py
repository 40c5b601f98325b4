"""Packed weights (MatMulNBits) train in floats, and come back into their bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.numpy_helper import from_array

from onnxfit import Distillation, ModelError, Quantization, Trainer
from onnxfit.graph.model import OnnxModel
from onnxfit.optimizers import SGD, Adam
from onnxfit.trainable.quantized.quantized_model import to_fake_quantized
from tests.trainable.quantized import integer_files as files
from tests.trainable.quantized.packed_files import (
    BLOCK,
    BLOCKS,
    FORMS,
    ZEROS,
    K,
    N,
    arrays_of,
    packed_file,
    real_numbers,
    spread,
    unpacked,
    zero_points_of,
)

RNG = np.random.default_rng(1)
X = RNG.normal(size=(32, K)).astype(np.float32)
Y = RNG.normal(size=(32, N)).astype(np.float32)
BOTH_BACKENDS = pytest.mark.parametrize("backend", ["full", "forward_backward"])
ALL_FORMS = pytest.mark.parametrize(("bits", "zeros"), FORMS)
SCALES = pytest.mark.parametrize("scales", ["fixed", "learned"])


def trainer_of(model: onnx.ModelProto, scales: str = "fixed", **settings: Any) -> Trainer:
    defaults = {"loss": "mse", "optimizer": Adam(0.01)}
    quantization = Quantization(scales=scales)
    return Trainer(model, **{**defaults, "quantization": quantization, **settings})


def fit(trainer: Trainer, epochs: int = 2, **settings: Any) -> None:
    trainer.fit(X, Y, epochs=epochs, batch_size=8, verbose=0, **settings)


def same_bytes(one: onnx.ModelProto, other: onnx.ModelProto) -> bool:
    texts = (model.SerializeToString(deterministic=True) for model in (one, other))
    return next(texts) == next(texts)


# ---------------------------------------------------------------------- to the floats and back


@ALL_FORMS
@SCALES
@pytest.mark.parametrize("flat", [True, False])
def test_no_step_changes_nothing(bits: int, zeros: str, scales: str, flat: bool) -> None:
    file = packed_file(bits, zeros, flat=flat)
    trainer = trainer_of(file, scales)
    assert same_bytes(trainer.export(), file)
    weights = trainer.get_weights()
    np.testing.assert_allclose(weights["q"], real_numbers(file, bits), rtol=1e-6, atol=1e-6)
    names = {"q", "b"}
    if scales == "learned":
        names |= {"s"} | ({"z"} if zeros == "packed" else set())
    assert set(weights) == names


@ALL_FORMS
@SCALES
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("level", [0, 4])
def test_a_trained_file_differs_in_its_numbers_and_is_what_predicts(
    bits: int, zeros: str, scales: str, flat: bool, level: int
) -> None:
    file = packed_file(bits, zeros, flat=flat, accuracy_level=level)
    trainer = trainer_of(file, scales)
    fit(trainer)
    exported = trainer.export(lineage=False)
    assert files.stripped(exported) == files.stripped(file)
    assert exported.ByteSize() == file.ByteSize()
    old, new = ({t.name: t for t in model.graph.initializer} for model in (file, exported))
    assert {**old}.keys() == {**new}.keys()
    for name, tensor in new.items():
        assert (tensor.data_type, tensor.dims) == (old[name].data_type, old[name].dims)
    changed = {name for name in new if new[name] != old[name]}
    expected = {"q", "b"} | ({"s"} if scales == "learned" else set())
    assert expected <= changed <= expected | ({"z"} if zeros == "packed" else set())
    predicted = files.run_file(exported, X)
    np.testing.assert_array_equal(trainer.predict(X, batch_size=len(X)), predicted)
    np.testing.assert_array_equal(trainer.predict_on_batch(X), predicted)
    loss = np.mean((predicted.astype(np.float64) - Y) ** 2)
    assert trainer.evaluate(X, Y, batch_size=len(X))["loss"] == pytest.approx(loss, rel=1e-6)


def test_numbers_that_fill_bytes_stay() -> None:
    """The last block of K = 40 has 8 numbers too many, and 3 zero points of 4 bits fill no byte."""
    file = packed_file(4, "packed")
    trainer = trainer_of(file, "learned", optimizer=Adam(0.3))
    fit(trainer)
    old, new = arrays_of(file), arrays_of(trainer.export())
    q = [unpacked(a["q"], 4).reshape(N, -1) for a in (old, new)]
    z = [unpacked(a["z"], 4) for a in (old, new)]
    np.testing.assert_array_equal(q[0][:, K:], q[1][:, K:])
    np.testing.assert_array_equal(z[0][:, BLOCKS:], z[1][:, BLOCKS:])
    assert (q[0][:, :K] != q[1][:, :K]).any()
    assert (z[0][:, :BLOCKS] != z[1][:, :BLOCKS]).any()


@SCALES
def test_a_block_of_zeros_has_the_scale_0(scales: str) -> None:
    """onnxruntime's quantizer writes it, and nothing can be divided by it."""
    file = packed_file()
    scales_of_file = arrays_of(file)["s"].copy()
    scales_of_file[2, 1] = 0
    file.graph.initializer[1].CopyFrom(from_array(scales_of_file, "s"))
    trainer = trainer_of(file, scales)
    assert same_bytes(trainer.export(), file)
    fit(trainer)
    weights = trainer.get_weights()
    assert all(np.isfinite(array).all() for array in weights.values())
    exported = trainer.export()
    assert abs(arrays_of(exported)["s"][2, 1]) < 1e-15
    trained = trainer.train_on_batch(X, Y)["loss"]
    assert trained == pytest.approx(np.mean((files.run_file(exported, X) - Y) ** 2), rel=1e-5)


# ---------------------------------------------------------------------- a step


def rounded(w: Any, s: Any, z: Any, bits: int, round_: Any, clip: Any) -> Any:
    """What the file computes in the place of the weight."""
    return s * (clip(round_(w / s + z), 0, 2**bits - 1) - z)


@ALL_FORMS
def test_gradients_are_those_of_the_function_passed_straight_through(bits: int, zeros: str) -> None:
    """Central differences in float64: the rounded weight is the weight in range, and constant
    where it is clamped; and the loss is a function of that.
    """
    file = packed_file(bits, zeros)
    trainer = trainer_of(file, optimizer=SGD(1.0))
    start = {n: a.astype(np.float64) for n, a in trainer.get_weights().items()}
    # a third of the numbers beyond the range of their integers
    factors = RNG.uniform(0.85, 0.98, (K, N))  # no number is half-way between two integers
    start["q"] *= np.where(RNG.uniform(size=(K, N)) < 0.33, 4 + factors, factors)
    trainer.set_weights({n: a.astype(np.float32) for n, a in start.items()})
    start = {n: a.astype(np.float64) for n, a in trainer.get_weights().items()}
    s, z = spread(arrays_of(file)["s"]).astype(np.float64), zero_points_of(file, bits)
    levels = np.rint(start["q"] / s + z)
    in_range = (levels >= 0) & (levels <= 2**bits - 1)
    assert 0.1 < in_range.mean() < 0.9
    at = rounded(start["q"], s, z, bits, np.rint, np.clip)

    def loss(move: Any, b: Any) -> float:
        return float((((X.astype(np.float64) @ (at + in_range * move)) + b - Y) ** 2).mean())

    trainer.train_on_batch(X, Y)
    found = {n: start[n] - a.astype(np.float64) for n, a in trainer.get_weights().items()}
    assert not found["q"][~in_range].any()
    for name in ("q", "b"):
        direction = RNG.normal(size=start[name].shape)
        moves = [
            (sign * direction, start["b"]) if name == "q" else (0, start["b"] + sign * direction)
            for sign in (1, -1)
        ]
        slope = (loss(*moves[0]) - loss(*moves[1])) / 2
        products = found[name] * direction
        assert abs(products.sum() - slope) <= 1e-5 * np.abs(products).sum()


@pytest.mark.torch
# the kernels of the file do not run here
@pytest.mark.parametrize(
    ("bits", "zeros"), [*((4, z) for z in ZEROS), (8, "absent"), (8, "packed")]
)
@BOTH_BACKENDS
@SCALES
def test_steps_are_those_of_torch_with_a_fake_quantizer(
    bits: int, zeros: str, scales: str, backend: str
) -> None:
    torch = pytest.importorskip("torch")
    file = packed_file(bits, zeros)
    rate, highest = 0.05, 2**bits - 1
    trainer = trainer_of(file, scales, optimizer=SGD(rate), backend=backend)
    is_learned, symmetric = scales == "learned", zeros == "absent"
    # g of LSQ: Q is the greatest integer, which is -8 to 7 without zero points
    greatest = 2 ** (bits - 1) - 1 if symmetric else highest
    g = 1 / np.sqrt(K * N * greatest)
    blocks = np.arange(K) // BLOCK
    fixed = {"s": arrays_of(file)["s"].T.copy(), "z": zero_points_of(file, bits)[::BLOCK]}
    start = trainer.get_weights()
    for i in range(0, 32, 8):
        # each step begins at the same numbers: a difference of a last bit may round otherwise
        weights = trainer.get_weights()
        values = {n: torch.tensor(a, requires_grad=True) for n, a in weights.items()}
        s, z = (values.get(n, torch.tensor(fixed[n], dtype=torch.float32)) for n in ("s", "z"))
        if is_learned:
            s = s.detach() + g * (s - s.detach())
            if zeros == "packed":
                z = z.detach() + g * (z - z.detach())
        if zeros == "packed" and is_learned:
            z = z + (torch.round(z) - z).detach()
        w, s, z = values["q"], s[blocks], z[blocks]
        v = w / s + z
        level = torch.clamp(v + (torch.round(v) - v).detach(), 0, highest)
        w = s * (level - z)
        loss = torch.nn.functional.mse_loss(
            torch.tensor(X[i : i + 8]) @ w + values["b"], torch.tensor(Y[i : i + 8])
        )
        loss.backward()
        torch.optim.SGD(values.values(), lr=rate).step()
        found = trainer.train_on_batch(X[i : i + 8], Y[i : i + 8])["loss"]
        assert found == pytest.approx(loss.item(), rel=1e-5)
        weights = trainer.get_weights()
        for name, value in values.items():
            np.testing.assert_allclose(
                weights[name], value.detach().numpy(), rtol=1e-4, atol=1e-6, err_msg=name
            )
    for name in set(start) - {"z"}:
        assert not np.array_equal(weights[name], start[name]), name


# ---------------------------------------------------------------------- a whole training


@BOTH_BACKENDS
@SCALES
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_training_goes_on_to_the_last_bit(
    tmp_path: Path, scales: str, backend: str, accumulate: int
) -> None:
    file = packed_file(4, "packed")
    settings = {"accumulate": accumulate, "backend": backend}
    whole = trainer_of(file, scales, **settings)
    fit(whole, epochs=4)
    half = trainer_of(file, scales, **settings)
    fit(half)
    path = half.save(tmp_path / "c")
    for resumed in (Trainer.load(path), trainer_of(file, scales, **settings)):
        resumed.restore(path)
        resumed.fit(X, Y, epochs=4, initial_epoch=2, batch_size=8, verbose=0)
        for name, array in whole.get_weights().items():
            np.testing.assert_array_equal(resumed.get_weights()[name], array, err_msg=name)
        assert same_bytes(resumed.export(lineage=False), whole.export(lineage=False))


def float_file(file: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """The floats of a file with packed weights, before they were rounded."""
    w = real_numbers(file, 4)
    w += 0.4 * RNG.uniform(-1, 1, w.shape) * np.abs(spread(arrays_of(file)["s"]))
    arrays = {name: w.astype(np.float32), "b": arrays_of(file)["b"]}
    nodes = [
        helper.make_node("MatMul", ["x", name], ["p"]),
        helper.make_node("Add", ["p", "b"], ["y"]),
    ]
    tensors = [from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "g", file.graph.input, file.graph.output, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("zeros", ["absent", "packed", "float"])
@pytest.mark.parametrize("name", ["q", "of_another_name"])
def test_a_float_model_and_a_teacher(zeros: str, name: str) -> None:
    """With a teacher alone, a step is one towards the outputs of the teacher."""
    file = packed_file(4, zeros)
    floats = float_file(file, name)
    settings = Quantization(float_model=floats)
    trainer = trainer_of(file, quantization=settings, teacher=Distillation(floats, weight=1))
    np.testing.assert_array_equal(trainer.get_weights()["q"], arrays_of(floats)[name])
    assert same_bytes(trainer.export(), file)  # each float is nearest to its integer
    told = trainer_of(file, quantization=Quantization(float_model=floats))
    fit(trainer)
    told.fit(X, files.run_file(floats, X), epochs=2, batch_size=8, verbose=0)
    for name, array in told.get_weights().items():
        np.testing.assert_allclose(trainer.get_weights()[name], array, rtol=1e-4, atol=1e-5)
    assert not same_bytes(trainer.export(), file)


# ---------------------------------------------------------------------- what is trained


@pytest.mark.filterwarnings("ignore:.*quantized")
def test_packed_weights_stay_without_the_setting() -> None:
    assert set(Trainer(packed_file(), loss="mse").get_weights()) == {"b"}
    form = to_fake_quantized(OnnxModel(packed_file()))
    assert form.is_file


def two_layers(shared: str = "") -> onnx.ModelProto:
    """y = MatMulNBits(x, q) + MatMulNBits(x, p), where some tensors are those of the first."""
    file, other = packed_file(4, "packed"), packed_file(4, "packed", seed=7)
    graph = file.graph
    names = {"q": "p", "s": "s_of_p", "z": "z_of_p", "b": "b_of_p"}
    names = {name: new for name, new in names.items() if name not in shared}
    for tensor in other.graph.initializer:
        if tensor.name in names:
            tensor.name = names[tensor.name]
            graph.initializer.append(tensor)
    (node,) = other.graph.node
    node.name = "multiply_again"
    node.input[:] = [names.get(name, name) for name in node.input]
    node.output[0], graph.node[0].output[0] = "y2", "y1"
    graph.node.extend([node, helper.make_node("Add", ["y1", "y2"], ["y"])])
    return file


def test_patterns_choose_packed_weights() -> None:
    file = two_layers()
    trainer = trainer_of(file, quantization=Quantization(weights="p"))
    assert set(trainer.get_weights()) == {"p", "b", "b_of_p"}
    fit(trainer)
    exported = trainer.export()
    old, new = ({t.name: t for t in m.graph.initializer} for m in (file, exported))
    assert {n for n in old if old[n] != new[n]} == {"p", "b", "b_of_p"}
    np.testing.assert_array_equal(trainer.predict_on_batch(X), files.run_file(exported, X))
    assert {"q", "p"} <= set(trainer_of(file).get_weights())
    assert {"q"} == set(trainer_of(file, weights="q").get_weights())
    assert set(trainer_of(file, quantization=Quantization(weights="!q")).get_weights()) == {
        "p", "b", "b_of_p",
    }  # fmt: skip


@pytest.mark.parametrize("shared", ["z", "sz", "qsz"])
@SCALES
def test_nodes_may_share_their_tensors(shared: str, scales: str) -> None:
    file = two_layers(shared)
    trainer = trainer_of(file, scales)
    fit(trainer)
    exported = trainer.export()
    assert files.stripped(exported) == files.stripped(file)
    np.testing.assert_array_equal(trainer.predict_on_batch(X), files.run_file(exported, X))


# ---------------------------------------------------------------------- refusals


def with_tensor(model: onnx.ModelProto, name: str, array: Any) -> onnx.ModelProto:
    (tensor,) = (t for t in model.graph.initializer if t.name == name)
    tensor.CopyFrom(from_array(array, name))
    return model


def with_attribute(name: str, value: Any) -> onnx.ModelProto:
    model = packed_file()
    (node,) = model.graph.node
    for attribute in [a for a in node.attribute if a.name == name]:
        node.attribute.remove(attribute)
    node.attribute.append(helper.make_attribute(name, value))
    return model


def with_groups() -> onnx.ModelProto:
    model = packed_file()
    model.graph.initializer.append(from_array(np.arange(K, dtype=np.int32) // BLOCK, "g"))
    model.graph.node[0].input[4] = "g"
    return model


def of_half_precision() -> onnx.ModelProto:
    model = with_tensor(packed_file(), "s", arrays_of(packed_file())["s"].astype(np.float16))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    return model


def read_by_another_node() -> onnx.ModelProto:
    model = packed_file()
    model.graph.node.append(helper.make_node("Cast", ["q"], ["floats"], "cast", to=1))
    model.graph.output.append(helper.make_tensor_value_info("floats", 1, None))
    return model


def computed_scales() -> onnx.ModelProto:
    model = packed_file()
    model.graph.node.insert(0, helper.make_node("Abs", ["s"], ["positive"]))
    model.graph.node[1].input[2] = "positive"
    return model


REFUSED = {
    "groups": (with_groups, r"index \(g_idx\)"),
    "2 bits": (
        lambda: with_tensor(with_attribute("bits", 2), "q", np.zeros((N, BLOCKS, 4), np.uint8)),
        "bits is 2, expected 4 or 8",
    ),
    "bits of text": (lambda: with_attribute("bits", "x"), "bits is 0"),
    "no K": (lambda: with_attribute("K", -3), "has K=-3, N=6, block_size=16, bits=4"),
    "another K": (
        lambda: with_attribute("K", 64),
        "'q' of MatMulNBits 'multiply' have 144 elements.* require 192",
    ),
    "large K": (
        lambda: with_attribute("K", 2**62),
        "'q' of MatMulNBits 'multiply' have 144 elements",
    ),
    "half precision": (of_half_precision, "'s' is float16, expected float"),
    "NaN": (
        lambda: with_tensor(packed_file(), "s", np.full((N, BLOCKS), np.nan, np.float32)),
        "'s' contains NaN",
    ),
    "text": (
        lambda: with_tensor(packed_file(), "s", np.array(["a"] * N * BLOCKS, object)),
        "'s' is string",
    ),
    "signed": (
        lambda: with_tensor(packed_file(), "q", np.zeros((N, BLOCKS, 8), np.int8)),
        "'q' is int8, expected uint8",
    ),
    "computed": (computed_scales, "'positive' is not an initializer"),
    "two readers": (read_by_another_node, "'q' is read in several ways, by Cast 'cast', MatMul"),
    "two scales": (lambda: two_layers("q"), r"'q' are read through two scales"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_weights_without_an_unpacked_form_are_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(ModelError, match=message) as caught:
        Trainer(make(), loss="mse", quantization=Quantization())
    assert str(caught.value).count("\n") <= 3


@pytest.mark.filterwarnings("ignore:.*quantized")
def test_a_refused_weight_can_be_left_out() -> None:
    file = two_layers()
    file.graph.node[0].input[4] = "g"
    file.graph.initializer.append(from_array(np.arange(K, dtype=np.int32) // BLOCK, "g"))
    with pytest.raises(ModelError, match=r"weights='!q'"):
        trainer_of(file)
    unpacked_form = to_fake_quantized(OnnxModel(file), Quantization(weights="!q"))
    assert "MatMulNBits" in {node.op_type for node in unpacked_form.model.graph.node}


def test_scales_of_nodes_that_do_not_train_are_copied() -> None:
    """And are no longer the file's: they cannot be learned."""
    file = two_layers("sz")
    only = Quantization(weights="q")
    trainer = trainer_of(file, quantization=only)
    fit(trainer)
    exported = trainer.export()
    old, new = ({t.name: t for t in m.graph.initializer} for m in (file, exported))
    assert {n for n in old if old[n] != new[n]} == {"q", "b", "b_of_p"}
    np.testing.assert_array_equal(trainer.predict_on_batch(X), files.run_file(exported, X))
    with pytest.raises(ModelError, match=r"s/unpacked.* to stay consistent with others"):
        trainer_of(file, quantization=Quantization(weights="q", scales="learned"))
