"""Scales of frozen integers: what is smooth about quantised numbers.

The rest is in tests/gradients/rules/test_quantization.py.
"""

from __future__ import annotations

from tests.gradients.rules.cases import Case


def _scale(
    name: str, scale: str, integers: str, attributes: str = "", zero_point: str = ""
) -> Case:
    """DequantizeLinear has no float64: one judge, in float32."""
    return Case(
        f"DequantizeLinear {name}",
        f"float{scale} s, float[6] a",
        f"d = DequantizeLinear{f'<{attributes}>' if attributes else ''}(q,"
        f" s{', z' if zero_point else ''}) r = Reshape(d, flat) y = Mul(r, a)",
        f"{integers}, int64[1] flat = {{6}}" + (f", {zero_point}" if zero_point else ""),
        low=0.2,
        single=True,
    )


_Q = "int8[2,3] q = {-7,2,3,40,-5,6}"

CASES = [
    _scale("scalar", "", _Q),
    _scale("scalar zero point", "", _Q, zero_point="int8 z = {3}"),
    _scale("one", "[1]", _Q),
    _scale("rows", "[2]", _Q, "axis=0", "int8[2] z = {3,-1}"),
    _scale("columns", "[3]", _Q, "", "int8[3] z = {3,-1,0}"),
    _scale("columns from behind", "[3]", _Q, "axis=-1"),
    _scale("middle", "[3]", "uint8[1,3,2] q = {7,2,3,40,5,6}", "axis=1", "uint8[3] z = {1,2,3}"),
    _scale("vector", "[6]", "uint8[6] q = {7,2,3,40,5,6}", "axis=0"),
    _scale("int32", "", "int32[2,3] q = {-700,2,3,40,-5,6}"),
    _scale(
        "blocks",
        "[1,3]",
        "int8[2,3] q = {-7,2,3,40,-5,6}",
        "axis=0, block_size=2",
        "int8[1,3] z = {3,-1,0}",
    ),
    _scale(
        "blocks, the last not full", "[2,2]", _Q, "axis=1, block_size=2", "int8[2,2] z = {3,-1,0,1}"
    ),
    _scale(
        "blocks from behind", "[1,3,1]", "uint8[1,3,2] q = {7,2,3,40,5,6}", "axis=-1, block_size=2"
    ),
    Case(
        "DequantizeLinear of com.microsoft",
        "float[2] s",
        "d = com.microsoft.DequantizeLinear<axis=0>(q, s, z) y = Mul(d, d)",
        f"{_Q}, int8[2] z = {{3,-1}}",
        low=0.2,
        domains=("com.microsoft",),
        single=True,
    ),
]
