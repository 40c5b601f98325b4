"""Build and rewrite ONNX graphs: pure functions from graph to graph, no session and no data."""
