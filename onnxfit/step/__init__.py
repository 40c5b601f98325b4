"""The graphs of a training step: from a recipe and the shapes of a batch to ONNX."""
