"""Train a file again from its lineage, and compare the result with the file, bit by bit."""

from onnxfit.verification.bom import model_bom
from onnxfit.verification.verify import Verification, verify

__all__ = ["Verification", "model_bom", "verify"]
