"""Networks that have not been trained yet, exported by torch's default settings: their files train
as the networks do once `untie` and `add_biases` have restored the weights that the exporter merged
and dropped.

The other architectures here get random numbers first, so that no two of their tensors are equal.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import onnxfit
from onnxfit import Trainer
from onnxfit.losses import CrossEntropy
from onnxfit.optimizers import SGD
from tests.exports.architectures import ARCHITECTURES, CLASSES, Architecture
from tests.exports.networks import folded_from, loss_of

STEPS = 20
# The exporters write some matrices of these twice, once of them transposed perhaps, which the
# network has once.
TIED = ("albert", "gpt2", "t5")
# The exporter computes tables for this length or batch from these parameters. To train a table is
# another thing than to train the parameter.
FOLDED = ("relative", "cls_token")
pytestmark = pytest.mark.filterwarnings("default")  # torch and transformers warn of themselves


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.dense = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.dense(self.norm(x)))


class Mlp(nn.Module):
    """Dense layers with zero biases; a block is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.once, self.twice = nn.Linear(48, 32), Block(32), Block(32)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, CLASSES)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.twice(self.twice(self.once(self.stem(x))))))


NETWORKS: dict[str, Callable[[], Architecture]] = {
    "mlp": lambda: Architecture(Mlp(), (torch.randn(16, 48),)),
    **{
        name: ARCHITECTURES[name]
        for name in ("bert", "t5", "gpt2", "llama", "albert", "vit", "beit", "convnext", "transformer_encoder")
    },
}  # fmt: skip


def twins(model: onnx.ModelProto) -> dict[str, str]:
    """The matrices that are equal to an earlier one, as it is or transposed, and that one."""
    matrices: dict[str, np.ndarray] = {}
    pairs = {}
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        if array.ndim == 2 and array.dtype == np.float32 and np.ptp(array):
            same = (n for n, a in matrices.items() for b in (a, a.T) if np.array_equal(array, b))
            twin = next(same, None)
            if twin is None:
                matrices[tensor.name] = array
            else:
                pairs[tensor.name] = twin
    return pairs


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_fresh_network_trains_as_in_torch(name: str, dynamo: bool, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = NETWORKS[name]()
    found.network.eval()
    path = tmp_path / "model.onnx"
    inputs = [f"x{i}" for i in range(len(found.inputs))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        torch.onnx.export(found.network, found.inputs, path, dynamo=dynamo, input_names=inputs, output_names=["y"])  # fmt: skip
    folded = folded_from(path)
    parameters = [name for name, _ in found.network.named_parameters()]
    fixed = {name for name in parameters if any(word in name for word in FOLDED)}
    excluded = [
        f"!{tensor}" for tensor, sources in folded.items() if fixed & set(sources) and tensor
    ]
    for parameter_name, parameter in found.network.named_parameters():
        if parameter_name in fixed:
            parameter.requires_grad_(False)
            excluded.append(f"!{parameter_name}")
    model = onnxfit.untie(path)
    if dynamo:  # the older exporter drops no biases
        model = onnxfit.add_biases(model)
    if name in TIED:
        model = onnxfit.tie(model, twins(model))
    names = {tensor.name for tensor in model.graph.initializer}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # nothing is merged any more
        trainer = Trainer(
            model, [name for name in excluded if name[1:] in names] or None,
            loss=CrossEntropy(axis=found.class_axis), optimizer=SGD(0.05), batch_norm="frozen", gradient="onnx",
        )  # fmt: skip
    read = {v.name for v in model.graph.input}
    x = {name: value.numpy() for name, value in zip(inputs, found.inputs) if name in read}
    with torch.no_grad():
        expected = found.network(*found.inputs)
    np.testing.assert_allclose(trainer.predict_on_batch(x), expected, rtol=1e-3, atol=1e-4)
    classes = expected.shape[found.class_axis]
    rest = [n for axis, n in enumerate(expected.shape) if axis != found.class_axis % expected.ndim]
    y = torch.randint(0, classes, rest, generator=torch.Generator().manual_seed(1))
    losses, torch_losses = [], []
    optimizer = torch.optim.SGD([p for p in found.network.parameters() if p.requires_grad], 0.05)
    for _ in range(STEPS):
        losses.append(trainer.train_on_batch(x, y.numpy())["loss"])
        optimizer.zero_grad()
        loss = loss_of(found.network, found, y)
        loss.backward()
        optimizer.step()
        torch_losses.append(loss.item())
    print(f"{name}: from {torch_losses[0]:.4f} to {torch_losses[-1]:.4f}, differs by {np.abs(np.subtract(losses, torch_losses)).max():.1e}")  # fmt: skip
    assert torch_losses[-1] < torch_losses[0] - 0.01
    np.testing.assert_allclose(losses, torch_losses, rtol=0, atol=1e-5)
