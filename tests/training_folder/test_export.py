"""A training goes on in a host without onnxfit, and comes back, as if it had never left."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxfit
from onnxfit import Trainer
from onnxfit.errors import CheckpointError, SettingError
from onnxfit.kernels import library
from onnxfit.losses import CrossEntropy, Loss, MeanSquaredError
from onnxfit.optimizers import Optimizer
from onnxfit.registry import registry
from tests.models import convolutional, linear, mlp, two_inputs, two_outputs
from tests.training_folder.host import Host

ROWS = 8
STEPS = 20
OPTIMIZERS = sorted({one.__name__ for one in registry("onnxfit.optimizers", Optimizer).values()})
# IoU has no gradient for boxes that do not touch, as those of an untrained network.
LOSSES = sorted({loss.__name__ for loss in registry("onnxfit.losses", Loss).values()} - {"IoU"})
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def operators_of_onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host has no operators in C++, whose results differ in the last bits."""
    monkeypatch.setenv(library.SWITCH, "off")


def batches(
    trainer: Trainer, count: int = STEPS, *, labels: str = ""
) -> list[dict[str, np.ndarray]]:
    """Inputs by name, and labels under "y:" and their outputs' names."""
    rng = np.random.default_rng(1)
    made = []
    for _ in range(count):
        batch = {}
        for name, spec in trainer._training.recipe.declared_batch.items():
            shape = tuple(size if isinstance(size, int) else ROWS for size in spec.shape)
            if labels == "texts" and name.startswith("y_true/"):
                batch[name] = rng.choice([[1, 2], [2, 1], [1, 1], [2, -1], [-1, -1]], ROWS)
            elif np.issubdtype(spec.dtype, np.integer):
                batch[name] = rng.integers(0, 3, shape).astype(spec.dtype)
            else:
                batch[name] = rng.uniform(0.1, 0.9, shape).astype(spec.dtype)
                if labels == "signs" and name.startswith("y_true/"):
                    batch[name] = np.where(batch[name] < 0.5, -1, 1).astype(spec.dtype)
                elif labels == "masks" and name.startswith("y_true/"):
                    batch[name] = np.round(batch[name])
                elif labels == "boxes" and name.startswith("y_true/"):
                    batch[name] = np.sort(batch[name], axis=1)
        made.append({name.replace("y_true/", "y:"): array for name, array in batch.items()})
    return made


def split(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The inputs and the labels, as a trainer takes them."""
    x = {name: array for name, array in arrays.items() if not name.startswith("y:")}
    y = {name[2:]: array for name, array in arrays.items() if name.startswith("y:")}
    return x, y or None


def step(trainer: Trainer, batch: Mapping[str, np.ndarray]) -> float:
    x, y = split(batch)
    weight = x.pop("sample_weight", None)
    loss: float = trainer.train_on_batch(x, y, weight)["loss"]
    return loss


def assert_same_training(
    trainer: Trainer, folder: Path, *, labels: str = "", exact: bool = True, **settings: Any
) -> Host:
    """A host and the trainer take the same steps, and have the same state afterwards."""
    host = Host(trainer.export_training(folder, **{"batch_size": ROWS, **settings}))
    data = batches(trainer, labels=labels)
    if settings.get("sample_weight"):
        for batch in data:
            batch["sample_weight"] = RNG.uniform(0.5, 2, ROWS).astype(np.float32)
    losses = [step(trainer, batch) for batch in data]
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose([host.train(batch) for batch in data], losses, **tolerance)
    assert_same_state(host, trainer, **tolerance)
    assert len(set(losses)) > STEPS // 2  # it trained
    return host


def assert_same_state(host: Host, trainer: Trainer, **tolerance: float) -> None:
    state = trainer.get_state()
    for name, array in {**state["weights"], **state["slots"]}.items():
        np.testing.assert_allclose(host.state[name], array, **tolerance, err_msg=name)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_alike_in_a_host(name: str, tmp_path: Path) -> None:
    trainer = Trainer(mlp(), loss="mse", optimizer=name.lower())
    assert_same_training(trainer, tmp_path)


def tokens() -> onnx.ModelProto:
    return onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        tokens (float[N, 5, 2] x) => (float[N, 5, 3] y)
        <float[2, 3] w = {0.1, -0.2, 0.3, 0.5, 0.2, -0.1}> { y = MatMul(x, w) }""")


def log_probabilities() -> onnx.ModelProto:
    model = mlp()
    model.graph.node[-1].output[0] = "logits"
    model.graph.node.append(onnx.helper.make_node("LogSoftmax", ["logits"], ["y"]))
    return model


