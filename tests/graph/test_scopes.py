"""Scopes of nodes: who made a node, and that no other module spells a scope."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import onnxfit
from onnxfit.graph import scopes
from onnxfit.graph.scopes import maker_of, stage_of


@pytest.mark.parametrize(
    ("node", "stage", "maker"),
    [
        ("fc1", "model", "the model"),
        ("", "model", "the model"),
        ("loss", "model", "the model"),
        ("encoder/loss/fc1", "model", "the model"),
        ("model/fc1", "model", "the model"),
        (f"{scopes.LOSS}/Add", "loss", "the loss"),
        (f"{scopes.loss_of('y')}/Sub", "loss", "the loss"),
        (f"{scopes.penalty_of('fc1.weight')}/Mul", "penalty", "the penalty"),
        (f"{scopes.gradient_of('fc1')}/MatMul", "gradient", "the gradient of 'fc1'"),
        (f"{scopes.gradient_of('block/fc1')}/MatMul", "gradient", "the gradient of 'block/fc1'"),
        (f"{scopes.GRADIENT_SUM}/Add", "gradient", "the sum of gradients"),
        (f"{scopes.ACCUMULATION}/Where", "accumulation", "the gradient accumulation"),
        (f"{scopes.OPTIMIZER}/Pow", "optimizer", "the optimizer"),
        (f"{scopes.update_of('fc1.weight')}/Mul", "optimizer", "the optimizer"),
        ("fc1_Grad", "gradient", "the gradient"),
        ("fc1_Grad/MatMul_0", "gradient", "the gradient"),
        ("loss/y/Sub_Grad/Neg_0", "gradient", "the gradient"),
        ("AccumulateGrad_x_grad", "gradient", "the gradient"),
    ],
)
def test_the_name_of_a_node_says_who_made_it(node: str, stage: str, maker: str) -> None:
    assert stage_of(node) == stage
    assert maker_of(node) == maker


def test_no_other_module_spells_a_scope() -> None:
    """Arguments of `op.scope` are names of graph/scopes.py, not literals."""
    package = Path(onnxfit.__file__).parent
    spelled = [
        f"{path.relative_to(package)}:{call.lineno}"
        for path in sorted(package.rglob("*.py"))
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "scope"
        and any(isinstance(a, (ast.Constant, ast.JoinedStr)) for a in call.args)
    ]
    assert spelled == []
