"""Match the weights of a model with the targets of its adapters."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import onnx

from onnxfit.errors import ModelError, SettingError, UnknownNameError, listed_names
from onnxfit.graph.fixed_tensors import fixed_tensors
from onnxfit.graph.model import to_ir
from onnxfit.trainable.adapters.adapter import Adapter
from onnxfit.trainable.adapters.layers import AdaptableWeight, adaptable_weights, output_layers
from onnxfit.trainable.adapters.lora import LoRA


def match_adapters(model: onnx.ModelProto, settings: Sequence[LoRA]) -> list[Adapter]:
    """Return an adapter for each weight that a target matches, in the model's order.

    - `model`: a model without functions.
    - `settings`: the adapters' settings. Each weight may match one of them.

    ModelError: no weight of the model can have an adapter. UnknownNameError: a pattern matches
    nothing. SettingError: two targets match one weight, or a rank is above the weight's smaller
    side.
    """
    weights = adaptable_weights(model)
    if not weights:
        raise ModelError(
            "The model has no weight that can have an adapter. Expected a float initializer, or"
            " integers behind DequantizeLinear, read only by MatMul, Gemm, Conv (with group=1) or"
            " Gather; or the packed numbers of a MatMulNBits, MatMulBnb4 or GatherBlockQuantized."
            " Train its weights with Trainer(..., weights=...) instead."
        )
    chosen: dict[str, LoRA] = {}
    for one in settings:
        for weight in _matching(model, weights, one):
            if weight.name in chosen:
                raise SettingError(
                    f"Two adapters match the weight {weight.name!r}: {chosen[weight.name]} and"
                    f" {one}. Exclude the weight from one of them with target=[...,"
                    f" '!{weight.name}']."
                )
            _require_rank(weight, one)
            chosen[weight.name] = one
    return [Adapter(weight, chosen[weight.name]) for weight in weights if weight.name in chosen]


def _matching(
    model: onnx.ModelProto, weights: list[AdaptableWeight], settings: LoRA
) -> list[AdaptableWeight]:
    patterns = list(settings.target or ())
    exclusions = [p for p in patterns if p.startswith("!")]
    inclusions = [p for p in patterns if p not in exclusions]
    selected = set() if inclusions else _linear_layers(model, weights)
    for pattern in inclusions:
        selected |= _names_of(pattern, weights)
    for pattern in exclusions:
        selected -= _names_of(pattern[1:], weights)
    if not selected:
        raise SettingError(
            f"target={settings.target!r} excludes every weight. The weights that can have an"
            f" adapter are {listed_names(weight.name for weight in weights)}."
        )
    return [weight for weight in weights if weight.name in selected]


def _linear_layers(model: onnx.ModelProto, weights: list[AdaptableWeight]) -> set[str]:
    """Return the weights of all linear layers but the last ones; of all if there are no others.

    Fixed filters, such as the bands of a mel scale, belong to no layer.
    """
    linear = {weight.name for weight in weights if weight.kind == "linear"}
    work = to_ir(model)
    linear.difference_update(fixed_tensors(work, linear.intersection(work.graph.initializers)))
    return linear - output_layers(model, weights) or linear


def _names_of(pattern: str, weights: Sequence[AdaptableWeight]) -> set[str]:
    """Return the initializers that a name or a pattern matches.

    An exact name of a weight or its module is not used as a pattern. Otherwise each name of a
    weight may match.
    """
    exact = {weight.name for weight in weights if pattern in (weight.name, weight.module)}
    matches = exact or {
        weight.name
        for weight in weights
        if any(name == pattern or fnmatchcase(name, pattern) for name in weight.names)
    }
    if not matches:
        known = {name for weight in weights for name in (weight.name, weight.module)}
        raise UnknownNameError("weight that can have an adapter", pattern, known)
    return matches


def _require_rank(weight: AdaptableWeight, settings: LoRA) -> None:
    # Loaded matrices may have a larger rank: PiSSA's have twice their training rank.
    if settings.matrices is None and settings.rank > min(weight.sides):
        raise SettingError(
            f"LoRA rank must be at most {min(weight.sides)}, the smaller side of weight"
            f" {weight.name!r}, got {settings.rank}. Use a smaller rank, or exclude the weight"
            f" with target=[..., '!{weight.name}']."
        )