BOXES = ("GIoU", "DIoU", "CIoU")
MODELS_OF_LOSSES = {
    "CTC": tokens,
    "CausalLM": tokens,
    "GaussianNLL": lambda: mlp((4, 8, 4)),
    **dict.fromkeys(BOXES, lambda: mlp((4, 8, 4))),
    "NLL": log_probabilities,
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_every_loss_trains_alike_in_a_host(name: str, optimizer: str, tmp_path: Path) -> None:
    trainer = Trainer(MODELS_OF_LOSSES.get(name, mlp)(), loss=name, optimizer=optimizer)
    signs = ("Hinge", "SquaredHinge", "SoftMargin", "HingeEmbedding")
    kinds = {**dict.fromkeys(signs, "signs"), **dict.fromkeys(BOXES, "boxes")}
    labels = {"CTC": "texts", "LovaszHinge": "masks", **kinds}.get(name, "")
    assert_same_training(trainer, tmp_path, labels=labels)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (onnxfit.losses.CrossEntropy(ignore_index=-100), (0, 2, None, -100)),
        ("mse", (None, None, None, None)),
        ("poisson", (0, None, None, None)),
        ("hinge", (-1, 1, [-1, 1], None)),
    ],
)
def test_the_manifest_says_which_labels_a_loss_reads(
    loss: Any, expected: tuple[Any, ...], tmp_path: Path
) -> None:
    folder = Trainer(mlp(), loss=loss).export_training(tmp_path)
    graphs = json.loads((folder / "manifest.json").read_text())["graphs"]
    for name in ("train", "evaluate"):
        (labels,) = [t["labels"] for t in graphs[name]["inputs"] if t["role"] == "y"]
        assert labels == dict(zip(("least", "greatest", "values", "ignored"), expected))


