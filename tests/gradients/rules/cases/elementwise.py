"""Arithmetic and elementary functions."""

# a case is a row of a table

from tests.gradients.rules.cases import Case

A = "float[2,3] a"
AB = "float[2,3] a, float[2,3] b"


def unary(op: str, low: float = -2.0, high: float = 2.0) -> list[Case]:
    return [
        Case(op, A, f"y = {op}(a)", low=low, high=high),
        Case(f"{op} of a scalar", "float a", f"y = {op}(a)", low=low, high=high),
    ]


def binary(op: str, low: float = -2.0, attributes: str = "") -> list[Case]:
    y = f"y = {op}{attributes}(a, b)"
    return [
        Case(op, AB, y, low=low),
        Case(f"{op} row", f"{A}, float[3] b", y, low=low),
        Case(f"{op} both ways", "float[2,1] a, float[1,3] b", y, low=low),
        Case(f"{op} scalar left", "float a, float[2,3] b", y, low=low),
        Case(f"{op} constant", A, f"y = {op}{attributes}(a, c)", "float c = {1.5}", low=low),
        Case(f"{op} constant left", A, f"y = {op}{attributes}(c, a)", "float c = {1.5}", low=low),
    ]


def broadcasts(op: str, low: float = -2.0) -> list[Case]:
    y = f"y = {op}(a, b)"
    return [
        Case(f"{op} row left", "float[3] a, float[2,3] b", y, low=low),
        Case(f"{op} column", f"{A}, float[2,1] b", y, low=low),
        Case(f"{op} ones", "float[1,3] a, float[2,1,1] b", y, low=low),
        Case(f"{op} channel", "float[2,3,2,2] a, float[3,1,1] b", y, low=low),
        Case(f"{op} scalar", f"{A}, float b", y, low=low),
        Case(f"{op} scalars", "float a, float b", y, low=low),
        Case(f"{op} frozen", AB, y, low=low, frozen=("a",)),
    ]


def twice(op: str, low: float = -2.0) -> list[Case]:
    return [
        Case(f"{op} same leaf", A, f"y = {op}(a, a)", low=low),
        Case(f"{op} same value", A, f"h = Exp(a) y = {op}(h, h)", low=low),
    ]


def variadic(op: str) -> list[Case]:
    return [
        Case(f"{op} three", f"{AB}, float[2,3] c", f"y = {op}(a, b, c)"),
        Case(f"{op} three that broadcast", f"{A}, float[3] b, float[2,1] c", f"y = {op}(a, b, c)"),
        Case(f"{op} one", A, f"y = {op}(a)"),
        Case(
            f"{op} with a constant",
            f"{A}, float[3] b",
            f"y = {op}(a, c, b)",
            "float[2,1] c = {0.1, -0.1}",
        ),
        Case(
            f"{op} one in the middle",
            f"{AB}, float[2,3] c",
            f"y = {op}(a, b, c)",
            frozen=("a", "c"),
        ),
    ]


