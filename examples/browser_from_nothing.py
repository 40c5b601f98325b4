"""From nothing to a browser, without PyTorch: onnxscript builds the network, onnxfit trains it.

    python examples/browser_from_nothing.py [OUT]

The network learns 8x8 images of digits, and is trained on after it was quantized to 8 bits. OUT
gets a training folder of the integers, and digits that the page of examples/web mixes with drawn
ones. docs/browser-from-nothing.md tells how the page trains on.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import GraphBuilder, nn
from safetensors.numpy import save_file
from sklearn.datasets import load_digits

import onnxfit

rng = np.random.default_rng(0)


class Layer(nn.Module):
    """A convolution of 3x3 pixels or a linear layer, with He's initial weights."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        weight = rng.normal(size=shape) * np.sqrt(2 / np.prod(shape[1:]))
        self.weight = nn.Parameter(shape, data=ir.tensor(weight.astype(np.float32)))
        self.bias = nn.Parameter(shape[:1], data=ir.tensor(np.zeros(shape[0], np.float32)))

    def forward(self, op: Any, x: Any) -> Any:
        if len(self.weight.shape) == 4:
            return op.Conv(x, self.weight, self.bias, pads=[1, 1, 1, 1])
        return op.Gemm(x, self.weight, self.bias, transB=1)


class Digits(nn.Module):
    """Three convolutions and two linear layers: image [N, 1, 8, 8] -> logits [N, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = Layer(16, 1, 3, 3), Layer(24, 16, 3, 3)
        self.conv3, self.hidden, self.head = Layer(24, 24, 3, 3), Layer(48, 384), Layer(10, 48)

    def forward(self, op: Any, x: Any) -> Any:
        x = op.Relu(self.conv2(op, op.Relu(self.conv1(op, x))))
        x = op.MaxPool(x, kernel_shape=[2, 2], strides=[2, 2])
        x = op.Dropout(op.Flatten(op.Relu(self.conv3(op, x))), 0.2)
        return self.head(op, op.Relu(self.hidden(op, x)))


image = ir.val("image", ir.DataType.FLOAT, ["N", 1, 8, 8])
graph = ir.Graph([image], [], nodes=[], name="digits", opset_imports={"": 21})
logits = Digits()(GraphBuilder(graph).op, image)
logits.name = "logits"
graph.outputs.append(logits)
model = ir.to_proto(ir.Model(graph, ir_version=10))

digits = load_digits()
images, labels = (digits.images[:, None] / 16).astype(np.float32), digits.target
test = np.arange(len(labels)) % 5 == 0
settings = {"loss": "cross_entropy", "optimizer": "adam", "metrics": ["accuracy"]}
trainer = onnxfit.Trainer(model, **settings)
trainer.fit(images[~test], labels[~test], epochs=20, verbose=0)
floats = trainer.export(None)
integers = onnxfit.quantize(floats, images[~test][:256], verbose=0)
tuned = onnxfit.Trainer(integers, **settings)
tuned.fit(images[~test], labels[~test], epochs=2, verbose=0)

for name, contender in {"floats": trainer, "int8 trained": tuned}.items():
    accuracy = contender.evaluate(images[test], labels[test])["accuracy"]
    kilobytes = contender.export(None).ByteSize() / 1000
    print(f"{name:14} {accuracy:6.1%} {kilobytes:6.1f} kB")

out = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
tuned.export_training(out / "training", target="web")
known = {"images": digits.images[~test][:200], "labels": labels[~test][:200]}
save_file(
    {name: array.astype(np.uint8) for name, array in known.items()}, out / "digits.safetensors"
)
