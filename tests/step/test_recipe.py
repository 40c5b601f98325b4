"""A recipe is built once, and so is the gradient for each batch of other sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxfit
from onnxfit.gradients import backward
from tests.models import mlp


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows by one for each gradient that the rules build."""
    calls: list[str] = []
    build = backward.add_gradients

    def counted(model, loss, weights):
        calls.append(loss)
        return build(model, loss, weights)

    monkeypatch.setattr(backward, "add_gradients", counted)
    return calls


def with_batch_of(rows: int) -> onnx.ModelProto:
    """A perceptron whose batch dimension is a number."""
    model = mlp()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = rows
    return model


X = np.ones((8, 4), np.float32)
Y = np.zeros(8, np.int64)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_the_gradient_that_the_constructor_checks_is_the_one_that_trains(
    optimizer: str, built: list[str]
) -> None:
    trainer = onnxfit.Trainer(with_batch_of(4), loss="cross_entropy", optimizer=optimizer)
    assert len(built) == 1
    trainer.fit(X, Y, batch_size=4, epochs=2, verbose=0)
    trainer.train_on_batch(X[:4], Y[:4])
    assert len(built) == 1


def test_other_sizes_have_a_gradient_of_their_own(built: list[str], tmp_path: Path) -> None:
    trainer = onnxfit.Trainer(mlp(), loss="cross_entropy", optimizer="adam")
    trainer.fit(X, Y, batch_size=4, epochs=2, verbose=0)
    assert len(built) == 2  # as the model declares its batch, and for 4 rows
    trainer.save_onnx_graph(tmp_path)
    trainer.fit(X, Y, batch_size=4, verbose=0)
    assert len(built) == 2
    trainer.fit(X, Y, batch_size=2, verbose=0)
    assert len(built) == 3


def test_a_kept_gradient_is_not_changed_by_the_graphs_made_of_it(tmp_path: Path) -> None:
    trainer = onnxfit.Trainer(mlp(), loss="cross_entropy", optimizer="adam", accumulate=2)
    first = trainer.save_onnx_graph(bytes)
    assert trainer.save_onnx_graph(bytes) == first
