"""DoRA scales the columns of a weight that an adapter changes, as torch and PEFT do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx.numpy_helper import from_array, to_array

from onnxfit import LoRA, SettingError, Trainer
from onnxfit.callbacks import ModelCheckpoint
from onnxfit.optimizers import SGD
from tests import models
from tests.builds import every_way
from tests.trainable.adapters.files import KINDS, file_of, initializers, packed_file, rows_of, run
from tests.trainable.adapters.test_adapted import (
    LABELS,
    X,
    fitted,
    labels_of,
    mlp_trainer,
    trainer_of,
    weights_equal,
)

READ_TWO_WAYS = ("behind_transpose", "tied")
KINDS_OF_DORA = [kind for kind in KINDS if kind not in READ_TWO_WAYS]
ALL_KINDS = pytest.mark.parametrize("kind", KINDS_OF_DORA)
BOTH_STARTS = pytest.mark.parametrize("init", ["kaiming", "pissa"])
MAGNITUDE = "lora_magnitude_vector"


def dora(init: str = "kaiming", **settings: Any) -> LoRA:
    return LoRA(rank=2, alpha=3, target="*", init=init, dora=True, **settings)


def columns(weight: np.ndarray, kind: str) -> np.ndarray:
    """The weights of each output, which a magnitude scales."""
    if kind in ("conv", "pointwise_conv"):
        return weight.reshape(len(weight), -1).T
    return weight.T if kind == "gemm_transposed" else weight


@ALL_KINDS
@BOTH_STARTS
def test_the_first_predictions_are_those_of_the_file(kind: str, init: str) -> None:
    file, x = file_of(kind), rows_of(kind)
    trainer = trainer_of(file, dora(init, dropout=0.5))
    expected = run(file)(x)
    assert np.array_equal(trainer.predict(x), expected)
    atol = 5e-6 * np.abs(expected).max()
    np.testing.assert_allclose(trainer.predict_on_batch(x), expected, atol=atol)
    assert initializers(trainer.export()) == initializers(file)
    for tensor in file.graph.initializer:
        magnitude = trainer.get_weights().get(f"{tensor.name}.{MAGNITUDE}")
        if magnitude is not None:
            norms = np.linalg.norm(columns(to_array(tensor), kind), axis=0)
            np.testing.assert_allclose(magnitude, norms, rtol=1e-6)


@ALL_KINDS
@BOTH_STARTS
@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_the_exported_file_computes_what_was_trained(
    kind: str, init: str, backend: str, tmp_path: Path
) -> None:
    file, x = file_of(kind), rows_of(kind)
    trainer = fitted(trainer_of(file, dora(init), backend=backend), x)
    exported = trainer.export()
    assert exported.graph.node == file.graph.node
    branches = trainer.predict_on_batch(x)
    assert np.abs(branches - run(file)(x)).max() > 0.05
    np.testing.assert_allclose(run(exported)(x), branches, atol=1e-5 * np.abs(branches).max())
    for tensor in exported.graph.initializer:  # the magnitudes are the norms of the merged weight
        magnitude = trainer.get_weights().get(f"{tensor.name}.{MAGNITUDE}")
        if magnitude is not None:
            norms = np.linalg.norm(columns(to_array(tensor), kind), axis=0)
            np.testing.assert_allclose(np.abs(magnitude), norms, rtol=1e-5)


@ALL_KINDS
@BOTH_STARTS
def test_loaded_adapters_compute_what_was_exported(kind: str, init: str, tmp_path: Path) -> None:
    file, x = file_of(kind), rows_of(kind)
    trainer = fitted(trainer_of(file, dora(init)), x)
    loaded = LoRA.load(trainer.export_adapter(tmp_path))
    assert all(one.dora for one in loaded)
    again = Trainer(file, adapters=loaded)
    expected = trainer.predict(x)
    np.testing.assert_allclose(again.predict(x), expected, atol=1e-5 * np.abs(expected).max())


def biased(kind: str) -> tuple[onnx.ModelProto, np.ndarray]:
    """A layer with a bias inside its operator, which a magnitude does not scale."""
    texts = {
        "gemm": "float[N, 6] x) => (float[N, 4] y) { y = Gemm<beta = 0.5, alpha = 2.0>(x, w, b)",
        "conv": "float[N, 6, 5, 5] x) => (float[N, 4, 3, 3] y) { y = Conv(x, w, b)",
    }
    opset = 9 if kind == "gemm" else 17
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}]> g ({texts[kind]} }}'
    )
    rng = np.random.default_rng(1)
    shape = (6, 4) if kind == "gemm" else (4, 6, 3, 3)
    for name, array in {"w": rng.normal(size=shape), "b": rng.normal(size=4)}.items():
        model.graph.initializer.append(from_array(array.astype(np.float32), name))
    return model, rows_of("conv" if kind == "conv" else "gemm")


@pytest.mark.parametrize("kind", ["gemm", "conv"])
def test_a_bias_inside_the_layer_is_not_scaled_and_can_train(kind: str) -> None:
    file, x = biased(kind)
    trainer = fitted(trainer_of(file, dora(), weights="b"), x)
    assert np.abs(trainer.get_weights()["b"] - to_array(file.graph.initializer[1])).max() > 0.01
    branches = trainer.predict_on_batch(x)
    np.testing.assert_allclose(run(trainer.export())(x), branches, atol=2e-5)


# ---------------------------------------------------------------------- the gradient


class TorchLayers:
    """The file of a kind in torch, with the weights V m / |V|; the norms have no gradient."""

    def __init__(self, torch: Any, kind: str, weights: dict[str, np.ndarray], init: str) -> None:
        self.torch, self.kind = torch, kind
        self.frozen = {t.name: torch.tensor(to_array(t)) for t in file_of(kind).graph.initializer}
        self.trained = {n: torch.nn.Parameter(torch.tensor(w)) for n, w in weights.items()}
        for name in ("w", "v"):
            if init == "pissa" and name in self.frozen:
                self.frozen[name] = (self.frozen[name] - self.product(name)).detach()

    def product(self, name: str) -> Any:
        a, b = self.trained[f"{name}.lora_A"], self.trained[f"{name}.lora_B"]
        if self.kind == "conv":
            return 1.5 * (b.flatten(1) @ a.flatten(1)).reshape(self.frozen[name].shape)
        return 1.5 * (a @ b).T if self.kind == "gemm_transposed" else 1.5 * a @ b

    def weight(self, name: str) -> Any:
        v = self.frozen[name] + self.product(name)
        dim = 0 if self.kind == "embedding" else tuple(range(1, v.dim()))
        norms = v.square().sum(dim=dim, keepdim=True).sqrt().detach()
        return v * self.trained[f"{name}.{MAGNITUDE}"].reshape(norms.shape) / norms

    def __call__(self, x: Any) -> Any:
        functional, w = self.torch.nn.functional, self.weight("w")
        if self.kind == "conv":
            return functional.conv2d(x, w, stride=2, padding=1)
        if self.kind == "embedding":
            return functional.embedding(x, w) + self.frozen["b"]
        hidden = 0.5 * functional.linear(x, w)
        return functional.linear(hidden, self.weight("v"), self.frozen["b"])


@pytest.mark.parametrize("kind", ["gemm_transposed", "conv", "embedding"])
@BOTH_STARTS
@every_way
def test_steps_are_those_of_torch_with_constant_norms(
    kind: str, init: str, way: dict[str, str]
) -> None:
    torch = pytest.importorskip("torch")
    x = rows_of(kind)
    trainer = trainer_of(file_of(kind), dora(init), optimizer=SGD(0.05), **way)
    network = TorchLayers(torch, kind, trainer.get_weights(), init)
    y = labels_of(trainer, x)
    optimizer = torch.optim.SGD(network.trained.values(), 0.05)
    for _ in range(5):
        loss = torch.nn.functional.mse_loss(network(torch.tensor(x)), torch.tensor(y))
        assert trainer.train_on_batch(x, y)["loss"] == pytest.approx(loss.item(), rel=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, array in trainer.get_weights().items():
        np.testing.assert_allclose(array, network.trained[name].detach().numpy(), atol=2e-5)


# ---------------------------------------------------------------------- the loop


@every_way
@BOTH_STARTS
def test_a_fit_resumes_bit_by_bit(tmp_path: Path, way: dict[str, str], init: str) -> None:
    lora = LoRA(rank=2, dropout=0.3, init=init, dora=True)
    whole, part = (mlp_trainer(adapters=lora, accumulate=2, **way) for _ in range(2))
    whole.fit(X, LABELS, epochs=4, batch_size=8, verbose=0)
    saving = ModelCheckpoint(tmp_path / "part.ckpt")
    part.fit(X, LABELS, epochs=2, batch_size=8, verbose=0, callbacks=saving)
    resumed = Trainer.load(tmp_path / "part.ckpt")
    resumed.fit(X, LABELS, epochs=4, batch_size=8, verbose=0)
    assert weights_equal(whole, resumed)
    assert initializers(whole.export()) == initializers(resumed.export())


def test_columns_of_zeros_stay_zeros() -> None:
    model = models.mlp((4, 8, 3))
    weight = to_array(model.graph.initializer[0]).copy()
    weight[:, 2] = 0
    model.graph.initializer[0].CopyFrom(from_array(weight, "fc0.weight"))
    trainer = fitted(trainer_of(model, dora()), X)
    assert all(np.isfinite(array).all() for array in trainer.get_weights().values())
    assert not to_array(trainer.export().graph.initializer[0])[:, 2].any()


def test_half_precision_has_magnitudes_in_float32() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[N, 6] x) => (float[N, 6] y)
        { a = Cast<to = 10>(x) h = Gemm(a, w, b) y = Cast<to = 1>(h) }"""
    )
    for name, array in {"w": np.eye(6), "b": np.ones(6)}.items():
        model.graph.initializer.append(from_array(array.astype(np.float16), name))
    x = rows_of("matmul")
    trainer = fitted(trainer_of(model, dora()), x)
    assert {array.dtype for array in trainer.get_weights().values()} == {np.dtype(np.float32)}
    branches = trainer.predict_on_batch(x)
    np.testing.assert_allclose(run(trainer.export())(x), branches, atol=1e-2)


