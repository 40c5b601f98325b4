"""Adapters train as LoRA modules that are written by hand in torch."""

from __future__ import annotations

import numpy as np
import pytest

from onnxfit import LoRA, Trainer
from onnxfit.optimizers import SGD, AdamW, Optimizer
from tests import models
from tests.helpers import classification

torch = pytest.importorskip("torch")

X, LABELS = classification(160)
SIZES = (4, 16, 16, 3)
STEPS = 20


class Adapted(torch.nn.Module):
    """The layers of `models.mlp`, each x W + b + s x A B with W and b frozen."""

    def __init__(self, model, adapters: dict[str, np.ndarray], scale: float) -> None:
        super().__init__()
        self.scale = scale
        from onnx.numpy_helper import to_array

        for tensor in model.graph.initializer:
            name = tensor.name.replace(".", "_")
            self.register_buffer(name, torch.tensor(to_array(tensor)))
        for name, array in adapters.items():
            self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(torch.tensor(array)))

    def forward(self, x):
        for i in range(len(SIZES) - 1):
            w, b, one, two = (
                getattr(self, f"fc{i}_{name}")
                for name in ("weight", "bias", "weight_lora_A", "weight_lora_B")
            )
            x = x @ w + b + self.scale * (x @ one @ two)
            x = torch.tanh(x) if i < len(SIZES) - 2 else x
        return x


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
@pytest.mark.parametrize("scaling", ["alpha/r", "alpha/sqrt(r)"])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_losses_and_matrices_are_those_of_torch(backend: str, scaling: str, optimizer: str) -> None:
    lora = LoRA(rank=3, alpha=6, target="*", scaling=scaling)
    ours: Optimizer = SGD(0.2) if optimizer == "SGD" else AdamW(0.02, weight_decay=0.1)
    model = models.mlp(SIZES)
    trainer = Trainer(model, adapters=lora, loss="cross_entropy", optimizer=ours, backend=backend)
    network = Adapted(model, trainer.get_weights(), 6 / (3 if scaling == "alpha/r" else 3**0.5))
    parameters = network.parameters()
    theirs = (
        torch.optim.SGD(parameters, 0.2)
        if optimizer == "SGD"
        else torch.optim.AdamW(parameters, 0.02, weight_decay=0.1)
    )
    for step in range(STEPS):
        rows = slice(8 * step, 8 * step + 8)
        loss = torch.nn.functional.cross_entropy(
            network(torch.tensor(X[rows])), torch.tensor(LABELS[rows])
        )
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        own = trainer.train_on_batch(X[rows], LABELS[rows])["loss"]
        assert own == pytest.approx(loss.item(), rel=1e-4)
    with torch.no_grad():
        for name, array in trainer.get_weights().items():
            expected = getattr(network, name.replace(".", "_")).numpy()
            np.testing.assert_allclose(array, expected, atol=1e-4)
        np.testing.assert_allclose(trainer.predict(X), network(torch.tensor(X)).numpy(), atol=1e-4)
