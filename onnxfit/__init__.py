"""onnxfit trains ONNX models: fit, evaluate, predict, callbacks, TensorBoard, and a trained .onnx back."""

__version__ = "0.1.0"
