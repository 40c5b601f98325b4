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

from onnxfit.environment import versions

if TYPE_CHECKING:
    # Type checkers do not call `__getattr__` below, so they need these imports.
    from onnxfit import (
        callbacks,
        ctc,
        distributed,
        losses,
        metrics,
        optimizers,
        penalties,
        schedules,
    )
    from onnxfit.adapters.lora import LoRA
    from onnxfit.adapters.merging import merge, unmerge
    from onnxfit.data import (
        Bucket,
        DataLoader,
        ImageFolder,
        MaskedTokens,
        Mixup,
        Pad,
        ParquetLoader,
        Prefetch,
        TextLoader,
    )
    from onnxfit.drawing import draw
    from onnxfit.editing import (
        add_biases,
        add_dropout,
        dynamic_batch,
        replace_head,
        tie,
        to_float32,
        untie,
    )
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
        OutOfMemoryError,
        SettingError,
        StepError,
        UnknownNameError,
        UnsupportedError,
    )
    from onnxfit.gradients.gradient_model import gradient_model
    from onnxfit.graph.values import GraphBuilder, Value
    from onnxfit.quantization import (
        Quantization,
        QuantizationReport,
        dequantize,
        quantization_report,
        quantize,
    )
    from onnxfit.script import training_script
    from onnxfit.step.distillation import Distillation
    from onnxfit.step.graphs import add_loss
    from onnxfit.step.per_sample import per_sample_gradient_model
    from onnxfit.trainer import Trainer
    from onnxfit.training.inspection import inspect
    from onnxfit.training.lbfgs import fit_lbfgs

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "Bucket",
    "CheckpointError",
    "DataError",
    "DataLoader",
    "Distillation",
    "DivergenceError",
    "GradientError",
    "GraphBuilder",
    "ImageFolder",
    "InstallationError",
    "LoRA",
    "MaskedTokens",
    "MissingAttributeError",
    "Mixup",
    "ModelError",
    "OnnxfitError",
    "OutOfMemoryError",
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
    "add_dropout",
    "add_loss",
    "callbacks",
    "ctc",
    "dequantize",
    "distributed",
    "draw",
    "dynamic_batch",
    "fit_lbfgs",
    "gradient_model",
    "inspect",
    "losses",
    "merge",
    "metrics",
    "optimizers",
    "penalties",
    "per_sample_gradient_model",
    "quantization_report",
    "quantize",
    "replace_head",
    "schedules",
    "tie",
    "to_float32",
    "training_script",
    "unmerge",
    "untie",
    "versions",
]

# The names of `__all__` that are no modules, by the module that defines them. A module is imported
# when one of its names is first asked for: a program that only draws a model does not wait for the
# gradients and the training loop.
_NAMES = {
    "adapters.lora": ("LoRA",),
    "adapters.merging": ("merge", "unmerge"),
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
    "editing": (
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
    "quantization": (
        "Quantization",
        "QuantizationReport",
        "dequantize",
        "quantization_report",
        "quantize",
    ),
    "script": ("training_script",),
    "step.distillation": ("Distillation",),
    "step.graphs": ("add_loss",),
    "step.per_sample": ("per_sample_gradient_model",),
    "trainer": ("Trainer",),
    "training.inspection": ("inspect",),
    "training.lbfgs": ("fit_lbfgs",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

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
