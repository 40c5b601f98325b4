"""Constants that make vectors longer than any memory."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxfit import Trainer
from onnxfit.errors import OnnxfitError
from onnxfit.graph.fold import makes_long_vectors
from tests.graph.graphs import parse

HUGE = 2**40
LONG = {
    "ConstantOfShape": "z = ConstantOfShape <value = int64[1] {1}> (size)",
    "Expand": "z = Expand(one, size)",
    "Tile": "z = Tile(one, size)",
    "Pad": "z = Pad(one, pads)",
    "Range": "z = Range(zero, end, step)",
    "constant": "n = Constant <value = int64[1] {1099511627776}> ()  z = Expand(one, n)",
}


def model(name: str) -> onnx.ModelProto:
    """y = x w + sum(z), where z is a vector of 2^40 integers."""
    return parse(
        f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[N, 4] x) => (float[N, 1] y)
          <float[4, 1] w = {{1, 2, 3, 4}}, int64[1] one = {{1}}, int64[1] size = {{{HUGE}}},
           int64[2] pads = {{0, {HUGE}}}, int64 zero = {{0}}, int64 end = {{{HUGE}}},
           int64 step = {{1}}>
        {{ {LONG[name]}  f = Cast <to = 1> (z)  s = ReduceSum <keepdims = 0> (f)
           m = MatMul(x, w)  y = Add(m, s) }}"""
    )


@pytest.mark.parametrize("name", LONG)
def test_a_vector_of_any_length_is_opened_and_named_when_it_does_not_fit(name: str) -> None:
    """ONNX's inference would make a list of its length."""
    assert makes_long_vectors(model(name).graph)
    trainer = Trainer(model(name), loss="mse")
    with pytest.raises(OnnxfitError, match=r"failed|cannot compile"):
        trainer.predict(np.ones((2, 4), np.float32))


def test_usual_sizes_and_ends_of_slices_are_not_long() -> None:
    usual = parse(
        f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[N, 4] x) => (float[N, 4] y)
          <int64[2] size = {{1, 4}}, int64[1] begin = {{0}}, int64[1] end = {{{2**63 - 1}}}>
        {{ s = Slice(x, begin, end)  y = Expand(s, size) }}"""
    )
    assert not makes_long_vectors(usual.graph)
