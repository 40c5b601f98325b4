"""The gradient builder of onnxruntime's training build: the optional second source of gradients."""
