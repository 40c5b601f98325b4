"""Schedules of momentum, betas and weight decay."""

import dataclasses

import numpy as np
import pytest

from onnxfit import Trainer
from onnxfit.errors import SettingError
from onnxfit.optimizers import SGD, Adam, AdamW, Groups, Optimizer, RAdam, RMSprop
from onnxfit.registry import registry
from onnxfit.schedules import Constant, Cosine, Cyclic, OneCycle, Sequential
from tests.models import mlp

X = np.random.default_rng(0).normal(size=(48, 4)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, 48)
BACKENDS = ["full", "forward_backward", "in_place"]
REGISTRY = registry("onnxfit.optimizers", Optimizer)


def weights_of(optimizer, backend="full", epochs=2):
    trainer = Trainer(mlp((4, 8, 3)), loss="cross_entropy", optimizer=optimizer, backend=backend)
    trainer.fit(X, Y, batch_size=12, epochs=epochs, verbose=0)
    return trainer.get_weights()


@pytest.mark.parametrize("name", REGISTRY)
def test_a_constant_schedule_is_the_number(name):
    optimizer = dataclasses.replace(REGISTRY[name](0.01), weight_decay=0.1)
    settings = {"weight_decay": Constant(0.1)}
    if hasattr(optimizer, "betas"):
        settings["betas"] = (Constant(optimizer.betas[0]), *optimizer.betas[1:])
    if hasattr(optimizer, "momentum"):
        optimizer = dataclasses.replace(optimizer, momentum=0.8)
        settings["momentum"] = lambda step: 0.8
    scheduled = dataclasses.replace(optimizer, **settings)
    expected, weights = weights_of(optimizer), weights_of(scheduled)
    for name, w in expected.items():
        np.testing.assert_allclose(weights[name], w, rtol=1e-4, atol=1e-5)


@pytest.mark.torch
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "RMSprop"])
def test_torchs_one_cycle_of_rate_and_momentum(kind, backend):
    torch = pytest.importorskip("torch")
    # torch's momentum falls while the rate rises: for 0.3 * 20 - 1 updates, and 14 after them
    momentum = Sequential([Cosine(0.95, 5, 0.85), Cosine(0.85, 14, 0.95)], [5])
    rate = OneCycle(0.05, 20)
    ours = {
        "SGD": SGD(rate, momentum=momentum, weight_decay=Cyclic(0.0, 0.5, 3)),
        "AdamW": AdamW(rate, betas=(momentum, 0.99), eps=1e-4, weight_decay=Cyclic(0.0, 0.5, 3)),
        "RMSprop": RMSprop(rate, momentum=momentum, eps=1e-3, weight_decay=Cyclic(0.0, 0.5, 3)),
    }[kind]
    settings = {
        "SGD": {"momentum": 0.9, "weight_decay": 0.0},
        "AdamW": {"betas": (0.9, 0.99), "eps": 1e-4, "weight_decay": 0.0},
        "RMSprop": {"momentum": 0.9, "eps": 1e-3},
    }[kind]
    trainer = Trainer(mlp((4, 8, 3)), loss="cross_entropy", optimizer=ours, backend=backend)
    w = {n: torch.tensor(a, requires_grad=True) for n, a in trainer.get_weights().items()}
    theirs = getattr(torch.optim, kind)(list(w.values()), lr=0.05, **settings)
    cycle = torch.optim.lr_scheduler.OneCycleLR(theirs, 0.05, 20)
    for step in range(18):
        group = theirs.param_groups[0]
        decay = [0, 1, 2, 3, 2, 1][step % 6] / 3 * 0.5
        hidden = torch.tanh(torch.tensor(X) @ w["fc0.weight"] + w["fc0.bias"])
        scores = hidden @ w["fc1.weight"] + w["fc1.bias"]
        theirs.zero_grad()
        torch.nn.functional.cross_entropy(scores, torch.tensor(Y)).backward()
        with torch.no_grad():
            for one in w.values():
                one.mul_(1 - group["lr"] * decay)
        theirs.step()
        cycle.step()
        trainer.train_on_batch(X, Y)
        for name, array in trainer.get_weights().items():
            np.testing.assert_allclose(array, w[name].detach().numpy(), rtol=1e-4, atol=1e-5)


def scheduled() -> Groups:
    return Groups(
        {"*.bias": {"weight_decay": Cosine(0.5, 20)}},
        default=Adam(0.01, betas=(Cyclic(0.95, 0.8, 3), 0.99)),
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_resumes_the_schedules(backend, tmp_path):
    settings = {"loss": "cross_entropy", "optimizer": scheduled(), "backend": backend}
    whole, part = (Trainer(mlp((4, 8, 3)), **settings) for _ in range(2))
    for trainer, steps in ((whole, 9), (part, 4)):
        for _ in range(steps):
            trainer.train_on_batch(X, Y)
    part.save(tmp_path / "t.ckpt")
    again = Trainer.load(tmp_path / "t.ckpt")
    assert again.optimizer.settings == scheduled()
    for _ in range(5):
        again.train_on_batch(X, Y)
    np.testing.assert_equal(again.get_state(), whole.get_state())


def test_the_schedule_counts_the_updates_of_the_training_after_another_optimizer(tmp_path):
    first = Trainer(mlp((4, 3)), loss="mse", optimizer=SGD(0.1))
    first.train_on_batch(X, X[:, :3])
    first.save(tmp_path / "t.ckpt")
    seen = []
    adam = Adam(0.1, betas=(lambda step: seen.append(step) or 0.5, 0.9))
    with pytest.warns(UserWarning, match="begin anew"):
        trainer = Trainer.load(tmp_path / "t.ckpt", optimizer=adam)
    trainer.train_on_batch(X, X[:, :3])
    assert set(seen) == {1}


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (Adam(betas=(lambda step: 1.0, 0.9)), r"Adam needs betas to be numbers >= 0 and < 1"),
        (SGD(momentum=lambda step: -0.5), "must be a finite number >= 0, but .* returned -0.5"),
        (AdamW(weight_decay=lambda step: None), "returned None for update 0"),
    ],
)
def test_an_impossible_value_changes_nothing(optimizer, message):
    trainer = Trainer(mlp(), loss="cross_entropy", optimizer=optimizer)
    before = trainer.get_weights()
    with pytest.raises(SettingError, match=message):
        trainer.train_on_batch(X, Y)
    np.testing.assert_equal(trainer.get_weights(), before)


@pytest.mark.parametrize(
    "make",
    [
        lambda: RAdam(betas=(0.9, Constant(0.9))),
        lambda: Adam(betas=(Constant(0.9), Constant(0.9))),
        lambda: Adam(betas=(Constant(0.9),)),
        lambda: Adam(eps=Constant(0.1)),
    ],
)
def test_other_settings_are_numbers(make):
    with pytest.raises(SettingError, match=r"needs (two )?(betas|eps)"):
        make()
