"""onnxruntime's gradients against finite differences in float64: right, or refused with a reason;
never wrong.
"""

# a case is a row of a table

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

from onnxfit.errors import GradientError
from onnxfit.gradients import reachable
from onnxfit.gradients.onnxruntime import builder as source
from onnxfit.gradients.onnxruntime.coverage import BY_RULES, CHECKS
from onnxfit.graph.model import infer_shapes
from tests.builds import needs_builder

pytestmark = needs_builder


@dataclass(frozen=True)
class Case:
    """`body` computes y from the inputs; the loss is the sum of y times random numbers, or the
    body's own `loss`.
    """

    name: str
    inputs: str  # as onnx's text format has them; the float ones are the weights
    body: str
    constants: str = ""
    low: float = -2.0
    high: float = 2.0
    frozen: tuple[str, ...] = ()


def unary(op: str, low: float = -2.0, high: float = 2.0) -> Case:
    return Case(op, "float[2,3] a", f"y = {op}(a)", low=low, high=high)


def reductions() -> list[Case]:
    cases = []
    for op in ("ReduceSum", "ReduceMean", "ReduceL2", "ReduceLogSumExp"):
        for keep in (0, 1):
            cases.append(
                Case(
                    f"{op} axes keepdims={keep}",
                    "float[2,3,4] a",
                    f"y = {op}<keepdims={keep}>(a, axes)",
                    "int64[2] axes = {0, -1}",
                    0.3,
                    2,
                )
            )
            cases.append(
                Case(
                    f"{op} all keepdims={keep}",
                    "float[2,3] a",
                    f"y = {op}<keepdims={keep}>(a)",
                    low=0.3,
                )
            )
        cases.append(
            Case(
                f"{op} axis", "float[2,3,4] a", f"y = {op}(a, axes)", "int64[1] axes = {1}", 0.3, 2
            )
        )
        cases.append(
            Case(
                f"{op} empty axes",
                "float[2,3] a",
                f"y = {op}(a, axes)",
                "int64[0] axes = {}",
                low=0.3,
            )
        )
    return cases


def binary(op: str, low: float = -2.0) -> list[Case]:
    return [
        Case(f"{op}", "float[2,3] a, float[2,3] b", f"y = {op}(a, b)", low=low),
        Case(f"{op} row", "float[2,3] a, float[3] b", f"y = {op}(a, b)", low=low),
        Case(f"{op} column", "float[2,3] a, float[2,1] b", f"y = {op}(a, b)", low=low),
        Case(f"{op} row left", "float[3] a, float[2,3] b", f"y = {op}(a, b)", low=low),
        Case(f"{op} both ways", "float[2,1] a, float[1,3] b", f"y = {op}(a, b)", low=low),
        Case(f"{op} scalar", "float[2,3] a, float b", f"y = {op}(a, b)", low=low),
        Case(f"{op} same leaf", "float[2,3] a", f"y = {op}(a, a)", low=low),
        Case(f"{op} same value", "float[2,3] a", f"h = Tanh(a) y = {op}(h, h)", low=low),
        Case(f"{op} constant", "float[2,3] a", f"y = {op}(a, c)", "float c = {1.5}", low=low),
        Case(f"{op} ones", "float[1,3] a, float[2,1,1] b", f"y = {op}(a, b)", low=low),
    ]


def pools() -> list[Case]:
    cases = []
    for op in ("MaxPool", "AveragePool"):
        for attributes in (
            "kernel_shape=[2,2]",
            "kernel_shape=[2,2], strides=[2,2]",
            "kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]",
            "kernel_shape=[3,3], strides=[2,2], ceil_mode=1",
            'kernel_shape=[3,3], strides=[2,2], auto_pad="SAME_UPPER"',
            'kernel_shape=[2,2], auto_pad="SAME_LOWER"',
            'kernel_shape=[2,2], auto_pad="VALID"',
            "kernel_shape=[2,2], dilations=[2,2]",
            *(
                (
                    "kernel_shape=[3,3], pads=[1,1,1,1], count_include_pad=1",
                    (
                        "kernel_shape=[3,3], pads=[1,1,1,1], strides=[2,2], ceil_mode=1,"
                        " count_include_pad=1"
                    ),
                )
                if op == "AveragePool"
                else ("kernel_shape=[2,2], storage_order=1",)
            ),
        ):
            cases.append(
                Case(f"{op} {attributes}", "float[2,1,5,5] a", f"y = {op}<{attributes}>(a)")
            )
        cases.append(
            Case(f"{op} 1-D", "float[2,2,7] a", f"y = {op}<kernel_shape=[3], strides=[2]>(a)")
        )
        cases.append(
            Case(
                f"{op} 3-D",
                "float[1,2,4,4,4] a",
                f"y = {op}<kernel_shape=[2,2,2], strides=[2,2,2]>(a)",
            )
        )
    cases.append(
        Case("MaxPool indices used", "float[2,2,4,4] a", "y, i = MaxPool<kernel_shape=[2,2]>(a)")
    )
    for op in ("GlobalAveragePool",):
        cases += [
            Case(op, "float[2,2,3,4] a", f"y = {op}(a)"),
            Case(f"{op} 1-D", "float[2,2,5] a", f"y = {op}(a)"),
            Case(f"{op} 3-D", "float[2,2,2,3,2] a", f"y = {op}(a)"),
        ]

    return cases


def convolutions() -> list[Case]:
    cases = []
    for attributes in (
        "", "<pads=[1,1,1,1]>", "<strides=[2,2]>", "<pads=[1,0,2,1], strides=[2,1]>", "<dilations=[2,2]>", '<auto_pad="SAME_UPPER", strides=[2,2]>',
        '<auto_pad="SAME_LOWER">', '<auto_pad="VALID">', "<kernel_shape=[3,3]>",
    ):  # fmt: skip
        cases.append(
            Case(
                f"Conv {attributes}",
                "float[2,1,5,5] a, float[2,1,3,3] b",
                f"y = Conv{attributes}(a, b)",
            )
        )
        cases.append(
            Case(
                f"Conv bias {attributes}",
                "float[2,1,5,5] a, float[2,1,3,3] b, float[2] c",
                f"y = Conv{attributes}(a, b, c)",
            )
        )
    cases.append(
        Case(
            "Conv weight only",
            "float[3,2,3,3] b, float[3] c",
            "y = Conv<pads=[1,1,1,1]>(x, b, c)",
            "float[1,2,2,2] x = {1,2,3,4,5,6,7,8}",
        )
    )
    cases.append(
        Case("Conv group", "float[2,4,3,3] a, float[4,2,2,2] b", "y = Conv<group=2>(a, b)")
    )
    cases.append(
        Case(
            "Conv depthwise",
            "float[2,4,3,3] a, float[4,1,2,2] b, float[4] c",
            "y = Conv<group=4, pads=[1,1,1,1]>(a, b, c)",
        )
    )
    cases.append(Case("Conv 1-D", "float[2,3,6] a, float[2,3,3] b", "y = Conv<strides=[2]>(a, b)"))
    cases.append(
        Case(
            "Conv 1-D same",
            "float[2,2,7] a, float[3,2,4] b",
            'y = Conv<auto_pad="SAME_UPPER">(a, b)',
        )
    )
    cases.append(Case("Conv 3-D", "float[1,2,4,4,4] a, float[2,2,2,2,2] b", "y = Conv(a, b)"))

    return cases


