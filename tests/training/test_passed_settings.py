"""Settings that `Trainer.load` is given win over the state that the checkpoint has for them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest

import onnxfit
from onnxfit import Trainer
from onnxfit.callbacks import ModelCheckpoint, ReduceLROnPlateau
from onnxfit.errors import SettingError, UnsupportedError
from onnxfit.optimizers import SGD, Adafactor, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop
from onnxfit.schedules import Cosine

BACKENDS = ["full", "forward_backward", "in_place"]
rng = np.random.default_rng(0)
X = rng.standard_normal((96, 4)).astype(np.float32)
Y = rng.integers(0, 3, 96)
W = rng.standard_normal((4, 3)).astype(np.float32)


def new(optimizer: Any = 0.1, **settings: Any) -> Trainer:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[N, 4] x) => (float[N, 3] y)
        { y = MatMul(x, w) }"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(W, "w"))
    return Trainer(model, loss="cross_entropy", optimizer=optimizer, **settings)


def saved(folder: Path, optimizer: Any, **settings: Any) -> Path:
    trainer = new(optimizer, **settings)
    trainer.fit(X, Y, batch_size=24, epochs=2, verbose=0)
    return trainer.save(folder / "a.ckpt")


def loaded(path: Path, **settings: Any) -> tuple[Trainer, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = Trainer.load(path, **settings)
    return trainer, [str(warning.message) for warning in caught]


def step(trainer: Trainer, count: int = 1) -> np.ndarray:
    """Return how far some steps move the weight."""
    before = trainer.get_weights()["w"]
    for _ in range(count):
        trainer.train_on_batch(X, Y)
    moved: np.ndarray = trainer.get_weights()["w"] - before
    return moved


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Adam(0.1), Adam(0.01)),
        (SGD(0.1, momentum=0.9), SGD(0.01, momentum=0.9)),
        (0.1, 0.01),
        (Adam(0.1), AdamW(0.01, weight_decay=0.0)),
        (Adam(Cosine(0.1, 100)), Adam(0.01)),
    ],
)
def test_a_passed_rate_is_that_of_the_first_step(
    tmp_path: Path, backend: str, first: Any, second: Any
) -> None:
    path = saved(tmp_path, first, backend=backend)
    trainer, messages = loaded(path, optimizer=second)
    assert (trainer.learning_rate, messages) == (0.01, [])
    other = new(first if not isinstance(first, Adam) else Adam(0.1), backend=backend)
    state = Trainer.load(path).get_state()
    other.set_state({**state, "counters": {**state["counters"], "learning_rate": 0.01}})
    np.testing.assert_array_equal(step(trainer), step(other))


def test_a_passed_schedule_continues_at_the_step_of_the_checkpoint(tmp_path: Path) -> None:
    path = saved(tmp_path, 0.1)
    trainer, messages = loaded(path, optimizer=SGD(Cosine(0.5, 100)))
    assert messages == []
    assert trainer.learning_rate == Cosine(0.5, 100)(trainer.global_step) < 0.5


def test_a_rate_that_a_callback_lowered_is_not_raised_in_silence(tmp_path: Path) -> None:
    trainer = new(Adam(0.1))
    flat = ReduceLROnPlateau("loss", patience=0, min_delta=100.0)
    trainer.fit(X, Y, epochs=3, verbose=0, callbacks=flat)
    assert trainer.learning_rate < 0.1
    path = trainer.save(tmp_path / "a.ckpt")
    assert Trainer.load(path).learning_rate == trainer.learning_rate
    again, (message,) = loaded(path, optimizer=Adam(0.1))
    assert again.learning_rate == 0.1
    assert f"set trainer.learning_rate = {trainer.learning_rate:g}" in message
    assert loaded(path, optimizer=Adam(0.05))[1] == []


class Own(SGD):
    """An optimizer that a checkpoint knows only by its name."""


def test_the_rate_of_a_custom_optimizer_is_compared_with_the_state(tmp_path: Path) -> None:
    trainer = new(Own(0.1))
    trainer.learning_rate = 0.025
    path = trainer.save(tmp_path / "a.ckpt")
    again, (message,) = loaded(path, optimizer=Own(0.1))
    assert again.learning_rate == 0.1
    assert "0.025" in message


@pytest.mark.torch
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "optimizer", [Adam(0.01), AdamW(0.01), NAdam(0.01), RAdam(0.01), SGD(0.01, momentum=0.9)]
)
def test_slots_that_begin_anew_count_their_own_updates(
    tmp_path: Path, backend: str, optimizer: Optimizer
) -> None:
    """As a new optimizer of PyTorch does for the same weights."""
    torch = pytest.importorskip("torch")
    trainer, (message,) = loaded(saved(tmp_path, 0.1, backend=backend), optimizer=optimizer)
    assert "begin anew (w/" in message
    w = torch.tensor(trainer.get_weights()["w"], requires_grad=True)
    settings = {"momentum": 0.9} if isinstance(optimizer, SGD) else {}
    other = getattr(torch.optim, type(optimizer).__name__)([w], lr=0.01, **settings)
    for _ in range(7):
        other.zero_grad()
        torch.nn.functional.cross_entropy(torch.tensor(X) @ w, torch.tensor(Y)).backward()
        other.step()
    step(trainer, 3)
    assert trainer.global_step == 8 + 3
    trainer.save(tmp_path / "b.ckpt")  # the count of updates is part of the state
    resumed = Trainer.load(tmp_path / "b.ckpt")
    step(resumed, 4)
    np.testing.assert_allclose(resumed.get_weights()["w"], w.detach().numpy(), atol=2e-6)


@pytest.mark.parametrize(
    ("first", "second", "names", "unused"),
    [
        (Adam(0.1), SGD(0.1, momentum=0.9), "1 begin anew (w/velocity)", "2 of the checkpoint are"),
        (Adam(0.1), Adam(0.1, amsgrad=True), "1 begin anew (w/v_max)", ""),
        (Adam(0.1, amsgrad=True), Adam(0.1), "1 of the checkpoint are not used (w/v_max)", ""),
        (Adam(0.1), RMSprop(0.1), "1 of the checkpoint are not used (w/m)", ""),
        (Adam(0.1), Adafactor(0.1), "2 begin anew (w/columns, w/rows)", "(w/m, w/v)"),
        (Adam(0.1), Adam(0.1, ema_momentum=0.9), "1 begin anew (w/ema)", ""),
    ],
)
def test_slots_that_do_not_fit_are_named(
    tmp_path: Path, first: Any, second: Any, names: str, unused: str
) -> None:
    path = saved(tmp_path, first)
    before = Trainer.load(path).get_state()
    trainer, (message,) = loaded(path, optimizer=second)
    assert names in message.replace("w/rows, w/columns", "w/columns, w/rows")
    assert unused in message
    state = trainer.get_state()
    for name, array in state["slots"].items():
        expected = before["slots"].get(name, 0)
        expected = before["weights"]["w"] if name == "w/ema" else expected
        np.testing.assert_array_equal(array, expected)
    assert np.isfinite(step(trainer)).all()
    with pytest.raises(SettingError, match="belongs to another trainer: its slots are"):
        new(second).restore(path)


def test_accumulated_gradients_are_dropped_with_a_warning(tmp_path: Path) -> None:
    trainer = new(0.1, accumulate=4)
    for _ in range(3):
        trainer.train_on_batch(X, Y)
    path = trainer.save(tmp_path / "waiting.ckpt")
    again, (message,) = loaded(path, accumulate=1)
    assert "gradients of batches that wait for an update" in message
    assert again.get_state()["counters"]["window"] == 0
    assert loaded(saved(tmp_path, 0.1), accumulate=4)[1] == []
    other, _ = loaded(path, accumulate=2)
    step(other)
    assert other.global_step == 1


def test_a_loss_scale_begins_anew(tmp_path: Path) -> None:
    path = saved(tmp_path, Adam(0.1))
    trainer, _ = loaded(path, precision="fp16")
    fresh = new(Adam(0.1), precision="fp16").get_state()["slots"]
    for name, array in trainer.get_state()["slots"].items():
        if name.startswith("train/"):
            np.testing.assert_array_equal(array, fresh[name])
        else:
            np.testing.assert_array_equal(array, Trainer.load(path).get_state()["slots"][name])


def test_another_seed_within_an_epoch_is_reported(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path / "{step}.ckpt", save_freq=2)
    new().fit(X, Y, batch_size=24, epochs=1, verbose=0, callbacks=save)
    trainer, (message,) = loaded(tmp_path / "2.ckpt", seed=5)
    assert trainer.seed == 5
    assert "after 2 batches of an epoch whose order of rows came from another seed" in message
    assert loaded(tmp_path / "2.ckpt", seed=0)[1] == []
    assert loaded(tmp_path / "2.ckpt")[1] == []


def test_a_folder_for_hosts_needs_slots_that_began_with_the_training(tmp_path: Path) -> None:
    trainer, _ = loaded(saved(tmp_path, 0.1), optimizer=Adam(0.01))
    with pytest.raises(UnsupportedError, match="slots began after update 8"):
        trainer.export_training(tmp_path / "folder")
    new(Adam(0.1)).export_training(tmp_path / "folder")
    folder, messages = loaded(tmp_path / "folder", optimizer=onnxfit.optimizers.Adam(0.02))
    assert (folder.learning_rate, messages) == (0.02, [])


@pytest.mark.parametrize("first_step", [-1, 9, 1.5, "1"])
def test_a_state_whose_slots_begin_later_is_refused(first_step: Any) -> None:
    trainer = new(Adam(0.1))
    state = trainer.get_state()
    counters = {**state["counters"], "global_step": 8, "first_step": first_step}
    with pytest.raises(SettingError, match="first_step must be a number of updates up to"):
        trainer.set_state({**state, "counters": counters})


# ---------------------------------------------------------------------- other weights


def two_layers(**settings: Any) -> Trainer:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[N, 4] x) => (float[N, 3] y)
        { h = MatMul(x, u)  t = Tanh(h)  y = MatMul(t, w) }"""
    )
    arrays = {"u": np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4), "w": W}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in arrays.items())
    return Trainer(model, loss="cross_entropy", **{"optimizer": Adam(0.1), **settings})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (["u", "w"], ["w"], ["u is no longer trained"]),
        (["u"], ["u", "w"], ["w is new: the slots begin anew, and bias correction counts"]),
        (["u"], ["w"], ["w is new: the slots begin anew;", "u is no longer trained"]),
        (["u"], None, ["w is new"]),
        (["u"], ["u"], []),
    ],
)
def test_weights_in_both_keep_their_slots(
    tmp_path: Path, backend: str, first: Any, second: Any, words: list[str]
) -> None:
    trainer = two_layers(weights=first, backend=backend)
    trainer.fit(X, Y, batch_size=24, epochs=2, verbose=0)
    path = trainer.save(tmp_path / "a.ckpt")
    other, messages = loaded(path, weights=second)
    assert len(messages) == bool(words)
    assert all(word in messages[0] for word in words)
    np.testing.assert_array_equal(other.predict(X), trainer.predict(X))
    old, new = trainer.get_state(), other.get_state()
    assert other.global_step == trainer.global_step
    for name, array in new["slots"].items():
        kept = old["slots"].get(name)
        np.testing.assert_array_equal(array, np.zeros_like(array) if kept is None else kept)
    other.fit(X, Y, epochs=3, verbose=0)
    frozen = {"u", "w"} - set(other.get_weights())
    tensors = {t.name: onnx.numpy_helper.to_array(t) for t in other.export().graph.initializer}
    for name in frozen & set(first):
        np.testing.assert_array_equal(tensors[name], old["weights"][name])


def test_waiting_gradients_are_dropped_with_other_weights(tmp_path: Path) -> None:
    trainer = two_layers(weights=["u"], accumulate=2)
    for _ in range(3):
        trainer.train_on_batch(X[:8], Y[:8])
    other, messages = loaded(trainer.save(tmp_path / "a.ckpt"), weights=["u", "w"])
    assert any("gradients that wait for an update. They are dropped" in m for m in messages)
    assert other.get_state()["counters"]["window"] == 0
    assert not any(a.any() for n, a in other.get_state()["slots"].items() if "sum" in n)


def test_weights_in_another_form_cannot_be_left_out(tmp_path: Path) -> None:
    trainer = two_layers(weights=["u"], adapters=onnxfit.LoRA(target="w", rank=2))
    path = trainer.save(tmp_path / "a.ckpt")
    with pytest.raises(SettingError, match=r"trains u in another form.*export the model"):
        Trainer.load(path, weights=None)
