"""Adapters begin as nothing, train alone, and are merged into the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from onnxfit import CheckpointError, LoRA, ModelError, SettingError, Trainer
from onnxfit.callbacks import ModelCheckpoint
from onnxfit.optimizers import Adam
from onnxfit.training import checkpoint
from tests import models
from tests.distributed.threads import on_ranks
from tests.helpers import classification
from tests.trainable.adapters.files import KINDS, file_of, initializers, packed_file, rows_of, run

ALL_KINDS = pytest.mark.parametrize("kind", KINDS)
BOTH_BACKENDS = pytest.mark.parametrize("backend", ["full", "forward_backward"])
X, LABELS = classification(32)


def trainer_of(model: onnx.ModelProto, lora: Any = None, **settings: Any) -> Trainer:
    given = {"loss": "mse", "optimizer": Adam(0.05)} | settings
    return Trainer(model, adapters=lora or LoRA(rank=2, target="*"), **given)


def labels_of(trainer: Trainer, x: np.ndarray) -> np.ndarray:
    shape = trainer.predict(x).shape
    return np.random.default_rng(6).normal(size=shape).astype(np.float32)


def fitted(trainer: Trainer, x: np.ndarray, epochs: int = 3) -> Trainer:
    trainer.fit(x, labels_of(trainer, x), epochs=epochs, batch_size=4, verbose=0)
    return trainer


def weights_equal(one: Trainer, other: Trainer) -> bool:
    mine, theirs = one.get_weights(), other.get_weights()
    return mine.keys() == theirs.keys() and all(
        np.array_equal(array, theirs[name]) for name, array in mine.items()
    )


def mlp_trainer(**settings: Any) -> Trainer:
    lora = LoRA(rank=2, dropout=0.3)
    return Trainer(
        models.mlp((4, 8, 8, 3)),
        **{"adapters": lora, "loss": "cross_entropy", "optimizer": "adam"} | settings,
    )


# ---------------------------------------------------------------------- the beginning and the end


@ALL_KINDS
def test_the_first_predictions_are_those_of_the_file(kind: str) -> None:
    file, x = file_of(kind), rows_of(kind)
    trainer = trainer_of(file, LoRA(rank=2, target="*", dropout=0.5))
    expected = run(file)(x)
    assert np.array_equal(trainer.predict(x), expected)
    assert np.array_equal(trainer.predict_on_batch(x), expected)
    assert initializers(trainer.export()) == initializers(file)


@ALL_KINDS
@BOTH_BACKENDS
def test_the_exported_file_has_the_same_nodes_and_merged_weights(kind: str, backend: str) -> None:
    file, x = file_of(kind), rows_of(kind)
    trainer = fitted(trainer_of(file, backend=backend), x)
    exported = trainer.export()
    assert exported.graph.node == file.graph.node
    branches = trainer.predict_on_batch(x)
    assert np.abs(branches - run(file)(x)).max() > 0.05  # the adapters have learned
    np.testing.assert_allclose(run(exported)(x), branches, atol=2e-6 * np.abs(branches).max())
    assert np.array_equal(trainer.predict(x), run(exported)(x))
    before, after = initializers(file), initializers(exported)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {name.rpartition(".")[0] for name in trainer.get_weights()}


@ALL_KINDS
def test_the_gradients_are_those_of_finite_differences(kind: str) -> None:
    """Of sum(y * c), at a point where neither matrix is zero.

    In float64, but for Conv, which onnxruntime has in float32 alone. Its outputs are linear in each
    matrix, so that the differences are exact for a long step.
    """
    dtype, step, atol = (np.float64, 1e-6, 1e-6)
    if "conv" in kind:
        dtype, step, atol = (np.float32, 1.0, 5e-4)
    x = rows_of(kind, dtype)
    trainer = trainer_of(
        file_of(kind, dtype), backend="forward_backward", loss=None, optimizer="sgd"
    )
    rng = np.random.default_rng(7)
    start = {name: rng.normal(size=w.shape) / 2 for name, w in trainer.get_weights().items()}
    trainer.set_weights(start)
    y = trainer.forward(x)
    c = rng.normal(size=y.shape).astype(dtype)
    gradients = trainer.backward(c)["weights"]
    assert gradients.keys() == start.keys()
    for name, gradient in gradients.items():
        direction = rng.normal(size=gradient.shape)
        sums = []
        for sign in (1, -1):
            trainer.set_weights({**start, name: start[name] + sign * step * direction})
            sums.append((trainer.predict_on_batch(x) * c).sum())
        numeric = (sums[0] - sums[1]) / (2 * step)
        assert numeric == pytest.approx((gradient * direction).sum(), rel=2e-5, abs=atol)


@BOTH_BACKENDS
def test_packed_integers_stay_and_their_branches_are_exported(backend: str, tmp_path: Path) -> None:
    file = packed_file()
    x = np.random.default_rng(8).normal(size=(12, 32)).astype(np.float32)
    trainer = trainer_of(file, LoRA(rank=2, dropout=0.2), backend=backend)
    assert sorted(trainer.get_weights()) == [
        f"fc{i}_Q4.lora_{part}" for i in (1, 2) for part in "AB"
    ]
    np.testing.assert_allclose(trainer.predict(x), run(file)(x), atol=1e-6)
    fitted(trainer, x)
    exported = trainer.export()
    kept = initializers(exported)
    assert {name: kept[name] for name in initializers(file)} == initializers(file)
    operators = [node.op_type for node in exported.graph.node]
    assert operators.count("MatMulNBits") == 2
    assert "Dropout" not in operators
    assert np.abs(run(exported)(x) - run(file)(x)).max() > 0.05
    np.testing.assert_allclose(run(exported)(x), trainer.predict_on_batch(x), atol=2e-6)
    contents = checkpoint.load(trainer.save(tmp_path / "a.ckpt"), {})
    assert initializers(contents.trained_model()) == initializers(exported)
    applied = Trainer(file, adapters=LoRA.load(trainer.export_adapter(tmp_path / "adapter")))
    assert initializers(applied.export()) == initializers(exported)


def test_half_precision_has_adapters_in_float32() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[N, 6] x) => (float[N, 6] y)
        { a = Cast<to = 10>(x) h = MatMul(a, w) y = Cast<to = 1>(h) }"""
    )
    array = np.eye(6, dtype=np.float16)
    model.graph.initializer.append(onnx.numpy_helper.from_array(array, "w"))
    x = rows_of("matmul")
    trainer = fitted(trainer_of(model, LoRA(rank=2, target="*", dropout=0.1)), x)
    assert {array.dtype for array in trainer.get_weights().values()} == {np.dtype(np.float32)}
    exported = trainer.export()
    np.testing.assert_allclose(run(exported)(x), trainer.predict_on_batch(x), atol=5e-3)
    assert np.abs(run(exported)(x) - run(model)(x)).max() > 0.05


