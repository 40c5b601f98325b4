"""Changes of a graph that is compiled for the CPU: operators in C++, layouts and fusions.

Saved graphs keep plain ONNX operators. As in `runtime/`, importing a module of this folder raises
an InstallationError without a working onnxruntime.
"""

from onnxfit.environment import require_onnxruntime

require_onnxruntime()
