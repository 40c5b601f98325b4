"""Adaptive clipping of gradients, against the formula of Brock et al. in NumPy."""

import numpy as np
import pytest

from onnxfit import Trainer
from onnxfit.errors import SettingError
from tests.models import convolutional, mlp

LEARNING_RATE = 0.5


def clipped(w, g, ratio, axes):
    """The gradient of which each unit has at most `ratio` times the norm of its weights."""
    most = ratio * np.maximum(np.sqrt((w**2).sum(axes, keepdims=True)), 1e-3)
    norm = np.sqrt((g**2).sum(axes, keepdims=True))
    return np.where(norm > most, g * most / norm, g)


def step(make, x, y, **settings):
    """The weights before a step of SGD, and the gradient that the step took."""
    trainer = Trainer(
        make(), loss="cross_entropy", optimizer=LEARNING_RATE, batch_norm="frozen", **settings
    )
    before = trainer.get_weights()
    trainer.train_on_batch(x, y)
    after = trainer.get_weights()
    moved = {n: (before[n].astype(float) - after[n]) / LEARNING_RATE for n in before}
    return {n: w.astype(float) for n, w in before.items()}, moved


AXES = {"conv.weight": (1, 2, 3), "conv.bias": 0, "fc.weight": 0, "fc.bias": 0, "fc0.weight": 0,
        "fc0.bias": 0, "fc1.weight": 0, "fc1.bias": 0}  # fmt: skip
CASES = [
    (lambda: convolutional(batch_norm=False), (1, 8, 8)),
    (lambda: mlp((4, 8, 3)), (4,)),
]


def batch(shape):
    draw = np.random.default_rng(0)
    return 5 * draw.normal(size=(16, *shape)).astype(np.float32), draw.integers(0, 3, 16)


@pytest.mark.parametrize("backend", ["full", "forward_backward", "in_place"])
@pytest.mark.parametrize(("make", "shape"), CASES)
@pytest.mark.parametrize("ratio", [0.01, 0.3])
def test_each_unit_is_clipped_as_the_formula_says(make, shape, ratio, backend):
    x, y = batch(shape)
    weights, whole = step(make, x, y, backend=backend)
    _, moved = step(make, x, y, backend=backend, clip_adaptive=ratio)
    expected = {n: clipped(weights[n], g, ratio, AXES[n]) for n, g in whole.items()}
    assert any((expected[n] != whole[n]).any() for n in whole)
    for name, g in moved.items():
        np.testing.assert_allclose(g, expected[name], rtol=1e-3, atol=2e-6)


def test_a_large_bound_clips_nothing_and_the_other_bounds_come_after_it():
    x, y = batch((4,))
    make = CASES[1][0]
    weights, whole = step(make, x, y)
    _, same = step(make, x, y, clip_adaptive=1e6)
    _, moved = step(make, x, y, clip_adaptive=0.3, clip_norm=0.1)
    expected = {n: clipped(weights[n], g, 0.3, AXES[n]) for n, g in whole.items()}
    norm = np.sqrt(sum((g**2).sum() for g in expected.values()))
    assert norm > 0.1
    for name, g in whole.items():
        np.testing.assert_allclose(same[name], g, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(moved[name], expected[name] * 0.1 / norm, rtol=1e-3, atol=2e-6)


@pytest.mark.torch
@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_torch_trains_to_the_same_weights(backend):
    torch = pytest.importorskip("torch")
    x, y = batch((1, 8, 8))
    trainer = Trainer(
        convolutional(batch_norm=False),
        loss="cross_entropy",
        optimizer="adam",
        clip_adaptive=0.05,
        backend=backend,
    )
    w = {n: torch.tensor(a, requires_grad=True) for n, a in trainer.get_weights().items()}
    units = {"conv.weight": (1, 2, 3), "fc.weight": (0,)}
    optimizer = torch.optim.Adam(w.values(), lr=0.001)
    for _ in range(10):
        trainer.train_on_batch(x, y)
        hidden = torch.conv2d(torch.tensor(x), w["conv.weight"], w["conv.bias"], padding=1)
        flat = torch.max_pool2d(hidden.relu(), 2).flatten(1)
        logits = flat @ w["fc.weight"] + w["fc.bias"]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, torch.tensor(y)).backward()
        for name, p in w.items():
            norm, most = (
                torch.linalg.vector_norm(t, dim=units.get(name, (0,)), keepdim=True)
                for t in (p.grad, p.detach())
            )
            p.grad *= (0.05 * most.clamp(min=1e-3) / norm.clamp(min=1e-6)).clamp(max=1)
        optimizer.step()
    for name, p in w.items():
        np.testing.assert_allclose(trainer.get_weights()[name], p.detach().numpy(), atol=2e-6)


@pytest.mark.parametrize("bound", [0, -1.0, "0.01", np.nan, True])
def test_an_impossible_bound_is_refused(bound):
    with pytest.raises(SettingError, match="clip_adaptive must be a positive number or None"):
        Trainer(mlp(), loss="mse", clip_adaptive=bound)


def test_training_goes_on_from_a_checkpoint_with_the_bound(tmp_path):
    x, y = batch((4,))
    settings = {"loss": "cross_entropy", "optimizer": "adam", "clip_adaptive": 0.02}
    whole = Trainer(mlp(), **settings)
    whole.fit(x, y, batch_size=4, epochs=4, verbose=0)
    part = Trainer(mlp(), **settings)
    part.fit(x, y, batch_size=4, epochs=2, verbose=0)
    part.save(tmp_path / "c.onnxfit")
    resumed = Trainer.load(tmp_path / "c.onnxfit")
    assert resumed.settings["clip_adaptive"] == 0.02
    resumed.fit(x, y, batch_size=4, epochs=4, initial_epoch=2, verbose=0)
    for name, w in whole.get_weights().items():
        np.testing.assert_array_equal(resumed.get_weights()[name], w)
