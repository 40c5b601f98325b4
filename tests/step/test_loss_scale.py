"""Loss scaling: when the scale changes, what a skipped step leaves as it was, and what it scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnxfit import Trainer
from onnxfit.callbacks import GradientNorm, LambdaCallback
from onnxfit.graph import names
from onnxfit.optimizers import Adam
from onnxfit.step import loss_scale
from tests.helpers import classification
from tests.models import convolutional, mlp

X, Y = classification(32)
HUGE = np.full_like(X, 60000)  # finite in float16, and its products are not
backends = pytest.mark.parametrize("backend", ["full", "forward_backward"])


def trainer(model: onnx.ModelProto | None = None, **settings: Any) -> Trainer:
    given = {
        "loss": "cross_entropy",
        "optimizer": Adam(0.01, ema_momentum=0.9),
        "precision": "fp16",
    }
    return Trainer(mlp(activation="Relu") if model is None else model, **(given | settings))


def scale_of(trained: Trainer) -> tuple[float, int, int]:
    slots = trained.get_state()["slots"]
    return tuple(
        slots[name].item() for name in (names.LOSS_SCALE, names.FINITE_STEPS, names.SKIPPED_STEPS)
    )  # type: ignore[return-value]


def assert_same(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@backends
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_overflow_halves_the_scale_and_changes_nothing_else(
    backend: str, accumulate: int
) -> None:
    trained = trainer(backend=backend, accumulate=accumulate)
    for _ in range(accumulate):
        trained.train_on_batch(X, Y)
    before = trained.get_state()
    assert scale_of(trained) == (65536, 1, 0)
    for x in [X] * (accumulate - 1) + [HUGE]:
        trained.train_on_batch(x, Y)
    after = trained.get_state()
    assert scale_of(trained) == (32768, 0, 1)
    assert trained.global_step == 2
    assert_same(after["weights"], before["weights"])
    own = {name for name in before["slots"] if name.endswith(("/m", "/v", "/ema"))}
    assert len(own) == 3 * len(before["weights"])
    for name in own:
        np.testing.assert_array_equal(after["slots"][name], before["slots"][name])


@backends
def test_the_optimizer_does_not_count_a_skipped_step(backend: str) -> None:
    """Adam's first update has lost nothing by the bias correction of a step that never was."""
    skipped, fresh = (trainer(backend=backend) for _ in range(2))
    skipped.train_on_batch(HUGE, Y)
    for one in (skipped, fresh):
        one.train_on_batch(X, Y)
    assert scale_of(skipped) == (32768, 1, 1)
    for name, weight in fresh.get_weights().items():
        np.testing.assert_allclose(skipped.get_weights()[name], weight, rtol=1e-4, atol=1e-6)


@backends
def test_the_scale_doubles_after_2000_updates_in_a_row(backend: str) -> None:
    trained = trainer(backend=backend)
    state = trained.get_state()
    state["slots"][names.FINITE_STEPS] = np.array(1998, np.int64)
    trained.set_state(state)
    trained.train_on_batch(X, Y)
    assert scale_of(trained) == (65536, 1999, 0)
    trained.train_on_batch(X, Y)
    assert scale_of(trained) == (131072, 0, 0)


@pytest.mark.torch
def test_the_scale_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 3)
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    w = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([w], 0.0)
    trained = trainer(optimizer=0.0)
    for overflows in np.random.default_rng(0).random(40) < 0.3:
        scaler.scale((w * (np.inf if overflows else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        trained.train_on_batch(HUGE if overflows else X, Y)
        assert scale_of(trained)[0] == scaler.get_scale()


@backends
def test_gradients_are_unscaled_for_everyone(backend: str) -> None:
    """Norms, clipping, penalty and callbacks see what they see in float32, up to rounding."""
    norms, seen = {}, {}
    for precision in ("float32", "fp16"):
        trained = trainer(
            backend=backend, precision=precision, penalty=0.1, clip_norm=0.05, optimizer=0.5
        )
        callbacks: list[Any] = [GradientNorm()]
        if backend == "forward_backward":
            store = lambda g, p=precision: seen.update({p: {k: v.copy() for k, v in g.items()}})  # noqa: E731
            callbacks.append(LambdaCallback(on_gradients=store))
        history = trained.fit(X, Y, batch_size=32, epochs=1, callbacks=callbacks, verbose=0)
        norms[precision] = history.history["gradient_norm"][0]
        seen[f"weights of {precision}"] = trained.get_weights()
    assert norms["fp16"] == pytest.approx(norms["float32"], rel=2.0**-9)
    if backend == "forward_backward":
        for name, gradient in seen["float32"].items():
            np.testing.assert_allclose(seen["fp16"][name], gradient, rtol=2.0**-6, atol=2.0**-9)
    for name, weight in seen["weights of float32"].items():
        np.testing.assert_allclose(seen["weights of fp16"][name], weight, atol=2.0**-10)


@backends
def test_gradients_too_small_for_float16_arrive(backend: str) -> None:
    """Times 1e-6, most of them would be 0 in float16."""
    moved = {}
    for precision in ("float32", "fp16"):
        trained = trainer(
            backend=backend, precision=precision, optimizer=1e6, loss_weights={"y": 1e-6}
        )
        before = trained.get_weights()
        trained.train_on_batch(X, Y)
        after = trained.get_weights()
        moved[precision] = {name: after[name] - before[name] for name in before}
    for name, change in moved["float32"].items():
        error = np.linalg.norm(moved["fp16"][name] - change)
        assert error <= 2.0**-8 * np.linalg.norm(change)


@backends
def test_statistics_survive_a_batch_that_overflows(backend: str) -> None:
    trained = trainer(convolutional(), backend=backend)
    before = trained.get_weights()
    images = np.full((8, 1, 8, 8), 60000, np.float32)
    images[::2] = -images[::2]
    trained.train_on_batch(images, np.arange(8) % 3)
    after = trained.get_weights()
    for name in before:
        assert np.isfinite(after[name]).all()
        if not name.startswith("bn."):
            np.testing.assert_array_equal(after[name], before[name])


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_checkpoint_goes_on_bit_for_bit(backend: str, precision: str, tmp_path: Path) -> None:
    trained = trainer(backend=backend, precision=precision)
    for x in (HUGE if precision == "fp16" else X, X):
        trained.train_on_batch(x, Y)
    trained.save(tmp_path / "half.ckpt")
    loaded = Trainer.load(tmp_path / "half.ckpt")
    assert loaded.settings["precision"] == precision
    for one in (trained, loaded):
        for x in (X, HUGE / 100, X):
            one.train_on_batch(x, Y)
    expected, found = trained.get_state(), loaded.get_state()
    for kind in ("weights", "slots"):
        assert_same(found[kind], expected[kind])


def test_a_step_is_undone_with_its_scale() -> None:
    trained = trainer()
    trained.train_on_batch(HUGE, Y)
    trained.revert_step()
    assert scale_of(trained) == (65536, 0, 0)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_files_and_predictions_stay_float32(precision: str) -> None:
    trained = trainer(precision=precision)
    trained.train_on_batch(X, Y)
    exported = trained.export(None)
    assert all(t.data_type == onnx.TensorProto.FLOAT for t in exported.graph.initializer)
    assert [n.op_type for n in exported.graph.node] == [
        n.op_type for n in mlp(activation="Relu").graph.node
    ]
    exact = Trainer(exported, loss="cross_entropy")
    np.testing.assert_array_equal(trained.predict(X), exact.predict(X))
    assert trained.evaluate(X, Y, verbose=0) == exact.evaluate(X, Y, verbose=0)
