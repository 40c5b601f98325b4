"""Products of matrices and tensors:

MatMul, Gemm, Einsum, Det, and onnxruntime's fused forms of them.

Of Y = A B the gradients are dA = dY B' and dB = A' dY (Magnus and Neudecker, Matrix Differential
Calculus, 1988); every rule here is that, or its tensor form: the gradient of one factor of an
Einsum is an Einsum of dy with the other factors. Products are written as few large ones: a weight
matrix under a batch of matrices meets all their rows at once, in one Gemm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from string import ascii_letters

import numpy as np

from onnxfit.gradients.blocker import FITTING
from onnxfit.gradients.building import (
    MICROSOFT,
    arange,
    axis_size,
    identity_matrix,
    require_rank,
    transpose_matrices,
)
from onnxfit.gradients.table import Gradients, NoGradientError, Values, decompose, gradient
from onnxfit.graph.values import GraphBuilder, Value


@gradient("MatMul", broadcasts=True)
def matmul(op: GraphBuilder, a: Value, b: Value, y: Value, dy: Value) -> Gradients:
    if require_rank(a) == 1 and require_rank(b) == 1:
        return lambda: dy * b, lambda: dy * a
    if b.rank == 1:  # y_...m = sum_k a_...mk b_k
        return (
            lambda: op.Unsqueeze(dy, [-1]) * b,
            lambda: op.Reshape(dy, [-1]) @ op.Flatten(a, axis=-1),
        )
    if a.rank == 1:  # y_...n = sum_k a_k b_...kn
        return (
            lambda: b @ dy if b.rank == 2 else op.Squeeze(b @ op.Unsqueeze(dy, [-1]), [-1]),
            lambda: op.Unsqueeze(a, [-1]) * op.Unsqueeze(dy, [-2]),
        )
    return lambda: _left(op, b, dy), lambda: _right(op, a, b, dy)


def _left(op: GraphBuilder, b: Value, dy: Value) -> Value:
    """dY B'."""
    return op.Gemm(dy, b, transB=1) if dy.rank == b.rank == 2 else dy @ transpose_matrices(op, b)


def _right(op: GraphBuilder, a: Value, b: Value, dy: Value) -> Value:
    """A' dY; for one matrix B under many A it is one product of all their rows, not a sum of
    products.
    """
    assert b.shape is not None
    if a.rank > 2 and all(d == 1 for d in b.shape[:-2]):
        db = op.Gemm(op.Flatten(a, axis=-1), op.Flatten(dy, axis=-1), transA=1)
        return db if b.rank == 2 else op.Reshape(db, op.shape(b))
    return op.Gemm(a, dy, transA=1) if a.rank == dy.rank == 2 else transpose_matrices(op, a) @ dy


@gradient("Gemm", broadcasts=True)
def gemm(
    op: GraphBuilder, a: Value, b: Value, c: Value | None, y: Value, dy: Value,
    *, alpha: float, beta: float, transA: int, transB: int,
) -> Gradients:  # fmt: skip

    def product(left: Value, right: Value, transposed: tuple[int, int]) -> Value:
        return op.Gemm(left, right, alpha=alpha, transA=transposed[0], transB=transposed[1])

    return (
        lambda: product(b, dy, (transB, 1)) if transA else product(dy, b, (0, 1 - transB)),
        lambda: product(dy, a, (1, transA)) if transB else product(a, dy, (1 - transA, 0)),
        lambda: dy if beta == 1 else dy * beta,
    )


# Einsum
# ----------------------------------------------------------------------------------------------------------------------


@gradient("Einsum", broadcasts=True)
def einsum(
    op: GraphBuilder, xs: Values, y: Value, dy: Value, *, equation: str | bytes
) -> Gradients:
    """For y = Einsum(x_1 ...): dx_i = Einsum(dy, the other x), spread over the labels that only x_i
    has.
    """
    terms, result = labels(equation, [require_rank(x) for x in xs])

    def entry(i: int) -> Callable[[], Value]:
        return lambda: _factor(op, i, terms, result, xs, dy)

    return tuple(entry(i) for i in range(len(xs)))


