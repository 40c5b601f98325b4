"""What the installed onnxruntime offers, and the ways to train with it."""

import pytest
from onnxruntime.capi import _pybind_state

HAS_BUILDER = hasattr(_pybind_state, "GradientGraphBuilder")  # the training build has it
# such a test is left out by `make test`; `make test-builder` runs it
needs_builder = pytest.mark.builder

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
