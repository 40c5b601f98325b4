"""Means and deviations by which a network normalizes its input."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxfit.graph.weights import weight_reasons
from onnxfit.load.normalize import normalize

MEAN, DEVIATION = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
OTHER_MEAN, OTHER_DEVIATION = np.array([12.0, 50.0, 7.5]), np.array([3.0, 0.7, 20.0])


def roles(nodes: str, *constants: np.ndarray, columns: bool = False) -> list[str]:
    """Return the names of the tensors `a`, `b`, ... that are found."""
    layer = "y = MatMul(z, w)" if columns else "y = Conv(z, w)"
    shape = "N, 3" if columns else "N, 3, 8, 8"
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g (float[{shape}] x) => (float[N, ?, ?, ?] y)'
        f" {{ {nodes} {layer} }}"
    )
    model.graph.output[0].type.tensor_type.ClearField("shape")
    rng = np.random.default_rng(0)
    tensors = {"w": rng.normal(size=(3, 4) if columns else (4, 3, 3, 3))}
    for name, numbers in zip("abc", constants):
        tensors[name] = numbers if columns else numbers.reshape(1, 3, 1, 1)
    for name, array in tensors.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype("f4"), name))
    reasons = weight_reasons(normalize(model))
    found = {name: reason.text for name, reason in reasons.items() if reason.is_formula}
    assert set(found.values()) <= {"normalization of 'x'"}
    return sorted(found)


@pytest.mark.parametrize("scale", [1, 255])
@pytest.mark.parametrize("order", [1, -1])
def test_the_numbers_of_imagenet_are_found_in_any_form(scale: int, order: int) -> None:
    mean, deviation = MEAN[::order], DEVIATION[::order]
    assert roles("d = Sub(x, a) z = Div(d, b)", scale * mean, scale * deviation) == ["a", "b"]
    assert roles("d = Sub(x, a) z = Mul(d, b)", scale * mean, 1 / (scale * deviation)) == ["a", "b"]
    factor, term = 1 / (scale * deviation), -mean / deviation
    assert roles("d = Mul(x, a) z = Add(d, b)", factor, term) == ["a", "b"]


def test_any_numbers_are_found_where_no_layer_would_compute_them() -> None:
    pair = OTHER_MEAN, OTHER_DEVIATION
    assert roles("d = Sub(x, a) z = Div(d, b)", *pair) == ["a", "b"]
    assert roles("d = Sub(x, a) z = Div(d, b)", *pair, columns=True) == ["a", "b"]


@pytest.mark.parametrize(
    ("nodes", "constants"),
    [
        ("d = Mul(x, a) z = Add(d, b)", (OTHER_DEVIATION, OTHER_MEAN)),  # a folded normalization
        ("d = Sub(x, a) e = Mul(d, b) z = Add(e, c)", (OTHER_MEAN, OTHER_DEVIATION, MEAN + 1)),
        ("z = Add(x, a)", (OTHER_MEAN,)),
        ("z = Div(x, a)", (OTHER_DEVIATION,)),
        ("d = Sub(x, a) z = Div(d, b)", (OTHER_MEAN, -OTHER_DEVIATION)),
        ("r = Relu(x) d = Sub(r, a) z = Div(d, b)", (OTHER_MEAN, OTHER_DEVIATION)),
        ("z = Mul(x, a)", (np.ones(3),)),
        ("z = Add(x, a)", (np.zeros(3),)),
    ],
)
def test_learned_scales_and_terms_are_weights(nodes: str, constants: tuple) -> None:
    assert not roles(nodes, *constants)
