"""onnxfit trains ONNX models: fit, evaluate, predict, callbacks, TensorBoard, and a trained .onnx
back.
"""

import onnxfit.imports  # noqa: F401  # before everything else
from onnxfit import callbacks, distributed, losses, metrics, optimizers, penalties, schedules
from onnxfit.adapters.lora import LoRA
from onnxfit.adapters.merging import merge, unmerge
from onnxfit.data import (
    Bucket,
    DataLoader,
    ImageFolder,
    Pad,
    ParquetLoader,
    Prefetch,
    TextLoader,
)
from onnxfit.drawing import draw
from onnxfit.editing import add_biases, dynamic_batch, replace_head, tie, untie
from onnxfit.errors import (
    ArgumentError,
    CheckpointError,
    DataError,
    DivergenceError,
    GradientError,
    InstallationError,
    MissingAttributeError,
    ModelError,
    OnnxfitError,
    SettingError,
    StepError,
    UnknownNameError,
    UnsupportedError,
)
from onnxfit.gradients.gradient_model import gradient_model
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.imports import versions
from onnxfit.quantization import (
    Quantization,
    QuantizationReport,
    dequantize,
    quantization_report,
    quantize,
)
from onnxfit.step.graphs import add_loss
from onnxfit.trainer import Trainer
from onnxfit.training.inspection import inspect

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "Bucket",
    "CheckpointError",
    "DataError",
    "DataLoader",
    "DivergenceError",
    "GradientError",
    "GraphBuilder",
    "ImageFolder",
    "InstallationError",
    "LoRA",
    "MissingAttributeError",
    "ModelError",
    "OnnxfitError",
    "Pad",
    "ParquetLoader",
    "Prefetch",
    "Quantization",
    "QuantizationReport",
    "SettingError",
    "StepError",
    "TextLoader",
    "Trainer",
    "UnknownNameError",
    "UnsupportedError",
    "Value",
    "add_biases",
    "add_loss",
    "callbacks",
    "dequantize",
    "distributed",
    "draw",
    "dynamic_batch",
    "gradient_model",
    "inspect",
    "losses",
    "merge",
    "metrics",
    "optimizers",
    "penalties",
    "quantization_report",
    "quantize",
    "replace_head",
    "schedules",
    "tie",
    "unmerge",
    "untie",
    "versions",
]
