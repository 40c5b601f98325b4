"""Small models that onnxruntime computes in two ways, or refuses, and the right answers.

`python scripts/disagreements/known.py` prints what the installed onnxruntime answers, as JSON. It
needs only NumPy, onnx and onnxruntime.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import onnxruntime

Array = npt.NDArray[Any]
LEVELS = ("ORT_ENABLE_ALL", "ORT_DISABLE_ALL")  # of SessionOptions.graph_optimization_level
RIGHT, WRONG, REFUSED = "right", "wrong", "refused"


@dataclass(frozen=True)
class Known:
    """A model of which a version of onnxruntime gives a wrong answer, or none.

    - `name`: a heading.
    - `reason`: sentences about the cause.
    - `text`: the model in ONNX's text format.
    - `inputs`: arrays by name.
    - `right`: a function of the inputs, in NumPy, with the answer of ONNX's definition.
    """

    name: str
    reason: str
    text: str
    inputs: Mapping[str, Array]
    right: Callable[..., Array]

    @property
    def model(self) -> onnx.ModelProto:
        return onnx.parser.parse_model(self.text)

    @property
    def answer(self) -> Array:
        return self.right(**self.inputs)


def run(model: onnx.ModelProto, inputs: Mapping[str, Array], level: str) -> list[Array]:
    """Return the outputs of a model, with onnxruntime's optimizations of a level."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    outputs: list[Array] = session.run(None, dict(inputs))
    return outputs


def differs(found: Array, right: Array, tolerance: float = 1e-4) -> bool:
    """Return whether two arrays differ by more than rounding, relative to the largest number."""
    found, right = np.asarray(found), np.asarray(right)
    if found.shape != right.shape:
        return True
    if right.dtype.kind != "f":
        return not np.array_equal(found, right)
    finite = np.abs(right[np.isfinite(right)].astype(np.float64))
    bound = tolerance * float(finite.max(initial=0.0))
    return not np.allclose(found, right, rtol=0, atol=bound, equal_nan=True)


def outcome(known: Known, level: str) -> tuple[str, str]:
    """Return whether onnxruntime's answer is right, and the answer or the error as text."""
    try:
        (found,) = run(known.model, known.inputs, level)
    except Exception as error:  # onnxruntime raises its own classes
        return REFUSED, str(error).splitlines()[0][:200]
    return (WRONG if differs(found, known.answer) else RIGHT), json.dumps(rounded(found))


def rounded(array: Array) -> Any:
    """Return an array as lists of numbers with seven digits."""
    if array.ndim:
        return [rounded(part) for part in array]
    return float(f"{array.item():.7g}")


def outcomes() -> dict[str, Any]:
    """Return the version of onnxruntime, and its answers by name and level."""
    onnxruntime.set_default_logger_severity(4)
    answers = {known.name: {level: outcome(known, level) for level in LEVELS} for known in KNOWN}
    return {"version": onnxruntime.__version__, "onnx": onnx.__version__, "answers": answers}


def average_pool(x: Array, kernel: int, stride: int, pad: int, counts_padding: bool) -> Array:
    """Return the means of windows of the last two axes, with ceil_mode=1, by ONNX 19.

    A window that begins behind the last element and its padding at the start is left out, and a
    mean counts no element behind the padding.
    """
    size = x.shape[-1]
    count = math.ceil((size + 2 * pad - kernel) / stride) + 1
    if (count - 1) * stride >= size + pad:
        count -= 1
    y = np.zeros((*x.shape[:-2], count, count), np.float32)
    for i, j in np.ndindex(count, count):
        spans = []
        for start in (i * stride - pad, j * stride - pad):
            end = min(start + kernel, size + pad)
            spans.append((max(start, 0), min(end, size), end - start))
        (top, bottom, rows), (left, right, columns) = spans
        window = x[..., top:bottom, left:right]
        number = rows * columns if counts_padding else window[0, 0].size
        y[..., i, j] = window.sum((-2, -1)) / number
    return y


def transposed_convolution(x: Array, w: Array, dilation: int, output_padding: int) -> Array:
    """Return a transposed convolution of one channel and stride 1: each element adds a kernel."""
    y = np.zeros(x.size + dilation * (w.size - 1) + output_padding, np.float32)
    for i, number in enumerate(x.ravel()):
        for j, factor in enumerate(w.ravel()):
            y[i + dilation * j] += number * factor
    return y.reshape(1, 1, -1)


