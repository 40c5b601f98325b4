"""The in_place backend: an update that overwrites weights and slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx.parser
import pytest

from onnxfit import Trainer, optimizers
from onnxfit.callbacks import TerminateOnNaN
from onnxfit.errors import SettingError, StepError
from onnxfit.metrics import Metric
from onnxfit.optimizers import SGD, Adam, Lion, Optimizer
from onnxfit.registry import registry
from onnxfit.runtime.backends.in_place import InPlaceBackend, _all_finite
from onnxfit.runtime.device import CPU, Device
from onnxfit.runtime.session import BoundSession
from onnxfit.step.update import FUSING
from tests.models import convolutional, mlp

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 4)).astype(np.float32)
Y = RNG.integers(0, 3, 24)
IMAGES = RNG.normal(size=(24, 1, 8, 8)).astype(np.float32)
OPTIMIZERS = {
    **{name: cls() for name, cls in registry(optimizers.__name__, Optimizer).items()},
    "nesterov": SGD(0.1, momentum=0.9, nesterov=True, ema_momentum=0.9, weight_decay=0.1),
    "scaled velocity": SGD(0.1, momentum=0.9, dampening=0.1, scaled_velocity=True),
    "amsgrad": Adam(amsgrad=True, ema_momentum=0.5, exclude_from_weight_decay="fc1.*"),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clip_norm": 0.1, "clip_value": 0.05},
    "penalty": {"penalty": 0.1},
    "accumulated": {"accumulate": 2},
    "fp16": {"precision": "fp16"},
}


def new(backend: str = "in_place", sizes: tuple[int, ...] = (4, 8, 3), **settings: Any) -> Trainer:
    given = {"loss": "cross_entropy", "optimizer": Adam(0.01), "threads": 1, **settings}
    return Trainer(mlp(sizes), backend=backend, **given)


def weights_and_slots(trainer: Trainer) -> Mapping[str, Any]:
    state = trainer.get_state()
    arrays = {**state["weights"], **state["slots"]}
    return {name: array for name, array in arrays.items() if not name.endswith("gradient_sum")}


def fitted(trainer: Trainer, x: Any = X) -> Mapping[str, Any]:
    trainer.fit(x, Y, epochs=2, batch_size=8, verbose=0)
    return trainer.get_state()


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_overwriting_changes_no_bit(
    optimizer: Optimizer, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same graphs give the same numbers as with a second set of weights and slots."""
    ours = fitted(new(optimizer=optimizer, **settings))
    full = fitted(new("full", optimizer=optimizer, **settings))
    monkeypatch.setattr(InPlaceBackend, "_in_place_tensors", lambda self: ())
    double = new(optimizer=optimizer, **settings)
    assert not any(map(double._training.backend.state.is_in_place, double._training.backend.state))
    np.testing.assert_equal(ours, fitted(double))
    for kind in ("weights", "slots"):
        for name, array in full[kind].items():
            np.testing.assert_allclose(ours[kind][name], array, 1e-4, 1e-6, err_msg=name)


