"""Fused weights on a device that is not the CPU, without a GPU: the CPU is called cuda."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnxfit import Trainer
from onnxfit.graph.spec import TensorSpec
from onnxfit.runtime.buffers import Buffer, BufferView
from onnxfit.runtime.device import Device
from tests.helpers import classification
from tests.models import mlp


def trainer(device: str, **settings: Any) -> Trainer:
    return Trainer(
        mlp(), loss="cross_entropy", optimizer="adam", device=device, gradient="onnx",
        distribute=None, **settings,
    )  # fmt: skip


@pytest.mark.usefixtures("called_cuda")
def test_a_training_is_that_of_the_cpu(tmp_path: Path) -> None:
    x, y = classification()
    here, there = trainer("cuda"), trainer("cpu")
    assert list(here._training.backend.fused.values()) == [list(there.get_weights())]
    for each in (here, there):
        each.fit(x, y, epochs=2, verbose=0)
    expected = there.get_weights()
    for name, array in here.get_weights().items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-8)
    path = here.save(tmp_path / "half.onnxfit")
    resumed = Trainer.load(path, device="cuda", distribute=None)
    for each in (resumed, there):
        each.fit(x, y, epochs=3, initial_epoch=2, verbose=0)
    expected = there.get_weights()
    for name, array in resumed.get_weights().items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-8)


@pytest.mark.usefixtures("called_cuda")
def test_each_fused_weight_begins_at_a_multiple_of_256_bytes() -> None:
    backend = trainer("cuda")._training.backend
    state = backend.state
    (name,) = backend.fused
    whole = state.buffer(name).read()
    weights = {w: state.get(w) for w in trainer("cpu").get_weights()}
    start = 0
    for array in weights.values():
        np.testing.assert_array_equal(whole[start : start + array.size], array.ravel())
        end = start + array.size
        start = -(-end // 64) * 64
        assert not whole[end:start].any()
    assert start == whole.size


@pytest.mark.usefixtures("called_cuda")
def test_a_view_shares_the_memory_of_the_whole() -> None:
    whole = Buffer(np.float32, [10], Device("cuda", 0))
    whole.write(np.arange(10, dtype=np.float32))
    view = whole.view(4, (2, 2))
    assert isinstance(view, BufferView)
    assert view.read().tolist() == [[4, 5], [6, 7]]
    view.write(np.array([[0, 1], [2, 3]], np.float32))
    assert whole.read().tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 8, 9]


@pytest.mark.usefixtures("called_cuda")
def test_weights_can_be_set() -> None:
    changed = trainer("cuda")
    before = changed.get_weights()
    new = {"fc1.weight": np.full((8, 3), 0.5, np.float32)}
    changed.set_weights(new)
    for name, array in changed.get_weights().items():
        np.testing.assert_array_equal(array, new.get(name, before[name]))


@pytest.mark.usefixtures("called_cuda")
def test_a_folder_for_other_programs_has_the_weights_one_by_one(tmp_path: Path) -> None:
    folder = trainer("cuda").export_training(tmp_path / "folder", batch_size=8)
    step = onnx.load(Path(folder) / "train.onnx")
    assert {*trainer("cpu").get_weights()} < {value.name for value in step.graph.input}


@pytest.mark.usefixtures("called_cuda")
def test_no_concat_has_more_inputs_than_a_cuda_graph_allows() -> None:
    """The gradients of 50 weights, with zeros between them, are joined by several Concats."""
    model = mlp((4, *[3] * 25))
    ours = Trainer(model, loss="cross_entropy", optimizer="adam", device="cuda", gradient="onnx")
    backend: Any = ours._training.backend
    assert [len(members) for members in backend.fused.values()] == [50]
    x, y = classification(8)
    batch = {
        "x": TensorSpec("x", x.dtype, x.shape),
        "y_true/y": TensorSpec("y_true/y", y.dtype, y.shape),
    }
    graph = backend.graph("train", batch).graph
    joined = [len(node.input) for node in graph.node if node.op_type == "Concat"]
    assert sum(joined) > 100
    assert max(joined) <= 32
