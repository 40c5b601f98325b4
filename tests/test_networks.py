"""Whole architectures, differentiated by the table of rules: the loss curve of 20 Adam steps is
PyTorch's from the same weights.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnxfit import Trainer
from onnxfit.graph.index import attributes_of
from onnxfit.kernels.rounding import rounded_products
from onnxfit.losses import CrossEntropy
from onnxfit.optimizers import Adam
from onnxfit.runtime import compilation

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
pytestmark = [
    pytest.mark.torch,
    # of the positions and scales of the encoder and the decoder, which are parameters
    pytest.mark.filterwarnings("ignore:The file does not record whether:UserWarning"),
]


class ResidualBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.first, self.second = (
            nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
            nn.Conv2d(16, 16, 3, padding=1, bias=False),
        )
        self.norms = nn.ModuleList(
            [nn.BatchNorm2d(8), nn.BatchNorm2d(16), nn.BatchNorm2d(16), nn.BatchNorm2d(16)]
        )
        self.short, self.head = nn.Conv2d(8, 16, 1, stride=2, bias=False), nn.Linear(16, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norms[0](self.stem(x))), 3, 2, 1)
        y = self.norms[2](self.second(F.relu(self.norms[1](self.first(x)))))
        return self.head(F.relu(y + self.norms[3](self.short(x))).mean((2, 3)))


class MobileBlock(nn.Module):
    """Expand, depthwise, squeeze and excite, project."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.depthwise, self.project = (
            nn.Conv2d(3, 12, 1),
            nn.Conv2d(12, 12, 3, 2, 1, groups=12),
            nn.Conv2d(12, 6, 1),
        )
        self.squeeze, self.excite, self.head = (
            nn.Conv2d(12, 4, 1),
            nn.Conv2d(4, 12, 1),
            nn.Linear(6, 5),
        )

    def forward(self, x):
        x = F.hardswish(self.depthwise(F.hardswish(self.expand(x))))
        x = x * F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))))
        return self.head(self.project(x).mean((2, 3)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.bottom = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1)
        self.up, self.smooth, self.out = (
            nn.ConvTranspose2d(8, 6, 2, stride=2),
            nn.Conv2d(8, 6, 3, padding=1),
            nn.Conv2d(18, 5, 1),
        )

    def forward(self, x):
        a = F.silu(self.down(x))
        b = F.silu(self.bottom(F.max_pool2d(a, 2)))
        resized = self.smooth(
            F.interpolate(b, scale_factor=2.0, mode="bilinear", align_corners=False)
        )
        return self.out(torch.cat([a, self.up(b), resized], 1))


class Recurrent(nn.Module):
    def __init__(self, kind: str, **settings: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.layer = getattr(nn, kind)(6, 8, batch_first=True, **settings)
        self.head = nn.Linear(16 if settings.get("bidirectional") else 8, 5)

    def forward(self, x):
        return self.head(self.layer(self.embedding(x))[0][:, -1])


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = (
            nn.Embedding(30, 16),
            nn.Parameter(torch.randn(1, 7, 16) * 0.1),
        )
        layer = nn.TransformerEncoderLayer(
            16, 4, 32, dropout=0.0, batch_first=True, activation="gelu", norm_first=True
        )
        self.layers, self.head = (
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            nn.Linear(16, 5),
        )

    def forward(self, x):
        return self.head(self.layers(self.embedding(x) + self.positions).mean(1))


class Decoder(nn.Module):
    """Root mean square norms, rotary positions, a causal mask, a gated feed-forward layer, tied
    embeddings.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.qkv, self.merge = (
            nn.Embedding(11, 16),
            nn.Linear(16, 48, bias=False),
            nn.Linear(16, 16, bias=False),
        )
        self.gate, self.up, self.down = (
            nn.Linear(*s, bias=False) for s in ((16, 24), (16, 24), (24, 16))
        )
        self.scales = nn.ParameterList([torch.ones(16) for _ in range(3)])
        angle = torch.outer(torch.arange(6.0), 10000 ** (-torch.arange(0, 8, 2) / 8)).repeat(1, 2)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())
        self.register_buffer("mask", torch.full((6, 6), float("-inf")).triu(1))

    def norm(self, x, i):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.scales[i]

    def rotated(self, x):
        a, b = x.chunk(2, -1)
        return x * self.cos + torch.cat([-b, a], -1) * self.sin

    def forward(self, x):
        h = self.embedding(x)
        q, k, v = (
            t.reshape(-1, 6, 2, 8).transpose(1, 2) for t in self.qkv(self.norm(h, 0)).chunk(3, -1)
        )
        a = (
            torch.softmax(
                self.rotated(q) @ self.rotated(k).transpose(-1, -2) / 8**0.5 + self.mask, -1
            )
            @ v
        )
        h = h + self.merge(a.transpose(1, 2).reshape(-1, 6, 16))
        n = self.norm(h, 1)
        h = h + self.down(F.silu(self.gate(n)) * self.up(n))
        return (self.norm(h, 2) @ self.embedding.weight.T).transpose(1, 2)


class DiffusionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.norm, self.again, self.time, self.scale = (
            nn.GroupNorm(1, 3),
            nn.GroupNorm(4, 8),
            nn.Linear(1, 8),
            nn.InstanceNorm2d(8, affine=True),
        )

    def forward(self, x):
        t = x.mean((1, 2, 3))[:, None]
        h = self.first(F.silu(self.norm(x))) + self.time(torch.sin(t))[:, :, None, None]
        return x + self.second(F.silu(self.again(h)) + self.scale(h))


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.code = nn.Conv2d(3, 6, 4, 2, 1), nn.Linear(6 * 16, 7)
        self.wide, self.up = nn.Linear(7, 6 * 16), nn.ConvTranspose2d(6, 3, 4, 2, 1)

    def forward(self, x):
        code = self.code(F.elu(self.down(x)).flatten(1))
        return torch.sigmoid(self.up(F.leaky_relu(self.wide(code)).reshape(-1, 6, 4, 4)))


class Recommender(nn.Module):
    """Bags of items with weights of their own, a factorised interaction, a small tower."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.bias, self.tower = (
            nn.Embedding(40, 8),
            nn.Embedding(40, 1),
            nn.Sequential(nn.Linear(8, 8), nn.SELU(), nn.Linear(8, 5)),
        )

    def forward(self, x):
        e = self.items(x)
        pairs = 0.5 * (e.sum(1) ** 2 - (e**2).sum(1))
        return self.tower(pairs + e.amax(1)) + self.bias(x).mean(1)


def perceptron() -> Any:
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.Tanh(),
        nn.LayerNorm(16),
        nn.Linear(16, 16),
        nn.GELU(),
        nn.Linear(16, 5),
    )


