"""Operators and how each is differentiated: the table of `onnxfit ops` and docs/operators.md."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import onnx

from onnxfit.errors import UnknownNameError
from onnxfit.gradients import rules  # noqa: F401  # fills the table of rules
from onnxfit.gradients.onnxruntime.coverage import CHECKS
from onnxfit.gradients.table import DECOMPOSITIONS, NOT_DIFFERENTIABLE, RULES, SUBGRAPHS, Key
from onnxfit.graph.inference import find_schema
from onnxfit.load.newer_operators import PREVIEW

# The oldest opset whose operators are listed; older models are converted as far as onnx can.
FIRST_OPSET = 13
NEWEST_OPSETS = {"": onnx.defs.onnx_opset_version(), PREVIEW: 1}

GRADIENTS = {
    "rule": "a rule of its own",
    "decomposed": "decomposed into operators with rules",
    "function": "through ONNX's definition in other operators",
    "not_differentiable": "no derivative: the output counts as a constant",
    "none": "none: it blocks the gradient",
}


@dataclass(frozen=True)
class Operator:
    """An operator and how it is differentiated.

    `gradient` is a key of GRADIENTS, `note` a reason or "". `builder` tells whether onnxruntime's
    gradient builder differentiates it correctly, at least in some configurations.
    """

    domain: str
    op_type: str
    gradient: str
    note: str
    builder: bool

    @property
    def name(self) -> str:
        """The operator's name, with its domain if that is not ONNX's own."""
        return f"{self.domain}::{self.op_type}" if self.domain else self.op_type

    @property
    def description(self) -> str:
        """Description of how the operator is differentiated."""
        return GRADIENTS[self.gradient]


def operators(names: Collection[str] = ()) -> list[Operator]:
    """Return the operators of the installed onnx, and those of other domains in the table.

    Deprecated operators are left out. The others are sorted by domain and name; `names` selects
    some of them. UnknownNameError: a name is unknown.
    """
    keys: set[Key] = {
        (schema.domain, schema.name)
        for schema in onnx.defs.get_all_schemas()
        if schema.domain in NEWEST_OPSETS and not schema.deprecated
    }
    keys.update(RULES, DECOMPOSITIONS, NOT_DIFFERENTIABLE)
    known = [operator(key) for key in sorted(keys)]
    for name in names:
        if all(name not in (o.name, o.op_type) for o in known):
            raise UnknownNameError("operator", name, {o.op_type for o in known})
    return [o for o in known if not names or o.name in names or o.op_type in names]


def operator(key: Key) -> Operator:
    """Return one operator and how it is differentiated."""
    domain, op_type = key
    by_builder = not domain and op_type in CHECKS
    return Operator(
        domain, op_type, _kind_of_gradient(key), NOT_DIFFERENTIABLE.get(key, ""), by_builder
    )


def _kind_of_gradient(key: Key) -> str:
    """Return how an operator is differentiated, as a key of GRADIENTS."""
    if key in RULES or key in SUBGRAPHS:
        return "rule"
    if key in DECOMPOSITIONS:
        return "decomposed"
    if key in NOT_DIFFERENTIABLE:
        return "not_differentiable"
    domain, op_type = key
    # onnx's type stubs lack the attributes about functions
    schema: Any = find_schema(domain, op_type, NEWEST_OPSETS.get(domain, 1))
    if schema is not None and (schema.has_function or schema.has_context_dependent_function):
        return "function"
    return "none"


def as_text(chosen: Sequence[Operator]) -> str:
    """Return the table for a terminal."""
    header = ("operator", "gradient by the table of rules", "by onnxruntime's builder")
    rows = []
    for entry in chosen:
        note = f": {entry.note}" if entry.note else ""
        rows.append((entry.name, entry.description + note, "yes" if entry.builder else ""))
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(3)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
        for row in (header, tuple("─" * width for width in widths), *rows)
    ]
    return "\n".join([*lines, "", _totals(chosen)])


def as_markdown() -> str:
    """Return the page docs/operators.md."""
    rows = []
    for entry in operators():
        note = f" ({entry.note})" if entry.note else ""
        by_builder = "yes" if entry.builder else ""
        rows.append(f"| {entry.name} | {entry.description}{note} | {by_builder} |")
    return f"""# Operators and their gradients

Written by `onnxfit ops --markdown`; a test checks that it is current.

`gradient="onnx"` differentiates a model by a table of rules in plain ONNX operators. This page
lists the operators of `ai.onnx` from opset {FIRST_OPSET} to {NEWEST_OPSETS[""]} and of
`{PREVIEW}`, and those of other domains that the table has. The last column says whether
`gradient="onnxruntime"` trusts the builder of onnxruntime-training 1.19.2 with the operator, in
some configuration at least.

A model's own functions are inlined, and the classical models of `ai.onnx.ml` that can be trained
are written in operators of `ai.onnx`. The optimizers and `Gradient` of `ai.onnx.preview.training`
are not listed: they are parts of a training step, not of a network. `onnxfit.gradients.register`
adds a rule.

{_totals(operators())}

| operator | gradient | builder |
|---|---|---|
""" + "".join(f"{row}\n" for row in rows)


def _totals(chosen: Sequence[Operator]) -> str:
    """Return a sentence that counts the operators by gradient."""
    counts = {key: sum(o.gradient == key for o in chosen) for key in GRADIENTS}
    texts = [f"{n} {GRADIENTS[key].split(':')[0]}" for key, n in counts.items() if n]
    return f"{len(chosen)} operators: {'; '.join(texts)}."