def moving() -> list[Case]:
    """Operators that move elements."""
    a = "float[2,3,4] a"
    return [
        Case("Reshape", a, "y = Reshape(a, s)", "int64[2] s = {4, 6}"),
        Case("Reshape -1 0", a, "y = Reshape(a, s)", "int64[2] s = {0, -1}"),
        Case("Reshape allowzero", a, "y = Reshape<allowzero=1>(a, s)", "int64[2] s = {4, 6}"),
        Case(
            "Reshape by Shape",
            "float[2,3] a, float[3,2] b",
            "s = Shape(b) h = Reshape(a, s) y = Mul(h, b)",
        ),
        Case("Flatten", a, "y = Flatten(a)"),
        Case("Flatten 2", a, "y = Flatten<axis=2>(a)"),
        Case("Reshape to a scalar", "float[1,1] a", "y = Reshape(a, s)", "int64[0] s = {}"),
        Case("Unsqueeze a scalar", "float a", "y = Unsqueeze(a, x)", "int64[1] x = {0}"),
        Case("Flatten 0", a, "y = Flatten<axis=0>(a)"),
        Case("Flatten -1", a, "y = Flatten<axis=-1>(a)"),
        Case("Squeeze", "float[2,1,3,1] a", "y = Squeeze(a, x)", "int64[1] x = {1}"),
        Case("Squeeze all", "float[2,1,3,1] a", "y = Squeeze(a)"),
        Case("Squeeze negative", "float[2,1,3,1] a", "y = Squeeze(a, x)", "int64[1] x = {-1}"),
        Case("Unsqueeze", "float[2,3] a", "y = Unsqueeze(a, x)", "int64[2] x = {0, 3}"),
        Case("Unsqueeze negative", "float[2,3] a", "y = Unsqueeze(a, x)", "int64[2] x = {-1, 0}"),
        Case("Transpose", a, "y = Transpose<perm=[2,0,1]>(a)"),
        Case("Transpose default", a, "y = Transpose(a)"),
        Case("Concat", "float[2,3] a, float[1,3] b", "y = Concat<axis=0>(a, b)"),
        Case(
            "Concat -1", "float[2,3] a, float[2,2] b, float[2,1] c", "y = Concat<axis=-1>(a, b, c)"
        ),
        Case("Concat same leaf", "float[2,3] a", "y = Concat<axis=1>(a, a)"),
        Case("Concat one", "float[2,3] a", "y = Concat<axis=1>(a)"),
        Case("Concat frozen", "float[2,3] a", "y = Concat<axis=0>(c, a)", "float[1,3] c = {1,2,3}"),
        Case("Split", "float[4,3] a", "u, v = Split<num_outputs=2>(a) y = Mul(u, v)"),
        Case(
            "Split sizes",
            "float[5,3] a",
            "u, v, w = Split(a, s) p = Mul(u, v) y = Concat<axis=0>(p, w)",
            "int64[3] s = {2, 2, 1}",
        ),
        Case(
            "Split axis",
            "float[2,6] a",
            "u, v, w = Split<axis=1, num_outputs=3>(a) p = Mul(u, v) y = Add(p, w)",
        ),
        Case(
            "Split uneven",
            "float[5,3] a",
            "u, v = Split<num_outputs=2>(a) s = ReduceSum<keepdims=0>(v) y = Mul(u, s)",
        ),
        Case(
            "Split negative axis",
            "float[2,6] a",
            "u, v = Split<axis=-1, num_outputs=2>(a) y = Mul(u, v)",
        ),
        Case("Split unused", "float[4,3] a", "u, v = Split<num_outputs=2>(a) y = Tanh(u)"),
        Case(
            "Split second unused of three",
            "float[5,3] a",
            "u, v, w = Split(a, s) y = Concat<axis=0>(w, u)",
            "int64[3] s = {2, 2, 1}",
        ),
        Case("Slice", a, "y = Slice(a, s, e)", "int64[2] s = {0, 1}, int64[2] e = {1, 3}"),
        Case(
            "Slice axes",
            a,
            "y = Slice(a, s, e, x)",
            "int64[1] s = {1}, int64[1] e = {9}, int64[1] x = {-1}",
        ),
        Case(
            "Slice steps",
            a,
            "y = Slice(a, s, e, x, t)",
            "int64[2] s = {-1, 0}, int64[2] e = {-9, 3}, int64[2] x = {2, 1}, int64[2] t = {-2, 2}",
        ),
        Case("Gather", a, "y = Gather(a, i)", "int64[3] i = {0, 1, 0}"),
        Case("Gather axis", a, "y = Gather<axis=1>(a, i)", "int64[2,2] i = {0, -1, 2, 2}"),
        Case("Gather negative axis", a, "y = Gather<axis=-1>(a, i)", "int64[2] i = {3, 0}"),
        Case("Gather scalar", a, "y = Gather<axis=1>(a, i)", "int64 i = {2}"),
        Case("Gather int32", a, "y = Gather(a, i)", "int32[3] i = {0, 1, 0}"),
        Case(
            "GatherElements",
            "float[2,3] a",
            "y = GatherElements<axis=1>(a, i)",
            "int64[2,2] i = {0, 0, 2, -1}",
        ),
        Case(
            "GatherElements axis 0",
            "float[2,3] a",
            "y = GatherElements(a, i)",
            "int64[1,3] i = {0, 1, 0}",
        ),
        Case("GatherND", a, "y = GatherND(a, i)", "int64[2,2] i = {0, 1, 1, 1}"),
        Case("GatherND repeated", a, "y = GatherND(a, i)", "int64[2,1] i = {1, 1}"),
        Case("GatherND batch", a, "y = GatherND<batch_dims=1>(a, i)", "int64[2,1] i = {1, 0}"),
        Case("GatherND negative", a, "y = GatherND(a, i)", "int64[2,2] i = {0, -1, -1, 1}"),
        Case("Expand", "float[3,1] a", "y = Expand(a, s)", "int64[3] s = {2, 3, 4}"),
        Case("Expand same", "float[3,2] a", "y = Expand(a, s)", "int64[2] s = {3, 2}"),
        Case("Expand smaller", "float[3,2] a", "y = Expand(a, s)", "int64[1] s = {1}"),
        Case("Expand scalar", "float a", "y = Expand(a, s)", "int64[2] s = {2, 3}"),
        Case(
            "Expand by Shape",
            "float[3] a, float[2,3] b",
            "s = Shape(b) h = Expand(a, s) y = Mul(h, b)",
        ),
        Case("Tile", "float[2,3] a", "y = Tile(a, r)", "int64[2] r = {2, 3}"),
        Case("Trilu", "float[3,4] a", "y = Trilu(a)"),
        Case("Trilu lower k", "float[2,3,4] a", "y = Trilu<upper=0>(a, k)", "int64 k = {1}"),
        Case("Pad", "float[2,3] a", "y = Pad(a, p)", "int64[4] p = {1, 0, 2, 1}"),
        Case(
            "Pad value",
            "float[2,3] a",
            "y = Pad(a, p, v)",
            "int64[4] p = {1, 0, 2, 1}, float v = {3}",
        ),
        Case("Pad negative", "float[3,4] a", "y = Pad(a, p)", "int64[4] p = {-1, 0, 2, -1}"),
        Case(
            "Pad axes",
            "float[2,3] a",
            "y = Pad(a, p, v, x)",
            "int64[2] p = {1, 2}, float v = {0}, int64[1] x = {-1}",
        ),
        Case(
            "Pad reflect",
            "float[3,4] a",
            'y = Pad<mode="reflect">(a, p)',
            "int64[4] p = {1, 0, 2, 1}",
        ),
        Case("Pad edge", "float[3,4] a", 'y = Pad<mode="edge">(a, p)', "int64[4] p = {1, 0, 2, 1}"),
        Case("Pad wrap", "float[3,4] a", 'y = Pad<mode="wrap">(a, p)', "int64[4] p = {1, 0, 2, 1}"),
        Case(
            "Pad trained value",
            "float[3,4] a, float v",
            "y = Pad(a, p, v)",
            "int64[4] p = {1, 0, 2, 1}",
        ),
        Case(
            "ScatterElements",
            "float[3,3] a, float[1,2] b",
            "y = ScatterElements<axis=1>(a, i, b)",
            "int64[1,2] i = {2, 0}",
        ),
        Case(
            "ScatterElements negative",
            "float[3,3] a, float[1,2] b",
            "y = ScatterElements<axis=1>(a, i, b)",
            "int64[1,2] i = {-1, 0}",
        ),
        *(
            Case(
                f"ScatterElements {r}",
                "float[3,3] a, float[1,2] b",
                f'y = ScatterElements<axis=1, reduction="{r}">(a, i, b)',
                "int64[1,2] i = {2, 2}",
            )
            for r in ("add", "mul", "max", "min")
        ),
        Case(
            "ScatterND",
            "float[4,3] a, float[2,3] b",
            "y = ScatterND(a, i, b)",
            "int64[2,1] i = {2, 0}",
        ),
        *(
            Case(
                f"ScatterND {r}",
                "float[4,3] a, float[2,3] b",
                f'y = ScatterND<reduction="{r}">(a, i, b)',
                "int64[2,1] i = {2, 2}",
            )
            for r in ("add", "mul", "max", "min")
        ),
        Case("TopK", "float[2,4] a", "y, i = TopK(a, k)", "int64[1] k = {2}"),
        Case(
            "TopK smallest axis 0",
            "float[4,3] a",
            "y, i = TopK<axis=0, largest=0>(a, k)",
            "int64[1] k = {2}",
        ),
    ]


