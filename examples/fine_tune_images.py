"""Fine-tuning: a small MobileNet that torch exported learns new kinds of pictures from a folder.

    python examples/fine_tune_images.py

The network has learned the direction of stripes. torch exports it with default settings: the file
takes one picture at a time, and BatchNormalization is part of the convolutions. The example opens
the batch, replaces the last layer, trains that layer alone, then the whole network with a lower
rate. It writes mobile.onnx, pictures/ and trained.onnx.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import numpy_helper
from PIL import Image
from torch import nn

import onnxfit
from onnxfit.callbacks import EarlyStopping

SIZE = 32
STRIPES = ("across", "down", "rising", "falling")
SHAPES = ("checks", "disc", "rings")


def main() -> None:
    rng = np.random.default_rng(0)
    export_pretrained("mobile.onnx", rng)
    write_pictures(Path("pictures"), rng)

    model = onnxfit.dynamic_batch("mobile.onnx")  # batches of any size
    model = onnxfit.replace_head(model, len(SHAPES))
    pictures = onnxfit.ImageFolder(
        "pictures",
        (SIZE, SIZE),
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
        batch_size=16,
        augment=["flip", "crop"],
    )
    training, validation = pictures.split(0.25)

    head = onnxfit.Trainer(
        model,
        weights=["head.*"],
        loss="cross_entropy",
        optimizer=onnxfit.optimizers.Adam(0.01),
        metrics=["accuracy"],
    )
    head.fit(training, validation_data=validation, epochs=5, verbose=0)
    first = head.evaluate(validation)["accuracy"]
    with_head = head.export(None)  # the model, without a file
    before, after = arrays(model), arrays(with_head)
    changed = {name for name in before if not np.array_equal(before[name], after[name])}

    trainer = onnxfit.Trainer(
        with_head,
        loss="cross_entropy",
        optimizer=onnxfit.optimizers.Adam(0.002),
        metrics=["accuracy"],
        batch_norm="frozen",  # has an effect where the file still has BatchNormalization
    )
    stopping = EarlyStopping("val_loss", patience=4, restore_best_weights=True)
    trainer.fit(training, validation_data=validation, epochs=20, callbacks=[stopping], verbose=0)
    last = trainer.evaluate(validation)["accuracy"]
    trainer.export("trained.onnx")

    session = onnxruntime.InferenceSession("trained.onnx", providers=["CPUExecutionProvider"])
    images, _ = next(iter(validation))
    (scores,) = session.run(None, {session.get_inputs()[0].name: images})
    difference = np.abs(scores - trainer.predict(images)).max()

    print(f"the head alone      {first:.1%} of {validation.rows} pictures")
    print(f"all weights         {last:.1%}")
    print(f"largest difference  {difference:.1e} between onnxruntime and predict")
    if changed != {"head.weight", "head.bias"}:
        sys.exit("fine_tune_images: only the head was to change")
    if not (last > 0.9 and last >= first and difference < 1e-4):
        sys.exit("fine_tune_images: training fell short")


def arrays(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def export_pretrained(path: str, rng: np.random.Generator) -> None:
    """Train a network in torch to tell directions of stripes apart, and export it."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = nn.Sequential()
    net.append(nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6()))
    for inputs, outputs, stride in ((8, 16, 1), (16, 32, 2), (32, 32, 1)):
        net.append(separable(inputs, outputs, stride))
    net.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1)])
    net.add_module("head", nn.Linear(32, len(STRIPES)))

    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(60):
        labels = rng.integers(0, len(STRIPES), 32)
        images = np.stack([picture(STRIPES[label], rng) for label in labels])
        inputs = torch.from_numpy((images / 255 - 0.5) / 0.25).permute(0, 3, 1, 2).float()
        loss = nn.functional.cross_entropy(net(inputs), torch.from_numpy(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's exporter warns of its own code
        torch.onnx.export(net.eval(), (torch.zeros(1, 3, SIZE, SIZE),), path, verbose=False)


def separable(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Return a depthwise and a pointwise convolution, as a MobileNet has them."""
    return nn.Sequential(
        nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False),
        nn.BatchNorm2d(inputs),
        nn.ReLU6(),
        nn.Conv2d(inputs, outputs, 1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(),
    )


def write_pictures(root: Path, rng: np.random.Generator) -> None:
    """Write root/checks/0.png, ...: what ImageFolder reads."""
    for kind in SHAPES:
        (root / kind).mkdir(parents=True, exist_ok=True)
        for i in range(40):
            Image.fromarray(picture(kind, rng, SIZE + 8)).save(root / kind / f"{i}.png")


def picture(kind: str, rng: np.random.Generator, size: int = SIZE) -> np.ndarray:
    """Return an image (size, size, 3) of uint8 in two random colours, with some noise."""
    y, x = np.mgrid[:size, :size] - size / 2 + rng.uniform(-4, 4, (2, 1, 1))
    width = rng.uniform(0.5, 1)
    pattern = {
        "across": np.sin(width * y),
        "down": np.sin(width * x),
        "rising": np.sin(0.7 * width * (x + y)),
        "falling": np.sin(0.7 * width * (x - y)),
        "checks": np.sin(width * x) * np.sin(width * y),
        "disc": 8 * width - np.hypot(x, y) + 4,
        "rings": np.sin(width * np.hypot(x, y)),
    }[kind]
    dark, light = rng.uniform(0, 100, 3), rng.uniform(150, 255, 3)
    if rng.random() < 0.5:
        dark, light = light, dark
    image = np.where(pattern[..., None] > 0, light, dark) + rng.normal(0, 8, (size, size, 3))
    return image.clip(0, 255).astype(np.uint8)


if __name__ == "__main__":
    main()
