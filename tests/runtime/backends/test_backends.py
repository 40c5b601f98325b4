"""Backends: found by the `__all__` of a module, described by class attributes, one split a step."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxfit import Trainer
from onnxfit.errors import GradientError, UnknownNameError
from onnxfit.runtime import backends
from onnxfit.runtime.backends import BACKENDS, get_backend
from onnxfit.step import split
from tests.builds import needs_builder
from tests.models import linear, mlp

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 4)).astype(np.float32)
Y = RNG.normal(size=(24, 3)).astype(np.float32)

DUMMY = """
from onnxfit.runtime.backends.full import FullBackend

__all__ = ["DummyBackend"]

class DummyBackend(FullBackend):
    name = "dummy"
"""


def test_names_and_needs() -> None:
    assert [
        (name, backend.name, backend.needs_loss, backend.shows_gradients, backend.steps_by_hand)
        for name, backend in sorted(BACKENDS.items())
    ] == [
        ("forward_backward", "forward_backward", False, True, True),
        ("full", "full", True, False, False),
        ("in_place", "in_place", True, False, False),
    ]


def test_an_unknown_name() -> None:
    with pytest.raises(UnknownNameError, match=r"No backend is called 'ful'.*mean 'full'"):
        get_backend("ful")


def test_a_backend_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dummy.py").write_text(DUMMY)
    monkeypatch.setattr(backends, "__path__", [*backends.__path__, str(tmp_path)])
    try:
        monkeypatch.setattr(backends, "BACKENDS", backends.find_backends())
        assert set(backends.BACKENDS) == {*BACKENDS, "dummy"}
        ours, full = (Trainer(mlp(), loss="mse", backend=name) for name in ("dummy", "full"))
        assert type(ours._training.backend).__name__ == "DummyBackend"
        histories = [t.fit(X, Y, epochs=2, verbose=0).history for t in (ours, full)]
        assert histories[0] == histories[1]
    finally:
        del sys.modules[f"{backends.__name__}.dummy"]
        del backends.dummy


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The batches that a model was split for."""
    calls: list[object] = []
    split_step = split.split_step

    def counted(recipe, batch, *arguments):
        calls.append(batch)
        return split_step(recipe, batch, *arguments)

    monkeypatch.setattr(split, "split_step", counted)
    return calls


def test_a_model_is_split_once_for_all_graphs(splits: list[object]) -> None:
    trainer = Trainer(mlp(), loss="mse", penalty=0.1, accumulate=2, backend="forward_backward")
    graphs = trainer.save_onnx_graph(bytes)
    assert list(graphs) == [
        "model", "trained", "forward", "loss", "backward", "penalty", "accumulate", "update",
        "evaluate", "predict",
    ]  # fmt: skip
    assert len(splits) == 1
    trainer.fit(X, Y, batch_size=8, epochs=3, verbose=0)
    assert len(splits) == 2  # once more, for the shapes of the batches


def test_without_a_loss_there_are_graphs_without_a_loss(splits: list[object]) -> None:
    graphs = Trainer(mlp(), backend="forward_backward").save_onnx_graph(bytes)
    assert list(graphs) == ["model", "trained", "forward", "backward", "update", "predict"]
    assert len(splits) == 1


@needs_builder
def test_graphs_that_need_sizes_are_those_of_the_last_batch() -> None:
    """All of one split, so that the loss graph fits the passes that it stands between."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[N, 1, 8, 8] x) => (float[N, 16] y)
        <float[1, 1, 3, 3] w = {1, 0, 0, 0, 1, 0, 0, 0, 1}>
        { c = Conv<pads = [1, 1, 1, 1]>(x, w) p = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(c) y = Flatten(p) }"""
    )
    trainer = Trainer(model, loss="mse", gradient="onnxruntime", backend="forward_backward")
    with pytest.raises(
        GradientError, match="training graph can only be built for a known batch size"
    ):
        trainer.save_onnx_graph(bytes)
    trainer.train_on_batch(np.ones((6, 1, 8, 8), np.float32), np.ones((6, 16), np.float32))
    trainer.predict_on_batch(np.ones((3, 1, 8, 8), np.float32))  # whose rows do not count
    rows = {}
    for name, graph in trainer.save_onnx_graph(bytes).items():
        for value in onnx.load_from_string(graph).graph.input:
            if value.name in ("x", "y", "y_true/y"):
                rows[name, value.name] = value.type.tensor_type.shape.dim[0].dim_value
    known = {key: rows[key] for key in (("forward", "x"), ("loss", "y"), ("loss", "y_true/y"))}
    assert set(known.values()) == {6}
    assert rows["evaluate", "x"] == rows["predict", "x"] == 0  # any number


def test_what_steps_by_hand_says_so() -> None:
    trainer = Trainer(linear(4), loss="mse")
    with pytest.raises(NotImplementedError, match="steps_by_hand"):
        trainer._training.backend.apply({}, 0.1, 0)
    with pytest.raises(NotImplementedError, match="steps_by_hand"):
        trainer._training.backend.add_penalty({})
