"""Pools."""

# a case is a row of a table

import re
from dataclasses import replace

from tests.gradients.rules.cases import Case

X1, X2, X3 = "float[2,2,7] a", "float[1,2,5,6] a", "float[1,2,3,4,3] a"

WAYS = [
    "kernel_shape=[2,2]", "kernel_shape=[2,2], strides=[2,2]", "kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]", "kernel_shape=[3,2], pads=[1,0,2,1], strides=[2,1]",
    "kernel_shape=[2,2], strides=[3,3]", "kernel_shape=[3,3], strides=[2,2], ceil_mode=1", "kernel_shape=[2,2], strides=[2,2], ceil_mode=1", "kernel_shape=[3,3], strides=[2,2], pads=[1,1,0,1], ceil_mode=1",
    'kernel_shape=[3,3], strides=[2,2], auto_pad="SAME_UPPER"', 'kernel_shape=[3,4], strides=[2,3], auto_pad="SAME_LOWER"', 'kernel_shape=[2,2], auto_pad="SAME_LOWER"',
    'kernel_shape=[3,2], auto_pad="SAME_UPPER"', 'kernel_shape=[2,2], strides=[2,1], auto_pad="VALID"', "kernel_shape=[2,2], dilations=[2,3]", "kernel_shape=[2,3], dilations=[2,1], strides=[1,2], pads=[1,1,0,1]",
]  # fmt: skip
COUNTED = [f"{way}, count_include_pad=1" for way in WAYS if "pad" in way and "ceil" not in way]

# Where the reference has a mistake: padding and the last window of LpPool; GlobalMaxPool but in
# 2-D.
# Crops of strides above the kernel: neither judge computes them in float64.
MISJUDGED = re.compile(r"LpPool.*(pad|ceil_mode)|GlobalMaxPool [13]-D|(Average|Lp)Pool same, ")


def pools(op: str, ways: list[str]) -> list[Case]:
    return [
        *(Case(f"{op} {way}", X2, f"y = {op}<{way}>(a)") for way in ways),
        Case(f"{op} 1-D", X1, f"y = {op}<kernel_shape=[3], strides=[2]>(a)"),
        Case(f"{op} 1-D padded", X1, f"y = {op}<kernel_shape=[3], pads=[1,2]>(a)"),
        Case(f"{op} 1-D tiled", "float[2,2,6] a", f"y = {op}<kernel_shape=[3], strides=[3]>(a)"),
        Case(f"{op} 3-D", X3, f"y = {op}<kernel_shape=[2,3,2]>(a)"),
        Case(f"{op} 3-D padded", X3, f"y = {op}<kernel_shape=[2,2,2], strides=[2,1,2], pads=[1,0,1,0,1,1]>(a)"),
        Case(f"{op} 3-D tiled", "float[1,2,2,4,2] a", f"y = {op}<kernel_shape=[2,2,2], strides=[2,2,2]>(a)"),
        Case(f"{op} 3-D same", X3, f'y = {op}<kernel_shape=[2,2,3], strides=[2,2,1], auto_pad="SAME_LOWER">(a)'),
        Case(f"{op} tiled", "float[2,2,4,6] a", f"y = {op}<kernel_shape=[2,3], strides=[2,3]>(a)"),
        Case(f"{op} of a value used twice", "float[1,1,4,4] a", f"h = Tanh(a) p = {op}<kernel_shape=[2,2]>(h) q = {op}<kernel_shape=[3,3], pads=[1,0,0,1]>(h) y = Add(p, q)"),
    ]  # fmt: skip


