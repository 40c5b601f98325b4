"""Helpers for the figures of the examples: their folder, their look, and their numbers as CSV."""

from __future__ import annotations

import argparse
import csv
import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from PIL import Image

mpl.use("Agg")
import matplotlib.pyplot as plt

INK, FAINT = "#1f2933", "#e4e7eb"
GREY, ORANGE, BLUE, GREEN = "#9aa5b1", "#d9480f", "#1864ab", "#2b8a3e"
COLORS = 64  # enough for lines on white; a picture is then a third as large

STYLE = {
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.axisbelow": True,
    "font.size": 10,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def arguments(text: str, quick: str = "", model: str = "") -> argparse.Namespace:
    """Parse `--out FOLDER` (by default the current folder), and create the folder.

    There is an option `--quick`, too, if `quick` describes it; and an argument that may be left
    out, the folder of a model, if `model` does.
    """
    parser = argparse.ArgumentParser(description=text.partition("\n")[0])
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(),
        help="the folder that the files are written into; by default the current one",
    )
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    if model:
        parser.add_argument("model", type=Path, nargs="?", help=model)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def write_csv(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Write a column for each entry, with floats of six digits."""
    with open(path, "w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(columns)
        rows.writerows(
            [f"{v:.6g}" if isinstance(v, float) else v for v in row]
            for row in zip(*columns.values())
        )


TITLE_CHARACTERS = 88  # that fit into the width of a figure


def panels(
    title: str, rows: int = 1, columns: int = 2, height: float = 4.1
) -> tuple[Any, list[Any]]:
    """Return a figure with so many panels, under a title that states the result."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            rows, columns, figsize=(9.6, height), dpi=110, layout="constrained", squeeze=False
        )
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)
        title = textwrap.fill(title, TITLE_CHARACTERS)
        figure.suptitle(title, x=0.012, ha="left", fontsize=12.5, fontweight="bold", color=INK)
        for panel in axes.flat:
            panel.grid(axis="y")
            panel.spines[["top", "right", "left"]].set_visible(False)
            panel.tick_params(length=0, which="both")
            panel.margins(x=0.02)
        return figure, list(axes.flat)


def label(panel: Any, title: str, x: str, y: str = "", legend: str = "best") -> None:
    """Set the title and axes of a panel, and its legend if there are labels."""
    with plt.rc_context(STYLE):
        panel.set_title(title)
        panel.set_xlabel(x)
        panel.set_ylabel(y)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(loc=legend)


def save(figure: Any, path: Path) -> None:
    """Write the figure as a PNG of few colours, without a date or a version."""
    picture = io.BytesIO()
    with plt.rc_context(STYLE):
        figure.savefig(picture, format="png")
    plt.close(figure)
    reduce_colors(picture, path)


def reduce_colors(picture: io.BytesIO, path: Path) -> int:
    """Write a PNG with few colours, and return its width in pixels."""
    with Image.open(picture) as image:
        image.convert("RGB").quantize(COLORS, kmeans=1).save(path, format="PNG", optimize=True)
        return image.width
