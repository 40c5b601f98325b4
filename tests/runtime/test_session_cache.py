"""Sessions that trainers with equal graphs share, whose numbers are those of sessions of their own."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import onnxfit
from onnxfit import LoRA
from onnxfit.optimizers import Adam
from onnxfit.runtime import session, session_cache
from onnxfit.runtime.session_cache import BYTES_OF_SESSION, SessionCache
from onnxfit.training.training import training_of
from tests.models import convolutional

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import models

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)
X = RNG.standard_normal((24, 6)).astype(np.float32)
IMAGES = RNG.standard_normal((24, 1, 8, 8)).astype(np.float32)
Y = RNG.integers(0, 3, 24)


def graph(number: float = 1, sizes: str = "2, 3") -> onnx.ModelProto:
    return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[{sizes}] x) => (float[{sizes}] y) <float c = {{{number}}}, float[{sizes}] z>
        {{ z = Mul(x, c)  y = Add(z, c) }}""")


def random_graph() -> onnx.ModelProto:
    return onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[2, 3] x) => (float[2, 3] y) <float[2, 3] z>
        { z = RandomNormalLike <seed: float = 1> (x)  y = Add(x, z) }""")


def test_equal_graphs_with_equal_settings_are_compiled_once() -> None:
    cache = SessionCache()
    first = cache.session(graph(), ("a",), object)
    assert cache.session(graph(), ("a",), object) is first
    assert cache.session(graph(2), ("a",), object) is not first
    assert cache.session(graph(), ("b",), object) is not first


def test_the_library_of_operators_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = SessionCache()
    first = cache.session(graph(), (), object)
    monkeypatch.setattr(session_cache, "library_path", lambda: "another")
    assert cache.session(graph(), (), object) is not first


@pytest.mark.parametrize(
    "model", [graph(sizes="n, 3"), graph(sizes="2000, 3000"), random_graph()], ids=["any size", "large", "random"]
)  # fmt: skip
def test_some_sessions_are_not_shared(model: onnx.ModelProto) -> None:
    cache = SessionCache()
    assert cache.session(model, (), object) is not cache.session(model, (), object)
    assert not cache._kept


def test_the_sessions_that_were_used_last_are_kept() -> None:
    cache = SessionCache(max_bytes=2 * BYTES_OF_SESSION + 1000)
    first, second = (cache.session(graph(number), (), object) for number in (1, 2))
    assert cache.session(graph(1), (), object) is first
    cache.session(graph(3), (), object)
    assert cache.session(graph(1), (), object) is first
    assert cache.session(graph(2), (), object) is not second


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_process_has_sessions_of_its_own() -> None:
    with session_cache.SESSIONS._lock:
        process = os.fork()
        if not process:
            cache = session_cache.SESSIONS
            os._exit(0 if cache._lock.acquire(timeout=1) and not cache._kept else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


# ---------------------------------------------------------------------- trainers

Make = Callable[..., onnxfit.Trainer]


def dense(number: int, **settings: Any) -> onnxfit.Trainer:
    given = {"loss": "cross_entropy", "optimizer": Adam(0.01 * 2**number), "threads": 1}
    return onnxfit.Trainer(models.dense(6, 8, 3, seed=number), **{**given, **settings})


def images(number: int, dropout: float = 0, **settings: Any) -> onnxfit.Trainer:
    model = convolutional(dropout=dropout, seed=number)
    return onnxfit.Trainer(
        model, loss="cross_entropy", optimizer="adam", seed=number, threads=1, **settings
    )


def float64(number: int, **settings: Any) -> onnxfit.Trainer:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (double[n, 6] x) => (double[n, 3] y) <double[6, 3] w> { y = MatMul(x, w) }""")
    w = np.random.default_rng(number).standard_normal((6, 3))
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    del model.graph.value_info[:]
    return onnxfit.Trainer(model, loss="cross_entropy", optimizer="adam", threads=1, **settings)


def adapted(number: int, **settings: Any) -> onnxfit.Trainer:
    return dense(number, adapters=LoRA(rank=2, target="*"), seed=number, **settings)


