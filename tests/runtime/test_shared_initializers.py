"""Sessions that read packed weights from the arrays of the trainer."""

from __future__ import annotations

import gc

import numpy as np
import onnx
import onnx.parser
import pytest

from onnxfit import LoRA, Trainer
from onnxfit.graph import tensors
from onnxfit.graph.shared_tensors import SharedTensor, contents_of, refer_to
from onnxfit.load.reading import read_model
from onnxfit.runtime.device import Device
from onnxfit.runtime.session import StatelessSession
from onnxfit.runtime.values import array_of, ort_value

CPU = Device("cpu", 0)
WIDTH = 256
X = np.random.default_rng(0).standard_normal((6, WIDTH)).astype(np.float32)


def packed_file() -> onnx.ModelProto:
    """Two layers of 4 bits, whose packed integers are large enough to be shared."""
    rng = np.random.default_rng(1)
    bits = f"<K = {WIDTH}, N = {WIDTH}, bits = 4, block_size = 16>"
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
        g (float[N, {WIDTH}] x) => (float[N, {WIDTH}] y) {{
        h = com.microsoft.MatMulNBits{bits}(x, w0, s0)
        a = Tanh(h)
        y = com.microsoft.MatMulNBits{bits}(a, w1, s1) }}"""
    )
    blocks = WIDTH // 16
    for i in range(2):
        integers = rng.integers(0, 256, (WIDTH, blocks, 8), dtype=np.uint8)
        scales = rng.uniform(0.01, 0.05, WIDTH * blocks).astype(np.float32)
        for array, name in ((integers, f"w{i}"), (scales, f"s{i}")):
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def run(session: StatelessSession) -> np.ndarray:
    return np.array(array_of(session({"x": ort_value(X, CPU)})["y"]))


def test_a_session_reads_the_arrays_to_which_a_model_refers() -> None:
    whole = read_model(packed_file()).whole()
    expected = run(StatelessSession(whole, CPU, 1, "tried"))
    referring = onnx.ModelProto()
    referring.CopyFrom(whole)
    arrays = []
    for tensor in referring.graph.initializer:
        arrays.append(np.frombuffer(tensor.raw_data, np.uint8).copy())
        refer_to(tensor, arrays[-1])
    session = StatelessSession(referring, CPU, 1, "tried")
    del arrays, referring
    gc.collect()
    np.testing.assert_array_equal(run(session), expected)


def make(backend: str) -> Trainer:
    adapters = LoRA(rank=2, target="w*")
    return Trainer(packed_file(), loss="mse", adapters=adapters, backend=backend, threads=1)


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_every_graph_refers_to_one_copy_of_packed_weights(backend: str) -> None:
    trainer = make(backend)
    initializers = trainer._training.recipe.model.graph.initializers
    assert all(isinstance(initializers[name].const_value, SharedTensor) for name in ("w0", "s1"))
    file = {tensor.name: tensor for tensor in trainer._training.trainable.file.graph.initializer}
    readers = 0
    for graph in trainer._training.backend.graphs(trainer._training.recipe.declared_batch).values():
        assert graph.ByteSize() < 20_000
        for tensor in graph.graph.initializer:
            if tensor.name in file:
                assert contents_of(tensor) is contents_of(file[tensor.name])
                readers += 1
    assert readers >= 12


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_results_are_those_of_graphs_with_the_weights_inside(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def results() -> list[np.ndarray]:
        trainer = make(backend)
        losses = [trainer.train_on_batch(X, -X)["loss"] for _ in range(3)]
        evaluated = trainer.evaluate(X, -X)["loss"]
        return [
            np.array([*losses, evaluated]),
            trainer.predict(X),
            trainer.predict_on_batch(X),
            *trainer.get_weights().values(),
        ]

    shared = results()
    monkeypatch.setattr("onnxfit.step.finish.TYPES", frozenset())
    for ours, theirs in zip(shared, results(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert shared[0][2] < shared[0][0]


def test_a_model_above_the_limit_of_a_graph_keeps_its_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = make("full")
    monkeypatch.setattr(tensors, "MAX_COPIED_BYTES", 30_000)
    monkeypatch.setattr(tensors, "MAX_MODEL_BYTES", 60_000)
    large = make("full")
    assert large._training.recipe.large
    assert set(large._training.recipe.packed) == {"w0", "w1"}
    for _ in range(2):
        assert large.train_on_batch(X, -X) == expected.train_on_batch(X, -X)
    np.testing.assert_array_equal(large.predict(X), expected.predict_on_batch(X))
