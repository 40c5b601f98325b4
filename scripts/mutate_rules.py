"""Plant a 1 % error into every entry of every gradient rule in turn: some case must fail each time.

    python scripts/mutate_rules.py [operator ...]

Exit code 1 if an error goes unnoticed. What is multiplied is the value that a rule returns for one input; a rewriting is tested through its
first output.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import onnxruntime

from onnxfit.gradients import rules  # noqa: F401
from onnxfit.gradients.table import REWRITES, RULES, SUBGRAPHS, Key
from tests.rules import Case, built, families, judged, same

ERROR = 1.01


def mutated(function: Callable[..., Any], entry: int) -> Callable[..., Any]:
    """The rule with one of its entries 1 % too large."""

    def rule(op: Any, *args: Any, **attributes: Any) -> Any:
        entries = function(op, *args, **attributes)
        alone = not isinstance(entries, tuple)
        changed = [entries] if alone else list(entries)
        if entry >= len(changed) or changed[entry] is None:
            raise LookupError
        right = changed[entry]
        changed[entry] = (lambda: right() * ERROR) if callable(right) else right * ERROR
        return changed[0] if alone else tuple(changed)

    return rule


def notices(case: Case) -> bool:
    """Whether a case fails."""
    judged.cache_clear()
    try:
        feeds, arriving, expected = judged(case)
        graph = built(case.model(), case.outputs, case.wrt, arriving)
        same(graph.run({**feeds, **arriving}), expected, list(expected), 1e-3, "static sizes")
    except LookupError:
        return False
    except Exception:
        return True
    return False


def entries_of(key: Key, cases: list[Case], table: dict[Key, Any]) -> range:
    formal = table[key].formal
    if table is REWRITES:
        return range(1)
    return range(len(formal.inputs) + (2 if formal.many_inputs else 0))


def main(chosen: list[str]) -> int:
    onnxruntime.set_default_logger_severity(4)
    cases = [case for family in families().values() for case in family]
    missed, caught, asked = [], 0, 0
    for table in (RULES, REWRITES):
        for key in sorted(table):
            if chosen and key[1] not in chosen:
                continue
            original = table[key]
            own = [c for c in cases if f"{key[1]}(" in c.body.replace(" ", "") or f"{key[1]}<" in c.body.replace(" ", "")]
            others = [c for c in cases if c not in own]
            for entry in entries_of(key, own, table):
                reached = False

                wrong, right = mutated(original.function, entry), original.function

                def watched(op: Any, *args: Any, wrong: Any = wrong, right: Any = right, **attributes: Any) -> Any:
                    nonlocal reached
                    try:
                        found = wrong(op, *args, **attributes)
                    except LookupError:
                        return right(op, *args, **attributes)
                    reached = True
                    return found

                table[key] = dataclasses.replace(original)
                object.__setattr__(table[key], "function", watched)
                seen = any(notices(case) for case in own) or (not own and any(notices(case) for case in others))
                object.__setattr__(table[key], "function", original.function)
                table[key] = original
                if reached or not own:
                    asked += 1
                    caught += seen
                    if not seen:
                        missed.append(f"{key[1]} entry {entry}" + ("" if own else " (no case of its own)"))
                        print(f"unnoticed: {missed[-1]}", flush=True)
    print(f"{caught} of {asked} planted errors noticed; {len(SUBGRAPHS)} operators with bodies are tested by their own cases.")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
