"""Arguments that errors name as their fix."""

from __future__ import annotations

import pytest

from onnxfit import Quantization
from onnxfit.script.fixes import Fix, fix_of

FIXES = [
    ("Use Trainer(..., dynamic_batch=True).", {"dynamic_batch": True}),
    ("Pass batch_norm='frozen'.", {"batch_norm": "frozen"}),
    ("Pass fixed_inputs={'sr': 16000, 'a.b, c': [1, 2]} instead", {"fixed_inputs": {"sr": 16000, "a.b, c": [1, 2]}}),
    ("with quantization=onnxfit.Quantization(weights='!a, (b).c').", {"quantization": Quantization(weights="!a, (b).c")}),
    ("Or fixed_inputs={'h': array}, or weights=['!k'].", {"weights": ["!k"]}),
]  # fmt: skip


@pytest.mark.parametrize(("message", "settings"), FIXES)
def test_the_argument_and_its_value_are_read(message: str, settings: dict[str, object]) -> None:
    assert fix_of(message) == Fix(message, settings)


def test_no_fix_is_found_where_none_is_named() -> None:
    for message in (
        "The file is damaged.",
        "Pass fixed_inputs={'h': array}.",
        "dynamic_batch=__import__('os').getcwd()",
        "weights=" + "(" * 100_000,
        "device='cuda' and seed=3",  # arguments that never let a file train
    ):
        assert fix_of(message) is None


def test_half_precision_is_converted() -> None:
    found = fix_of("Convert the model to float32 with onnxfit.to_float32(model).")
    assert found is not None
    assert found.converts
