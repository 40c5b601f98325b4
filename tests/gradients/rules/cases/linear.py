"""MatMul, Gemm, Einsum, Det, and onnxruntime's fused forms of them."""

from __future__ import annotations

from itertools import product

from tests.gradients.rules.cases import Case

_SHAPES = {
    "matrices": ("2,3", "3,4"),
    "vector matrix": ("3", "3,4"),
    "matrix vector": ("2,3", "3"),
    "vectors": ("3", "3"),
    "weight under a batch": ("2,2,3", "3,4"),
    "weight under two batch axes": ("2,1,2,3", "3,2"),
    "weight with a batch of one": ("2,2,3", "1,3,2"),
    "left weight": ("2,3", "2,3,4"),
    "batch": ("2,2,3", "2,3,4"),
    "batch of one on the left": ("1,2,3", "2,3,4"),
    "two batch axes": ("2,3,1,2", "2,3,2,1"),
    "batches broadcast both ways": ("2,1,2,3", "1,3,3,2"),
    "ranks differ": ("2,2,2,3", "2,3,2"),
    "ranks differ on the left": ("2,3,2", "2,2,2,3"),
    "vector batch": ("3", "2,3,4"),
    "batch vector": ("2,2,3", "3"),
    "vector two batch axes": ("2", "2,1,2,3"),
    "two batch axes vector": ("2,1,2,3", "3"),
    "column row": ("3,1", "1,2"),
    "one element": ("1,1", "1,1"),
}

_MATMUL = [
    *(
        Case(f"MatMul {name}", f"float[{a}] a, float[{b}] b", "y = MatMul(a, b)")
        for name, (a, b) in _SHAPES.items()
    ),
    Case("MatMul twice the same", "float[3,3] a", "y = MatMul(a, a)"),
    Case("MatMul frozen right", "float[2,2] a", "y = MatMul(a, c)", "float[2,2] c = {1,2,3,4}"),
    Case("MatMul frozen left", "float[2,2] a", "y = MatMul(c, a)", "float[2,2] c = {1,2,3,4}"),
    Case(
        "MatMul chain",
        "float[2,3] a, float[3,3] b, float[3,2] c",
        "t = MatMul(a, b) y = MatMul(t, c)",
    ),
]

_GEMM = [
    Case("Gemm", "float[2,3] a, float[3,4] b", "y = Gemm(a, b)"),
    *(
        Case(
            f"Gemm C [{c}]",
            f"float[2,3] a, float[3,4] b, float{f'[{c}]' if c else ''} c",
            "y = Gemm<alpha=0.5, beta=2.0>(a, b, c)",
        )
        for c in ("", "1", "4", "1,4", "2,1", "1,1", "2,4")
    ),
    *(
        Case(
            f"Gemm transA={left} transB={right}",
            f"float[{'3,2' if left else '2,3'}] a, float[{'4,3' if right else '3,4'}] b,"
            " float[4] c",
            f"y = Gemm<transA={left}, transB={right}, alpha=0.5>(a, b, c)",
        )
        for left, right in product((0, 1), repeat=2)
    ),
    Case("Gemm beta 0", "float[2,3] a, float[3,4] b, float[4] c", "y = Gemm<beta=0.0>(a, b, c)"),
    Case("Gemm same leaf", "float[3,3] a", "y = Gemm(a, a, a)"),
    Case(
        "Gemm only C",
        "float[4] c",
        "y = Gemm(x, z, c)",
        "float[2,1] x = {1,2}, float[1,4] z = {1,2,3,4}",
    ),
    Case(
        "Gemm of opset 7",
        "float[2,3] a, float[3,4] b, float[1,4] c",
        "y = Gemm<transB=0>(a, b, c)",
        opset=7,
    ),
]

_EQUATIONS = [
    ("ij,jk->ik", "2,3", "3,4"),
    ("ij,kj->ik", "2,3", "4,3"),
    ("ji,jk->ik", "3,2", "3,4"),
    ("ji,kj->ki", "3,2", "4,3"),
    ("ij,jk", "2,3", "3,4"),
    ("Zj , jk -> kZ", "2,3", "3,4"),
    ("bA,A", "2,3", "3"),
    ("ba,Bb->aB", "2,3", "4,2"),
    ("bhid,bhjd->bhij", "2,2,3,2", "2,2,2,2"),
    ("bhij,bhjd->bhid", "2,2,3,2", "2,2,2,3"),
    ("bihd,bjhd->bhij", "2,3,2,2", "2,2,2,2"),
    ("bhwc,hkc->bhwk", "2,2,2,3", "2,3,3"),
    ("i,j->ij", "2", "3"),
    ("i,i->", "3", "3"),
    ("i,i", "3", "3"),
    ("ij,ij->ij", "2,3", "2,3"),
    ("ij,ij->i", "2,3", "2,3"),
    ("ij,k->k", "2,3", "2"),
    ("ij,k->", "2,3", "2"),
    ("ij,jkl->li", "2,3", "3,2,2"),
    ("ij->ji", "2,3"),
    ("ij->ij", "2,3"),
    ("ij->i", "2,3"),
    ("ij->j", "2,3"),
    ("ij->", "2,3"),
    ("ba", "2,3"),
    ("ii->i", "3,3"),
    ("ii->", "3,3"),
    ("ii", "3,3"),
    ("iij->ij", "2,2,3"),
    ("iji->ji", "2,3,2"),
    ("iij->i", "2,2,3"),
    ("iii->i", "2,2,2"),
    ("iijj->ij", "2,2,2,2"),
    ("ii,i->i", "3,3", "3"),
    ("ii,ij->j", "3,3", "3,2"),
    ("ii,jj->ij", "2,2", "3,3"),
    ("ij,jk,kl->il", "2,2", "2,3", "3,2"),
    ("i,ij,j->", "2", "2,3", "3"),
    ("i,i,i->i", "3", "3", "3"),
    ("...ij,...jk->...ik", "2,2,3", "2,3,2"),
    ("...ij,...jk->...ik", "2,1,2,3", "1,3,3,2"),
    ("...ij,jk->...ik", "2,2,3", "3,2"),
    ("i...,i...->...", "2,3,2", "2,3,2"),
    ("i...j,j->...i", "2,3,2", "2"),
    ("i...,i...->i...", "2,3,2", "2,1,2"),
    ("...i,...i", "2,3", "2,3"),
    ("...,...->...", "2,3", "1,3"),
    ("...ii->...i", "2,3,3"),
    ("...ij->...ji", "2,2,3"),
    ("i...->...", "2,3"),
    ("...ij,...jk->...ik", "2,3", "3,2"),
]

