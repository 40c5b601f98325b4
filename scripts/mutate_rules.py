"""Plant an error of 1 % into every gradient of every rule in turn: a test must fail each time.

    python scripts/mutate_rules.py [operator ...]

The value that a rule returns for one input is multiplied; of a decomposition, the first output is.
Exit code 1 if an error goes unnoticed, or a test fails that the error cannot reach; 2 if an
operator has neither a rule nor a decomposition.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import sys
from collections.abc import Callable
from typing import Any

import onnxruntime
import pytest

from onnxfit.gradients import rules  # noqa: F401
from onnxfit.gradients.table import DECOMPOSITIONS, RULES, SUBGRAPHS, Decomposition, Key, Rule
from tests.gradients.rules.cases import Case, built, built_in_double, families, judged, same

ERROR = 1.01
# For operators without a judge in float64, these tests are stronger than the cases.
TESTS = {
    "tests/gradients/rules/test_quantization.py": (
        "QuantizeLinear DequantizeLinear DynamicQuantizeLinear MatMulInteger ConvInteger"
    ),
    "tests/gradients/rules/test_recurrent.py": "RNN GRU LSTM",
    "tests/gradients/rules/test_spatial.py": "DeformConv",
    "tests/gradients/rules/test_convolution.py": "Conv ConvTranspose AveragePool LpPool",
    "tests/gradients/rules/test_microsoft.py": "Inverse",
    "tests/gradients/rules/test_packed_weights.py": ("MatMulNBits MatMulBnb4 GatherBlockQuantized"),
}


class Mutant:
    """A rule that returns one of its gradients 1 % too large.

    `reached` tells whether that gradient was needed, and was a value.
    """

    def __init__(self, function: Callable[..., Any], entry: int) -> None:
        self.function = function
        self.entry = entry
        self.reached = False

    def __call__(self, op: Any, *args: Any, **attributes: Any) -> Any:
        result = self.function(op, *args, **attributes)
        entries = list(result) if isinstance(result, tuple) else [result]
        if self.entry < len(entries) and entries[self.entry] is not None:
            correct = entries[self.entry]
            if callable(correct):
                entries[self.entry] = lambda: self.wrong(correct())
            else:
                entries[self.entry] = self.wrong(correct)
        return tuple(entries) if isinstance(result, tuple) else entries[0]

    def wrong(self, value: Any) -> Any:
        self.reached = True
        return value * ERROR


def forget_graphs() -> None:
    """Empty the caches of the tests: a graph that a mutant built must meet no other error or test."""
    judged.cache_clear()
    built_in_double.cache_clear()


def case_fails(case: Case) -> bool:
    forget_graphs()
    try:
        feeds, arriving, expected = judged(case)
        graph = built(case.model(), case.outputs, case.wrt, arriving)
        same(graph.run({**feeds, **arriving}), expected, list(expected), 1e-3, "static sizes")
    except Exception:
        return True
    return False


def own_tests_fail(op_type: str) -> bool:
    """Whether a test of the operator fails, run in this process, where the table is wrong."""
    files = [file for file, operators in TESTS.items() if op_type in operators.split()]
    with contextlib.redirect_stdout(io.StringIO()):
        return any(pytest.main(["-x", "-q", "-p", "no:cacheprovider", file]) == 1 for file in files)


def cases_of(op_type: str) -> list[Case]:
    """The cases whose model has the operator."""
    cases = []
    for family in families().values():
        for case in family:
            body = case.body.replace(" ", "")
            if f"{op_type}(" in body or f"{op_type}<" in body:
                cases.append(case)
    return cases


def entry_count(rule: Rule | Decomposition) -> int:
    """How many entries errors are planted in; a variadic rule is tested with three inputs."""
    if isinstance(rule, Decomposition):
        return 1
    return len(rule.signature.inputs) + 2 * rule.signature.variadic_inputs


def main(chosen: list[str]) -> int:
    unknown = set(chosen) - {op_type for table in (RULES, DECOMPOSITIONS) for _, op_type in table}
    if unknown:
        print(f"No rule or decomposition is for {', '.join(sorted(unknown))}.", file=sys.stderr)
        return 2
    noticed = 0
    unnoticed = []
    unreached = []
    broken = []
    entries: list[tuple[dict[Key, Any], Key, int]] = [
        (table, key, entry)
        for table in (RULES, DECOMPOSITIONS)
        for key in sorted(table)
        if not chosen or key[1] in chosen
        for entry in range(entry_count(table[key]))
    ]
    for table, key, entry in entries:
        op_type = key[1]
        rule = table[key]
        mutant = Mutant(rule.function, entry)
        table[key] = dataclasses.replace(rule)
        object.__setattr__(table[key], "function", mutant)
        try:
            fails = any(case_fails(case) for case in cases_of(op_type)) or own_tests_fail(op_type)
        finally:
            table[key] = rule
            forget_graphs()
        if not mutant.reached and fails:
            broken.append(f"{op_type}[{entry}]")
            print(f"fails without the error: {broken[-1]}", flush=True)
        elif not mutant.reached:
            unreached.append(f"{op_type}[{entry}]")  # it has no gradient, or always an error
        elif fails:
            noticed += 1
        else:
            unnoticed.append(f"{op_type}[{entry}]")
            print(f"unnoticed: {unnoticed[-1]}", flush=True)
    print(
        f"{noticed} of {noticed + len(unnoticed)} planted errors noticed; {len(SUBGRAPHS)} operators"
        " with subgraphs have cases of their own."
    )
    print(f"nothing to plant in: {' '.join(unreached)}")
    return 1 if unnoticed or broken else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("operators", nargs="*", metavar="operator", help="all, if none is named")
    operators = parser.parse_args().operators
    onnxruntime.set_default_logger_severity(4)
    sys.exit(main(operators))
