"""Products of matrices and tensors: MatMul, Gemm, Einsum, Det, and onnxruntime's fused products.

The gradients of Y = A B are dA = dY B' and dB = A' dY (Magnus and Neudecker, Matrix Differential
Calculus, 1988). Every rule here is that formula or its tensor form: the gradient of one factor of
an Einsum is an Einsum of dy with the other factors. Few large products are faster than many small
ones, so a weight matrix is multiplied by all rows of a batch of matrices at once, in one Gemm.
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
from onnxfit.gradients.table import Gradients, NoGradientError, Values, decompose, rule
from onnxfit.graph.inference import fused_product, like
from onnxfit.graph.values import GraphBuilder, Value


@rule("MatMul", broadcasts=True)
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
    return lambda: _left_gradient(op, b, dy), lambda: _right_gradient(op, a, b, dy)


def _left_gradient(op: GraphBuilder, b: Value, dy: Value) -> Value:
    """Return dA = dY B'."""
    return op.Gemm(dy, b, transB=1) if dy.rank == b.rank == 2 else dy @ transpose_matrices(op, b)


def _right_gradient(op: GraphBuilder, a: Value, b: Value, dy: Value) -> Value:
    """Return dB = A' dY; for one matrix B under many A, as one product of all their rows."""
    assert b.shape is not None
    if a.rank > 2 and all(d == 1 for d in b.shape[:-2]):
        db = op.Gemm(op.Flatten(a, axis=-1), op.Flatten(dy, axis=-1), transA=1)
        return db if b.rank == 2 else op.Reshape(db, op.shape(b))
    return op.Gemm(a, dy, transA=1) if a.rank == dy.rank == 2 else transpose_matrices(op, a) @ dy


@rule("Gemm", broadcasts=True)
def gemm(
    op: GraphBuilder, a: Value, b: Value, c: Value | None, y: Value, dy: Value,
    *, alpha: float, beta: float, transA: int, transB: int,
) -> Gradients:  # fmt: skip
    """Y = alpha A B + beta C, where A and B may be transposed."""

    def product(left: Value, right: Value, transposed: tuple[int, int]) -> Value:
        return op.Gemm(left, right, alpha=alpha, transA=transposed[0], transB=transposed[1])

    def da() -> Value:
        return product(b, dy, (transB, 1)) if transA else product(dy, b, (0, 1 - transB))

    def db() -> Value:
        return product(dy, a, (1, transA)) if transB else product(a, dy, (1 - transA, 0))

    return da, db, lambda: dy if beta == 1 else dy * beta


# Einsum
# ------------------------------------------------------------------------------------------------


@rule("Einsum", broadcasts=True)
def einsum(
    op: GraphBuilder, xs: Values, y: Value, dy: Value, *, equation: str | bytes
) -> Gradients:
    """For y = Einsum(x_1, ...), dx_i is an Einsum of dy and the other factors.

    dx_i is then expanded along the labels that only x_i has.
    """
    terms, result = labels(equation, [require_rank(x) for x in xs])
    factors = list(zip(terms, xs))

    def entry(i: int) -> Callable[[], Value]:
        return lambda: _factor_gradient(op, i, factors, (result, dy))

    return tuple(entry(i) for i in range(len(xs)))


# a tensor with one label for each of its axes
Factor = tuple[str, Value]


def _factor_gradient(
    op: GraphBuilder, i: int, factors: Sequence[Factor], output_gradient: Factor
) -> Value:
    """Return the gradient of factor i; `output_gradient` is dy with the labels of the result."""
    term, x = factors[i]
    result, _ = output_gradient
    used = set("".join(t for t, _ in factors) + result)
    multiplied = [output_gradient]
    multiplied += [
        _without_broadcast_axes(op, other, factors) for j, other in enumerate(factors) if j != i
    ]
    distinct, diagonals = _with_distinct_labels(op, x, term, used)
    multiplied += diagonals
    known_labels = {label for t, _ in multiplied for label in t}
    broadcast = _broadcast_axes(factors[i], factors)
    # Labels of no other factor were summed over: every element has the same gradient.
    missing = [
        axis
        for axis, label in enumerate(distinct)
        if label not in known_labels or axis in broadcast
    ]
    kept = "".join(label for axis, label in enumerate(distinct) if axis not in missing)
    dx = _einsum_of(op, multiplied, kept)
    if missing:
        dx = op.Unsqueeze(dx, missing)
    # The other factors may have size 1 for a label that is summed over.
    summed = [
        axis
        for axis, label in enumerate(distinct)
        if label not in result and not any(label in t for t, _ in diagonals)
    ]
    if not all(_same_size(dx, x, axis) for axis in summed):
        dx = op.Expand(dx, op.shape(x))
    return dx


