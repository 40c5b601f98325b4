"""Packed 4-bit weights (MatMulNBits) that lose accuracy, and win it back:

    python benchmarks/quantization_packed.py [--seeds 0 1 2] [--epochs 20] [--rate 0.002]
        [--block 128] [--learned] [--level 0]

An MLP learns the digits of scikit-learn, and its hidden units are made unequal by up to 32, so that
a few large weights decide the scale of a block. onnxruntime's MatMulNBits quantizer writes its
weights in blocks of 4 bits. They train with Adam, whose rate decays by a cosine. The accuracy is that
of the exported file in a bare onnxruntime. `--level` is the accuracy_level of the kernels. The
quantizer is in onnxruntime 1.22 and later, not in onnxruntime-training.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from itertools import pairwise

import numpy as np
import onnx
import onnx.parser
import onnxruntime
from onnx.numpy_helper import from_array, to_array
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from sklearn.datasets import load_digits

import onnxfit

TRAINED, BATCH, UNEQUAL = 1437, 32, 32
HIDDEN = (128, 64)


def mlp(seed: int) -> onnx.ModelProto:
    """An MLP of MatMul and Add, which the quantizer knows."""
    rng = np.random.default_rng(seed)
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        digits (float[batch, 64] x) => (float[batch, 10] scores)
        { p1 = MatMul(x, w1)  s1 = Add(p1, b1)  h1 = Relu(s1)
          p2 = MatMul(h1, w2)  s2 = Add(p2, b2)  h2 = Relu(s2)
          p3 = MatMul(h2, w3)  scores = Add(p3, b3) }""")
    sizes = 64, *HIDDEN, 10
    for i, (rows, columns) in enumerate(pairwise(sizes), 1):
        w = rng.normal(size=(rows, columns)) * (2 / rows) ** 0.5
        for name, array in ((f"w{i}", w), (f"b{i}", np.zeros(columns))):
            model.graph.initializer.append(from_array(array.astype(np.float32), name))
    return model


def with_unequal_units(model: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    """Return a model of the same function, whose hidden units are multiplied by 1 to `UNEQUAL`."""
    arrays = {t.name: to_array(t).copy() for t in model.graph.initializer}
    rng = np.random.default_rng(seed)
    for i, count in enumerate(HIDDEN, 1):
        factors = (UNEQUAL ** rng.uniform(size=count)).astype(np.float32)
        arrays[f"w{i}"] *= factors
        arrays[f"b{i}"] *= factors
        arrays[f"w{i + 1}"] /= factors[:, None]
    for tensor in model.graph.initializer:
        tensor.CopyFrom(from_array(arrays[tensor.name], tensor.name))
    return model


def packed(model: onnx.ModelProto, block: int, level: int) -> onnx.ModelProto:
    """Return the model as onnxruntime's quantizer packs it."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    made = MatMulNBitsQuantizer(
        copy, block_size=block, is_symmetric=True, accuracy_level=level or None
    )
    made.process()
    return made.model.model


def accuracy(model: onnx.ModelProto, x: np.ndarray, classes: np.ndarray) -> float:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (scores,) = session.run(None, {"x": x})
    return float(100 * (scores.argmax(axis=1) == classes).mean())


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--epochs", type=int, default=20)
    arguments.add_argument("--rate", type=float, default=0.002)
    arguments.add_argument("--block", type=int, default=128)
    arguments.add_argument("--learned", action="store_true", help="train the scales as well")
    arguments.add_argument("--level", type=int, default=0)
    options = arguments.parse_args()
    warnings.simplefilter("ignore")
    logging.disable()  # the quantizer names each node
    print(f"onnxruntime {onnxruntime.__version__}; % of 360 images")
    digits = load_digits()
    rows = []
    for seed in options.seeds:
        order = np.random.default_rng(seed).permutation(len(digits.data))
        x, classes = (digits.data[order] / 16).astype(np.float32), digits.target[order]
        train, test = (x[:TRAINED], classes[:TRAINED]), (x[TRAINED:], classes[TRAINED:])
        settings = {"loss": "cross_entropy", "seed": seed, "threads": 1}
        trainer = onnxfit.Trainer(mlp(seed), optimizer="adam", **settings)
        trainer.fit(*train, epochs=20, batch_size=BATCH, verbose=0)
        floats = with_unequal_units(trainer.export(), seed)
        file = packed(floats, options.block, options.level)
        steps = options.epochs * -(-TRAINED // BATCH)
        rate = onnxfit.schedules.Cosine(options.rate, decay_steps=steps)
        multipliers = {"*_scales": 0.1} if options.learned else {}
        trainer = onnxfit.Trainer(
            file,
            optimizer=onnxfit.optimizers.Adam(rate, learning_rate_multipliers=multipliers),
            quantization=onnxfit.Quantization(
                float_model=floats, scales="learned" if options.learned else "fixed"
            ),
            **settings,
        )
        began = time.process_time()
        trainer.fit(*train, epochs=options.epochs, batch_size=BATCH, verbose=0)
        seconds = time.process_time() - began
        exported = trainer.export()
        sizes = [len(m.SerializeToString()) for m in (floats, file, exported)]
        rows.append([*(accuracy(m, *test) for m in (floats, file, exported)), seconds])
        print(f"  seed {seed}: {rows[-1]}")
    for name, numbers, size in zip(("float", "packed", "trained"), zip(*rows), sizes):
        spread = f"{statistics.mean(numbers):.2f} ± {statistics.pstdev(numbers):.2f}"
        print(f"  {name:8} {spread}, {size:,} bytes")
    print(f"  {statistics.median(row[-1] for row in rows):.2f} CPU seconds of training")


if __name__ == "__main__":
    main()
