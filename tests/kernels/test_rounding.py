"""Products whose factors are rounded to bfloat16, by the operator in C++ and between Casts."""

from __future__ import annotations

import warnings
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
from tests.kernels.sessions import differentiated, parsed, random_feeds, run
from tests.models import mlp


def rounded(array: np.ndarray) -> np.ndarray:
    return array.astype(ml_dtypes.bfloat16).astype(np.float64)


def product(text: str, scope: str = "gradient/fc", precision: str = "bf16") -> onnx.ModelProto:
    model = parsed(text, scope)
    model.graph.metadata_props.add(key=names.PRODUCTS, value=precision)
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
    exact = [feeds[name].astype(np.float64) for name in "ab"]
    error = np.abs(y - np.einsum(equation, *exact))
    assert (error <= 2.0**-7 * np.einsum(equation, *map(np.abs, exact))).all()  # 2^-8 per factor
    assert error.max() > 1e-4


needs_instructions = pytest.mark.skipif(
    not library.pair_instructions(), reason="no AVX512-BF16 or AMX"
)


@needs_instructions
@pytest.mark.parametrize("form", FORMS)
def test_split_factors_are_nearly_as_exact_as_float32(form: str, kernels: Path) -> None:
    inputs, shape, body, equation = FORMS[form]
    text = f"g ({inputs}) => (float[{shape}] y) {{ {body} }}"
    split = with_rounded_factors(with_kernels(product(text, precision="bf16x3")), "cpu")
    assert [node.op_type for node in split.graph.node] == ["Product"]
    feeds = random_feeds(split)
    (y,) = run(split, feeds, kernels)
    a, b = feeds["a"].astype(np.float64), feeds["b"].astype(np.float64)
    error = np.abs(y - np.einsum(equation, a, b))
    assert (error <= (2.0**-15 + 1e-6) * np.einsum(equation, np.abs(a), np.abs(b))).all()
    assert error.max() > 0


def test_products_without_an_operator_are_not_split() -> None:
    plain = product(
        'g (float[5,9] a, float[9,7] b) => (float y) { y = Einsum<equation = "ij,jk->ik">(a, b) }',
        precision="bf16x3",
    )
    changed = with_rounded_factors(with_kernels(plain), "cpu")
    assert [node.op_type for node in changed.graph.node] == ["Einsum"]


def test_gradients_of_depthwise_convolutions_are_not_rounded() -> None:
    """Products that are small, and that operators for blocks of channels replace."""
    text = """g (float[4,32,8,8] x, float[32,1,3,3] w) => (float[4,32,8,8] y)
        { y = Conv<group=32, pads=[1,1,1,1]>(x, w) }"""
    plain = differentiated(text, ["x", "w"])
    plain.graph.metadata_props.add(key=names.PRODUCTS, value="bf16")
    assert "MatMul" in {node.op_type for node in plain.graph.node}
    changed = with_rounded_factors(with_kernels(plain), "cpu")
    assert not {"Product", "Cast"} & {node.op_type for node in changed.graph.node}


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
    with pytest.warns(UserWarning, match="'bf16' is not faster than 'float32'.* are rounded"):
        by_casts = losses("bf16")
    np.testing.assert_allclose(with_operator, by_casts, rtol=2e-3)
    np.testing.assert_allclose(with_operator, exact, rtol=2e-2)
    assert with_operator != exact


def losses_of_mlp(precision: str) -> list[float]:
    x, y = classification(64)
    trainer = Trainer(mlp(), loss="cross_entropy", optimizer="adam", precision=precision)
    return [trainer.train_on_batch(x, y)["loss"] for _ in range(5)]


def test_bf16x3_is_float32_without_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.SWITCH, "off")
    rounding._warn_of_speed.cache_clear()
    with pytest.warns(UserWarning, match="'bf16x3' is not faster .* computed in float32"):
        losses = losses_of_mlp("bf16x3")
    assert losses == losses_of_mlp("float32")


@pytest.mark.parametrize(
    "found", [library.PairInstructions.AVX512_BF16, library.PairInstructions.AMX]
)
def test_bf16x3_warns_without_amx(
    found: library.PairInstructions, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounding, "pair_instructions", lambda: found)
    rounding._warn_of_speed.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = losses_of_mlp("bf16x3")
    slower = ["'bf16x3' is slower than 'float32'" in str(each.message) for each in caught]
    assert any(slower) == (found != library.PairInstructions.AMX)
    np.testing.assert_allclose(losses, losses_of_mlp("float32"), rtol=1e-5)
