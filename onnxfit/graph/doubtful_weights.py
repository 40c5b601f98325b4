"""Warn of weights whose training may differ from the training of the network's parameters."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from typing import Any

import onnx
import onnx_ir as ir

from onnxfit.errors import listed_names, warn_user
from onnxfit.graph.fixed_tensors import described, list_text
from onnxfit.graph.quantized import warn_of_quantized
from onnxfit.graph.records import Records
from onnxfit.graph.sharing import (
    Array,
    uses_of,
    warn_of_merged_weights,
    warn_of_untied_tables,
)
from onnxfit.graph.weights import (
    INLINING,
    LAYERS,
    SCALAR,
    has_module_names,
    keeps_weights_in_constant_nodes,
    lifted_names,
    weight_reasons,
    weights_in_functions,
)

# Parts of names that parameters have, but hardly any buffer.
PARAMETER_WORDS = ("weight", "bias", "gamma", "beta", "alpha", "token")
FOLDED_NAME = "onnx::"  # of tensors that torch's older exporter computed
COMBINING = {"Add", "Sub", "Mul", "Concat"}


def warn_of_weights(
    file: onnx.ModelProto,
    model: ir.Model,
    weights: Mapping[str, Array],
    settings: Mapping[str, Any],
) -> None:
    """Warn of weights that the exporter merged or computed, of possible buffers and scalars, and of
    integers and fixed filters that are not trained.

    - `file`: the file that is trained.
    - `model`: the normalized model of a training step.
    - `weights`: the trained weights.
    - `settings`: the arguments of `Trainer`. A weight that `weights` names is trained on purpose.
    """
    # A user who chooses weights knows which weights are trained.
    if all(settings[name] is None for name in ("weights", "quantization", "adapters")):
        warn_of_quantized(model)
    warn_of_merged_weights(file, weights)
    warn_of_untied_tables(file, weights)
    if file.functions and settings["weights"] is None:
        _warn_of_functions(model)
    if settings["weights"] is None and settings["adapters"] is None:
        _warn_of_formulas(model, weights)
    patterns = settings["weights"] or ()
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    chosen = {
        name: model.graph.initializers[name]
        for name in weights
        if name not in patterns and name in model.graph.initializers
    }
    _warn_of_computed(Records(model.graph), chosen)
    if has_module_names(model):
        reasons = weight_reasons(model, weights)
        mixed = not keeps_weights_in_constant_nodes(model, reasons, weights)
        _warn_of_possible_buffers(chosen, lifted_names(model) if mixed else ())
        if not patterns:
            _warn_of_scalars(model, weights)


def _warn_of_computed(records: Records, weights: Mapping[str, ir.Value]) -> None:
    """Warn once of weights that are functions of parameters, or have copies of their numbers."""
    changed = {name: records.changed(value) for name, value in weights.items()}
    computed = {name: parameters for name, parameters in changed.items() if parameters}
    if not computed:
        return
    parameters = dict.fromkeys(name for names in computed.values() for name in names)
    warn_user(
        f"The exporter computed {_quoted(computed)} from the parameters {_quoted(parameters)}."
        " Training changes the results instead of the parameters, which is another model. Export"
        " with torch.onnx.export(..., optimize=False), or freeze the results:"
        f" weights={_exclusions(computed)}."
    )


def _warn_of_functions(model: ir.Model) -> None:
    """Warn once of weights inside the functions of a file, which are not trained."""
    names = weights_in_functions(model)
    if names:
        warn_user(
            f"{_quoted(names)} {'is' if len(names) == 1 else 'are'} not trained: Constant nodes"
            " inside functions of the file hold these tensors. To train them, inline the functions"
            f" first: Trainer({INLINING}, ...)."
        )


def _warn_of_formulas(model: ir.Model, weights: Collection[str]) -> None:
    """Warn once of tensors that are not trained because their numbers follow a formula."""
    reasons = weight_reasons(model, weights)
    roles = {name: reason.text for name, reason in reasons.items() if reason.is_formula}
    if roles:
        added = list_text(list(roles), "*onnxfit.inspect(model).weights")
        warn_user(
            f"By their numbers, {described(roles)}. These tensors are not trained. To train them,"
            f" pass weights={added}."
        )


def _warn_of_possible_buffers(weights: Mapping[str, ir.Value], lifted: Container[str]) -> None:
    """Warn once of weights that may be buffers, in a file without records.

    - `lifted`: tensors of Constant nodes. torch writes parameters as initializers.
    """
    possible = [
        name
        for name, value in weights.items()
        if (name in lifted and not _is_named_like_parameter(name)) or _may_be_buffer(value)
    ]
    if possible:
        warn_user(
            f"The file does not record whether {_quoted(possible)} are parameters or buffers, and"
            f" they are trained. Freeze buffers with weights={_exclusions(possible)}, or ignore"
            " this warning if all are parameters."
        )


def _may_be_buffer(value: ir.Value) -> bool:
    """Return whether a tensor is only combined with computed values, and not named like a weight.

    Grids of anchors, tables of positions and codebooks are such tensors.
    """
    name = value.name or ""
    nodes = [use.node for use in uses_of(value)]
    if not value.shape or not nodes or _is_named_like_parameter(name):
        return False
    if name.startswith(FOLDED_NAME):
        return not any(node.op_type in LAYERS for node in nodes)
    return all(node.op_type in COMBINING and any(map(_is_computed, node.inputs)) for node in nodes)


def _is_named_like_parameter(name: str) -> bool:
    return any(word in name.lower() for word in PARAMETER_WORDS)


def _is_computed(value: ir.Value | None) -> bool:
    if value is None or value.is_initializer():
        return False
    node = value.producer()
    return node is None or node.op_type != "Constant"


def _warn_of_scalars(model: ir.Model, weights: Collection[str]) -> None:
    """Warn once of tensors of rank 0 with names of tensors of modules, which are not trained."""
    scalars = [
        name
        for name, reason in weight_reasons(model, weights).items()
        if reason is SCALAR and name not in weights
    ]
    if scalars:
        added = list_text(scalars, "*onnxfit.inspect(model).weights")
        warn_user(
            f"{_quoted(scalars)} {'is' if len(scalars) == 1 else 'are'} not trained: a single"
            " number looks like a constant. If the network has such parameters, train them with"
            f" weights={added}."
        )


def _quoted(names: Collection[str]) -> str:
    return listed_names(map(repr, names))


def _exclusions(names: Collection[str]) -> str:
    """Return a list of `weights=` that excludes names, of which at most three are shown."""
    return list_text([f"!{name}" for name in names])
