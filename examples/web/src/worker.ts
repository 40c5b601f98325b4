import "onnxfit/worker";
