"""The script that plants errors into the rules of gradients: each error meets a graph of its own."""

from __future__ import annotations

import pytest

from onnxfit.gradients.table import RULES
from scripts import mutate_rules
from tests.gradients.rules.cases import built_in_double, judged

pytestmark = pytest.mark.usefixtures("table_of_rules_restored")


def test_an_error_in_each_gradient_of_a_rule_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    rules = RULES["", "Atan"], RULES["", "Pow"]
    assert mutate_rules.main(["Atan", "Pow"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("3 of 3 planted errors noticed;")
    assert output.endswith("nothing to plant in: \n")
    assert (RULES["", "Atan"], RULES["", "Pow"]) == rules
    assert judged.cache_info().currsize == built_in_double.cache_info().currsize == 0


def test_an_error_that_changes_nothing_is_unnoticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mutate_rules, "ERROR", 1.0)
    assert mutate_rules.main(["Atan"]) == 1
    assert capsys.readouterr().out.startswith("unnoticed: Atan[0]\n0 of 1 planted errors noticed;")


def test_a_case_that_fails_without_an_error_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mutate_rules, "case_fails", lambda case: True)
    assert mutate_rules.main(["Atan"]) == 1
    assert capsys.readouterr().out.startswith("fails without the error: Atan[0]\n")


def test_an_operator_without_a_rule_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutate_rules.main(["Atan", "Atn"]) == 2
    assert capsys.readouterr().err == "No rule or decomposition is for Atn.\n"
