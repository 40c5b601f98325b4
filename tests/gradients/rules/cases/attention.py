"""Attention and rotary positions, as onnxruntime fuses them."""

# a case is a row of a table

from dataclasses import replace

import onnxruntime

from tests.gradients.rules.cases import Case

TABLES = (
    "float[4,2] c = {1,1,0.5,0.9,-0.4,0.7,-0.9,0.6}, float[4,2] s = {0,0,0.8,0.3,0.9,0.5,0.1,0.8}"
)
QKV = "float[2,3,4] q, float[2,3,4] k, float[2,3,4] v"
BODY = "y = com.microsoft.MultiHeadAttention<num_heads=2{}>({})"

GQA = "y, r, t = com.microsoft.GroupQueryAttention<num_heads={}>({})"
GROUPS = "float[1,3,32] q, float[1,3,16] k, float[1,3,16] v"
HEADS = "float[2,3,16] q, float[2,3,16] k, float[2,3,16] v"
LENGTH, LENGTHS = "int32[1] l = {2}, int32 n = {3}", "int32[2] l = {2,2}, int32 n = {3}"
TURNS = ", ".join(
    f"float[4,8] {name} = {{{','.join(str(x) for x in row)}}}"
    for name, row in (
        (
            "c",
            [1] * 8
            + [
                0.5,
                0.9,
                0.8,
                0.3,
                0.1,
                0.2,
                0.6,
                0.4,
                -0.4,
                0.7,
                0.3,
                -0.2,
                0.9,
                0.5,
                0.6,
                0.1,
                -0.9,
                0.6,
                0.2,
                0.3,
                0.4,
                0.8,
                0.5,
                0.9,
            ],
        ),
        (
            "s",
            [0] * 8
            + [
                0.8,
                0.3,
                0.2,
                0.9,
                0.4,
                0.6,
                0.1,
                0.7,
                0.9,
                0.5,
                0.3,
                0.4,
                0.2,
                0.6,
                0.8,
                0.1,
                0.1,
                0.8,
                0.7,
                0.3,
                0.9,
                0.2,
                0.4,
                0.5,
            ],
        ),
    )
)

BERT = "float[7,4] w, float[5,4] f, float[4] g, float[4] b"
IDS = "int32[2,3] i = {1,6,1,0,2,3}, int32[2,3] m = {1,1,0,1,1,1}, int64 p = {0}"
STACK = """e, l = com.microsoft.EmbedLayerNormalization<epsilon=0.01>(i, , w, f, , g, b, m)
    a = com.microsoft.Attention<num_heads=2>(e, x, h, l) d = MatMul(a, o) n = com.microsoft.SkipLayerNormalization<epsilon=0.01>(d, e, g, b)
    r = com.microsoft.RotaryEmbedding(n, p, c, s) u = com.microsoft.MultiHeadAttention<num_heads=2>(r, r, n) t = Add(u, n) y = com.microsoft.QuickGelu(t)"""

# What the kernels of 1.19 lack or compute otherwise: they look through a window one wider, see
# padded tokens, and take masks of a wrong width where there are more keys than queries.
LATER = [] if tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 23) else [
    Case("MultiHeadAttention padding, other length", "float[2,2,4] q, float[2,3,4] k, float[2,3,4] v", BODY.format("", "q, k, v, , m"), "int32[2,3] m = {0,1,1,1,0,1}"),
    Case("MultiHeadAttention causal, fewer queries", "float[1,3,4] q, float[1,5,4] k, float[1,5,4] v", BODY.format(", unidirectional=1", "q, k, v")),
    Case("MultiHeadAttention causal, fewer keys", "float[2,3,4] q, float[2,2,4] k, float[2,2,4] v", BODY.format(", unidirectional=1", "q, k, v")),
    Case("MultiHeadAttention one bias of scores", f"{QKV}, float[1,1,3,3] e", BODY.format("", "q, k, v, , , e")),
    Case("GroupQueryAttention window", "float[1,4,16] q, float[1,4,16] k, float[1,4,16] v",
         GQA.format("2, kv_num_heads=2, local_window_size=2", "q, k, v, , , l, n"), "int32[1] l = {3}, int32 n = {4}"),
    Case("GroupQueryAttention window, padded", HEADS, GQA.format("2, kv_num_heads=2, local_window_size=1", "q, k, v, , , l, n"), "int32[2] l = {0,2}, int32 n = {3}"),
    Case("GroupQueryAttention padded", HEADS, GQA.format("2, kv_num_heads=2", "q, k, v, , , l, n"), "int32[2] l = {1,2}, int32 n = {3}"),
    Case("GroupQueryAttention capped", HEADS, GQA.format("2, kv_num_heads=2, softcap=0.5", "q, k, v, , , l, n"), LENGTHS),
    Case("GroupQueryAttention bias of scores, capped", f"{HEADS}, float[2,1,3,3] e", GQA.format("2, kv_num_heads=2, softcap=0.5", "q, k, v, , , l, n, , , , e"), LENGTHS),
    Case("GroupQueryAttention smooth", HEADS, GQA.format("2, kv_num_heads=2, smooth_softmax=1", "q, k, v, , , l, n"), LENGTHS),
    Case("GroupQueryAttention sink", f"{HEADS}, float[2] e", GQA.format("2, kv_num_heads=2", "q, k, v, , , l, n, , , , , e"), LENGTHS),
    Case("GroupQueryAttention sink, capped", f"{HEADS}, float[2] e", GQA.format("2, kv_num_heads=2, softcap=0.5", "q, k, v, , , l, n, , , , , e"), LENGTHS),
]  # fmt: skip

