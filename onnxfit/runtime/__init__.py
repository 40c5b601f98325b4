"""Devices, buffers and sessions of onnxruntime, and the backends that run a training step."""
