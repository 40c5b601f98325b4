"""Training scripts for files that somebody else made."""

from onnxfit.script.text import training_script

__all__ = ["training_script"]
