"""A layer from a .onnx file in the middle of a PyTorch network, trained by torch.optim, beside the same network in torch alone.

    python examples/onnx_layer_in_torch.py [folder]

Both start with the same weights and see the same batches; ends with an error if their weights drift apart by more than 1e-4. Writes
onnx_layer_in_torch.csv (the losses) and onnx_layer_in_torch.png (the curves) into the folder, the current one by default.
"""

from __future__ import annotations

import csv
import sys
from collections import OrderedDict
from pathlib import Path

import matplotlib as mpl
import numpy as np
import onnx
import torch
from models import dense

from onnxfit.torch import OnnxModule

mpl.use("Agg")
import matplotlib.pyplot as plt

EPOCHS, ROWS = 60, 32
WANTED = 1e-4
TORCH, MIXED, INK, FAINT = "#9aa5b1", "#d9480f", "#1f2933", "#e4e7eb"


def main(folder: Path) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = dense(16, 32, 16)  # Gemm, Relu, Gemm, as any exporter would write it

    middle = OnnxModule(model, threads=1)
    mixed = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), middle, torch.nn.Tanh(), torch.nn.Linear(16, 1))

    layers = OrderedDict(fc1=torch.nn.Linear(16, 32), relu=torch.nn.ReLU(), fc2=torch.nn.Linear(32, 16))
    alone = torch.nn.Sequential(
        torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Sequential(layers), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    )
    alone.load_state_dict(mixed.state_dict())  # the names in the file are the names in torch

    x, y = spirals(512)
    orders = [torch.randperm(len(x)) for _ in range(EPOCHS)]
    networks = {"torch": alone, "mixed": mixed}
    optimizers = {name: torch.optim.Adam(network.parameters(), lr=0.002) for name, network in networks.items()}
    losses: dict[str, list[float]] = {name: [] for name in networks}
    apart = []
    for order in orders:
        for name, network in networks.items():
            losses[name].append(train_epoch(network, optimizers[name], x, y, order))
        apart.append(difference(alone, mixed))

    trained = middle.export()  # the .onnx file again, with what torch.optim made of its weights
    (output,) = trained.graph.output
    onnx.checker.check_model(trained)

    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "onnx_layer_in_torch.csv", "w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["epoch", "loss_torch", "loss_mixed", "largest_weight_difference"])
        rows.writerows((i + 1, f"{a:.6f}", f"{b:.6f}", f"{d:.1e}") for i, (a, b, d) in enumerate(zip(*losses.values(), apart)))
    draw(losses, apart, folder / "onnx_layer_in_torch.png")

    print("epoch    torch alone    with an ONNX layer")
    for i in sorted({*range(0, EPOCHS, 10), EPOCHS - 1}):
        print(f"{i + 1:5}    {losses['torch'][i]:11.6f}    {losses['mixed'][i]:18.6f}")
    print(f"\nlargest difference  {max(apart):.1e} between the weights of the two, in {EPOCHS} epochs")
    print(f"exported            {output.name} by {len(trained.graph.node)} nodes, with the trained weights")
    if not max(apart) < WANTED:
        sys.exit(f"onnx_layer_in_torch: the weights were to stay within {WANTED:g}")
    if not losses["mixed"][-1] < 0.05 < losses["mixed"][0]:
        sys.exit("onnx_layer_in_torch: training fell short")


def spirals(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points on two arms of a spiral, with a little noise; which arm is what is to be learned."""
    rng = np.random.default_rng(0)
    arm = rng.integers(0, 2, rows)
    along = np.sqrt(rng.uniform(0.05, 1, rows))
    angle = 3 * np.pi * along + np.pi * arm
    x = along[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1) + 0.02 * rng.standard_normal((rows, 2))
    return torch.from_numpy(2 * x).float(), torch.from_numpy(arm[:, None]).float()


def train_epoch(
    network: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, order: torch.Tensor
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
    return max((tensor - others[name]).abs().max().item() for name, tensor in a.state_dict().items())


def draw(losses: dict[str, list[float]], apart: list[float], path: Path) -> None:
    """The losses, one upon the other, and how far the weights are apart, as two panels."""
    style = {"axes.edgecolor": FAINT, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "text.color": INK}
    epochs = np.arange(1, EPOCHS + 1)
    with plt.rc_context(style):
        figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.9), dpi=130, layout="constrained")
        left.plot(epochs, losses["torch"], color=TORCH, linewidth=6, solid_capstyle="round", label="torch alone")
        left.plot(epochs, losses["mixed"], color=MIXED, linewidth=1.8, label="with an ONNX layer in the middle")
        left.set_ylim(bottom=0)
        left.legend(frameon=False)
        right.semilogy(epochs, apart, color=MIXED, linewidth=1.8)
        right.axhline(WANTED, color=INK, linewidth=1, linestyle=":")
        right.annotate("at most", (1, WANTED), (0, 3), textcoords="offset points", va="bottom")
        right.set_ylim(1e-8, 1e-3)
        for panel, title in ((left, "Binary cross entropy"), (right, "Largest difference between the weights")):
            panel.set_title(title, loc="left", fontsize=11, fontweight="bold")
            panel.set_xlabel("epoch")
            panel.grid(axis="y", color=FAINT, linewidth=0.8)
            panel.set_axisbelow(True)
            panel.spines[["top", "right", "left"]].set_visible(False)
            panel.tick_params(length=0, which="both")
            panel.margins(x=0.02)
        figure.savefig(path)
        plt.close(figure)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path())
