"""Find the weights among a model's initializers, and select those that `weights=` names."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxfit.checks import matching_names, name_list
from onnxfit.errors import ModelError, SettingError, UnknownNameError, listed_names
from onnxfit.graph.fixed_tensors import described, fixed_tensors, list_text
from onnxfit.graph.front_ends import short_name
from onnxfit.graph.names import LIFTED, PLACE
from onnxfit.graph.quantized import describe_quantized, quantized_weights
from onnxfit.graph.records import NO_PARAMETER, PARAMETER, Record, Records

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
# Operators that write the numbers of a tensor in another order, shape or element type.
REARRANGING = {"Cast", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
STATISTICS = {("BatchNormalization", 3), ("BatchNormalization", 4)}
FLOATS = {
    ir.DataType.FLOAT,
    ir.DataType.DOUBLE,
    ir.DataType.FLOAT16,
    ir.DataType.BFLOAT16,
}

# A mask adds at most this number where it hides something.
MASKED = -1e4
LEAST_NUMBERS = {float(np.finfo(np.float32).min), float(np.finfo(np.float16).min)}
# The names of parameters of one number, in files without records of torch's exporter.
SCALAR_PARAMETER = re.compile(
    r"(\w+\.)*(weight|bias|alpha|beta|gamma|temperature|logit_scale|logit_bias)"
)
# The names that torch's older exporter gives to tensors of modules, and to those that it computed.
OLDER_EXPORTER = re.compile(r"(\w+\.)+\w+|onnx::\w+")
MODULE_WEIGHT = re.compile(r"(\w+\.)+(weight|bias)")
INLINING = "onnx.inliner.inline_local_functions(model)"


@dataclass(frozen=True)
class Reason:
    """Why a float initializer is a weight by default, or is not.

    - `is_weight`: whether it is a weight.
    - `text`: the reason in a few words, for the column "parameter" of a table.
    - `is_formula`: whether its numbers follow a formula that trained weights never follow.
    """

    is_weight: bool
    text: str
    is_formula: bool = False

    @property
    def is_listed(self) -> bool:
        """Whether tables list the initializer: not a number or a setting that an operator needs."""
        return self.is_weight or self not in (CONSTANT, FOLDED_CONSTANT, SETTING, STATISTIC)


RECORDED = Reason(True, "recorded")
LOOKS_LIKE_A_WEIGHT = Reason(True, "looks like one")
BUFFER = Reason(False, "buffer")
IN_CONSTANT_NODE = Reason(False, "Constant node")
CONSTANT = Reason(False, "constant")
FOLDED_CONSTANT = Reason(False, "folded constant")
MASK = Reason(False, "mask")
SCALAR = Reason(False, "scalar")
SETTING = Reason(False, "setting")
STATISTIC = Reason(False, "statistic")


def statistics(model: ir.Model) -> set[str]:
    """Return the running means and variances of every BatchNormalization."""
    return {name for name, uses in _uses(model) if uses & STATISTICS}


def all_weights(model: ir.Model, known: Container[str] = ()) -> list[str]:
    """Return every float initializer that is a weight, in the model's order.

    Constants of the graph and the running statistics of BatchNormalization are not weights. If
    torch's exporter recorded which tensors were parameters, its record decides. Otherwise,
    constants are tensors of rank 0, settings of an operator (the bounds of Clip), masks, and
    tensors of one element that no layer multiplies by or adds (`MatMul`, `Gemm`, `Conv`, … and the
    `Add` after one). A mask has infinities, the least number of its type, or two numbers of which
    one is at most -10,000.

    If at least half of the weights of layers are in Constant nodes of the file, as Paddle2ONNX
    writes them, these rules hold for all Constant nodes. In other files, a Constant node holds a
    weight if a layer multiplies by its tensor, or adds it to a product, unless all elements are 0
    or all are 1.

    Tensors whose numbers follow a formula at the place of the formula are no weights, even if they
    are recorded as parameters: `fixed_tensors`.

    A larger constant, such as a table of positions, looks like a weight: exclude it by `"!name"`.
    A weight that is missing here can be selected by its name.

    - `known`: initializers that count as weights, whose numbers are not read.
    """
    reasons = weight_reasons(model, known)
    return [name for name, reason in reasons.items() if name in known or reason.is_weight]


def weight_reasons(model: ir.Model, known: Container[str] = ()) -> dict[str, Reason]:
    """Return why each float initializer is a weight by default, or is not, in the model's order.

    - `known`: weights, whose numbers are not read.
    """
    records = Records(model.graph)
    unrecorded = has_module_names(model)
    tensors = model.graph.initializers
    lifted = lifted_names(model)
    reasons = {
        name: _reason(
            tensors[name],
            uses,
            records.of(tensors[name]),
            unrecorded and name not in lifted,
            name in known,
        )
        for name, uses in _uses(model)
        if _is_float_value(tensors[name])
    }
    if lifted and not keeps_weights_in_constant_nodes(model, reasons, known):
        layers = LAYERS - {"Gather"} if unrecorded else LAYERS
        candidates = [n for n in lifted if reasons.get(n) is LOOKS_LIKE_A_WEIGHT and n not in known]
        for name in candidates:
            if not _is_weight_in_constant_node(tensors[name], layers):
                reasons[name] = IN_CONSTANT_NODE
    candidates = [n for n, reason in reasons.items() if reason.is_weight and n not in known]
    roles = fixed_tensors(model, candidates, known)
    return {**reasons, **{n: Reason(False, role, is_formula=True) for n, role in roles.items()}}


def keeps_weights_in_constant_nodes(
    model: ir.Model, reasons: Mapping[str, Reason], known: Container[str]
) -> bool:
    """Return whether the exporter wrote weights into Constant nodes: all, or at least half.

    - `reasons`: the reasons of `weight_reasons`.
    - `known`: weights, whose numbers are not read.
    """
    lifted = lifted_names(model)
    weights = [name for name, reason in reasons.items() if reason.is_weight]
    own = [name for name in weights if name not in lifted]
    if not own:
        return not set(quantized_weights(model)).difference(lifted)
    tensors = model.graph.initializers
    in_nodes = [
        name
        for name in weights
        if name in lifted
        if name in known or _is_weight_in_constant_node(tensors[name], LAYERS)
    ]
    return len(in_nodes) >= sum(_is_matrix_or_bias(tensors[name]) for name in own)


def _is_weight_in_constant_node(value: ir.Value, layers: Container[str]) -> bool:
    """Return whether a layer multiplies by a tensor, or adds it to a product with a weight.

    Exporters write zeros and ones into Constant nodes for the parameters and the initial states of
    layers that have none.

    - `value`: a lifted tensor, or the output of a Constant node.
    - `layers`: the operators of layers.
    """
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None:
        return False
    array = tensor.numpy().reshape(-1)
    is_neutral = (array == 0).all() or (array == 1).all()
    return not is_neutral and _is_matrix_or_bias(value, layers)


def weights_in_functions(model: ir.Model) -> list[str]:
    """Return the weights in Constant nodes that were inside the functions of a file.

    - `model`: a model that `normalize` returned. Its functions are inlined.
    """
    values = [n.outputs[0] for n in model.graph if n.op_type == "Constant" and n.outputs]
    return [
        value.name or ""
        for value in values
        if _is_float_value(value) and _is_weight_in_constant_node(value, LAYERS)
    ]


def lifted_names(model: ir.Model) -> set[str]:
    """Return the initializers that are tensors of Constant nodes in the file."""
    noted = {n for n, value in model.graph.initializers.items() if LIFTED in value.metadata_props}
    graphs = (model.graph, *model.graph.subgraphs())
    outputs = (
        node.outputs[0].name or "" for g in graphs for node in g if node.op_type == "Constant"
    )
    return noted | {name.removeprefix(PLACE) for name in outputs if name.startswith(PLACE)}


def has_module_names(model: ir.Model) -> bool:
    """Return whether the weights have the names of modules, without records of their kind.

    torch's older exporter writes such files.
    """
    lifted = lifted_names(model)
    tensors = {n: value for n, value in model.graph.initializers.items() if n not in lifted}
    if not any(MODULE_WEIGHT.fullmatch(name) for name in tensors):
        return False
    records = Records(model.graph)
    if any(r.kind is not None or r.origins for r in map(records.of, tensors.values())):
        return False
    floats = [name for name, value in tensors.items() if _is_float_value(value) and value.shape]
    return 2 * sum(bool(OLDER_EXPORTER.fullmatch(name)) for name in floats) >= len(floats)


def _reason(
    value: ir.Value, uses: set[tuple[str, int]], record: Record, unrecorded: bool, known: bool
) -> Reason:
    """Return why an initializer is a weight, or is not.

    - `uses`: the (operator, input) that read it.
    - `unrecorded`: the result of `has_module_names`.
    - `known`: whether it is a weight, whose numbers are not read.
    """
    if uses & STATISTICS:
        return STATISTIC
    if record.is_parameter is not None:
        return _recorded_reason(record)
    if uses & SETTINGS:
        return SETTING
    tensor = value.const_value
    if value.shape is not None and not value.shape and unrecorded:
        if SCALAR_PARAMETER.fullmatch(value.name or ""):
            return LOOKS_LIKE_A_WEIGHT
        return SCALAR if _is_of_module(value.name or "") else CONSTANT
    if not value.shape:
        return CONSTANT
    if known:
        return LOOKS_LIKE_A_WEIGHT
    if tensor is None:
        return CONSTANT
    if _is_mask(value, tensor.numpy()):
        return MASK
    return LOOKS_LIKE_A_WEIGHT if tensor.size != 1 or _is_in_layer(value) else CONSTANT


def _is_of_module(name: str) -> bool:
    """Return whether a name is that of a tensor of a module, such as "head.scale"."""
    parts = name.split(".")
    if NO_PARAMETER.fullmatch(name) or parts[-1].lower().startswith(("const", "_const", "eps")):
        return False
    return all(map(str.isidentifier, parts))


def _recorded_reason(record: Record) -> Reason:
    if record.kind is not None:
        return RECORDED if record.kind == PARAMETER else BUFFER
    source = next(iter(record.parameters or record.others), None)
    if source is None:
        return FOLDED_CONSTANT
    return Reason(bool(record.is_parameter), f"folded from {short_name(source)}")


def _is_mask(value: ir.Value, array: np.ndarray[Any, Any]) -> bool:
    """Return whether numbers hide values when they are added: -inf, -1e9, -3.4e38, ..."""
    if not array.size:
        return False
    minimum, maximum = float(array.min()), float(array.max())
    if not np.isfinite([minimum, maximum]).all():  # NaN, too
        return True
    if minimum > MASKED or _is_matrix_or_bias(value):
        return False
    return minimum in LEAST_NUMBERS or bool(((array == array.min()) | (array == array.max())).all())


def _is_matrix_or_bias(
    value: ir.Value, layers: Container[str] = frozenset(LAYERS - {"Gather"})
) -> bool:
    """Return whether a layer multiplies by a tensor, or adds it to a product with a weight.

    A mask is added to products of two computed values, and may be gathered.

    - `layers`: the operators of layers.
    """
    for source, node in _reading_nodes(value):
        if node.op_type in layers:
            return True
        products = [p for p in _producers_beside(node, source) if p.op_type in LAYERS]
        weights = [v for p in products for v in p.inputs if v is not None and _is_stored(v)]
        if node.op_type == "Add" and weights:
            return True
    return False


def _reading_nodes(value: ir.Value) -> Iterator[tuple[ir.Value, ir.Node]]:
    """Yield each node that reads a tensor, with the value that it reads.

    This value is the tensor itself, or the result of nodes that only rearrange it.
    """
    for node, index in value.uses():
        if node.op_type in REARRANGING and index == 0 and not node.domain:
            yield from _reading_nodes(node.outputs[0])
        else:
            yield value, node


def _is_stored(value: ir.Value) -> bool:
    """Return whether a value is an initializer, or a rearranged one."""
    node = value.producer()
    if node is None:
        return value.is_initializer()
    first = node.inputs[0] if node.op_type in REARRANGING and node.inputs else None
    return first is not None and _is_stored(first)


def _producers_beside(node: ir.Node, value: ir.Value) -> list[ir.Node]:
    """Return the nodes that compute the other inputs of a node that reads `value`."""
    producers = [v.producer() for v in node.inputs if v is not None and v is not value]
    return [producer for producer in producers if producer is not None]


def _is_in_layer(value: ir.Value) -> bool:
    """Return whether a tensor of one element belongs to a layer.

    Exporters also write factors, epsilons and exponents as tensors of one element.
    """
    for node, _ in value.uses():
        if node.op_type in LAYERS:
            return True
        producers = _producers_beside(node, value)
        if node.op_type == "Add" and any(p.op_type in LAYERS for p in producers):
            return True
    return False


def matching(patterns: Sequence[str] | str, known: Sequence[str]) -> list[str]:
    """Return the trained weights that names or patterns select, in their order.

    - `patterns`: names or fnmatch patterns, one or several.
    - `known`: the names of all trained weights.

    UnknownNameError: a pattern matches nothing.
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

    ModelError: the model has no float weights. UnknownNameError: a pattern matches nothing; the
    error lists the weights. SettingError: every weight is excluded, or a running statistic is
    selected.
    """
    initializers = model.graph.initializers
    floats = [
        name for name, v in initializers.items() if _is_float_value(v) and v.shape is not None
    ]
    integers = quantized_weights(model)
    if not floats:
        note = [describe_quantized(integers)] if integers else []
        raise ModelError(" ".join([_message_without_floats(model), *note]))
    weights = all_weights(model)
    if patterns is None:
        if not weights and integers:
            raise ModelError(f"The model has no float weights. {describe_quantized(integers)}")
        if not weights:
            raise ModelError(_message_of_constants(model, floats))
        return weights
    patterns = name_list("weights", patterns)
    exclusions = [p for p in patterns if p.startswith("!") and p not in floats]
    inclusions = [p for p in patterns if p not in exclusions]
    running = statistics(model)
    constants = lifted_names(model).difference(weights)
    matchable = [name for name in floats if name not in running and name not in constants]
    selected = set(weights) if exclusions and not inclusions else set()
    for pattern in inclusions:
        selected |= _matching_weights(pattern, floats, matchable, weights, running)
    for pattern in exclusions:
        selected -= _matching_weights(pattern[1:], floats, matchable, weights, running)
    if not selected:
        raise SettingError(
            f"weights={patterns!r} selects no weight. The model's weights are {', '.join(weights)}."
        )
    return [name for name in floats if name in selected]


def _matching_weights(
    pattern: str,
    floats: Sequence[str],
    matchable: Sequence[str],
    weights: Sequence[str],
    running: set[str],
) -> set[str]:
    """Return the float initializers that a name or pattern matches.

    - `floats`: the names of all float initializers.
    - `matchable`: those that patterns may match. Running statistics, and constants that are in
      Constant nodes of the file, are matched by no pattern.
    - `weights`: those that are weights by default.
    - `running`: the running statistics. SettingError: the pattern is the name of one.
    """
    if pattern in running:
        raise SettingError(
            f"{pattern!r} is a running statistic of a BatchNormalization, which has no gradient."
            " Use batch_norm='train' to update it."
        )
    if pattern in floats:
        return {pattern}
    matches = {name for name in matchable if fnmatchcase(name, pattern)}
    if not matches:
        raise UnknownNameError("weight", pattern, weights or floats)
    return matches


def _message_of_constants(model: ir.Model, floats: Sequence[str]) -> str:
    """Return an error about a model whose float tensors, with the names `floats`, are constants."""
    roles = {n: one.text for n, one in weight_reasons(model).items() if one.is_formula}
    if not roles:
        return (
            f"The model has no float weights: its float tensors ({listed_names(floats)}) are"
            " constants. To train them, pass their names as weights=."
        )
    return (
        f"The model has no weights to train: by their numbers, {described(roles)}. These tensors"
        f" are fixed by default. To train them, pass weights={list_text(list(roles))}."
    )


def _message_without_floats(model: ir.Model) -> str:
    message = (
        f"The model has no float weights: none of its {len(model.graph.initializers)} initializers"
        " is a float tensor."
    )
    constants = sum(
        node.op_type == "Constant" and _is_float_value(node.outputs[0]) for node in model.graph
    )
    if constants:
        message += (
            f" The {constants} float tensors in Constant nodes inside its functions cannot be"
            f" trained: inline the functions first, with {INLINING}."
        )
    in_bodies = sum(len(graph.initializers) for graph in model.graph.subgraphs())
    if in_bodies:
        message += (
            f" The {in_bodies} initializers inside the bodies of its If, Loop or Scan cannot be"
            " trained: move them to the main graph."
        )
    return message


def _is_float_value(value: ir.Value) -> bool:
    return value.dtype in FLOATS


def _uses(model: ir.Model) -> Iterator[tuple[str, set[tuple[str, int]]]]:
    """Yield the name of every initializer with the (operator, input) pairs that read it."""
    for name, value in model.graph.initializers.items():
        yield name, {(usage.node.op_type, usage.idx) for usage in value.uses()}