CASES = [
    *pools("MaxPool", [*WAYS, *(f"{way}, storage_order=1" for way in WAYS[1:3])]),
    Case("MaxPool indices used", "float[2,2,4,4] a", "y, i = MaxPool<kernel_shape=[2,2], strides=[2,2]>(a) f = Cast<to=1>(i) z = Mul(f, y)"),
    Case("MaxPool indices by columns used", "float[2,2,4,4] a", "y, i = MaxPool<kernel_shape=[2,2], strides=[2,2], storage_order=1>(a) f = Cast<to=1>(i) z = Mul(f, y)"),
    *pools("AveragePool", [*WAYS, *COUNTED]),
    Case("AveragePool 1-D same", X1, 'y = AveragePool<kernel_shape=[4], strides=[2], auto_pad="SAME_UPPER">(a)'),
    # Strides above the kernel leave out elements at the ends.
    *(
        Case(f"{op} same, stride {stride}, size {size}, {pad}, kernel {k}", f"float[1,2,{size}] a", f'y = {op}<strides=[{stride}], auto_pad="SAME_{pad}", kernel_shape=[{k}]>(a)')
        for op in ("AveragePool", "LpPool")
        for pad in ("UPPER", "LOWER")
        for stride, size, k in ((2, 4, 1), (3, 3, 1), (4, 4, 2), (5, 5, 2), (5, 7, 2))
    ),
    *(
        Case(f"{op} same, one axis padded, one cropped {pad}", "float[1,2,6,5] a", f'y = {op}<strides=[2,5], auto_pad="SAME_{pad}", kernel_shape=[3,2]>(a)')
        for op in ("AveragePool", "LpPool")
        for pad in ("UPPER", "LOWER")
    ),
    *(case for p in (1, 2, 3, 4) for case in (
        Case(f"LpPool p={p}", "float[1,2,4,4] a", f"y = LpPool<kernel_shape=[2,2], p={p}>(a)", low=0.3),
        Case(f"LpPool p={p} both signs", "float[1,1,4,4] a", f"y = LpPool<kernel_shape=[2,3], strides=[2,1], p={p}>(a)"),
        Case(f"GlobalLpPool p={p}", "float[2,2,3,2] a", f"y = GlobalLpPool<p={p}>(a)"),
    )),
    *(Case(f"LpPool {way}", X2, f"y = LpPool<{way}>(a)") for way in WAYS),
    Case("LpPool 1-D", X1, "y = LpPool<kernel_shape=[3], strides=[2], p=3>(a)"),
    Case("LpPool 3-D", X3, "y = LpPool<kernel_shape=[2,2,2], strides=[1,2,1]>(a)"),
    *(
        case
        for op in ("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
        for case in (
            Case(op, "float[2,2,3,4] a", f"y = {op}(a)"), Case(f"{op} 1-D", "float[2,2,5] a", f"y = {op}(a)", low=-30, high=30),
            Case(f"{op} 3-D", "float[1,2,2,3,2] a", f"y = {op}(a)", low=-30, high=30),
        )
    ),
    Case("MaxUnpool", "float[1,2,2,2] a", "y = MaxUnpool<kernel_shape=[2,2], strides=[2,2]>(a, i)", "int64[1,2,2,2] i = {1,3,12,10,16,23,24,31}"),
    Case("MaxUnpool padded", "float[1,1,2,3] a", "y = MaxUnpool<kernel_shape=[3,3], strides=[2,2], pads=[1,0,0,1]>(a, i)", "int64[1,1,2,3] i = {0,2,5,7,9,11}"),
    Case("MaxUnpool output_shape", "float[1,1,2,2] a", "y = MaxUnpool<kernel_shape=[2,2], strides=[2,2]>(a, i, s)", "int64[1,1,2,2] i = {1,3,12,10}, int64[4] s = {1,1,4,4}"),
    Case("MaxUnpool 1-D", "float[2,1,3] a", "y = MaxUnpool<kernel_shape=[2], strides=[2]>(a, i)", "int64[2,1,3] i = {1,2,5,6,8,10}"),
    Case("MaxUnpool 3-D", "float[1,1,1,2,2] a", "y = MaxUnpool<kernel_shape=[2,2,2], strides=[2,2,2]>(a, i)", "int64[1,1,1,2,2] i = {1,18,24,15}"),
    Case("MaxUnpool of MaxPool", "float[1,2,4,4] a", "p, i = MaxPool<kernel_shape=[2,2], strides=[2,2]>(a) h = Exp(p) y = MaxUnpool<kernel_shape=[2,2], strides=[2,2]>(h, i)"),
    Case("LRN", "float[2,5,2,2] a", "y = LRN<size=3>(a)"),
    Case("LRN strong", "float[1,4,3,2] a", "y = LRN<size=3, alpha=0.9, beta=0.6, bias=0.7>(a)"),
    Case("LRN wide", "float[1,3,2,2] a", "y = LRN<size=7, alpha=1.1>(a)"),
]  # fmt: skip
CASES = [replace(case, single=bool(MISJUDGED.match(case.name))) for case in CASES]
