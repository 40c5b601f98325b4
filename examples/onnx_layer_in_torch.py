"""A layer from a .onnx file inside a PyTorch network, compared with the same network in PyTorch.

    python examples/onnx_layer_in_torch.py [--out docs/gallery]

Both are trained by torch.optim, start with the same weights and see the same batches. The example
ends with an error if their weights come to differ by more than 1e-4. It writes
onnx_layer_in_torch.csv (the losses) and onnx_layer_in_torch.png (the curves).
"""

from __future__ import annotations

import sys
from collections import OrderedDict

import numpy as np
import onnx
import torch
from figures import GREY, INK, ORANGE, arguments, label, panels, save, write_csv
from models import dense

from onnxfit.torch import OnnxModule

EPOCHS, ROWS = 60, 32
WANTED = 1e-4


def main() -> None:
    options = arguments(__doc__)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = dense(16, 32, 16)  # Gemm, Relu, Gemm, as exporters write it

    middle = OnnxModule(model, threads=1)
    mixed = torch.nn.Sequential(
        torch.nn.Linear(2, 16), torch.nn.Tanh(), middle, torch.nn.Tanh(), torch.nn.Linear(16, 1)
    )

    layers = OrderedDict(
        fc1=torch.nn.Linear(16, 32), relu=torch.nn.ReLU(), fc2=torch.nn.Linear(32, 16)
    )
    alone = torch.nn.Sequential(
        torch.nn.Linear(2, 16),
        torch.nn.Tanh(),
        torch.nn.Sequential(layers),
        torch.nn.Tanh(),
        torch.nn.Linear(16, 1),
    )
    alone.load_state_dict(mixed.state_dict())  # the names in the file are the names in torch

    x, y = spirals(512)
    orders = [torch.randperm(len(x)) for _ in range(EPOCHS)]
    networks = {"torch": alone, "mixed": mixed}
    optimizers = {
        name: torch.optim.Adam(network.parameters(), lr=0.002) for name, network in networks.items()
    }
    losses: dict[str, list[float]] = {name: [] for name in networks}
    apart = []
    for order in orders:
        for name, network in networks.items():
            losses[name].append(train_epoch(network, optimizers[name], x, y, order))
        apart.append(difference(alone, mixed))

    trained = middle.export()  # the .onnx file with the weights that torch.optim has trained
    (output,) = trained.graph.output
    onnx.checker.check_model(trained)

    epochs = range(1, EPOCHS + 1)
    columns = {
        "epoch": epochs,
        "loss_torch": losses["torch"],
        "loss_mixed": losses["mixed"],
        "largest_weight_difference": apart,
    }
    write_csv(options.out / "onnx_layer_in_torch.csv", columns)
    figure, (left, right) = panels(
        "A layer from a file in the middle of torch: the weights of torch alone, to"
        f" {max(apart):.0e}"
    )
    left.plot(
        epochs,
        losses["torch"],
        color=GREY,
        linewidth=7,
        solid_capstyle="round",
        label="torch alone",
    )
    left.plot(
        epochs,
        losses["mixed"],
        color=ORANGE,
        linewidth=1.8,
        label="with an ONNX layer in the middle",
    )
    left.set_ylim(bottom=0)
    label(left, "Binary cross entropy", "epoch")
    right.semilogy(epochs, apart, color=ORANGE, linewidth=1.8)
    right.axhline(WANTED, color=INK, linewidth=1, linestyle=":")
    right.annotate("at most", (1, WANTED), (0, 3), textcoords="offset points", va="bottom")
    right.set_ylim(1e-8, 1e-3)
    label(right, "Largest difference between the weights", "epoch")
    save(figure, options.out / "onnx_layer_in_torch.png")

    print("epoch    torch alone    with an ONNX layer")
    for i in sorted({*range(0, EPOCHS, 10), EPOCHS - 1}):
        print(f"{i + 1:5}    {losses['torch'][i]:11.6f}    {losses['mixed'][i]:18.6f}")
    print(
        f"\nlargest difference  {max(apart):.1e} between the weights of the two, in {EPOCHS} epochs"
    )
    print(
        f"exported            {output.name} by {len(trained.graph.node)} nodes, with the trained"
        " weights"
    )
    if not max(apart) < WANTED:
        sys.exit(f"onnx_layer_in_torch: the weights were to stay within {WANTED:g}")
    if not losses["mixed"][-1] < 0.05 < losses["mixed"][0]:
        sys.exit("onnx_layer_in_torch: training fell short")


def spirals(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points on two arms of a spiral, with a little noise, and the arm of each as label."""
    rng = np.random.default_rng(0)
    arm = rng.integers(0, 2, rows)
    along = np.sqrt(rng.uniform(0.05, 1, rows))
    angle = 3 * np.pi * along + np.pi * arm
    x = along[:, None] * np.stack(
        [np.cos(angle), np.sin(angle)], axis=1
    ) + 0.02 * rng.standard_normal((rows, 2))
    return torch.from_numpy(2 * x).float(), torch.from_numpy(arm[:, None]).float()


def train_epoch(
    network: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    y: torch.Tensor,
    order: torch.Tensor,
) -> float:
    total = 0.0
    for rows in order.split(ROWS):
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(network(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        total += loss.item() * len(rows)
    return total / len(x)


def difference(a: torch.nn.Module, b: torch.nn.Module) -> float:
    others = b.state_dict()
    return max(
        (tensor - others[name]).abs().max().item() for name, tensor in a.state_dict().items()
    )


if __name__ == "__main__":
    main()
