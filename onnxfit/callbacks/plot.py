"""Draw a curve into a PNG file, for callbacks that search for a good setting."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Union

from onnxfit.errors import InstallationError
from onnxfit.files import write_atomically

__all__ = ["plot_curve"]

MAX_POINTS_WITH_MARKERS = 29


def plot_curve(
    path: Union[str, os.PathLike[str]],
    owner: str,
    x: Sequence[float],
    y: Sequence[float],
    suggestion: float | None,
    **axes: Any,
) -> None:
    """Draw y over x, and a vertical line at the suggestion.

    - `path`: the PNG file.
    - `owner`: the callback's class, named in the message of an InstallationError.
    - `x`, `y`: the points of the curve.
    - `suggestion`: the x of the line; None for no line.
    - `axes`: settings of matplotlib's axes, such as labels and scales.

    InstallationError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InstallationError(f"{owner}.plot needs matplotlib: pip install matplotlib.") from None
    figure = Figure(figsize=(6, 4), layout="tight")
    FigureCanvasAgg(figure)
    subplot = figure.add_subplot(**axes)
    subplot.plot(x, y, marker="." if len(x) <= MAX_POINTS_WITH_MARKERS else None)
    if suggestion is not None:
        number = f"{suggestion:.2g}" if suggestion < 1 else f"{suggestion:g}"
        label = f"suggestion {number}"
        subplot.axvline(suggestion, linestyle="--", color="tab:red", label=label)
        subplot.legend()
    write_atomically(path, lambda file: figure.savefig(file, format="png"))