def powers() -> list[Case]:
    return [
        *(Case(f"Pow {e}", A, "y = Pow(a, e)", f"float e = {{{e}}}", 0.3) for e in (2, 3, 0.5, -0.5, -1, 1, 0, 2.5)),
        *(Case(f"Pow {e}, bases of both signs", A, "y = Pow(a, e)", f"float e = {{{e}}}") for e in (2, 3, 4, -1, 1, 0)),
        Case("Pow int64", A, "y = Pow(a, e)", "int64 e = {3}"),
        Case("Pow int32", A, "y = Pow(a, e)", "int32[1] e = {2}"),
        Case("Pow int64 row", A, "y = Pow(a, e)", "int64[3] e = {0, 3, 1}"),
        Case("Pow computed int64", "float[3,2] a", "e = Shape(a) y = Pow(a, e)"),
        Case("Pow row", A, "y = Pow(a, e)", "float[3] e = {2, 0.5, 0}", 0.3),
        Case("Pow longer exponent", "float[3] a", "y = Pow(a, e)", "float[2,3] e = {2, 0.5, 3, 1, 1, 2}", 0.3),
        Case("Pow constant base", A, "y = Pow(c, a)", "float c = {2}"),
        Case("Pow trained exponent", AB, "y = Pow(a, b)", low=0.3),
        Case("Pow trained exponent row", f"{A}, float[3] b", "y = Pow(a, b)", low=0.3),
        Case("Pow trained exponent column", "float[3] a, float[2,1] b", "y = Pow(a, b)", low=0.3),
        Case("Pow computed exponent", AB, "h = Tanh(b) y = Pow(a, h)", low=0.3),
        Case("Pow base 0", A, "z0 = Mul(a, o) y = Pow(z0, e)", "float[3] o = {0, 1, 1}, float e = {2}"),
        Case("Pow base 0 to computed exponents", "float[3] a, float[3] b", "z0 = Mul(a, o) y = Pow(z0, b)", "float[3] o = {0, 1, 1}", 1.3, 3),
        Case("Pow frozen exponent 0 and base 0", "float[4] a, float[4] b", "z0 = Mul(a, o) e = Mul(b, o) y = Pow(z0, e)", "float[4] o = {0, 0, 1, 1}", 0.3, frozen=("b",)),
        Case("Pow leaf to itself", A, "y = Pow(a, a)", low=0.3),
    ]  # fmt: skip


C = "bool[2,3] c = {1,0,1,0,0,1}"