def products() -> list[Case]:
    shapes = [
        ("2,3", "3,4"),
        ("2,2,3", "3,4"),
        ("2,2,3", "2,3,4"),
        ("2,1,2,3", "3,3,4"),
        ("2,3", "2,3,4"),
        ("2,3", "3"),
        ("3", "3,4"),
        ("3", "3"),
        ("2,2,3", "3"),
        ("3", "2,3,4"),
        ("1,2,3", "2,3,2"),
        ("2,2,3", "1,3,2"),
    ]
    cases = [
        Case(f"MatMul {a} @ {b}", f"float[{a}] a, float[{b}] b", "y = MatMul(a, b)")
        for a, b in shapes
    ]
    cases += [
        Case("MatMul same leaf", "float[3,3] a", "y = MatMul(a, a)"),
        Case("MatMul frozen right", "float[2,2] a", "y = MatMul(a, c)", "float[2,2] c = {1,2,3,4}"),
        Case("MatMul frozen left", "float[2,2] a", "y = MatMul(c, a)", "float[2,2] c = {1,2,3,4}"),
        Case("Gemm", "float[2,3] a, float[3,4] b", "y = Gemm(a, b)"),
        Case("Gemm row", "float[2,3] a, float[3,4] b, float[4] c", "y = Gemm(a, b, c)"),
        Case("Gemm column", "float[2,3] a, float[3,4] b, float[2,1] c", "y = Gemm(a, b, c)"),
        Case("Gemm scalar", "float[2,3] a, float[3,4] b, float c", "y = Gemm(a, b, c)"),
        Case("Gemm one", "float[2,3] a, float[3,4] b, float[1] c", "y = Gemm(a, b, c)"),
        Case(
            "Gemm full",
            "float[2,3] a, float[3,4] b, float[2,4] c",
            "y = Gemm<alpha=0.5, beta=2.0>(a, b, c)",
        ),
        Case(
            "Gemm transposed",
            "float[3,2] a, float[4,3] b, float[4] c",
            "y = Gemm<transA=1, transB=1, alpha=0.5, beta=0.25>(a, b, c)",
        ),
        Case(
            "Gemm transB", "float[2,3] a, float[4,3] b, float[1,4] c", "y = Gemm<transB=1>(a, b, c)"
        ),
        Case(
            "Gemm transA", "float[3,2] a, float[3,4] b, float[4] c", "y = Gemm<transA=1>(a, b, c)"
        ),
        Case(
            "Gemm beta 0", "float[2,3] a, float[3,4] b, float[4] c", "y = Gemm<beta=0.0>(a, b, c)"
        ),
        Case("Gemm same leaf", "float[3,3] a", "y = Gemm(a, a, a)"),
        Case(
            "Gemm only c",
            "float[4] c",
            "y = Gemm(x, z, c)",
            "float[2,1] x = {1,2}, float[1,4] z = {1,2,3,4}",
        ),
    ]
    return cases


def powers() -> list[Case]:
    base = "float[2,3] a"
    return [
        *(
            Case(f"Pow {e}", base, "y = Pow(a, e)", f"float e = {{{e}}}", 0.3)
            for e in (2, 3, 0.5, -1, 1, 0)
        ),
        Case("Pow 2 negative base", base, "y = Pow(a, e)", "float e = {2}"),
        Case("Pow 3 negative base", base, "y = Pow(a, e)", "float e = {3}"),
        Case("Pow int64", base, "y = Pow(a, e)", "int64 e = {3}"),
        Case("Pow int32", base, "y = Pow(a, e)", "int32[1] e = {2}"),
        Case("Pow row", base, "y = Pow(a, e)", "float[3] e = {2, 0.5, 3}", 0.3),
        Case(
            "Pow longer exponent",
            "float[3] a",
            "y = Pow(a, e)",
            "float[2,3] e = {2, 0.5, 3, 1, 1, 2}",
            0.3,
        ),
        Case("Pow constant base", base, "y = Pow(c, a)", "float c = {2}"),
        Case("Pow trained exponent", "float[2,3] a, float[2,3] b", "y = Pow(a, b)", low=0.3),
        Case(
            "Pow computed exponent",
            "float[2,3] a, float[2,3] b",
            "h = Tanh(b) y = Pow(a, h)",
            low=0.3,
        ),
        Case("Pow leaf to itself", base, "y = Pow(a, a)", low=0.3),
    ]


