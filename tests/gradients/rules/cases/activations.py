"""Activation functions and softmax."""

from tests.gradients.rules.cases import Case

A = "float[3,4] a"
# Celu is defined in float32 only; Shrink rounds to it in onnxruntime, Gelu's Erf in onnx.reference.
# tests/gradients/rules/test_kinks.py asks more of them.
ROUNDED = ("Celu", "Shrink", "Gelu")


def each(op: str, *attributes: str) -> list[Case]:
    return [
        Case(f"{op} {a}".rstrip(), A, f"y = {op}{a}(a)", single=op in ROUNDED) for a in attributes
    ] + [
        Case(f"{op} vector", "float[3] a", f"y = {op}(a)", single=op in ROUNDED),
        Case(
            f"{op} 3-D, of a value",
            "float[2,1,3] a",
            f"h = Sin(a) y = {op}{attributes[-1]}(h)",
            single=op in ROUNDED,
        ),
    ]


def along(op: str) -> list[Case]:
    return [
        *(Case(f"{op} {a}".rstrip(), A, f"y = {op}{a}(a)") for a in ("", "<axis=0>", "<axis=1>", "<axis=-1>", "<axis=-2>")),
        Case(f"{op} 3-D middle", "float[2,3,4] a", f"y = {op}<axis=1>(a)"),
        Case(f"{op} 3-D first", "float[2,3,4] a", f"y = {op}<axis=0>(a)"),
        Case(f"{op} vector", "float[4] a", f"y = {op}(a)"),
        Case(f"{op} with a mask of minus infinity", A, f"h = Where(c, a, k) s = {op}<axis=1>(h) y = Where(c, s, o)",
             "bool[4] c = {1, 0, 1, 1}, float k = {-inf}, float o = {0}"),
    ]  # fmt: skip


CASES = [
    *(case for op in ("Relu", "Softplus", "Softsign", "HardSwish", "Mish") for case in each(op, "")),
    *each("LeakyRelu", "", "<alpha=0.2>", "<alpha=-0.3>"),
    *(case for op in ("Elu", "Celu") for case in each(op, "", "<alpha=0.7>")),
    *each("Selu", "", "<alpha=1.5, gamma=1.2>"),
    *each("HardSigmoid", "", "<alpha=0.4, beta=0.3>"),
    *each("ThresholdedRelu", "", "<alpha=0.4>", "<alpha=-0.4>"),
    *each("Shrink", "", "<bias=0.3, lambd=0.8>"),
    *each("Gelu", "", '<approximate="tanh">'),
    Case("Gelu far out", "float[2,6] a", "y = Gelu(a)", low=-12, high=12, single=True),
    Case("Gelu tanh far out", "float[2,6] a", 'y = Gelu<approximate="tanh">(a)', low=-12, high=12),
    Case("PRelu", "float[2,3] a, float[2,3] b", "y = PRelu(a, b)"),
    Case("PRelu channel", "float[2,3,2,2] a, float[3,1,1] b", "y = PRelu(a, b)"),
    Case("PRelu one", "float[2,3] a, float[1] b", "y = PRelu(a, b)"),
    Case("PRelu scalar", "float[2,3] a, float b", "y = PRelu(a, b)"),
    Case("PRelu frozen slope", "float[2,3] a", "y = PRelu(a, b)", "float[3] b = {0.25, 0.5, -1}"),
    Case("PRelu frozen input", "float[2,3] a, float[3] b", "y = PRelu(a, b)", frozen=("a",)),
    *along("Softmax"), *along("LogSoftmax"),
    Case("LogSoftmax weighted", "float[3,4] a, float[3,4] b", "l = LogSoftmax(a) y = Mul(l, b)"),
    *(Case(f"LpNormalization {a}", A, f"y = LpNormalization{a}(a)") for a in ("", "<p=1>", "<p=2, axis=0>", "<p=1, axis=0>", "<p=2, axis=-2>")),
    Case("LpNormalization vector", "float[5] a", "y = LpNormalization(a)"),
    Case("LpNormalization 3-D", "float[2,3,4] a", "y = LpNormalization<p=1, axis=1>(a)"),
    Case("Dropout", "float[2,3] a", "y = Dropout(a)"),
    Case("Dropout mask", "float[2,3] a", "y, m = Dropout(a, r)", "float r = {0.4}"),
    Case("Dropout training false", "float[2,3] a", "y, m = Dropout(a, r, t)", "float r = {0.4}, bool t = {0}"),
    Case("Dropout mask used", "float[2,3] a", "d, m = Dropout(a, r) c = Cast<to=1>(m) y = Mul(d, c)", "float r = {0.4}"),
    Case("Dropout computed mode", "float[2,3] a", "t = Greater(r, o) y = Dropout(a, r, t)", "float r = {0.4}, float o = {0.5}"),
    Case("Dropout training with ratio 0", "float[2,3] a", "y = Dropout(a, r, t)", "float r = {0}, bool t = {1}"),
]  # fmt: skip