def _same_size(a: Value, b: Value, axis: int) -> bool:
    if a.shape is None or b.shape is None:
        return False
    return a.shape[axis] == b.shape[axis] is not None


def _without_broadcast_axes(op: GraphBuilder, factor: Factor, factors: Sequence[Factor]) -> Factor:
    """Remove the axes along which a factor is broadcast to the others.

    ONNX's inference rejects these axes, because their size differs from the label's size elsewhere.
    """
    term, x = factor
    axes = _broadcast_axes(factor, factors)
    if not axes:
        return factor
    kept = "".join(label for axis, label in enumerate(term) if axis not in axes)
    return kept, op.Squeeze(x, axes)


def _broadcast_axes(factor: Factor, factors: Sequence[Factor]) -> list[int]:
    """Return the axes of size 1 whose label has another size in another factor."""
    term, x = factor
    larger = {label for t, v in factors for label, size in zip(t, v.shape or ()) if size != 1}
    sizes = enumerate(zip(term, x.shape or ()))
    return [axis for axis, (label, size) in sizes if size == 1 and label in larger]


def _with_distinct_labels(
    op: GraphBuilder, x: Value, term: str, used: set[str]
) -> tuple[str, list[Factor]]:
    """Rename every repeated label of a factor, since x_ii is x_ij I_ij.

    Return the labels, and the identity matrices that make renamed labels equal to the first ones.
    """
    distinct = ""
    diagonals: list[Factor] = []
    for axis, label in enumerate(term):
        unique = label
        if label in distinct:
            unique = next(letter for letter in ascii_letters if letter not in used)
            used.add(unique)
            diagonals.append((label + unique, _identity(op, x, axis)))
        distinct += unique
    return distinct, diagonals


def _identity(op: GraphBuilder, x: Value, axis: int) -> Value:
    """Return the identity matrix of the size of an axis."""
    assert x.shape is not None
    size = x.shape[axis]
    if isinstance(size, int):
        return op.constant(np.eye(size), x.dtype)
    return identity_matrix(op, axis_size(op, x, axis), x.dtype)


def _einsum_of(op: GraphBuilder, factors: Sequence[Factor], result: str) -> Value:
    """Return an Einsum, as a Transpose or MatMul if possible: their kernels are faster."""
    terms = [term for term, _ in factors]
    values = [value for _, value in factors]
    if len(factors) == 1 and sorted(terms[0]) == sorted(result):
        perm = [terms[0].index(label) for label in result]
        return values[0] if perm == sorted(perm) else op.Transpose(values[0], perm=perm)
    if len(factors) == 2:
        for left, right in (factors, factors[::-1]):
            product = _matrix_product(op, left, right, result)
            if product is not None:
                return product
    return op.Einsum(*values, equation=",".join(terms) + "->" + result)


def _matrix_product(op: GraphBuilder, left: Factor, right: Factor, result: str) -> Value | None:
    """Return a @ b if the Einsum multiplies matrices, or batches of matrices; else None.

    Then one row label, one column label and one summed label are the last two of each term, and
    the labels before them are the same.
    """
    left_term, a = left
    right_term, b = right
    if not len(left_term) == len(right_term) == len(result) >= 2:
        return None
    batch = result[:-2]
    row = result[-2]
    column = result[-1]
    summed = left_term[-1] if left_term[-2] == row else left_term[-2]
    if summed in result or left_term[:-2] != batch or right_term[:-2] != batch:
        return None
    if set(left_term[-2:]) != {row, summed} or set(right_term[-2:]) != {summed, column}:
        return None
    transpose_a = left_term[-1] == row
    transpose_b = right_term[-1] == summed
    if not batch:
        return op.Gemm(a, b, transA=int(transpose_a), transB=int(transpose_b))
    if transpose_a:
        a = transpose_matrices(op, a)
    if transpose_b:
        b = transpose_matrices(op, b)
    return a @ b


