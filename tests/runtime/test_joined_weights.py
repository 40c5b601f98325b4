"""Many small weights that a step reads and writes as a few tensors."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from onnxfit import Trainer
from onnxfit.optimizers import SGD, Optimizer
from onnxfit.runtime import joined_weights
from onnxfit.runtime.joined_weights import weights_to_join
from onnxfit.runtime.node_order import bytes_of_values
from tests.models import mlp

SIZES = (4, 6, 6, 6, 6, 3)


def trainer(optimizer: Optimizer | None = None, **settings: object) -> Trainer:
    return Trainer(
        mlp(SIZES), loss="cross_entropy", optimizer=optimizer or SGD(0.1), distribute=None,
        **settings,
    )  # fmt: skip


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(24, 4)).astype(np.float32), rng.integers(0, 3, 24)


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined_weights, "MIN_WEIGHTS_TO_JOIN", 2)


def step_values(trained: Trainer) -> tuple[list[str], list[str]]:
    graph = trained._training.backend.graph("train", trained._training.backend._last_shapes).graph
    return [v.name for v in graph.input], [v.name for v in graph.output]


@pytest.mark.parametrize(
    "settings", [{}, {"clip_norm": 0.5}, {"penalty": 0.01}], ids=["plain", "clipped", "penalty"]
)
def test_every_bit_of_a_training_is_the_same(
    settings: dict[str, object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    alone = trainer(**settings)
    monkeypatch.setattr(joined_weights, "MIN_WEIGHTS_TO_JOIN", 2)
    together = trainer(**settings)
    assert sorted(map(len, together._training.backend.fused.values())) == [3, 4]
    x, y = data()
    for each in (alone, together):
        each.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        each.set_weights({"fc1.bias": np.full(6, 0.25, np.float32)})
    saved = together.save(tmp_path / "half.onnxfit")
    for each in (alone, together, resumed := Trainer.load(saved)):
        each.train_on_batch(x, y)
    expected = alone.get_weights()
    for each in (together, resumed):
        for name, array in each.get_weights().items():
            np.testing.assert_array_equal(array, expected[name], err_msg=name)
    together.revert_step()
    assert (together.get_weights()["fc1.bias"] == 0.25).all()


@pytest.mark.usefixtures("joined")
def test_a_step_reads_and_writes_joined_tensors_alone() -> None:
    trained = trainer()
    trained.train_on_batch(*data())
    inputs, outputs = step_values(trained)
    apart = {"fc0.weight", "fc4.weight", "fc4.bias"}  # no other weight has their shapes
    assert apart < set(inputs)
    for name, members in trained._training.backend.fused.items():
        assert name in inputs
        assert f"{name}/next" in outputs
        assert set(members).isdisjoint([*inputs, *apart])
        assert {f"{member}/next" for member in members}.isdisjoint(outputs)


@pytest.mark.usefixtures("joined")
def test_weights_with_slots_are_fused_instead() -> None:
    trained = trainer(SGD(0.1, momentum=0.9))
    assert list(trained._training.backend.fused) == ["train/fused/0"]


@pytest.mark.usefixtures("joined")
def test_only_small_weights_of_one_type_and_shape_are_joined() -> None:
    large = np.ones(joined_weights.MAX_ELEMENTS_TO_JOIN + 1, np.float32)
    arrays = {
        "a": np.ones(2, np.float32), "b": np.ones((2, 1), np.float32), "c": np.ones(2),
        "d": np.ones(2, np.float32), "e": np.float32(1), "f": np.float32(1), "g": large,
        "h": large, "i": np.ones((0, 2), np.float32), "j": np.ones((0, 2), np.float32),
    }  # fmt: skip
    assert weights_to_join({n: np.asarray(a) for n, a in arrays.items()}) == [["a", "d"]]


def test_few_weights_are_read_one_by_one() -> None:
    trained = trainer()
    trained.train_on_batch(*data())
    assert not trained._training.backend.fused
    assert set(trained.get_weights()) <= set(step_values(trained)[0])


def test_values_keep_their_types(joined: None) -> None:
    each = trainer()
    x, y = data()
    each.train_on_batch(x, y)
    graph = each._training.backend.graph("train", each._training.backend._last_shapes).graph
    assert bytes_of_values(graph) < math.inf
