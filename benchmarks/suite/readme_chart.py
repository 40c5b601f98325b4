"""The README's chart: time of training and peak memory, compared with PyTorch.

    python benchmarks/suite/readme_chart.py

reads docs/benchmarks/headline.csv and once.csv, and writes docs/images/speed.png. A bar is onnxfit
divided by PyTorch: the faster of eager and compiled PyTorch, or the one with less memory.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
NETWORKS = {
    "tabular": "table, 3 layers", "mlp": "perceptron", "cnn": "small CNN", "resnet": "ResNet-18",
    "mobilenet": "MobileNetV2 blocks", "unet": "U-Net", "lstm": "LSTM", "gru": "GRU",
    "transformer": "transformer", "gpt": "GPT",
}  # fmt: skip


def times(folder: Path = DOCS / "benchmarks") -> dict[str, float]:
    """Return network -> time of a batch of `fit` with Adam, divided by PyTorch's."""
    with (folder / "headline.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["optimizer"] == "adam"]
    found = {row["workload"]: float(row["ratio"]) for row in rows if row["kind"] == "fit"}
    return {name: found[name] for name in NETWORKS}


def memory(folder: Path = DOCS / "benchmarks") -> dict[str, float]:
    """Return network -> peak memory of a process that trains it, divided by PyTorch's."""
    peaks: dict[str, dict[str, float]] = {}
    with (folder / "once.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            peaks.setdefault(row["workload"], {})[row["contender"]] = float(row["peak_memory"])
    return {
        name: peak["onnxfit"] / min(peak["torch"], peak["torch-compile"])
        for name, peak in peaks.items()
        if name in NETWORKS
    }


def draw(path: Path, left: Mapping[str, float], right: Mapping[str, float]) -> None:
    """Draw both charts side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    names = list(NETWORKS)
    for axes, values, title in zip(
        figure.subplots(1, 2, sharey=True), (left, right), ("time of training", "peak memory")
    ):
        shown = [values.get(name) for name in names]
        places = [i for i, value in enumerate(shown) if value is not None]
        lengths = [value for value in shown if value is not None]
        bars = axes.barh(places, lengths, color="#2f6fb3", height=0.68)
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
        axes.axvline(1, color="#d9822b", linewidth=2)
        axes.text(1.01, -0.95, "PyTorch", color="#d9822b", fontsize=9, ha="center")
        axes.set_xlim(0, 1.15)
        axes.set_yticks(range(len(names)), [NETWORKS[name] for name in names])
        axes.set_title(title, fontsize=10, loc="left")
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.tick_params(axis="y", length=0)
    figure.axes[0].invert_yaxis()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    draw(DOCS / "images" / "speed.png", times(), memory())
