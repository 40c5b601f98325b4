r"""The principal part of a weight, the start of adapters with PiSSA.

Meng et al. 2024, arXiv:2404.02948: of the singular value decomposition $W = U S V^T$ the adapter
gets the $r$ largest singular values, $s A B = U_r S_r V_r^T$. The frozen weight is the residual
$W - s A B$, so the layer first computes what it did before.
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
    - `name`: the name of the weight, for the error.

    ModelError: the weight contains NaN or infinity.
    """
    matrix = np.asarray(weight, np.float64)
    if not np.isfinite(matrix).all():
        raise ModelError(
            f"The weight {name!r} contains NaN or infinity, so init='pissa' cannot decompose it."
            " Repair the weight, or exclude it from the adapters' target."
        )
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    roots = np.sqrt(values[:rank] / scale)
    return left[:, :rank] * roots, roots[:, None] * right[:rank]