def test_layers_inside_functions_have_adapters() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17, "f": 1]> g (float[N, 6] x) => (float[N, 6] y)
        { h = f.lin(x, w) y = Tanh(h) }
        <domain: "f", opset_import: ["": 17]> lin (a, b) => (c) { c = MatMul(a, b) }"""
    )
    array = np.eye(6, dtype=np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(array, "w"))
    x = rows_of("matmul")
    trainer = fitted(trainer_of(model), x)
    exported = trainer.export()
    assert exported.functions == model.functions
    np.testing.assert_allclose(run(exported)(x), trainer.predict_on_batch(x), atol=2e-6)


def test_a_file_whose_weights_are_inputs_too_has_adapters() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 3, opset_import: ["": 9]>
        g (float[N, 6] x, float[6, 6] w) => (float[N, 6] y) { y = MatMul(x, w) }"""
    )
    array = np.eye(6, dtype=np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(array, "w"))
    x = rows_of("matmul")
    trainer = fitted(trainer_of(model, LoRA(rank=2, target="*", dropout=0.1)), x)
    exported = trainer.export()
    assert exported.ir_version == 3
    np.testing.assert_allclose(run(exported)(x), trainer.predict_on_batch(x), atol=2e-6)


def test_files_before_opset_7_are_refused() -> None:
    with pytest.raises(ModelError, match="opset 7 or later, got opset 6"):
        trainer_of(file_of("matmul", opset=6))


