"""Folders of adapters in the format of PEFT are written, read, and refused."""

from __future__ import annotations

import json
import math
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file

from onnxfit import CheckpointError, LoRA, SettingError, Trainer, UnknownNameError
from onnxfit.optimizers import SGD
from tests import models
from tests.trainable.adapters.files import KINDS, file_of, initializers, rows_of, run
from tests.trainable.adapters.test_adapted import X, fitted, mlp_trainer, trainer_of

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture(scope="module")
def trained() -> Trainer:
    return fitted(trainer_of(models.mlp((4, 8, 8, 3)), LoRA(rank=2, dropout=0.1)), X)


@pytest.fixture
def folder(trained: Trainer, tmp_path: Path) -> Path:
    return trained.export_adapter(tmp_path / "adapter")


def test_the_tensors_have_the_names_and_layout_of_peft(trained: Trainer, folder: Path) -> None:
    weights = trained.get_weights()
    expected = {
        f"base_model.model.fc{i}.lora_{part}.weight": weights[f"fc{i}.weight.lora_{part}"].T
        for i in (0, 1)
        for part in "AB"
    }
    tensors = load_file(folder / TENSORS)
    assert tensors.keys() == expected.keys()
    assert all(np.array_equal(tensors[name], array) for name, array in expected.items())
    config = json.loads((folder / CONFIG).read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 16)
    assert config["target_modules"] == ["fc0", "fc1"]
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG, TENSORS]


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_adapters_compute_what_was_exported(kind: str, tmp_path: Path) -> None:
    file, x = file_of(kind), rows_of(kind)
    trainer = fitted(trainer_of(file), x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.export_adapter(tmp_path)
    assert [str(w.message)[:37] for w in caught] == ["PEFT cannot read the adapter of w, an"] * (
        kind == "tied"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = Trainer(file, adapters=LoRA.load(tmp_path))
    assert np.array_equal(loaded.predict(x), trainer.predict(x))
    assert initializers(loaded.export()) == initializers(trainer.export())


@pytest.mark.parametrize("order", [1, -1], ids=["alpha/r first", "alpha/sqrt(r) first"])
def test_several_ranks_and_scales_come_back(tmp_path: Path, order: int) -> None:
    layers = ("fc0", "fc1", "fc2")[::order]
    loras = [
        LoRA(rank=2, alpha=8, target=layers[1]),
        LoRA(rank=3, alpha=7, target=layers[0], scaling="alpha/sqrt(r)"),
        LoRA(rank=2, alpha=4, target=layers[2]),
    ]
    trainer = fitted(trainer_of(models.mlp((4, 8, 8, 3)), loras), X)
    loaded = LoRA.load(trainer.export_adapter(tmp_path))
    scales = {one.target: (one.rank, one.scale) for one in loaded}
    assert scales == {
        (layers[0],): (3, pytest.approx(7 / math.sqrt(3))),
        (layers[1],): (2, pytest.approx(4)),
        (layers[2],): (2, pytest.approx(2)),
    }
    again = Trainer(models.mlp((4, 8, 8, 3)), adapters=loaded)
    np.testing.assert_allclose(again.predict(X), trainer.predict(X), rtol=1e-6)


def test_training_goes_on_from_a_folder_and_its_checkpoint(
    trained: Trainer, folder: Path, tmp_path: Path
) -> None:
    again = trainer_of(models.mlp((4, 8, 8, 3)), LoRA.load(folder))
    assert again.settings["adapters"] == LoRA(rank=2, dropout=0.1, target=["fc0", "fc1"])
    assert again.settings["adapters"].matrices is None
    before = trained.get_weights()
    assert all(np.array_equal(w, before[name]) for name, w in again.get_weights().items())
    fitted(again, X)
    shutil.rmtree(folder)
    loaded = Trainer.load(again.save(tmp_path / "a.ckpt"))
    assert initializers(loaded.export()) == initializers(again.export())


@pytest.mark.parametrize("name", ["fc0", "fc1"])
def test_base_layers_that_peft_stores_identify_the_base(folder: Path, name: str) -> None:
    weight = next(
        onnx.numpy_helper.to_array(tensor)
        for tensor in models.mlp((4, 8, 8, 3)).graph.initializer
        if tensor.name == f"{name}.weight"
    )
    for layout, values in (("as in torch", weight.T), ("as in the file", weight)):
        as_stored = {f"base_model.model.{name}.base_layer.weight": np.ascontiguousarray(values)}
        with_tensors(as_stored)(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaded = Trainer(models.mlp((4, 8, 8, 3)), adapters=LoRA.load(folder))
        assert f"{name}.weight.lora_A" in loaded.get_weights(), layout
    with_tensors({f"base_model.model.{name}.base_layer.weight": weight + 1})(folder)
    with pytest.warns(UserWarning, match=f"adapters of {name} were trained for a model whose"):
        Trainer(models.mlp((4, 8, 8, 3)), adapters=LoRA.load(folder))


def test_the_config_describes_the_base(trained: Trainer, tmp_path: Path) -> None:
    folder = trained.export_adapter(
        tmp_path / "described", task_type="CAUSAL_LM", base_model="company/model"
    )
    config = json.loads((folder / CONFIG).read_text())
    assert (config["task_type"], config["base_model_name_or_path"]) == (
        "CAUSAL_LM",
        "company/model",
    )
    plain = json.loads((trained.export_adapter(tmp_path / "plain") / CONFIG).read_text())
    nothing = {"task_type": None, "base_model_name_or_path": None}
    assert plain | nothing == plain == config | nothing


def test_a_description_that_nothing_can_store_is_refused(trained: Trainer, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"one of PEFT's 'CAUSAL_LM', .* got 'causal_lm'"):
        trained.export_adapter(tmp_path / "a", task_type="causal_lm")
    with pytest.raises(SettingError, match=r"base_model must be the name or the folder.* got ''"):
        trained.export_adapter(tmp_path / "a", base_model="")
    with pytest.raises(SettingError, match=r"stores no task_type and no base_model"):
        trained.export_adapter(tmp_path / "a.onnx_adapter", task_type="CAUSAL_LM")
    assert not list(tmp_path.iterdir())


def test_layers_without_a_module_are_warned_of(tmp_path: Path) -> None:
    model = file_of("gemm")
    model.graph.initializer[0].name = model.graph.node[0].input[1] = "onnx::Gemm_12"
    with pytest.warns(UserWarning, match=r"PEFT cannot find the layers of onnx::Gemm_12"):
        trainer_of(model, LoRA(rank=2)).export_adapter(tmp_path)
    assert len(LoRA.load(tmp_path)) == 1


def test_weights_that_train_besides_are_warned_of(tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match=r"does not contain fc2\.weight, fc2\.bias, which are trained"
    ):
        mlp_trainer(weights="fc2.*").export_adapter(tmp_path)


def test_a_trainer_without_adapters_has_none_to_export(tmp_path: Path) -> None:
    with pytest.raises(
        SettingError, match=r"this trainer has none\. Create it with Trainer\(\.\.\., adapters="
    ):
        Trainer(models.mlp()).export_adapter(tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


# ---------------------------------------------------------------------- other models


def test_a_base_with_other_values_is_warned_of(folder: Path) -> None:
    with pytest.warns(
        UserWarning, match="fc0, fc1 were trained for a model whose weights have other values"
    ):
        Trainer(models.mlp((4, 8, 8, 3), seed=1), adapters=LoRA.load(folder))


def test_adapters_of_another_model_are_refused(folder: Path) -> None:
    loaded = LoRA.load(folder)
    with pytest.raises(
        SettingError, match=r"'fc0' has matrices of shapes \(4, 2\).*Expected \(4, 2\) and \(2, 9\)"
    ):
        Trainer(models.mlp((4, 9, 8, 3)), adapters=loaded)
    with pytest.raises(UnknownNameError, match="'fc0'"):
        Trainer(models.linear(4, 3), adapters=loaded)


# ---------------------------------------------------------------------- damaged folders


def with_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / CONFIG
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def with_tensors(changes: dict[str, np.ndarray]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        save_file({**load_file(folder / TENSORS), **changes}, folder / TENSORS)

    return change


def as_pickle(folder: Path) -> None:
    (folder / TENSORS).rename(folder / "adapter_model.bin")


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (lambda folder: (folder / CONFIG).unlink(), "contains no adapter_config"),
    "no tensors": (lambda folder: (folder / TENSORS).unlink(), "contains no adapter_model"),
    "pickle": (as_pickle, "contains a pickle"),
    "cut": (
        lambda folder: (folder / TENSORS).write_bytes((folder / TENSORS).read_bytes()[:-4]),
        "is damaged",
    ),
    "empty": (lambda folder: (folder / TENSORS).write_bytes(b""), "is damaged"),
    "no JSON": (lambda folder: (folder / CONFIG).write_text("{"), "cannot be read as JSON"),
    "a list": (lambda folder: (folder / CONFIG).write_text("[]"), "must be an object"),
    "alpha": (with_config(lora_alpha="16"), "lora_alpha = '16'"),
    "negative alpha": (with_config(lora_alpha=0), "has invalid adapter settings"),
    "dropout": (with_config(lora_dropout=2), "has invalid adapter settings"),
    "kind": (with_config(peft_type="IA3"), "of type IA3"),
    "DoRA": (with_config(use_dora=True), "has use_dora=True, but .* has no magnitude for 'fc0'"),
    "magnitude": (
        with_tensors({"base_model.model.fc0.lora_magnitude_vector": np.ones(8, np.float32)}),
        "has use_dora=False, but .* has a magnitude for 'fc0'",
    ),
    "expression": (with_config(alpha_pattern={"(a+)+b": 3}), "regular expressions"),
    "alpha of a module": (with_config(alpha_pattern={"fc1": "x"}), "has alpha = 'x'"),
    "residual": (with_config(init_lora_weights="pissa_niter_4"), "which changes the base weights"),
    "biases": (with_config(bias="all"), "has bias='all'"),
    "whole layers": (with_config(modules_to_save=["head"]), "has modules_to_save="),
    "NaN": (
        with_tensors({"base_model.model.fc0.lora_A.weight": np.full((2, 4), np.nan, np.float32)}),
        "contains NaN or infinity in 'base_model.model.fc0.lora_A.weight'",
    ),
    "other tensor": (
        with_tensors({"base_model.model.fc2.weight": np.zeros(3, np.float32)}),
        "which is not a LoRA matrix",
    ),
    "integers": (
        with_tensors({"base_model.model.fc0.lora_A.weight": np.zeros((2, 4), np.int64)}),
        "which is not a LoRA matrix",
    ),
    "one matrix": (
        with_tensors({"base_model.model.fc2.lora_A.weight": np.zeros((2, 4), np.float32)}),
        "matrices for 'fc2' of shapes",
    ),
    "two ranks": (
        with_tensors({"base_model.model.fc0.lora_A.weight": np.zeros((3, 4), np.float32)}),
        "matrices for 'fc0' of shapes",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused(folder: Path, damage: str) -> None:
    change, message = DAMAGES[damage]
    change(folder)
    with pytest.raises(CheckpointError, match=message):
        LoRA.load(folder)


def test_a_folder_may_have_null_as_metadata(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.dumps({**json.loads(data[8 : 8 + size]), "__metadata__": None}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
    assert LoRA.load(folder)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes")
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_pipe_is_refused_without_waiting(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=r"it is a device or a pipe, not a regular file"):
        LoRA.load(folder)


def test_short_names_in_alpha_pattern_are_those_of_the_inner_modules(folder: Path) -> None:
    with_config(alpha_pattern={"fc1": 3})(folder)
    assert {one.target: one.alpha for one in LoRA.load(folder)} == {("fc0",): 16, ("fc1",): 3}
    prefixed = {
        name.replace("fc", "encoder.fc"): array
        for name, array in load_file(folder / TENSORS).items()
    }
    save_file(prefixed, folder / TENSORS)
    assert {one.target: one.alpha for one in LoRA.load(folder)} == {
        ("encoder.fc0",): 16,
        ("encoder.fc1",): 3,
    }


def test_an_adapter_predicts_as_the_merged_file(trained: Trainer, folder: Path) -> None:
    loaded = Trainer(models.mlp((4, 8, 8, 3)), adapters=LoRA.load(folder))
    assert np.array_equal(loaded.predict(X), run(trained.export())(X))


# ---------------------------------------------------------------------- PEFT itself

SIZES = (4, 8, 8, 3)


def torch_network(torch: Any) -> Any:
    """The network of `models.mlp`, which computes what the file does."""

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for tensor in models.mlp(SIZES).graph.initializer:
                name, _, kind = tensor.name.partition(".")
                array = onnx.numpy_helper.to_array(tensor)
                if kind == "weight":
                    self.add_module(name, torch.nn.Linear(*array.shape))
                parameter = torch.tensor(array.T.copy())
                setattr(getattr(self, name), kind, torch.nn.Parameter(parameter))

        def forward(self, x: Any) -> Any:
            return self.fc2(torch.tanh(self.fc1(torch.tanh(self.fc0(x)))))

    return Network()


def predicted(torch: Any, network: Any, x: np.ndarray = X) -> np.ndarray:
    with torch.no_grad():
        return network.eval()(torch.tensor(x)).numpy()


@pytest.mark.parametrize(
    "lora",
    [
        LoRA(rank=2, dropout=0.1),
        LoRA(rank=2, alpha=3, init="pissa"),
        LoRA(rank=2, init="pissa", scaling="alpha/sqrt(r)"),
        LoRA(rank=2, dora=True),
        LoRA(rank=2, init="pissa", dora=True),
    ],
    ids=["plain", "pissa", "pissa with sqrt", "dora", "pissa with dora"],
)
def test_peft_itself_loads_the_folder(lora: LoRA, tmp_path: Path) -> None:
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    trainer = fitted(trainer_of(models.mlp(SIZES), lora), X)
    folder = trainer.export_adapter(tmp_path)
    network = peft.PeftModel.from_pretrained(torch_network(torch), folder).eval()
    np.testing.assert_allclose(trainer.predict(X), predicted(torch, network), atol=1e-5)
    network.save_pretrained(folder / "again")
    loaded = Trainer(models.mlp(SIZES), adapters=LoRA.load(folder / "again"))
    np.testing.assert_allclose(loaded.predict(X), trainer.predict(X), atol=1e-5)


def test_the_principal_matrices_are_those_of_peft(tmp_path: Path) -> None:
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    settings = {"r": 2, "lora_alpha": 3, "target_modules": ["fc0", "fc1"]}
    config = peft.LoraConfig(init_lora_weights="pissa", **settings)
    network = peft.get_peft_model(torch_network(torch), config)
    trainer = trainer_of(models.mlp(SIZES), LoRA(rank=2, alpha=3, init="pissa"))
    weights = trainer.get_weights()
    for name in ("fc0", "fc1"):
        layer = getattr(network.base_model.model, name)
        theirs = layer.lora_B.default.weight @ layer.lora_A.default.weight
        ours = weights[f"{name}.weight.lora_A"] @ weights[f"{name}.weight.lora_B"]
        np.testing.assert_allclose(ours.T, theirs.detach().numpy(), atol=1e-5)
    network.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"init_lora_weights='pissa'.*\n?.*path_initial"):
        LoRA.load(tmp_path)


def network_of(torch: Any, kind: str) -> Any:
    """The network of `file_of(kind)`."""
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in file_of(kind).graph.initializer}
    w = arrays["w"]

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if kind == "embedding":
                self.w = torch.nn.Embedding(*w.shape)
            elif kind == "conv":
                self.w = torch.nn.Conv2d(6, 4, 3, stride=2, padding=1, bias=False)
            else:
                self.w = torch.nn.Linear(*w.shape)
                self.w.bias = torch.nn.Parameter(torch.tensor(arrays["b"]))
            stored = w.T.copy() if kind == "gemm" else w
            self.w.weight = torch.nn.Parameter(torch.tensor(stored))

        def forward(self, x: Any) -> Any:
            y = self.w(x)
            return y + torch.tensor(arrays["b"]) if kind == "embedding" else y

    return Network()


@pytest.mark.parametrize("kind", ["gemm", "conv", "embedding"])
@pytest.mark.parametrize("dora", [False, True])
def test_training_goes_on_from_the_folder_as_in_peft(kind: str, dora: bool, tmp_path: Path) -> None:
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    file, x = file_of(kind), rows_of(kind)
    lora = LoRA(rank=2, alpha=3, target="w", dora=dora)
    folder = fitted(trainer_of(file, lora), x).export_adapter(tmp_path)
    trainer = trainer_of(file, LoRA.load(folder), optimizer=SGD(0.05))
    network = peft.PeftModel.from_pretrained(network_of(torch, kind), folder, is_trainable=True)
    np.testing.assert_allclose(trainer.predict(x), predicted(torch, network, x), atol=1e-5)
    y = np.random.default_rng(0).normal(size=trainer.predict(x).shape).astype(np.float32)
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    assert len(trained) == 2 + dora
    optimizer = torch.optim.SGD(trained, 0.05)
    for _ in range(6):
        loss = torch.nn.functional.mse_loss(network(torch.tensor(x)), torch.tensor(y))
        assert trainer.train_on_batch(x, y)["loss"] == pytest.approx(loss.item(), rel=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    np.testing.assert_allclose(trainer.predict(x), predicted(torch, network, x), atol=2e-5)
    network.save_pretrained(tmp_path / "again")
    loaded = Trainer(file, adapters=LoRA.load(tmp_path / "again"))
    np.testing.assert_allclose(loaded.predict(x), trainer.predict(x), atol=2e-5)