TRAINERS: dict[str, tuple[Make, Array]] = {
    "dense": (dense, X),
    "convolutions and statistics": (images, IMAGES),
    "dropout": (partial(images, dropout=0.4), IMAGES),
    "float64": (float64, X.astype(np.float64)),
    "adapters": (adapted, X),
}


def results(trainer: onnxfit.Trainer, x: Array) -> list[Array]:
    weights = trainer.get_weights()
    loss = trainer.test_on_batch(x, Y)
    return [*map(np.asarray, weights.values()), np.asarray(loss), trainer.predict(x)]


def train(trainers: list[onnxfit.Trainer], x: Array, steps: int = 5) -> list[list[Array]]:
    """Train in turns, and evaluate in between."""
    for step in range(steps):
        for trainer in trainers:
            trainer.train_on_batch(x, Y)
            if step == 2:
                trainer.test_on_batch(x, Y)
    return [results(trainer, x) for trainer in trainers]


def sessions_of(trainer: onnxfit.Trainer) -> list[Any]:
    caches = training_of(trainer).backend.caches
    return [bound._session for bound in caches["train"].exact.values()]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> SessionCache:
    cache = SessionCache()
    monkeypatch.setattr(session, "SESSIONS", cache)
    return cache


def alone(make: Callable[[int], onnxfit.Trainer], x: Array, cache: SessionCache) -> Any:
    """The results of trainers that share no session."""
    limit, cache.max_bytes = cache.max_bytes, 0
    found = [train([make(number)], x)[0] for number in range(3)]
    assert not cache._kept
    cache.max_bytes = limit
    return found


def assert_equal(found: list[list[Array]], expected: list[list[Array]]) -> None:
    for own, other in zip(found, expected, strict=True):
        for one, two in zip(own, other, strict=True):
            np.testing.assert_array_equal(one, two)
    assert not np.array_equal(expected[0][0], expected[1][0])


@pytest.mark.parametrize("backend", ["full", "forward_backward", "in_place"])
@pytest.mark.parametrize("kind", TRAINERS)
def test_trainers_that_share_sessions_train_apart(
    kind: str, backend: str, fresh: SessionCache
) -> None:
    make, x = TRAINERS[kind]

    def trainer(number: int) -> onnxfit.Trainer:
        return make(number, backend=backend)

    expected = alone(trainer, x, fresh)
    trainers = [trainer(number) for number in range(3)]
    assert_equal(train(trainers, x), expected)
    if backend == "full":
        # The sizes of random numbers are unknown, and frozen weights are constants of the graph.
        number = 3 if kind in ("dropout", "adapters") else 1
        assert len({id(one) for trainer in trainers for one in sessions_of(trainer)}) == number


@pytest.mark.parametrize(
    "change",
    [
        {"weights": ["!fc1.*"]}, {"penalty": onnxfit.penalties.L2(0.1)}, {"loss": "focal"}, {"threads": 2},
        {"optimizer": Adam(0.01, betas=(0.5, 0.999))}, {"clip_norm": 0.1},
    ],
    ids=str,
)  # fmt: skip
def test_other_settings_have_other_sessions(change: Any, fresh: SessionCache) -> None:
    both = [dense(0), dense(0, **change)]
    train(both, X, steps=1)
    assert sessions_of(both[0])[0] is not sessions_of(both[1])[0]


def test_trainers_in_threads_share_a_session(fresh: SessionCache) -> None:
    expected = alone(dense, X, fresh)
    trainers = [dense(number) for number in range(3)]
    for trainer in trainers:
        trainer.evaluate(X, Y, verbose=0)
    found: dict[int, Any] = {}

    def run(number: int) -> None:
        found[number] = train([trainers[number]], X)[0]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_equal([found[number] for number in range(3)], expected)


def test_a_trainer_goes_on_when_another_one_that_shared_its_session_is_gone(
    fresh: SessionCache,
) -> None:
    expected = alone(dense, X, fresh)
    first, second = dense(0), dense(1)
    train([first, second], X, steps=1)
    del second
    fresh.clear()
    found = train([first], X, steps=4)
    np.testing.assert_array_equal(found[0][0], expected[0][0])
