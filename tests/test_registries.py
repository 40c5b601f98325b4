"""Laws for everything that has a name: it trains through the Trainer, and a checkpoint brings it
back to the last bit.
"""

from __future__ import annotations

import numpy as np
import pytest

from onnxfit import Trainer, losses, metrics, optimizers, schedules
from onnxfit.registry import registry
from tests.models import mlp

RNG = np.random.default_rng(0)
X = RNG.normal(size=(48, 4)).astype(np.float32)
CLASSES = (X @ RNG.normal(size=(4, 3))).argmax(1)
# what labels may look like; the first that a loss accepts is taken
LABELS = (CLASSES, np.eye(3, dtype=np.float32)[CLASSES], np.abs(X[:, :3]), np.abs(X[:, :1]))
SCHEDULES = [
    schedules.Constant(0.01),
    schedules.Exponential(0.01, decay_steps=3, decay_rate=0.9),
    schedules.Cosine(0.01, 20),
    schedules.OneCycle(0.01, 40),
    schedules.Warmup(schedules.InverseTime(0.01, 10, 1.0), 5),
]


def trained(trainer: Trainer, y: np.ndarray, epochs: int = 2) -> Trainer:
    trainer.fit(X, y, epochs=epochs, batch_size=16, verbose=0)
    return trainer


@pytest.mark.parametrize(
    "name",
    sorted({c.__name__ for c in registry("onnxfit.optimizers", optimizers.Optimizer).values()}),
)
def test_an_optimizer_learns_and_comes_back_from_a_checkpoint(name: str, tmp_path) -> None:
    def new() -> Trainer:
        rate = {"Adadelta": 1.0, "SGD": 0.1}.get(name, 0.01)
        settings = {
            "weight_decay": 0.01,
            "exclude_from_weight_decay": ("*.bias",),
            "learning_rate_multipliers": {"fc0*": 0.5},
        }
        optimizer = getattr(optimizers, name)(rate, ema_momentum=0.9, **settings)
        return Trainer(
            mlp(), loss="cross_entropy", optimizer=optimizer, clip_norm=1.0, metrics=["accuracy"]
        )

    start = new().evaluate(X, CLASSES)["loss"]
    whole = trained(trained(new(), CLASSES), CLASSES, 4)
    assert whole.evaluate(X, CLASSES)["loss"] < start
    loaded = trained(Trainer.load(trained(new(), CLASSES).save(tmp_path / "c")), CLASSES, 4)
    np.testing.assert_equal(loaded.get_state(), whole.get_state())


@pytest.mark.parametrize("name", sorted(registry("onnxfit.losses", losses.Loss)))
# these outputs are raw scores, whatever the loss expects
@pytest.mark.filterwarnings("ignore:.*(logits|probabilities)")
def test_a_loss_of_any_name_trains_and_comes_back(name: str, tmp_path) -> None:
    sizes = (4, 8, 6) if "gaussian" in name else (4, 8, 3)
    trainer = Trainer(mlp(sizes), loss=name, optimizer="adam")
    (target,) = trainer._recipe.targets.values()
    for labels in LABELS:
        try:
            target.prepare(labels)
        except ValueError:
            continue
        break
    start = trainer.evaluate(X, labels)["loss"]
    trained(trainer, labels, 20)
    end = trainer.evaluate(X, labels)["loss"]
    assert np.isfinite(start)
    assert end < start
    assert Trainer.load(trainer.save(tmp_path / "c")).evaluate(X, labels)["loss"] == end


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_a_schedule_drives_every_update(schedule: schedules.Schedule) -> None:
    seen: list[float] = []
    trainer = Trainer(mlp(), loss="cross_entropy", optimizer=optimizers.SGD(schedule))
    for step in range(12):
        before = trainer.get_weights()["fc1.bias"]
        seen.append(trainer.learning_rate)
        trainer.train_on_batch(X, CLASSES)
        step_size = np.abs(trainer.get_weights()["fc1.bias"] - before).max()
        assert (step_size > 0) == (seen[-1] > 0), step
    assert seen == [schedule(step) for step in range(12)]


@pytest.mark.filterwarnings("ignore:.*logits")  # these outputs are raw scores
@pytest.mark.parametrize("name", sorted(registry("onnxfit.metrics", metrics.Metric)))
def test_a_metric_of_any_name_is_exact_over_batches(name: str) -> None:
    if name in _REGRESSION:
        y, loss = X[:, :3], "mse"
    elif name in ("binary_accuracy", "categorical_accuracy"):
        y, loss = np.eye(3, dtype=np.float32)[CLASSES], "mse"
    else:
        y, loss = CLASSES, "cross_entropy"
    trainer = Trainer(mlp(), loss=loss, metrics=[name])
    with np.errstate(all="ignore"):
        small, whole = trainer.evaluate(X, y, batch_size=7), trainer.evaluate(X, y, batch_size=48)
    np.testing.assert_allclose(small[name], whole[name], rtol=1e-6)


_REGRESSION = {
    "cosine_similarity", "cosine", "mean_absolute_error", "mae", "mean_squared_error", "mse", "root_mean_squared_error", "rmse", "r2", "r2_score",
}  # fmt: skip
