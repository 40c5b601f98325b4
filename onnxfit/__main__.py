"""`python -m onnxfit`."""

from onnxfit.cli import main

main()
