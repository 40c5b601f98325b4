"""What is trained: data and sizes.

Nothing here needs more than numpy, so that every process can read it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
LEARNING_RATES = {"sgd": 0.01, "adam": 0.001}
OPTIMIZERS = tuple(LEARNING_RATES)
COMPARED_STEPS = 5  # whose losses must agree


@dataclass(frozen=True)
class Workload:
    """`inputs` and `outputs` are shapes without the batch; a workload with a `vocabulary` reads
    tokens. `batches` make an epoch.
    """

    name: str
    title: str
    loss: str  # "mse" or "cross_entropy"
    batch_size: int
    batches: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    vocabulary: int = 0
    sizes: tuple[int, ...] = ()  # of the layers of a dense network
    # of the learning rate: smaller where rounding alone would lead the contenders apart in a few
    # steps
    pace: float = 1.0
    network: str = ""  # of networks.py, and its exported file; that of its name unless said

    def __post_init__(self) -> None:
        if not self.network:
            object.__setattr__(self, "network", self.name)

    @property
    def classifies(self) -> bool:
        return self.loss == "cross_entropy"

    @property
    def rows(self) -> int:
        return self.batch_size * self.batches

    def data(self) -> tuple[Array, Array]:
        """The rows of an epoch, the same in every process."""
        x, y = _drawn(self)
        return x[: self.rows], y[: self.rows]

    def split(self) -> list[tuple[Array, Array]]:
        """The batches of an epoch, and more where those are too few to be compared: on rows seen
        before, losses soon are next to nothing.
        """
        x, y = _drawn(self)
        return [
            (x[i : i + self.batch_size], y[i : i + self.batch_size])
            for i in range(0, len(x), self.batch_size)
        ]


@lru_cache(maxsize=1)  # drawing them takes longer than an epoch of the small ones
def _drawn(workload: Workload) -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    rows = workload.batch_size * max(workload.batches, COMPARED_STEPS)
    if workload.vocabulary:
        x: Array = rng.integers(0, workload.vocabulary, (rows, *workload.inputs))
    else:
        x = rng.standard_normal((rows, *workload.inputs)).astype(np.float32)
    if not workload.classifies:
        return x, rng.standard_normal((rows, *workload.outputs)).astype(np.float32)
    return x, rng.integers(0, workload.outputs[-1], (rows, *workload.outputs[:-1]))


def two_sizes(workload: Workload, batch_size: int) -> list[Workload]:
    """A network with its own batch size and with another one."""
    title = workload.title.rpartition(", batch ")[0]
    other = replace(
        workload,
        name=f"{workload.name}-{batch_size}",
        title=f"{title}, batch {batch_size}",
        batch_size=batch_size,
        network=workload.network,
    )
    return [workload, other]


MLP = (784, 256, 128, 10)
ALL = [
    Workload("linear", "linear regression, 10 features, batch 64", "mse", 64, 200, (10,), (1,), sizes=(10, 1)),
    Workload("tabular", "MLP 100-50-10-1, batch 15", "mse", 15, 200, (100,), (1,), sizes=(100, 50, 10, 1)),
    Workload("mlp", "MLP 784-256-128-10, batch 128", "cross_entropy", 128, 40, (784,), (10,), sizes=MLP),
    Workload("cnn", "CNN of LeNet's size, 28×28, batch 64", "cross_entropy", 64, 20, (1, 28, 28), (10,)),
    Workload("convnet", "CNN with 16 and 32 channels and max pooling, 28×28, batch 64", "cross_entropy", 64, 20, (1, 28, 28), (10,)),
    Workload("resnet", "ResNet-18, 32×32, batch 16", "cross_entropy", 16, 2, (3, 32, 32), (10,), pace=0.1),
    Workload("mobilenet", "MobileNetV2 blocks (depthwise convolutions), 32×32, batch 16", "cross_entropy", 16, 4, (3, 32, 32), (10,), pace=0.1),
    Workload("transformer", "transformer encoder, d 128, 2 layers, 64 tokens, batch 16", "cross_entropy", 16, 10, (64,), (10,), 1000),
    Workload("decoder", "GPT-2-style decoder, d 256, 4 layers, 128 tokens, batch 4", "cross_entropy", 4, 6, (128,), (128, 1000), 1000),
    Workload("lstm", "LSTM classifier, hidden 128, 50 steps, batch 32", "cross_entropy", 32, 10, (50, 32), (10,)),
    *two_sizes(Workload("vgg", "VGG-like, three max poolings, 32×32, batch 32", "cross_entropy", 32, 4, (3, 32, 32), (10,)), 8),
    *two_sizes(Workload("separable", "MobileNetV1 blocks (depthwise convolutions), 32×32, batch 32", "cross_entropy", 32, 4, (3, 32, 32), (10,), pace=0.1), 8),
    *two_sizes(Workload("unet", "U-Net of three sizes, 64×64, batch 8", "mse", 8, 4, (3, 64, 64), (3, 64, 64), pace=0.1), 2),
    *two_sizes(Workload("signals", "1-D CNN, 9 channels, 128 steps, batch 64", "cross_entropy", 64, 8, (9, 128), (6,), pace=0.1), 16),
    *two_sizes(Workload("gru", "GRU classifier, hidden 128, 50 steps, batch 32", "cross_entropy", 32, 10, (50, 32), (10,)), 8),
    *two_sizes(Workload("wide-deep", "wide and deep, 8 embeddings, 5 counts, batch 256", "cross_entropy", 256, 20, (13,), (2,), 1000), 64),
    *two_sizes(Workload("autoencoder", "convolutional autoencoder, 28×28, batch 64", "mse", 64, 10, (1, 28, 28), (1, 28, 28)), 16),
    *two_sizes(Workload("vit", "ViT-tiny, 12 layers, 32×32 in patches of 4×4, batch 16", "cross_entropy", 16, 2, (3, 32, 32), (10,)), 4),
    *two_sizes(Workload("bert", "BERT-tiny classifier, 128 tokens, batch 16", "cross_entropy", 16, 5, (128,), (2,), 30522), 4),
    *two_sizes(Workload("gpt", "GPT of 6 layers, d 384, 256 tokens, batch 4", "cross_entropy", 4, 2, (256,), (256, 65), 65), 1),
    *two_sizes(Workload("factorisation", "matrix factorisation, 4,000 × 4,000, rank 32, batch 1024", "mse", 1024, 20, (2,), (1,), 4000), 128),
    *two_sizes(Workload("siamese", "siamese pair of CNNs, 28×28, batch 64", "cross_entropy", 64, 10, (2, 1, 28, 28), (2,)), 16),
]  # fmt: skip
WORKLOADS = {workload.name: workload for workload in ALL}


@dataclass(frozen=True)
class Job:
    """What a contender is told to build."""

    workload: Workload
    optimizer: str
    folder: Path  # where the exported models are
    threads: int

    @property
    def learning_rate(self) -> float:
        return LEARNING_RATES[self.optimizer] * self.workload.pace

    @property
    def model(self) -> Path:
        return self.folder / f"{self.workload.network}.onnx"

    def weights(self) -> Mapping[str, Array]:
        """The first weights, by PyTorch's names."""
        with np.load(self.folder / f"{self.workload.network}.npz") as file:
            return dict(file)

    @classmethod
    def from_json(cls, text: str) -> Job:
        given = json.loads(text)
        return cls(
            WORKLOADS[given["workload"]],
            given["optimizer"],
            Path(given["folder"]),
            given["threads"],
        )

    def to_json(self) -> str:
        given = {
            "workload": self.workload.name,
            "optimizer": self.optimizer,
            "folder": str(self.folder),
            "threads": self.threads,
        }
        return json.dumps(given)