CASES = [
    *(case for op in ("Neg", "Abs", "Exp", "Sin", "Cos", "Sinh", "Cosh", "Tanh", "Asinh", "Atan", "Sigmoid", "Identity") for case in unary(op)),
    # onnx.reference rounds it to float32; tests/gradients/rules/test_kinks.py asks more
    Case("Erf", A, "y = Erf(a)", single=True),
    *(case for op in ("Log", "Sqrt", "Reciprocal") for case in unary(op, 0.3)),
    *(case for op in ("Asin", "Acos", "Atanh") for case in unary(op, -0.9, 0.9)),
    *unary("Tan", -1.2, 1.2), *unary("Acosh", 1.2, 3),
    *(case for op in ("Add", "Sub", "Mul") for case in binary(op) + broadcasts(op) + twice(op)),
    *broadcasts("Div", 0.5), *binary("Div", 0.5), *twice("Div", 0.5),
    Case("Div negative", AB, "y = Div(a, b)", low=-2, high=-0.5),
    *binary("Mod", 0.5, "<fmod=1>"),
    Case("Mod of both signs", A, "y = Mod<fmod=1>(a, b)", "float[3] b = {0.7, -0.6, 0.2}"),
    *(case for op in ("Max", "Min") for case in binary(op) + twice(op)),
    *(case for op in ("Max", "Min", "Sum", "Mean") for case in variadic(op)),
    *(Case(f"{op} same leaf thrice", A, f"y = {op}(a, a, a)") for op in ("Max", "Min", "Sum", "Mean")),
    *powers(),
    Case("Where", AB, "y = Where(c, a, b)", C),
    Case("Where row", f"{A}, float[3] b", "y = Where(c, a, b)", C),
    Case("Where scalar", "float a, float[2,3] b", "y = Where(c, a, b)", C),
    Case("Where both small", "float[3] a, float[2,1] b", "y = Where(c, a, b)", C),
    Case("Where small condition", AB, "y = Where(c, a, b)", "bool[3] c = {1,0,1}"),
    Case("Where all different", "float[2,1,1] a, float[3,1] b", "y = Where(c, a, b)", "bool[2] c = {1,0}"),
    Case("Where constant", A, "y = Where(c, a, k)", f"{C}, float k = {{0}}"),
    Case("Where constant left", A, "y = Where(c, k, a)", f"{C}, float[1] k = {{0}}"),
    Case("Where small beside constant", "float[3] a", "y = Where(c, k, a)", f"{C}, float[1] k = {{0}}"),
    Case("Where same leaf", A, "y = Where(c, a, a)", C),
    Case("Where computed condition", AB, "c = Greater(a, b) y = Where(c, a, b)"),
    Case("Where scalars", "float a, float b", "c = Greater(a, b) y = Where(c, a, b)"),
    Case("Clip", A, "y = Clip(a, l, h)", "float l = {-0.5}, float h = {0.5}"),
    Case("Clip low", A, "y = Clip(a, l)", "float l = {-0.5}"),
    Case("Clip high", A, "y = Clip(a, , h)", "float h = {0.5}"),
    Case("Clip none", A, "y = Clip(a)"),
    Case("Clip trained low", f"{A}, float b", "y = Clip(a, b)"),
    Case("Clip trained high", f"{A}, float b", "y = Clip(a, , b)"),
    Case("Clip trained bounds", f"{A}, float b, float c", "l = Sub(b, k) h = Add(c, k) y = Clip(a, l, h)", "float k = {0.4}", -1, 1),
    Case("Clip trained bounds, the input frozen", f"{A}, float b, float c", "l = Sub(b, k) h = Add(c, k) y = Clip(a, l, h)", "float k = {0.4}", -1, 1, ("a",)),
    Case("Clip crossed bounds", f"{A}, float b, float c", "l = Add(b, k) h = Sub(c, k) y = Clip(a, l, h)", "float k = {1.5}", -1, 1),
    Case("Cast", A, "y = Cast<to=1>(a)"),
    Case("Cast there and back", A, "d = Cast<to=11>(a) e = Mul(d, d) y = Cast<to=1>(e)"),
    Case("Cast to integers beside", A, "i = Cast<to=7>(a) f = Cast<to=1>(i) y = Mul(f, a)"),
    Case("CastLike", A, "y = CastLike(a, k)", "float k = {0}"),
    Case("CastLike an input", AB, "h = CastLike(a, b) y = Mul(h, b)"),
    Case("Range", "float a, float b", "y = Range(a, l, b)", "float l = {9}", 1, 2),
    Case("Range downwards", "float a, float b", "c = Neg(b) y = Range(a, l, c)", "float l = {-9}", 1, 2),
    # operators without a derivative, beside a path that has one
    *(Case(f"{op} beside", A, f"h = {op}(a) y = Mul(h, a)") for op in ("Ceil", "Floor", "Round", "Sign", "Hardmax")),
    *(Case(f"{op} beside", AB, f"c = {op}(a, b) h = Cast<to=1>(c) y = Mul(h, a)", frozen=("b",)) for op in ("Greater", "Less", "Equal", "GreaterOrEqual", "LessOrEqual")),
    Case("Round straight through", A, "h = Round(a) d = Sub(h, a) y = Add(d, a)"),
    Case("ArgMax beside", A, "i = ArgMax<axis=1, keepdims=0>(a) h = Cast<to=1>(i) s = ReduceSum<keepdims=0>(h) y = Mul(a, s)"),
    Case("ArgMin beside", A, "i = ArgMin<axis=1, keepdims=0>(a) h = Cast<to=1>(i) s = ReduceSum<keepdims=0>(h) y = Mul(a, s)"),
    Case("Shape beside", A, "s = Shape(a) h = Cast<to=1>(s) t = ReduceSum<keepdims=0>(h) y = Div(a, t)"),
    Case("Size beside", A, "s = Size(a) h = Cast<to=1>(s) y = Div(a, h)"),
    Case("IsNaN beside", A, "n = IsNaN(a) y = Where(n, k, a)", "float k = {0}"),
    Case("IsInf beside", A, "n = IsInf(a) y = Where(n, k, a)", "float k = {0}"),
    Case("ConstantOfShape beside", A, "t = Tanh(a) s = Shape(t) c = ConstantOfShape<value = float[1] one = {2.0}>(s) y = Mul(t, c)"),
    Case("EyeLike beside", "float[3,3] a", "e = EyeLike(a) y = Add(a, e)"),
]  # fmt: skip
