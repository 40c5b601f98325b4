"""The settings of adapters."""

from __future__ import annotations

from typing import Any

import pytest

from onnxfit import LoRA, SettingError
from onnxfit.errors import ArgumentError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "LoRA needs rank to be a whole number >= 1, got 0"),
        ({"rank": 2.5}, "rank to be a whole number"),
        ({"alpha": 0}, "alpha > 0, got 0"),
        ({"alpha": float("inf")}, "alpha > 0, got inf"),
        ({"dropout": 1}, "dropout >= 0 and < 1, got 1"),
        ({"dropout": -0.1}, "dropout >= 0"),
        ({"scaling": "rslora"}, r"'alpha/r', 'alpha/sqrt\(r\)', got 'rslora'"),
        ({"init": "zeros"}, "'kaiming', 'gaussian', 'pissa', got 'zeros'"),
        ({"dora": 1}, "LoRA dora must be True or False, got 1"),
        ({"target": []}, "matches no weight"),
        ({"target": 3}, "target must be a name or a list of names"),
    ],
)
def test_values_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        LoRA(**settings)


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("r", "rank"),
        ("lora_alpha", "alpha"),
        ("target_modules", "target"),
        ("lora_dropout", "dropout"),
        ("use_rslora", "scaling"),
        ("use_dora", "dora"),
        ("init_lora_weights", "init"),
        ("modules_to_save", "weights="),
    ],
)
def test_arguments_of_peft_name_those_of_onnxfit(name: str, own: str) -> None:
    with pytest.raises(ArgumentError, match=own):
        LoRA(**{name: 8})


def test_the_scale_is_that_of_the_papers() -> None:
    assert LoRA(rank=16, alpha=8).scale == 0.5
    assert LoRA(rank=16, alpha=8, scaling="alpha/sqrt(r)").scale == 2
