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


class Separable(nn.Module):
    """MobileNetV1's block: a depthwise 3×3 convolution, then a 1×1 convolution."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(before, before, 3, stride, 1, groups=before, bias=False), nn.BatchNorm2d(before), nn.ReLU(),
            nn.Conv2d(before, after, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def separable() -> nn.Module:
    widths = [32, 64, 128, 128, 256, 256]
    blocks = (Separable(a, b, 1 if a == b else 2) for a, b in pairwise(widths))
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def twice_convolved(before: int, after: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
        nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """An image to an image, with three sizes and a transposed convolution up to each."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = twice_convolved(3, width)
        self.second = twice_convolved(width, 2 * width)
        self.third = twice_convolved(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.merge2 = twice_convolved(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.merge1 = twice_convolved(2 * width, width)
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        second = self.second(functional.max_pool2d(first, 2))
        third = self.third(functional.max_pool2d(second, 2))
        y = self.merge2(torch.cat([second, self.up2(third)], 1))
        return self.head(self.merge1(torch.cat([first, self.up1(y)], 1)))


def signals() -> nn.Module:
    """Nine sensors over 128 steps to one of six activities."""
    return nn.Sequential(
        nn.Conv1d(9, 64, 5, padding=2), nn.BatchNorm1d(64), nn.ReLU(), nn.MaxPool1d(2),
        nn.Conv1d(64, 128, 5, padding=2), nn.BatchNorm1d(128), nn.ReLU(), nn.MaxPool1d(2),
        nn.Conv1d(128, 128, 3, padding=1), nn.BatchNorm1d(128), nn.ReLU(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(128, 6),
    )  # fmt: skip


def autoencoder() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 49, 64), nn.Linear(64, 32 * 49), nn.ReLU(), nn.Unflatten(1, (32, 7, 7)),
        nn.ConvTranspose2d(32, 16, 3, 2, 1, output_padding=1), nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 3, 2, 1, output_padding=1), nn.Sigmoid(),
    )  # fmt: skip


class Siamese(nn.Module):
    """Two images through the same layers; the label says whether they show the same thing."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * 49, 128),
        )  # fmt: skip
        self.head = nn.Linear(128, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.abs(self.encoder(x[:, 0]) - self.encoder(x[:, 1])))


class WideAndDeep(nn.Module):
    """Five counts and eight categories: a linear model of the categories beside a dense network."""

    def __init__(self, counts: int = 5, categories: int = 8, values: int = 1000) -> None:
        super().__init__()
        self.counts, self.values = counts, values
        self.wide = nn.Embedding(categories * values, 2)
        self.deep = nn.ModuleList(nn.Embedding(values, 16) for _ in range(categories))
        self.layers = dense(counts + 16 * categories, 128, 64, 2)

    def forward(self, x: Tensor) -> Tensor:
        numbers, ids = torch.log1p(x[:, : self.counts].float()), x[:, self.counts :]
        deep = [table(ids[:, i]) for i, table in enumerate(self.deep)]
        wide = self.wide(ids + self.values * torch.arange(len(self.deep))).sum(1)
        return wide + self.layers(torch.cat([numbers, *deep], 1))


class Factorisation(nn.Module):
    """A rating from the numbers of a user and of an item."""

    def __init__(self, values: int = 4000, width: int = 32) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(values, width), nn.Embedding(values, width)
        self.user_bias, self.item_bias = nn.Embedding(values, 1), nn.Embedding(values, 1)

    def forward(self, x: Tensor) -> Tensor:
        user, item = x[:, 0], x[:, 1]
        product = (self.users(user) * self.items(item)).sum(1, keepdim=True)
        return product + self.user_bias(user) + self.item_bias(item)


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


class ViT(nn.Module):
    """Patches of 4×4 and a token for the class, layers of ViT-tiny's width."""

    def __init__(self, width: int = 192, layers: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(65, width) * 0.02)
        self.layers = nn.Sequential(*(Layer(width, heads, causal=False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), patches], 1)
        return self.head(self.norm(self.layers(tokens + self.positions))[:, 0])


class BertLayer(nn.Module):
    """Normalisation last, and token 0 is padding, which nobody attends to."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output, self.norm1 = nn.Linear(width, width), nn.LayerNorm(width, 1e-12)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm2 = nn.LayerNorm(width, 1e-12)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            layer(x).view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self.norm1(x + self.output(y.transpose(1, 2).reshape(batch, tokens, width)))
        return self.norm2(x + self.narrow(functional.gelu(self.wide(x))))


class Bert(nn.Module):
    """BERT-tiny (2 layers of width 128) with its pooler and two classes, without dropout."""

    def __init__(self, width: int = 128, heads: int = 2, tokens: int = 128) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(30522, width), nn.Embedding(tokens, width)
        self.norm = nn.LayerNorm(width, 1e-12)
        self.layers = nn.ModuleList(BertLayer(width, heads) for _ in range(2))
        self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, 2)
        with torch.no_grad():
            for table in (self.words, self.positions):
                table.weight.mul_(0.02)

    def forward(self, x: Tensor) -> Tensor:
        mask = (x != 0)[:, None, None, :]
        y = self.norm(self.words(x) + self.positions.weight)
        for layer in self.layers:
            y = layer(y, mask)
        return self.head(torch.tanh(self.pooler(y[:, 0])))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.layer, self.head = kind(32, 128, batch_first=True), nn.Linear(128, 10)

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
    "separable": separable,
    "unet": UNet,
    "signals": signals,
    "gru": lambda: Recurrent(nn.GRU),
    "wide-deep": WideAndDeep,
    "autoencoder": autoencoder,
    "vit": ViT,
    "bert": Bert,
    "gpt": lambda: Transformer(384, 6, 6, 256, 65),
    "factorisation": Factorisation,
    "siamese": Siamese,
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
    """Write the network of that name, whose first workload has the same name."""
    module, workload = network(name), WORKLOADS[name]
    # optimising, the exporter melts BatchNormalization into the convolution before it, in whatever
    # mode the module is
    norms = (nn.BatchNorm1d, nn.BatchNorm2d)
    optimize = not any(isinstance(part, norms) for part in module.modules())
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
    for name in chosen or dict.fromkeys(work.network for work in WORKLOADS.values()):
        export(name, path)


if __name__ == "__main__":
    main()
