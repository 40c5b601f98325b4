"""A recipe is built once, and the gradient once for each size of batch."""

from __future__ import annotations

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

    def counted(model, loss, weights, **options):
        calls.append(loss)
        return build(model, loss, weights, **options)

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
@pytest.mark.parametrize("model", [mlp(), with_batch_of(4)], ids=["any batch", "batch of 4"])
def test_one_gradient_is_built_for_each_size_of_batch(
    model: onnx.ModelProto, optimizer: str, built: list[str]
) -> None:
    trainer = onnxfit.Trainer(model, loss="cross_entropy", optimizer=optimizer)
    assert not built  # the constructor only looks for nodes without a gradient
    trainer.fit(X, Y, batch_size=4, epochs=2, verbose=0)
    trainer.train_on_batch(X[:4], Y[:4])
    assert len(built) == 1


def test_other_sizes_have_a_gradient_of_their_own(built: list[str]) -> None:
    trainer = onnxfit.Trainer(mlp(), loss="cross_entropy", optimizer="adam")
    trainer.fit(X, Y, batch_size=4, epochs=2, verbose=0)
    assert len(built) == 1
    trainer.fit(X, Y, batch_size=2, verbose=0)
    assert len(built) == 2
