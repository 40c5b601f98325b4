"""Tensors that an exporter computed from parameters, buffers and shapes, and what is said of them.

The same networks are trained in torch.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxfit
from onnxfit import Trainer, UnknownNameError

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
nn, F = torch.nn, torch.nn.functional
pytestmark = pytest.mark.torch
RATE = 0.05


class FromShapes(nn.Module):
    """Positions, degrees and a mask that depend on the input's shape and on buffers only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.out = nn.Conv1d(4, 4, 1), nn.Linear(4, 4)
        self.inner = nn.Module()
        self.inner.register_buffer("grid", torch.rand(6, 4))
        self.register_buffer("table", torch.rand(4, 6))

    def forward(self, x: Any) -> Any:
        positions = torch.ones_like(x).cumsum(1) / x.shape[1]
        degrees = torch.full((6, 6), 1.0).sum(1).pow(-0.5)
        smoothed = F.conv1d(self.table[None], torch.full((4, 4, 1), 0.1)).transpose(1, 2)
        h = self.out(x + positions + smoothed) * degrees[:, None] + self.inner.grid.exp()
        return self.conv1(h.transpose(1, 2))


class FromParameters(nn.Module):
    """Copies and functions of parameters: an expanded token, a gathered table, softplus."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.raw = nn.Parameter(torch.rand(1, 1, 4)), nn.Parameter(torch.rand(4))
        self.relative = nn.Parameter(torch.rand(7, 4))
        self.register_buffer("places", torch.tensor([0, 1, 2, 1, 0, 3, 4]))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, x: Any) -> Any:
        h = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.relative[self.places]
        return self.normed(h) * F.softplus(self.raw)


class Rearranged(nn.Module):
    """Parameters that are transposed, sliced, joined and cast: training moves the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.rand(1, 9, 4))
        self.left, self.right = nn.Parameter(torch.rand(2, 4)), nn.Parameter(torch.rand(2, 4))
        self.embedding, self.lstm = nn.Embedding(9, 4), nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Any) -> Any:
        h = x + self.position[:, : x.shape[1]] + self.embedding(torch.arange(6))
        return self.lstm(h @ torch.cat([self.left, self.right]).t())[0]


