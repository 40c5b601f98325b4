"""The script that plants the errors of a list: what it reads, refuses, and tells apart."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scripts import mutate_loop
from scripts.mutate_loop import BROKEN, NOTICED, UNNOTICED, Mutation

LIST = """# A comment.

file: package.py
tests: test_package.py

The sum is a difference,
said in two lines.
- return a + b
+ return a - b

Two lines are one text.
- if a:
-     return b
+ if b:
+     return b
tests: test_package.py -k "sum or half"
equivalent: both are asked for.
"""


def test_a_list_is_read(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_text(LIST)
    first, second = mutate_loop.read_table([path])
    assert first == Mutation(
        "package.py",
        "The sum is a difference, said in two lines.",
        "return a + b",
        "return a - b",
        "test_package.py",
    )
    assert (second.old, second.new) == ("if a:\n    return b", "if b:\n    return b")
    assert second.tests == 'test_package.py -k "sum or half"'
    assert second.equivalent == "both are asked for."
    path.write_text("file: a.py\ntests: b.py\n\nA sentence without a text.\n")
    with pytest.raises(ValueError, match=r"list.txt:4: a mutation has a sentence and a text"):
        mutate_loop.read_table([path])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("return c", "return d", "found 0 times"),
        ("return", "yield", "found 2 times"),
        ("return a + b", "return (a + b)", "means the same"),
        ("def add", "def", "cannot be planted"),
    ],
)
def test_a_list_that_is_out_of_date_is_refused(old: str, new: str, message: str) -> None:
    text = "def add(a, b):\n    return a + b\ndef one():\n    return 1\n"
    with pytest.raises(ValueError, match=message):
        Mutation("package.py", "", old, new, "").applied(text)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="mutations run in forked processes")
def test_what_tests_notice_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "package.py").write_text("def add(a, b):\n    return a + b\n\nUNUSED = 1\n")
    (tmp_path / "test_package.py").write_text(
        "import package\n\ndef test_sum():\n    assert package.add(1, 2) == 3\n"
    )
    monkeypatch.setattr(mutate_loop, "ROOT", tmp_path)
    monkeypatch.setattr(mutate_loop, "COPIED", ("package.py", "test_package.py"))
    monkeypatch.delitem(sys.modules, "package", raising=False)
    noticed = Mutation("package.py", "wrong", "a + b", "a - b", "test_package.py")
    unnoticed = Mutation("package.py", "unused", "UNUSED = 1", "UNUSED = 2", "test_package.py")
    equivalent = replace(unnoticed, equivalent="nobody reads it")
    broken = Mutation("package.py", "no test", "a + b", "a * b", "test_other.py")
    results = dict(mutate_loop.run([noticed, unnoticed, broken], 2))
    assert results == {noticed: NOTICED, unnoticed: UNNOTICED, broken: BROKEN}
    assert (tmp_path / "package.py").read_text().startswith("def add(a, b):\n    return a + b")
    assert mutate_loop.report(iter(results.items()), 3) == 1
    assert "unnoticed: package.py: unused" in capsys.readouterr().out
    (baseline,) = mutate_loop.without_errors([noticed, unnoticed])
    assert mutate_loop.report(mutate_loop.run([baseline], 1), 1) == 0
    assert mutate_loop.report(iter([(equivalent, UNNOTICED)]), 1) == 0


def test_every_mutation_can_be_planted_and_names_tests_that_exist() -> None:
    mutations = mutate_loop.read_table(sorted(mutate_loop.TABLE.glob("*.txt")))
    assert not mutate_loop.out_of_date(mutations)
    for mutation in mutations:
        files = re.findall(r"(?:tests|onnxfit)/[\w/.]+", mutation.tests)
        assert files, mutation
        assert all((mutate_loop.ROOT / file).exists() for file in files), mutation
        assert (mutate_loop.ROOT / mutation.file).exists(), mutation
