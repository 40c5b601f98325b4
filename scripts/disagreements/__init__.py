"""Where onnxruntime disagrees with itself or with ONNX: `make disagreements`.

`known` lists small models and their right answers, `networks` compares networks and gradient rules
with and without graph optimizations, and `__main__` runs both and writes a page of the docs.
"""
