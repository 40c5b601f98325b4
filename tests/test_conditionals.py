"""Training through Ifs: their gradients, and how steps grow with their depth."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnx.helper as oh
import pytest
from onnx.numpy_helper import to_array

import onnxfit
from onnxfit import Trainer
from tests.conditionals import nested, operators, rows, session_of

BACKENDS = ["full", "forward_backward", "in_place"]
PATHS = [path for depth in (1, 2, 3) for path in itertools.product((True, False), repeat=depth)]
KINDS = {"unknown": ["data"]}


def conditions(kind: str, depth: int) -> list[str]:
    """The names of the conditions from the outermost on, each of a kind in turn."""
    return list(itertools.islice(itertools.cycle(KINDS[kind]), depth))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_the_gradient_meets_central_differences(path: tuple[bool, ...], kind: str) -> None:
    """In float64, by runs of the untouched model: for any depth and any branch."""
    model, _ = nested(conditions(kind, len(path)), path, "double")
    x, dy = rows(3, np.float64)
    weights = {t.name: to_array(t) for t in model.graph.initializer if t.name in ("w", "v")}
    graph = session_of(onnxfit.gradient_model(model, ["w", "v", "x"]))
    found = dict(zip(("y", "w", "v", "x"), graph.run(None, {"x": x, "y_grad": dy})))
    for name, array in weights.items():  # an initializer that is also an input can be fed
        model.graph.input.append(
            oh.make_tensor_value_info(name, onnx.TensorProto.DOUBLE, array.shape)
        )
    session = session_of(model)
    feeds = {"x": x, **weights}
    np.testing.assert_allclose(found["y"], session.run(None, feeds)[0], rtol=1e-12)
    for name, array in feeds.items():
        expected = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            moved = np.zeros_like(array)
            moved[index] = 1e-6
            high, low = (session.run(None, {**feeds, name: array + s * moved})[0] for s in (1, -1))
            expected[index] = ((high - low) * dy).sum() / 2e-6
        np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "path", [(False,) * 4, (True, False, False, True, True, False), (True,) * 12], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_nested_ifs_train_as_the_branches_that_they_take(
    kind: str, path: tuple[bool, ...], backend: str
) -> None:
    x, y = rows()
    trained = []
    for model in nested(conditions(kind, len(path)), path):
        trainer = Trainer(model, loss="mse", optimizer="adam", weights=["w", "v"], backend=backend)
        trainer.fit(x, y, epochs=3, batch_size=4, shuffle=False, verbose=0)
        trained.append([*trainer.get_weights().values(), trainer.predict(x)])
    for found, expected in zip(*trained):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_a_gradient_grows_with_the_square_of_the_depth() -> None:
    """The names of the nodes, too."""
    nodes, sizes = [], []
    for depth in (6, 12, 24):
        model, _ = nested(["data"] * depth, [True] * depth)
        graph = onnxfit.gradient_model(model, ["w", "v"])
        nodes.append(len(operators(graph)))
        sizes.append(graph.ByteSize())
    assert nodes[2] < 4.5 * nodes[1] < 4.5**2 * nodes[0]
    assert sizes[2] < 8 * sizes[1] < 8**2 * sizes[0]
