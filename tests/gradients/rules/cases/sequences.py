"""Sequences and optional values, of known and of unknown length."""

# a case is a row of a table

from tests.gradients.rules.cases import Case

A = "float[4,3] a"
ONE, BACK = "int64 i = {1}", "int64 i = {-1}"

CASES = [
    Case("SplitToSequence rows", A, "s = SplitToSequence<keepdims=0>(a) u = SequenceAt(s, i) v = SequenceAt(s, j) y = Mul(u, v)", f"{ONE}, int64 j = {{-1}}"),
    Case("SplitToSequence rows kept", A, "s = SplitToSequence<axis=-1>(a) y = SequenceAt(s, i)", ONE),
    Case("SplitToSequence pieces", "float[5,2] a", "s = SplitToSequence(a, n) u = SequenceAt(s, i) v = SequenceAt(s, j) w = ReduceSum<keepdims=0>(v) y = Mul(u, w)", f"int64 n = {{2}}, {ONE}, int64 j = {{-1}}"),
    Case("SplitToSequence pieces that broadcast", "float[5,2] a", "s = SplitToSequence(a, n) u = SequenceAt(s, i) v = SequenceAt(s, j) y = Mul(u, v)", f"int64 n = {{2}}, {ONE}, int64 j = {{-1}}"),
    Case("SplitToSequence sizes", "float[2,5] a", "s = SplitToSequence<axis=1>(a, n) u = SequenceAt(s, i) v = SequenceAt(s, j) y = Tanh(u) z = Exp(v)", f"int64[3] n = {{2, 1, 2}}, {BACK}, int64 j = {{1}}"),
    Case("SplitToSequence int32", "float[5,2] a", "s = SplitToSequence(a, n) y = SequenceAt(s, i)", "int32[2] n = {2, 3}, int32 i = {1}"),
    Case("SplitToSequence computed sizes", "float[4,2] a, float[1,3] b", "n = Shape(b) s = SplitToSequence(a, n) y = SequenceAt(s, i)", BACK, frozen=("b",)),
    Case("SequenceAt computed row", "float[3,4] a", "m = ArgMax<axis=0, keepdims=0>(c) s = SplitToSequence<keepdims=0>(a) y = SequenceAt(s, m)", "float[3] c = {1, 3, 2}"),
    Case("SequenceAt computed piece", "float[5,2] a, float[3] b", "m = ArgMax<axis=0, keepdims=0>(b) s = SplitToSequence(a, n) h = SequenceAt(s, m) y = ReduceSum(h)", "int64 n = {2}", frozen=("b",)),
    Case("SequenceAt computed part", "float[2,5] a, float[3] b", "m = ArgMax<axis=0, keepdims=0>(b) s = SplitToSequence<axis=1>(a, n) h = SequenceAt(s, m) y = ReduceSum(h)", "int64[3] n = {2, 1, 2}", frozen=("b",)),
    # equal sizes must be known
    Case("SequenceAt computed, constructed", "float[2,2] a, float[2,2] b, float[3] c", "m = ArgMax<axis=0, keepdims=0>(c) s = SequenceConstruct(a, b, a) y = SequenceAt(s, m)", frozen=("c",), shapes=("static",)),
    Case("SequenceConstruct", "float[2,3] a, float[1,3] b", "s = SequenceConstruct(a, b, a) y = ConcatFromSequence<axis=0>(s)"),
    Case("SequenceConstruct new axis", "float[2,3] a, float[2,3] b", "s = SequenceConstruct(a, b) y = ConcatFromSequence<axis=-1, new_axis=1>(s)"),
    Case("SequenceConstruct at", "float[2,3] a, float[1,3] b", "s = SequenceConstruct(a, b) u = SequenceAt(s, i) y = Mul(u, a)", BACK),
    Case("SequenceInsert", "float[2,3] a, float[1,3] b", "e = SequenceEmpty<dtype=1>() s = SequenceInsert(e, a) t = SequenceInsert(s, b, i) u = SequenceInsert(t, a) y = ConcatFromSequence<axis=0>(u)", "int64 i = {0}"),
    Case("SequenceInsert into parts", "float[4,2] a, float[1,2] b", "s = SplitToSequence(a, n) t = SequenceInsert(s, b, i) y = ConcatFromSequence<axis=0>(t)", f"int64[2] n = {{1, 3}}, {BACK}"),
    # how many pieces must be known
    Case("SequenceInsert into pieces", "float[4,2] a, float[2,2] b", "s = SplitToSequence(a, n) t = SequenceInsert(s, b) y = ConcatFromSequence<axis=1>(t)", "int64 n = {2}", shapes=("static",)),
    Case("SequenceErase", "float[2,3] a, float[1,3] b", "s = SequenceConstruct(a, b, a) t = SequenceErase(s, i) u = SequenceErase(t) y = ConcatFromSequence<axis=0>(u)", ONE, frozen=("b",)),
    Case("ConcatFromSequence of all parts", "float[5,2] a", "s = SplitToSequence(a, n) h = ConcatFromSequence<axis=0>(s) y = Mul(h, a)", "int64 n = {2}"),
    Case("ConcatFromSequence of rows", A, "s = SplitToSequence<keepdims=0>(a) y = ConcatFromSequence<axis=0>(s)"),
    Case("ConcatFromSequence of rows, new axis", A, "s = SplitToSequence<keepdims=0>(a) y = ConcatFromSequence<axis=-1, new_axis=1>(s)"),
    Case("ConcatFromSequence of columns, new axis", "float[2,3,2] a", "s = SplitToSequence<axis=1, keepdims=0>(a) y = ConcatFromSequence<axis=0, new_axis=1>(s)"),
    Case("ConcatFromSequence along another axis", "float[2,4,3] a", "s = SplitToSequence<axis=1>(a, n) y = ConcatFromSequence<axis=0>(s)", "int64 n = {2}"),
    Case("ConcatFromSequence along a later axis", "float[4,2] a", "s = SplitToSequence<axis=0>(a, n) y = ConcatFromSequence<axis=-1>(s)", "int64 n = {2}"),
    Case("ConcatFromSequence of kept rows, new axis", "float[3,2] a", "s = SplitToSequence<axis=0>(a) y = ConcatFromSequence<axis=1, new_axis=1>(s)"),
    Case("ConcatFromSequence of equal sizes, new axis", "float[4,2] a", "s = SplitToSequence(a, n) y = ConcatFromSequence<axis=0, new_axis=1>(s)", "int64[2] n = {2, 2}"),
    Case("OptionalGetElement", A, "o = Optional(a) g = OptionalGetElement(o) y = Mul(g, a)"),
    Case("OptionalGetElement of a tensor", A, "g = OptionalGetElement(a) y = Mul(g, a)"),
    Case("OptionalGetElement of a sequence", "float[2,3] a, float[1,3] b", "s = SequenceConstruct(a, b) o = Optional(s) g = OptionalGetElement(o) y = ConcatFromSequence<axis=0>(g)"),
    Case("Optional asked for", A, "o = Optional(a) h = OptionalHasElement(o) f = Cast<to=1>(h) g = OptionalGetElement(o) y = Mul(g, f)"),
]  # fmt: skip