def exported(network: Any, path: Path, **options: Any) -> Path:
    if options.get("dynamo", True):
        options = {"external_data": False, "verbose": False, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        torch.onnx.export(network, (torch.rand(4, 6, 4),), path, **{"dynamo": True, **options})
    return path


def losses_in_torch(network: Any, x: Any, y: Any) -> list[float]:
    optimizer = torch.optim.SGD(network.parameters(), RATE)
    losses = []
    for _ in range(5):
        loss = F.mse_loss(network(torch.tensor(x)), torch.tensor(y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def losses_of(trainer: Trainer, x: Any, y: Any) -> list[float]:
    return [float(trainer.train_on_batch(x, y)["loss"]) for _ in range(5)]


def data(network: Any) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.random((4, 6, 4), np.float32)
    shape = network(torch.tensor(x)).shape
    return x, rng.standard_normal(tuple(shape)).astype(np.float32)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module", params=[True, False], ids=["optimized", "plain"])
def computing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The networks that compute tensors from shapes, and move parameters, with their files."""
    folder = tmp_path_factory.mktemp("computing")
    torch.manual_seed(0)
    networks = FromShapes(), Rearranged()
    return {
        type(network): (
            network,
            exported(network, folder / f"{type(network).__name__}.onnx", optimize=request.param),
        )
        for network in networks
    }


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
@pytest.mark.parametrize("kind", [FromShapes, Rearranged])
def test_tensors_computed_from_shapes_and_buffers_stay(
    kind: Any, backend: str, computing: Any
) -> None:
    network, path = copy.deepcopy(computing[kind])  # PyTorch trains it
    x, y = data(network)
    trainer = Trainer(path, loss="mse", optimizer=RATE, backend=backend)  # without a warning
    numbers = sum(parameter.numel() for parameter in network.parameters())
    if kind is FromShapes:
        assert sum(w.size for w in trainer.get_weights().values()) == numbers
    np.testing.assert_allclose(losses_of(trainer, x, y), losses_in_torch(network, x, y), rtol=1e-5)


def test_names_decide_without_the_signature_of_the_program(tmp_path: Path) -> None:
    model = onnx.load(exported(FromShapes(), tmp_path / "model.onnx"))
    del model.graph.metadata_props[:]
    # `inner.grid` has a dot, like a parameter
    with pytest.warns(UserWarning, match="computed 'exp' from the parameters 'inner.grid'"):
        names = set(Trainer(model, loss="mse").get_weights())
    assert "div" not in names  # computed from `x`, an input
    # `table` may be a parameter
    assert names > {"out.bias", "conv1.weight", "conv1.bias", "exp", "transpose"}
    assert len(names) == 6  # and the matrix of `out`


def test_copies_and_functions_of_parameters_are_reported(tmp_path: Path) -> None:
    network = FromParameters()
    x, y = data(network)
    path = exported(network, tmp_path / "model.onnx")
    with pytest.warns(UserWarning, match="The exporter computed") as caught:
        trainer = Trainer(path, loss="mse", optimizer=RATE)
    assert len(caught) == 1
    message = str(caught[0].message)
    for name in ("token", "raw", "relative", "normed.parametrizations.weight.original0"):
        assert repr(name) in message
    assert "optimize=False" in message
    # the same row four times
    losses_of(trainer, x, y)
    different = trainer.predict(np.repeat(x[:1], 4, 0))
    assert np.abs(different - different[0]).max() > 1e-3
    chosen = list(trainer.get_weights())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Trainer(path, chosen, loss="mse")
        Trainer(path, ["normed.bias"], loss="mse")


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_the_advice_for_computed_parameters_trains_the_network(
    backend: str, tmp_path: Path
) -> None:
    network = FromParameters()
    x, y = data(network)
    path = exported(network, tmp_path / "model.onnx", optimize=False)
    trainer = Trainer(path, loss="mse", optimizer=RATE, backend=backend)
    assert set(trainer.get_weights()) == {name for name, _ in network.named_parameters()}
    np.testing.assert_allclose(losses_of(trainer, x, y), losses_in_torch(network, x, y), rtol=1e-5)
    same = trainer.predict(np.repeat(x[:1], 4, 0))
    np.testing.assert_array_equal(same, np.repeat(same[:1], 4, 0))


class Old(nn.Module):
    """Parameters and buffers of each kind, for the older exporter."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)
        self.logit_scale, self.alpha = (
            nn.Parameter(torch.tensor(2.0)),
            nn.Parameter(torch.tensor(0.5)),
        )
        self.register_buffer("grid", torch.rand(6, 4))
        self.register_buffer("unit", torch.tensor(3.0))
        self.register_buffer("codes", torch.rand(1, 6, 4))

    def forward(self, x: Any) -> Any:
        h = self.out(x * self.unit - self.codes) * self.logit_scale.exp()
        return torch.cat([h + self.grid, h * self.alpha], 2)


def test_possible_buffers_of_the_older_exporter_are_reported(tmp_path: Path) -> None:
    network = Old()
    x, y = data(network)
    path = exported(network, tmp_path / "model.onnx", dynamo=False)
    with pytest.warns(UserWarning, match="trained") as caught:
        trainer = Trainer(path, loss="mse", optimizer=RATE)
    first, second = (str(warning.message) for warning in caught)
    assert "whether 'grid', 'codes' are parameters or buffers" in first
    assert "weights=['!" in first
    assert "'unit' is not trained" in second
    assert {"logit_scale", "alpha", "out.bias"} < set(trainer.get_weights())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = Trainer(path, ["!grid", "!codes"], loss="mse", optimizer=RATE)
    np.testing.assert_allclose(losses_of(trainer, x, y), losses_in_torch(network, x, y), rtol=1e-5)


def test_the_advice_for_single_numbers_trains_them(tmp_path: Path) -> None:
    path = exported(Old(), tmp_path / "model.onnx", dynamo=False)
    weights = [*onnxfit.inspect(path).weights, "unit"]
    assert "unit" in Trainer(path, weights, loss="mse").get_weights()
    with pytest.raises(UnknownNameError):
        Trainer(path, [*weights, "unitt"], loss="mse")
