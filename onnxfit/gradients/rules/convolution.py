"""Convolutions: one form in three tensors, so that each gradient is the form solved for another one
of them.

A window of weights slides over the large tensor; at every stop it meets one element of the small
one:

    sum over image n, filter m, channel c, stop o, tap k of   large[n, c, stride o + dilation k - pad] w[m, c, k] small[n, m, o]

Conv computes small from (large, w), ConvTranspose large from (small, w). With this, the gradients
are (Dumoulin and Visin 2016, "A guide to convolution arithmetic for deep learning", chapter 4)

    Conv:           dx = large of (dy, w)       dw = weights of (x, dy)      db = sum of dy
    ConvTranspose:  dx = small of (dy, w)       dw = weights of (dy, x)      db = sum of dy
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxfit.gradients.building import INT64_MIN, MICROSOFT, Ints, spatial_shape, static_shape
from onnxfit.gradients.table import Gradients, NoGradientError, decompose, gradient
from onnxfit.graph.values import GraphBuilder, Value

# Up to so many taps, the weights' gradient copies the images once per tap, for a MatMul; beyond,
# the copies cost more than they bring.
COPIED_TAPS = 27
# From so many channels on both sides, a product for every tap alone takes 0.5 to 0.9 of the time of
# one product of all taps' copies side by side.
WIDE = 16
# Where a row of an image has so many times fewer elements than channels, copies with the channels
# last are faster: 0.87 to 1.0 of the time.
NARROW = 4
# From so many images on, one Gather copies what the taps see faster than a Slice for each and a
# Concat: 0.4 to 1.1 of the time.
MANY = 16
# So many copied elements (16 MB) are made at once where there are more: beyond, they leave the
# processor's cache. 0.9 to 1.0 of the time.
CACHED = 2**22
# A Gather's list of places goes into the graph: not with more entries than these.
LISTED = 2**16


@dataclass(frozen=True)
class Sliding:
    """How the window moves: per spatial axis, and the padding before every axis, then after every
    axis.
    """

    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]
    group: int = 1

    @classmethod
    def of(cls, axes: int, strides: Ints | None, dilations: Ints | None, group: int = 1) -> Sliding:
        """By an operator's attributes, without its padding."""
        return cls(
            tuple(strides or [1] * axes), tuple(dilations or [1] * axes), (0,) * (2 * axes), group
        )

    @property
    def axes(self) -> list[int]:
        return list(range(2, 2 + len(self.strides)))

    @property
    def before(self) -> tuple[int, ...]:
        return self.pads[: len(self.strides)]

    @property
    def after(self) -> tuple[int, ...]:
        return self.pads[len(self.strides) :]

    def reach(self, taps: Ints) -> list[int]:
        """From the first to the last element of a window, both counted."""
        return [(k - 1) * d + 1 for k, d in zip(taps, self.dilations)]


@gradient("Conv")
def conv(
    op: GraphBuilder, x: Value, w: Value, b: Value | None, y: Value, dy: Value, *,
    auto_pad: str, dilations: Ints | None, group: int, pads: Ints | None, strides: Ints | None,
) -> Gradients:  # fmt: skip
    way = Sliding.of(w.rank - 2, strides, dilations, group)
    found = padding(op, way, auto_pad, pads, x, y, spatial_shape(w) or op.shape(w, 2))
    if isinstance(found, Value):
        return (
            lambda: large_of(op, dy, w, way, x, op.Slice(found, [0], [len(way.axes)])),
            lambda: weights_of(op, op.Pad(x, found, None, way.axes), dy, way, w),
            lambda: sum_of(op, dy, way),
        )
    way = replace(way, pads=found)
    return (
        lambda: large_of(op, dy, w, way, x),
        lambda: weights_of(op, x, dy, way, w),
        lambda: sum_of(op, dy, way),
    )


@gradient("ConvTranspose")
def conv_transpose(
    op: GraphBuilder, x: Value, w: Value, b: Value | None, y: Value, dy: Value, *,
    auto_pad: str, dilations: Ints | None, group: int, output_padding: Ints | None, output_shape: Ints | None,
    pads: Ints | None, strides: Ints | None,
) -> Gradients:  # fmt: skip
    way = Sliding.of(w.rank - 2, strides, dilations, group)
    if output_shape and auto_pad != "SAME_UPPER":
        # the sizes alone say how much is cut off, and the larger half before
        auto_pad = "SAME_LOWER"
    found = padding(
        op, way, auto_pad, pads, y, x, spatial_shape(w) or op.shape(w, 2), output_padding
    )
    if isinstance(found, Value):
        dy = op.Pad(dy, found, None, way.axes)
    else:
        way = replace(way, pads=found)
    return (
        lambda: small_of(op, dy, w, way),
        lambda: weights_of(op, dy, x, way, w),
        lambda: sum_of(op, dy, way),
    )


