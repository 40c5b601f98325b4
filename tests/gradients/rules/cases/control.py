"""If, Scan and Loop."""

# a case is a row of a table

from tests.gradients.rules.cases import Case

DOUBLE = "the judge needs types inside the bodies"

# Conditions that are true or false of every input, but not known before the graph runs: an If on a
# constant would be replaced by its branch.
YES = "m = ReduceMax<keepdims=0>(a) t = Less(m, far)"
NO = "n = ReduceMax<keepdims=0>(a) f = Greater(n, far)"
FAR = "float far = {9}"

CASES = [
    Case("If then", "float[2,3] a, float[3] b",
         f"{YES} y = If (t) <then_branch = u () => (y1) {{ h = Mul(a, b) y1 = Tanh(h) }}, else_branch = e () => (y2) {{ y2 = Neg(a) }}>", FAR),
    Case("If else", "float[2,3] a, float[2,3] b",
         f"{NO} y = If (f) <then_branch = u () => (y1) {{ y1 = Mul(a, b) }}, else_branch = e () => (y2) {{ h = Tanh(b) y2 = Sub(a, h) }}>", FAR),
    Case("If on a computed condition, two outputs", "float[3] a, float[3] b",
         """s = ReduceSum<keepdims=0>(a) c = Greater(s, k) h = Exp(b)
            y, z = If (c) <then_branch = u () => (y1, z1) { y1 = Mul(h, a) z1 = Neg(h) }, else_branch = e () => (y2, z2) { y2 = Add(a, h) z2 = Mul(a, a) }>""",
         "float k = {0.1}"),
    Case("If hands on", "float[3] a, float[3] b",
         f"{YES} y = If (t) <then_branch = u () => (y1) {{ y1 = Identity(a) }}, else_branch = e () => (y2) {{ y2 = Identity(b) }}>", FAR),
    Case("If in If", "float[3] a, float[3] b",
         f"""{YES} {NO} y = If (t) <then_branch = u () => (y1) {{ h = Mul(a, b)
              y1 = If (f) <then_branch = v () => (w1) {{ w1 = Neg(h) }}, else_branch = w () => (w2) {{ w2 = Mul(h, a) }}> }},
            else_branch = e () => (y2) {{ y2 = Neg(a) }}>""", FAR),
    Case("Scan states and slices", "float[2] s, float[4,2] x, float[2] w",
         "y, z = Scan <num_scan_inputs=1, body = g (float[2] s0, float[2] x0) => (float[2] s1, float[2] o) { p = Mul(s0, w) s1 = Add(p, x0) o = Tanh(s1) }> (s, x)"),
    Case("Scan backwards", "float[2] s, float[4,2] x, float[2] w",
         """y, z = Scan <num_scan_inputs=1, scan_input_directions=[1], scan_output_directions=[1],
              body = g (float[2] s0, float[2] x0) => (float[2] s1, float[2] o) { p = Mul(s0, w) s1 = Add(p, x0) o = Tanh(s1) }> (s, x)"""),
    Case("Scan one way in, the other out", "float[2] s, float[4,2] x",
         """y, z = Scan <num_scan_inputs=1, scan_input_directions=[0], scan_output_directions=[1],
              body = g (float[2] s0, float[2] x0) => (float[2] s1, float[2] o) { p = Mul(s0, x0) s1 = Add(p, x0) o = Tanh(s1) }> (s, x)"""),
    Case("Scan along axis 1", "float[2] s, float[2,4] x",
         """y, z = Scan <num_scan_inputs=1, scan_input_axes=[1], scan_output_axes=[1],
              body = g (float[2] s0, float[2] x0) => (float[2] s1, float[2] o) { p = Mul(s0, x0) s1 = Add(p, x0) o = Tanh(s1) }> (s, x)"""),
    Case("Scan two of each, one output unused", "float[2] s, float[2] r, float[3,2] x, float[3,2] v",
         """y, q, z, u = Scan <num_scan_inputs=2, body = g (float[2] s0, float[2] r0, float[2] x0, float[2] v0) => (float[2] s1, float[2] r1, float[2] o, float[2] p)
              { h = Mul(s0, x0) s1 = Add(h, r0) r1 = Mul(r0, v0) o = Mul(s1, r1) p = Neg(o) }> (s, r, x, v)"""),
    Case("Scan without state", "float[3,2] x, float[2] w",
         "y = Scan <num_scan_inputs=1, body = g (float[2] x0) => (float[2] o) { h = Mul(x0, w) o = Tanh(h) }> (x)"),
    Case("Scan with a counter", "float[2] s, float[3,2] x",
         """n, y = Scan <num_scan_inputs=1, body = g (int64 n0, float[2] s0, float[2] x0) => (int64 n1, float[2] s1)
              { n1 = Add(n0, one) f = Cast<to=1>(n0) h = Mul(x0, f) s1 = Add(s0, h) }> (zero, s, x)""", "int64 zero = {0}, int64 one = {1}"),
    Case("Loop", "float[2] s, float[2] w",
         """y, z = Loop <body = g (int64 i, bool c, float[2] s0) => (bool d, float[2] s1, float[2] o)
              { d = Identity(c) p = Mul(s0, w) f = Cast<to=1>(i) s1 = Add(p, f) o = Tanh(p) }> (n, t, s)""", "int64 n = {3}, bool t = {1}"),
    Case("Loop that stops early", "float[2] s, float[2] w",
         """y, z = Loop <body = g (int64 i, bool c, float[2] s0) => (bool d, float[2] s1, float[2] o)
              { d = Less(i, two) p = Mul(s0, w) s1 = Tanh(p) o = Mul(p, s0) }> (n, t, s)""", "int64 n = {9}, bool t = {1}, int64 two = {2}"),
    Case("Loop of states only, by trip count", "float[2] s, float[2] w",
         "y = Loop <body = g (int64 i, bool c, float[2] s0) => (bool d, float[2] s1) { d = Identity(c) s1 = Mul(s0, w) }> (n, , s)", "int64 n = {3}"),
    Case("Loop in Loop", "float[2] s, float[2] w",
         """y = Loop <body = g (int64 i, bool c, float[2] s0) => (bool d, float[2] s1) { d = Identity(c)
              q = Loop <body = h (int64 j, bool e, float[2] r0) => (bool k, float[2] r1) { k = Identity(e) r1 = Mul(r0, w) }> (n, t, s0)
              s1 = Tanh(q) }> (n, t, s)""", "int64 n = {2}, bool t = {1}"),
    Case("Scan with If inside", "float[2] s, float[3,2] x",
         """y, z = Scan <num_scan_inputs=1, body = g (float[2] s0, float[2] x0) => (float[2] s1, float[2] o)
              { m = ReduceSum<keepdims=0>(x0) c = Greater(m, k)
                p = If (c) <then_branch = u () => (y1) { y1 = Mul(s0, x0) }, else_branch = e () => (y2) { y2 = Add(s0, x0) }>
                s1 = Tanh(p) o = Mul(p, s0) }> (s, x)""", "float k = {0}"),
]  # fmt: skip
