"""Which initializers of a model are weights, and which of them `weights=` selects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import numpy as np
import onnx_ir as ir

from onnxfit.errors import ModelError, SettingError, UnknownNameError

# (operator, input) whose tensor is a setting of the operator, not something to learn
SETTINGS = {
    ("Clip", 1), ("Clip", 2), ("Dropout", 1), ("Pad", 2), ("Resize", 1), ("Resize", 2), ("Upsample", 1), ("Pow", 1), ("Range", 0), ("Range", 1),
    ("Range", 2), ("OneHot", 2), ("QuantizeLinear", 1), ("DequantizeLinear", 1), ("RoiAlign", 1), ("MaxRoiPool", 1),
}  # fmt: skip
STATISTICS = {("BatchNormalization", 3), ("BatchNormalization", 4)}


def statistics(model: ir.Model) -> set[str]:
    """The running means and variances of every BatchNormalization."""
    return {name for name, roles in _roles(model) if roles & STATISTICS}


def all_weights(model: ir.Model) -> list[str]:
    """Every float initializer that is a weight, in the model's order.

    Not weights: constants of the graph (scalars of rank 0, settings such as the bounds of Clip, masks with infinities) and the running
    statistics of BatchNormalization. A constant with an axis, such as a table of positions, cannot be told from a weight: exclude it
    by `"!name"`.
    """
    found = []
    for name, roles in _roles(model):
        value = model.graph.initializers[name]
        if _is_float(value) and value.shape is not None and len(value.shape) > 0 and not roles & (SETTINGS | STATISTICS):
            tensor = value.const_value
            if tensor is not None and bool(np.isfinite(tensor.numpy()).all()):
                found.append(name)
    return found


def select_weights(model: ir.Model, patterns: Sequence[str] | str | None) -> list[str]:
    """The weights that `patterns` (names or fnmatch patterns in any order, "!pattern" excludes) select, in the model's order.

    Raises ModelError for a model without float weights, UnknownNameError for a pattern that matches nothing (the error lists the
    weights), SettingError when nothing is left.
    """
    floats = [n for n, v in model.graph.initializers.items() if _is_float(v) and v.shape is not None]
    default = all_weights(model)
    if not floats:
        constants = sum(node.op_type == "Constant" for node in model.graph)
        hint = f" Its {constants} Constant nodes cannot be trained: lift them into initializers first." if constants else ""
        raise ModelError(
            f"The model has no float weights: none of its {len(model.graph.initializers)} initializers is float.{hint}"
        )
    if patterns is None:
        if not default:
            raise ModelError(
                f"The model has no float weights: its float initializers ({', '.join(floats)}) are constants. Name those to train."
            )
        return default
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    running = statistics(model)

    def matching(pattern: str) -> set[str]:
        found = {pattern} if pattern in floats else {n for n in floats if fnmatchcase(n, pattern) and n not in running}
        if not found:
            raise UnknownNameError("weight", pattern, default or floats)
        if found & running:
            raise SettingError(
                f"{pattern!r} is a running statistic of a BatchNormalization: batch_norm='train' updates it, no gradient does."
            )
        return found

    included = [matching(p) for p in patterns if not p.startswith("!")]
    excluded = [matching(p[1:]) for p in patterns if p.startswith("!")]
    chosen = set().union(*included) if included else set(default)
    chosen -= set().union(*excluded)
    if not chosen:
        raise SettingError(f"weights={patterns!r} leaves nothing to train; the model's weights are {', '.join(default)}.")
    return [n for n in floats if n in chosen]


def _is_float(value: ir.Value) -> bool:
    return value.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def _roles(model: ir.Model) -> Iterator[tuple[str, set[tuple[str, int]]]]:
    """Every initializer's name with the (operator, input) pairs that use it."""
    for name, value in model.graph.initializers.items():
        yield name, {(usage.node.op_type, usage.idx) for usage in value.uses()}
