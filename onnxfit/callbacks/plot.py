"""A curve in a PNG file, for callbacks that looked for something and found it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Union

from onnxfit.errors import InstallationError
from onnxfit.files import write_atomically


def plot_curve(
    path: Union[str, os.PathLike[str]],
    owner: str,
    x: Sequence[float],
    y: Sequence[float],
    mark: float | None,
    **axes: Any,
) -> None:
    """Draw y over x, and a line at `mark`;

    `owner`, the callback's class, is named in InstallationError where matplotlib lacks.

    `axes` are matplotlib's settings of axes: labels and scales.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InstallationError(f"{owner}.plot needs matplotlib: pip install matplotlib.") from None
    figure = Figure(figsize=(6, 4), layout="tight")
    FigureCanvasAgg(figure)
    drawn = figure.add_subplot(**axes)
    drawn.plot(x, y, marker="." if len(x) < 30 else None)
    if mark is not None:
        drawn.axvline(
            mark,
            linestyle="--",
            color="tab:red",
            label=f"suggestion {mark:.2g}" if mark < 1 else f"suggestion {mark:g}",
        )
        drawn.legend()
    write_atomically(path, lambda file: figure.savefig(file, format="png"))
