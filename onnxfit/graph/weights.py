"""Which initializers of a model are weights, and which of them `weights=` selects."""

from __future__ import annotations

import re
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

# torch's exporter notes what a tensor was to the network, and its optimiser the names of what it
# computed a tensor from
KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
FOLDED_FROM = "pkg.onnxscript.optimizer.folded_from"
# Among those names, what is surely no parameter: constants (`lifted_tensor_0`), well-known buffers
# (the frequencies of rotary positions), and intermediate results, which are called after the
# operator that made them.
NO_PARAMETER = re.compile(
    r"(.*\.)?(lifted_tensor_\d+|\w*inv_freq|embed_scale)|(val|value|shape|zeros|ones|full|empty|eye|arange|linspace|scalar_tensor|clone|_?to_copy|to|alias|fill|"
    r"slice|select|index|view|reshape|flatten|expand|repeat|permute|transpose|t|unsqueeze|squeeze|cat|stack|gather|where|masked_fill|tril|triu|"
    r"add|sub|rsub|mul|div|neg|abs|pow|exp|log|sqrt|rsqrt|reciprocal|sin|cos|outer|matmul|mm|bmm|sum|mean|cumsum|minimum|maximum|clamp|floor|"
    r"floor_divide|remainder|eq|ne|lt|le|gt|ge|logical_\w+|bitwise_\w+|isnan|isinf|new_\w+|\w+_like|embedding|min_val|max_val)"
    r"(_default)?(_\d+)*"
)


def statistics(model: ir.Model) -> set[str]:
    """The running means and variances of every BatchNormalization."""
    return {name for name, roles in _roles(model) if roles & STATISTICS}


def all_weights(model: ir.Model) -> list[str]:
    """Every float initializer that is a weight, in the model's order.

    Not weights: constants of the graph and the running statistics of BatchNormalization. Where
    torch's exporter notes what was a parameter and what a buffer, that decides. Else constants are
    tensors of rank 0, of one element unless they are what a layer multiplies by or adds (`MatMul`,
    `Gemm`, `Conv`, … and the `Add` after one), settings of an operator (the bounds of Clip), and
    masks with infinities. A larger constant, such as a table of positions, cannot be told from a
    weight: exclude it by `"!name"`, or name a weight that is left out.
    """
    found = []
    for name, roles in _roles(model):
        value = model.graph.initializers[name]
        noted = _noted(value)
        if not _is_float(value) or roles & STATISTICS or noted is False:
            continue
        if noted:
            found.append(name)
            continue
        if not value.shape or roles & SETTINGS:
            continue
        tensor = value.const_value
        if (
            tensor is not None
            and bool(np.isfinite(tensor.numpy()).all())
            and (tensor.size != 1 or _of_a_layer(value))
        ):
            found.append(name)
    return found


def _noted(value: ir.Value) -> bool | None:
    """Whether the exporter says that a tensor is a weight; None where it says nothing."""
    kind = value.metadata_props.get(KIND)
    if kind is not None:
        return kind == "PARAMETER"
    sources = re.findall(r"'([^']*)'", value.metadata_props.get(FOLDED_FROM, ""))
    parameters = [s for s in sources if not NO_PARAMETER.fullmatch(s)]
    if sources and not parameters:
        return False
    # intermediate results belong to no module
    return True if any("." in s for s in parameters) else None


def _of_a_layer(value: ir.Value) -> bool:
    """Whether a tensor of one element belongs to a layer; exporters write factors, epsilons and
    exponents in the same form.
    """
    for node, _ in value.uses():
        if node.op_type in LAYERS:
            return True
        others = [v.producer() for v in node.inputs if v is not None and v is not value]
        if node.op_type == "Add" and any(p is not None and p.op_type in LAYERS for p in others):
            return True
    return False


def matching(patterns: Sequence[str] | str, known: Sequence[str]) -> list[str]:
    """Those of the known weights that are named, or that an fnmatch pattern matches, in their
    order. UnknownNameError for one that finds none.
    """
    found: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        more = (
            {pattern}
            if pattern in known
            else {name for name in known if fnmatchcase(name, pattern)}
        )
        if not more:
            raise UnknownNameError("trained weight", pattern, known)
        found |= more
    return [name for name in known if name in found]


def select_weights(model: ir.Model, patterns: Sequence[str] | str | None) -> list[str]:
    """The weights that `patterns` (names or fnmatch patterns in any order, "!pattern" excludes)
    select, in the model's order.

    Raises ModelError for a model without float weights, UnknownNameError for a pattern that matches
    nothing (the error lists the weights), SettingError when nothing is left.
    """
    floats = [
        n for n, v in model.graph.initializers.items() if _is_float(v) and v.shape is not None
    ]
    default = all_weights(model)
    if not floats:
        constants = sum(node.op_type == "Constant" for node in model.graph)
        bodies = sum(len(graph.initializers) for graph in model.graph.subgraphs())
        hint = (
            f" Its {constants} Constant nodes cannot be trained: lift them into initializers first."
            if constants
            else ""
        )
        if bodies:
            hint += (
                f" The {bodies} initializers inside the bodies of its If, Loop or Scan cannot be"
                " trained: lift them into the main graph."
            )
        raise ModelError(
            f"The model has no float weights: none of its {len(model.graph.initializers)}"
            f" initializers is float.{hint}"
        )
    if patterns is None:
        if not default:
            raise ModelError(
                f"The model has no float weights: its float initializers ({', '.join(floats)}) are"
                " constants. Name those to train."
            )
        return default
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    running = statistics(model)

    def matching(pattern: str) -> set[str]:
        found = (
            {pattern}
            if pattern in floats
            else {n for n in floats if fnmatchcase(n, pattern) and n not in running}
        )
        if not found:
            raise UnknownNameError("weight", pattern, default or floats)
        if found & running:
            raise SettingError(
                f"{pattern!r} is a running statistic of a BatchNormalization: batch_norm='train'"
                " updates it, no gradient does."
            )
        return found

    exclusions = [p for p in patterns if p.startswith("!") and p not in floats]
    included = [matching(p) for p in patterns if p not in exclusions]
    excluded = [matching(p[1:]) for p in exclusions]
    chosen = set().union(*included) if included or not excluded else set(default)
    chosen -= set().union(*excluded)
    if not chosen:
        raise SettingError(
            f"weights={patterns!r} leaves nothing to train; the model's weights are"
            f" {', '.join(default)}."
        )
    return [n for n in floats if n in chosen]


def _is_float(value: ir.Value) -> bool:
    return value.dtype in (
        ir.DataType.FLOAT,
        ir.DataType.DOUBLE,
        ir.DataType.FLOAT16,
        ir.DataType.BFLOAT16,
    )


def _roles(model: ir.Model) -> Iterator[tuple[str, set[tuple[str, int]]]]:
    """Every initializer's name with the (operator, input) pairs that use it."""
    for name, value in model.graph.initializers.items():
        yield name, {(usage.node.op_type, usage.idx) for usage in value.uses()}