@pytest.mark.parametrize("opset", [11, 13, 21])
def test_files_of_other_opsets_train_with_dropout(opset: int) -> None:
    x = rows_of("gemm")
    file = file_of("gemm", opset=opset)
    trainer = fitted(trainer_of(file, LoRA(rank=2, dropout=0.2)), x)
    exported = trainer.export()
    assert exported.graph.node == file.graph.node
    np.testing.assert_allclose(run(exported)(x), trainer.predict_on_batch(x), atol=1e-5)


# ---------------------------------------------------------------------- the training


def test_dropout_acts_in_training_alone_and_repeats() -> None:
    losses = []
    for dropout in (0.0, 0.5, 0.5):
        trainer = mlp_trainer(adapters=LoRA(rank=2, dropout=dropout), backend="forward_backward")
        rng = np.random.default_rng(0)
        trainer.set_weights({n: rng.normal(size=w.shape) for n, w in trainer.get_weights().items()})
        with_dropout, without = trainer.forward(X), trainer.forward(X, training=False)
        assert np.array_equal(with_dropout, without) == (dropout == 0)
        losses.append(with_dropout)
    assert np.array_equal(losses[1], losses[2])


def test_the_seed_decides_the_first_values_and_every_weight_has_its_own() -> None:
    lora = LoRA(rank=2)
    first, again = (mlp_trainer(adapters=lora, seed=seed).get_weights() for seed in (1, 1))
    other = mlp_trainer(adapters=lora, seed=-2).get_weights()
    alone = mlp_trainer(adapters=LoRA(rank=2, target="fc1.weight"), seed=1).get_weights()
    a = "fc1.weight.lora_A"
    assert np.array_equal(first[a], again[a])
    assert np.array_equal(first[a], alone[a])
    assert not np.array_equal(first[a], other[a])
    assert not first["fc1.weight.lora_B"].any()
    assert np.abs(first[a]).max() <= 1 / np.sqrt(8)


@pytest.mark.parametrize(
    ("lora", "deviation"),
    [
        (LoRA(rank=64, target="fc0.weight"), 1 / np.sqrt(3 * 400)),
        (LoRA(rank=64, target="fc0.weight", init="gaussian"), 1 / 64),
    ],
    ids=["kaiming", "gaussian"],
)
def test_the_first_values_have_the_deviation_of_their_distribution(
    lora: LoRA, deviation: float
) -> None:
    trainer = Trainer(models.mlp((400, 300, 3)), adapters=lora)
    a = trainer.get_weights()["fc0.weight.lora_A"]
    assert a.std() == pytest.approx(deviation, rel=0.02)


@BOTH_BACKENDS
def test_a_fit_resumes_from_a_checkpoint_bit_by_bit(tmp_path: Path, backend: str) -> None:
    whole, part = (mlp_trainer(backend=backend, accumulate=2, weights="fc2.*") for _ in range(2))
    whole.fit(X, LABELS, epochs=4, batch_size=8, verbose=0)
    saving = ModelCheckpoint(tmp_path / "part.ckpt")
    part.fit(X, LABELS, epochs=2, batch_size=8, verbose=0, callbacks=saving)
    resumed = Trainer.load(tmp_path / "part.ckpt")
    assert resumed.settings["adapters"] == part.settings["adapters"]
    resumed.fit(X, LABELS, epochs=4, batch_size=8, verbose=0)
    assert weights_equal(whole, resumed)
    assert whole.history.history == resumed.history.history
    assert initializers(whole.export()) == initializers(resumed.export())


def test_several_adapters_survive_a_checkpoint(tmp_path: Path) -> None:
    loras = [
        LoRA(rank=2, target="fc0.weight"),
        LoRA(rank=3, target="fc1*", scaling="alpha/sqrt(r)"),
    ]
    trainer = fitted(trainer_of(models.mlp((4, 8, 8, 3)), loras), X)
    shapes = {name: array.shape for name, array in trainer.get_weights().items()}
    assert shapes["fc0.weight.lora_A"] == (4, 2)
    assert shapes["fc1.weight.lora_B"] == (3, 8)
    loaded = Trainer.load(trainer.save(tmp_path / "a.ckpt"))
    assert weights_equal(loaded, trainer)
    assert initializers(loaded.export()) == initializers(trainer.export())


