"""Products whose factors are rounded to bfloat16, by the operator in C++ and between Casts."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest

from onnxfit import Trainer
from onnxfit.graph import names
from onnxfit.kernels import library, rounding
from onnxfit.kernels.rounding import with_rounded_factors
from onnxfit.kernels.transforms import with_kernels
from onnxfit.optimizers import Muon
from tests.helpers import classification
from tests.kernels.sessions import parsed, random_feeds, run
from tests.models import mlp


def rounded(array: np.ndarray) -> np.ndarray:
    return array.astype(ml_dtypes.bfloat16).astype(np.float64)


def product(text: str, scope: str = "gradient/fc") -> onnx.ModelProto:
    model = parsed(text, scope)
    model.graph.metadata_props.add(key=names.PRODUCTS, value="bf16")
    return model


FORMS = {
    "MatMul": ("float[5,40] a, float[40,33] b", "5,33", "y = MatMul(a, b)", "ij,jk->ik"),
    "batches": ("float[3,5,40] a, float[3,40,33] b", "3,5,33", "y = MatMul(a, b)", "bij,bjk->bik"),
    "gradient of x": (
        "float[5,33] a, float[40,33] b",
        "5,40",
        "y = Gemm<transB=1>(a, b)",
        "ij,kj->ik",
    ),
    "gradient of w": (
        "float[50,40] a, float[50,33] b",
        "40,33",
        "y = Gemm<transA=1>(a, b)",
        "ji,jk->ik",
    ),
}


@pytest.mark.parametrize("by", ["operator", "Casts"])
@pytest.mark.parametrize("form", FORMS)
def test_factors_are_rounded(form: str, by: str, kernels: Path) -> None:
    inputs, shape, body, equation = FORMS[form]
    plain = product(f"g ({inputs}) => (float[{shape}] y) {{ {body} }}")
    feeds = random_feeds(plain)
    changed = with_kernels(plain) if by == "operator" else with_rounded_factors(plain, "cpu")
    found = [node.op_type for node in changed.graph.node]
    assert found == (
        ["Product"] if by == "operator" else ["Cast"] * 4 + [plain.graph.node[0].op_type]
    )
    (y,) = run(changed, feeds, kernels)
    a, b = rounded(feeds["a"]), rounded(feeds["b"])
    scale = np.einsum(equation, np.abs(a), np.abs(b))
    assert (np.abs(y - np.einsum(equation, a, b)) <= 1e-6 * scale).all()
    assert np.abs(y - np.einsum(equation, feeds["a"], feeds["b"])).max() > 1e-4


@pytest.mark.parametrize("scope", ["loss/y", "gradient/loss/y", "optimizer/w"])
def test_losses_and_optimizers_stay_in_float32(scope: str) -> None:
    plain = product("g (float[5,9] a, float[9,7] b) => (float y) { y = MatMul(a, b) }", scope)
    changed = with_rounded_factors(plain, "cpu")
    assert [node.op_type for node in changed.graph.node] == ["MatMul"]


@pytest.mark.parametrize("optimizer", [0.3, "adam", Muon(0.01)])
@pytest.mark.parametrize("backend", ["full", "forward_backward", "in_place"])
def test_the_operator_trains_as_casts_do(
    optimizer: object, backend: str, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = classification(64)

    def losses(precision: str) -> list[float]:
        trainer = Trainer(
            mlp(), loss="cross_entropy", optimizer=optimizer, precision=precision, backend=backend
        )
        return [trainer.train_on_batch(x, y)["loss"] for _ in range(10)]

    with_operator, exact = losses("bf16"), losses("float32")
    monkeypatch.setenv(library.SWITCH, "off")
    rounding._warn_of_speed.cache_clear()
    with pytest.warns(UserWarning, match="not faster than 'float32'"):
        by_casts = losses("bf16")
    np.testing.assert_allclose(with_operator, by_casts, rtol=2e-3)
    np.testing.assert_allclose(with_operator, exact, rtol=2e-2)
    assert with_operator != exact