@decompose("FusedConv", MICROSOFT)
def fused_conv(
    op: GraphBuilder, x: Value, w: Value, b: Value | None, z: Value | None, *,
    activation: str | None, activation_params: Sequence[float] | None, auto_pad: str | None, dilations: Ints | None,
    group: int | None, kernel_shape: Ints | None, pads: Ints | None, strides: Ints | None,
) -> Value:  # fmt: skip
    """activation(Conv(x, w, b) + z)"""
    way: dict[str, Any] = {"dilations": dilations, "group": group, "pads": pads, "strides": strides}
    y = _ranked(op.Conv(x, w, b, auto_pad=auto_pad, kernel_shape=kernel_shape, **way), w.rank - 2)
    if z is not None:
        y = y + z
    given = list(activation_params or ())
    if activation in ("Relu", "Tanh", "Sigmoid"):
        activated: Value = getattr(op, activation)(y)
        return activated
    if activation == "LeakyRelu":
        return op.LeakyRelu(y, alpha=given[0] if given else None)
    if activation == "HardSigmoid":
        alpha, beta = (*given, None, None)[:2]
        return op.HardSigmoid(y, alpha=alpha, beta=beta)
    if activation == "Clip":
        return op.Clip(y, *given)
    if activation:
        raise NoGradientError(
            f"its activation is {activation!r}",
            "Relu, Tanh, Sigmoid, LeakyRelu, Clip or HardSigmoid",
        )
    return y


# The three forms
# -------------------------------------------------------------------------------------------------------------


def small_of(op: GraphBuilder, large: Value, w: Value, way: Sliding) -> Value:
    """Every window, weighted and summed."""
    return _slid(op.Conv, large, w, way)


def large_of(
    op: GraphBuilder, small: Value, w: Value, way: Sliding, like: Value, start: Value | None = None
) -> Value:
    """Every element of `small` added, by the weights, to the window it came from; in the spatial
    shape of `like`, from `start` on.
    """
    if start is not None:
        room = [stride - 1 for stride in way.strides]
        whole = _slid(op.ConvTranspose, small, w, way, output_padding=room)
        return op.Slice(whole, start, start + op.shape(like, 2), way.axes)
    turned = _as_conv(op, small, w, way)
    if turned is not None:
        return turned
    size, stops, taps = spatial_shape(like), spatial_shape(small), spatial_shape(w)
    # elements behind the last window: less than a stride
    unseen = [stride - 1 for stride in way.strides]
    if size and stops and taps:
        unseen = [
            n - ((o - 1) * s + r - b - a)
            for n, o, s, r, b, a in zip(
                size, stops, way.strides, way.reach(taps), way.before, way.after
            )
        ]
    return _cut(op, _slid(op.ConvTranspose, small, w, way, output_padding=unseen), like, way)


def weights_of(op: GraphBuilder, large: Value, small: Value, way: Sliding, like: Value) -> Value:
    """For every tap, what it saw times what it met; in the shape of `like`."""
    stops, sizes = spatial_shape(small), static_shape(like)
    if stops and sizes and spatial_shape(large) and math.prod(sizes[2:]) <= COPIED_TAPS:
        return _by_taps(op, large, small, way, stops, sizes)
    return _by_conv(op, large, small, way, like)


def sum_of(op: GraphBuilder, dy: Value, way: Sliding) -> Value:
    return op.ReduceSum(dy, [0, *way.axes], keepdims=0)


