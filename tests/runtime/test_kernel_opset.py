"""Graphs for CUDA are compiled in an older opset, in which they compute the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx.shape_inference
import onnxruntime
import pytest

from onnxfit.runtime.compilation import compile_model
from onnxfit.runtime.device import Device
from onnxfit.runtime.kernel_opset import KERNEL_OPSET, kernel_opset


def model_of(body: str, opset: int = 21) -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": {opset}]>'
        f" g (float[2,6] x, bool yes) => (float[a,b] y) {{ {body} }}"
    )
    return onnx.shape_inference.infer_shapes(model)


def run(model: onnx.ModelProto) -> np.ndarray[Any, Any]:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    x = np.random.default_rng(0).normal(size=(2, 6)).astype(np.float32)
    feeds = {"x": x, "yes": np.array(True)}
    (y,) = session.run(None, {i.name: feeds[i.name] for i in session.get_inputs()})
    assert isinstance(y, np.ndarray)
    return y


@pytest.mark.parametrize(
    "body",
    [
        "a = Cast<to=11>(x)  b = Identity(a)  c = Transpose(b)  d = Flatten(c)  y = Cast<to=1>(d)",
        "s = Shape(x)  z = ConstantOfShape(s)  w = Equal(z, x)  y = Where(w, z, x)",
        "a = Gelu(x)  y = Gelu<approximate = 'tanh'>(a)".replace("'", '"'),
        # onnxruntime's own, in every opset
        "o = Constant<value = float[6] {1,2,3,4,5,6}>()"
        " y = SimplifiedLayerNormalization<axis = -1>(x, o)",
        """y = If(yes)<then_branch = t () => (float[2,6] u) { u = Gelu(x) },
           else_branch = e () => (float[2,6] v) { v = Identity(x) }>""",
    ],
)
def test_a_model_computes_the_same_in_an_older_opset(body: str) -> None:
    model = model_of(body)
    before = model.SerializeToString(deterministic=True)
    expected = run(model)
    with kernel_opset(model):
        versions = {o.domain: o.version for o in model.opset_import}
        assert versions[""] == KERNEL_OPSET
        if "SimplifiedLayerNormalization" not in body:
            onnx.checker.check_model(model)
        found = run(model)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
    assert model.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize(
    "body",
    [
        "i = Cast<to=17>(x)  y = Cast<to=1>(i)",  # float8 came with opset 19
        "n = Cast<to=9>(x)  m = ReduceMax<keepdims=1>(n)  y = Cast<to=1>(m)",  # of booleans: 20
        "c = Constant<value = float[1] {1}>()  y = GroupNormalization<num_groups = 1>(x, c, c)",
    ],
)
def test_a_model_without_an_equal_keeps_its_opset(body: str) -> None:
    model = model_of(body)
    before = model.SerializeToString(deterministic=True)
    with kernel_opset(model):
        assert model.SerializeToString(deterministic=True) == before


def test_a_model_in_an_older_opset_keeps_it() -> None:
    model = model_of("y = Flatten(x)", opset=15)
    with kernel_opset(model):
        assert model.opset_import[0].version == 15


@pytest.mark.parametrize(("kind", "opset"), [("cpu", 21), ("cuda", KERNEL_OPSET)])
def test_sessions_of_cuda_get_the_older_opset(
    kind: str, opset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is the CPU, called cuda."""
    original = onnxruntime.InferenceSession
    compiled = []

    def session(serialized: bytes, *arguments: Any, **options: Any) -> onnxruntime.InferenceSession:
        compiled.append(onnx.load_from_string(serialized))
        return original(serialized, *arguments, **options)

    monkeypatch.setattr(Device, "provider", "CPUExecutionProvider")
    monkeypatch.setattr(Device, "options", {})
    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    compile_model(model_of("y = Flatten(x)"), Device(kind, 0), None, "tried")
    assert [o.version for o in compiled[0].opset_import] in ([opset], [opset, 1])
