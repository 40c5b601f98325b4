"""Edited files train as in torch: after `untie` and `add_biases`, a network whose weights an
exporter merged and dropped; after `to_float32`, one that was exported in half precision.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

import onnxfit
from onnxfit import Trainer
from tests.tools.editing.graphs import array_of, fresh_network, random

torch = pytest.importorskip("torch")
nn = torch.nn
pytestmark = pytest.mark.torch

STEPS = 20


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.n1, self.b = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.n2, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.n1(self.a(x))
        return self.head(self.n2(x + torch.relu(self.b(x))))


def network() -> nn.Module:
    """The network of which `fresh_network` is the export."""
    model = fresh_network()
    torch_network = Network()
    with torch.no_grad():
        for layer in (torch_network.a, torch_network.b):
            layer.bias.zero_()
        for name, parameter in torch_network.named_parameters():
            if name in ("a.weight", "b.weight", "head.weight", "head.bias"):
                array = array_of(model, name)
                parameter.copy_(torch.tensor(array.T if name == "b.weight" else array))
    return torch_network


def losses_in_torch(theirs: nn.Module, x: np.ndarray, y: np.ndarray) -> list[float]:
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(theirs(torch.tensor(x)), torch.tensor(y))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def losses_of(trainer: Trainer, x: np.ndarray, y: np.ndarray) -> list[float]:
    return [trainer.train_on_batch(x, y)["loss"] for _ in range(STEPS)]


def test_the_loss_follows_torch() -> None:
    x, y = random(16, 6), np.arange(16) % 3
    theirs = network()
    expected = losses_in_torch(theirs, x, y)
    model = onnxfit.add_biases(onnxfit.untie(fresh_network()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = Trainer(model, loss="cross_entropy", optimizer=0.1)
    np.testing.assert_allclose(losses_of(trainer, x, y), expected, rtol=0, atol=1e-5)
    weights = trainer.get_weights()
    parameters = {name: p.detach().numpy() for name, p in theirs.named_parameters()}
    assert set(weights) == set(parameters)
    for name, array in parameters.items():
        ours = weights[name].T if name == "b.weight" else weights[name]
        np.testing.assert_allclose(ours, array, atol=1e-5, err_msg=name)


def test_without_them_it_does_not() -> None:
    x, y = random(16, 6), np.arange(16) % 3
    expected = losses_in_torch(network(), x, y)
    for model in (fresh_network(), onnxfit.untie(fresh_network())):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = Trainer(model, loss="cross_entropy", optimizer=0.1)
        assert np.abs(np.subtract(losses_of(trainer, x, y), expected)).max() > 1e-3


@pytest.mark.filterwarnings("ignore")  # those of the exporter
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_an_export_in_half_precision_follows_torch(half: torch.dtype, tmp_path: Path) -> None:
    theirs = network().to(half).eval()
    path = tmp_path / "half.onnx"
    torch.onnx.export(
        theirs, (torch.zeros(2, 6, dtype=half),), path, dynamo=True, dynamic_shapes=({0: "N"},),
        verbose=False,
    )  # fmt: skip
    x, y = random(16, 6), np.arange(16) % 3
    model = onnxfit.add_biases(onnxfit.untie(onnxfit.to_float32(path)))
    trainer = Trainer(model, loss="cross_entropy", optimizer=0.1)
    expected = losses_in_torch(theirs.float(), x, y)
    np.testing.assert_allclose(losses_of(trainer, x, y), expected, rtol=0, atol=1e-5)