def labels(equation: str | bytes, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Return one letter for each axis of the factors of an Einsum, and of its result.

    `...` and an implicit result are written out.

    >>> labels("...ij, jk", [3, 2])
    (['aij', 'jk'], 'aik')
    """
    text = equation.decode() if isinstance(equation, bytes) else equation
    text = text.replace(" ", "")
    inputs, arrow, result = text.partition("->")
    terms = inputs.split(",")
    if len(terms) != len(ranks):
        raise NoGradientError(
            f"its equation {text!r} has {len(terms)} terms for {len(ranks)} inputs", FITTING
        )
    letters = "".join(terms).replace(".", "")
    free = [letter for letter in ascii_letters if letter not in letters]
    # `...` is the same number of axes in all terms.
    depths = (rank - len(t.replace("...", "")) for t, rank in zip(terms, ranks) if "..." in t)
    depth = next(depths, 0)
    if depth > len(free):
        raise NoGradientError(
            f"its equation {text!r} needs more than {len(ascii_letters)} letters for its axes"
        )
    ellipsis = "".join(free[:depth])
    if not arrow:
        result = "..." * ("..." in text) + "".join(
            sorted(letter for letter in {*letters} if letters.count(letter) == 1)
        )
    return [t.replace("...", ellipsis) for t in terms], result.replace("...", ellipsis)


# Det
# ------------------------------------------------------------------------------------------------


@rule("Det")
def determinant(op: GraphBuilder, x: Value, y: Value, dy: Value) -> Value:
    """d det(X) / dX is the matrix of cofactors (Jacobi's formula).

    Each cofactor is a determinant of X without one row and one column, also for singular X.
    """
    rank = require_rank(x)
    dy = op.Unsqueeze(dy, [-2, -1])
    if x.shape is not None and x.shape[-1] == 1:
        return dy
    others, signs = _minor_indices(op, x)
    # ..., row left out, rows, column left out, columns
    minors = op.Gather(op.Gather(x, others, axis=rank - 2), others, axis=rank)
    minors = op.Transpose(minors, perm=[*range(rank - 2), rank - 2, rank, rank - 1, rank + 1])
    return dy * signs * op.Det(minors)


def _minor_indices(op: GraphBuilder, x: Value) -> tuple[Value, Value]:
    """Return the indices and signs of the minors of n x n matrices.

    Row i of the indices is 0 ... n-1 without i; element (i, j) of the signs is (-1)^(i+j).
    """
    assert x.shape is not None
    n = next((d for d in x.shape[-2:] if isinstance(d, int)), None)
    if n is not None:
        others = [[k for k in range(n) if k != i] for i in range(n)]
        signs = (-1.0) ** np.add.outer(np.arange(n), np.arange(n))
        return op.constant(np.array(others, np.int64)), op.constant(signs, x.dtype)
    size = op.Squeeze(op.Shape(x, start=-1), [0])
    row = arange(op, size)
    column = op.Unsqueeze(row, [1])
    before = arange(op, size - 1)
    parity = op.cast(op.Mod(row + column, 2), x.dtype)
    return before + op.cast(before >= column, np.int64), 1 - 2 * parity


# onnxruntime's fused products
# ------------------------------------------------------------------------------------------------


@decompose("FusedMatMul", MICROSOFT, infer=fused_product)
@decompose("TransposeMatMul", MICROSOFT, infer=fused_product)
def fused_matmul(
    op: GraphBuilder, a: Value, b: Value,
    *, alpha: float = 1.0, transA: int = 0, transB: int = 0, transBatchA: int = 0,
    transBatchB: int = 0,
) -> Value:  # fmt: skip
    if require_rank(a) == require_rank(b) == 2:
        return op.Gemm(a, b, alpha=alpha, transA=transA, transB=transB)
    left = _fused_operand(op, a, transA, transBatchA)
    y = left @ _fused_operand(op, b, transB, transBatchB)
    return y if alpha == 1 else y * alpha


def _fused_operand(op: GraphBuilder, x: Value, swap_matrices: int, rows_first: int) -> Value:
    """Return an operand of FusedMatMul in MatMul's order of axes.

    `rows_first` says that its rows come before the batch, `swap_matrices` that its last two axes
    are swapped.
    """
    perm = list(range(x.rank))
    if x.rank == 1:
        return x
    if rows_first and x.rank > 2:
        perm = [*perm[1:-1], perm[0], perm[-1]]
    if swap_matrices:
        perm[-2:] = perm[:-3:-1]
    return x if perm == sorted(perm) else op.Transpose(x, perm=perm)


@decompose("FusedGemm", MICROSOFT, infer=like("Gemm"))
def fused_gemm(
    op: GraphBuilder, a: Value, b: Value, c: Value | None,
    *, alpha: float = 1.0, beta: float = 1.0, transA: int = 0, transB: int = 0,
    activation: str = "", activation_alpha: float | None = None,
    activation_beta: float | None = None, activation_gamma: float | None = None,
) -> Value:  # fmt: skip
    y = op.Gemm(a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)
    settings = {"alpha": activation_alpha, "beta": activation_beta, "gamma": activation_gamma}
    return getattr(op, activation)(y, **settings) if activation else y