CASES = [
    replace(case, domains=("com.microsoft",), low=-1.0, high=1.0)
    for case in (
        Case("RotaryEmbedding", "float[2,2,3,4] a", "y = com.microsoft.RotaryEmbedding(a, p, c, s)", f"int64[2,3] p = {{0,1,2,1,2,3}}, {TABLES}"),
        Case("RotaryEmbedding begins at", "float[2,2,3,4] a", "y = com.microsoft.RotaryEmbedding(a, p, c, s)", f"int64[1] p = {{1}}, {TABLES}"),
        Case("RotaryEmbedding 3-D", "float[2,3,8] a", "y = com.microsoft.RotaryEmbedding(a, p, c, s)", f"int64[2,3] p = {{0,1,2,1,2,3}}, {TABLES}"),
        Case("RotaryEmbedding interleaved", "float[1,2,3,4] a", "y = com.microsoft.RotaryEmbedding<interleaved=1>(a, p, c, s)", f"int64[1] p = {{0}}, {TABLES}"),
        Case("RotaryEmbedding in part", "float[1,3,12] a", "y = com.microsoft.RotaryEmbedding<num_heads=2, rotary_embedding_dim=4>(a, p, c, s)", f"int64[1] p = {{0}}, {TABLES}"),
        Case("RotaryEmbedding in part, interleaved", "float[1,2,3,6] a", "y = com.microsoft.RotaryEmbedding<num_heads=2, rotary_embedding_dim=4, interleaved=1>(a, p, c, s)", f"int64 p = {{1}}, {TABLES}"),
        Case("RotaryEmbedding heads told", "float[1,3,8] a", "y = com.microsoft.RotaryEmbedding<num_heads=2, scale=0.5>(a, p, c, s)", f"int64[1] p = {{1}}, {TABLES}"),
        Case("RotaryEmbedding by tables that train", "float[1,3,8] a, float[4,2] c, float[4,2] s", "y = com.microsoft.RotaryEmbedding(a, p, c, s)", "int64[1,3] p = {1,3,2}"),
        Case("Attention ms", "float[2,3,4] a, float[4,12] w, float[12] b", "y = com.microsoft.Attention<num_heads=2>(a, w, b)"),
        Case("Attention ms causal, scaled", "float[2,3,4] a, float[4,12] w, float[12] b", "y = com.microsoft.Attention<num_heads=2, unidirectional=1, scale=0.3>(a, w, b)"),
        Case("Attention ms raw mask", "float[2,3,4] a, float[4,12] w, float[12] b", "y = com.microsoft.Attention<num_heads=2>(a, w, b, m)", "int32[2,3] m = {1,1,0,1,1,1}"),
        Case("Attention ms 3-D mask", "float[1,3,4] a, float[4,12] w, float[12] b", "y = com.microsoft.Attention<num_heads=2>(a, w, b, m)", "int32[1,3,3] m = {1,0,0,1,1,0,1,1,1}"),
        Case("Attention ms lengths", "float[2,3,4] a, float[4,12] w, float[12] b", "y = com.microsoft.Attention<num_heads=2>(a, w, b, m)", "int32[2] m = {2,3}"),
        Case("Attention ms ends and starts", "float[2,3,4] a, float[4,12] w, float[12] b", "y = com.microsoft.Attention<num_heads=2>(a, w, b, m)", "int32[4] m = {2,3,1,0}",
             shapes=("static",)),  # that it is two vectors shows by their length
        Case("Attention ms lengths, weak and causal", "float[2,3,4] a, float[4,12] w, float[12] b",
             "y = com.microsoft.Attention<num_heads=2, mask_filter_value=-1.5, unidirectional=1>(a, w, b, m)", "int32[2] m = {1,0}"),
        Case("Attention ms mask of other numbers", "float[2,3,4] a, float[4,12] w, float[12] b", "y = com.microsoft.Attention<num_heads=2>(a, w, b, m)", "int32[2,3] m = {2,1,0,1,-1,1}"),
        Case("Attention ms bias of scores", "float[2,3,4] a, float[4,12] w, float[12] b, float[2,2,3,3] e", "y = com.microsoft.Attention<num_heads=2>(a, w, b, , , e)"),
        Case("Attention ms sizes", "float[2,3,4] a, float[4,10] w, float[10] b", "y = com.microsoft.Attention<num_heads=2, qkv_hidden_sizes=[4,4,2]>(a, w, b)"),
        Case("MultiHeadAttention", QKV, BODY.format("", "q, k, v")),
        Case("MultiHeadAttention bias, scaled", f"{QKV}, float[12] b", BODY.format(", scale=0.4", "q, k, v, b")),
        Case("MultiHeadAttention other length and size", "float[2,2,4] q, float[2,3,4] k, float[2,3,6] v", BODY.format("", "q, k, v")),
        Case("MultiHeadAttention padding", QKV, BODY.format("", "q, k, v, , m"), "int32[2,3] m = {1,1,0,1,1,1}"),
        Case("MultiHeadAttention bias of scores", f"{QKV}, float[2,2,3,3] e", BODY.format("", "q, k, v, , , e")),
        Case("MultiHeadAttention causal", QKV, BODY.format(", unidirectional=1", "q, k, v")),
        Case("MultiHeadAttention heads given", "float[2,3,4] q, float[2,2,3,2] k, float[2,2,3,2] v", BODY.format("", "q, k, v")),
        Case("MultiHeadAttention heads given, bias", "float[2,3,4] q, float[2,2,3,2] k, float[2,2,3,2] v, float[12] b", BODY.format("", "q, k, v, b")),
        Case("MultiHeadAttention other sizes, bias", "float[2,2,4] q, float[2,3,4] k, float[2,3,6] v, float[14] b", BODY.format("", "q, k, v, b")),
        Case("MultiHeadAttention lengths", QKV, BODY.format("", "q, k, v, , m"), "int32[2] m = {2,3}"),
        Case("MultiHeadAttention 3-D mask, weak", QKV, BODY.format(", mask_filter_value=-1.5", "q, k, v, , m"), "int32[2,3,3] m = {1,0,0,1,1,0,1,1,1,0,1,1,1,0,1,0,0,1}"),
        Case("MultiHeadAttention everything", f"{QKV}, float[12] b, float[2,2,3,3] e", BODY.format(", scale=0.4, unidirectional=1", "q, k, v, b, m, e"), "int32[2,3] m = {0,1,1,1,0,1}"),
        Case("MultiHeadAttention keys used", QKV, "y, z, u = com.microsoft.MultiHeadAttention<num_heads=2>(q, k, v)"),
        Case("GroupQueryAttention", GROUPS, GQA.format("4, kv_num_heads=2", "q, k, v, , , l, n"), LENGTH),
        Case("GroupQueryAttention two rows, scaled", HEADS, GQA.format("2, kv_num_heads=2, scale=0.2", "q, k, v, , , l, n"), LENGTHS),
        Case("GroupQueryAttention packed", "float[1,3,64] q", GQA.format("4, kv_num_heads=2", "q, , , , , l, n"), LENGTH),
        Case("GroupQueryAttention rotary", "float[1,3,16] q, float[1,3,16] k, float[1,3,16] v", GQA.format("1, kv_num_heads=1, do_rotary=1", "q, k, v, , , l, n, c, s"), f"{LENGTH}, {TURNS}"),
        Case("GroupQueryAttention rotary in part, interleaved, packed", "float[1,3,96] q", GQA.format("1, kv_num_heads=1, do_rotary=1, rotary_interleaved=1", "q, , , , , l, n, c, s"),
             f"{LENGTH}, {TURNS}"),
        Case("GroupQueryAttention values used", GROUPS, "y, r, z = com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads=2>(q, k, v, , , l, n)", LENGTH),
        *LATER,
        # each has been, alone
        Case("Attention ms between fused neighbours", f"{BERT}, float[4,12] x, float[12] h, float[4,4] o", STACK, f"{IDS}, {TABLES}", twice=False),
        Case("Attention ms after what is frozen", f"{BERT}, float[4,12] x, float[12] h, float[4,4] o", STACK, f"{IDS}, {TABLES}", frozen=("w", "f", "g", "b", "x", "h"),
             # embedding and attention stay as they are: for float32, and tables of known size
             single=True, shapes=("static", "batch")),
    )
]  # fmt: skip