def _factor(
    op: GraphBuilder, i: int, terms: Sequence[str], result: str, xs: Values, dy: Value
) -> Value:
    """The gradient of factor i, with one label per axis of each factor."""
    x, factors = xs[i], [(result, dy)]
    factors += [
        _without_ones(op, t, v, terms, xs) for j, (t, v) in enumerate(zip(terms, xs)) if j != i
    ]
    own, diagonals = _told_apart(op, x, terms[i], set("".join(terms) + result))
    ones = _ones(terms[i], x, terms, xs)
    factors += diagonals
    given = {label for term, _ in factors for label in term}
    lone = [axis for axis, label in enumerate(own) if label not in given or axis in ones]
    dx = _product(op, factors, "".join(label for axis, label in enumerate(own) if axis not in lone))
    # labels that were summed over, and that nothing else has: every element has the same gradient
    if lone:
        dx = op.Unsqueeze(dx, lone)
    # a label that is summed over may have size 1 in the other factors
    summed = [
        axis
        for axis, label in enumerate(own)
        if label not in result and not any(label in t for t, _ in diagonals)
    ]
    if not all(_same_size(dx, x, axis) for axis in summed):
        dx = op.Expand(dx, op.shape(x))
    return dx


def _same_size(a: Value, b: Value, axis: int) -> bool:
    return (
        a.shape is not None and b.shape is not None and a.shape[axis] == b.shape[axis] is not None
    )


def _without_ones(
    op: GraphBuilder, term: str, x: Value, terms: Sequence[str], xs: Values
) -> tuple[str, Value]:
    """A factor without the axes along which it is broadcast to the others: for ONNX's inference
    they have the wrong size.
    """
    ones = _ones(term, x, terms, xs)
    if not ones:
        return term, x
    return "".join(label for axis, label in enumerate(term) if axis not in ones), op.Squeeze(
        x, ones
    )


def _ones(term: str, x: Value, terms: Sequence[str], xs: Values) -> list[int]:
    """The axes of size 1 whose label has another size elsewhere."""
    sizes = {
        (label, size)
        for t, v in zip(terms, xs)
        for label, size in zip(t, v.shape or ())
        if size != 1
    }
    larger = {label for label, _ in sizes}
    return [
        axis
        for axis, (label, size) in enumerate(zip(term, x.shape or ()))
        if size == 1 and label in larger
    ]


def _told_apart(
    op: GraphBuilder, x: Value, term: str, used: set[str]
) -> tuple[str, list[tuple[str, Value]]]:
    """The labels of a factor with every repeated one renamed, and the identity matrices that make
    them equal: x_ii is x_ij I_ij.
    """
    own, diagonals = "", []
    for axis, label in enumerate(term):
        if label in own:
            new = next(letter for letter in ascii_letters if letter not in used)
            used.add(new)
            diagonals.append((label + new, _identity(op, x, axis)))
            label = new
        own += label
    return own, diagonals


def _identity(op: GraphBuilder, x: Value, axis: int) -> Value:
    """The identity matrix of the size of an axis."""
    assert x.shape is not None
    size = x.shape[axis]
    if isinstance(size, int):
        return op.constant(np.eye(size), x.dtype)
    return identity_matrix(op, axis_size(op, x, axis), x.dtype)


def _product(op: GraphBuilder, factors: list[tuple[str, Value]], result: str) -> Value:
    """Einsum; as a Transpose or MatMul, whose kernels are faster, where it is one."""
    terms, values = [t for t, _ in factors], [v for _, v in factors]
    if len(factors) == 1 and sorted(terms[0]) == sorted(result):
        perm = [terms[0].index(label) for label in result]
        return values[0] if perm == sorted(perm) else op.Transpose(values[0], perm=perm)
    if len(factors) == 2:
        for left, right in ((0, 1), (1, 0)):
            made = _matrices(op, terms[left], values[left], terms[right], values[right], result)
            if made is not None:
                return made
    return op.Einsum(*values, equation=",".join(terms) + "->" + result)


def _matrices(
    op: GraphBuilder, left: str, a: Value, right: str, b: Value, result: str
) -> Value | None:
    """a @ b where one row label, one column label and one summed label stand in the last two
    places, the same batch before them.
    """
    if not len(left) == len(right) == len(result) >= 2:
        return None
    batch, row, column = result[:-2], result[-2], result[-1]
    inner = left[-1] if left[-2] == row else left[-2]
    if inner in result or left[:-2] != batch or right[:-2] != batch:
        return None
    if set(left[-2:]) != {row, inner} or set(right[-2:]) != {inner, column}:
        return None
    flip_a, flip_b = left[-1] == row, right[-1] == inner
    if not batch:
        return op.Gemm(a, b, transA=int(flip_a), transB=int(flip_b))
    return (transpose_matrices(op, a) if flip_a else a) @ (
        transpose_matrices(op, b) if flip_b else b
    )


