"""SECURITY.md: every promise names a check that exists."""

from __future__ import annotations

import re
from pathlib import Path

from scripts.fuzz.kinds import KINDS

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
# the last cells of the table, without its head and the line below it
CHECKS = [line.split("|")[-2] for line in PAGE.splitlines() if line.startswith("|")][2:]


def test_every_row_names_checks_that_exist() -> None:
    assert len(CHECKS) > 8
    for checks in CHECKS:
        for name in re.findall(r"`([^`]+)`", checks):
            path, _, test = name.partition("::")
            if path.startswith("tests/"):
                assert f"class {test}" * bool(test) in (ROOT / path).read_text("utf-8")
            else:
                assert name in KINDS


def test_every_kind_of_the_fuzzer_is_named() -> None:
    named = set(re.findall(r"`([^`]+)`", " ".join(CHECKS)))
    assert not KINDS.keys() - named


def test_it_is_found() -> None:
    assert "(SECURITY.md)" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
