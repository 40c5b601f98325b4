"""Devices, buffers and sessions of onnxruntime, and the backends that run a training step.

Without a working onnxruntime, importing any module of this folder raises an InstallationError. So
the modules import onnxruntime without further checks.
"""

from onnxfit.environment import require_onnxruntime

require_onnxruntime()
