"""Integer models: make one of a float model, train its integers, and report what it loses.

All of it:

- `parameters`: the map between floats and integers, and the limits of integer types.
- `operators`: the operators of quantized models, and the constants that they read.

To make integers (`quantize`), onnxruntime's quantizer works between `preparation`, which optimizes
the float model and chooses what is quantized, `calibration`, which measures ranges, and
`weight_axes`, which finds the channels of weights. `weight_only` leaves activations in float.

To make floats (`dequantize`), `qoperators` first turns operators of integers to operators of floats
between QuantizeLinear and DequantizeLinear. `conversion` has the registry of conversions, and
`qlinear_conversions` and `dynamic_conversions` have one for each operator. `removed_activations`
adds what the quantizer left out.

To train integers (`settings`), `quantized_model` makes the model of floats that is trained.
`integer_weights` finds the weights, `integer_weight` is one of them, `packed_weights` unpacks those
of MatMulNBits, and `float_model` has the floats from which they were made. `grids` finds the scales
and zero points that training changes: `learning` trains them, `observing` lets them follow the
batches, and `biases` follow both.

To report (`quantization_report`), `pairing` finds the layers of both models, with the origins of
values in `quantized_graph`. `switched_model` computes each layer alone, `loss_meter` the loss, and
`report` shows the result.
"""

from onnxfit.quantization.dequantize import dequantize
from onnxfit.quantization.quantization_report import quantization_report
from onnxfit.quantization.quantize import quantize
from onnxfit.quantization.report import QuantizationReport, QuantizedLayer
from onnxfit.quantization.settings import Quantization

__all__ = [
    "Quantization",
    "QuantizationReport",
    "QuantizedLayer",
    "dequantize",
    "quantization_report",
    "quantize",
]
