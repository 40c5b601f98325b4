"""Packed weights as inputs of the backward pass: the same gradients, from memory that is shared."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxfit import LoRA, Trainer
from onnxfit.graph import names
from onnxfit.runtime import session
from onnxfit.runtime.shared_initializers import share_packed_weights
from tests.trainable.adapters.files import initializers, packed_file

X = np.random.default_rng(0).standard_normal((6, 32)).astype(np.float32)
Y = np.random.default_rng(1).standard_normal((6, 6)).astype(np.float32)


def make(backend: str = "full") -> Trainer:
    adapters = LoRA(rank=2, target="fc*")
    return Trainer(packed_file(), loss="mse", optimizer="adam", adapters=adapters, backend=backend)


def train_graph(trainer: Trainer) -> onnx.ModelProto:
    trainer.train_on_batch(X, Y)
    return trainer._training.backend.graph("train", trainer._training.backend._last_shapes)


def test_the_input_takes_the_place_of_the_choice() -> None:
    model = train_graph(make())
    assert "Where" in {node.op_type for node in model.graph.node}
    kept = initializers(model)
    share_packed_weights(model, {names.packed("fc2_Q4")}, "cpu")
    onnx.checker.check_model(model)
    assert "Where" not in {node.op_type for node in model.graph.node}
    assert [v.name for v in model.graph.input if "packed" in v.name] == ["train/packed/fc2_Q4"]
    assert initializers(model) == kept, "the forward pass still reads a constant"
    (product,) = (n for n in model.graph.node if n.op_type == "MatMulNBits" and "fc2_Q4" in n.input)
    assert product.input[1] == "fc2_Q4"


def test_a_graph_without_shared_weights_stays_as_it_is() -> None:
    model = train_graph(make())
    before = model.SerializeToString(deterministic=True)
    share_packed_weights(model, (), "cpu")
    assert model.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_training_is_the_same_to_the_last_bit(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = make(backend)
    bound: list[str] = []

    def share(model: onnx.ModelProto, state: object, device: str, **settings: bool) -> None:
        share_packed_weights(model, state, device, **settings)  # type: ignore[arg-type]
        bound.extend(v.name for v in model.graph.input if v.name.startswith("train/packed/"))

    monkeypatch.setattr(session, "share_packed_weights", share)
    losses = [shared.train_on_batch(X, Y)["loss"] for _ in range(4)]
    assert bound == ["train/packed/fc2_Q4"], "no gradient passes the first layer"
    monkeypatch.setattr(session, "share_packed_weights", lambda *_, **settings: None)
    alone = make(backend)
    assert losses == [alone.train_on_batch(X, Y)["loss"] for _ in range(4)]
    weights = alone.get_weights()
    for name, array in shared.get_weights().items():
        np.testing.assert_array_equal(array, weights[name])
    assert losses[-1] < losses[0]


def test_packed_weights_are_the_bytes_of_the_file_after_training() -> None:
    trainer = make()
    trainer.fit(X, Y, epochs=3, batch_size=4, verbose=0)
    kept = initializers(trainer.export())
    assert {name: kept[name] for name in initializers(packed_file())} == initializers(packed_file())
