"""Which onnxruntime the tests run on, and the ways to train that it offers."""

import pytest
from onnxruntime.capi import _pybind_state

HAS_BUILDER = hasattr(_pybind_state, "GradientGraphBuilder")  # the training build has it
needs_builder = pytest.mark.skipif(
    not HAS_BUILDER, reason="this onnxruntime has no gradient builder"
)

# what holds of training holds of each: `way` is settings of a Trainer
every_way = pytest.mark.parametrize(
    "way",
    [
        pytest.param(
            {"backend": backend, "gradient": gradient}, id=f"{backend}, {gradient}", marks=marks
        )
        for backend in ("full", "forward_backward", "in_place")
        for gradient, marks in (("onnx", ()), ("onnxruntime", needs_builder))
    ],
)