IMAGE = np.arange(25, dtype=np.float32).reshape(1, 1, 5, 5)
INTEGERS = np.array([-3, 2, -5, 90], np.int8)
KNOWN = [
    Known(
        "int8 without a zero point, before Unsqueeze",
        "The optimizer moves DequantizeLinear behind the Unsqueeze with a new pair of QuantizeLinear"
        " and DequantizeLinear. Without a zero point, QuantizeLinear makes uint8: negative numbers"
        " become 0. The same happens before Reshape, Transpose and Slice.",
        """<ir_version: 8, opset_import: ["": 19]>
g (int8[4] q) => (float[4,1] y) <float one = {1}, int64[1] axes = {1}> {
  d = DequantizeLinear(q, one)
  u = Unsqueeze(d, axes)
  y = Add(u, u)
}""",
        {"q": INTEGERS},
        lambda q: 2 * q.astype(np.float32)[:, None],
    ),
    Known(
        "int8 weights without a zero point, before Transpose",
        "As above, for constant integers.",
        """<ir_version: 8, opset_import: ["": 19]>
g (float[1,2] x) => (float[1,2] y) <int8[2,2] q = {-3, 2, -5, 90}, float one = {1}> {
  d = DequantizeLinear(q, one)
  t = Transpose(d)
  y = MatMul(x, t)
}""",
        {"x": np.array([[1, 2]], np.float32)},
        lambda x: x @ INTEGERS.reshape(2, 2).T.astype(np.float32),
    ),
    Known(
        "int8 with the zero point 0, before Unsqueeze, opset 21",
        "The optimizer leaves out the zero point, since it is 0, and sets `output_dtype` of the new"
        " QuantizeLinear. Type inference then fails, and no session is made.",
        """<ir_version: 10, opset_import: ["": 21]>
g (int8[4] q) => (float[4,1] y) <float one = {1}, int8 zero = {0}, int64[1] axes = {1}> {
  d = DequantizeLinear(q, one, zero)
  u = Unsqueeze(d, axes)
  y = Neg(u)
}""",
        {"q": INTEGERS},
        lambda q: -q.astype(np.float32)[:, None],
    ),
    Known(
        "MatMul with int8 weights",
        "The optimizer writes a MatMulNBits that rounds the floats of x to 8 bits, too"
        " (`session.qdq_matmulnbits_accuracy_level` is 4 by default). The model asks for products of"
        " floats.",
        """<ir_version: 8, opset_import: ["": 17]>
g (float[1,2] x) => (float[1,2] y) <int8[2,2] q = {-3, -5, 2, 90}, float one = {1}, int8 zero = {0}> {
  d = DequantizeLinear(q, one, zero)
  y = MatMul(x, d)
}""",
        {"x": np.array([[1, 2]], np.float32)},
        lambda x: x @ INTEGERS.reshape(2, 2).T.astype(np.float32),
    ),
    Known(
        "AveragePool with ceil_mode=1 and count_include_pad=1",
        "A window that reaches beyond the padding is divided by the size of the kernel. By ONNX, the"
        " elements beyond the padding do not count.",
        """<ir_version: 9, opset_import: ["": 19]>
g (float[1,1,5,5] x) => (float[1,1,3,3] y) {
  y = AveragePool<kernel_shape=[2,2], strides=[2,2], ceil_mode=1, count_include_pad=1>(x)
}""",
        {"x": IMAGE},
        lambda x: average_pool(x, 2, 2, 0, True),
    ),
    Known(
        "AveragePool with ceil_mode=1 and a window behind all elements",
        "A window that begins in the padding at the end is no part of the output since opset 19.",
        """<ir_version: 9, opset_import: ["": 19]>
g (float[1,1,5,5] x) => (float[1,1,A,B] y) {
  y = AveragePool<kernel_shape=[2,2], strides=[2,2], pads=[1,1,1,1], ceil_mode=1>(x)
}""",
        {"x": IMAGE},
        lambda x: average_pool(x, 2, 2, 1, False),
    ),
    Known(
        "ConvTranspose with an output_padding below the dilation",
        "By ONNX, `output_padding` is less than the stride or the dilation, here 1 < 2. onnxruntime"
        " compares it with the stride only, at run time. PyTorch accepts it.",
        """<ir_version: 8, opset_import: ["": 17]>
g (float[1,1,3] x) => (float[1,1,8] y) <float[1,1,3] w = {1, 2, 3}> {
  y = ConvTranspose<dilations=[2], output_padding=[1]>(x, w)
}""",
        {"x": np.arange(3, dtype=np.float32).reshape(1, 1, 3)},
        lambda x: transposed_convolution(x, np.array([1, 2, 3], np.float32), 2, 1),
    ),
]


if __name__ == "__main__":
    print(json.dumps(outcomes()))