def test_weights_names_those_that_train_besides() -> None:
    trainer = mlp_trainer(weights=["fc2.*", "fc0.bias"])
    assert [name for name in trainer.get_weights() if "lora" not in name] == [
        "fc0.bias",
        "fc2.weight",
        "fc2.bias",
    ]
    trainer.fit(X, LABELS, epochs=2, verbose=0)
    exported = trainer.export()
    np.testing.assert_allclose(run(exported)(X), trainer.predict_on_batch(X), atol=2e-6)
    kept = initializers(models.mlp((4, 8, 8, 3)))["fc1.bias"]
    assert initializers(exported)["fc1.bias"] == kept


def test_a_model_with_adapters_predicts_without_a_loss() -> None:
    file = models.mlp((4, 8, 3))
    assert np.array_equal(trainer_of(file, loss=None).predict(X), run(file)(X))


def test_the_summary_counts_the_trained_numbers() -> None:
    text = mlp_trainer().summary()
    assert "trained    56 numbers" in text
    assert "frozen     139 numbers" in text
    assert "adapters=LoRA(rank=2, dropout=0.3)" in text


def test_a_checkpoint_gives_the_merged_model(tmp_path: Path) -> None:
    trainer = fitted(trainer_of(models.mlp((4, 8, 8, 3))), X)
    contents = checkpoint.load(trainer.save(tmp_path / "a.ckpt"), {})
    assert initializers(contents.trained_model()) == initializers(trainer.export())
    del contents.state["weights"]["fc0.weight.lora_B"]
    with pytest.raises(CheckpointError, match="its weights are not those of its model"):
        contents.trained_model()


def test_ranks_train_as_one_process() -> None:
    def weights(communicator: Any) -> dict[str, np.ndarray]:
        trainer = mlp_trainer(adapters=LoRA(rank=2), distribute=communicator, optimizer=0.05)
        trainer.fit(X, LABELS, epochs=2, batch_size=8, verbose=0)
        return trainer.get_weights()

    alone = weights(None)
    for of_rank in on_ranks(2, weights):
        for name, array in alone.items():
            np.testing.assert_allclose(of_rank[name], array, atol=1e-6)


def test_layers_that_read_the_same_input_share_its_dropout() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[N, 6] x) => (float[N, 6] y)
        { q = MatMul(x, w) k = MatMul(x, v) y = Add(q, k) }"""
    )
    for name in "vw":
        array = np.eye(6, dtype=np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    trainer = trainer_of(model, LoRA(rank=2, target="*", dropout=0.5))
    operators = [node.op_type for node in trainer._training.trainable.model.graph.node]
    assert operators.count("Dropout") == 1
    fitted(trainer, rows_of("matmul"))


# ---------------------------------------------------------------------- refusals


def test_a_weight_trains_by_one_of_weights_and_adapters() -> None:
    with pytest.raises(SettingError, match=r"both train fc0\.weight"):
        mlp_trainer(weights="fc0.*")
    with pytest.raises(SettingError, match="only excludes weights"):
        mlp_trainer(weights="!fc0.*")


def test_names_of_adapters_that_are_taken_are_refused() -> None:
    model = models.mlp((4, 8, 3))
    model.graph.initializer.append(
        onnx.numpy_helper.from_array(np.zeros(3, np.float32), "fc0.weight.lora_A")
    )
    with pytest.raises(ModelError, match=r"fc0\.weight\.lora_A, the names of its adapters"):
        trainer_of(model)


def test_an_adapter_without_a_path_to_the_loss_is_refused() -> None:
    model = models.two_outputs()
    with pytest.raises(SettingError, match=r"depends on v\.lora_A.*the target of adapters="):
        trainer_of(model, LoRA(rank=1, target=["u", "v"]), loss={"a": "mse"})


@pytest.mark.parametrize("adapters", [[], "q_proj", [LoRA(), None], 8])
def test_adapters_are_settings(adapters: Any) -> None:
    with pytest.raises(SettingError, match=r"adapters must be an onnxfit\.LoRA"):
        mlp_trainer(adapters=adapters)
