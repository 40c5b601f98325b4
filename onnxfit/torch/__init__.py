"""ONNX models as PyTorch modules: torch holds the weights and the optimizer, onnxruntime runs the
forward and the backward pass.
"""

from onnxfit.errors import InstallationError

try:
    import torch  # noqa: F401
except ImportError as error:
    raise InstallationError(
        f'onnxfit.torch needs PyTorch 2.4 or newer ({error}): pip install "onnxfit[torch]"'
    ) from error

from onnxfit.torch.module import OnnxModule

__all__ = ["OnnxModule"]
