"""A model whose frozen weights all graphs share trains as any other.

The bound above which a model is large is lowered to what a test can have.
"""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxfit import LoRA, Trainer, add_loss, gradient_model
from onnxfit.callbacks import ModelCheckpoint
from onnxfit.graph import shared_tensors, tensors
from onnxfit.training import checkpoint
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
    exported = trainer.export()
    assert not any(tensor.external_data for tensor in exported.graph.initializer)
    np.testing.assert_allclose(Trainer(exported).predict(X), trainer.predict(X), atol=1e-5)
    loaded = Trainer.load(trainer.save(tmp_path / "c"))
    assert deterministic(loaded.model) == deterministic(trainer.model)
    state, other = steps(loaded).get_state(), steps(trainer).get_state()
    np.testing.assert_equal(state["weights"], other["weights"])
    np.testing.assert_equal(state["slots"], other["slots"])


EXPORTS = ["merged", "inputs"]


@pytest.mark.parametrize("adapters", EXPORTS)
def test_the_written_file_is_the_returned_model(
    adapters: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_large(monkeypatch)
    trainer = steps(trainer_of(network()))
    expected = trainer.export(adapters=adapters)
    path = tmp_path / "out.onnx"
    returned = trainer.export(path, adapters=adapters)
    assert path.read_bytes() == deterministic(expected)
    onnx.checker.check_model(path)
    # what is returned has no second copy of the large tensors, but their places in the file
    assert returned.ByteSize() < 20_000
    onnx.load_external_data_for_model(returned, str(tmp_path))
    for tensor in returned.graph.initializer:
        tensor.ClearField("data_location")
    assert deterministic(returned) == deterministic(expected)


@pytest.mark.parametrize("adapters", EXPORTS)
def test_a_file_with_external_data_has_the_same_tensors(
    adapters: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_large(monkeypatch)
    trainer = steps(trainer_of(network()))
    expected = trainer.export(adapters=adapters)
    monkeypatch.setattr(tensors, "MAX_MODEL_BYTES", 50_000)
    trainer.export(tmp_path / "out.onnx", adapters=adapters)
    assert (tmp_path / "out.onnx.data").stat().st_size > 150_000
    loaded = onnx.load(tmp_path / "out.onnx")
    for ours, theirs in zip(loaded.graph.initializer, expected.graph.initializer, strict=True):
        np.testing.assert_array_equal(
            onnx.numpy_helper.to_array(ours), onnx.numpy_helper.to_array(theirs)
        )
    assert list(loaded.graph.node) == list(expected.graph.node)


def test_a_snapshot_of_the_model_outlives_training_and_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_large(monkeypatch)
    trainer = steps(trainer_of(network()))
    expected = deterministic(trainer.export())
    snapshot = trainer.model_snapshot()
    steps(trainer)
    assert deterministic(trainer.export()) != expected
    del trainer
    gc.collect()
    assert snapshot.write(tmp_path / "out.onnx").read_bytes() == expected


def test_other_files_of_a_large_model_equal_its_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_large(monkeypatch)
    trainer = trainer_of(network())
    saved = ModelCheckpoint(tmp_path / "best.onnx", save_weights_only=True)
    trainer.fit(X, Y, callbacks=saved, verbose=0)
    expected = deterministic(trainer.export())
    assert (tmp_path / "best.onnx").read_bytes() == expected
    trainer.save_onnx_graph(tmp_path / "graphs")
    assert (tmp_path / "graphs" / "trained.onnx").read_bytes() == expected
    assert (tmp_path / "graphs" / "model.onnx").read_bytes() == deterministic(network())
    contents = checkpoint.load(trainer.save(tmp_path / "c"), {})
    contents.trained_snapshot().write(tmp_path / "of_checkpoint.onnx")
    assert (tmp_path / "of_checkpoint.onnx").read_bytes() == expected


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_no_graph_holds_a_frozen_weight(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_large(monkeypatch)
    trainer = steps(trainer_of(network(), backend=backend), 1)
    graphs = trainer.save_onnx_graph(bytes)
    for name in set(graphs) - {"model", "trained"}:
        graph = onnx.ModelProto.FromString(graphs[name]).graph
        assert all(tensors.nbytes(tensor) <= 1024 for tensor in graph.initializer), name
    # The protos and the graphs of the trainer read the same memory.
    (frozen,) = (
        t for t in trainer._training.trainable.file.graph.initializer if t.name == WEIGHTS[0]
    )
    data = shared_tensors.array_of(frozen)
    assert np.shares_memory(data, trainer._training.backend.state.buffer(WEIGHTS[0]).array)


def test_trained_weights_of_a_large_model_are_the_trainers_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = steps(Trainer(network(), loss="mse"))
    make_large(monkeypatch)
    large = steps(Trainer(network(), loss="mse"))
    np.testing.assert_equal(large.get_weights(), small.get_weights())
    assert deterministic(large.export()) == deterministic(small.export())


def test_returned_graphs_have_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    make_large(monkeypatch)
    model = network()
    for graph in (add_loss(model, "mse"), gradient_model(model)):
        assert not any(tensor.external_data for tensor in graph.graph.initializer)
        onnx.checker.check_model(graph)
