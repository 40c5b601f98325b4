"""Operators of com.microsoft."""

# a case is a row of a table; single: onnx.reference rounds Erf, and only
# onnxruntime has Inverse

from dataclasses import replace

from tests.gradients.rules.cases import Case

CASES = [
    replace(case, domains=("com.microsoft",))
    for case in (
        Case("ms.Gelu", "float[2,3] a", "y = com.microsoft.Gelu(a)", single=True),
        Case("ms.FastGelu", "float[2,3] a", "y = com.microsoft.FastGelu(a)"),
        Case("ms.FastGelu bias", "float[2,3] a, float[3] b", "y = com.microsoft.FastGelu(a, b)"),
        Case("ms.QuickGelu", "float[2,3] a", "y = com.microsoft.QuickGelu(a)"),
        Case("ms.QuickGelu alpha", "float[2,3] a", "y = com.microsoft.QuickGelu<alpha=0.7>(a)"),
        Case("ms.BiasGelu", "float[2,3] a, float[3] b", "y = com.microsoft.BiasGelu(a, b)", single=True),
        Case("ms.Trilu", "float[3,3] a", "y = com.microsoft.Trilu<upper=0>(a)"),
        Case("ms.Trilu k", "float[2,3,4] a", "y = com.microsoft.Trilu(a, k)", "int64 k = {1}"),
        Case("ms.Inverse", "float[2,3,3] a", "e = Add(a, i) y = com.microsoft.Inverse(e)", "float[3,3] i = {3,0,0,0,3,0,0,0,3}", low=-0.5, high=0.5, single=True),
        Case("ms.Gelu between", "float[2,3] a, float[3,2] w", "h = MatMul(a, w) g = com.microsoft.Gelu(h) s = Sigmoid(g) y = Mul(s, g)", single=True),
        Case("ms.EmbedLayerNormalization", "float[7,4] w, float[5,4] p, float[2,4] s, float[4] g, float[4] b",
             "y, m, z = com.microsoft.EmbedLayerNormalization<epsilon=0.01>(i, t, w, p, s, g, b)", "int32[2,3] i = {1,6,1,0,2,3}, int32[2,3] t = {0,1,1,0,0,1}"),
        Case("ms.EmbedLayerNormalization sum used", "float[7,4] w, float[5,4] p, float[2,4] s, float[4] g, float[4] b",
             "y, m, z = com.microsoft.EmbedLayerNormalization<epsilon=0.01>(i, t, w, p, s, g, b)", "int32[2,3] i = {1,6,1,0,2,3}, int32[2,3] t = {0,1,1,0,0,1}"),
        Case("ms.EmbedLayerNormalization positions, no segments", "float[7,4] w, float[5,4] p, float[4] g, float[4] b",
             "y, m = com.microsoft.EmbedLayerNormalization<epsilon=0.01>(i, , w, p, , g, b, , q)", "int32[2,3] i = {1,6,1,0,2,3}, int32[2,3] q = {4,0,1,3,3,2}"),
        Case("ms.EmbedLayerNormalization, lengths used", "float[7,4] w, float[5,4] p, float[2,4] s, float[4] g, float[4] b",
             "u, m, t = com.microsoft.EmbedLayerNormalization<epsilon=0.01>(i, k, w, p, s, g, b, k) n = Cast<to=1>(m) r = Unsqueeze(n, e) y = Mul(u, r)",
             "int32[2,3] i = {1,6,1,0,2,3}, int32[2,3] k = {1,1,0,1,0,0}, int64[2] e = {1,2}"),
        Case("ms.EmbedLayerNormalization, no mask", "float[7,4] w, float[5,4] p, float[2,4] s, float[4] g, float[4] b",
             "u, m = com.microsoft.EmbedLayerNormalization<epsilon=0.01>(i, k, w, p, s, g, b) n = Cast<to=1>(m) r = Unsqueeze(n, e) y = Add(u, r)",
             "int32[2,3] i = {1,6,1,0,2,3}, int32[2,3] k = {1,1,0,1,0,0}, int64[2] e = {1,2}"),
    )
]  # fmt: skip
