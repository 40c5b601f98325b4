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
LAYERS = {"MatMul", "Gemm", "Conv", "ConvTranspose", "PRelu", "Gather", "LSTM", "GRU", "RNN"} | {
    f"{kind}Normalization" for kind in ("Batch", "Layer", "Instance", "Group", "SimplifiedLayer")
}
STATISTICS = {("BatchNormalization", 3), ("BatchNormalization", 4)}


def statistics(model: ir.Model) -> set[str]:
    """The running means and variances of every BatchNormalization."""
    return {name for name, roles in _roles(model) if roles & STATISTICS}


def all_weights(model: ir.Model) -> list[str]:
    """Every float initializer that is a weight, in the model's order.

    Not weights: constants of the graph and the running statistics of BatchNormalization. Constants are tensors of rank 0, of one element
    unless they are what a layer multiplies by or adds (`MatMul`, `Gemm`, `Conv`, … and the `Add` after one), settings of an operator
    (the bounds of Clip), and masks with infinities. A larger constant, such as a table of positions, cannot be told from a weight: exclude
    it by `"!name"`, or name a weight that is left out.
    """
    found = []
    for name, roles in _roles(model):
        value = model.graph.initializers[name]
        if not _is_float(value) or not value.shape or roles & (SETTINGS | STATISTICS):
            continue
        tensor = value.const_value
        if tensor is not None and bool(np.isfinite(tensor.numpy()).all()) and (tensor.size != 1 or _of_a_layer(value)):
            found.append(name)
    return found


def _of_a_layer(value: ir.Value) -> bool:
    """Whether a tensor of one element belongs to a layer; exporters write factors, epsilons and exponents in the same form."""
    for node, _ in value.uses():
        if node.op_type in LAYERS:
            return True
        others = [v.producer() for v in node.inputs if v is not None and v is not value]
        if node.op_type == "Add" and any(p is not None and p.op_type in LAYERS for p in others):
            return True
    return False


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

    exclusions = [p for p in patterns if p.startswith("!") and p not in floats]
    included = [matching(p) for p in patterns if p not in exclusions]
    excluded = [matching(p[1:]) for p in exclusions]
    chosen = set().union(*included) if included or not excluded else set(default)
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
