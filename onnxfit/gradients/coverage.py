"""Which operators have a gradient, and how: the table of `onnxfit ops` and docs/operators.md."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import onnx

from onnxfit.errors import UnknownNameError
from onnxfit.gradients import rules  # noqa: F401  # fills the table of rules
from onnxfit.gradients.onnxruntime import builder  # noqa: F401  # fills the table of forms
from onnxfit.gradients.onnxruntime.coverage import TABLE
from onnxfit.gradients.onnxruntime.forms import FORMS
from onnxfit.gradients.table import DECOMPOSITIONS, NOT_DIFFERENTIABLE, RULES, SUBGRAPHS, Key
from onnxfit.graph.opset import OPSET

# the oldest opset whose operators are counted; older models are converted as far as onnx can
FIRST = 13

WAYS = {
    "rule": "a rule of its own",
    "rewritten": "written in simpler operators, which have rules",
    "function": "through the operators by which ONNX defines it",
    "flat": "no derivative: its output counts as a constant",
    "none": "none: it blocks the gradient",
}


@dataclass(frozen=True)
class Operator:
    """How the gradient passes an operator.

    `builder`: whether onnxruntime's builder is trusted with it, in some configuration at least.
    """

    domain: str
    op_type: str
    way: str
    note: str
    builder: bool

    @property
    def name(self) -> str:
        return f"{self.domain}::{self.op_type}" if self.domain else self.op_type


def operators(names: Collection[str] = ()) -> list[Operator]:
    """Every operator of ONNX's default domain from opset 13 to 21, and all others that the table
    knows, sorted by name; or those named.

    Raises UnknownNameError for a name that is no operator.
    """
    history = [
        s
        for s in onnx.defs.get_all_schemas_with_history()
        if s.domain == "" and s.since_version <= OPSET
    ]
    alive = {
        s.name
        for s in history
        if onnx.defs.has(s.name, OPSET, "")
        and not onnx.defs.get_schema(s.name, OPSET, "").deprecated
    }
    keys: set[Key] = (
        {("", name) for name in alive} | set(RULES) | set(DECOMPOSITIONS) | set(NOT_DIFFERENTIABLE)
    )
    known = [operator(key) for key in sorted(keys)]
    for name in names:
        if all(name not in (o.name, o.op_type) for o in known):
            raise UnknownNameError("operator", name, {o.op_type for o in known})
    return [o for o in known if not names or o.name in names or o.op_type in names]


def operator(key: Key) -> Operator:
    """How the gradient passes one operator."""
    domain, op_type = key
    way, note = _way(key)
    return Operator(
        domain, op_type, way, note, not domain and (op_type in TABLE or op_type in FORMS)
    )


def _way(key: Key) -> tuple[str, str]:
    if key in RULES or key in SUBGRAPHS:
        return "rule", ""
    if key in DECOMPOSITIONS:
        return "rewritten", ""
    if key in NOT_DIFFERENTIABLE:
        return "flat", NOT_DIFFERENTIABLE[key]
    domain, op_type = key
    if onnx.defs.has(op_type, OPSET, domain):
        # the stubs of onnx lack half of it
        schema: Any = onnx.defs.get_schema(op_type, OPSET, domain)
        if schema.has_function or schema.has_context_dependent_function:
            return "function", ""
    return "none", ""


def as_text(chosen: Sequence[Operator]) -> str:
    """The table for a terminal."""
    rows = [
        (o.name, WAYS[o.way] + (f": {o.note}" if o.note else ""), "yes" if o.builder else "")
        for o in chosen
    ]
    heads = ("operator", "gradient by the table of rules", "by onnxruntime's builder")
    widths = [max(len(row[i]) for row in (*rows, heads)) for i in range(3)]
    lines = [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip()
        for row in (heads, tuple("─" * w for w in widths), *rows)
    ]
    return "\n".join([*lines, "", _totals(chosen)])


def as_markdown() -> str:
    """docs/operators.md."""
    head = f"""# Operators and their gradients

Written by `onnxfit ops --markdown`; a test checks that it is current.

`gradient="onnx"` differentiates a model by a table of rules in plain ONNX operators. This is what it knows of the operators of `ai.onnx`
from opset {FIRST} to {OPSET}, and of other domains. The last column says whether `gradient="onnxruntime"` trusts the builder of
onnxruntime-training 1.19.2 with the operator, in some configuration at least. A model's own functions are inlined.
`onnxfit.gradients.register` adds a rule.

{_totals(operators())}

| operator | gradient | builder |
|---|---|---|
"""
    rows = [
        f"| {o.name} | {WAYS[o.way]}{f' ({o.note})' if o.note else ''} |"
        f" {'yes' if o.builder else ''} |"
        for o in operators()
    ]
    return head + "\n".join(rows) + "\n"


def _totals(found: Sequence[Operator]) -> str:
    counts = {way: sum(o.way == way for o in found) for way in WAYS}
    return (
        f"{len(found)} operators: "
        + "; ".join(f"{n} {WAYS[way].split(':')[0]}" for way, n in counts.items() if n)
        + "."
    )
