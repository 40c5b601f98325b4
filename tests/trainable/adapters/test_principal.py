"""Adapters of PiSSA begin with the principal part of a weight, and end as plain ones."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx.numpy_helper import from_array, to_array

from onnxfit import LoRA, ModelError, SettingError, Trainer
from onnxfit.callbacks import ModelCheckpoint
from onnxfit.errors import OnnxfitError
from onnxfit.trainable.adapters import adapter as adapter_module
from onnxfit.trainable.adapters.adapter import principal_matrices
from onnxfit.training import checkpoint
from tests import models
from tests.trainable.adapters.files import KINDS, file_of, initializers, packed_file, rows_of, run
from tests.trainable.adapters.test_adapted import (
    LABELS,
    X,
    fitted,
    mlp_trainer,
    trainer_of,
    weights_equal,
)

PISSA = LoRA(rank=2, alpha=3, target="*", init="pissa")
ALL_KINDS = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize("shape", [(7, 4), (4, 7)])
def test_the_product_is_the_best_approximation_and_both_have_the_same_norms(
    shape: tuple[int, int],
) -> None:
    """Eckart and Young: what is left has the remaining singular values."""
    weight = np.random.default_rng(0).normal(size=shape)
    a, b = principal_matrices(weight, 3, 1.5, name="w")
    values = np.linalg.svd(weight, compute_uv=False)
    left = np.linalg.svd(weight - 1.5 * a @ b, compute_uv=False)
    np.testing.assert_allclose(left, [*values[3:], 0, 0, 0], atol=1e-12)
    np.testing.assert_allclose(a.T @ a, b @ b.T, atol=1e-12)


@ALL_KINDS
def test_the_first_predictions_are_those_of_the_file(kind: str) -> None:
    file, x = file_of(kind), rows_of(kind)
    trainer = trainer_of(file, PISSA)
    expected = run(file)(x)
    assert np.array_equal(trainer.predict(x), expected)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(trainer.predict_on_batch(x), expected, atol=3e-6 * scale)
    assert initializers(trainer.export()) == initializers(file)


@ALL_KINDS
def test_the_exported_file_computes_what_was_trained(kind: str, tmp_path: Path) -> None:
    file, x = file_of(kind), rows_of(kind)
    trainer = fitted(trainer_of(file, PISSA), x)
    exported = trainer.export()
    assert exported.graph.node == file.graph.node
    branches = trainer.predict_on_batch(x)
    assert np.abs(branches - run(file)(x)).max() > 0.05
    np.testing.assert_allclose(run(exported)(x), branches, atol=5e-6 * np.abs(branches).max())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "tied"])  # PEFT reads no tied
@pytest.mark.parametrize("scaling", ["alpha/r", "alpha/sqrt(r)"])
def test_the_folder_is_a_plain_adapter_of_twice_the_rank(
    kind: str, scaling: str, tmp_path: Path
) -> None:
    file, x = file_of(kind), rows_of(kind)
    lora = LoRA(rank=4, alpha=3, target="*", init="pissa", scaling=scaling)
    trainer = fitted(trainer_of(file, lora), x)
    loaded = LoRA.load(trainer.export_adapter(tmp_path))
    assert {one.rank for one in loaded} == {8}  # more than the smaller side of these weights
    assert loaded[0].scale == pytest.approx(lora.scale)
    again = Trainer(file, adapters=loaded)
    expected = trainer.predict(x)
    np.testing.assert_allclose(again.predict(x), expected, atol=5e-6 * np.abs(expected).max())


def test_training_is_that_of_the_residual_in_torch() -> None:
    """With the two matrices of the singular value decomposition by torch."""
    torch = pytest.importorskip("torch")
    model = models.mlp((4, 8, 3))
    lora = LoRA(rank=2, alpha=4, target="*", init="pissa")
    trainer = Trainer(model, adapters=lora, loss="cross_entropy", optimizer=0.1)
    tensors = {t.name: torch.tensor(to_array(t)) for t in model.graph.initializer}
    frozen, trained = {}, {}
    for name in ("fc0", "fc1"):
        w = tensors[f"{name}.weight"]
        u, s, v = torch.linalg.svd(w, full_matrices=False)
        root = torch.sqrt(s[:2] / 2)
        a, b = u[:, :2] * root, root[:, None] * v[:2]
        frozen[name] = w - 2 * a @ b
        trained[name] = [m.clone().requires_grad_() for m in (a, b)]

    def layer(name: str, x: Any) -> Any:
        a, b = trained[name]
        return x @ frozen[name] + tensors[f"{name}.bias"] + 2 * x @ a @ b

    optimizer = torch.optim.SGD([m for pair in trained.values() for m in pair], 0.1)
    for _ in range(8):
        y = layer("fc1", torch.tanh(layer("fc0", torch.tensor(X))))
        loss = torch.nn.functional.cross_entropy(y, torch.tensor(LABELS))
        assert trainer.train_on_batch(X, LABELS)["loss"] == pytest.approx(loss.item(), rel=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_a_fit_resumes_bit_by_bit_without_another_decomposition(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = LoRA(rank=2, dropout=0.3, init="pissa")
    whole, part = (mlp_trainer(adapters=lora, backend=backend) for _ in range(2))
    whole.fit(X, LABELS, epochs=4, batch_size=8, verbose=0)
    saving = ModelCheckpoint(tmp_path / "part.ckpt")
    part.fit(X, LABELS, epochs=2, batch_size=8, verbose=0, callbacks=saving)
    monkeypatch.delattr(adapter_module, "principal_matrices")
    resumed = Trainer.load(tmp_path / "part.ckpt")
    assert resumed.settings["adapters"] == lora
    assert resumed.settings["adapters"].matrices is None
    resumed.fit(X, LABELS, epochs=4, batch_size=8, verbose=0)
    assert weights_equal(whole, resumed)
    assert whole.history.history == resumed.history.history
    assert initializers(whole.export()) == initializers(resumed.export())
    contents = checkpoint.load(resumed.save(tmp_path / "b.ckpt"), {})
    assert initializers(contents.trained_model()) == initializers(resumed.export())


def test_restore_refuses_what_began_beside_another_residual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fitted(trainer_of(models.mlp((4, 8, 3)), PISSA), X).save(tmp_path / "a.ckpt")
    same = trainer_of(models.mlp((4, 8, 3)), PISSA)
    same.restore(path)
    assert weights_equal(same, Trainer.load(path))

    def other(*arguments: Any, **named: Any) -> tuple[np.ndarray, ...]:
        a, b = principal_matrices(*arguments, **named)
        return a + 0.1, b

    monkeypatch.setattr(adapter_module, "principal_matrices", other)
    trainer = trainer_of(models.mlp((4, 8, 3)), PISSA)
    before = trainer.get_weights()
    with pytest.raises(
        SettingError,
        match=r"'fc0' was initialized with init='pissa' from other singular vectors.*\n?.*Trainer\.load",
    ):
        trainer.restore(path)
    assert all(np.array_equal(w, before[name]) for name, w in trainer.get_weights().items())


@pytest.mark.parametrize(
    "constants",
    [3, {"fc0": 3}, {"fc0": []}, {"fc0": [1, 2]}, {"fc0": ["x", None]}, {"fc0": [{}, {}]}, {}],
    ids=str,
)
def test_a_damaged_start_is_refused(tmp_path: Path, constants: Any) -> None:
    path = trainer_of(models.mlp((4, 8, 3)), PISSA).save(tmp_path / "a.ckpt")
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    info = json.loads(entries["onnxfit.json"])
    assert sorted(info["constants"]) == ["fc0", "fc1"]
    info["constants"] = constants
    entries["onnxfit.json"] = json.dumps(info).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    with pytest.raises(OnnxfitError):
        Trainer.load(path)


def test_weights_without_a_principal_part_are_refused() -> None:
    with pytest.raises(SettingError, match=r"'fc1_Q4' contains integers.*target="):
        Trainer(packed_file(), adapters=LoRA(rank=2, init="pissa"))
    file = file_of("matmul")
    broken = np.full((6, 6), np.nan, np.float32)
    file.graph.initializer[0].CopyFrom(from_array(broken, "w"))
    with pytest.raises(ModelError, match="'w' contains NaN or infinity"):
        trainer_of(file, PISSA)
