"""Let onnxruntime compute with and without its graph optimizations: `make disagreements`.

Every network of the tests and every case of the gradient rules must agree with itself within
rounding; exit code 1 otherwise. `--write-docs` also writes docs/onnxruntime-disagreements.md, about
the models of known.py on the onnxruntime of this Python and of `--pythons`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # `python scripts/disagreements`
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tqdm import tqdm

from scripts.disagreements.known import KNOWN, LEVELS, RIGHT, Known, outcomes, rounded
from scripts.disagreements.networks import (
    all_cases,
    disagreements_of_case,
    disagreements_of_network,
    exported_networks,
    small_networks,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "onnxruntime-disagreements.md"
SETTING = {"ORT_ENABLE_ALL": "with optimizations", "ORT_DISABLE_ALL": "without"}


def compare() -> tuple[int, int, list[str]]:
    """Return the numbers of networks and of cases, and a line for each disagreement."""
    lines = []
    networks = [*small_networks(), *exported_networks()]
    for name, make in tqdm(networks, unit="network"):
        names = disagreements_of_network(make)
        lines += [f"{name}: {', '.join(names)}"] if names else []
    cases = all_cases()
    for name, case in tqdm(cases, unit="case"):
        names = disagreements_of_case(case)
        lines += [f"{name}: {', '.join(names)}"] if names else []
    return len(networks), len(cases), lines


def page(found: Sequence[dict[str, Any]], networks: int, cases: int) -> str:
    """Return the page: a table of the versions, and a section for each model.

    - `found`: the results of `outcomes` for each version of onnxruntime.
    - `networks`, `cases`: the numbers of those that agree.
    """
    versions = [one["version"] for one in found]
    head = [f"{version}, {SETTING[level]}" for version in versions for level in LEVELS]
    rows = []
    for known in KNOWN:
        cells = [one["answers"][known.name][level][0] for one in found for level in LEVELS]
        rows.append(f"| {known.name} | {' | '.join(cells)} |")
    table = [f"| model | {' | '.join(head)} |", f"|{'---|' * (len(head) + 1)}", *rows]
    return "\n".join(
        [
            "# Disagreements of onnxruntime",
            "",
            "These models have other results with onnxruntime's graph optimizations than without,"
            " or than ONNX defines,",
            "or they are refused. `make disagreements` writes this page. It runs each model on the"
            " CPU with `graph_optimization_level`",
            "`ORT_ENABLE_ALL`, the default, and `ORT_DISABLE_ALL`. The right answers are computed"
            " with NumPy, without onnxruntime.",
            "",
            *table,
            "",
            f"{networks} networks (losses, gradients and predictions of three steps) and {cases:,}"
            " cases of gradient rules",
            f"(forward and backward) agree with and without optimizations on onnxruntime"
            f" {versions[0]}.",
            "",
            "onnxfit's training sessions set `session.disable_quant_qdq`, so that the first"
            " disagreements concern only files",
            "that are run as they are, as `predict` does. `onnxfit.quantize` always writes zero"
            " points.",
            *[line for known in KNOWN for line in section(known, found)],
            "",
        ]
    )


def section(known: Known, found: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines about a model."""
    lines = ["", f"## {known.name}", "", known.reason, "", "```", known.text, "```", ""]
    for name, array in known.inputs.items():
        lines.append(f"- `{name}` ({array.dtype}): `{json.dumps(rounded(array))}`")
    lines.append(f"- right: `{json.dumps(rounded(known.answer))}`")
    for one in found:
        answers = one["answers"][known.name]
        for level in LEVELS:
            result, text = answers[level]
            if result != RIGHT:
                lines.append(f"- {one['version']}, {SETTING[level]}: {result}, `{text}`")
    return lines


def outcomes_of(python: str) -> dict[str, Any]:
    """Return the results of `outcomes` in another Python."""
    script = Path(__file__).with_name("known.py")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run([python, script], check=True, capture_output=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="disagreements", description=__doc__.splitlines()[0])
    parser.add_argument("--write-docs", action="store_true")
    parser.add_argument("--pythons", nargs="*", default=[], help="with other onnxruntimes")
    arguments = parser.parse_args()
    networks, cases, lines = compare()
    print(*lines, sep="\n")
    print(f"{networks} networks and {cases} cases, {len(lines)} disagreements")
    if arguments.write_docs and not lines:
        found = [outcomes(), *map(outcomes_of, arguments.pythons)]
        PAGE.write_text(page(found, networks, cases), encoding="utf-8")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
