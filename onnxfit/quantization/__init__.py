"""Integer models: make one of a float model, train its integers, and report what it loses."""

from onnxfit.quantization.layers import QuantizationReport, QuantizedLayer
from onnxfit.quantization.report import quantization_report

__all__ = ["QuantizationReport", "QuantizedLayer", "quantization_report"]
