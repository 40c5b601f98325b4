"""Training through Ifs: their gradients, how steps grow with their depth, and replaced Ifs."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnx.helper as oh
import onnx.parser
import pytest
from onnx.numpy_helper import to_array

import onnxfit
from onnxfit import Trainer
from onnxfit.errors import SettingError
from tests.conditionals import CONDITIONS, KNOWN, nested, operators, rows, session_of

BACKENDS = ["full", "forward_backward", "in_place"]
PATHS = [path for depth in (1, 2, 3) for path in itertools.product((True, False), repeat=depth)]
KINDS = {"unknown": ["data"], "known": list(KNOWN), "both": list(CONDITIONS)[::-1]}


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


@pytest.mark.parametrize("backend", BACKENDS)
def test_conditions_that_only_onnxruntime_can_compute(backend: str) -> None:
    """It replaces nested Ifs wrongly: it then refuses the graph, or crashes."""
    x, y = rows()
    for depth in (2, 3, 6):
        trained = []
        for model in nested(["arithmetic outside"] * depth, [True] * depth):
            trainer = Trainer(model, loss="mse", weights=["w", "v"], backend=backend)
            trainer.fit(x, y, epochs=2, batch_size=4, shuffle=False, verbose=0)
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


def test_the_exported_file_has_its_nodes_as_they_were() -> None:
    model, _ = nested(list(CONDITIONS), [True, False] * (len(CONDITIONS) // 2))
    x, y = rows()
    trainer = Trainer(model, loss="mse", weights=["w", "v"])
    trainer.fit(x, y, epochs=2, verbose=0)
    exported = trainer.export()
    for field in ("node", "input", "output"):
        assert getattr(exported.graph, field) == getattr(model.graph, field)
    before = {t.name: to_array(t) for t in model.graph.initializer}
    after = {t.name: to_array(t) for t in exported.graph.initializer}
    changed = [name for name in before if not np.array_equal(before[name], after[name])]
    assert sorted(changed) == ["v", "w"]
    np.testing.assert_allclose(
        session_of(exported).run(None, {"x": x})[0], trainer.predict(x), rtol=1e-5, atol=1e-7
    )


NETWORK = """<ir_version: 10, opset_import: ["": 21]> net (float[N, 4] x{inputs}) => (float[N, 1] y) <int64 wide = {{16000}}{constants}, float[4] scale = {{1, 1, 1, 1}}, float[4] bias = {{0, 0, 0, 0}}, float[4] mean = {{0, 0, 0, 0}}, float[4] variance = {{1, 1, 1, 1}}, float[4, 4] narrow = {{1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1}}, float[4, 1] v = {{1, 2, 3, 4}}>
    {{ c = Equal(rate, wide)  h = If(c) <then_branch = t () => (float[N, 4] a) {{ a = BatchNormalization(x, scale, bias, mean, variance) }}, else_branch = e () => (float[N, 4] b) {{ b = MatMul(x, narrow) }}>  y = MatMul(h, v) }}"""


def of_rate(rate: int) -> onnx.ModelProto:
    """A network for one of two sampling rates, which an initializer chooses."""
    constants = f", int64 rate = {{{rate}}}"
    return onnx.parser.parse_model(NETWORK.format(inputs="", constants=constants))


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_weights_of_the_branch_that_is_taken_are_trained(backend: str) -> None:
    x, y = rows()
    for rate, names, kept in (
        (16000, ["scale", "bias", "v"], "narrow"),
        (8000, ["narrow", "v"], "scale"),
    ):
        model = of_rate(rate)
        trainer = Trainer(model, loss="mse", penalty=0.1, backend=backend)
        assert [name for name in trainer.get_weights() if name not in ("mean", "variance")] == names
        trainer.fit(x, y, epochs=2, verbose=0)
        before, after = (
            next(to_array(t) for t in m.graph.initializer if t.name == kept)
            for m in (model, trainer.export())
        )
        np.testing.assert_array_equal(before, after)
        with pytest.raises(SettingError, match=f"No loss depends on {kept}"):
            Trainer(model, loss="mse", weights=[*names, kept])


def test_a_batch_normalization_in_the_branch_that_is_taken_uses_the_batch() -> None:
    """Where the rate is an input, no statistics can leave the If."""
    x, y = rows()
    trainer = Trainer(of_rate(16000), loss="mse")
    trainer.fit(x, y, epochs=1, batch_size=8, verbose=0)
    mean = next(to_array(t) for t in trainer.export().graph.initializer if t.name == "mean")
    np.testing.assert_allclose(mean, 0.1 * x.mean(0), rtol=1e-5)
    free = onnx.parser.parse_model(NETWORK.format(inputs=", int64 rate", constants=""))
    with pytest.raises(onnxfit.ModelError, match="cannot use batch statistics"):
        Trainer(free, loss="mse")
