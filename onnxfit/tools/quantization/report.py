"""The report on the layers of an integer model, as text, as HTML and as a picture."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from onnxfit.checks import check_arguments
from onnxfit.drawing.bars import BarPanel, bars_svg
from onnxfit.drawing.labels import count
from onnxfit.drawing.notebook import bullets, image, paragraph
from onnxfit.drawing.tables import Table
from onnxfit.errors import SettingError, UnknownNameError
from onnxfit.files import require_path, write_atomically

__all__ = ["QuantizationReport", "QuantizedLayer"]

RANKINGS = ("loss_increase", "alone_snr", "output_snr", "weight_snr")
HEADER = ("layer", "operator", "weight", "output", "alone", "loss +", "clipped")
SUFFIXES = (".svg", ".txt")
MAX_ROWS = 30  # of the table
LAST_ROWS = 5  # of a table that has more rows
MAX_NAME_CHARACTERS = 23  # of a layer in the table, so that it fits 80 columns
MAX_OPERATOR_CHARACTERS = 10
MAX_LABEL_CHARACTERS = 44  # of a layer in the picture


@dataclass(frozen=True)
class QuantizedLayer:
    """Quality measures of one layer of an integer model; `onnxfit.quantization_report` has the
    formulas.

    - `name`: the name of the node in the float model, or of its output if the node has no name.
    - `operator`: the operator of the node.
    - `type`: the integer type of the weight, or of the activations without a weight.
    - `weight_snr`: signal-to-noise ratio of the weight in dB; None without a weight.
    - `output_snr`: the ratio of the layer's output when every layer is rounded.
    - `alone_snr`: the ratio of the model's outputs when this layer alone is rounded.
    - `alone_loss`: the loss when this layer alone is rounded; None without a loss.
    - `loss_increase`: `alone_loss` minus the loss of the float model; None without a loss.
    - `clipped_weights`: share of the weight's elements beyond the range of the integers; None
      without a weight.
    - `clipped_activations`: the same of the values that the layer reads and writes in integers;
      None without activations.
    - `levels`: the number of different integers of the (largest) weight; None without a weight.
    """

    name: str
    operator: str
    type: str
    weight_snr: float | None
    output_snr: float
    alone_snr: float
    alone_loss: float | None
    loss_increase: float | None
    clipped_weights: float | None
    clipped_activations: float | None
    levels: int | None

    @property
    def noise(self) -> float:
        """The relative noise of the model's outputs when this layer alone is rounded.

        The root mean square of the noise, divided by that of the outputs: 20 dB are 0.1.
        """
        return float(10 ** (-self.alone_snr / 20))


@dataclass(frozen=True)
class QuantizationReport:
    """The result of `onnxfit.quantization_report`. It prints as a table, worst layer first.

    - `layers` has one QuantizedLayer per layer, in the order of the model.
    - `rows` is the number of rows of the data.
    - `output_snr` is the signal-to-noise ratio of the integer model's outputs in dB.
    - `float_loss`, `int_loss` are the losses of the two models; None without a loss.
    """

    layers: tuple[QuantizedLayer, ...]
    rows: int
    output_snr: float
    float_loss: float | None = None
    int_loss: float | None = None

    @check_arguments
    def ranked(self, by: str | None = None) -> list[QuantizedLayer]:
        """Return the layers, the worst first.

        - `by`: the measure that is compared: "loss_increase", "alone_snr", "output_snr" or
          "weight_snr". None takes the increase of the loss, or `alone_snr` without a loss. Layers
          without this measure are omitted, and `alone_snr` breaks ties.

        UnknownNameError: no measure has this name. SettingError: `by` is "loss_increase", but the
        report has no loss.
        """
        if by is None:
            by = "alone_snr" if self.float_loss is None else "loss_increase"
        if by not in RANKINGS:
            raise UnknownNameError("ranking", by, RANKINGS)
        if by == "loss_increase" and self.float_loss is None:
            raise SettingError(
                "Ranking by 'loss_increase' needs a loss, but the report was made without one."
                " Pass labels and a loss: quantization_report(..., (x, y), loss='cross_entropy')."
            )
        sign = -1 if by == "loss_increase" else 1
        having = [layer for layer in self.layers if getattr(layer, by) is not None]
        return sorted(having, key=lambda layer: (sign * getattr(layer, by), layer.alone_snr))

    @check_arguments
    def worst(self, n: int = 1, by: str | None = None) -> list[str]:
        """Return the names of the worst layers, which may stay in float.

        - `n`: the number of names, at least 1. A report with fewer layers returns all names.
        - `by`: the measure that is compared, as in `ranked`.
        """
        if n < 1:
            raise SettingError(f"n must be at least 1, got {n}.")
        return [layer.name for layer in self.ranked(by)[:n]]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report to a file, replacing an existing one.

        - `path`: the file: .svg for a picture with a bar for each layer, .txt for the complete
          table.

        SettingError: `path` has another suffix. CheckpointError: the file cannot be written.
        """
        suffix = check_suffix(path)
        text = self.svg() if suffix == ".svg" else self._text(fold=False)
        write_atomically(path, lambda file: file.write(f"{text}\n".encode()))

    def svg(self) -> str:
        """Return the picture: bars of the noise and, with a loss, of the increase of the loss.

        The worst layer is at the top.
        """
        layers = self.ranked()
        noise = [layer.noise for layer in layers]
        texts = [decibels(layer.alone_snr) for layer in layers]
        panels = [BarPanel("noise of the output, layer alone", noise, texts, logarithmic=True)]
        if self.float_loss is not None:
            increases = [layer.loss_increase or 0.0 for layer in layers]
            texts = [f"{increase:+.3g}" for increase in increases]
            panels.append(BarPanel("increase of the loss, layer alone", increases, texts))
        labels = [ending(layer.name, MAX_LABEL_CHARACTERS) for layer in layers]
        return bars_svg(self._head(), labels, panels)

    def __str__(self) -> str:
        return self._text(fold=True)

    def _repr_html_(self) -> str:
        """Return the table and the picture for a notebook."""
        picture = image("svg+xml", self.svg().encode())
        return paragraph(self._head()) + self._table(fold=True).html() + bullets(NOTES) + picture

    def _text(self, *, fold: bool) -> str:
        return "\n".join([self._head(), "", *self._table(fold).lines(), "", *NOTES])

    def _head(self) -> str:
        figures = [f"output {decibels(self.output_snr)}"]
        if self.float_loss is not None and self.int_loss is not None:
            figures.append(f"loss {self.float_loss:.4g} -> {self.int_loss:.4g}")
        layers = count(len(self.layers), "integer layer")
        return f"{layers}, {count(self.rows, 'row')}: {', '.join(figures)}"

    def _table(self, fold: bool) -> Table:
        rows = [_cells(layer) for layer in self.ranked()]
        if fold and len(rows) > MAX_ROWS:
            first, last = MAX_ROWS - LAST_ROWS - 1, len(rows) - LAST_ROWS
            omitted = [f"… {last - first} more layers", *[""] * (len(HEADER) - 1)]
            rows = [*rows[:first], omitted, *rows[last:]]
        return Table(HEADER, rows, right=frozenset(HEADER[2:]))


