"""Freeze rows of weights, such as the row of an embedding for padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxfit.checks import matching_names
from onnxfit.errors import SettingError
from onnxfit.gradients.update import FrozenRows, with_rows
from onnxfit.graph.model import spec_of
from onnxfit.graph.values import GraphBuilder, Value


def frozen_rows(
    model: ir.Model, weights: Sequence[str], setting: Mapping[str, Sequence[int]] | None
) -> FrozenRows:
    """Return the rows that `freeze_rows=` of a trainer freezes, by weight.

    - `model`: a normalized model.
    - `weights`: the trained weights.
    - `setting`: weight or pattern -> numbers of rows, which count from the end if negative.

    UnknownNameError: no trained weight matches. SettingError: a row does not exist.
    """
    found: dict[str, set[int]] = {}
    for pattern, rows in (setting or {}).items():
        for name in sorted(matching_names(pattern, weights, "trained weight")):
            shape = spec_of(model.graph.initializers[name]).shape or ()
            count = int(shape[0] or 0) if shape else 0
            for row in rows:
                if not -count <= row < count:
                    raise SettingError(
                        f"freeze_rows has row {row} of {name!r}, which has {count} rows."
                    )
                found.setdefault(name, set()).add(row % count)
    return {name: np.array(sorted(rows), np.int64) for name, rows in found.items()}


def without_frozen_rows(
    op: GraphBuilder, gradients: Mapping[str, Value], rows: FrozenRows
) -> dict[str, Value]:
    """Return the gradients with zeros in frozen rows."""
    zeroed = dict(gradients)
    for name, numbers in rows.items():
        g = gradients[name]
        zeros = np.zeros((len(numbers), *(int(d or 0) for d in (g.shape or ())[1:])))
        zeroed[name] = with_rows(op, g, numbers, op.constant(zeros, g.dtype))
    return zeroed
