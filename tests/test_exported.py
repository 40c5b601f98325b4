"""Networks as torch exports them, trained from the .onnx alone, against the same training in torch."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import numpy as np
import pytest

from onnxfit import Trainer
from onnxfit.optimizers import Adam

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
pytestmark = pytest.mark.torch


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.pool = (
            nn.Conv2d(1, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.AvgPool2d(2),
        )
        self.second, self.head = (
            nn.Conv2d(6, 8, 3, padding=1, stride=2, groups=2),
            nn.Linear(8 * 4 * 4, 5),
        )

    def forward(self, x):
        x = self.pool(F.silu(self.norm(self.first(x))))
        return self.head(torch.relu(self.second(x)).flatten(1))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.layer(self.embedding(x)).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


class Activations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.head, self.slope = (
            nn.Linear(6, 16),
            nn.LayerNorm(16),
            nn.Linear(16, 16),
            nn.Linear(16, 5),
            nn.PReLU(),
        )

    def forward(self, x):
        h = F.gelu(self.norm(self.a(x)))
        h = F.hardswish(self.b(h)) + h
        return self.head(self.slope(F.elu(h) + F.mish(h) - F.softplus(h)))


NETWORKS = {
    Convolutional: lambda: torch.randn(32, 1, 16, 16),
    Transformer: lambda: torch.randint(0, 50, (32, 7)),
    Recurrent: lambda: torch.randn(32, 6, 4),
    Activations: lambda: torch.randn(32, 6),
}


@pytest.mark.parametrize("network", NETWORKS, ids=lambda n: n.__name__)
def test_trained_from_the_file_as_in_torch(network: type, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, y = NETWORKS[network](), torch.randint(0, 5, (32,))
    model = network()
    with torch.no_grad():
        # an exporter shares tensors that are equal, such as the scales of two norms
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape))
    theirs = copy.deepcopy(model)
    path = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        torch.onnx.export(
            model.train(), (x,), path, dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "batch"}}, opset_version=17,
            training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False,
        )  # fmt: skip
    trainer = Trainer(path, loss="cross_entropy", optimizer=Adam(0.01))
    optimizer = torch.optim.Adam(theirs.train().parameters(), 0.01)
    for _ in range(10):
        optimizer.zero_grad()
        loss = F.cross_entropy(theirs(x), y)
        loss.backward()
        optimizer.step()
        assert trainer.train_on_batch(x.numpy(), y.numpy())["loss"] == pytest.approx(
            loss.item(), rel=1e-5, abs=1e-6
        )
    weights = trainer.get_weights()
    matched = 0
    for name, weight in theirs.named_parameters():
        if (
            name in weights
            and weights[name].shape == tuple(weight.shape)
            and "in_proj_bias" not in name
        ):
            # (the gradient of a key's bias is 0 but for rounding, which Adam blows up to a step)
            np.testing.assert_allclose(
                weights[name], weight.detach().numpy(), atol=2e-5, err_msg=name
            )
            matched += 1
    assert matched >= 2
