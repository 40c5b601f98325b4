"""Tensors that losses train: as in PyTorch, in every state of a training, and in no model."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from safetensors.numpy import load_file

import onnxfit
from onnxfit import LoRA, Trainer, losses
from onnxfit.callbacks import LambdaCallback
from onnxfit.errors import SettingError
from onnxfit.losses import ArcFace, CosFace, Function, InfoNCE, Joint, UncertaintyWeights
from onnxfit.optimizers import SGD, Adam
from tests.distributed.threads import on_ranks
from tests.training_folder.host import Host

RNG = np.random.default_rng(0)
BACKENDS = ("full", "forward_backward", "in_place")
ROWS, STEPS, RATE = 12, 10, 0.1
X = RNG.normal(size=(ROWS, 6))
CLASSES = RNG.integers(0, 5, ROWS)
TARGET = RNG.normal(size=(ROWS, 4))


def network(outputs: str, nodes: str, dtype: str = "double", **weights: tuple[int, ...]):
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> net ({dtype}[N, 6] x) => ({outputs}) {{ {nodes} }}'
    )
    rng = np.random.default_rng(1)
    for name, shape in weights.items():
        array = rng.normal(size=shape).astype(np.float32 if dtype == "float" else np.float64)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


EMBEDDING = network("double[N, 4] y", "h = Tanh(x)  y = MatMul(h, w)", w=(6, 4))
TWO = network(
    "double[N, 4] y, double[N, 5] z", "y = MatMul(x, w)  z = MatMul(x, v)", w=(6, 4), v=(6, 5)
)
LOSSES_OF_TWO = {"y": "mse", "z": "cross_entropy"}
LABELS_OF_TWO = {"y": TARGET, "z": CLASSES}


def by_torch(
    trainer: Trainer, compute: Callable[[dict[str, Any]], Any], steps: int = STEPS
) -> tuple[list[float], dict[str, np.ndarray]]:
    """The losses and the weights of SGD in PyTorch, from the weights of a trainer on."""
    torch = pytest.importorskip("torch")
    weights = {
        name: torch.tensor(array, requires_grad=True)
        for name, array in trainer.get_weights().items()
    }
    optimizer = torch.optim.SGD(weights.values(), lr=RATE)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = compute(weights)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found, {name: weight.detach().numpy() for name, weight in weights.items()}


def assert_trains_as(trainer: Trainer, x: Any, y: Any, compute: Callable[..., Any]) -> None:
    begin = trainer.get_weights()
    expected, weights = by_torch(trainer, compute)
    found = [trainer.train_on_batch(x, y)["loss"] for _ in range(STEPS)]
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    for name, weight in trainer.get_weights().items():
        np.testing.assert_allclose(weight, weights[name], rtol=1e-8, atol=1e-10, err_msg=name)
        assert not np.array_equal(weight, begin[name]), name


def margin_in_torch(weights: dict[str, Any], with_margin: Callable[[Any], Any]) -> Any:
    import torch
    from torch.nn import functional

    y = torch.tensor(X).tanh() @ weights["w"]
    cosine = functional.normalize(y) @ functional.normalize(weights["loss/centers"]).T
    own = functional.one_hot(torch.tensor(CLASSES), 5).bool()
    logits = torch.where(own, with_margin(cosine), cosine) * 8
    return functional.cross_entropy(logits, torch.tensor(CLASSES))


def angular(cosine: Any) -> Any:
    import torch

    moved = torch.cos(torch.acos(cosine) + 0.5)
    return torch.where(cosine > math.cos(math.pi - 0.5), moved, cosine - 0.5 * math.sin(0.5))


@pytest.mark.torch
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("loss", "with_margin"),
    [(ArcFace(5, scale=8), angular), (CosFace(5, scale=8), lambda cosine: cosine - 0.35)],
    ids=["arcface", "cosface"],
)
def test_margins_train_as_in_torch(loss: Any, with_margin: Any, backend: str) -> None:
    trainer = Trainer(EMBEDDING, loss=loss, optimizer=RATE, backend=backend)
    assert_trains_as(trainer, X, CLASSES, lambda weights: margin_in_torch(weights, with_margin))


def test_the_margin_of_arcface_beyond_pi() -> None:
    """An embedding opposite to its center has a finite loss, and a gradient towards the center."""
    graph = ArcFace(2, scale=1, reduction="sum").build_onnx_function(
        ("b", 2), np.float64, gradient=True
    )
    session = onnxruntime.InferenceSession(graph.SerializeToString())
    feeds = {
        "y_true": np.array([0, 0]),
        "y_pred": np.array([[-1.0, 1e-3], [1.0, 0.0]]),
        "centers": np.array([[1.0, 0.0], [0.0, 1.0]]),
    }
    loss, gradient = session.run(None, feeds)
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()
    cosines = np.array([[-1.0 - 0.5 * math.sin(0.5), 1e-3], [math.cos(0.5), 0]])
    expected = (np.log(np.exp(cosines).sum(1)) - cosines[:, 0]).sum()
    assert loss == pytest.approx(expected, rel=1e-5)


def uncertain(weights: dict[str, Any]) -> Any:
    import torch
    from torch.nn import functional

    x = torch.tensor(X)
    values = functional.mse_loss(x @ weights["w"], torch.tensor(TARGET))
    classes = functional.cross_entropy(x @ weights["v"], torch.tensor(CLASSES))
    s, t = weights["loss/y/log_variance"], weights["loss/z/log_variance"]
    return torch.exp(-s) * values / 2 + s / 2 + torch.exp(-t) * classes + t / 2


@pytest.mark.torch
@pytest.mark.parametrize("backend", BACKENDS)
def test_uncertainty_weights_train_as_in_torch(backend: str) -> None:
    weights = UncertaintyWeights(initial=0.3)
    trainer = Trainer(
        TWO, loss=LOSSES_OF_TWO, loss_weights=weights, optimizer=RATE, backend=backend
    )
    assert_trains_as(trainer, X, LABELS_OF_TWO, uncertain)


def test_the_loss_of_an_evaluation_does_not_depend_on_the_batch_size() -> None:
    loss = {"y": "mse", "z": losses.CrossEntropy(ignore_index=0)}
    trainer = Trainer(TWO, loss=loss, loss_weights=UncertaintyWeights(), penalty={"w": 0.1})
    trainer.fit(X, LABELS_OF_TWO, epochs=2, batch_size=5, verbose=0)
    whole = trainer.evaluate(X, LABELS_OF_TWO, batch_size=ROWS)
    s = {name[5:6]: float(array) for name, array in trainer.loss_tensors().items()}
    expected = math.exp(-s["y"]) * whole["y_loss"] / 2 + math.exp(-s["z"]) * whole["z_loss"]
    expected += (s["y"] + s["z"]) / 2 + 0.1 * np.square(trainer.get_weights()["w"]).sum()
    assert whole["loss"] == pytest.approx(expected)
    for rows in (1, 5):
        assert trainer.evaluate(X, LABELS_OF_TWO, batch_size=rows) == pytest.approx(whole)


def scaled(op: Any, y_true: Any, y_pred: Any, log_scale: Any, shift: Any) -> Any:
    """A normal distribution with a learned deviation of each feature."""
    error = (y_pred + shift - y_true) * op.Exp(-log_scale)
    return op.ReduceSum(error * error / 2 + log_scale, [1], keepdims=0)


WEIGHTS = {"log_scale": np.zeros(4), "shift": [[0.5, 0, 0, 0]]}


def scaled_in_torch(weights: dict[str, Any]) -> Any:
    import torch

    y = torch.tensor(X).tanh() @ weights["w"]
    error = y + weights["loss/shift"] - torch.tensor(TARGET)
    error = error * torch.exp(-weights["loss/log_scale"])
    return (error**2 / 2 + weights["loss/log_scale"]).sum(1).mean()


@pytest.mark.torch
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("joint", [False, True])
def test_tensors_of_functions_train_as_in_torch(joint: bool, backend: str) -> None:
    loss: Any = Function(scaled, labels="double[b, 4]", weights=WEIGHTS)
    y: Any = TARGET
    if joint:
        loss = Joint(scaled, "y", labels="double[b, 4]", weights=WEIGHTS)
    trainer = Trainer(EMBEDDING, loss=loss, optimizer=RATE, backend=backend)
    assert_trains_as(trainer, X, y, scaled_in_torch)


@pytest.mark.torch
def test_a_function_that_infers_its_labels_has_tensors_too() -> None:
    trainer = Trainer(EMBEDDING, loss=Function(scaled, weights=WEIGHTS), optimizer=RATE)
    assert_trains_as(trainer, X, TARGET, scaled_in_torch)


@pytest.mark.torch
def test_the_temperature_of_clip_trains_without_a_tensor_of_the_file() -> None:
    towers = network("double[N, 4] y, double[N, 4] z", "y = MatMul(x, w)  z = MatMul(x, v)",
                     w=(6, 4), v=(6, 4))  # fmt: skip

    def clip(weights: dict[str, Any]) -> Any:
        import torch
        from torch.nn import functional

        x = torch.tensor(X)
        y, z = functional.normalize(x @ weights["w"]), functional.normalize(x @ weights["v"])
        logits, rows = weights["loss/scale"].exp() * y @ z.T, torch.arange(len(x))
        either = functional.cross_entropy(logits, rows), functional.cross_entropy(logits.T, rows)
        return sum(either) / 2

    loss = InfoNCE(["y", "z"], temperature=0.5, learn_temperature=True)
    trainer = Trainer(towers, loss=loss, optimizer=RATE)
    assert trainer.loss_tensors()["loss/scale"] == pytest.approx(math.log(2))
    assert_trains_as(trainer, X, None, clip)


# ---------------------------------------------------------------------- the state of a training


def arcface(**settings: Any) -> Trainer:
    return Trainer(EMBEDDING, loss=ArcFace(5, scale=8), optimizer=Adam(0.05), **settings)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_fit_resumes_in_the_middle_of_an_epoch(tmp_path: Path, backend: str) -> None:
    whole, begun = arcface(backend=backend), arcface(backend=backend)
    whole.fit(X, CLASSES, epochs=3, batch_size=4, verbose=0)

    def stop(batch: int, logs: Any) -> None:
        if begun.global_batch == 5:
            begun.save(tmp_path / "run.onnxfit")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        begun.fit(X, CLASSES, epochs=3, batch_size=4, verbose=0,
                  callbacks=[LambdaCallback(on_train_batch_end=stop)])  # fmt: skip
    resumed = Trainer.load(tmp_path / "run.onnxfit")
    resumed.fit(X, CLASSES, epochs=3, batch_size=4, verbose=0)
    assert resumed.history.history == whole.history.history
    for name, weight in whole.get_weights().items():
        np.testing.assert_array_equal(resumed.get_weights()[name], weight)


def test_learned_weights_of_losses_resume(tmp_path: Path) -> None:
    settings: Any = {"loss": LOSSES_OF_TWO, "loss_weights": UncertaintyWeights()}
    trainer = Trainer(TWO, **settings)
    trainer.fit(X, LABELS_OF_TWO, batch_size=4, verbose=0)
    trainer.save(tmp_path / "run.onnxfit")
    loaded = Trainer.load(tmp_path / "run.onnxfit")
    assert loaded.settings["loss_weights"] == UncertaintyWeights()
    for one in (trainer, loaded):
        one.fit(X, LABELS_OF_TWO, epochs=2, batch_size=4, verbose=0)
    assert trainer.history.history["loss"][-1] == loaded.history.history["loss"][-1]


def test_a_function_is_passed_again_and_finds_its_tensors(tmp_path: Path) -> None:
    loss = Function(scaled, weights=WEIGHTS)
    trainer = Trainer(EMBEDDING, loss=loss, optimizer=RATE)
    trainer.train_on_batch(X, TARGET)
    trainer.save(tmp_path / "run.onnxfit")
    loaded = Trainer.load(tmp_path / "run.onnxfit", loss=loss)
    for name, array in trainer.loss_tensors().items():
        np.testing.assert_array_equal(loaded.loss_tensors()[name], array)
    with pytest.warns(UserWarning, match="loss/log_scale"):
        other = Trainer.load(tmp_path / "run.onnxfit", loss="mse")
    assert list(other.get_weights()) == ["w"]
    np.testing.assert_array_equal(other.get_weights()["w"], trainer.get_weights()["w"])


def test_a_step_can_be_undone_and_a_failed_step_changes_nothing() -> None:
    trainer = arcface()
    trainer.train_on_batch(X, CLASSES)
    before = trainer.get_weights()
    trainer.train_on_batch(X, CLASSES)
    trainer.revert_step()
    for name, array in before.items():
        np.testing.assert_array_equal(trainer.get_weights()[name], array)
    own = trainer.loss_tensors()
    trainer.set_weights({"loss/centers": 2 * own["loss/centers"]})
    np.testing.assert_array_equal(trainer.loss_tensors()["loss/centers"], 2 * own["loss/centers"])


def test_no_exported_model_has_them(tmp_path: Path) -> None:
    trainer = arcface()
    trainer.train_on_batch(X, CLASSES)
    trainer.save(tmp_path / "run.onnxfit")
    read = onnx.load(trainer.model_snapshot().write(tmp_path / "model.onnx"))
    for model in (trainer.export(), trainer.model, read):
        assert [tensor.name for tensor in model.graph.initializer] == ["w"]
        assert [value.name for value in model.graph.output] == ["y"]
    session = onnxruntime.InferenceSession(trainer.export().SerializeToString())
    np.testing.assert_array_equal(session.run(None, {"x": X})[0], trainer.predict(X))
    found = trainer.loss_tensors(tmp_path / "centers.safetensors")
    assert list(found) == ["loss/centers"]
    assert found["loss/centers"].shape == (5, 4)
    stored = load_file(tmp_path / "centers.safetensors")
    np.testing.assert_array_equal(stored["loss/centers"], found["loss/centers"])
    assert Trainer(EMBEDDING, loss="mse").loss_tensors() == {}


def test_the_summary_lists_them() -> None:
    lines = arcface().summary().splitlines()
    assert [line.split() for line in lines if line.startswith("loss/centers")] == [
        ["loss/centers", "5×4", "20", "yes", "of", "the", "loss"]
    ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_patterns_select_them(backend: str) -> None:
    """They train beside selected weights, and are constants if a pattern excludes them."""
    assert list(arcface(weights=["w"]).get_weights()) == ["w", "loss/centers"]
    trainer = arcface(weights="!loss/*", backend=backend)
    first = trainer.loss_tensors()["loss/centers"]
    trainer.fit(X, CLASSES, verbose=0)
    assert list(trainer.get_weights()) == ["w"]
    np.testing.assert_array_equal(trainer.loss_tensors()["loss/centers"], first)
    frozen = arcface(weights="loss/*", backend=backend)
    frozen.fit(X, CLASSES, verbose=0)
    assert list(frozen.get_weights()) == ["loss/centers"]


def test_a_penalty_counts_them_only_by_name() -> None:
    def penalized(penalty: Any) -> float:
        return Trainer(
            EMBEDDING, loss=ArcFace(5), penalty=penalty, weights=["w"]
        ).evaluate(X, CLASSES)["loss"]  # fmt: skip

    plain, weight = penalized(None), Trainer(EMBEDDING, loss=ArcFace(5)).get_weights()
    own, centers = (np.square(weight[name]).sum() for name in ("w", "loss/centers"))
    assert penalized(0.1) == pytest.approx(plain + 0.1 * own)
    assert penalized({"loss/*": 0.1}) == pytest.approx(plain + 0.1 * centers)


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_accumulated_batches_train_them_like_one(backend: str) -> None:
    whole = Trainer(EMBEDDING, loss=ArcFace(5), optimizer=SGD(RATE), backend=backend)
    parts = Trainer(EMBEDDING, loss=ArcFace(5), optimizer=SGD(RATE), backend=backend, accumulate=2)
    whole.fit(X, CLASSES, batch_size=12, shuffle=False, verbose=0)
    parts.fit(X, CLASSES, batch_size=6, shuffle=False, verbose=0)
    for name, array in whole.get_weights().items():
        np.testing.assert_allclose(parts.get_weights()[name], array, rtol=1e-9, err_msg=name)


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
@pytest.mark.parametrize("case", ["centers", "variances"])
def test_ranks_train_them_like_one_process(case: str, backend: str) -> None:
    def fit(communicator: Any = None) -> Any:
        if case == "centers":
            trainer = arcface(distribute=communicator, backend=backend)
            trainer.fit(X, CLASSES, epochs=2, batch_size=5, verbose=0)
        else:
            trainer = Trainer(
                TWO, loss=LOSSES_OF_TWO, loss_weights=UncertaintyWeights(), optimizer=RATE,
                penalty={"w": 0.1}, distribute=communicator, backend=backend,
            )  # fmt: skip
            trainer.fit(X, LABELS_OF_TWO, epochs=2, batch_size=5, verbose=0)
        return trainer.history.history["loss"], trainer.get_weights()

    losses_alone, weights_alone = fit()
    for found, weights in on_ranks(2, fit):
        np.testing.assert_allclose(found, losses_alone, rtol=1e-9)
        for name, array in weights_alone.items():
            np.testing.assert_allclose(weights[name], array, rtol=1e-8, err_msg=name)


@pytest.mark.parametrize("target", ["onnxruntime", "web", "webgpu"])
@pytest.mark.parametrize("case", ["centers", "variances"])
def test_hosts_train_them(case: str, target: str, tmp_path: Path) -> None:
    if case == "centers":
        model = network("float[N, 4] y", "y = MatMul(x, w)", "float", w=(6, 4))
        trainer, y = Trainer(model, loss=ArcFace(5, scale=8)), {"y:y": CLASSES}
        labels: Any = CLASSES
    else:
        nodes = "y = MatMul(x, w)  z = MatMul(x, v)"
        model = network("float[N, 4] y, float[N, 5] z", nodes, "float", w=(6, 4), v=(6, 5))
        trainer = Trainer(model, loss=LOSSES_OF_TWO, loss_weights=UncertaintyWeights())
        labels, y = LABELS_OF_TWO, {"y:y": TARGET.astype(np.float32), "y:z": CLASSES}
    folder = trainer.export_training(tmp_path / "folder", target=target)
    x = X.astype(np.float32)
    assert Trainer.load(folder).evaluate(x, labels) == trainer.evaluate(x, labels)
    host = Host(folder)
    arrays = {"x": x, **y}
    for _ in range(4):
        loss = trainer.train_on_batch(x, labels)["loss"]
        assert host.train(arrays) == pytest.approx(loss, rel=1e-5)
    host.save(tmp_path / "state.safetensors")
    own = trainer.loss_tensors()
    trainer.import_state(tmp_path / "state.safetensors")
    for name, array in own.items():
        np.testing.assert_allclose(trainer.loss_tensors()[name], array, rtol=1e-4, atol=1e-6)
    deployed = onnx.ModelProto.FromString(host.deploy())
    assert {t.name for t in deployed.graph.initializer} == {t.name for t in model.graph.initializer}


def test_adapters_and_centers_train_together(tmp_path: Path) -> None:
    trainer = arcface(adapters=LoRA(rank=2))
    first = trainer.loss_tensors()["loss/centers"]
    history = trainer.fit(X, CLASSES, epochs=3, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]
    assert not np.array_equal(trainer.loss_tensors()["loss/centers"], first)
    assert [tensor.name for tensor in trainer.export().graph.initializer] == ["w"]
    trainer.save(tmp_path / "run.onnxfit", adapters_only=True)
    loaded = Trainer.load(tmp_path / "run.onnxfit", model_onnx=EMBEDDING)
    assert loaded.evaluate(X, CLASSES) == trainer.evaluate(X, CLASSES)


def test_centers_train_with_an_integer_model() -> None:
    """Evaluation runs the integer file, and the loss on its outputs with the centers."""
    model = network("float[N, 4] y", "h = Tanh(x)  y = MatMul(h, w)", "float", w=(6, 4))
    x = X.astype(np.float32)
    trainer = Trainer(onnxfit.quantize(model, x), loss=ArcFace(5, scale=8), optimizer=Adam(0.05))
    history = trainer.fit(x, CLASSES, epochs=8, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]
    logs = trainer.evaluate(x, CLASSES)
    y, centers = trainer.predict(x), trainer.loss_tensors()["loss/centers"]
    unit = [a / np.linalg.norm(a, axis=1, keepdims=True) for a in (y, centers)]
    cosine = np.clip(unit[0] @ unit[1].T, -1, 1)
    own = np.arange(5) == CLASSES[:, None]
    logits = 8 * np.where(own, np.cos(np.arccos(cosine) + 0.5), cosine)
    expected = np.log(np.exp(logits).sum(1)) - logits[own]
    assert logs["loss"] == pytest.approx(expected.mean(), rel=1e-4)


def test_a_loss_in_a_model_has_its_tensors() -> None:
    model = onnxfit.add_loss(EMBEDDING, ArcFace(5))
    assert {"w", "loss/centers"} <= {tensor.name for tensor in model.graph.initializer}
    session = onnxruntime.InferenceSession(model.SerializeToString())
    loss = session.run(["train/loss"], {"x": X, "y_true/y": CLASSES})[0]
    expected = Trainer(EMBEDDING, loss=ArcFace(5)).evaluate(X, CLASSES)["loss"]
    assert loss == pytest.approx(expected)


def test_the_seed_decides_the_centers() -> None:
    def centers(seed: int) -> np.ndarray:
        return Trainer(EMBEDDING, loss=ArcFace(5), seed=seed).loss_tensors()["loss/centers"]

    np.testing.assert_array_equal(centers(1), centers(1))
    assert not np.array_equal(centers(1), centers(2))


def test_errors_say_what_is_wrong() -> None:
    def build(loss: Any, model: onnx.ModelProto = EMBEDDING, **settings: Any) -> Trainer:
        return Trainer(model, loss=loss, **settings)

    with pytest.raises(SettingError, match="finite numbers"):
        build(Function(scaled, weights={**WEIGHTS, "shift": np.array([np.nan])}))
    with pytest.raises(SettingError, match="must accept"):
        Function(scaled, weights={"other": 1})
    with pytest.raises(SettingError, match="parameters of the function"):
        Function(scaled, weights=[1, 2])
    with pytest.raises(SettingError, match="several losses"):
        build("mse", loss_weights=UncertaintyWeights())
    with pytest.raises(SettingError, match="known number of features"):
        build(ArcFace(5), network("double[N, M, 1] y", "axes = Constant<value_ints = [2]>()"
              "y = Unsqueeze(x, axes)"), weights="loss/*")  # fmt: skip
    with pytest.raises(SettingError, match="as class_weights"):
        ArcFace(5, class_weights=[1, 2])
    with pytest.raises(SettingError, match="has no loss of one output"):
        build(ArcFace(5), metrics="accuracy")
    taken = network("double[N, 4] y", "y = MatMul(x, w)", w=(6, 4))
    taken.graph.initializer[0].name = taken.graph.node[0].input[1] = "loss/centers"
    with pytest.raises(SettingError, match="already has a value of this name"):
        build(ArcFace(5), taken)
    with pytest.raises(onnxfit.errors.DataError, match="0 to 4"):
        build(ArcFace(5)).evaluate(X, CLASSES + 1)


def test_excluded_tensors_stay_excluded(tmp_path: Path) -> None:
    trainer = arcface(weights=["*", "!loss/*"])
    trainer.fit(X, CLASSES, verbose=0)
    loaded = Trainer.load(trainer.save(tmp_path / "run.onnxfit"))
    assert list(loaded.get_weights()) == ["w"]
    assert loaded.evaluate(X, CLASSES) == trainer.evaluate(X, CLASSES)


def test_a_margin_is_a_loss_of_classes_to_learned_weights() -> None:
    factors = UncertaintyWeights()
    assert factors.factor(ArcFace(5)) == factors.factor(losses.CrossEntropy()) == 1
    assert factors.factor(losses.MeanSquaredError()) == 0.5


def test_averaged_weights_are_exported_without_centers() -> None:
    settings: Any = {"loss": ArcFace(5), "optimizer": Adam(0.05, ema_momentum=0.5)}
    trainer = Trainer(EMBEDDING, **settings)
    trainer.fit(X, CLASSES, epochs=3, verbose=0)
    averaged = trainer.export(averaged=True)
    assert [tensor.name for tensor in averaged.graph.initializer] == ["w"]
    average = onnx.numpy_helper.to_array(averaged.graph.initializer[0])
    assert not np.array_equal(average, trainer.get_weights()["w"])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_centers_train_in_half_precision(precision: str) -> None:
    model = network("float[N, 4] y", "h = Tanh(x)  y = MatMul(h, w)", "float", w=(6, 4))
    trainer = Trainer(model, loss=ArcFace(5, scale=8), optimizer=Adam(0.05), precision=precision)
    history = trainer.fit(X.astype(np.float32), CLASSES, epochs=8, verbose=0).history
    assert history["loss"][-1] < 0.9 * history["loss"][0]
    assert trainer.loss_tensors()["loss/centers"].dtype == np.float32
