"""Graphs that are changed for onnxruntime once, and trainers that share them."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import onnxfit
from onnxfit.runtime import compilation, transform_cache
from onnxfit.runtime.transform_cache import TransformCache

Array = np.ndarray[Any, Any]


def graph(number: float = 1, name: str = "y") -> onnx.ModelProto:
    return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[n, 3] x) => (float[n, 3] {name}) <float c = {{{number}}}> {{ {name} = Mul(x, c) }}""")


class Named:
    """A transform that counts its calls, and gives the graph a name."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: onnx.ModelProto, device: str) -> onnx.ModelProto:
        self.calls += 1
        changed = onnx.ModelProto()
        changed.CopyFrom(model)
        changed.graph.name += f"-{device}"
        return changed


def test_equal_graphs_are_changed_once() -> None:
    cache, transform = TransformCache(), Named()
    first, second = (cache.transform(graph(), "cpu", [transform]) for _ in range(2))
    assert transform.calls == 1
    assert second.graph.name == "g-cpu"
    assert second == first


def test_a_graph_belongs_to_its_caller() -> None:
    cache, transform = TransformCache(), Named()
    for _ in range(3):
        changed = cache.transform(graph(), "cpu", [transform])
        assert len(changed.graph.node) == 1
        del changed.graph.node[:]


def test_other_graphs_devices_transforms_and_libraries_are_not_mixed_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, transform, other = TransformCache(), Named(), Named()
    cache.transform(graph(), "cpu", [transform])
    for model in (graph(2), graph(name="z")):
        assert cache.transform(model, "cpu", [transform]).graph.node == model.graph.node
    assert cache.transform(graph(), "cuda", [transform]).graph.name == "g-cuda"
    assert transform.calls == 4
    assert cache.transform(graph(), "cpu", [transform, other]).graph.name == "g-cpu-cpu"
    assert (transform.calls, other.calls) == (5, 1)
    monkeypatch.setattr(transform_cache, "library_path", lambda: "another")
    cache.transform(graph(), "cpu", [transform])
    assert transform.calls == 6


def test_the_graphs_that_were_used_last_are_kept() -> None:
    transform = Named()
    size = transform(graph(), "cpu").ByteSize()
    cache = TransformCache(max_bytes=2 * size + size // 2)
    for number in (1, 2, 1, 3):
        cache.transform(graph(number), "cpu", [transform])
    transform.calls = 0
    for number in (1, 3, 2):
        cache.transform(graph(number), "cpu", [transform])
    assert transform.calls == 1


@pytest.mark.parametrize("kind", ["large", "external"])
def test_some_graphs_are_not_kept(kind: str) -> None:
    model, cache, transform = graph(), TransformCache(), Named()
    if kind == "large":
        model.doc_string = " " * transform_cache.MAX_BYTES_OF_GRAPH
    else:
        model.graph.initializer[0].data_location = onnx.TensorProto.EXTERNAL
    for _ in range(2):
        cache.transform(model, "cpu", [transform])
    assert transform.calls == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_process_does_not_wait_for_a_thread_of_its_parent() -> None:
    with transform_cache.CACHE._lock:
        process = os.fork()
        if not process:
            os._exit(0 if transform_cache.CACHE._lock.acquire(timeout=1) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


X = np.random.default_rng(0).standard_normal((48, 4)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, 48)


def network(seed: int) -> onnx.ModelProto:
    rng = np.random.default_rng(seed)
    weights = {"w": rng.standard_normal((4, 8)), "v": rng.standard_normal((8, 3))}
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[n, 4] x) => (float[n, 3] y) <float ratio = {0.3}, bool training = {1}> {
            h = MatMul(x, w)  a = Relu(h)  d = Dropout(a, ratio, training)  y = MatMul(d, v) }""")
    for name, array in weights.items():
        tensor = onnx.numpy_helper.from_array(array.astype(np.float32), name)
        model.graph.initializer.append(tensor)
    return model


def trainer(number: int, backend: str) -> onnxfit.Trainer:
    return onnxfit.Trainer(
        network(number),
        loss="cross_entropy",
        optimizer=onnxfit.optimizers.Adam(0.01 * 3**number),
        seed=number,
        backend=backend,
        threads=1,
    )


def train(one: onnxfit.Trainer, steps: int = 6) -> dict[str, Array]:
    for _ in range(steps):
        one.train_on_batch(X, Y)
    return dict(one.get_weights())


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> TransformCache:
    cache = TransformCache()
    monkeypatch.setattr(compilation, "CACHE", cache)
    return cache


def alone(backend: str, cache: TransformCache) -> list[dict[str, Array]]:
    """The weights of trainers that share no graphs."""
    found = []
    for number in range(3):
        cache.clear()
        found.append(train(trainer(number, backend)))
    cache.clear()
    return found


def assert_equal(found: Any, expected: list[dict[str, Array]]) -> None:
    for number, weights in enumerate(expected):
        assert found[number].keys() == weights.keys()
        for name, array in weights.items():
            np.testing.assert_array_equal(found[number][name], array)
    assert not np.array_equal(expected[0]["w"], expected[1]["w"])


@pytest.mark.parametrize("backend", ["full", "forward_backward", "in_place"])
def test_trainers_with_equal_graphs_train_apart(backend: str, fresh: TransformCache) -> None:
    expected = alone(backend, fresh)
    trainers = [trainer(number, backend) for number in range(3)]
    trainers[0].train_on_batch(X, Y)
    graphs = len(fresh._kept)
    for one in trainers[1:]:
        one.train_on_batch(X, Y)
    assert len(fresh._kept) == graphs > 0  # the graphs are equal
    for _ in range(5):
        for one in trainers:
            one.train_on_batch(X, Y)
    assert_equal([dict(one.get_weights()) for one in trainers], expected)


def test_trainers_in_threads_train_apart(fresh: TransformCache) -> None:
    expected = alone("full", fresh)
    found: dict[int, dict[str, Array]] = {}

    def run(number: int) -> None:
        found[number] = train(trainer(number, "full"))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_equal(found, expected)
