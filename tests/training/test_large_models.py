"""A model whose frozen weights all graphs share trains as any other.

The bound above which a model is large is lowered to what a test can have.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxfit import LoRA, Trainer
from onnxfit.graph import shared_tensors, tensors
from tests import models

X = np.random.default_rng(0).standard_normal((16, 4), np.float32)
Y = np.random.default_rng(1).standard_normal((16, 3), np.float32)
WEIGHTS = ["fc0.weight", "fc1.weight"]


def trainer_of(source: object, **settings: object) -> Trainer:
    """Adapters beside two frozen layers of 80 kB."""
    return Trainer(
        source, loss="mse", optimizer="adam", adapters=LoRA(rank=2, target=WEIGHTS), **settings
    )  # type: ignore[arg-type]


def network() -> onnx.ModelProto:
    return models.mlp((4, 5000, 3))


def make_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "MAX_COPIED_BYTES", 50_000)


def steps(trainer: Trainer, count: int = 3) -> Trainer:
    for _ in range(count):
        trainer.train_on_batch(X, Y)
    return trainer


def deterministic(model: onnx.ModelProto) -> bytes:
    return model.SerializeToString(deterministic=True)


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
@pytest.mark.parametrize("kind", ["path", "bytes", "proto"])
def test_it_trains_as_a_small_one(
    backend: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network()
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    small = steps(trainer_of(model, backend=backend))
    make_large(monkeypatch)
    sources = {"path": path, "bytes": path.read_bytes(), "proto": model}
    large = steps(trainer_of(sources[kind], backend=backend))
    for name, expected in small.get_weights().items():
        np.testing.assert_allclose(large.get_weights()[name], expected, atol=1e-5)
    assert large.evaluate(X, Y)["loss"] == pytest.approx(small.evaluate(X, Y)["loss"], rel=1e-5)
    np.testing.assert_allclose(large.predict(X), small.predict(X), atol=1e-5)
    assert deterministic(large.model) == deterministic(model) == deterministic(small.model)


def test_it_is_saved_and_exported_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_large(monkeypatch)
    trainer = steps(trainer_of(network()))
    exported = trainer.export(tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx").read_bytes() == deterministic(exported)
    assert not any(tensor.external_data for tensor in exported.graph.initializer)
    np.testing.assert_allclose(Trainer(exported).predict(X), trainer.predict(X), atol=1e-5)
    loaded = Trainer.load(trainer.save(tmp_path / "c"))
    assert deterministic(loaded.model) == deterministic(trainer.model)
    state, other = steps(loaded).get_state(), steps(trainer).get_state()
    np.testing.assert_equal(state["weights"], other["weights"])
    np.testing.assert_equal(state["slots"], other["slots"])


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_no_graph_holds_a_frozen_weight(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_large(monkeypatch)
    trainer = steps(trainer_of(network(), backend=backend), 1)
    graphs = trainer.save_onnx_graph(bytes)
    for name in set(graphs) - {"model", "trained"}:
        graph = onnx.ModelProto.FromString(graphs[name]).graph
        assert all(tensors.nbytes(tensor) <= 1024 for tensor in graph.initializer), name
    # The protos and the graphs of the trainer read the same memory.
    (frozen,) = (t for t in trainer._trainable.file.graph.initializer if t.name == WEIGHTS[0])
    data = shared_tensors.array_of(frozen)
    assert np.shares_memory(data, trainer._backend.state.buffer(WEIGHTS[0]).array)


def test_trained_weights_of_a_large_model_are_the_trainers_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = steps(Trainer(network(), loss="mse"))
    make_large(monkeypatch)
    large = steps(Trainer(network(), loss="mse"))
    np.testing.assert_equal(large.get_weights(), small.get_weights())
    assert deterministic(large.export()) == deterministic(small.export())
