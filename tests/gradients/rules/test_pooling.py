"""Gradients of pools are those of onnxruntime's own forward pass, over forms drawn by chance."""

from __future__ import annotations

import itertools
import zlib
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper

from onnxfit import gradient_model
from onnxfit.errors import GradientError
from onnxfit.gradients.pullback import add_pullback
from onnxfit.graph.values import GraphBuilder
from onnxfit.load.normalize import normalize
from onnxfit.step.finish import prune

FORMS = 15
WAYS = list(itertools.product(("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"), (0, 1)))


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )


def model_of(operator: str, size: list[int], **attributes: Any) -> onnx.ModelProto:
    node = helper.make_node(operator, ["a"], ["y"], **attributes)
    a = helper.make_tensor_value_info("a", 1, [1, 1, *size])
    y = helper.make_tensor_value_info("y", 1, ["o"] * (2 + len(size)))
    graph = helper.make_graph([node], "g", [a], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=9)


def by_taps(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its gradient in the form for WebGPU."""
    pullback = add_pullback(normalize(model), ["y"], ["a"], device="webgpu").model
    return ir.to_proto(prune(GraphBuilder(pullback.graph)))


def drawn(rng: np.random.Generator, auto_pad: str, ceil_mode: int) -> tuple[list[int], Any]:
    axes = int(rng.integers(1, 3))
    size, kernel, strides = ([int(n) for n in rng.integers(1, most, axes)] for most in (12, 5, 6))
    attributes: dict[str, Any] = {"kernel_shape": kernel, "strides": strides}
    attributes |= {"auto_pad": auto_pad, "ceil_mode": ceil_mode}
    if auto_pad == "NOTSET":
        attributes["pads"] = [int(rng.integers(0, k)) for k in kernel * 2]
        attributes["dilations"] = [int(n) for n in rng.integers(1, 4, axes)]
    return size, attributes


def judge(operator: str, size: list[int], device: str = "cpu", **attributes: Any) -> bool:
    """Compare a gradient with differences. Return whether onnxruntime accepts the form."""
    model = model_of(operator, size, **attributes)
    rng = np.random.default_rng(0)
    count = int(np.prod(size))
    a = (0.5 * rng.permutation(count) - 2).astype(np.float32).reshape(1, 1, *size)
    try:
        forward = session(model)
        (y,) = forward.run(None, {"a": a})
        gradient = (
            by_taps(model) if device == "webgpu" else gradient_model(model, "a", gradient="onnx")
        )
    except (GradientError, *REFUSALS):
        return False
    if not y.size or np.abs(y).max() > 1e30:  # a window without an element
        return False
    dy = rng.normal(size=y.shape).astype(np.float32)
    slopes = []
    for step in np.eye(count, dtype=np.float32).reshape(count, *a.shape) / 8:
        up, down = (forward.run(None, {"a": a + sign * step})[0] for sign in (1, -1))
        slopes.append(4 * float(((up - down) * dy).sum()))
    (da,) = session(gradient).run(["a_grad"], {"a": a, "y_grad": dy})
    np.testing.assert_allclose(da.ravel(), slopes, atol=2e-4, err_msg=str((size, attributes)))
    return True


REFUSALS = tuple(
    getattr(onnxruntime.capi.onnxruntime_pybind11_state, name)
    for name in ("Fail", "InvalidGraph", "RuntimeException", "InvalidArgument")
)


@pytest.mark.parametrize(("auto_pad", "ceil_mode"), WAYS)
@pytest.mark.parametrize(
    "kind", ["AveragePool", "AveragePool of pads", "MaxPool", "MaxPool webgpu"]
)
def test_random_forms(kind: str, auto_pad: str, ceil_mode: int) -> None:
    rng = np.random.default_rng(zlib.crc32(f"{kind} {auto_pad} {ceil_mode}".encode()))
    operator, _, rest = kind.partition(" ")
    judged = 0
    for _ in range(FORMS):
        size, attributes = drawn(rng, auto_pad, ceil_mode)
        if rest == "of pads":
            attributes["count_include_pad"] = 1
        judged += judge(operator, size, rest or "cpu", **attributes)
    assert judged >= FORMS // 5


def test_the_last_window_of_an_average_of_pads_counts_as_in_the_forward_pass() -> None:
    """onnxruntime 1.20 divides its sum by the elements behind the padding, too."""
    assert judge(
        "AveragePool", [5], kernel_shape=[3], strides=[3], ceil_mode=1, count_include_pad=1
    )


@pytest.mark.parametrize("device", ["cpu", "webgpu"])
@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER"])
def test_strides_above_the_windows_leave_out_elements(auto_pad: str, device: str) -> None:
    for size, stride in ((3, 3), (5, 4), (7, 5), (11, 4)):
        form = {"kernel_shape": [1], "strides": [stride], "auto_pad": auto_pad}
        if not judge("MaxPool", [size], device, **form):
            pytest.skip("onnxruntime 1.32 refuses to leave out elements")


@pytest.mark.parametrize("operator", ["AveragePool", "MaxPool", "LpPool"])
@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"auto_pad": "SAME_UPPER", "dilations": [2]}, "pad SAME_UPPER with dilations differently"),
        ({"auto_pad": "SAME_LOWER", "strides": [4], "ceil_mode": 1}, "ceil_mode and strides above"),
        ({"strides": [2], "pads": [0, 1], "ceil_mode": 1}, "along axis 2 begins behind"),
    ],
)
def test_forms_that_versions_define_differently_are_refused(
    operator: str, attributes: dict[str, Any], reason: str
) -> None:
    model = model_of(operator, [8], kernel_shape=[2], **attributes)
    with pytest.raises(GradientError, match=reason):
        gradient_model(model, "a", gradient="onnx")
