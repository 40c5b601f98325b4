"""The page about the suite: what each runtime makes of the cases."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from scripts.steps.attempt import CRASHED, PASSED, REFUSED, WRONG, Outcome
from scripts.steps.runtimes import RUNTIMES

# target -> the marks around its tables
MARKS = {
    "onnxruntime": ("<!-- results -->", "<!-- end -->"),
    "npu": ("<!-- results npu -->", "<!-- end npu -->"),
}


def grouped(results: Mapping[str, Outcome]) -> dict[tuple[str, str], list[str]]:
    """Return the cases that fail, by result and operator, the most frequent first."""
    groups: dict[tuple[str, str], list[str]] = {}
    for case, outcome in results.items():
        if outcome.result != PASSED:
            groups.setdefault((outcome.result, outcome.node), []).append(case)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def write_page(page: Path, folders: Mapping[str, Path]) -> None:
    """Write the tables between the marks of the page, from the results in the folders of targets."""
    for target, folder in folders.items():
        runs = {}
        for name in RUNTIMES:
            path = folder / "results" / f"{name}.json"
            if path.exists():
                runs[name] = json.loads(path.read_text())
        text = page.read_text()
        begin, end = MARKS[target]
        before, after = text.index(begin) + len(begin), text.rindex(end)
        if runs:
            page.write_text(f"{text[:before]}\n{tables(runs)}\n{text[after:]}")


def tables(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table of the runtimes, and one of the operators that fail."""
    lines = [
        "| runtime | version | passed | refused | wrong | crashed |",
        "|---|---|---|---|---|---|",
    ]
    failures = ["| runtime | operator | result | cases | reason |", "|---|---|---|---|---|"]
    for run in runs.values():
        outcomes = {case: Outcome(**found) for case, found in run["cases"].items()}
        count = Counter(outcome.result for outcome in outcomes.values())
        row = [run["runtime"], run["version"], f"{count[PASSED]} of {len(outcomes)}"]
        row += [str(count[result]) for result in (REFUSED, WRONG, CRASHED)]
        lines.append(_row(row))
        for (result, node), cases in grouped(outcomes).items():
            number = f"`{cases[0]}`" if len(cases) == 1 else f"{len(cases)}, as `{cases[0]}`"
            reason = _code(outcomes[cases[0]].reason)
            failures.append(
                _row([run["runtime"], node or "several together", result, number, reason])
            )
    return "\n".join(["", *lines, "", *failures, ""])


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _code(reason: str) -> str:
    """Return a message as code, without the paths of the machine."""
    plain = re.sub(r"(/[\w.+-]+){2,}/", ".../", reason).replace("|", "/").replace("`", "'")
    return f"`{plain[:120].strip()}`"
