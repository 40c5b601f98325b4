"""What the results of a convolution and of its gradients must be."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx.parser


def exact_sums(
    attributes: str, feeds: Mapping[str, np.ndarray], depthwise: bool = False
) -> dict[str, np.ndarray]:
    """y = Conv<attributes>(x, w, b) and its gradients: the sums over all taps, in float64."""
    x, w, b, dy = (feeds[value].astype(np.float64) for value in ("x", "w", "b", "y_grad"))
    (node,) = onnx.parser.parse_graph(
        f"g (float x) => (y) {{ y = Conv<k=1, {attributes or 'group=1'}>(x) }}"
    ).node
    given = {attribute.name: list(attribute.ints) for attribute in node.attribute}
    axes = x.ndim - 2
    strides, dilations = given.get("strides", [1] * axes), given.get("dilations", [1] * axes)
    pads = given.get("pads", [0] * 2 * axes)
    around = list(zip(pads[:axes], pads[axes:]))
    large = np.pad(x, [(0, 0), (0, 0), *around])
    dlarge, dw = np.zeros_like(large), np.zeros_like(w)
    y = np.zeros_like(dy) + b.reshape(-1, *[1] * axes)
    filters, channels = ("c", "c") if depthwise else ("o", "oc")
    for tap in np.ndindex(w.shape[2:]):
        read = (slice(None), slice(None), *(
            slice(t * d, t * d + (n - 1) * s + 1, s)
            for t, d, s, n in zip(tap, dilations, strides, dy.shape[2:])
        ))  # fmt: skip
        of_tap = (slice(None), 0 if depthwise else slice(None), *tap)
        y += np.einsum(f"{channels},nc...->n{filters}...", w[of_tap], large[read])
        dlarge[read] += np.einsum(f"{channels},n{filters}...->nc...", w[of_tap], dy)
        flat = (dy.reshape(*dy.shape[:2], -1), large[read].reshape(*x.shape[:2], -1))
        dw[of_tap] = np.einsum(f"n{filters}p,ncp->{channels}", *flat, optimize=True)
    inside = tuple(slice(before, n - after) for (before, after), n in zip(around, large.shape[2:]))
    return {
        "y": y,
        "x_grad": dlarge[(slice(None), slice(None), *inside)],
        "w_grad": dw,
        "b_grad": dy.sum((0, *range(2, 2 + axes))),
    }
