"""Random arrays in the place of data, as arrays and as code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxfit.load.facts import InputFact

Array = npt.NDArray[Any]
GENERATED = ("float32", "float64")  # the element types that NumPy's generators draw


def literal(value: object) -> str:
    r"""Return the Python expression of a text, a number, an array of zeros, or a container of them.

    Texts come from an untrusted file, so they are written by `repr`; those without quotes have
    double quotes.

    >>> literal({"a": ["b'c", 1]})
    '{"a": ["b\'c", 1]}'
    """
    if isinstance(value, Mapping):
        items = (f"{literal(key)}: {literal(one)}" for key, one in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, np.ndarray):  # the first value of a state
        return f"np.zeros({value.shape}, np.{value.dtype})"
    text = repr(value)
    plain = isinstance(value, str) and text.startswith("'") and "\\'" not in text
    return f'"{text[1:-1]}"' if plain and '"' not in text else text


@dataclass(frozen=True)
class Placeholder:
    """Random data for an input or an output.

    - `name`: the input or output.
    - `dtype`: the name of the element type in NumPy.
    - `shape`: the sizes; the size of the rows is None.
    - `fill`: "zeros", "ones", "unit" (0 to 1), "signed" (-1 to 1), "normal", "integers" (from `low`
      to below `high`), or "copy" of the input `source`.
    - `reason`: a remark for the script.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    fill: str
    reason: str
    low: int = 0
    high: int = 2
    source: str = ""

    def array(self, rows: int, rng: np.random.Generator, inputs: dict[str, Array]) -> Array:
        """Return the data of some rows.

        - `inputs`: the inputs, of which labels may be a copy.
        """
        if self.fill == "copy":
            return inputs[self.source].copy()
        shape = tuple(rows if size is None else size for size in self.shape)
        dtype = np.dtype(self.dtype)
        if self.fill in ("zeros", "ones"):
            return np.full(shape, self.fill == "ones", dtype)
        if self.fill == "integers":
            return rng.integers(self.low, self.high, shape).astype(dtype)
        if self.fill == "normal":
            return np.asarray(rng.standard_normal(shape)).astype(dtype)
        return np.asarray(rng.uniform(-1 if self.fill == "signed" else 0, 1, shape)).astype(dtype)

    @property
    def code(self) -> str:
        """The expression that makes the data in the script."""
        if self.fill == "copy":
            return f"x[{literal(self.source)}].copy()"
        sizes = ["rows" if size is None else str(size) for size in self.shape]
        shape = f"({', '.join(sizes)}{',' * (len(sizes) == 1)})"
        dtype = f"np.{np.dtype(self.dtype).name}"
        if self.dtype == "bool":
            dtype = "np.bool_"
        if self.fill in ("zeros", "ones"):
            return f"np.{self.fill}({shape}, {dtype})"
        if self.fill == "integers":
            drawn = f"rng.integers({self.low}, {self.high}, {shape})"
            return drawn if self.dtype == "int64" else f"{drawn}.astype({dtype})"
        if self.fill == "normal":
            if self.dtype in GENERATED:
                return f"rng.standard_normal({shape}, {dtype})"
            return f"rng.standard_normal({shape}).astype({dtype})"
        if self.fill == "unit" and self.dtype in GENERATED:
            return f"rng.random({shape}, {dtype})"
        return f"rng.uniform({-1 if self.fill == 'signed' else 0}, 1, {shape}).astype({dtype})"


def input_placeholder(
    fact: InputFact, shape: tuple[int | None, ...], length: int, maximum: int
) -> Placeholder:
    """Return random data for an input.

    - `shape`: the sizes that were chosen; None for the rows.
    - `length`: the value of an input of lengths.
    - `maximum`: the largest value of integers whose meaning is unknown.
    """

    reason = f"{fact.kind}, because {fact.reason}"

    def filled(fill: str, low: int = 0, high: int = 2) -> Placeholder:
        return Placeholder(fact.name, fact.dtype, shape, fill, reason, low, high)

    if fact.kind == "token ids" and fact.below is not None:
        return filled("integers", 0, fact.below)
    if fact.kind in ("mask", "flags"):
        return filled("ones")
    if fact.kind == "state":
        return filled("zeros")
    if fact.kind == "lengths":
        return filled("integers", length, length + 1)
    if fact.kind == "integers":
        return filled("integers", 0, maximum + 1)
    return filled({"image": "unit", "signal": "signed"}.get(fact.kind, "normal"))


def label_placeholder(
    name: str, loss: str, output: Array, rows: int, dtype: str, ids: str | None
) -> Placeholder:
    """Return random labels for an output.

    - `output`: an array of the output, rows first.
    - `rows`: the rows of the batch that gave this array.
    - `dtype`: the element type of the output.
    - `ids`: the input of token ids, whose copy the labels of `causal_lm` are.
    """
    shape = output.shape or (rows,)
    sizes: tuple[int | None, ...] = (None if shape[0] == rows else shape[0], *shape[1:])
    if loss == "causal_lm" and ids is not None:
        return Placeholder(name, dtype, sizes, "copy", "the loss shifts the token ids", source=ids)
    if loss == "cross_entropy":
        axis = 1 if len(shape) >= 4 else len(shape) - 1
        classes = shape[axis]
        without = (*sizes[:axis], *sizes[axis + 1 :])
        reason = f"classes from 0 to {classes - 1}"
        return Placeholder(name, "int64", without, "integers", reason, 0, classes)
    if loss == "binary_cross_entropy":
        return Placeholder(name, dtype, sizes, "integers", "0 or 1")
    return Placeholder(name, dtype, sizes, "normal", "any numbers")


def drawn(
    inputs: Sequence[Placeholder], labels: Sequence[Placeholder], rows: int
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return random inputs and labels of some rows, by name."""
    rng = np.random.default_rng(0)
    x: dict[str, Array] = {}
    for one in inputs:
        x[one.name] = one.array(rows, rng, x)
    return x, {one.name: one.array(rows, rng, x) for one in labels}
