"""Reductions and running sums."""

# a case is a row of a table

from tests.gradients.rules.cases import Case

A = "float[2,3,4] a"
SIGNED = (
    "ReduceSum",
    "ReduceMean",
    "ReduceMax",
    "ReduceMin",
    "ReduceProd",
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSumExp",
    "ReduceSumSquare",
)


def reductions(op: str) -> list[Case]:
    low = -2.0 if op in SIGNED else 0.3
    rows = [
        ("scalar", "float a", f"y = {op}(a)", ""),
        ("last axis", A, f"y = {op}(a, axes)", "int64[1] axes = {-1}"),
        ("axis <keepdims=0>", A, f"y = {op}<keepdims=0>(a, axes)", "int64[1] axes = {1}"),
        (
            "named all axes <keepdims=0>",
            "float[2,3] a",
            f"y = {op}<keepdims=0>(a, axes)",
            "int64[2] axes = {1, 0}",
        ),
    ]
    for keep in (0, 1):
        k = f"<keepdims={keep}>"
        rows += [
            (f"axes {k}", A, f"y = {op}{k}(a, axes)", "int64[2] axes = {0, -1}"),
            (f"all axes {k}", "float[2,3] a", f"y = {op}{k}(a)", ""),
            (f"empty axes {k}", "float[2,3] a", f"y = {op}{k}(a, axes)", "int64[0] axes = {}"),
            (
                f"computed axes {k}",
                A,
                f"n = Neg(minus) y = {op}{k}(a, n)",
                "int64[2] minus = {0, 1}",
            ),
            (
                f"computed empty axes {k}",
                "float[2,3] a",
                f"n = Neg(none) y = {op}{k}(a, n)",
                "int64[0] none = {}",
            ),
        ]
        if op in ("ReduceSum", "ReduceMax"):
            computed = f"n = Neg(minus) y = {op}<noop_with_empty_axes=1, keepdims={keep}>(a, n)"
            rows.append(
                (f"computed axis, else none {k}", "float[2,3] a", computed, "int64[1] minus = {1}")
            )
    return [
        Case(f"{op} {name}", inputs, body, constants, low) for name, inputs, body, constants in rows
    ]


CASES = [
    *(case for op in (*SIGNED, "ReduceLogSum") for case in reductions(op)),
    # without axes onnxruntime 1.19 hands the input on, which for the others is not what ONNX says
    *(
        case
        for op in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceLogSumExp")
        for case in (
            Case(f"{op} no axes", "float[2,3] a", f"y = {op}<noop_with_empty_axes=1>(a, axes)", "int64[0] axes = {}"),
            Case(f"{op} no axes, keepdims=0", "float[2,3] a", f"y = {op}<noop_with_empty_axes=1, keepdims=0>(a, axes)", "int64[0] axes = {}"),
            Case(f"{op} computed no axes", "float[2,3] a", f"n = Neg(none) y = {op}<noop_with_empty_axes=1>(a, n)", "int64[0] none = {}"),
        )
    ),
    Case("ReduceSum of sizes", A, "s = Shape(a) n = ReduceProd<keepdims=0>(s) f = Cast<to=1>(n) y = Div(a, f)"),
    Case("ReduceProd with zeros", "float[4,3] a", "h = Mul(a, o) y = ReduceProd<keepdims=0>(h, axes)",
         "int64[1] axes = {1}, float[4,3] o = {1,1,1, 1,0,1, 0,1,0, 0,0,0}"),
    Case("ReduceProd of all with a zero", "float[4] a", "h = Mul(a, o) y = ReduceProd(h)", "float[4] o = {1,0,1,1}"),
    Case("ReduceMax of a maximum", "float[2,3] a, float[3] b", "h = Max(a, b) y = ReduceMax(h, axes)", "int64[1] axes = {0}"),
    *(Case(f"CumSum {a}".rstrip(), "float[3,4] a", f"y = CumSum{a}(a, x)", "int64 x = {1}") for a in ("", "<exclusive=1>", "<reverse=1>", "<exclusive=1, reverse=1>")),
    Case("CumSum negative axis", "float[2,3,2] a", "y = CumSum(a, x)", "int64 x = {-2}"),
    Case("CumSum int32 axis", "float[3,2] a", "y = CumSum(a, x)", "int32 x = {0}"),
    Case("CumSum one axis in a list", "float[3,2] a", "y = CumSum(a, x)", "int64[1] x = {0}"),
    Case("CumSum computed axis", "float[3,2] a", "x = Neg(m) y = CumSum<reverse=1>(a, x)", "int64 m = {1}"),
    Case("CumSum vector", "float[4] a", "y = CumSum(a, x)", "int64 x = {0}"),
]  # fmt: skip