def choices() -> list[Case]:
    c = "bool[2,3] c = {1,0,1,0,0,1}"
    return [
        Case("Where", "float[2,3] a, float[2,3] b", "y = Where(c, a, b)", c),
        Case("Where row", "float[2,3] a, float[3] b", "y = Where(c, a, b)", c),
        Case("Where scalar", "float a, float[2,3] b", "y = Where(c, a, b)", c),
        Case("Where both small", "float[3] a, float[2,1] b", "y = Where(c, a, b)", c),
        Case(
            "Where small condition",
            "float[2,3] a, float[2,3] b",
            "y = Where(c, a, b)",
            "bool[3] c = {1,0,1}",
        ),
        Case("Where constant", "float[2,3] a", "y = Where(c, a, z)", c + ", float z = {0}"),
        Case("Where constant left", "float[2,3] a", "y = Where(c, z, a)", c + ", float[1] z = {0}"),
        Case(
            "Where small beside constant",
            "float[3] a",
            "y = Where(c, z, a)",
            c + ", float[1] z = {0}",
        ),
        Case("Where same leaf", "float[2,3] a", "y = Where(c, a, a)", c),
        Case(
            "Where computed condition",
            "float[2,3] a, float[2,3] b",
            "c = Greater(a, b) y = Where(c, a, b)",
        ),
        Case("Clip", "float[2,3] a", "y = Clip(a, l, h)", "float l = {-0.5}, float h = {0.5}"),
        Case("Clip low", "float[2,3] a", "y = Clip(a, l)", "float l = {-0.5}"),
        Case("Clip high", "float[2,3] a", "y = Clip(a, , h)", "float h = {0.5}"),
        Case("Clip none", "float[2,3] a", "y = Clip(a)"),
        Case("Clip trained", "float[2,3] a, float b", "y = Clip(a, b)"),
        Case("Clip trained high", "float[2,3] a, float b", "y = Clip(a, , b)"),
        *(
            case
            for op in ("Max", "Min")
            for case in (
                *binary(op),
                Case(f"{op} three", "float[2,3] a, float[3] b, float[2,1] c", f"y = {op}(a, b, c)"),
                Case(f"{op} one", "float[2,3] a", f"y = {op}(a)"),
            )
        ),
    ]


def flat() -> list[Case]:
    """Operators without a derivative, beside a path that has one."""
    cases = [
        Case(f"{op} beside", "float[2,3] a", f"h = {op}(a) y = Mul(h, a)")
        for op in ("Ceil", "Floor", "Round", "Sign", "Hardmax")
    ]
    cases += [
        Case(
            f"{op} beside",
            "float[2,3] a, float[2,3] b",
            f"c = {op}(a, b) h = Cast<to=1>(c) y = Mul(h, a)",
            frozen=("b",),
        )
        for op in ("Greater", "Less", "Equal", "GreaterOrEqual", "LessOrEqual")
    ]
    return [
        *cases,
        Case("straight through", "float[2,3] a", "h = Round(a) d = Sub(h, a) y = Add(d, a)"),
        Case(
            "ArgMax beside",
            "float[2,3] a",
            "i = ArgMax<axis=1, keepdims=0>(a) h = Cast<to=1>(i) s = ReduceSum<keepdims=0>(h) y ="
            " Mul(a, s)",
        ),
        Case(
            "Shape beside",
            "float[2,3] a",
            "s = Shape(a) h = Cast<to=1>(s) t = ReduceSum<keepdims=0>(h) y = Div(a, t)",
        ),
        Case("Size beside", "float[2,3] a", "s = Size(a) h = Cast<to=1>(s) y = Div(a, h)"),
        Case("IsNaN beside", "float[2,3] a", "n = IsNaN(a) y = Where(n, z, a)", "float z = {0}"),
        Case("IsInf beside", "float[2,3] a", "n = IsInf(a) y = Where(n, z, a)", "float z = {0}"),
        Case(
            "NonZero beside",
            "float[2,3] a",
            "r = Relu(a) n = NonZero(r) t = Transpose(n) g = GatherND(a, t) s ="
            " ReduceSum<keepdims=0>(g) y = Mul(s, a)",
        ),
        Case(
            "OneHot beside",
            "float[3] a",
            "i = ArgMax<axis=0>(a) o = OneHot(i, d, v) y = Mul(o, a)",
            "int64[1] d = {3}, float[2] v = {0, 1}",
        ),
        Case(
            "CastLike beside",
            "float[2,3] a, float[2,3] b",
            "i = Shape(a) h = CastLike(i, b) s = ReduceSum<keepdims=0>(h) p = Mul(a, b) y ="
            " Mul(p, s)",
        ),
        Case(
            "mask",
            "float[2,3] a",
            "c = Greater(a, z) m = Cast<to=1>(c) y = Mul(a, m)",
            "float z = {0}",
        ),
        Case("EyeLike beside", "float[3,3] a", "e = EyeLike(a) y = Add(a, e)"),
    ]


def activations() -> list[Case]:
    plain = [
        "Abs",
        "Cos",
        "Erf",
        "Exp",
        "Identity",
        "Neg",
        "Relu",
        "Sigmoid",
        "Sin",
        "Tanh",
    ]
    cases = [unary(op) for op in plain]
    cases += [unary(op, 0.3) for op in ("Log", "Sqrt", "Reciprocal")]
    for op, attributes in (
        ("LeakyRelu", "<alpha=0.2>"), ("LeakyRelu", ""), ("Gelu", ""), ("Gelu", '<approximate="tanh">'), ("Softmax", ""), ("Softmax", "<axis=0>"),
        ("Softmax", "<axis=1>"), ("Softmax", "<axis=-1>"), ("LogSoftmax", ""), ("LogSoftmax", "<axis=0>"), ("Hardmax", ""),
    ):  # fmt: skip
        cases.append(Case(f"{op} {attributes}", "float[3,4] a", f"y = {op}{attributes}(a)"))
    cases += [
        Case("Softmax 3-D middle", "float[2,3,4] a", "y = Softmax<axis=1>(a)"),
        Case("LogSoftmax 3-D middle", "float[2,3,4] a", "y = LogSoftmax<axis=1>(a)"),
        Case("Softmax vector", "float[4] a", "y = Softmax(a)"),
        Case("ReduceSum scalar", "float a", "y = ReduceSum<keepdims=0>(a)"),
        Case("ReduceL2 scalar", "float a", "y = ReduceL2<keepdims=0>(a)"),
        Case("Cast double", "float[2,3] a", "d = Cast<to=11>(a) e = Mul(d, d) y = Cast<to=1>(e)"),
        Case("Cast same", "float[2,3] a", "y = Cast<to=1>(a)"),
        Case(
            "Shape of intermediate",
            "float[2,3] a",
            "t = Tanh(a) s = Shape(t) c = ConstantOfShape<value = float[1] one = {2.0}>(s) y ="
            " Mul(t, c)",
        ),
    ]
    return cases


def normalisations() -> list[Case]:
    return [
        Case(
            "BatchNormalization off the path",
            "float[2,3] a",
            "n = BatchNormalization(f, s, b, m, v) y = Mul(a, n)",
            "float[2,3] f = {1,2,3,4,5,6}, float[3] s = {1,0.5,2}, float[3] b = {1,0,2}, float[3] m"
            " = {1,0,2}, float[3] v = {1,2,0.5}",
        ),
        Case(
            "Dropout off the path",
            "float[2,3] a",
            "d, m = Dropout(f, r) y = Mul(a, d)",
            "float r = {0.4}, float[2,3] f = {1,2,3,4,5,6}",
        ),
        Case(
            "DequantizeLinear frozen",
            "float[2,2] a",
            "w = DequantizeLinear(q, s) y = MatMul(a, w)",
            "int8[2,2] q = {1,2,3,4}, float s = {0.1}",
        ),
    ]


CASES = {
    case.name: case
    for case in (
        *activations(), *(c for op in ("Add", "Sub", "Mul") for c in binary(op)), *binary("Div", 0.5), *reductions(), *products(), *powers(), *choices(),
        *flat(), *moving(), *convolutions(), *pools(), *normalisations(),
    )
}  # fmt: skip

VARIANTS = ("static", "batch", "equal sizes", "any sizes")


