"""Groups of weights with settings of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from onnxfit.checks import (
    check_number,
    is_finite,
    is_number,
    matching_names,
    name_list,
    set_field,
    shortened,
)
from onnxfit.errors import SettingError, listed_names
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.optimizers.base import (
    BIAS_AND_NORM,
    Optimizer,
    Scheduled,
    Selector,
    WeightInfo,
    WeightOptimizer,
    selectors,
    selects,
)
from onnxfit.optimizers.constraints import Constraints
from onnxfit.optimizers.lookup import OptimizerLike, get_optimizer
from onnxfit.schedules import Constant, LearningRate

__all__ = ["Groups"]

OF_GROUP = ("weights", "optimizer", "learning_rate_multiplier")  # the other keys are settings


@dataclass(frozen=True)
class Groups(Optimizer):
    r"""Groups of weights, each with its own optimizer or settings (parameter groups of
    `torch.optim`, `optax.multi_transform`, timm's `layer_decay`).

    With `layer_decay` $d$, the learning rate of a weight is multiplied by $d^n$, where $n$ is the
    number of layers after the weight's own (Clark et al. 2020; Bao et al. 2022).

    - `groups`: a list of dicts, or a dict from pattern to an Optimizer or a dict of settings. Each
      dict of a list has
        - `weights`: names or fnmatch patterns, one or several, as in `Trainer(weights=...)`, where
          "!pattern" excludes; or a function of a weight, such as `lambda w: w.ndim <= 1`, which is
          called with its `name`, `shape`, `ndim`, `size` and `dtype`; or "bias_and_norm", the
          weights with at most one axis and those whose name ends with ".bias".
        - `optimizer`: the optimizer of the group; otherwise `default`.
        - settings that replace those of the optimizer, such as `learning_rate`, `weight_decay` or
          `betas`.
        - `learning_rate_multiplier`: a factor of the group's learning rate.
    - `default`: the optimizer of the weights in no group. With None, every weight must be in one.
    - `layer_decay` $d$ in (0, 1], or None.
    - `layers`: patterns of the layers for `layer_decay`, from the input to the output; an entry may
      be a list of patterns. By default, operators with a matrix, filters or an embedding table are
      counted along the longest path of the graph, and biases and norms belong to the layer before
      them. Give `layers` to count each block of a transformer as one layer.

    The first group that matches a weight counts. `trainer.learning_rate` is the rate of `default`,
    or of the first group without `default`. If it is a number, setting it scales all rates that are
    numbers by the same factor. A rate that is a Schedule or a function is followed by its group
    alone, and if the rate of `default` is one, so is a number. `trainer.optimizer.learning_rates`
    has the rates of all weights.

    A function cannot be saved: `Trainer.load` then needs `optimizer=...` again. SettingError: a
    group has no weights, or a weight is in no group. UnknownNameError: a pattern matches no trained
    weight.

    >>> from onnxfit.optimizers import SGD, AdamW
    >>> optimizer = Groups(
    ...     [
    ...         {"weights": "backbone.*", "learning_rate": 1e-5, "betas": (0.9, 0.98)},
    ...         {"weights": lambda w: w.ndim <= 1, "weight_decay": 0.0},
    ...         {"weights": "head.*", "optimizer": SGD(0.01, momentum=0.9)},
    ...     ],
    ...     default=AdamW(1e-4, weight_decay=0.05),
    ... )
    >>> optimizer.learning_rate
    0.0001
    """

    named: ClassVar[bool] = False

    groups: Any = ()
    default: OptimizerLike | None = None
    layer_decay: float | None = field(default=None, kw_only=True)
    layers: Sequence[str | Sequence[str]] = field(default=(), kw_only=True)
    learning_rate: LearningRate = field(init=False, repr=False, compare=False, default=0.0)
    weight_decay: Scheduled = field(init=False, repr=False, compare=False, default=0.0)
    exclude_from_weight_decay: Sequence[Selector] | Selector = field(
        init=False, repr=False, compare=False, default=()
    )
    learning_rate_multipliers: Mapping[str, float] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    ema_momentum: float | None = field(init=False, repr=False, compare=False, default=None)
    cautious: bool = field(init=False, repr=False, compare=False, default=False)
    constraints: Constraints = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if self.default is not None:
            set_field(self, "default", get_optimizer(self.default))
        if isinstance(self.default, Groups):
            raise SettingError("Groups needs default to be an optimizer without groups.")
        set_field(self, "groups", _checked_groups(self.groups, self.default))
        if self.layer_decay is not None:
            check_number(self, "layer_decay", above=0, at_most=1)
        elif self.layers:
            raise SettingError("Groups needs layer_decay for its layers.")
        layers = [self.layers] if isinstance(self.layers, str) else self.layers
        named = tuple(tuple(name_list("A layer of Groups", layer)) for layer in layers)
        set_field(self, "layers", named)
        first = self.members[0]
        averages = [member.ema_momentum for member in self.members]
        set_field(self, "learning_rate", first.learning_rate)
        set_field(self, "ema_momentum", None if None in averages else averages[0])

    def __hash__(self) -> int:
        return hash((type(self), self.default, len(self.groups), self.layer_decay, self.layers))

    @property
    def members(self) -> tuple[Optimizer, ...]:
        own = [_group_optimizer(group, self.default) for group in self.groups]
        return (*(get_optimizer(d) for d in [self.default] if d is not None), *own)

    @property
    def needs_layers(self) -> bool:
        return self.layer_decay is not None and not self.layers

    def with_learning_rate(self, learning_rate: LearningRate) -> Optimizer:
        if self.default is not None:
            default = get_optimizer(self.default)
            return replace(self, default=default.with_learning_rate(learning_rate))
        first, *others = self.groups
        return replace(self, groups=[{**first, "learning_rate": learning_rate}, *others])

    def for_weights(self, weights: Sequence[WeightInfo]) -> dict[str, WeightOptimizer]:
        result: dict[str, WeightOptimizer] = {}
        for i, group in enumerate(self.groups):
            selected = _selected_names(f"Group {i + 1} of Groups", group["weights"], weights)
            members = [w for w in weights if w.name in selected and w.name not in result]
            if not members:
                shown = listed_names(group["weights"])
                raise SettingError(
                    f"Group {i + 1} of Groups has no weight: {shown} selects none that is in no"
                    " earlier group. Move the group forward, or remove it."
                )
            own = _group_optimizer(group, self.default).for_weights(members)
            factor = float(group.get("learning_rate_multiplier", 1.0))
            result |= {name: self._with_rate(one, factor) for name, one in own.items()}
        rest = [w for w in weights if w.name not in result]
        if rest and self.default is None:
            raise SettingError(
                f"{listed_names([w.name for w in rest])} {'is' if len(rest) == 1 else 'are'} in no"
                " group of Groups. Pass default=..., add a group, or leave the weights out of"
                " weights=."
            )
        if self.default is not None:
            result |= get_optimizer(self.default).for_weights(rest)
        decayed = self._with_layer_decay(weights, result)
        shared: list[WeightOptimizer] = []
        for name in decayed:  # equal ones become the same object
            if decayed[name] not in shared:
                shared.append(decayed[name])
            decayed[name] = shared[shared.index(decayed[name])]
        return {w.name: decayed[w.name] for w in weights}

    def _with_rate(self, one: WeightOptimizer, factor: float) -> WeightOptimizer:
        """Return the update of a group's weight with the rate of the group."""
        rate, base = one.optimizer.learning_rate, self.learning_rate
        factor *= one.multiplier
        if rate == base:
            return replace(one, multiplier=factor)
        if callable(rate) or callable(base) or not base:
            schedule = rate if callable(rate) else Constant(rate)
            return replace(one, multiplier=factor, schedule=schedule)
        return replace(one, multiplier=factor * (rate / base))

    def _with_layer_decay(
        self, weights: Sequence[WeightInfo], result: Mapping[str, WeightOptimizer]
    ) -> dict[str, WeightOptimizer]:
        """Return the updates with their rates multiplied by the decay of their layers."""
        if self.layer_decay is None:
            return dict(result)
        after = {w.name: w.layers_after for w in weights}
        if self.layers:
            after = {}
            for i, layer in enumerate(self.layers):
                for name in _selected_names("layers of Groups", tuple(layer), weights):
                    after.setdefault(name, len(self.layers) - 1 - i)
        missing = [w.name for w in weights if w.name not in after]
        if missing:
            raise SettingError(
                f"{listed_names(missing)} {'is' if len(missing) == 1 else 'are'} in no layer of"
                " Groups(layers=...). Add a pattern for each of them."
            )
        return {
            name: replace(one, multiplier=one.multiplier * self.layer_decay ** after[name])
            for name, one in result.items()
        }

    def update(
        self, op: GraphBuilder, w: Value, g: Value, lr: Value, step: Value, *slots: Any, **_: Any
    ) -> Value | tuple[Value, ...]:
        raise SettingError("Groups updates no weight itself: for_weights returns who does.")


def _checked_groups(groups: Any, default: Any) -> tuple[dict[str, Any], ...]:
    """Return groups as dicts with "weights", "optimizer" if it is given, and settings.

    SettingError: a group has a setting that its optimizer does not have, or no weights, or no
    optimizer.
    """
    if isinstance(groups, Mapping):
        for pattern, entry in groups.items():
            if is_number(entry):  # elsewhere a number stands for SGD
                raise SettingError(
                    "Groups needs an optimizer or a dict of settings for each pattern, got"
                    f" {entry!r} for {pattern!r}. For a learning rate, pass"
                    f" {{'learning_rate': {entry!r}}}; for SGD, pass SGD({entry!r})."
                )
        groups = [
            {
                "weights": pattern,
                **dict(entry if isinstance(entry, Mapping) else {"optimizer": entry}),
            }
            for pattern, entry in groups.items()
        ]
    if not isinstance(groups, (list, tuple)) or not all(isinstance(g, Mapping) for g in groups):
        raise SettingError(
            "Groups needs a list of dicts, such as [{'weights': 'head.*', 'learning_rate': 0.01}],"
            f" or a dict from pattern to optimizer, got {shortened(groups)}."
        )
    if not groups and default is None:
        raise SettingError("Groups needs at least one group, or a default.")
    checked = []
    for group in groups:
        if "weights" not in group:
            raise SettingError(
                "A group of Groups needs 'weights' (torch: 'params'), the names or patterns of its"
                f" weights, got {shortened(group)}."
            )
        entry = {**group, "weights": selectors("The weights of a group", group["weights"])}
        if not entry["weights"]:
            raise SettingError("A group of Groups has an empty list of weights.")
        if "optimizer" in entry:
            entry["optimizer"] = get_optimizer(entry["optimizer"])
        factor = entry.get("learning_rate_multiplier", 1.0)
        if not (is_number(factor) and is_finite(factor) and factor >= 0):
            raise SettingError(
                "A group of Groups needs learning_rate_multiplier to be a number >= 0, got"
                f" {shortened(factor)}."
            )
        own = _group_optimizer(entry, default)  # which has lists as tuples
        settings = {n: getattr(own, n, entry[n]) for n in entry if n not in OF_GROUP}
        checked.append({**entry, **settings})
    return tuple(checked)


def _group_optimizer(group: Mapping[str, Any], default: Any) -> Optimizer:
    """Return the optimizer of a group, with the group's settings.

    SettingError: the group has no optimizer, or a setting that its optimizer does not have.
    """
    optimizer: Any = group.get("optimizer", default)
    if optimizer is None:
        raise SettingError(
            f"The group of {listed_names(group['weights'])} needs an 'optimizer', because Groups"
            " has no default."
        )
    if isinstance(optimizer, Groups):
        raise SettingError("A group of Groups needs an optimizer without groups.")
    settings = {name: value for name, value in group.items() if name not in OF_GROUP}
    own: Optimizer = optimizer.with_settings(**settings) if settings else optimizer
    return own


def _selected_names(
    setting: str, selectors: Sequence[Selector], weights: Sequence[WeightInfo]
) -> set[str]:
    """Return the names of the weights that selectors select; "!pattern" excludes.

    UnknownNameError: a pattern matches no weight. SettingError: a function or "bias_and_norm"
    selects no weight.
    """
    known = [w.name for w in weights]
    chosen: set[str] = set()
    excluded: set[str] = set()
    for selector in selectors:
        if isinstance(selector, str) and selector != BIAS_AND_NORM:
            if selector.startswith("!") and selector not in known:
                excluded |= matching_names(selector[1:], known, "trained weight")
            else:
                chosen |= matching_names(selector, known, "trained weight")
            continue
        found = {w.name for w in weights if selects(selector, w)}
        if not found:
            what = selector if isinstance(selector, str) else selector.__name__
            raise SettingError(
                f"{setting}: {what} selects none of the trained weights {listed_names(known)}."
            )
        chosen |= found
    is_exclusion = [isinstance(s, str) and s.startswith("!") and s not in known for s in selectors]
    return (set(known) if all(is_exclusion) else chosen) - excluded
