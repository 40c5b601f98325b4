"""The models, written once, in PyTorch; everybody else reads them from the exported file or copies
the weights.

    python benchmarks/suite/networks.py FOLDER [NAME ...]

writes NAME.onnx and NAME.npz (the same weights by PyTorch's names) into a folder.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from workloads import WORKLOADS


def dense(*sizes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def pooled(*widths: int, size: int) -> nn.Module:
    """Convolutions of 3×3; a width of 0 is a maximum pooling, which halves the images."""
    layers: list[nn.Module] = []
    before, *_ = widths
    for width in widths[1:]:
        layers += (
            [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()] if width else [nn.MaxPool2d(2)]
        )
        before, size = (width, size) if width else (before, size // 2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(before * size**2, 10))


class Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = (
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.conv2, self.norm2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        same = before == after and stride == 1
        self.short = (
            nn.Sequential()
            if same
            else nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.short(x))


class ResNet18(nn.Module):
    """In the form for small images: a first convolution of 3×3 and no pooling after it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64)
        widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
        self.blocks = nn.Sequential(*(Block(a, b, 1 if a == b else 2) for a, b in pairwise(widths)))
        self.head = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(torch.relu(self.norm(self.stem(x)))).mean((2, 3)))


class Inverted(nn.Module):
    """MobileNetV2's block: wider by a 1×1 convolution, a depthwise 3×3, narrower again."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        wide = 6 * before
        self.same = before == after and stride == 1
        self.layers = nn.Sequential(
            nn.Conv2d(before, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, after, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        return x + y if self.same else y


def mobilenet() -> nn.Module:
    widths = [16, 16, 24, 24, 32, 32]
    blocks = (Inverted(a, b, 1 if a == b else 2) for a, b in pairwise(widths))
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU6(),
        *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.inputs(x).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.output(y.transpose(1, 2).reshape(batch, tokens, width))


class Layer(nn.Module):
    """Normalisation first, as in GPT-2."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, causal)
        self.norm2, self.wide, self.narrow = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.narrow(
            functional.gelu(
                self.wide(self.norm2(x)), approximate="tanh" if self.attention.causal else "none"
            )
        )


class Transformer(nn.Module):
    """Tokens to one label (encoder) or to the next token (decoder, whose last layer has weights of
    its own).
    """

    def __init__(
        self, width: int, layers: int, heads: int, tokens: int, vocabulary: int, classes: int = 0
    ) -> None:
        super().__init__()
        self.decodes = not classes
        self.embedding, self.positions = (
            nn.Embedding(vocabulary, width),
            nn.Parameter(torch.randn(tokens, width) * 0.02),
        )
        self.layers = nn.Sequential(*(Layer(width, heads, self.decodes) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes or vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.layers(self.embedding(x) + self.positions))
        return self.head(y if self.decodes else y.mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(32, 128, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "cnn": lenet,
    "convnet": lambda: pooled(1, 16, 0, 32, 0, size=28),
    "vgg": lambda: pooled(3, 32, 32, 0, 64, 64, 0, 128, 128, 0, size=32),
    "resnet": ResNet18,
    "mobilenet": mobilenet,
    "transformer": lambda: Transformer(128, 2, 4, 64, 1000, classes=10),
    "decoder": lambda: Transformer(256, 4, 8, 128, 1000),
    "lstm": Recurrent,
}


def network(name: str) -> nn.Module:
    """The untrained network of a workload, in training mode."""
    torch.manual_seed(0)
    module = NETWORKS[name]() if name in NETWORKS else dense(*WORKLOADS[name].sizes)
    with torch.no_grad():
        # an exporter shares tensors that are equal, such as the scales of two norms
        for weight in module.parameters():
            weight.add_(1e-3 * torch.randn_like(weight))
    return module.train()


def export(name: str, folder: Path) -> None:
    module, workload = network(name), WORKLOADS[name]
    # optimising, the exporter melts BatchNormalization into the convolution before it, in whatever
    # mode the module is
    optimize = not any(isinstance(part, nn.BatchNorm2d) for part in module.modules())
    x = torch.from_numpy(workload.data()[0][: workload.batch_size])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        torch.onnx.export(
            module.eval(), (x,), folder / f"{name}.onnx", dynamo=True, optimize=optimize, external_data=False, verbose=False,
            input_names=["x"], output_names=["y"], dynamic_shapes=({0: torch.export.Dim("batch")},),
        )  # fmt: skip
    np.savez(
        folder / f"{name}.npz", **{key: value.numpy() for key, value in module.state_dict().items()}
    )


def main() -> None:
    folder, *chosen = sys.argv[1:]
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    for name in chosen or WORKLOADS:
        export(name, path)


if __name__ == "__main__":
    main()
