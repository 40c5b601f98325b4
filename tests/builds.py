"""Which onnxruntime the tests run on."""

import pytest
from onnxruntime.capi import _pybind_state

HAS_BUILDER = hasattr(_pybind_state, "GradientGraphBuilder")  # the training build has it
needs_builder = pytest.mark.skipif(not HAS_BUILDER, reason="this onnxruntime has no gradient builder")
