"""Attention and rotary positions, as onnxruntime fuses them."""
# ruff: noqa: E501  # a case is a row of a table

from dataclasses import replace

import onnxruntime

from tests.rules import Case

TABLES = "float[4,2] c = {1,1,0.5,0.9,-0.4,0.7,-0.9,0.6}, float[4,2] s = {0,0,0.8,0.3,0.9,0.5,0.1,0.8}"
QKV = "float[2,3,4] q, float[2,3,4] k, float[2,3,4] v"
BODY = "y = com.microsoft.MultiHeadAttention<num_heads=2{}>({})"

# The window that 1.19.2 looks through is one wider than later versions say.
WINDOW = [] if tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 20) else [
    Case("GroupQueryAttention window", "float[1,4,16] q, float[1,4,16] k, float[1,4,16] v",
         "y, r, t = com.microsoft.GroupQueryAttention<num_heads=2, kv_num_heads=2, local_window_size=2>(q, k, v, , , l, n)", "int32[1] l = {3}, int32 n = {4}"),
]  # fmt: skip

CASES = [
    replace(case, domains=("com.microsoft",), low=-1.0, high=1.0)
    for case in (
        Case("RotaryEmbedding", "float[2,2,3,4] a", "y = com.microsoft.RotaryEmbedding(a, p, c, s)", f"int64[2,3] p = {{0,1,2,1,2,3}}, {TABLES}"),
        Case("RotaryEmbedding begins at", "float[2,2,3,4] a", "y = com.microsoft.RotaryEmbedding(a, p, c, s)", f"int64[1] p = {{1}}, {TABLES}"),
        Case("RotaryEmbedding 3-D", "float[2,3,8] a", "y = com.microsoft.RotaryEmbedding(a, p, c, s)", f"int64[2,3] p = {{0,1,2,1,2,3}}, {TABLES}"),
        Case("RotaryEmbedding interleaved", "float[1,2,3,4] a", "y = com.microsoft.RotaryEmbedding<interleaved=1>(a, p, c, s)", f"int64[1] p = {{0}}, {TABLES}"),
        Case("RotaryEmbedding in part", "float[1,3,12] a", "y = com.microsoft.RotaryEmbedding<num_heads=2, rotary_embedding_dim=4>(a, p, c, s)", f"int64[1] p = {{0}}, {TABLES}",
             shapes=("static", "batch")),
        Case("Attention ms", "float[2,3,4] a, float[4,12] w, float[12] b", "y = com.microsoft.Attention<num_heads=2>(a, w, b)"),
        Case("Attention ms causal, scaled", "float[2,3,4] a, float[4,12] w, float[12] b", "y = com.microsoft.Attention<num_heads=2, unidirectional=1, scale=0.3>(a, w, b)"),
        Case("Attention ms raw mask", "float[2,3,4] a, float[4,12] w, float[12] b", "y = com.microsoft.Attention<num_heads=2>(a, w, b, m)", "int32[2,3] m = {1,1,0,1,1,1}"),
        Case("Attention ms 3-D mask", "float[1,3,4] a, float[4,12] w, float[12] b", "y = com.microsoft.Attention<num_heads=2>(a, w, b, m)", "int32[1,3,3] m = {1,0,0,1,1,0,1,1,1}"),
        Case("Attention ms lengths", "float[2,3,4] a, float[4,12] w, float[12] b", "y = com.microsoft.Attention<num_heads=2>(a, w, b, m)", "int32[2] m = {2,3}"),
        Case("Attention ms bias of scores", "float[2,3,4] a, float[4,12] w, float[12] b, float[2,2,3,3] e", "y = com.microsoft.Attention<num_heads=2>(a, w, b, , , e)"),
        Case("Attention ms sizes", "float[2,3,4] a, float[4,10] w, float[10] b", "y = com.microsoft.Attention<num_heads=2, qkv_hidden_sizes=[4,4,2]>(a, w, b)"),
        Case("MultiHeadAttention", QKV, BODY.format("", "q, k, v")),
        Case("MultiHeadAttention bias, scaled", f"{QKV}, float[12] b", BODY.format(", scale=0.4", "q, k, v, b")),
        Case("MultiHeadAttention other length and size", "float[2,2,4] q, float[2,3,4] k, float[2,3,6] v", BODY.format("", "q, k, v")),
        Case("MultiHeadAttention padding", QKV, BODY.format("", "q, k, v, , m"), "int32[2,3] m = {1,1,0,1,1,1}"),
        Case("MultiHeadAttention bias of scores", f"{QKV}, float[2,2,3,3] e", BODY.format("", "q, k, v, , , e")),
        Case("MultiHeadAttention causal", QKV, BODY.format(", unidirectional=1", "q, k, v")),
        Case("MultiHeadAttention heads given", "float[2,3,4] q, float[2,2,3,2] k, float[2,2,3,2] v", BODY.format("", "q, k, v")),
        Case("GroupQueryAttention", "float[1,3,32] q, float[1,3,16] k, float[1,3,16] v",
             "y, r, t = com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads=2>(q, k, v, , , l, n)", "int32[1] l = {2}, int32 n = {3}"),
        Case("GroupQueryAttention two rows, scaled", "float[2,3,16] q, float[2,3,16] k, float[2,3,16] v",
             "y, r, t = com.microsoft.GroupQueryAttention<num_heads=2, kv_num_heads=2, scale=0.2>(q, k, v, , , l, n)", "int32[2] l = {2,2}, int32 n = {3}"),
        Case("GroupQueryAttention packed", "float[1,3,64] q",
             "y, r, t = com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads=2>(q, , , , , l, n)", "int32[1] l = {2}, int32 n = {3}", shapes=("static", "batch")),
        Case("GroupQueryAttention rotary", "float[1,3,32] q, float[1,3,32] k, float[1,3,32] v",
             "y, r, t = com.microsoft.GroupQueryAttention<num_heads=2, kv_num_heads=2, do_rotary=1>(q, k, v, , , l, n, c, s)",
             "int32[1] l = {2}, int32 n = {3}, float[4,8] c = {1,1,1,1,1,1,1,1,0.5,0.9,0.8,0.3,0.1,0.2,0.6,0.4,-0.4,0.7,0.3,-0.2,0.9,0.5,0.6,0.1,-0.9,0.6,0.2,0.3,0.4,0.8,0.5,0.9}, float[4,8] s = {0,0,0,0,0,0,0,0,0.8,0.3,0.2,0.9,0.4,0.6,0.1,0.7,0.9,0.5,0.3,0.4,0.2,0.6,0.8,0.1,0.1,0.8,0.7,0.3,0.9,0.2,0.4,0.5}"),
        *WINDOW,
    )
]  # fmt: skip