SETTINGS: dict[str, dict[str, Any]] = {
    "l1": {"penalty": 0.01},
    "elastic net": {"penalty": onnxfit.penalties.ElasticNet(0.01, 0.02)},
    "clip norm": {"clip_norm": 0.1},
    "clip value": {"clip_value": 0.01, "optimizer": "adam"},
    "momentum": {"optimizer": onnxfit.optimizers.SGD(0.1, momentum=0.9)},
    "decay": {"optimizer": onnxfit.optimizers.AdamW(0.01, weight_decay=0.1)},
    "averages": {"optimizer": onnxfit.optimizers.Adam(0.01, ema_momentum=0.9)},
    "a large rate": {"optimizer": 0.3},
    "float64 bounds": {"clip_norm": float("inf")},
    "groups": {
        "optimizer": onnxfit.optimizers.Groups(
            [
                {"weights": "fc0.*", "learning_rate": 0.01, "weight_decay": 0.1},
                {"weights": "*.bias", "learning_rate": onnxfit.schedules.Step(0.1, 2, 0.5)},
            ],
            default=onnxfit.optimizers.Adam(0.002),
            layer_decay=0.75,
        )
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_train_alike_in_a_host(name: str, tmp_path: Path) -> None:
    trainer = Trainer(mlp(), **{"loss": "mse", **SETTINGS[name]})
    assert_same_training(trainer, tmp_path)


@pytest.mark.parametrize("target", ["web", "webgpu"])
def test_groups_train_in_a_browsers_step_as_in_ours(target: str, tmp_path: Path) -> None:
    trainer = Trainer(mlp(), loss="mse", **SETTINGS["groups"])
    host = assert_same_training(trainer, tmp_path, exact=False, target=target)
    scalars = host.graphs["scalars"]["inputs"]
    assert [t["schedule"]["name"] for t in scalars if t["role"] == "schedule"] == ["Step"]


def own_loss() -> onnx.ModelProto:
    return onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        own (float[N, 2] x, float[N, 1] labels) => (float loss)
        <float[2, 1] w = {0.5, -0.5}, float zero = {0}> {
            y = MatMul(x, w)
            d = Sub(y, labels)
            s = Mul(d, d)
            loss = ReduceMean<keepdims = 0>(s)
        }""")


NETWORKS = {
    "batch normalization": lambda: Trainer(
        # the bias before BatchNormalization has no gradient, and a small eps would raise its noise
        convolutional(),
        loss="cross_entropy",
        optimizer=onnxfit.optimizers.Adam(0.01, eps=0.1),
    ),
    "dropout": lambda: Trainer(convolutional(dropout=0.5), loss="cross_entropy", seed=7),
    "two inputs": lambda: Trainer(two_inputs(), loss="mse", optimizer="adam"),
    "two outputs": lambda: Trainer(
        two_outputs(), loss={"a": "mse", "b": "mae"}, penalty=0.1, loss_weights={"a": 0.5}
    ),
    "a loss of its own": lambda: Trainer(own_loss(), optimizer="adam"),
    "a sum with a penalty": lambda: Trainer(
        mlp(), loss=MeanSquaredError(reduction="sum"), penalty=0.1, optimizer=0.001
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("batch_size", [ROWS, None])
def test_networks_train_alike_in_a_host(name: str, batch_size: int | None, tmp_path: Path) -> None:
    exact = batch_size is not None
    assert_same_training(NETWORKS[name](), tmp_path, exact=exact, batch_size=batch_size)


@pytest.mark.parametrize("reduction", ["mean", "weighted_mean", "sum"])
def test_sample_weights_train_alike_in_a_host(reduction: str, tmp_path: Path) -> None:
    loss = CrossEntropy(reduction=reduction)
    assert_same_training(Trainer(mlp(), loss=loss), tmp_path, sample_weight=True)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("target", ["web", "webgpu"])
def test_networks_train_in_a_browsers_step_as_in_ours(
    name: str, target: str, tmp_path: Path
) -> None:
    assert_same_training(NETWORKS[name](), tmp_path, exact=False, target=target)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_browsers_step_has_no_float64_and_few_scalars_enter_it(name: str, tmp_path: Path) -> None:
    trainer = Trainer(convolutional(dropout=0.3), loss="cross_entropy", optimizer=name.lower())
    folder = trainer.export_training(tmp_path, target="webgpu", batch_size=ROWS)
    manifest = manifest_of(folder)
    graph = manifest["graphs"]["train"]
    assert "step" not in {tensor["role"] for tensor in graph["inputs"]}
    scalars = [tensor for tensor in graph["inputs"] if tensor["role"] == "scalar"]
    outputs = manifest["graphs"]["scalars"]["outputs"]
    assert {t["name"] for t in scalars} == {t["name"] for t in outputs}
    assert all(np.prod(tensor["shape"]) <= 16 for tensor in scalars)
    train = onnx.load(folder / "train.onnx")
    assert all(len(node.output) == 1 for node in train.graph.node if node.op_type == "MaxPool")
    assert "MaxUnpool" not in {node.op_type for node in train.graph.node}
    inferred = onnx.shape_inference.infer_shapes(train, strict_mode=True)
    types = {v.type.tensor_type.elem_type for v in inferred.graph.value_info}
    assert onnx.TensorProto.DOUBLE not in types


@pytest.mark.parametrize("target", ["onnxruntime", "web"])
def test_a_frozen_backbone_is_in_the_folder_once(target: str, tmp_path: Path) -> None:
    trainer = Trainer(mlp((4, 400, 400, 3)), ["fc2.*"], loss="mse", optimizer="adam")
    host = assert_same_training(trainer, tmp_path, target=target)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes["model.onnx"] > 4 * 400 * 400
    assert all(size < 40_000 for name, size in sizes.items() if name != "model.onnx")
    assert {name: graph["external"] for name, graph in host.graphs.items() if name != "scalars"} == {
        "train": ["model.onnx"], "evaluate": ["model.onnx"], "predict": ["model.onnx"]
    }  # fmt: skip
    (tmp_path / "model.onnx").write_bytes(host.deploy())
    deployed = Host(tmp_path)
    deployed.state = host.state
    x = batches(trainer, 1)[0]["x"]
    outputs = deployed.run("predict", {"x": x})["y"]
    np.testing.assert_allclose(outputs, trainer.predict(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("target", ["onnxruntime", "web"])
def test_the_manifest_says_whether_a_step_draws_random_numbers(target: str, tmp_path: Path) -> None:
    dropping = NETWORKS["dropout"]().export_training(tmp_path / "a", target=target)
    assert manifest_of(dropping)["random"] == {"seed": 7, "draws": True}
    plain = Trainer(mlp(), loss="mse").export_training(tmp_path / "b", target=target)
    assert manifest_of(plain)["random"] == {"seed": 0, "draws": False}


# ---------------------------------------------------------------------- there and back


def network() -> Trainer:
    return Trainer(
        convolutional(dropout=0.3), loss="cross_entropy", optimizer="adam", metrics=["accuracy"]
    )


def test_a_training_goes_to_a_host_and_comes_back_as_if_it_had_never_left(tmp_path: Path) -> None:
    whole, part = network(), network()
    data = batches(whole, 30)
    expected = [step(whole, batch) for batch in data]
    losses = [step(part, batch) for batch in data[:10]]
    host = Host(part.export_training(tmp_path, batch_size=ROWS))
    losses += [host.train(batch) for batch in data[10:20]]
    part.import_state(host.save(tmp_path / "host.safetensors"))
    assert part.global_step == part.global_batch == 20
    assert part.samples_seen == 20 * ROWS
    losses += [step(part, batch) for batch in data[20:]]
    assert losses == expected
    assert_same_values(part.get_state(), whole.get_state())


def assert_same_values(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    np.testing.assert_equal(dict(one), dict(other))


def test_a_folder_is_loaded_as_the_trainer_it_was_written_from(tmp_path: Path) -> None:
    trainer = network()
    data = batches(trainer, 10)
    for batch in data[:5]:
        step(trainer, batch)
    trainer.learning_rate = 0.002
    loaded = Trainer.load(trainer.export_training(tmp_path))
    assert loaded.settings == trainer.settings
    assert loaded.learning_rate == 0.002
    assert_same_values(loaded.get_state(), trainer.get_state())
    assert [step(loaded, b) for b in data[5:]] == [step(trainer, b) for b in data[5:]]


def test_loaded_folders_stem_from_the_same_model(tmp_path: Path) -> None:
    trainer = network()
    sources = []
    for name in "ab":
        folder = trainer.export_training(tmp_path / name)
        sources.append(manifest_of(folder)["source"])
        trainer = Trainer.load(folder)
        step(trainer, batches(trainer, 1)[0])
    assert sources[0] == sources[1]
    other = Trainer(mlp(), loss="mse").export_training(tmp_path / "c")
    assert manifest_of(other)["source"] != sources[0]


def manifest_of(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return manifest


def test_a_host_deploys_its_weights_without_protobuf(tmp_path: Path) -> None:
    trainer = network()
    host = Host(trainer.export_training(tmp_path))
    for batch in batches(trainer, 3):
        host.train(batch)
    deployed = host.deploy()
    trainer.import_state(host.save(tmp_path / "host.safetensors"))
    assert deployed == trainer.export(lineage=False).SerializeToString(deterministic=True)
    x = batches(trainer, 1)[0]["x"]
    (there,) = onnxruntime.InferenceSession(deployed).run(None, {"x": x})
    np.testing.assert_array_equal(there, trainer.predict(x))
    np.testing.assert_allclose(host.run("predict", {"x": x})["logits"], there, rtol=1e-5, atol=1e-6)


def test_a_host_evaluates_batches_of_any_size(tmp_path: Path) -> None:
    trainer = network()
    host = Host(trainer.export_training(tmp_path, batch_size=ROWS))
    rng = np.random.default_rng(2)
    x = rng.normal(size=(11, 1, 8, 8)).astype(np.float32)
    y = rng.integers(0, 3, 11)
    result = host.run("evaluate", {"x": x, "y:logits": y})
    assert host.mean_loss([result], [11]) == pytest.approx(trainer.evaluate(x, y)["loss"], rel=1e-5)
    assert (result["logits"].argmax(1) == y).mean() == pytest.approx(
        trainer.evaluate(x, y)["accuracy"]
    )


FITS: dict[str, Callable[[], Trainer]] = {
    "dropout": NETWORKS["dropout"],
    "two outputs": NETWORKS["two outputs"],
    "a sum with a penalty": NETWORKS["a sum with a penalty"],
    "weights in the divisor": lambda: Trainer(
        mlp(), loss=CrossEntropy(reduction="weighted_mean", class_weights=(1, 2, 3)), seed=5
    ),
}


@pytest.mark.parametrize("name", FITS)
def test_a_host_shuffles_and_sums_up_epochs_as_fit_does(name: str, tmp_path: Path) -> None:
    here, there = FITS[name](), FITS[name]()
    there.epoch = here.epoch = 3
    host = Host(there.export_training(tmp_path))
    parts = batches(here, 3)
    arrays = {n: np.concatenate([part[n] for part in parts])[:-3] for n in parts[0]}
    x, y = split(arrays)
    history = here.fit(x, y, epochs=2, batch_size=ROWS, verbose=0)
    np.testing.assert_allclose(host.fit(arrays, 2, ROWS), history.history["loss"], rtol=1e-5)
    there.import_state(host.save(tmp_path / "host.safetensors"))
    for name, counter in here.get_state()["counters"].items():
        assert there.get_state()["counters"][name] == counter
    assert_same_state(host, here, rtol=1e-4, atol=1e-6)


def test_a_learning_rate_that_a_host_sets_comes_back(tmp_path: Path) -> None:
    trainer = Trainer(mlp(), loss="mse", optimizer="adam")
    host = Host(trainer.export_training(tmp_path))
    host.state["counter/learning_rate"] = np.array(0.5)
    host.count(epoch=3)
    trainer.import_state(host.save(tmp_path / "host.safetensors"))
    assert trainer.learning_rate == 0.5
    assert trainer.epoch == 3


def test_a_schedule_is_named_and_its_rate_is_no_counter(tmp_path: Path) -> None:
    optimizer = onnxfit.optimizers.SGD(
        onnxfit.schedules.Exponential(0.1, decay_steps=10, decay_rate=0.5)
    )
    manifest = manifest_of(
        Trainer(mlp(), loss="mse", optimizer=optimizer).export_training(tmp_path)
    )
    assert manifest["learning_rate"]["schedule"]["name"] == "Exponential"
    names = [entry["name"] for entry in manifest["state"]]
    assert "counter/epoch" in names
    assert "counter/learning_rate" not in names
    assert Trainer.load(tmp_path).learning_rate == 0.1


def test_counters_have_names_that_no_tensor_has(tmp_path: Path) -> None:
    model = linear(2, 1, w=0.5)
    model.graph.initializer[0].name = "counter/epoch"
    model.graph.node[0].input[1] = "counter/epoch"
    trainer = Trainer(model, loss="mse")
    host = assert_same_training(trainer, tmp_path)
    assert host.counters["epoch"] == "counter_2/epoch"


def test_a_clip_norm_of_infinity_comes_back(tmp_path: Path) -> None:
    trainer = Trainer(mlp(), loss="mse", clip_norm=float("inf"))
    assert Trainer.load(trainer.export_training(tmp_path)).settings["clip_norm"] == float("inf")


def test_a_loss_of_the_users_own_is_given_again(tmp_path: Path) -> None:
    class Own(MeanSquaredError):
        pass

    folder = Trainer(mlp(), loss=Own()).export_training(tmp_path)
    assert manifest_of(folder)["losses"][0]["name"] == "Own"
    assert manifest_of(folder)["losses"][0]["settings"] is None
    with pytest.raises(CheckpointError, match="custom loss 'Own'"):
        Trainer.load(folder)
    assert isinstance(Trainer.load(folder, loss=Own()).objectives["y"].loss, Own)


# ---------------------------------------------------------------------- refusals


def frozen() -> Trainer:
    trainer = Trainer(mlp(), loss="mse")
    trainer.frozen = "fc0.*"
    return trainer


REFUSED = {
    "no loss": (lambda: Trainer(mlp()), "has no loss"),
    "accumulate": (lambda: Trainer(mlp(), loss="mse", accumulate=2), "accumulates gradients"),
    "frozen": (frozen, "has frozen tensors"),
    "adapters": (
        lambda: Trainer(mlp(), loss="mse", adapters=onnxfit.LoRA(rank=2, dora=True)),
        "trains adapters with dora=True",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_training_that_a_folder_cannot_hold_is_refused(name: str, tmp_path: Path) -> None:
    make, message = REFUSED[name]
    with pytest.raises(SettingError, match=message):
        make().export_training(tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": "wbe"}, "wbe"),
        ({"include": ["trian"]}, "train"),
        ({"include": []}, "at least one"),
        ({"batch_size": 0}, "batch_size must be >= 1"),
    ],
)
def test_impossible_arguments_are_refused(
    arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingError, match=message):
        Trainer(mlp(), loss="mse").export_training(tmp_path / "new", **arguments)
    assert not (tmp_path / "new").exists()


def test_only_the_graphs_that_are_asked_for_are_written(tmp_path: Path) -> None:
    trainer = Trainer(mlp(), loss="mse")
    trainer.export_training(tmp_path)
    (tmp_path / "index.html").write_text("mine")
    trainer.export_training(tmp_path, include=["predict"])
    assert {path.name for path in tmp_path.iterdir()} == {
        "index.html", "manifest.json", "model.onnx", "predict.onnx", "state.safetensors"
    }  # fmt: skip


def test_an_export_that_fails_leaves_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(mlp(), loss="mse")
    before = contents(trainer.export_training(tmp_path))
    step(trainer, batches(trainer, 1)[0])

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="disk is full"):
            trainer.export_training(tmp_path)
    assert contents(tmp_path) == before
    assert contents(trainer.export_training(tmp_path)) != before


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
