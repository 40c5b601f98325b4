"""Sessions for inference of a model with packed weights: which are shared, and which released."""

from __future__ import annotations

import gc
import weakref

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest

from onnxfit import LoRA, Trainer
from onnxfit.graph import tensors
from onnxfit.runtime import session
from onnxfit.runtime.session_cache import SessionCache
from tests.helpers import compiled_graphs
from tests.load.test_caches import Decoder
from tests.runtime.test_shared_initializers import WIDTH, X, packed_file

Y = np.random.default_rng(2).standard_normal(X.shape).astype(np.float32)
BOTH_BACKENDS = pytest.mark.parametrize("backend", ["full", "forward_backward"])


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed weights of any size are large."""
    monkeypatch.setattr(tensors, "MAX_PACKED_BYTES", 0)


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> dict[str, weakref.WeakSet[object]]:
    """Name of a graph -> its sessions that are not released."""
    sessions: dict[str, weakref.WeakSet[object]] = {}
    compile_model = session.compile_model

    def recording(model: onnx.ModelProto, *arguments: object, **settings: object) -> object:
        compiled = compile_model(model, *arguments, **settings)  # type: ignore[arg-type]
        sessions.setdefault(str(arguments[2]), weakref.WeakSet()).add(compiled._sess)
        return compiled

    monkeypatch.setattr(session, "compile_model", recording)
    monkeypatch.setattr(session, "SESSIONS", SessionCache(max_bytes=0))  # as for large graphs
    return sessions


def kept(sessions: dict[str, weakref.WeakSet[object]]) -> set[str]:
    return {name for name, several in sessions.items() if len(several)}


def make(model: onnx.ModelProto | None = None, **settings: object) -> Trainer:
    given = {"adapters": LoRA(rank=2), "loss": "mse", "optimizer": "adam", "threads": 1}
    return Trainer(model or packed_file(), **{**given, **settings})  # type: ignore[arg-type]


def exported_outputs(trainer: Trainer) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    file = trainer.export().SerializeToString()
    bare = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return np.array(bare.run(None, {"x": X})[0])


@BOTH_BACKENDS
@pytest.mark.parametrize("penalty", [None, 0.1])
def test_evaluation_runs_the_session_of_predict_on_batch(
    backend: str, penalty: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(backend=backend, metrics="mae", penalty=penalty)
    trainer.train_on_batch(X, Y)
    compiled = compiled_graphs(monkeypatch)
    predicted = trainer.predict_on_batch(X)
    results = trainer.evaluate(X, Y, batch_size=4)
    trainer.predict_on_batch(X[:3])
    assert compiled[0] == "predict"
    assert set(compiled[1:]) == {"evaluate"}
    error = (predicted - Y).astype(np.float64)
    weights = sum(np.sum(w.astype(np.float64) ** 2) for w in trainer.get_weights().values())
    assert results["loss"] == pytest.approx(np.mean(error**2) + (penalty or 0) * weights, rel=1e-5)
    assert results["mae"] == pytest.approx(np.mean(np.abs(error)), rel=1e-5)


@BOTH_BACKENDS
def test_predictions_are_those_of_the_exported_file_to_the_last_bit(backend: str) -> None:
    trainer = make(backend=backend)
    for _ in range(3):
        trainer.train_on_batch(X, Y)
        assert np.array_equal(trainer.predict(X), exported_outputs(trainer))


def test_without_adapters_the_trained_tensors_are_in_the_predictions() -> None:
    """A bias that is trained itself, beside packed weights that are shared."""
    file = packed_file()
    file.graph.node[-1].output[0] = "product"
    file.graph.node.append(onnx.helper.make_node("Add", ["product", "bias"], ["y"]))
    bias = np.zeros(WIDTH, np.float32)
    file.graph.initializer.append(onnx.numpy_helper.from_array(bias, "bias"))
    trainer = make(file, adapters=None, weights=["bias"])
    before = trainer.predict(X)
    trainer.train_on_batch(X, Y)
    assert np.array_equal(trainer.predict(X), exported_outputs(trainer))
    step = trainer.get_weights()["bias"]
    np.testing.assert_allclose(trainer.predict(X), before + step, atol=1e-4)


def test_a_tensor_that_numpy_cannot_pass_is_in_the_compiled_model() -> None:
    """A bfloat16 tensor as large as those that sessions share."""
    file = packed_file()
    file.graph.node[-1].output[0] = "product"
    file.graph.node.append(onnx.helper.make_node("Cast", ["table"], ["floats"], to=1))
    file.graph.node.append(onnx.helper.make_node("ReduceSum", ["floats"], ["sum"], keepdims=0))
    file.graph.node.append(onnx.helper.make_node("Add", ["product", "sum"], ["y"]))
    table = np.full(tensors.MAX_INLINE_BYTES * 16, 0.5, ml_dtypes.bfloat16)
    file.graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))
    trainer = make(file)
    trainer.train_on_batch(X, Y)
    assert np.array_equal(trainer.predict(X), exported_outputs(trainer))


@pytest.mark.usefixtures("large")
def test_one_session_for_inference_is_kept_beside_that_of_training(
    alive: dict[str, weakref.WeakSet[object]],
) -> None:
    trainer = make()
    trainer.train_on_batch(X, Y)
    for _ in range(2):
        trainer.evaluate(X, Y)
        assert kept(alive) == {"train", "predict", "evaluate"}  # "evaluate" is the loss alone
        trainer.predict(X)
        assert kept(alive) == {"train", "prediction", "evaluate"}
    assert len(alive["train"]) == 1


@pytest.mark.usefixtures("large")
def test_training_and_evaluation_alternate_without_compiling_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = make()
    trainer.fit(X, Y, validation_data=(X, Y), epochs=1, verbose=0)
    compiled = compiled_graphs(monkeypatch)
    trainer.fit(X, Y, validation_data=(X, Y), epochs=3, verbose=0)
    assert compiled == []


def test_small_packed_weights_keep_all_sessions(
    alive: dict[str, weakref.WeakSet[object]],
) -> None:
    trainer = make()
    trainer.evaluate(X, Y)
    trainer.predict(X)
    assert kept(alive) == {"predict", "evaluate", "prediction"}


@pytest.mark.usefixtures("large")
def test_generation_takes_turns_with_evaluation(
    alive: dict[str, weakref.WeakSet[object]],
) -> None:
    trainer = make(Decoder(True).model, loss="causal_lm")
    ids = np.random.default_rng(0).integers(0, 9, (4, 6))
    rows = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    rows = {spec.name: rows[spec.name] for spec in trainer.inputs}
    trainer.fit(rows, ids, verbose=0)
    texts = trainer.generate([[1, 2, 3]], max_new_tokens=3)
    loss = trainer.evaluate(rows, ids)["loss"]
    assert kept(alive) == {"train", "predict", "evaluate"}
    assert trainer.generate([[1, 2, 3]], max_new_tokens=3) == texts
    assert kept(alive) == {"train", "generation", "evaluate"}
    assert trainer.evaluate(rows, ids)["loss"] == loss


def test_a_released_trainer_is_freed_without_a_collection() -> None:
    gc.disable()
    try:
        trainer = make()
        trainer.predict(X)
        backend = weakref.ref(trainer._training.backend)
        del trainer
        assert backend() is None
    finally:
        gc.enable()