def _as_conv(op: GraphBuilder, small: Value, w: Value, way: Sliding) -> Value | None:
    """`large_of` as a convolution of the stops with the weights turned round: with a stride of 1,
    and where that is faster.
    """
    sizes = static_shape(w)
    if sizes is None or set(way.strides) != {1}:
        return None
    m, c, *taps = sizes
    pads = [r - 1 - pad for r, pad in zip(way.reach(taps) * 2, way.pads)]
    # this costs by the m channels of `small`, ConvTranspose by those it makes
    if min(pads) < 0 or m > 2 * c * way.group:
        return None
    way = replace(way, pads=tuple(pads))
    stops = static_shape(small)
    # turning heavy weights round costs more than copying `small`
    heavy = stops is not None and math.prod(sizes) >= 2 * math.prod(stops)
    if stops and heavy and way.group == 1 and min(m, c) >= WIDE and math.prod(taps) <= COPIED_TAPS:
        return _as_product(op, small, w, way, stops, sizes)
    if way.group == 1:
        w = _swapped(op, w, way)
    elif c > 1 or m > way.group:
        w = op.Transpose(op.Reshape(w, [way.group, m // way.group, c, -1]), perm=[0, 2, 1, 3])
        w = op.Reshape(w, [way.group * c, m // way.group, *taps])
    if math.prod(taps) > 1:
        back = [-1] * len(taps)
        w = op.Slice(w, back, [INT64_MIN] * len(taps), way.axes, back)
    return _slid(op.Conv, small, w, way)


def _as_product(
    op: GraphBuilder, small: Value, w: Value, way: Sliding, stops: Ints, sizes: Ints
) -> Value:
    """The same convolution as a product of matrices, what the taps see beside each other in a row:
    0.5 to 0.9 of the time on two threads.
    """
    m, c, *taps = sizes
    images, _, *places = stops
    ends = [
        n + before + after - r + 1
        for n, before, after, r in zip(places, way.before, way.after, way.reach(taps))
    ]
    seen = _seen(way, places, ends, taps)[::-1].T  # the last tap first: the weights turned round
    small = _with_padding(op, _places_first(op, small), places, seen)
    rows = op.Reshape(op.Gather(small, seen.ravel(), axis=1), [-1, seen.shape[1] * m])
    x = rows @ op.Reshape(op.Transpose(op.Reshape(w, [m * c, -1]), perm=[1, 0]), [-1, c])
    x = op.Transpose(op.Reshape(x, [images, -1, c]), perm=[0, 2, 1])
    return op.Reshape(x, [images, c, *ends])


def _by_taps(
    op: GraphBuilder, large: Value, small: Value, way: Sliding, stops: Ints, sizes: Ints
) -> Value:
    """What every tap saw as columns of a matrix ("im2col", Chellapilla, Puri and Simard 2006),
    times what it met.
    """
    filters, channels, *taps = sizes
    group = way.group
    depthwise = channels == 1 and filters == group
    listed = math.prod(taps) * math.prod(stops) <= LISTED
    # sorting `small` by image costs by its filters, what is saved goes by the copies
    if (
        group == 1
        and static_shape(small) is not None
        and (images_and_more := static_shape(large)) is not None
        and images_and_more[0] >= MANY
        and 2 * filters <= channels * math.prod(taps)
        and listed
    ):
        return _gathered(op, large, small, way, stops, sizes)
    if group == 1 and min(filters, channels) >= WIDE:
        return _tap_by_tap(op, large, small, way, stops, sizes)
    # A matrix for each image if that makes the sums no larger than what is summed, else one of all
    # images, which has to be sorted by channel.
    images = [0] if depthwise or filters // group <= math.prod(stops) else []
    groups = [group] if group > 1 and not depthwise else []
    large = _padded(op, large, way, 2)
    if not images:
        large, small = _swapped(op, large, way), _swapped(op, small, way)
    if groups:
        large = op.Reshape(
            large,
            [*images, group, channels, *([] if images else [-1]), *(spatial_shape(large) or ())],
        )
    views = _views(op, large, way, stops, taps, large.rank - len(taps))
    if depthwise:  # a channel meets one filter only: nothing to multiply as matrices
        sums = [op.ReduceSum(view * small, [0, *way.axes], keepdims=1) for view in views]
        return op.Reshape(op.Concat(*sums, axis=2), [group, 1, *taps])
    before = [*images, *groups]
    columns = op.Reshape(op.Concat(*views, axis=len(before)), [*before, len(views) * channels, -1])
    w = op.Reshape(small, [*before, filters // group, -1]) @ op.Transpose(
        columns, perm=[*range(len(before)), len(before) + 1, len(before)]
    )
    if images:
        w = op.ReduceSum(w, [0], keepdims=0)
    return _channels_second(op, op.Reshape(w, [filters, *taps, channels]))


def _gathered(
    op: GraphBuilder, large: Value, small: Value, way: Sliding, stops: Ints, sizes: Ints
) -> Value:
    """The same, with the images last: what a tap sees at a stop is one piece of memory for each
    channel.
    """
    filters, channels, *taps = sizes
    images, _, *places = _sizes(large)
    seen = _seen(way, places, stops, taps)
    met = op.Reshape(_images_last(op, small), [filters, -1])
    large = _with_padding(
        op, op.Reshape(_images_last(op, large), [channels, -1, images]), places, seen
    )
    at_once = max(CACHED // (channels * images * math.prod(stops)), taps[-1])
    products = []
    for first in range(0, len(seen), at_once):
        places_of_taps = seen[first : first + at_once]
        columns = op.Reshape(
            op.Gather(large, places_of_taps.ravel(), axis=1), [channels * len(places_of_taps), -1]
        )
        # the copies first, which a product then reads as they are
        products.append(op.Reshape(op.Gemm(columns, met, transB=1), [channels, -1, filters]))
    w = op.Concat(*products, axis=1) if len(products) > 1 else products[0]
    return op.Reshape(op.Transpose(op.Reshape(w, [-1, filters]), perm=[1, 0]), sizes)


def _seen(way: Sliding, size: Ints, stops: Ints, taps: Ints) -> np.ndarray:
    """[tap, stop]: the place that a tap sees, among all places in a row; one behind the last where
    it sees padding.
    """
    place, inside = np.zeros((1, 1), np.int64), np.ones((1, 1), bool)
    for n, o, k, stride, dilation, before in zip(
        size, stops, taps, way.strides, way.dilations, way.before
    ):
        along = np.arange(k)[:, None] * dilation + np.arange(o) * stride - before
        wide = (len(place) * k, place.shape[1] * o)
        place = (place[:, None, :, None] * n + along[:, None]).reshape(wide)
        inside = (inside[:, None, :, None] & ((along >= 0) & (along < n))[:, None]).reshape(wide)
    return np.where(inside, place, math.prod(size))


def _with_padding(op: GraphBuilder, value: Value, size: Ints, seen: np.ndarray) -> Value:
    """A tensor whose second axis are all places in a row, with a zero behind the last where `seen`
    has padding.
    """
    return op.Pad(value, [0, 0, 0, 0, 1, 0]) if seen.max() == math.prod(size) else value


def _tap_by_tap(
    op: GraphBuilder, large: Value, small: Value, way: Sliding, stops: Ints, sizes: Ints
) -> Value:
    """A product for each tap, of all images: none of the copies is there for longer than it takes."""
    filters, channels, *taps = sizes
    if None not in (static_shape(large), static_shape(small)) and channels >= NARROW * stops[-1]:
        large, small, first, last = _channels_last(op, large), _channels_last(op, small), 1, True
    else:
        large, small, first, last = _swapped(op, large, way), _swapped(op, small, way), 2, False
    met = op.Reshape(small, [-1, filters] if last else [filters, -1])
    products = [
        op.Gemm(
            met,
            op.Reshape(view, [-1, channels] if last else [channels, -1]),
            transA=int(last),
            transB=int(not last),
        )
        for view in _views(op, _padded(op, large, way, first), way, stops, taps, first)
    ]
    w = op.Reshape(op.Concat(*products, axis=0), [len(products), filters * channels])
    # as a matrix, which onnxruntime transposes fastest
    return op.Reshape(op.Transpose(w, perm=[1, 0]), [filters, channels, *taps])


def _views(
    op: GraphBuilder, large: Value, way: Sliding, stops: Ints, taps: Ints, axis: int
) -> list[Value]:
    """What every tap sees of a padded tensor whose spatial axes begin with `axis`."""
    starts = (
        [t * d for t, d in zip(tap, way.dilations)] for tap in itertools.product(*map(range, taps))
    )
    return [_window(op, large, start, stops, way.strides, axis) for start in starts]


def _window(
    op: GraphBuilder, value: Value, start: Ints, count: Ints, strides: Ints, axis: int
) -> Value:
    """`count` elements from `start` on, along the axes from `axis` on."""
    end = [first + (n - 1) * s + 1 for first, n, s in zip(start, count, strides)]
    if not any(start) and value.shape is not None and end == [*value.shape[axis : axis + len(end)]]:
        return value
    return op.Slice(value, start, end, list(range(axis, axis + len(end))), strides)


def _by_conv(op: GraphBuilder, large: Value, small: Value, way: Sliding, like: Value) -> Value:
    """A convolution again, in which images are channels and stops are taps."""
    if way.group > 1:
        sizes = op.shape(large, 2)
        large = op.Reshape(large, op.Concat([0, way.group, -1], sizes, axis=0))
        large = op.Transpose(large, perm=[2, 1, 0, *(axis + 1 for axis in way.axes)])
        large = op.Reshape(large, op.Concat([0, -1], sizes, axis=0))
    else:
        large = _swapped(op, large, way)
    across = replace(way, strides=way.dilations, dilations=way.strides)
    return _cut(
        op, _swapped(op, _slid(op.Conv, large, _swapped(op, small, way), across), way), like, way
    )


def _slid(operator: Callable[..., Value], x: Value, w: Value, way: Sliding, **others: Any) -> Value:
    """Conv or ConvTranspose."""
    return _ranked(
        operator(
            x,
            w,
            strides=way.strides,
            dilations=way.dilations,
            pads=way.pads,
            group=way.group,
            **others,
        ),
        len(way.strides),
    )


def _ranked(y: Value, axes: int) -> Value:
    """A convolution's output with its rank, for which inference wants the size of the kernel."""
    if y.ir.shape is None:
        y.ir.shape = ir.Shape([None] * (2 + axes))
    return y


# Sizes
# -----------------------------------------------------------------------------------------------------------------------


def padding(
    op: GraphBuilder,
    way: Sliding,
    auto_pad: str,
    pads: Ints | None,
    large: Value,
    small: Value,
    taps: Ints | Value,
    more: Ints | None = None,
) -> tuple[int, ...] | Value:
    """How far the window reaches out before every axis, then after every axis; a value where that
    depends on sizes yet unknown.

    `more` is the output_padding of ConvTranspose.
    """
    nothing = (0,) * len(way.strides)
    if auto_pad not in ("SAME_UPPER", "SAME_LOWER"):
        return tuple(pads or nothing * 2) if auto_pad == "NOTSET" else nothing * 2
    size, stops = spatial_shape(large), spatial_shape(small)
    if not isinstance(taps, Value):
        total = None
        if size and stops:
            sizes = zip(size, stops, way.strides, way.reach(taps), more or nothing)
            total = [max((o - 1) * s + r + m - n, 0) for n, o, s, r, m in sizes]
        elif set(way.strides) == {1} and not more:
            total = [r - 1 for r in way.reach(taps)]
        if total is not None:
            less = [t // 2 for t in total]
            rest = [t - half for t, half in zip(total, less)]
            return tuple(less + rest if auto_pad == "SAME_UPPER" else rest + less)
    reach = (
        op.constant(np.array(taps, np.int64)) if not isinstance(taps, Value) else taps
    ) * way.dilations - way.dilations
    far = op.Max(
        (op.shape(small, 2) - 1) * way.strides
        + reach
        + (np.array(more or nothing) + 1)
        - op.shape(large, 2),
        0,
    )
    half = far / 2
    return op.Concat(
        *((half, far - half) if auto_pad == "SAME_UPPER" else (far - half, half)), axis=0
    )


def _swapped(op: GraphBuilder, value: Value, way: Sliding) -> Value:
    """The first two axes swapped."""
    return op.Transpose(value, perm=[1, 0, *way.axes])


def _places_first(op: GraphBuilder, value: Value) -> Value:
    """(images, places, channels)"""
    images, channels, *_ = _sizes(value)
    # of few axes, which onnxruntime transposes faster
    flat = op.Reshape(value, [images, channels, -1])
    return op.Transpose(flat, perm=[0, 2, 1])


def _channels_last(op: GraphBuilder, value: Value) -> Value:
    """A tensor of known sizes with its channels behind the spatial axes."""
    images, channels, *places = _sizes(value)
    return op.Reshape(_places_first(op, value), [images, *places, channels])


def _images_last(op: GraphBuilder, value: Value) -> Value:
    """(channels and places, images)"""
    return op.Transpose(op.Reshape(value, [_sizes(value)[0], -1]), perm=[1, 0])


def _channels_second(op: GraphBuilder, w: Value) -> Value:
    """Weights whose channels are behind their taps in the order of an operator."""
    return op.Transpose(w, perm=[0, w.rank - 1, *range(1, w.rank - 1)])


def _padded(op: GraphBuilder, large: Value, way: Sliding, first: int) -> Value:
    """With zeros around its spatial axes, the first of which is `first`."""
    if not any(way.pads):
        return large
    ahead, behind = [0] * first, [0] * (2 - first)
    return op.Pad(large, [*ahead, *way.before, *behind, *ahead, *way.after, *behind])


def _sizes(value: Value) -> tuple[int, ...]:
    sizes = static_shape(value)
    assert sizes is not None  # the caller has asked `static_shape`
    return sizes


def _cut(op: GraphBuilder, value: Value, like: Value, way: Sliding) -> Value:
    """Without the elements that `like` does not have, at the end of every spatial axis."""
    size = spatial_shape(like)
    if size and size == spatial_shape(value):
        return value
    return op.Slice(value, [0] * len(way.axes), op.shape(like, 2), way.axes)
