"""Recipes and graphs that trainers of equal networks share: the results are those of a fresh trainer,
bit for bit, and what differs is built anew.
"""

from __future__ import annotations

import os
import threading
from copy import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest

from onnxfit import Trainer, losses
from onnxfit.gradients import table
from onnxfit.graph.dense import Scaling, dense_network
from onnxfit.optimizers import SGD, Adam, Optimizer
from onnxfit.penalties import L1, L2
from onnxfit.schedules import InverseScaling
from onnxfit.step import reuse
from onnxfit.step.recipe import MAX_GRAPHS, Recipe
from onnxfit.step.recipe_builder import build_recipe
from onnxfit.step.reuse import MAX_RECIPES, RecipeCache

Array = npt.NDArray[Any]
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(30, 4)).astype(np.float32)
Y = RANDOM.normal(size=(30, 2)).astype(np.float32)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch) -> RecipeCache:
    """A cache that is empty when a test begins."""
    fresh = RecipeCache()
    monkeypatch.setattr("onnxfit.trainer.RECIPES", fresh)
    return fresh


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The recipes and graphs that were built, in their order."""
    built: list[str] = []
    graph = reuse.BuiltGraphs.graph

    def build(*positional: Any, **named: Any) -> Recipe:
        built.append("recipe")
        return build_recipe(*positional, **named)

    def build_graph(self: Any, key: Any, make: Any, constants: Any) -> onnx.ModelProto:
        def counted() -> onnx.ModelProto:
            built.append(key[0][0])
            model: onnx.ModelProto = make()
            return model

        return graph(self, key, counted, constants)

    monkeypatch.setattr("onnxfit.trainer.build_recipe", build)
    monkeypatch.setattr(reuse.BuiltGraphs, "graph", build_graph)
    return built


def network(
    seed: int = 0, dtype: Any = np.float32, sizes: Any = (4, 8, 2), number: int = 0
) -> onnx.ModelProto:
    random = np.random.default_rng(number)
    inputs = Scaling(random.normal(size=4) * 3, random.uniform(2, 9, size=4))
    outputs = Scaling(random.normal(size=2) * 3, random.uniform(2, 9, size=2))
    return dense_network(list(sizes), np.dtype(dtype), seed, inputs, outputs)


def trainer(model: onnx.ModelProto | None = None, **settings: Any) -> Trainer:
    chosen = {"loss": "mse", "optimizer": Adam(0.01), "penalty": L2(0.1), **settings}
    return Trainer(network() if model is None else model, **chosen)


def results(one: Trainer) -> list[Any]:
    history = one.fit(X, Y, epochs=2, batch_size=12, validation_data=(X[:7], Y[:7]), verbose=0)
    return [
        history.history,
        one.predict(X).tobytes(),
        one.predict_on_batch(X).tobytes(),
        *(array.tobytes() for array in one.get_weights().values()),
        *(array.tobytes() for array in one.get_state()["slots"].values()),
        one.export(None).SerializeToString(),
    ]


@pytest.mark.parametrize("backend", ["full", "in_place", "forward_backward"])
def test_results_are_those_of_a_fresh_trainer(
    backend: str, cache: RecipeCache, builds: list[str]
) -> None:
    variants: list[dict[str, Any]] = [
        {"model": network(seed, number=number), "optimizer": Adam(rate), "seed": seed}
        for seed, number, rate in [(0, 0, 0.01), (1, 1, 0.01), (2, 2, 0.5), (0, 0, 0.01)]
    ]
    reused = [results(trainer(backend=backend, **variant)) for variant in variants]
    assert builds.count("recipe") == 1
    for variant, found in zip(variants, reused, strict=True):
        cache._recipes.clear()
        assert results(trainer(backend=backend, **variant)) == found
    assert builds.count("recipe") == 5


def test_the_graphs_are_those_of_a_fresh_trainer(builds: list[str]) -> None:
    """The numbers of constants reach a graph, and nothing else depends on them."""
    for number in range(4):
        one = trainer(network(number, number=number), optimizer=Adam(0.1 * number))
        backend = one._training.backend
        batch = {spec.name: spec for spec in one._training.recipe.declared_batch.values()}
        for kind in ("train", "evaluate", "predict"):
            own = backend.graph(kind, batch)
            found = reuse.built_once(backend.recipe, (kind, 1), batch, backend.graph)
            assert found.SerializeToString() == own.SerializeToString()
    assert builds == ["recipe", "train", "evaluate", "predict"]


@pytest.mark.filterwarnings("ignore:The loss is still falling")
def test_a_search_builds_each_architecture_once(builds: list[str]) -> None:
    pytest.importorskip("sklearn")
    from sklearn.model_selection import GridSearchCV

    from onnxfit.sklearn import OnnxClassifier

    labels = (X[:, 0] > 0).astype(int)
    grid = {"hidden_layer_sizes": [(3,), (5,)], "learning_rate": [0.01, 0.1, 0.2]}
    search = GridSearchCV(OnnxClassifier(epochs=2, random_state=0), grid, cv=5, refit=False)
    search.fit(X, labels)
    assert builds == ["recipe", "train"] * 2


DIFFERENT: dict[str, dict[str, Any]] = {
    "loss": {"loss": "mae"},
    "setting of the loss": {"loss": losses.Huber(delta=2.0)},
    "weight of the loss": {"loss": {"predictions": "mse"}, "loss_weights": {"predictions": 2.0}},
    "optimizer": {"optimizer": SGD(0.01)},
    "setting of the optimizer": {"optimizer": Adam(0.01, betas=(0.8, 0.99))},
    "schedule": {"optimizer": Adam(InverseScaling(0.01))},
    "penalty": {"penalty": L1(0.1)},
    "weight of the penalty": {"penalty": L2(0.2)},
    "trained weights": {"weights": ["coefficients_0"]},
    "sizes": {"model": network(sizes=(4, 9, 2))},
    "layers": {"model": network(sizes=(4, 8, 8, 2))},
    "element type": {"model": network(dtype=np.float64)},
    "backend": {"backend": "in_place"},
    "no scaling": {"model": dense_network([4, 8, 2], np.dtype(np.float32), 0)},
    "clipping": {"clip_norm": 1.0},
    "metrics": {"metrics": ["mae"]},
    "accumulation": {"accumulate": 2},
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_is_built_anew(name: str, builds: list[str]) -> None:
    trainer()
    different = trainer(**DIFFERENT[name])
    assert builds == ["recipe"] * 2
    trainer(optimizer=Adam(0.5), model=network(3), seed=7)
    assert builds == ["recipe"] * 2
    assert different.settings["optimizer"] == DIFFERENT[name].get("optimizer", Adam(0.01))


def test_functions_and_files_of_the_user_are_built_each_time(builds: list[str]) -> None:
    own = network()
    own.graph.name = "mine"
    for settings in (
        {"loss": lambda op, y, p: op.Abs(y - p)},
        {"optimizer": Adam(lambda step: 0.1)},
        {"model": own},
    ):
        builds.clear()
        for _ in range(2):
            trainer(**settings)  # type: ignore[arg-type]
        assert builds == ["recipe"] * 2


def test_a_new_rule_for_a_gradient_counts(
    monkeypatch: pytest.MonkeyPatch, builds: list[str]
) -> None:
    trainer()
    monkeypatch.setitem(table.RULES, ("", "Relu"), copy(table.RULES["", "Relu"]))
    trainer()
    assert builds == ["recipe"] * 2


def test_errors_are_those_of_a_fresh_trainer(cache: RecipeCache) -> None:
    def error() -> str:
        with pytest.raises(ValueError, match="learning") as raised:
            trainer(optimizer=Adam(1e300))
        return str(raised.value)

    fresh = error()
    trainer()
    assert error() == fresh


def test_the_cache_is_bounded(cache: RecipeCache) -> None:
    for width in range(1, MAX_RECIPES + 4):
        results(trainer(network(sizes=(4, width, 2))))
    assert len(cache._recipes) == MAX_RECIPES
    one = trainer()
    for rows in range(1, 20):
        one.fit(X[:rows], Y[:rows], batch_size=rows, verbose=0)
    built = one._training.recipe.built
    assert built is not None
    assert len(built._graphs) <= MAX_GRAPHS
    large = dense_network([4, 100_000, 2], np.dtype(np.float32), 0)
    before = list(cache._recipes)
    Trainer(large, loss="mse")
    assert list(cache._recipes) == before


def test_threads_do_not_disturb_each_other(cache: RecipeCache) -> None:
    models = [network(seed, number=seed) for seed in range(4)]
    alone = []
    for model in models:
        cache._recipes.clear()
        alone.append(results(trainer(model, threads=1)))
    cache._recipes.clear()
    found: dict[int, Any] = {}

    def fit(place: int) -> None:
        found[place] = results(trainer(models[place], threads=1))

    threads = [threading.Thread(target=fit, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[place] for place in range(4)] == alone


def test_numbers_that_could_be_a_mask_are_not_shared(builds: list[str]) -> None:
    for center in (np.zeros(4), np.full(4, 3.0), np.array([0, 1, 2, 3.0])):
        model = dense_network([4, 2], np.dtype(np.float32), 0, Scaling(center, np.ones(4)))
        trainer(model, optimizer=SGD(0.1))
    assert builds == ["recipe"] * 3


def test_the_optimizer_of_a_recipe_is_that_of_the_trainer() -> None:
    rates = [0.1, 0.3]
    trainers = [trainer(optimizer=SGD(rate)) for rate in rates]
    chosen: list[Optimizer] = [one._training.recipe.optimizer for one in trainers]
    assert [one.learning_rate for one in chosen] == rates
    assert [one.learning_rate for one in trainers] == rates


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_process_does_not_wait_for_a_thread_of_its_parent() -> None:
    reuse.RECIPES._lock.acquire()
    try:
        process = os.fork()
        if not process:
            os._exit(0 if reuse.RECIPES._lock.acquire(timeout=1) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    finally:
        reuse.RECIPES._lock.release()
