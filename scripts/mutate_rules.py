"""Plant a 1 % error into every entry of every gradient rule in turn: some case must fail each time.

    python scripts/mutate_rules.py [operator ...]

Exit code 1 if an error goes unnoticed. What is multiplied is the value that a rule returns for one
input; a rewriting is tested through its first output.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import sys
from collections.abc import Callable
from typing import Any

import onnxruntime
import pytest

from onnxfit.gradients import rules  # noqa: F401
from onnxfit.gradients.table import DECOMPOSITIONS, RULES, SUBGRAPHS
from tests.gradients.rules.cases import Case, built, families, judged, same

ERROR = 1.01
# where a rule has no judge in float64, its own tests are stronger than its cases, if it has any
TESTS = {
    "tests/gradients/rules/test_quantization.py": (
        "QuantizeLinear DequantizeLinear DynamicQuantizeLinear MatMulInteger ConvInteger"
    ),
    "tests/gradients/rules/test_recurrent.py": "RNN GRU LSTM",
    "tests/gradients/rules/test_spatial.py": "DeformConv",
    "tests/gradients/rules/test_convolution.py": "Conv ConvTranspose AveragePool LpPool",
    "tests/gradients/rules/test_microsoft.py": "Inverse",
}


class Mutant:
    """A rule with one of its entries 1 % too large;

    `reached` once that entry was asked for, and was a value.
    """

    def __init__(self, function: Callable[..., Any], entry: int) -> None:
        self.function, self.entry, self.reached = function, entry, False

    def __call__(self, op: Any, *args: Any, **attributes: Any) -> Any:
        entries = self.function(op, *args, **attributes)
        alone = not isinstance(entries, tuple)
        changed = [entries] if alone else list(entries)
        if self.entry < len(changed) and changed[self.entry] is not None:
            right = changed[self.entry]
            changed[self.entry] = (
                (lambda: self.wrong(right())) if callable(right) else self.wrong(right)
            )
        return changed[0] if alone else tuple(changed)

    def wrong(self, value: Any) -> Any:
        self.reached = True
        return value * ERROR


def notices(case: Case) -> bool:
    """Whether a case fails."""
    judged.cache_clear()
    try:
        feeds, arriving, expected = judged(case)
        graph = built(case.model(), case.outputs, case.wrt, arriving)
        same(graph.run({**feeds, **arriving}), expected, list(expected), 1e-3, "static sizes")
    except Exception:
        return True
    return False


def tests_notice(op_type: str) -> bool:
    """Whether one of the operator's own tests fails, run in this process, where the table is wrong."""
    files = [file for file, operators in TESTS.items() if op_type in operators.split()]
    with contextlib.redirect_stdout(io.StringIO()):
        return any(pytest.main(["-x", "-q", "-p", "no:cacheprovider", file]) == 1 for file in files)


def main(chosen: list[str]) -> int:
    onnxruntime.set_default_logger_severity(4)
    cases = [case for family in families().values() for case in family]
    missed, caught, idle = [], 0, []
    for table in (RULES, DECOMPOSITIONS):
        for key in sorted(table):
            op_type = key[1]
            if chosen and op_type not in chosen:
                continue
            line = table[key]
            own = [
                c
                for c in cases
                if f"{op_type}(" in c.body.replace(" ", "")
                or f"{op_type}<" in c.body.replace(" ", "")
            ]
            count = (
                1
                if table is DECOMPOSITIONS
                else len(line.signature.inputs) + 2 * line.signature.variadic_inputs
            )
            for entry in range(count):
                mutant = Mutant(line.function, entry)
                table[key] = dataclasses.replace(line)
                object.__setattr__(table[key], "function", mutant)
                seen = any(notices(case) for case in own) or tests_notice(op_type)
                table[key] = line
                if not mutant.reached:
                    idle.append(f"{op_type}[{entry}]")  # no gradient there, or always refused
                    continue
                caught += seen
                if not seen:
                    missed.append(f"{op_type}[{entry}]")
                    print(f"unnoticed: {missed[-1]}", flush=True)
    print(
        f"{caught} of {caught + len(missed)} planted errors noticed; {len(SUBGRAPHS)} operators"
        " with bodies have cases of their own."
    )
    print(f"nothing to plant in: {' '.join(idle)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
