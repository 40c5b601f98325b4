"""Find the weights among a model's initializers, and select those that `weights=` names."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from fnmatch import fnmatchcase

import numpy as np
import onnx_ir as ir

from onnxfit.errors import ModelError, SettingError, UnknownNameError
from onnxfit.graph.quantized import describe_quantized, quantized_weights
from onnxfit.registry import matching_names, name_list

# (operator, input) whose tensor is a setting of the operator, not a weight
SETTINGS = {
    ("Clip", 1),
    ("Clip", 2),
    ("DequantizeLinear", 1),
    ("Dropout", 1),
    ("GatherBlockQuantized", 2),
    ("GroupQueryAttention", 7),  # cosines and sines of positions
    ("GroupQueryAttention", 8),
    ("MatMulBnb4", 2),
    ("MatMulNBits", 2),
    ("MatMulNBits", 3),
    ("MaxRoiPool", 1),
    ("OneHot", 2),
    ("Pad", 2),
    ("Pow", 1),
    ("QuantizeLinear", 1),
    ("Range", 0),
    ("Range", 1),
    ("Range", 2),
    ("Resize", 1),
    ("Resize", 2),
    ("RoiAlign", 1),
    ("RotaryEmbedding", 1),  # cosines and sines: ONNX's operator has them at 1 and 2,
    ("RotaryEmbedding", 2),  # that of com.microsoft at 2 and 3
    ("RotaryEmbedding", 3),
    ("Upsample", 1),
}
LAYERS = {
    "BatchNormalization",
    "Conv",
    "ConvTranspose",
    "GRU",
    "Gather",
    "Gemm",
    "GroupNormalization",
    "InstanceNormalization",
    "LSTM",
    "LayerNormalization",
    "MatMul",
    "PRelu",
    "RNN",
    "SimplifiedLayerNormalization",
}
STATISTICS = {("BatchNormalization", 3), ("BatchNormalization", 4)}
FLOATS = {
    ir.DataType.FLOAT,
    ir.DataType.DOUBLE,
    ir.DataType.FLOAT16,
    ir.DataType.BFLOAT16,
}

# torch's exporter records whether a tensor was a parameter of the network; its optimizer records
# the names of the tensors from which it computed a new tensor.
KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
FOLDED_FROM = "pkg.onnxscript.optimizer.folded_from"
# Names among those that are surely no parameters: constants (`lifted_tensor_0`), well-known buffers
# (the frequencies of rotary positions), and intermediate results, which are called after their
# operators.
NO_PARAMETER = re.compile(
    r"(.*\.)?(lifted_tensor_\d+|\w*inv_freq|embed_scale)"
    r"|(val|value|shape|zeros|ones|full|empty|eye|arange|linspace|scalar_tensor|clone|_?to_copy|to"
    r"|alias|fill|slice|select|index|view|reshape|flatten|expand|repeat|permute|transpose|t"
    r"|unsqueeze|squeeze|cat|stack|gather|where|masked_fill|tril|triu|add|sub|rsub|mul|div|neg|abs"
    r"|pow|exp|log|sqrt|rsqrt|reciprocal|sin|cos|outer|matmul|mm|bmm|sum|mean|cumsum|minimum"
    r"|maximum|clamp|floor|floor_divide|remainder|eq|ne|lt|le|gt|ge|logical_\w+|bitwise_\w+|isnan"
    r"|isinf|new_\w+|\w+_like|embedding|min_val|max_val)(_default)?(_\d+)*"
)


def statistics(model: ir.Model) -> set[str]:
    """Return the running means and variances of every BatchNormalization."""
    return {name for name, uses in _uses(model) if uses & STATISTICS}


def all_weights(model: ir.Model, known: Container[str] = ()) -> list[str]:
    """Return every float initializer that is a weight, in the model's order.

    Constants of the graph and the running statistics of BatchNormalization are not weights. If
    torch's exporter recorded which tensors were parameters, its record decides. Otherwise,
    constants are tensors of rank 0, settings of an operator (the bounds of Clip), masks with
    infinities, and tensors of one element that no layer multiplies by or adds (`MatMul`, `Gemm`,
    `Conv`, … and the `Add` after one).

    A larger constant, such as a table of positions, looks like a weight: exclude it by `"!name"`.
    A weight that is missing here can be selected by its name.

    - `known`: initializers that count as weights, whose numbers are not read.
    """
    tensors = model.graph.initializers
    return [n for n, uses in _uses(model) if n in known or _is_weight(tensors[n], uses)]


def _is_weight(value: ir.Value, uses: set[tuple[str, int]]) -> bool:
    """Return whether an initializer is a weight; `uses` are the (operator, input) that read it."""
    if not _is_float(value) or uses & STATISTICS:
        return False
    noted = _noted_as_parameter(value)
    if noted is not None:
        return noted
    tensor = value.const_value
    if tensor is None or not value.shape or uses & SETTINGS:
        return False
    return bool(np.isfinite(tensor.numpy()).all()) and (tensor.size != 1 or _is_in_layer(value))


def _noted_as_parameter(value: ir.Value) -> bool | None:
    """Return whether the exporter recorded a tensor as a parameter; None without a record."""
    kind = value.metadata_props.get(KIND)
    if kind is not None:
        return kind == "PARAMETER"
    origins = re.findall(r"'([^']*)'", value.metadata_props.get(FOLDED_FROM, ""))
    parameters = [name for name in origins if not NO_PARAMETER.fullmatch(name)]
    if origins and not parameters:
        return False
    # only the name of a tensor in a module has a dot
    return True if any("." in name for name in parameters) else None


def _is_in_layer(value: ir.Value) -> bool:
    """Return whether a tensor of one element belongs to a layer.

    Exporters also write factors, epsilons and exponents as tensors of one element.
    """
    for node, _ in value.uses():
        if node.op_type in LAYERS:
            return True
        others = [v.producer() for v in node.inputs if v is not None and v is not value]
        if node.op_type == "Add" and any(p is not None and p.op_type in LAYERS for p in others):
            return True
    return False


def matching(patterns: Sequence[str] | str, known: Sequence[str]) -> list[str]:
    """Return the trained weights that names or patterns select, in their order.

    - `patterns`: names or fnmatch patterns, one or several.
    - `known`: the names of all trained weights.

    Raises UnknownNameError if a pattern matches nothing.
    """
    names: set[str] = set()
    for pattern in name_list("frozen", patterns):
        names |= matching_names(pattern, known, "trained weight")
    return [name for name in known if name in names]


def select_weights(model: ir.Model, patterns: Sequence[str] | str | None) -> list[str]:
    """Return the weights that `weights=` of a trainer selects, in the model's order.

    - `model`: a model that `normalize` returned.
    - `patterns`: names or fnmatch patterns in any order, one or several; "!pattern" excludes. None
      selects `all_weights`.

    Raises ModelError if the model has no float weights. Raises UnknownNameError if a pattern
    matches nothing; the error lists the weights. Raises SettingError if every weight is excluded,
    or a running statistic is selected.
    """
    initializers = model.graph.initializers
    floats = [name for name, v in initializers.items() if _is_float(v) and v.shape is not None]
    integers = quantized_weights(model)
    if not floats:
        note = [describe_quantized(integers)] if integers else []
        raise ModelError(" ".join([_message_without_floats(model), *note]))
    weights = all_weights(model)
    if patterns is None:
        if not weights and integers:
            raise ModelError(f"The model has no float weights. {describe_quantized(integers)}")
        if not weights:
            raise ModelError(
                f"The model has no float weights: its float initializers ({', '.join(floats)}) are"
                " constants. To train them, pass their names as weights=."
            )
        return weights
    patterns = name_list("weights", patterns)
    exclusions = [p for p in patterns if p.startswith("!") and p not in floats]
    inclusions = [p for p in patterns if p not in exclusions]
    running = statistics(model)
    selected = set(weights) if exclusions and not inclusions else set()
    for pattern in inclusions:
        selected |= _matching_weights(pattern, floats, weights, running)
    for pattern in exclusions:
        selected -= _matching_weights(pattern[1:], floats, weights, running)
    if not selected:
        raise SettingError(
            f"weights={patterns!r} selects no weight. The model's weights are {', '.join(weights)}."
        )
    return [name for name in floats if name in selected]


def _matching_weights(
    pattern: str, floats: Sequence[str], weights: Sequence[str], running: set[str]
) -> set[str]:
    """Return the float initializers that a name or pattern matches.

    A pattern skips the running statistics (`running`). Raises SettingError for their name.
    """
    if pattern in running:
        raise SettingError(
            f"{pattern!r} is a running statistic of a BatchNormalization, which has no gradient."
            " Use batch_norm='train' to update it."
        )
    if pattern in floats:
        return {pattern}
    matches = {n for n in floats if fnmatchcase(n, pattern) and n not in running}
    if not matches:
        raise UnknownNameError("weight", pattern, weights or floats)
    return matches


def _message_without_floats(model: ir.Model) -> str:
    message = (
        f"The model has no float weights: none of its {len(model.graph.initializers)} initializers"
        " is a float tensor."
    )
    constants = sum(node.op_type == "Constant" for node in model.graph)
    if constants:
        message += (
            f" Its {constants} Constant nodes cannot be trained: convert them to initializers"
            " first."
        )
    in_bodies = sum(len(graph.initializers) for graph in model.graph.subgraphs())
    if in_bodies:
        message += (
            f" The {in_bodies} initializers inside the bodies of its If, Loop or Scan cannot be"
            " trained: move them to the main graph."
        )
    return message


def _is_float(value: ir.Value) -> bool:
    return value.dtype in FLOATS


def _uses(model: ir.Model) -> Iterator[tuple[str, set[tuple[str, int]]]]:
    """Yield the name of every initializer with the (operator, input) pairs that read it."""
    for name, value in model.graph.initializers.items():
        yield name, {(usage.node.op_type, usage.idx) for usage in value.uses()}