IMAGES = lambda: torch.randn(16, 3, 8, 8)  # noqa: E731
WORDS = lambda count, length: lambda: torch.randint(0, count, (16, length))  # noqa: E731
# name -> (module, input, loss: of classes, of classes per place, or of numbers)
NETWORKS: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "perceptron": (perceptron, lambda: torch.randn(16, 6), "classes"),
    "residual block": (ResidualBlock, IMAGES, "classes"),
    "mobile block": (MobileBlock, IMAGES, "classes"),
    "u-net": (UNet, IMAGES, "places"),
    "lstm": (lambda: Recurrent("LSTM", num_layers=2), WORDS(20, 6), "classes"),
    "gru both ways": (lambda: Recurrent("GRU", bidirectional=True), WORDS(20, 6), "classes"),
    "rnn": (lambda: Recurrent("RNN", nonlinearity="relu"), WORDS(20, 6), "classes"),
    "encoder": (Encoder, WORDS(30, 7), "classes"),
    "decoder": (Decoder, WORDS(11, 6), "places"),
    "diffusion block": (DiffusionBlock, IMAGES, "numbers"),
    "autoencoder": (Autoencoder, lambda: torch.rand(16, 3, 8, 8), "numbers"),
    "recommender": (Recommender, WORDS(40, 9), "classes"),
}
LOSSES = {
    "classes": "cross_entropy",
    "places": CrossEntropy(axis=1),
    "numbers": "mean_squared_error",
}