def dimensions(case: Case, variant: str) -> str:
    """The case's inputs with symbolic sizes: of the first axis, one name per size, or one name per
    axis.
    """
    first: list[str] = []

    def rename(match: re.Match[str]) -> str:
        sizes, name = match[1].split(","), match[2]
        if variant == "batch":
            first[:] = first or [sizes[0], str(len(sizes))]
            sizes[0] = "N" if first == [sizes[0], str(len(sizes))] and sizes[0] != "1" else sizes[0]
        elif variant == "equal sizes":
            sizes = [s if s == "1" else f"D{s}" for s in sizes]
        elif variant == "any sizes":
            sizes = [f"{name}{i}" for i in range(len(sizes))]
        return f"[{','.join(sizes)}] {name}"

    return re.sub(r"\[([\d,]+)\] (\w+)", rename, case.inputs)


def model_of(case: Case, variant: str = "static") -> onnx.ModelProto:
    constants = ", ".join(filter(None, [case.constants, "float loss_k = {1.7}"]))
    text = f"""<ir_version: 10, opset_import: ["": 21]>
        g ({dimensions(case, variant)}) => (float loss) <{constants}>
        {{ {case.body}  loss_z = Mul(y, loss_k)  loss_p = Sin(loss_z)  loss = ReduceSum<keepdims = 0>(loss_p) }}"""
    model = onnx.parser.parse_model(text)
    model.graph.output.append(onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None))
    return model


def feeds_of(case: Case) -> dict[str, np.ndarray]:
    """Random numbers with a distance between any two of them, so that no maximum and no Relu is
    near its kink.
    """
    rng = np.random.default_rng(len(case.name) + 18)
    model = model_of(case)
    shapes = {
        v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input
    }
    sizes = [int(np.prod(shape)) for shape in shapes.values()]
    gap = (case.high - case.low) / sum(sizes)
    numbers = iter(
        rng.permutation(
            case.low + gap * (np.arange(sum(sizes)) + rng.uniform(0.35, 0.65, sum(sizes)))
        )
    )
    return {
        name: np.array([next(numbers) for _ in range(size)]).reshape(shape)
        for (name, shape), size in zip(shapes.items(), sizes)
    }


