"""Recipes and graphs of dense networks, which equal trainers of one process build only once.

A search over settings fits many small networks that differ only in numbers: initial weights, means
and deviations of columns, learning rates. Building the gradient and the graphs took most of the
time of such a fit. Only descriptions are reused: every trainer has its own state.
"""

from __future__ import annotations

import dataclasses
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
import onnx

from onnxfit.gradients.table import RULES
from onnxfit.graph.dense import NETWORK, PRODUCER
from onnxfit.graph.spec import TensorSpec
from onnxfit.load.trainable import TrainableModel
from onnxfit.optimizers import Groups, get_optimizer
from onnxfit.step.recipe import BuiltGraphs, Recipe
from onnxfit.step.recipe_builder import with_numbers
from onnxfit.step.settings import TrainerSettings

MAX_RECIPES = 16
MAX_BYTES = 2**20  # of a model
# The steps of these operators do not depend on the numbers of their constants.
OPERATORS = frozenset({"Add", "Constant", "Div", "MatMul", "Mul", "Relu", "Sub"})
FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)
# Settings that may differ from their defaults.
SETTINGS = {"weights", "loss", "loss_weights", "penalty", "optimizer", "backend", "gradient"}
SETTINGS |= {"seed", "threads"}


class NotReusableError(Exception):
    """A model or a setting whose recipe is built for each trainer."""


def built_once(
    recipe: Recipe,
    kind: tuple[str, int],
    shapes: Mapping[str, TensorSpec],
    graph: Callable[[str, Mapping[str, TensorSpec]], onnx.ModelProto],
) -> onnx.ModelProto:
    """Return `graph(kind[0], shapes)`, which an equal recipe may have built.

    - `kind`: the kind of the graph, and the number of ranks.
    """
    build = partial(graph, kind[0], shapes)
    if recipe.built is None:
        return build()
    constant = recipe.model.graph.initializers.keys() - set(recipe.state)
    constants = {name: recipe.array(name).tobytes() for name in constant}
    return recipe.built.graph((kind, recipe.norms, *shapes.items()), build, constants)


class RecipeCache:
    """The recipes that were used last. It may be used from several threads."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all recipes, without waiting for another thread."""
        self._lock = Lock()
        # The rules of gradients are kept, because keys have their ids.
        self._recipes: OrderedDict[Hashable, tuple[Recipe, list[Any]]] = OrderedDict()

    def recipe(
        self,
        trainable: TrainableModel,
        settings: TrainerSettings,
        build: Callable[[], Recipe],
    ) -> Recipe:
        """Return the recipe for training a model, as `build` returns it."""
        try:
            key = _reuse_key(trainable, settings)
        except NotReusableError:
            return build()
        with self._lock:
            found = self._recipes.get(key)
            if found is not None:
                self._recipes.move_to_end(key)
        if found is not None:
            return with_numbers(found[0], trainable, get_optimizer(settings.optimizer))
        recipe = build()
        if recipe.loss_weights:  # `with_numbers` would not add them
            return recipe
        recipe = dataclasses.replace(recipe, built=BuiltGraphs())
        with self._lock:
            self._recipes[key] = recipe, list(RULES.values())
            while len(self._recipes) > MAX_RECIPES:
                self._recipes.popitem(last=False)
        return recipe


def _reuse_key(trainable: TrainableModel, settings: TrainerSettings) -> Hashable:
    """Return a key that is equal for trainers whose recipes differ only in numbers."""
    if not trainable.is_file:
        raise NotReusableError
    chosen = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    defaults = {f.name: f.default for f in dataclasses.fields(settings)}
    if any(chosen[name] != defaults[name] for name in chosen.keys() - SETTINGS):
        raise NotReusableError
    optimizer = get_optimizer(settings.optimizer)
    if isinstance(optimizer, Groups):  # the ratios of its learning rates are constants of the graph
        raise NotReusableError
    if not callable(optimizer.learning_rate):
        optimizer = optimizer.with_learning_rate(0.0)
    chosen |= {"optimizer": optimizer, "seed": 0}
    rules = tuple(map(id, RULES.values()))
    return _structure_of(trainable.file.proto), _hashable(chosen), rules


def _structure_of(model: onnx.ModelProto) -> Hashable:
    """Return a model without the numbers of its tensors, with traits of these numbers."""
    is_dense = (model.producer_name, model.graph.name) == (PRODUCER, NETWORK)
    if not is_dense or model.functions or model.ByteSize() > MAX_BYTES:
        raise NotReusableError
    if any(node.domain or node.op_type not in OPERATORS for node in model.graph.node):
        raise NotReusableError
    structure = onnx.ModelProto()
    structure.CopyFrom(model)
    traits = []
    for tensor in structure.graph.initializer:  # which include the tensors of Constant nodes
        if tensor.data_type not in FLOATS or not tensor.HasField("raw_data"):
            raise NotReusableError
        traits.append(_traits(onnx.numpy_helper.to_array(tensor)))
        tensor.ClearField("raw_data")
    return structure.SerializeToString(deterministic=True), tuple(traits)


def _traits(numbers: Any) -> Hashable:
    """Return whether numbers could be a mask or a flag, which are not trained."""
    return np.unique(numbers).size > 2, bool(np.any(numbers)), bool(np.all(np.isfinite(numbers)))


def _hashable(value: Any) -> Hashable:
    """Return a key of a setting: equal keys have equal numbers of the same types."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return type(value), _hashable(parts)
    if isinstance(value, Mapping):
        return tuple((_hashable(key), _hashable(entry)) for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_hashable, value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return type(value), repr(value)
    raise NotReusableError  # a function may compute something else the next time


RECIPES = RecipeCache()

if hasattr(os, "register_at_fork"):
    # Another thread of the parent process may hold the lock, and does not exist in the child.
    os.register_at_fork(after_in_child=RECIPES.clear)