_EINSUM = [
    Case(
        f"Einsum {equation} of {' and '.join(shapes)}",
        ", ".join(f"float[{shape}] {name}" for name, shape in zip("abc", shapes)),
        f'y = Einsum<equation="{equation}">({", ".join("abc"[: len(shapes)])})',
    )
    for equation, *shapes in _EQUATIONS
]
_EINSUM += [
    # a label of size 1 is broadcast by onnxruntime, and given a wrong size by ONNX's inference
    # where it comes first
    Case(
        "Einsum with a size of one",
        "float[2,3] a, float[1] b",
        'y = Einsum<equation="ij,j->ij">(a, b)',
    ),
    Case(
        "Einsum with a summed size of one",
        "float[2,3] a, float[1] b",
        'y = Einsum<equation="ij,j->i">(a, b)',
    ),
    Case("Einsum twice the same", "float[2,3] a", 'y = Einsum<equation="ij,kj->ik">(a, a)'),
    Case("Einsum of a scalar", "float[2] a, float b", 'y = Einsum<equation="i,->i">(a, b)'),
]

# n x n minors have n^2 determinants, and onnxruntime has no Det in float64: the reference is slow
# on many
_DET = [
    *(
        Case(f"Det [{shape}]", f"float[{shape}] x", "y = Det(x)")
        for shape in ("1,1", "2,2", "3,3", "4,4", "2,2,2", "2,1,3,3")
    ),
    Case(
        "Det singular", "float s", "x = Mul(s, c) y = Det(x)", "float[3,3] c = {1,2,3,2,4,6,0,1,1}"
    ),
]

_MS = ("com.microsoft",)


def _fused(
    name: str, inputs: str, attributes: str, op_type: str = "FusedMatMul", arguments: str = "a, b"
) -> Case:
    return Case(
        f"{op_type} {name}",
        inputs,
        f"y = com.microsoft.{op_type}<{attributes}>({arguments})",
        domains=_MS,
    )


_FUSED = [
    _fused("plain", "float[2,3] a, float[3,2] b", "alpha=0.5"),
    _fused("transposed", "float[3,2] a, float[4,3] b", "transA=1, transB=1, alpha=0.5"),
    _fused("batch", "float[2,3,2] a, float[2,4,3] b", "transA=1, transB=1, alpha=2.0"),
    _fused("batch transB", "float[2,2,3] a, float[4,3] b", "transB=1"),
    _fused("rows before the batch", "float[3,2,2] a, float[2,2,3] b", "transBatchA=1"),
    _fused("rows before both batches", "float[3,2,2] a, float[2,2,3] b", "transBatchA=1, transBatchB=1"),
    _fused("rows before a batch, transposed", "float[2,2,3] a, float[3,2,2] b", "transBatchA=1, transA=1, transBatchB=1, transB=1"),
    _fused("vector", "float[3] a, float[3,2] b", "alpha=0.5"),
    _fused("transposed", "float[3,2] a, float[4,3] b", "transA=1, transB=1, alpha=0.5", "TransposeMatMul"),
    *(
        _fused(
            f"{activation} {settings}".strip(),
            "float[2,3] a, float[3,4] b, float[4] c",
            f'transA=0, beta=0.5, activation="{activation}"' + (f", {settings}" if settings else ""),
            "FusedGemm",
            "a, b, c",
        )
        for activation, settings in (
            ("Relu", ""), ("Tanh", ""), ("Sigmoid", ""), ("LeakyRelu", "activation_alpha=0.2"),
            ("HardSigmoid", "activation_alpha=0.1, activation_beta=0.4"),
        )
    ),
    _fused("without C", "float[2,3] a, float[4,3] b", 'transB=1, activation="Tanh"', "FusedGemm"),
]  # fmt: skip

CASES = [*_MATMUL, *_GEMM, *_EINSUM, *_DET, *_FUSED]
