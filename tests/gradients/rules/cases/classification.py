"""Losses of classification."""

# a case is a row of a table

from tests.gradients.rules.cases import Case

LABELS, IMAGES = "int64[4] t = {0, 1, 2, 1}", "int64[2,2] t = {0, 1, 2, 1}"
WEIGHTS = ", float[3] w = {0.5, 2, 3}"


def losses() -> list[Case]:
    cases = []
    for op, head in (
        ("SoftmaxCrossEntropyLoss", "l = Identity(a)"),
        ("NegativeLogLikelihoodLoss", "l = LogSoftmax<axis=1>(a)"),
    ):
        for reduction in ("mean", "sum", "none"):
            for ignore in ("", ", ignore_index=1", ", ignore_index=-1"):
                name, loss = (
                    f"{op} {reduction}{ignore}",
                    f'{head} y = {op}<reduction="{reduction}"{ignore}>',
                )
                labels, images = (
                    t.replace("1}", "-1}") if "-1" in ignore else t for t in (LABELS, IMAGES)
                )
                cases += [
                    Case(name, "float[4,3] a", f"{loss}(l, t)", labels),
                    Case(f"{name} weights", "float[4,3] a", f"{loss}(l, t, w)", labels + WEIGHTS),
                    Case(f"{name} 3-D", "float[2,3,2] a", f"{loss}(l, t)", images),
                ]
            cases += [
                Case(f"{op} {reduction} trained weights", "float[4,3] a, float[3] w", f'{head} y = {op}<reduction="{reduction}">(l, t, w)', LABELS, low=0.3),
                Case(f"{op} {reduction} trained weights, 4-D, ignored", "float[1,3,2,2] a, float[3] w",
                     f'{head} y = {op}<reduction="{reduction}", ignore_index=7>(l, t, w)', "int64[1,2,2] t = {0, 7, 2, 0}", low=0.3),
            ]  # fmt: skip
        cases += [
            Case(f"{op} int32", "float[4,3] a", f"{head} y = {op}(l, t)", "int32[4] t = {0, 1, 2, 1}"),
            Case(f"{op} all ignored", "float[2,3] a, float[2,3] b", f'{head} u = {op}<reduction="sum", ignore_index=-100>(l, t) s = Add(b, u) y = Tanh(s)', "int64[2] t = {-100, -100}"),
            Case(f"{op} labels the first input", "float[4,3] a", f"{head} n = ArgMax<axis=1, keepdims=0>(a) y = {op}(l, n)"),
            Case(f"{op} frozen scores", "float[4,3] a, float[3] w", f"{head} y = {op}(l, t, w)", LABELS, low=0.3, frozen=("a",)),
        ]  # fmt: skip
    return cases


CASES = [
    *losses(),
    Case("NegativeLogLikelihoodLoss any numbers", "float[4,3] a", "y = NegativeLogLikelihoodLoss(a, t)", LABELS),
    Case("SoftmaxCrossEntropyLoss log_prob", "float[4,3] a", "z, y = SoftmaxCrossEntropyLoss(a, t)", LABELS),
    Case("SoftmaxCrossEntropyLoss log_prob only", "float[4,3] a", "u, y = SoftmaxCrossEntropyLoss(a, t)", LABELS),
    Case("SoftmaxCrossEntropyLoss log_prob only, trained weights", "float[4,3] a, float[3] w", "u, y = SoftmaxCrossEntropyLoss(a, t, w) v = Add(u, u)", LABELS, low=0.3, frozen=("w",)),
    Case("SoftmaxCrossEntropyLoss both, 3-D", "float[2,3,2] a", 'y, z = SoftmaxCrossEntropyLoss<reduction="none">(a, t)', IMAGES),
    Case("SoftmaxCrossEntropyLoss large scores", "float[4,3] a", "b = Mul(a, k) y = SoftmaxCrossEntropyLoss(b, t)", LABELS + ", float k = {20}"),
]  # fmt: skip