@pytest.mark.parametrize("fuse", [0, FUSING["cpu"].weight], ids=["apart", "fused"])
@pytest.mark.parametrize("threads", [1, 2])
def test_overwriting_large_weights_changes_no_bit(
    fuse: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several threads share the elements of a large weight."""
    monkeypatch.setitem(FUSING, "cpu", replace(FUSING["cpu"], weight=fuse))
    ours, full = (
        new(backend, (4, 300, 400, 3), threads=threads) for backend in ("in_place", "full")
    )
    assert bool(ours._training.backend.fused) == bool(fuse)
    np.testing.assert_equal(fitted(ours), fitted(full))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_weights_and_slots_are_in_memory_once(accumulate: int) -> None:
    for backend, once in (("in_place", True), ("full", False)):
        state = new(backend, accumulate=accumulate)._training.backend.state
        for name in (name for name in state if not name.endswith("gradient_sum")):
            buffers = state.buffer(name), state.buffer(name, current=False)
            assert np.shares_memory(*(buffer.array for buffer in buffers)) == once, name


def test_a_slot_that_the_next_weight_also_reads_keeps_two_buffers() -> None:
    """No path in the graph says that Lion's momentum is written after the weight has read it."""
    state = new(optimizer=Lion())._training.backend.state
    kept = {name for name in state if not state.is_in_place(name)}
    assert kept == {f"fc{i}.{tensor}/m" for i in (0, 1) for tensor in ("weight", "bias")}


@dataclass(frozen=True)
class Squared(Optimizer):
    """Its slot is multiplied by a matrix, as in Newton's iteration; onnxruntime joins such nodes."""

    joined: str = ""

    def slots(self, w: Any) -> dict[str, Any]:
        return {"q": np.eye(w.shape[-1], dtype=w.dtype) if w.ndim == 2 else np.zeros_like(w)}

    def update(self, op: Any, w: Any, g: Any, lr: Any, step: Any, q: Any) -> Any:
        if len(w.shape) != 2:
            return w - lr * g, q
        r = op.MatMul(op.Transpose(g, perm=[1, 0]), g)
        products = {
            "sum": lambda: op.MatMul(r, q) + 1.5 * q,
            "scale": lambda: 0.5 * op.MatMul(q, r),
            "transpose before": lambda: op.MatMul(op.Transpose(q, perm=[1, 0]), r),
            "transpose after": lambda: op.Transpose(op.MatMul(q, r), perm=[1, 0]),
        }
        return w - lr * g, products[self.joined]()


@pytest.mark.parametrize("joined", ["sum", "scale", "transpose before", "transpose after"])
def test_a_product_does_not_read_a_slot_while_it_overwrites_it(joined: str) -> None:
    x = 3 * RNG.normal(size=(32, 64)).astype(np.float32)
    slots = []
    for backend in ("full", "in_place"):
        trainer = new(backend, (64, 128, 96), optimizer=Squared(0.01, joined=joined))
        trainer.train_on_batch(x, np.zeros(32, np.int64))
        slots.append(trainer.get_state()["slots"]["fc1.weight/q"])
    assert slots[0].any()
    np.testing.assert_array_equal(slots[1], slots[0])


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("poison", [np.inf, 3e38])
def test_a_step_that_is_not_finite_changes_nothing(poison: float, accumulate: int) -> None:
    images = IMAGES.copy()
    images[0, 0, 0, 0] = poison
    trainer = Trainer(
        convolutional(),
        loss="cross_entropy",
        optimizer=Adam(0.01),
        backend="in_place",
        accumulate=accumulate,
    )
    for _ in range(accumulate):
        trainer.train_on_batch(IMAGES, Y)
    before = weights_and_slots(trainer)
    assert not np.isfinite(trainer.train_on_batch(images, Y)["loss"])
    if accumulate == 1:
        np.testing.assert_equal(weights_and_slots(trainer), before)
    trainer.revert_step()  # as TerminateOnNaN does
    np.testing.assert_equal(weights_and_slots(trainer), before)
    assert np.isfinite(trainer.train_on_batch(IMAGES, Y)["loss"])


def test_a_window_with_an_infinite_sum_is_skipped() -> None:
    """Both losses are finite, and so are the gradients of each batch."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        line (float[N,1] x) => (float[N,1] y) <float[1,1] w = {0}> { y = MatMul(x, w) }""")
    trainer = Trainer(model, loss="mse", optimizer=0.1, backend="in_place", accumulate=2)
    x, y = np.full((1, 1), 1.25e19, np.float32), np.full((1, 1), 1e19, np.float32)
    for _ in range(2):
        assert np.isfinite(trainer.train_on_batch(x, y)["loss"])
    assert (trainer.global_step, trainer._training.backend.accumulator.count) == (1, 0)
    np.testing.assert_equal(trainer.get_weights(), {"w": np.zeros((1, 1), np.float32)})


def test_a_window_with_a_batch_that_is_not_finite_keeps_the_statistics() -> None:
    images = IMAGES.copy()
    images[0, 0, 0, 0] = np.inf
    trainer = Trainer(
        convolutional(), loss="cross_entropy", optimizer=Adam(0.01), backend="in_place",
        accumulate=2,
    )  # fmt: skip
    before = weights_and_slots(trainer)
    trainer.train_on_batch(images, Y)
    np.testing.assert_equal(weights_and_slots(trainer), before)
    trainer.train_on_batch(IMAGES, Y)
    after = weights_and_slots(trainer)
    statistics = {"bn.mean", "bn.var"}
    assert all(np.isfinite(after[name]).all() for name in statistics)
    for name in before.keys() - statistics:
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)


def test_a_batch_that_does_not_compile_leaves_the_update_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = Trainer(
        convolutional(), loss="cross_entropy", optimizer=Adam(0.01), backend="in_place"
    )
    trainer.train_on_batch(IMAGES, Y)
    state = trainer.get_state()

    def fail(*arguments: Any) -> None:
        raise StepError("no memory")

    with monkeypatch.context() as broken:
        broken.setattr(trainer._training.backend, "compiled", fail)
        with pytest.raises(StepError):
            trainer.train_on_batch(IMAGES[:5], Y[:5])
    with pytest.raises(SettingError, match="cannot undo an update"):
        trainer.revert_step()
    np.testing.assert_equal(trainer.get_state(), state)


@pytest.mark.parametrize(
    "settings",
    [{}, {"accumulate": 2}, {"precision": "fp16"}],
    ids=["plain", "accumulated", "fp16"],
)
def test_terminate_on_nan_leaves_the_weights_before_the_step(settings: dict[str, Any]) -> None:
    trainer, good = new(**settings), new(**settings)
    x = X.copy()
    x[20] = np.inf  # in the third batch of eight
    stop = TerminateOnNaN()
    trainer.fit(x, Y, batch_size=8, shuffle=False, verbose=0, callbacks=[stop])
    good.fit(X[:16], Y[:16], batch_size=8, shuffle=False, verbose=0)
    assert "the loss is nan" in str(trainer.stop_reason)
    np.testing.assert_equal(trainer.get_weights(), good.get_weights())