def in_double(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same computation in float64."""
    model = onnx.ModelProto.FromString(model.SerializeToString())

    def widen(tensor: onnx.TensorProto) -> None:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            tensor.CopyFrom(
                onnx.numpy_helper.from_array(
                    onnx.numpy_helper.to_array(tensor).astype(np.float64), tensor.name
                )
            )

    del model.graph.value_info[:]
    for tensor in model.graph.initializer:
        widen(tensor)
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                widen(attribute.t)
            if node.op_type == "Cast" and attribute.i == onnx.TensorProto.FLOAT:
                attribute.i = onnx.TensorProto.DOUBLE
    return model


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def evaluators(model: onnx.ModelProto):
    """Ways to compute the loss, the most precise first; not every one has every operator, or has it
    right.
    """
    wide = in_double(model)
    yield lambda: session(wide).run
    yield lambda: ReferenceEvaluator(wide).run
    single = session(model)
    yield (
        lambda: (
            lambda outputs, feeds: single.run(
                outputs, {n: a.astype(np.float32) for n, a in feeds.items()}
            )
        )
    )


def finite_differences(case: Case) -> dict[str, np.ndarray]:
    """Of fourth order, so that a step may be large enough for an evaluator that computes in float32
    somewhere.
    """
    feeds, model = feeds_of(case), model_of(case)
    wanted = session(model).run(["loss"], {n: a.astype(np.float32) for n, a in feeds.items()})[0]
    for make in evaluators(model):
        try:
            run = make()
            value = run(["loss"], feeds)[0]
        except Exception:
            continue
        if np.allclose(value, wanted, rtol=1e-4, atol=1e-4):
            break

    value = float(value)

    def loss(name: str, index: tuple[int, ...], step: float) -> float:
        shifted = feeds | {name: feeds[name].copy()}
        shifted[name][index] += step
        return float(run(["loss"], shifted)[0])

    def derivative(name: str, index: tuple[int, ...], step: float) -> float:
        near, far = (loss(name, index, k * step) - loss(name, index, -k * step) for k in (1, 2))
        return (8 * near - far) / (12 * step)

    rng = np.random.default_rng(0)
    direction = {n: rng.uniform(0.5, 1.5, a.shape) for n, a in feeds.items()}
    ends = [
        float(
            run(["loss"], {n: np.asarray(a + k * 1e-6 * direction[n]) for n, a in feeds.items()})[0]
        )
        - value
        for k in (1, 2, 3)
    ]
    precise = ends[0] != 0 and all(
        abs(end - k * ends[0]) <= 1e-3 * abs(ends[0]) for k, end in enumerate(ends, start=1)
    )
    step = 1e-5 if precise else 4e-3
    return {
        name: (
            np.array([derivative(name, i, step) for i in np.ndindex(array.shape)]).reshape(
                array.shape
            )
        )
        for name, array in feeds.items()
    }


true_gradients = cache(finite_differences)


def parsed(graph: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {graph}')


def prepared(model: onnx.ModelProto | str) -> ir.Model:
    return infer_shapes(ir.from_proto(parsed(model) if isinstance(model, str) else model))


def with_gradient_outputs(model: onnx.ModelProto, weights: list[str]) -> onnx.ModelProto:
    """The model with an output `gradient of <weight>` per weight."""
    differentiated, found = source.add_gradients(prepared(model), "loss", weights)
    proto = ir.to_proto(differentiated)
    for weight, gradient in found.items():
        proto.graph.node.append(
            onnx.helper.make_node("Identity", [gradient], [f"gradient of {weight}"])
        )
        element = next(v.type.tensor_type.elem_type for v in proto.graph.input if v.name == weight)
        proto.graph.output.append(
            onnx.helper.make_tensor_value_info(f"gradient of {weight}", element, None)
        )
    return proto


def gradients(
    model: onnx.ModelProto | str, feeds: dict[str, np.ndarray], weights: list[str] | None = None
) -> dict[str, np.ndarray]:
    """What a session computes for the gradients of the loss, after a look at the outputs: they are
    what they were.
    """
    model = parsed(model) if isinstance(model, str) else model
    weights = list(feeds) if weights is None else weights
    results = session(with_gradient_outputs(model, weights)).run(None, feeds)
    for before, after in zip(session(model).run(None, feeds), results):
        np.testing.assert_allclose(
            after, before, rtol=1e-4, atol=1e-5, err_msg="the forward computation"
        )
    return dict(zip(weights, results[len(model.graph.output) :]))


# The law
# ---------------------------------------------------------------------------------------------------------------------

# What is refused even with every size known, and why.
REFUSED = {
    "(AveragePool|Conv) .*auto_pad|Conv 1-D same": "auto_pad=",
    "AveragePool .*ceil_mode": "ceil_mode=1",
    "AveragePool .*dilations": "dilations",
    "Clip trained|Pow (trained|computed) exponent|Pow leaf to itself|Pow constant base": (
        "no gradient with respect to its parameters"
    ),
    "(Clip none|(Max|Min) one)$": "one input",
    "Gemm beta 0": "beta=0",
    "Hardmax $": "does not depend on a in a differentiable way",
    "MatMul (3 @|.*@ 3$)": "rank 1",
    "MaxPool .*storage_order": "storage_order=1",
    "Pad (reflect|edge|wrap)": "mode=",
    "Pad axes": "axes are an input",
    "Pad trained value": "no gradient with respect to its parameters",
    "Pow 0$": "exponent may be 0",
    r"Pow int\d+": "exponent has another type",
    "Pow longer|Where (row|scalar|both small|small beside)": "may broadcast",
    "(ReduceL2|ReduceLogSumExp) axes keepdims=0": "keepdims=0",
    "(ReduceL2|ReduceLogSumExp) (all|empty)|ReduceL2 scalar": "axes are not constant",
    "Scatter(ND|Elements) (add|mul|max|min)": "reduction=",
    "Slice steps": "steps are not constant and positive",
    "Split (unused|second unused)": "output is not used",
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_gradient_is_right_or_refused(case: Case) -> None:
    feeds = feeds_of(case)
    weights = [name for name in feeds if name not in case.frozen]
    single = {name: array.astype(np.float32) for name, array in feeds.items()}
    expected = next(
        (
            reason
            for pattern, reason in REFUSED.items()
            if re.match(rf"(?:{pattern})(?!\w)", case.name)
        ),
        None,
    )
    for variant in VARIANTS:
        found, refusal = {}, ""
        try:
            found = gradients(model_of(case, variant), single, weights)
        except GradientError as error:
            refusal = str(error)
        assert "builder failed" not in refusal, "the table should have known"
        if variant == "static":
            assert bool(refusal) == (expected is not None), refusal
        assert variant != "static" or (expected or "") in refusal
        if refusal:
            continue
        assert expected is None, f"{variant}: was to be refused"
        for weight, true in true_gradients(case).items():
            if weight in weights:
                assert found[weight].shape == true.shape, variant
                np.testing.assert_allclose(
                    found[weight], true, rtol=2e-3, atol=2e-3, err_msg=f"{variant}: {weight}"
                )


def test_each_operator_of_the_table_has_a_case_with_a_gradient() -> None:
    right = {
        node.op_type
        for case in CASES.values()
        if not any(re.match(rf"(?:{pattern})(?!\w)", case.name) for pattern in REFUSED)
        for node in model_of(case).graph.node
    }
    assert right >= {*CHECKS}


def test_a_wrong_gradient_would_be_noticed() -> None:
    """Raw, the builder forgets the half of a Split that nothing needs: the comparison above must
    see that.
    """
    case = CASES["Split unused"]
    model = model_of(case)
    for i, node in enumerate(model.graph.node):
        node.name = f"node{i}"
    model = onnx.shape_inference.infer_shapes(model)
    module = source.require_builder()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    builder = module.GradientGraphBuilder(
        model.SerializeToString(), {"loss"}, {"a"}, "loss", options
    )
    builder.build()
    feeds = {"a": feeds_of(case)["a"].astype(np.float32)}
    (raw,) = session(onnx.load_from_string(builder.get_model())).run(["a_grad"], feeds)
    assert raw.shape != true_gradients(case)["a"].shape


# Slopes of smooth functions at 0, where a formula with Abs, Relu or a choice in it may have another
# one.
AT_ZERO = {"Erf": 2 / np.sqrt(np.pi), "Gelu": 0.5, "Sigmoid": 0.25, "Tanh": 1}


@pytest.mark.parametrize("op_type", AT_ZERO)
def test_the_slope_at_zero(op_type: str) -> None:
    graph = f"(float[3] a) => (float loss) {{ y = {op_type}(a) loss = ReduceSum<keepdims=0>(y) }}"
    found = gradients(graph, {"a": np.array([0, 1e-30, -1e-30], np.float32)})["a"]
    np.testing.assert_allclose(found, AT_ZERO[op_type], rtol=1e-5)


@pytest.mark.parametrize(
    "op_type",
    [*AT_ZERO, "LogSoftmax", "Softmax"],
)
def test_the_slope_far_away_is_finite(op_type: str) -> None:
    graph = f"(float[1,4] a) => (float loss) {{ y = {op_type}(a) loss = ReduceSum<keepdims=0>(y) }}"
    assert np.isfinite(
        gradients(graph, {"a": np.array([[100, -100, 1e4, -1e4]], np.float32)})["a"]
    ).all()


def test_a_norm_has_a_gradient_at_zero() -> None:
    graph = (
        "(float[2,3] a) => (float loss) <int64[1] x = {1}> { y = ReduceL2(a, x) loss ="
        " ReduceSum<keepdims=0>(y) }"
    )
    assert np.isfinite(gradients(graph, {"a": np.zeros((2, 3), np.float32)})["a"]).all()


# What a model keeps
# ----------------------------------------------------------------------------------------------------------

KEPT = """(float[2,3] unused, float[2,3] x, float[3,3] w, float[3] w_grad, float[3] v0, int64[2] n1) => (float[2,3] h, float loss, float[2,3] n, float[2,3] d, int64[2] best)
    <float[3] s = {1, 0.5, 2}, float[3] m = {1, 0, 2}, float[3] v = {1, 2, 0.5}, float OneConstant_Type1 = {3}>
    {
        h = MatMul(x, w)
        n = BatchNormalization(h, s, m, m, v)
        d, mask = Dropout(h)
        k = Add(h, w_grad)
        q = Mul(k, v0)
        r = Mul(q, OneConstant_Type1)
        best = ArgMax<axis=1, keepdims=0>(q)
        loss = ReduceMean<keepdims=0>(r)
    }"""


def kept_feeds() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = {"unused": (2, 3), "x": (2, 3), "w": (3, 3), "w_grad": (3,), "v0": (3,)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()} | {
        "n1": np.array([1, 2])
    }


def test_everything_else_stays_as_it_was() -> None:
    model = prepared(KEPT)
    before = ir.to_proto(model).SerializeToString()
    differentiated, found = source.add_gradients(model, "loss", ["w", "v0", "w_grad"])
    assert ir.to_proto(model).SerializeToString() == before, "the caller's model was changed"
    assert [v.name for v in differentiated.graph.inputs] == [v.name for v in model.graph.inputs]
    assert [v.name for v in differentiated.graph.outputs] == [v.name for v in model.graph.outputs]
    assert list(found) == ["w", "v0", "w_grad"]
    values = {v.name: v for node in differentiated.graph for v in node.outputs}
    for weight, gradient in found.items():
        like = next(v for v in model.graph.inputs if v.name == weight)
        assert (values[gradient].shape, values[gradient].dtype) == (like.shape, like.dtype)
    outputs = [v.name for v in model.graph.outputs]
    feeds = kept_feeds()
    old, new = (session(ir.to_proto(m)).run(outputs, feeds) for m in (model, differentiated))
    for a, b in zip(old, new):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_names_that_look_like_the_builders_are_no_hindrance() -> None:
    feeds = kept_feeds()
    found = gradients(KEPT, feeds, ["w", "v0", "w_grad"])
    scale = 3 * feeds["v0"] / 6
    np.testing.assert_allclose(found["w_grad"], 2 * scale, rtol=1e-5)
    np.testing.assert_allclose(found["w"], feeds["x"].T @ np.tile(scale, (2, 1)), rtol=1e-5)
    np.testing.assert_allclose(
        found["v0"], 0.5 * (feeds["x"] @ feeds["w"] + feeds["w_grad"]).sum(axis=0), rtol=1e-4
    )


def test_nodes_may_lack_names_or_share_one() -> None:
    model = parsed(
        "(float[3] a) => (float loss) { b = Tanh(a) c = Tanh(b) loss = ReduceSum<keepdims=0>(c) }"
    )
    for node in model.graph.node:
        node.name = "same"
    a = np.array([0.5, -1, 2], np.float32)
    inner = np.tanh(a)
    expected = (1 - np.tanh(inner) ** 2) * (1 - inner**2)
    proto = with_gradient_outputs(model, ["a"])
    np.testing.assert_allclose(
        session(proto).run(["gradient of a"], {"a": a})[0], expected, rtol=1e-5
    )


def test_a_large_frozen_table_is_not_copied_into_the_builder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = np.random.default_rng(0).normal(size=(100, 50)).astype(np.float32)
    model = parsed(
        "(float[2,100] a) => (float loss) { y = MatMul(a, t) z = Mul(y, y) loss ="
        " ReduceSum<keepdims=0>(z) }"
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(table, "t"))
    sizes = []
    build = source._build
    monkeypatch.setattr(
        source,
        "_build",
        lambda module, part, weights: (
            sizes.append(part.model.ByteSize()) or build(module, part, weights)
        ),
    )
    a = np.random.default_rng(1).normal(size=(2, 100)).astype(np.float32)
    np.testing.assert_allclose(
        gradients(model, {"a": a})["a"], 2 * a @ table @ table.T, rtol=1e-3, atol=1e-3
    )
    assert sizes[0] < 5000


def test_building_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    for name in (
        "Conv bias <pads=[1,1,1,1]>",
        "MaxPool 1-D",
        "LogSoftmax ",
    ):
        case = CASES[name]
        source.add_gradients(prepared(model_of(case)), "loss", list(feeds_of(case)))
    assert capfd.readouterr() == ("", "")


# What is refused
# -------------------------------------------------------------------------------------------------------------


def test_all_blockers_are_told_at_once_and_without_onnxruntime(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden() -> None:
        raise AssertionError("onnxruntime was asked")

    model = prepared(
        "(float[2,3] a) => (float loss) { b = Atan(a) c = Tanh(b) d = ReduceProd<keepdims=0>(c) q ="
        " Mod<fmod=1>(d, d) loss = Identity(q) }"
    )
    monkeypatch.setattr(source, "require_builder", forbidden)
    found = source.blockers(model, "loss", ["a"])
    assert [(b.op_type, b.reason, b.needs_sizes) for b in found] == [
        (op, "onnxruntime's builder has no correct gradient of it", False)
        for op in ("Atan", "ReduceProd", "Mod")
    ]
    monkeypatch.undo()
    with pytest.raises(
        GradientError, match=r"(?s)Atan.*ReduceProd.*Mod.*use gradient='auto'"
    ) as caught:
        source.add_gradients(model, "loss", ["a"])
    assert all(b.node in str(caught.value) for b in found)


def test_an_unknown_operator_is_named_and_not_what_follows_it() -> None:
    text = (
        "(float[3] a) => (float loss) { b = my.domain.X(a) c = Sigmoid(b) d = Tanh(c) loss ="
        " ReduceSum<keepdims=0>(d) }"
    )
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21, "my.domain": 1]> g {text}'
    )
    (found,) = source.blockers(prepared(model), "loss", ["a"])
    assert (found.op_type, found.fix) == ("X", BY_RULES)


def test_nothing_in_the_way_is_an_empty_list() -> None:
    assert source.blockers(prepared(model_of(CASES["Tanh"])), "loss", ["a"]) == []


@pytest.mark.parametrize(
    "name",
    [
        "AveragePool kernel_shape=[2,2]",
        "MaxPool kernel_shape=[2,2]",
        "Gemm column",
        "Where row",
        "Add both ways",
    ],
)
def test_unknown_sizes_are_refused_with_static_shapes_as_the_cure(name: str) -> None:
    found = source.blockers(
        prepared(model_of(CASES[name], "any sizes")), "loss", list(feeds_of(CASES[name]))
    )
    assert found
    assert all(b.needs_sizes and b.fix.startswith("use static shapes") for b in found)


@pytest.mark.parametrize(
    ("graph", "weights", "message"),
    [
        ("(float[2] a) => (float[2] loss) { loss = Tanh(a) }", ["a"], r"scalar.*'loss' is FLOAT\[2\]"),
        ("(float[2] a) => (float[1] loss) { loss = ReduceSum<keepdims=1>(a) }", ["a"], "scalar"),
        ("(float16[2] a) => (float16 loss) { loss = ReduceSum<keepdims=0>(a) }", ["a"], "float32 or float64"),
        ("(float16[2] a) => (float loss) { b = Tanh(a) c = Cast<to=1>(b) loss = ReduceSum<keepdims=0>(c) }", ["a"], "FLOAT16"),
        ("(float[2] a, float[2] b) => (float loss) { c = Floor(b) d = Add(a, c) loss = ReduceSum<keepdims=0>(d) }", ["a", "b"], "does not depend on b in"),
        ("(float[2] a) => (float loss) { loss = ReduceSum<keepdims=0>(a) }", ["b"], "'b': it is not a graph input"),
        ("(float[2] a) => (float y) { y = ReduceSum<keepdims=0>(a) }", ["a"], "no output 'loss'"),
        ("(float loss) => (float loss) { y = Tanh(loss) }", ["loss"], "no output 'loss'"),
        ("(float[2] a) => (float loss) { b = my.domain.Swish(a) loss = ReduceSum<keepdims=0>(b) }", ["a"], "Swish.*no correct gradient"),
        ("(bool c, float a) => (float loss) { loss = If (c) <then_branch = t () => (float t1) { t1 = Tanh(a) }, else_branch = e () => (float e1) { e1 = Neg(a) }> }", ["a"], "If.*no correct gradient"),
    ],
)  # fmt: skip
def test_what_cannot_be_differentiated_is_said(
    graph: str, weights: list[str], message: str
) -> None:
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21, "my.domain": 1]> g {graph}'
    )
    with pytest.raises(GradientError, match=message):
        source.add_gradients(infer_shapes(ir.from_proto(model)), "loss", weights)


def test_a_branch_that_only_reports_is_left_alone() -> None:
    graph = """(bool c, float[2] a) => (float loss, float seen)
        { b = Tanh(a) loss = ReduceSum<keepdims=0>(b)
          seen = If (c) <then_branch = t () => (float t1) { t1 = ReduceMax<keepdims=0>(b) }, else_branch = e () => (float e1) { e1 = ReduceMin<keepdims=0>(b) }> }"""
    a = np.array([0.5, -1], np.float32)
    proto = with_gradient_outputs(parsed(graph), ["a"])
    loss, seen, gradient = session(proto).run(None, {"c": np.array(True), "a": a})
    np.testing.assert_allclose(gradient, 1 - np.tanh(a) ** 2, rtol=1e-5)
    np.testing.assert_allclose(seen, np.tanh(0.5), rtol=1e-5)
    np.testing.assert_allclose(loss, np.tanh(a).sum(), rtol=1e-5)


@pytest.mark.parametrize("narrow", [onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16])
def test_a_passage_through_half_precision_counts_as_none(narrow: int) -> None:
    graph = (
        f"(float[3] a) => (float loss) {{ h = Cast<to={narrow}>(a) c = Cast<to=1>(h) y = Mul(c, c)"
        " loss = ReduceSum<keepdims=0>(y) }"
    )
    a = np.array([0.5, 1, -2], np.float32)
    np.testing.assert_allclose(gradients(graph, {"a": a})["a"], 2 * a, rtol=1e-2)


def test_float64_is_differentiated_in_float64_or_refused() -> None:
    graph = (
        "(double[4,3] x, double[3,2] w, double[2] b) => (double loss) { h = Gemm(x, w, b) t ="
        " Tanh(h) q = Mul(t, t) loss = ReduceMean<keepdims=0>(q) }"
    )
    rng = np.random.default_rng(0)
    x, w, b = (rng.normal(size=s) for s in ((4, 3), (3, 2), (2,)))
    t = np.tanh(x @ w + b)
    dh = 2 * t * (1 - t * t) / 8
    found = gradients(graph, {"x": x, "w": w, "b": b}, ["w", "b"])
    np.testing.assert_allclose(found["w"], x.T @ dh, rtol=1e-12)
    np.testing.assert_allclose(found["b"], dh.sum(axis=0), rtol=1e-12)
    single = prepared(
        "(double[2] a) => (double loss) { b = Relu(a) loss = ReduceSum<keepdims=0>(b) }"
    )
    with pytest.raises(GradientError, match="float32 only"):
        source.add_gradients(single, "loss", ["a"])


# Which weights a loss depends on
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("c = Add(a, b) loss = ReduceSum<keepdims=0>(c)", ["a", "b"]),
        ("c = Tanh(b) loss = ReduceSum<keepdims=0>(a)", ["a"]),
        ("r = Round(b) c = Add(a, r) loss = ReduceSum<keepdims=0>(c)", ["a"]),
        ("r = Greater(b, a) f = Cast<to=1>(r) c = Mul(a, f) loss = ReduceSum<keepdims=0>(c)", ["a"]),
        ("n = Shape(b) c = Reshape(a, n) loss = ReduceSum<keepdims=0>(c)", ["a"]),
        ("i = ArgMax(b) c = Gather(a, i) loss = ReduceSum<keepdims=0>(c)", ["a"]),
        ("q = QuantizeLinear(b, s) d = DequantizeLinear(q, s) c = Add(a, d) loss = ReduceSum<keepdims=0>(c)", ["a", "b"]),
        ("loss = If (t) <then_branch = u () => (float u1) { u1 = ReduceSum<keepdims=0>(a) }, else_branch = e () => (float e1) { e1 = Identity(s) }>", ["a"]),
    ],
)  # fmt: skip
def test_reachable(body: str, expected: list[str]) -> None:
    model = prepared(
        f"(float[2] a, float[2] b) => (float loss) <float s = {{0.1}}, bool t = {{1}}> {{ {body} }}"
    )
    assert reachable(model, "loss", ["a", "b"]) == expected


# Real networks
# ---------------------------------------------------------------------------------------------------------------

NETWORKS = {
    "perceptron": (
        "(float[5,4] x, float[4,8] w1, float[8] b1, float[8,3] w2, float[3] b2) => (float loss) <int64[5,1] t = {0, 1, 2, 1, 0}>",
        "h = Gemm(x, w1, b1) r = Relu(h) z = Gemm(r, w2, b2) l = LogSoftmax<axis=1>(z) p = GatherElements<axis=1>(l, t) n = Neg(p) loss = ReduceMean<keepdims=0>(n)",
        lambda torch, x, w1, b1, w2, b2: torch.nn.functional.cross_entropy(torch.relu(x @ w1 + b1) @ w2 + b2, torch.tensor([0, 1, 2, 1, 0])),
    ),
    "convolutional": (
        "(float[3,1,8,8] x, float[4,1,3,3] w1, float[4] b1, float[2,4,3,3] w2, float[8,3] w3) => (float loss) <int64[2] s = {3, 8}>",
        "c = Conv<pads=[1,1,1,1]>(x, w1, b1) r = Relu(c) m = MaxPool<kernel_shape=[2,2], strides=[2,2]>(r) d = Conv<pads=[1,1,1,1]>(m, w2) "
        "g = Sigmoid(d) a = AveragePool<kernel_shape=[2,2], strides=[2,2]>(g) f = Reshape(a, s) z = MatMul(f, w3) q = Mul(z, z) loss = ReduceMean<keepdims=0>(q)",
        lambda torch, x, w1, b1, w2, w3: (
            torch.nn.functional.avg_pool2d(
                torch.sigmoid(torch.nn.functional.conv2d(torch.nn.functional.max_pool2d(torch.relu(torch.nn.functional.conv2d(x, w1, b1, padding=1)), 2), w2, padding=1)), 2
            ).reshape(3, 8) @ w3
        ).square().mean(),
    ),
    "attention": (
        "(float[2,4,6] x, float[6,6] wq, float[6,6] wk, float[6,6] wv) => (float loss) <int64[4] split = {0, 0, 2, 3}, int64[3] merge = {0, 0, -1}, float k = {0.57735027}>",
        "q = MatMul(x, wq) q4 = Reshape(q, split) qt = Transpose<perm=[0,2,1,3]>(q4) u = MatMul(x, wk) u4 = Reshape(u, split) ut = Transpose<perm=[0,2,3,1]>(u4) "
        "v = MatMul(x, wv) v4 = Reshape(v, split) vt = Transpose<perm=[0,2,1,3]>(v4) a = MatMul(qt, ut) c = Mul(a, k) p = Softmax(c) "
        "o = MatMul(p, vt) ot = Transpose<perm=[0,2,1,3]>(o) y = Reshape(ot, merge) e = Mul(y, y) loss = ReduceSum<keepdims=0>(e)",
        lambda torch, x, wq, wk, wv: torch.nn.functional.scaled_dot_product_attention(
            *((x @ w).reshape(2, 4, 2, 3).transpose(1, 2) for w in (wq, wk, wv))
        ).square().sum(),
    ),
    "embedding": (
        "(float[7,4] table, float[4,7] w) => (float loss) <int64[2,3] i = {1, 1, 6, 0, 3, 1}, int64[6,1] t = {1, 2, 0, 4, 5, 6}, int64[2] rows = {6, 4}>",
        "e = Gather(table, i) r = Reshape(e, rows) z = MatMul(r, w) l = LogSoftmax<axis=1>(z) p = GatherElements<axis=1>(l, t) n = Neg(p) loss = ReduceMean<keepdims=0>(n)",
        lambda torch, table, w: torch.nn.functional.cross_entropy(table[torch.tensor([1, 1, 6, 0, 3, 1])] @ w, torch.tensor([1, 2, 0, 4, 5, 6])),
    ),
    "tied": (
        "(float[5,4] table) => (float loss) <int64[3] i = {1, 1, 4}, int64[3,1] t = {0, 2, 4}>",
        "e = Gather(table, i) h = Transpose<perm=[1,0]>(table) z = MatMul(e, h) l = LogSoftmax<axis=1>(z) p = GatherElements<axis=1>(l, t) n = Neg(p) loss = ReduceMean<keepdims=0>(n)",
        lambda torch, table: torch.nn.functional.cross_entropy(table[torch.tensor([1, 1, 4])] @ table.T, torch.tensor([0, 2, 4])),
    ),
}  # fmt: skip


@pytest.mark.torch
@pytest.mark.parametrize("network", NETWORKS)
def test_networks_have_the_gradients_of_torch(network: str) -> None:
    torch = pytest.importorskip("torch")
    head, body, loss = NETWORKS[network]
    model = parsed(f"{head} {{ {body} }}")
    rng = np.random.default_rng(5)
    feeds = {
        v.name: (
            rng.normal(size=[d.dim_value for d in v.type.tensor_type.shape.dim]).astype(np.float32)
        )
        for v in model.graph.input
    }
    tensors = {name: torch.tensor(array, requires_grad=True) for name, array in feeds.items()}
    loss(torch, **tensors).backward()
    for name, found in gradients(model, feeds).items():
        np.testing.assert_allclose(
            found, tensors[name].grad.numpy(), rtol=2e-4, atol=2e-5, err_msg=name
        )
