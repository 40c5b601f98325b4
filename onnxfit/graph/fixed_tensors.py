"""Find tensors that look like weights, but whose numbers follow a formula and are not trained.

`RULES` has one function for each kind of these tensors. A rule looks at the place of a tensor and
at its numbers, and prefers to miss a tensor to taking a trained weight for a formula.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence

import onnx_ir as ir

from onnxfit.errors import listed_names
from onnxfit.graph.coordinates import coordinates
from onnxfit.graph.front_ends import front_end_filters
from onnxfit.graph.input_scaling import input_scaling

RULES = (front_end_filters, input_scaling, coordinates)


def fixed_tensors(
    model: ir.Model, candidates: Collection[str], known: Container[str] = ()
) -> dict[str, str]:
    """Return initializer -> its role, for tensors whose numbers follow a formula.

    - `model`: a model that `normalize` returned.
    - `candidates`: the initializers that look like weights.
    - `known`: other weights, whose numbers are not read.
    """
    roles: dict[str, str] = {}
    for rule in RULES:
        roles |= rule(model, candidates, known)
    return roles


def described(roles: Mapping[str, str]) -> str:
    """Return how a message says which initializers have which role.

    >>> described({"real": "STFT filter bank at 'x'", "imag": "STFT filter bank at 'x'"})
    "'real', 'imag' are the STFT filter bank at 'x'"
    """
    parts = []
    for role in dict.fromkeys(roles.values()):
        names = [name for name, one in roles.items() if one == role]
        verb = "is" if len(names) == 1 else "are"
        parts.append(f"{listed_names(map(repr, names))} {verb} the {role}")
    return "; ".join(parts)


def list_text(names: Sequence[str], first: str = "") -> str:
    """Return a list for `weights=` in a message, which shows at most three names.

    - `first`: text before the names.
    """
    shown = [*([first] if first else []), *map(repr, names[:3]), *["..."] * (len(names) > 3)]
    return f"[{', '.join(shown)}]"
