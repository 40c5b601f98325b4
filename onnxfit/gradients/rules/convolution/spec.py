"""Strides, dilations, pads and groups of a convolution, and the operators applied with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxfit.gradients.building import Ints, arange, axis_size, spatial_shape
from onnxfit.graph.values import GraphBuilder, Value


@dataclass(frozen=True)
class ConvSpec:
    """Attributes of a convolution or pool, one entry per spatial axis.

    `pads` are those before every axis, then those after every axis, as in ONNX.
    """

    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]
    group: int = 1

    @classmethod
    def of(
        cls, axes: int, strides: Ints | None, dilations: Ints | None, group: int = 1
    ) -> ConvSpec:
        """Fill in ONNX's defaults for `axes` spatial axes; the pads are zero."""
        return cls(
            tuple(strides or [1] * axes),
            tuple(dilations or [1] * axes),
            (0,) * (2 * axes),
            group,
        )

    @property
    def axes(self) -> list[int]:
        """The spatial axes, which come after batch and channels."""
        return list(range(2, 2 + len(self.strides)))

    @property
    def pads_before(self) -> tuple[int, ...]:
        return self.pads[: len(self.strides)]

    @property
    def pads_after(self) -> tuple[int, ...]:
        return self.pads[len(self.strides) :]

    @property
    def note_content(self) -> tuple[Ints, Ints, Ints, int]:
        """The content of a note about a convolution."""
        return self.strides, self.dilations, self.pads_before, self.group

    def extents(self, kernel: Ints) -> list[int]:
        """Return the number of elements from the first to the last of a dilated window."""
        return [(k - 1) * d + 1 for k, d in zip(kernel, self.dilations)]


