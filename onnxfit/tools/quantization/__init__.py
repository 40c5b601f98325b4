"""Make an integer model of a float model, or a float model of it, and report what it loses.

To make integers (`quantize`), onnxruntime's quantizer works between `preparation`, which optimizes
the float model and chooses what is quantized, and `weight_axes`, which finds the channels of
weights.

To make floats (`dequantize`), `qoperators` of `trainable/quantized` first turns operators of
integers to operators of floats between QuantizeLinear and DequantizeLinear. `removed_activations`
adds what the quantizer left out.

To report (`quantization_report`), `pairing` finds the layers of both models, with the origins of
values in `quantized_graph`. `layer_switches` computes each layer alone, `loss_meter` the loss, and
`report` shows the result.
"""

from onnxfit.tools.quantization.dequantize import dequantize
from onnxfit.tools.quantization.quantization_report import quantization_report
from onnxfit.tools.quantization.quantize import quantize
from onnxfit.tools.quantization.report import QuantizationReport, QuantizedLayer

__all__ = [
    "QuantizationReport",
    "QuantizedLayer",
    "dequantize",
    "quantization_report",
    "quantize",
]
