r"""The principal part of a weight, with which adapters of PiSSA begin.

Meng et al. 2024, arXiv:2404.02948: of the singular value decomposition $W = U S V^T$ the adapter
gets the $r$ largest singular values, $s A B = U_r S_r V_r^T$. The frozen weight is the residual
$W - s A B$, so that the layer computes at first what it did.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from onnxfit.errors import ModelError

Array = npt.NDArray[Any]


def principal_matrices(weight: Array, rank: int, scale: float, *, name: str) -> tuple[Array, Array]:
    r"""Return $A = U_r \sqrt{S_r / s}$ and $B = \sqrt{S_r / s}\, V_r^T$, in float64.

    - `weight`: of (inputs, outputs).
    - `rank`: $r$.
    - `scale`: $s$.
    - `name`: that of the weight, for the error.

    Raises ModelError for a weight with numbers that are not finite.
    """
    matrix = np.asarray(weight, np.float64)
    if not np.isfinite(matrix).all():
        raise ModelError(
            f"The weight {name!r} has numbers that are not finite, so that it has no principal part"
            " for init='pissa': repair it, or exclude it from the adapters' target."
        )
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    roots = np.sqrt(values[:rank] / scale)
    return left[:, :rank] * roots, roots[:, None] * right[:rank]
