"""Operators of opset 22 and later, and newer forms of older ones."""

from __future__ import annotations

from onnxfit.load.runtime_support import newest_opset
from tests.gradients.rules.cases import Case

CUM_PROD_FORMS = ("", "<exclusive=1>", "<reverse=1>", "<exclusive=1, reverse=1>")
LINEAR_ATTENTION = "float[2,3,4] q, float[2,3,2] k, float[2,3,4] v"
# Their definitions compute in float32, so no judge in float64 exists.
IN_FLOAT32 = [
    Case(
        "RMSNormalization",
        "float[2,3] a, float[3] s",
        "y = RMSNormalization(a, s)",
        opset=23,
        single=True,
        low=0.5,
    ),
    Case(
        "RMSNormalization axis",
        "float[2,3,2] a, float[3,2] s",
        "y = RMSNormalization<axis=1, epsilon=0.1>(a, s)",
        opset=23,
        single=True,
        low=0.5,
    ),
    Case(
        "CausalConvWithState",
        "float[2,3,5] a, float[3,1,4] w, float[3] b, float[2,3,3] s",
        "y, z = CausalConvWithState(a, w, b, s)",
        opset=27,
        single=True,
        shapes=("static", "batch"),
    ),
    Case(
        "CausalConvWithState silu",
        "float[2,3,5] a, float[3,1,2] w",
        'y, z = CausalConvWithState<activation="silu">(a, w)',
        opset=27,
        single=True,
        shapes=("static", "batch"),
    ),
    Case(
        "LinearAttention linear",
        LINEAR_ATTENTION,
        'y, z = LinearAttention<q_num_heads=2, kv_num_heads=1, update_rule="linear">(q, k, v)',
        opset=27,
        single=True,
        shapes=("static", "batch"),
    ),
    Case(
        "LinearAttention gated",
        LINEAR_ATTENTION + ", float[2,1,2,4] s, float[2,3,2] g",
        'y, z = LinearAttention<q_num_heads=2, kv_num_heads=1, update_rule="gated", scale=0.5>(q, k, v, s, g)',
        opset=27,
        single=True,
        low=-1,
        high=1,
        shapes=("static",),
    ),
    Case(
        "LinearAttention delta",
        LINEAR_ATTENTION + ", float[2,3,1] b",
        'y, z = LinearAttention<q_num_heads=2, kv_num_heads=1, update_rule="delta">(q, k, v, , , b)',
        opset=27,
        single=True,
        low=0,
        high=1,
        shapes=("static",),
    ),
    Case(
        "LinearAttention gated delta",
        LINEAR_ATTENTION + ", float[2,3,1] g, float[2,3,1] b",
        "y, z = LinearAttention<q_num_heads=2, kv_num_heads=1>(q, k, v, , g, b)",
        opset=27,
        single=True,
        low=0,
        high=1,
        shapes=("static",),
    ),
]
ALL = [
    *IN_FLOAT32,
    Case("MaxPool with a window behind the elements", "float[1,1,4,4] a", "y = MaxPool<kernel_shape=[1,1], strides=[2,3], ceil_mode=1>(a)", opset=22),
    Case("AveragePool with a window behind the elements", "float[1,1,2,2] a", "y = AveragePool<kernel_shape=[3,3], strides=[3,3], pads=[1,1,1,1], ceil_mode=1, count_include_pad=1>(a)", opset=22),
    Case("LpPool with a window behind the elements", "float[1,1,2,2] a", "y = LpPool<kernel_shape=[3,3], strides=[3,3], pads=[1,1,1,1], ceil_mode=1>(a)", opset=22, low=0.5),
    Case("Attention", "float[2,2,3,4] q, float[2,1,5,4] k, float[2,1,5,2] v", "y = Attention(q, k, v)", opset=23),
    Case("Attention causal, of three axes", "float[2,3,4] q, float[2,3,4] k, float[2,3,4] v", "y = Attention<is_causal=1, q_num_heads=2, kv_num_heads=2, softcap=2.0>(q, k, v)", opset=24, shapes=("static", "batch")),  # ONNX infers a size of 0
    Case("Attention with a mask and a past", "float[1,1,2,2] q, float[1,1,2,2] k, float[1,1,2,2] v, float[2,3] m, float[1,1,1,2] p, float[1,1,1,2] r", "y, z, c = Attention(q, k, v, m, p, r)", opset=25),
    Case("RotaryEmbedding", "float[1,2,3,4] a, float[3,2] c, float[3,2] s", "y = RotaryEmbedding(a, c, s, p)", "int64[1,3] p = {2, 0, 1}", opset=23, frozen=("c", "s")),
    Case("Swish", "float[2,3] a", "y = Swish(a)", opset=24),
    Case("Swish alpha", "float[2,3] a", "y = Swish<alpha=1.5>(a)", opset=24),
    Case("SwiGLU", "float[2,3] a, float[2,3] b", "y = SwiGLU(a, b)", opset=28),
    Case("SwiGLU alpha", "float[2,3] a, float[2,3] b", "y = SwiGLU<alpha=-0.5>(a, b)", opset=28),
    *(Case(f"CumProd {form}".rstrip(), "float[3,4] a", f"y = CumProd{form}(a, x)", "int64 x = {1}", opset=26) for form in CUM_PROD_FORMS),
    *(Case(f"CumProd with zeros {form}".rstrip(), "float[3,5] a", f"b = Mul(a, m) y = CumProd{form}(b, x)", "int64 x = {1}, float[3,5] m = {1, 0, 1, 1, 1, 1, 0, 0, 1, 1, 0, 1, 1, 0, 1}", opset=26) for form in CUM_PROD_FORMS),
    Case("CumProd first axis", "float[4] a", "y = CumProd(a, x)", "int32 x = {0}", opset=26),
    Case("CumProd middle axis", "float[2,3,2] a", "y = CumProd<reverse=1>(a, x)", "int64 x = {-2}", opset=26),
    Case("TensorScatter", "float[2,5,3] a, float[2,2,3] b", "y = TensorScatter(a, b)", opset=24),
    Case("TensorScatter at indices", "float[2,5,3] a, float[2,2,3] b", "y = TensorScatter<axis=1>(a, b, i)", "int64[2] i = {3, 0}", opset=24),
    Case("TensorScatter circular", "float[2,3,4,2] a, float[2,3,3,2] b", 'y = TensorScatter<mode="circular">(a, b, i)', "int64[2] i = {3, 1}", opset=24),
    Case("BitCast to the same type", "float[2,3] a", "y = BitCast<to=1>(a)", opset=26, single=True),  # onnx.reference takes no text of the type
    Case("SpaceToDepth CRD", "float[1,2,4,6] a", 'y = SpaceToDepth<blocksize=2, mode="CRD">(a)', opset=28),
    Case("SpaceToDepth DCR", "float[1,2,4,6] a", 'y = SpaceToDepth<blocksize=2, mode="DCR">(a)', opset=28),
    Case("Mod of floats", "float[2,3] a, float[3] b", "y = Mod(a, b)", low=0.3, high=2.2, opset=28),
    Case("Mod of floats with negative quotients", "float[2,3] a, float[3] b", "n = Neg(a) y = Mod(n, b)", low=0.3, high=2.2, opset=28),
    Case("Range with stash_type", "float a, float b", "y = Range<stash_type=1>(a, e, b)", "float e = {7}", low=1.1, high=1.4, opset=27),
    Case("DequantizeLinear output_dtype", "float[3] s", "y = DequantizeLinear<output_dtype=1>(q, s)", "int8[2,3] q = {1, -2, 3, -4, 5, 6}", opset=23, twice=False, single=True),  # its text names float32
]  # fmt: skip
CASES = [case for case in ALL if case.opset <= newest_opset()]
