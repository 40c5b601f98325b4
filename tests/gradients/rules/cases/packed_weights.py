"""Products with weights that are packed in a few bits, and rows of a packed table.

The kernels take no float64, so each case has one judge, in float32. The closed forms in float64 are
in tests/gradients/rules/test_packed_weights.py.
"""

from __future__ import annotations

import onnxruntime

from tests.gradients.rules.cases import Case

# What onnxruntime 1.19 lacks: 2 and 8 bits, and GatherBlockQuantized.
IS_LATER = tuple(map(int, onnxruntime.__version__.split(".")[:2])) >= (1, 23)
BYTES = "1,18,35,52,69,86,103,120,137,154,171,188,205,222,239,240"
MORE_BYTES = f"{BYTES},15,30,45,60,75,90,105,120,135,150,165,180,195,210,225,241"
PACKED = f"uint8[2,2,8] b = {{{MORE_BYTES}}}"


def _case(
    name: str,
    inputs: str,
    call: str,
    constants: str,
    shapes: tuple[str, ...] = ("static", "batch", "any"),
) -> Case:
    return Case(
        name,
        inputs,
        f"y = com.microsoft.{call}",
        constants,
        low=-0.5,
        high=0.5,
        domains=("com.microsoft",),
        single=True,
        shapes=shapes,
    )


def _bits(
    name: str,
    arguments: str,
    constants: str,
    attributes: str = "K=32, N=2, bits=4, block_size=16",
    inputs: str = "float[2,32] a, float[4] s",
    shapes: tuple[str, ...] = ("static", "batch", "any"),
) -> Case:
    call = f"MatMulNBits<{attributes}>({arguments})"
    return _case(f"MatMulNBits {name}", inputs, call, constants, shapes)


def _floats(name: str, attributes: str, inputs: str, data: str) -> Case:
    call = f"MatMulBnb4<{attributes}, block_size=16>(a, b, s)"
    return _case(f"MatMulBnb4 {name}", inputs, call, f"uint8[{data.count(',') + 1}] b = {{{data}}}")


def _rows(name: str, arguments: str, constants: str, attributes: str = "") -> Case:
    settings = f"block_size=16, gather_axis=0, quantize_axis=1{attributes}"
    call = f"GatherBlockQuantized<{settings}>({arguments})"
    inputs = "float[2,1] s" if "bits=8" in attributes else "float[2,2] s"
    # the kernel insists on scales of known size
    return _case(f"GatherBlockQuantized {name}", inputs, call, constants, ("static",))


LATER = [
    _bits("8 bits", "a, b, s", PACKED.replace("2,2,8", "2,1,16"), "K=16, N=2, bits=8, block_size=16", "float[2,16] a, float[2,1] s"),
    _bits("8 bits, zero points", "a, b, s, z", f"{PACKED.replace('2,2,8', '1,2,16')}, uint8[2] z = {{120,140}}",
          "K=30, N=1, bits=8, block_size=16", "float[2,30] a, float[2] s"),
    _bits("2 bits", "a, b, s", PACKED.replace("2,2,8", "4,2,4"), "K=32, N=4, bits=2, block_size=16", "float[2,32] a, float[4,2] s"),
    _bits("2 bits, zero points", "a, b, s, z", f"{PACKED.replace('2,2,8', '4,2,4')}, uint8[4] z = {{1,6,11,12}}",
          "K=31, N=4, bits=2, block_size=16", "float[2,31] a, float[8] s"),
    _rows("rows", "d, i, s", f"uint8[2,16] d = {{{MORE_BYTES}}}, int64[2,3] i = {{0,1,1,0,1,1}}"),
    _rows("zero points", "d, i, s, z", f"uint8[2,16] d = {{{MORE_BYTES}}}, int32[3] i = {{1,0,1}}, uint8[2,1] z = {{35,148}}"),
    _rows("8 bits", "d, i, s", f"uint8[2,16] d = {{{MORE_BYTES}}}, int64[3] i = {{1,0,1}}", ", bits=8"),
] if IS_LATER else []  # fmt: skip

CASES = [
    _bits("4 bits", "a, b, s", PACKED),
    _bits("zero points", "a, b, s, z", f"{PACKED}, uint8[2] z = {{35,148}}"),
    _bits("zero points, three blocks", "a, b, s, z", f"uint8[1,3,8] b = {{{MORE_BYTES.rsplit(',', 8)[0]}}}, uint8[1,2] z = {{35,148}}",
          "K=48, N=1, bits=4, block_size=16", "float[2,48] a, float[1,3] s"),
    _bits("float zero points", "a, b, s, z", PACKED, inputs="float[2,32] a, float[4] s, float[4] z"),
    _bits("batch, K not a multiple", "a, b, s", PACKED, "K=30, N=2, bits=4, block_size=16", "float[2,1,30] a, float[2,2] s"),
    # the kernel insists on a bias of known size
    _bits("bias", "a, b, s, , , bias", PACKED, inputs="float[2,32] a, float[4] s, float[2] bias", shapes=("static", "batch")),
    _floats("floats", "K=8, N=4, quant_type=0", "float[2,8] a, float[2] s", BYTES),
    _floats("quantiles", "K=8, N=4, quant_type=1", "float[2,3,8] a, float[2] s", BYTES),
    _floats("an odd size", "K=7, N=3, quant_type=1", "float[2,7] a, float[2] s", BYTES.rsplit(",", 5)[0]),
    *LATER,
]  # fmt: skip