def padding(
    op: GraphBuilder,
    spec: ConvSpec,
    auto_pad: str,
    pads: Ints | None,
    large: Value,
    small: Value,
    kernel: Ints | Value,
    output_padding: Ints | None = None,
) -> tuple[int, ...] | Value:
    """Return the pads before every axis, then after every axis.

    They are numbers where `auto_pad` and the known sizes decide them, else a computed vector. They
    are never negative: `crop` removes elements. `output_padding` is that of a ConvTranspose.
    """
    zero = (0,) * len(spec.strides)
    if auto_pad == "NOTSET":
        return tuple(pads or zero * 2)
    if auto_pad not in ("SAME_UPPER", "SAME_LOWER"):
        return zero * 2
    total = None
    if not isinstance(kernel, Value):
        total = _total_padding(spec, large, small, kernel, output_padding)
    if total is not None:
        total = [max(t, 0) for t in total]
        halves = [t // 2 for t in total]
        rests = [t - half for t, half in zip(total, halves)]
        return tuple(halves + rests if auto_pad == "SAME_UPPER" else rests + halves)
    sizes = kernel if isinstance(kernel, Value) else op.constant(np.array(kernel, np.int64))
    beyond_first = sizes * spec.dilations - spec.dilations
    computed_total = op.Max(
        (op.shape(small, 2) - 1) * spec.strides
        + beyond_first
        + (np.array(output_padding or zero) + 1)
        - op.shape(large, 2),
        0,
    )
    half = computed_total / 2
    rest = computed_total - half
    return op.Concat(*((half, rest) if auto_pad == "SAME_UPPER" else (rest, half)), axis=0)


def _total_padding(
    spec: ConvSpec, large: Value, small: Value, kernel: Ints, output_padding: Ints | None
) -> list[int] | None:
    """Return the pads of both ends of every axis together; None if unknown sizes decide them.

    They are negative where windows leave out elements.
    """
    pixels = spatial_shape(large)
    positions = spatial_shape(small)
    extents = spec.extents(kernel)
    if pixels and positions:
        more = output_padding or (0,) * len(spec.strides)
        sizes = zip(pixels, positions, spec.strides, extents, more)
        return [(o - 1) * s + e + m - n for n, o, s, e, m in sizes]
    if set(spec.strides) == {1} and not output_padding:
        return [extent - 1 for extent in extents]
    return None


@dataclass(frozen=True)
class Crop:
    """The part of a tensor that the windows of `auto_pad` read with a stride above their extent.

    The windows then leave out elements at the ends: onnxruntime computes negative pads.
    """

    op: GraphBuilder
    whole: Value
    start: Value  # the first element of the part, for each axis
    end: Value
    axes: list[int]
    sizes: list[int | None]

    def part(self) -> Value:
        part = self.op.Slice(self.whole, self.start, self.end, self.axes)
        part.ir.shape = ir.Shape([*(self.whole.shape or [None, None])[:2], *self.sizes])
        return part

    def gradient(self, gradient: Value) -> Value:
        """Return the gradient of the whole tensor from that of the part."""
        after = self.op.shape(self.whole, 2) - self.end
        pads = self.op.Concat(self.start, after, axis=0)
        return self.op.Pad(gradient, pads, None, self.axes)


def crop(
    op: GraphBuilder, spec: ConvSpec, auto_pad: str, x: Value, y: Value, kernel: Ints | Value,
    first_element: Callable[[Value, int], Value],
) -> Crop | None:  # fmt: skip
    """Return the part of x that the windows read; None if `auto_pad` removes no elements.

    `first_element` applies the operator itself, along one axis, to the numbers of the elements, and
    returns the number of the first one that a window reads. Versions of onnxruntime begin at
    different elements, and the gradient follows the version that runs the graph.
    """
    extents = spec.extents(kernel) if not isinstance(kernel, Value) else [1] * len(spec.strides)
    # An axis of a kernel of unknown size counts as cropped until the graph runs.
    cropped = [s > e for s, e in zip(spec.strides, extents)]
    totals = None
    if not isinstance(kernel, Value):
        totals = _total_padding(spec, x, y, kernel, None)
    if totals is not None:
        cropped = [total < 0 for total in totals]
    if not auto_pad.startswith("SAME") or not any(cropped):
        return None
    sizes: list[int | None] = [None] * len(cropped)
    pixels = spatial_shape(x)
    if pixels is not None and totals is not None:
        sizes = [n + min(t, 0) for n, t in zip(pixels, totals)]
    size = op.shape(x, 2)
    reach = kernel if isinstance(kernel, Value) else op.constant(np.array(kernel, np.int64))
    covered = (op.shape(y, 2) - 1) * spec.strides + (reach - 1) * spec.dilations + 1
    kept = op.Min(covered, size)
    starts = []
    for axis, may_crop in enumerate(cropped):
        if not may_crop:
            starts.append(op.constant(np.zeros(1, np.int64)))
            continue
        numbers = op.cast(arange(op, axis_size(op, x, 2 + axis)), np.float32)
        first = first_element(op.Reshape(numbers, [1, 1, -1]), axis)
        first = op.Reshape(op.cast(op.Round(first), np.int64), [1])
        starts.append(op.Where(op.Slice(kept < size, [axis], [axis + 1]), first, 0))
    start = op.Concat(*starts, axis=0) if len(starts) > 1 else starts[0]
    return Crop(op, x, start, start + kept, spec.axes, sizes)


def apply_conv(
    operator: Callable[..., Value], x: Value, w: Value, spec: ConvSpec, **attributes: Any
) -> Value:
    """Apply `operator`, which is op.Conv or op.ConvTranspose, with the attributes of `spec`."""
    y = operator(
        x,
        w,
        strides=spec.strides,
        dilations=spec.dilations,
        pads=spec.pads,
        group=spec.group,
        **attributes,
    )
    return with_rank(y, 2 + len(spec.strides))


def with_rank(y: Value, rank: int) -> Value:
    """Give a convolution's output its rank, which ONNX infers only for a known kernel size."""
    if y.ir.shape is None:
        y.ir.shape = ir.Shape([None] * rank)
    return y


def crop_like(op: GraphBuilder, value: Value, like: Value, spec: ConvSpec) -> Value:
    """Remove elements from the end of every spatial axis, down to the sizes of `like`."""
    size = spatial_shape(like)
    if size and size == spatial_shape(value):
        return value
    return op.Slice(value, [0] * len(spec.axes), op.shape(like, 2), spec.axes)
