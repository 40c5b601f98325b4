"""The registry of gradient rules: one entry per operator within onnxfit; users replace entries."""

from __future__ import annotations

import types

import pytest

from onnxfit.gradients import decompose, register, table


def rule(op, x, y, dy):
    return dy


def body(op, x):
    return x


class TestRegister:
    @pytest.fixture(autouse=True)
    def _restored(self, table_of_rules_restored: None) -> None: ...

    @pytest.mark.parametrize("op_type", ["Range", "BatchNormalization", "If", "Floor"])
    @pytest.mark.parametrize("decorator", [register, decompose])
    def test_a_second_entry_of_onnxfit_is_an_error_that_names_both_modules(
        self, decorator, op_type: str
    ) -> None:
        second = types.FunctionType((rule if decorator is register else body).__code__, {})
        second.__module__ = "onnxfit.gradients.rules.elementwise"
        before = [dict(t) for t in (table.RULES, table.DECOMPOSITIONS, table.SUBGRAPHS)]
        with pytest.raises(
            RuntimeError,
            match=rf"{op_type} is registered twice: in onnxfit\.gradients\.rules\.\w+ and in"
            r" onnxfit\.gradients\.rules\.elementwise",
        ):
            decorator(op_type)(second)
        assert before == [table.RULES, table.DECOMPOSITIONS, table.SUBGRAPHS]

    @pytest.mark.parametrize("op_type", ["Range", "BatchNormalization", "If", "Floor"])
    def test_a_user_replaces_any_entry(self, op_type: str) -> None:
        key = ("", op_type)
        register(op_type)(rule)
        assert table.RULES[key].function is rule
        assert not any(
            key in t for t in (table.DECOMPOSITIONS, table.SUBGRAPHS, table.NOT_DIFFERENTIABLE)
        )
        decompose(op_type)(body)
        assert table.DECOMPOSITIONS[key].function is body
        assert not any(key in t for t in (table.RULES, table.SUBGRAPHS, table.NOT_DIFFERENTIABLE))

    def test_a_rule_with_wrong_parameters_leaves_the_old_one(self) -> None:
        before = table.RULES["", "Range"]
        with pytest.raises(TypeError, match="The parameters of a rule must be op"):
            register("Range")(lambda op, start, limit, delta: None)
        assert table.RULES["", "Range"] is before
