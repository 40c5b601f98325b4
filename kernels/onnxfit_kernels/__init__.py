"""The library of operators that onnxfit puts into the training steps it compiles."""

import sys
from pathlib import Path

# onnxfit uses the library if the number is the one it knows. It changes with the operators.
INTERFACE = 11

_SUFFIXES = {"win32": ".dll", "darwin": ".dylib"}
LIBRARY = Path(__file__).with_name("kernels" + _SUFFIXES.get(sys.platform, ".so"))