NOTES = (
    "weight, output: signal-to-noise ratios in dB, with every layer in integers",
    "alone, loss +: ratio and loss of the model, with only this layer in integers",
    "clipped: share of the weight or the activations outside the integers' range",
)


def check_suffix(path: str | os.PathLike[str]) -> str:
    """Return the suffix of a report's file. SettingError: the suffix is unknown."""
    require_path(path)
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise SettingError(
            f"The report's file must end in {' or '.join(SUFFIXES)}, got {os.fspath(path)!r}. Use"
            " .svg for a picture, or .txt for the table."
        )
    return suffix


def decibels(ratio: float) -> str:
    """
    >>> decibels(32.12), decibels(math.inf)
    ('32.1 dB', 'exact')
    """
    return "exact" if ratio == math.inf else f"{ratio:.1f} dB"


def ending(name: str, length: int) -> str:
    """Return a name, shortened to its end if long: layers often share the beginning.

    >>> ending("/encoder/layer.0/attention/MatMul", 21)
    '…r.0/attention/MatMul'
    """
    return name if len(name) <= length else f"…{name[1 - length :]}"


def _cells(layer: QuantizedLayer) -> list[str]:
    increase = layer.loss_increase
    return [
        ending(layer.name, MAX_NAME_CHARACTERS),
        layer.operator[:MAX_OPERATOR_CHARACTERS],
        _shown_decibels(layer.weight_snr),
        _shown_decibels(layer.output_snr),
        _shown_decibels(layer.alone_snr),
        "" if increase is None else f"{increase:+.3g}",
        _percent([layer.clipped_weights, layer.clipped_activations]),
    ]


def _shown_decibels(ratio: float | None) -> str:
    return "" if ratio is None else decibels(ratio).removesuffix(" dB")


def _percent(shares: Iterable[float | None]) -> str:
    largest = max((share for share in shares if share is not None), default=0.0)
    return f"{largest:.2%}" if largest else ""
