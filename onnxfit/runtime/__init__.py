"""onnxruntime: devices, buffers, sessions, and the backends that run a step with them."""