# ---------------------------------------------------------------------- refusals


def test_weights_that_a_magnitude_cannot_scale_are_refused(tmp_path: Path) -> None:
    for kind in READ_TWO_WAYS:
        with pytest.raises(
            SettingError, match=r"'w': one layer reads it as it is and another reads it transposed"
        ):
            trainer_of(file_of(kind), dora())
    with pytest.raises(SettingError, match="'fc1_Q4': it contains integers, whose column norms"):
        trainer_of(packed_file(), LoRA(rank=2, dora=True))


def test_folders_of_peft_are_with_dora_or_without(tmp_path: Path) -> None:
    loras = [LoRA(rank=2, target="fc0*", dora=True), LoRA(rank=2, target="fc1*")]
    trainer = trainer_of(models.mlp((4, 8, 3)), loras)
    with pytest.raises(SettingError, match="only those of fc1 have dora=False"):
        trainer.export_adapter(tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_a_magnitude_of_another_model_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(models.mlp((4, 8, 3)), LoRA(rank=2, target="fc0*", dora=True))
    (lora,) = LoRA.load(trainer.export_adapter(tmp_path))
    assert lora.matrices is not None
    object.__setattr__(lora.matrices["fc0"], "magnitude", np.ones(7, np.float32))
    with pytest.raises(
        SettingError, match=r"magnitude of 7 numbers. Expected 8 for weight 'fc0\.weight'"
    ):
        Trainer(models.mlp((4, 8, 3)), adapters=lora)