def labels(equation: str | bytes, ranks: Sequence[int]) -> tuple[list[str], str]:
    """One letter per axis of each factor of an Einsum, and of its result:

    `...` and an implicit result written out.

    >>> labels("...ij, jk", [3, 2])
    (['aij', 'jk'], 'aik')
    """
    text = (equation.decode() if isinstance(equation, bytes) else equation).replace(" ", "")
    inputs, arrow, result = text.partition("->")
    terms = inputs.split(",")
    if len(terms) != len(ranks):
        raise NoGradientError(
            f"its equation {text!r} has {len(terms)} terms for {len(ranks)} inputs", FITTING
        )
    letters = "".join(terms).replace(".", "")
    free = [letter for letter in ascii_letters if letter not in letters]
    # the same in all
    depth = next(
        (rank - len(t.replace("...", "")) for t, rank in zip(terms, ranks) if "..." in t), 0
    )
    if depth > len(free):
        raise NoGradientError(
            f"its equation {text!r} needs more than {len(ascii_letters)} letters for all axes"
        )
    ellipsis = "".join(free[:depth])
    if not arrow:
        result = "..." * ("..." in text) + "".join(
            sorted(letter for letter in {*letters} if letters.count(letter) == 1)
        )
    return [t.replace("...", ellipsis) for t in terms], result.replace("...", ellipsis)


# Det
# -------------------------------------------------------------------------------------------------------------------------


@gradient("Det")
def determinant(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Value:
    """d det(X) / dX is the matrix of cofactors (Jacobi), each a determinant of X without a row and
    a column: right for singular X, too.
    """
    rank = require_rank(x)
    dy = op.Unsqueeze(dy, [-2, -1])
    if x.shape is not None and x.shape[-1] == 1:
        return dy
    others, signs = _others(op, x)
    # ..., row left out, rows, column left out, columns
    minors = op.Gather(op.Gather(x, others, axis=rank - 2), others, axis=rank)
    minors = op.Transpose(minors, perm=[*range(rank - 2), rank - 2, rank, rank - 1, rank + 1])
    return dy * signs * op.Det(minors)


def _others(op: GraphBuilder, x: Value) -> tuple[Value, Value]:
    """For n x n matrices: row i of the first is 0 ... n-1 without i, element (i, j) of the second
    is (-1)^(i+j).
    """
    assert x.shape is not None
    n = next((d for d in x.shape[-2:] if isinstance(d, int)), None)
    if n is not None:
        return (
            op.constant(np.array([[k for k in range(n) if k != i] for i in range(n)], np.int64)),
            op.constant((-1.0) ** np.add.outer(np.arange(n), np.arange(n)), x.dtype),
        )
    size = op.Squeeze(op.Shape(x, start=-1), [0])
    row = arange(op, size)
    column = op.Unsqueeze(row, [1])
    before = arange(op, size - 1)
    parity = op.cast(op.Mod(row + column, 2), x.dtype)
    return before + op.cast(before >= column, np.int64), 1 - 2 * parity


# onnxruntime's fused forms
# ------------------------------------------------------------------------------------------------------


@decompose("FusedMatMul", MICROSOFT)
@decompose("TransposeMatMul", MICROSOFT)
def fused_matmul(
    op: GraphBuilder, a: Value, b: Value,
    *, alpha: float = 1.0, transA: int = 0, transB: int = 0, transBatchA: int = 0, transBatchB: int = 0,
) -> Value:  # fmt: skip
    if require_rank(a) == require_rank(b) == 2:
        return op.Gemm(a, b, alpha=alpha, transA=transA, transB=transB)
    y = _turned(op, a, transA, transBatchA) @ _turned(op, b, transB, transBatchB)
    return y if alpha == 1 else y * alpha


def _turned(op: GraphBuilder, x: Value, matrices: int, batch: int) -> Value:
    """An operand in the order MatMul wants:

    `batch` says that its rows come before the batch, `matrices` that its last two axes are swapped.
    """
    perm = list(range(x.rank))
    if x.rank == 1:
        return x
    if batch and x.rank > 2:
        perm = [*perm[1:-1], perm[0], perm[-1]]
    if matrices:
        perm[-2:] = perm[:-3:-1]
    return x if perm == sorted(perm) else op.Transpose(x, perm=perm)


@decompose("FusedGemm", MICROSOFT)
def fused_gemm(
    op: GraphBuilder, a: Value, b: Value, c: Value | None,
    *, alpha: float = 1.0, beta: float = 1.0, transA: int = 0, transB: int = 0, activation: str = "",
    activation_alpha: float | None = None, activation_beta: float | None = None, activation_gamma: float | None = None,
) -> Value:  # fmt: skip
    y = op.Gemm(a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)
    settings = {"alpha": activation_alpha, "beta": activation_beta, "gamma": activation_gamma}
    return getattr(op, activation)(y, **settings) if activation else y
