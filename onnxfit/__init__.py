"""onnxfit trains ONNX models: fit, evaluate, predict, callbacks, TensorBoard, and a trained .onnx
back.
"""

from importlib import import_module
from importlib.util import find_spec
from threading import RLock
from typing import TYPE_CHECKING

# Two threads that import NumPy first, by different modules of it, can break it: these modules
# import each other.
import numpy  # noqa: F401

from onnxfit.environment import versions as versions

if TYPE_CHECKING:
    # Type checkers do not call `__getattr__` below, so they need these imports.
    from onnxfit import callbacks as callbacks
    from onnxfit import ctc as ctc
    from onnxfit import distributed as distributed
    from onnxfit import losses as losses
    from onnxfit import metrics as metrics
    from onnxfit import optimizers as optimizers
    from onnxfit import penalties as penalties
    from onnxfit import schedules as schedules
    from onnxfit.data import Bucket as Bucket
    from onnxfit.data import DataLoader as DataLoader
    from onnxfit.data import ImageFolder as ImageFolder
    from onnxfit.data import MaskedTokens as MaskedTokens
    from onnxfit.data import Mixup as Mixup
    from onnxfit.data import Pad as Pad
    from onnxfit.data import ParquetLoader as ParquetLoader
    from onnxfit.data import Prefetch as Prefetch
    from onnxfit.data import TextLoader as TextLoader
    from onnxfit.drawing import draw as draw
    from onnxfit.errors import *
    from onnxfit.gradients.gradient_model import gradient_model as gradient_model
    from onnxfit.graph.values import GraphBuilder as GraphBuilder
    from onnxfit.graph.values import Value as Value
    from onnxfit.script import *
    from onnxfit.step.distillation import *
    from onnxfit.step.graphs import add_loss as add_loss
    from onnxfit.step.per_sample import per_sample_gradient_model as per_sample_gradient_model
    from onnxfit.tools.editing import *
    from onnxfit.tools.quantization import QuantizationReport as QuantizationReport
    from onnxfit.tools.quantization import dequantize as dequantize
    from onnxfit.tools.quantization import quantization_report as quantization_report
    from onnxfit.tools.quantization import quantize as quantize
    from onnxfit.trainable.adapters.lora import *
    from onnxfit.trainable.adapters.merging import *
    from onnxfit.trainable.quantized.settings import Quantization as Quantization
    from onnxfit.trainer import *
    from onnxfit.training.inspection import inspect as inspect
    from onnxfit.training.lbfgs import *
    from onnxfit.verification import Verification as Verification
    from onnxfit.verification import model_bom as model_bom
    from onnxfit.verification import verify as verify

__version__ = "0.1.0"

# The public names, by the module that defines them. A module is imported when one of its names is
# first asked for: a program that only draws a model does not wait for the gradients and the
# training loop.
_NAMES = {
    "data": (
        "Bucket",
        "DataLoader",
        "ImageFolder",
        "MaskedTokens",
        "Mixup",
        "Pad",
        "ParquetLoader",
        "Prefetch",
        "TextLoader",
    ),
    "drawing": ("draw",),
    "tools.editing": (
        "add_biases",
        "add_dropout",
        "dynamic_batch",
        "replace_head",
        "tie",
        "to_float32",
        "untie",
    ),
    "errors": (
        "ArgumentError",
        "CheckpointError",
        "DataError",
        "DivergenceError",
        "GradientError",
        "InstallationError",
        "MissingAttributeError",
        "ModelError",
        "OnnxfitError",
        "OutOfMemoryError",
        "SettingError",
        "StepError",
        "UnknownNameError",
        "UnsupportedError",
    ),
    "gradients.gradient_model": ("gradient_model",),
    "graph.values": ("GraphBuilder", "Value"),
    "tools.quantization": (
        "QuantizationReport",
        "dequantize",
        "quantization_report",
        "quantize",
    ),
    "trainable.adapters.lora": ("LoRA",),
    "trainable.adapters.merging": ("merge", "unmerge"),
    "trainable.quantized.settings": ("Quantization",),
    "script": ("training_script",),
    "step.distillation": ("Distillation",),
    "step.graphs": ("add_loss",),
    "step.per_sample": ("per_sample_gradient_model",),
    "trainer": ("Trainer",),
    "training.inspection": ("inspect",),
    "training.lbfgs": ("fit_lbfgs",),
    "verification": ("Verification", "model_bom", "verify"),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}
_MODULES = (
    "callbacks",
    "ctc",
    "distributed",
    "losses",
    "metrics",
    "optimizers",
    "penalties",
    "schedules",
)

__all__ = sorted([*_MODULES, *_MODULE_OF, "versions"])

# These modules need other packages, so they are imported by their full names alone.
_OPTIONAL = {"flower", "sklearn", "torch"}

# One thread at a time imports a public name. Python deadlocks if one thread imports a package,
# whose __init__ imports a module of it, while another imports this module, and with it the package.
_IMPORTING = RLock()

if not TYPE_CHECKING:  # type checkers would accept every name

    def __getattr__(name: str) -> object:
        """Import the module of a public name, or the module of this name."""
        with _IMPORTING:
            if name in _MODULE_OF:
                value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
            elif name not in _OPTIONAL and not name.startswith("_") and _has_module(name):
                value = import_module(f"{__name__}.{name}")
            else:
                raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    def _has_module(name: str) -> bool:
        return find_spec(f"{__name__}.{name}") is not None

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