def loss_curves(
    name: str, folder: Path, precision: str = "float32", *, autocast: bool = False, steps: int = 20
) -> tuple[list[float], list[float]]:
    """The losses of some steps by a Trainer, and by PyTorch in float32 or with bfloat16 autocast."""
    torch.manual_seed(0)
    make, inputs, kind = NETWORKS[name]
    x, model = inputs(), make()
    with torch.no_grad():
        # an exporter shares tensors that are equal, such as the scales of two norms
        for weight in model.parameters():
            weight.add_(0.02 * torch.randn(weight.shape))
        places = model(x).shape
    y = torch.rand(places) if kind == "numbers" else torch.randint(0, 5, (places[0], *places[2:]))
    theirs = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        torch.onnx.export(
            model.train(), (x,), folder / "model.onnx", dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "batch"}},
            opset_version=17, training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False,
        )  # fmt: skip
    trained = [
        f"!{buffer}" for buffer, _ in model.named_buffers() if buffer in ("cos", "sin")
    ] or None
    trainer = Trainer(
        folder / "model.onnx",
        trained,
        loss=LOSSES[kind],
        optimizer=Adam(0.01),
        gradient="onnx",
        precision=precision,
    )
    optimizer = torch.optim.Adam(theirs.train().parameters(), 0.01)
    ours, expected = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = theirs(x)
        output = output.float()
        loss = F.mse_loss(output, y) if kind == "numbers" else F.cross_entropy(output, y)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
        ours.append(trainer.train_on_batch(x.numpy(), y.numpy())["loss"])
    return ours, expected


@pytest.mark.parametrize("name", NETWORKS)
def test_the_loss_curve_is_that_of_torch(name: str, tmp_path: Path) -> None:
    ours, expected = loss_curves(name, tmp_path)
    np.testing.assert_allclose(ours, expected, rtol=1e-4)
    assert expected[-1] < 0.97 * expected[0]


def compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> list[onnx.GraphProto]:
    """The graphs that onnxruntime gets from now on."""
    graphs: list[onnx.GraphProto] = []

    def keep(model: onnx.ModelProto, device: str) -> onnx.ModelProto:
        graphs.append(model.graph)
        return model

    monkeypatch.setattr(compilation, "TRANSFORMS", (*compilation.TRANSFORMS, keep))
    return graphs


def assert_products_are_rounded(graph: onnx.GraphProto) -> None:
    """The graph has products, and each rounds its factors: an operator in C++, or with Casts."""
    producers = {output: node for node in graph.node for output in node.output}
    rounded = rounded_products(graph)
    products = [n for n in graph.node if n.op_type == "Product" or n.output[0] in rounded]
    assert products
    for node in products:
        if node.op_type == "Product":
            given = attributes_of(node)
            assert given.get("precision") == 1, node.name
        else:
            casts = [producers[name].op_type for name in node.input[:2]]
            assert casts == ["Cast", "Cast"], node.name


@pytest.mark.parametrize("name", NETWORKS)
def test_bf16_follows_autocast_of_torch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = compiled_graphs(monkeypatch)
    try:
        ours, expected = loss_curves(name, tmp_path, "bf16", autocast=True)
    except RuntimeError as error:  # of PyTorch: not every processor has an LSTM of bfloat16
        if "could not create a primitive descriptor" not in str(error):
            raise
        pytest.skip("PyTorch has no such operator of bfloat16 for this processor")
    np.testing.assert_allclose(ours, expected, rtol=2.0**-6, atol=2.0**-8 * expected[0])
    assert expected[-1] < 0.97 * expected[0]
    (step,) = compiled
    assert_products_are_rounded(step)
    exact, _ = loss_curves(name, tmp_path)
    assert ours != exact


@pytest.mark.table
@pytest.mark.parametrize("name", NETWORKS)
def test_bf16x3_follows_float32(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compiled_graphs(monkeypatch)
    ours, _ = loss_curves(name, tmp_path, "bf16x3", steps=50)
    exact, _ = loss_curves(name, tmp_path, steps=50)
    np.testing.assert_allclose(ours, exact, rtol=1e-4, atol=1e-6 * exact[0])
    products = [attributes_of(node) for node in compiled[0].node if node.op_type == "Product"]
    assert (ours != exact) == any(given.get("precision") == 2 for given in products)


@pytest.mark.parametrize("name", ["perceptron", "residual block", "lstm", "encoder"])
def test_fp16_follows_float32(name: str, tmp_path: Path) -> None:
    ours, expected = loss_curves(name, tmp_path, "fp16")
    np.testing.assert_allclose(ours, expected, rtol=2.0**-9, atol=2.0**-10 * expected[0])
    exact, _ = loss_curves(name, tmp_path)
    assert np.abs(np.subtract(ours, exact)).max() > 1e-6