def test_an_update_cannot_be_undone() -> None:
    trainer = new()
    trainer.revert_step()  # there was none
    trainer.train_on_batch(X, Y)
    state = trainer.get_state()
    with pytest.raises(SettingError, match="backend='in_place' cannot undo an update"):
        trainer.revert_step()
    np.testing.assert_equal(trainer.get_state(), state)
    trainer.set_weights(trainer.get_weights())
    trainer.revert_step()  # the update is no longer the last change
    np.testing.assert_equal(trainer.get_state(), state)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_metric_that_fails_leaves_the_weights(accumulate: int) -> None:
    class Fails(Metric):
        fails = False

        def reset(self) -> None:
            pass

        def update(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            if Fails.fails:
                raise ZeroDivisionError

        def result(self) -> float:
            return 0.0

    trainer = new(metrics=[Fails()], accumulate=accumulate)
    for _ in range(2 * accumulate - 1):
        trainer.train_on_batch(X, Y)
    before = weights_and_slots(trainer)
    Fails.fails = True
    with pytest.raises(ZeroDivisionError):
        trainer.train_on_batch(X, Y)
    np.testing.assert_equal(weights_and_slots(trainer), before)
    Fails.fails = False
    trainer.train_on_batch(X, Y)


@pytest.mark.parametrize("kind", ["gradients", "apply"])
def test_a_failed_step_says_whether_weights_may_have_changed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = new()
    trainer.train_on_batch(X, Y)
    before = trainer.get_state()
    backend = trainer._training.backend
    gradients = next(iter(backend.caches["gradients"]._by_signature.values()))
    session = gradients if kind == "gradients" else backend.last_update

    def fail(*arguments: Any) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as broken:
        broken.setattr(session, "_run", fail)
        with pytest.raises(StepError, match="no memory") as raised:
            trainer.train_on_batch(X, Y)
    assert ("may have updated some of the weights" in str(raised.value)) == (kind == "apply")
    np.testing.assert_equal(trainer.get_state(), before)
    trainer.train_on_batch(X, Y)


@pytest.mark.parametrize("optimizer", ["adam", "lion"])  # with Lion, steps take turns of two sets
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_training_goes_on_after_an_update_that_failed(
    optimizer: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = new(optimizer=optimizer)
    for _ in range(steps):
        trainer.train_on_batch(X, Y)
    run = BoundSession.run

    def fail(session: BoundSession, *arguments: Any) -> None:
        if session._name == "apply":
            monkeypatch.setattr(session, "_run", raise_error)
        run(session, *arguments)

    def raise_error(*arguments: Any) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as broken:
        broken.setattr(BoundSession, "run", fail)
        with pytest.raises(StepError, match="may have updated some of the weights"):
            trainer.train_on_batch(X, Y)
    monkeypatch.undo()
    assert not trainer._training.backend._gradients
    assert np.isfinite(trainer.train_on_batch(X, Y)["loss"])


def test_a_loaded_training_goes_on_bit_by_bit(tmp_path: Path) -> None:
    trainer = new()
    fitted(trainer)
    loaded = Trainer.load(trainer.save(tmp_path / "a.ckpt"))
    assert loaded.backend == "in_place"
    np.testing.assert_equal(fitted(loaded), fitted(trainer))


@pytest.mark.parametrize("frozen", ["fc0.*", "fc1.bias"])
def test_frozen_weights_keep_their_slots(frozen: str) -> None:
    ours, full = new(), new("full")
    for trainer in (ours, full):
        trainer.train_on_batch(X, Y)
        trainer.frozen = frozen
        trainer.train_on_batch(X, Y)
    np.testing.assert_equal(ours.get_state(), full.get_state())


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({"device": Device("cuda", 0)}, "needs device='cpu', got device='cuda'"),
        ({"world": SimpleNamespace(size=2)}, "needs a single process, got 2 processes"),
    ],
)
def test_one_process_on_the_cpu_alone(settings: dict[str, Any], needed: str) -> None:
    given = {"device": CPU, "threads": 1, "accumulate": 1, **settings}
    with pytest.raises(SettingError, match=f"{needed}. Use backend='full'"):
        InPlaceBackend(new()._training.recipe, {}, **given)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_numbers_are_finite_even_if_their_sum_is_not(dtype: Any) -> None:
    largest = np.full(9, np.finfo(dtype).max)
    assert _all_finite(largest)
    for value in (np.nan, np.inf, -np.inf):
        assert not _all_finite(np.append(largest, dtype(value)))
    assert not _all_finite(np.array([np.inf, -np.inf], dtype))
    assert _all_finite(np.zeros((0,), dtype))
