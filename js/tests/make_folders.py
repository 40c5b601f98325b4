"""Write training folders for the tests of the npm package, each with what Python computes from it.

    python js/tests/make_folders.py OUT

A folder OUT/<network> gets `expected.json` and `expected.safetensors` beside its own files.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
from onnx.numpy_helper import from_array
from safetensors.numpy import save_file
from sklearn.datasets import load_digits

import onnxfit

STEPS = 20
ROWS = 32
Array = np.ndarray[Any, Any]


def network(
    text: str, *, opset: int = 17, constants: Mapping[str, Any] | None = None, **shapes: Any
) -> onnx.ModelProto:
    """Parse a graph, and add random weights of these shapes and the constants."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> g {text}')
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        fan_in = shape[0] if len(shape) == 2 else np.prod(shape[1:])
        array = (rng.normal(size=shape) / np.sqrt(fan_in)).astype(np.float32)
        model.graph.initializer.append(from_array(array, name))
    for name, value in (constants or {}).items():
        model.graph.initializer.append(from_array(np.asarray(value), name))
    return model


def cnn() -> onnx.ModelProto:
    ones, zeros = np.ones(16, np.float32), np.zeros(16, np.float32)
    return network(
        """(float[N,1,8,8] image) => (float[N,10] logits) {
        a = Conv<pads=[1,1,1,1]>(image, conv1)  n = BatchNormalization(a, scale, bias, mean, var)
        b = Relu(n)  c = MaxPool<kernel_shape=[2,2], strides=[2,2]>(b)  d = Dropout(c, ratio)
        e = Conv<pads=[1,1,1,1]>(d, conv2)  f = Relu(e)  g = Flatten(f)
        logits = Gemm(g, head, head_bias) }""",
        constants={
            "scale": ones, "bias": zeros, "mean": zeros, "var": ones, "ratio": np.float32(0.25),
            "head_bias": np.zeros(10, np.float32),
        },
        conv1=(16, 1, 3, 3), conv2=(16, 16, 3, 3), head=(256, 10),
    )  # fmt: skip


def mlp() -> onnx.ModelProto:
    return network(
        """(float[N,64] x) => (float[N,10] y) {
        a = Gemm(x, w1, b1)  b = Relu(a)  c = Gemm(b, w2, b2)  d = Relu(c)
        y = Gemm(d, w3, b3) }""",
        constants={f"b{i}": np.zeros(n, np.float32) for i, n in ((1, 64), (2, 32), (3, 10))},
        w1=(64, 64), w2=(64, 32), w3=(32, 10),
    )  # fmt: skip


def dropping() -> onnx.ModelProto:
    return network(
        "(float[N,4] x) => (float[N,3] y) { d = Dropout(x, ratio)  y = MatMul(d, w) }",
        constants={"ratio": np.float32(0.25)},
        w=(4, 3),
    )


def lstm() -> onnx.ModelProto:
    return network(
        """(float[N,8,8] x) => (float[N,10] y) {
        t = Transpose<perm=[1,0,2]>(x)  s, h, c = LSTM<hidden_size=16>(t, w, r, b)
        l = Squeeze(h, zero)  y = Gemm(l, head, head_bias) }""",
        constants={"zero": np.array([0]), "head_bias": np.zeros(10, np.float32)},
        w=(1, 64, 8), r=(1, 64, 16), b=(1, 128), head=(16, 10),
    )  # fmt: skip


def transformer() -> onnx.ModelProto:
    return network(
        """(int64[N,64] x) => (float[N,10] y) {
        e = Gather(table, x)  p = Add(e, positions)  n = LayerNormalization(p, scale, bias)
        q = MatMul(n, wq)  k = MatMul(n, wk)  v = MatMul(n, wv)  t = Transpose<perm=[0,2,1]>(k)
        s = MatMul(q, t)  a = Softmax<axis=-1>(s)  o = MatMul(a, v)  r = Add(o, p)
        u = MatMul(r, wide)  f = Gelu(u)  g = MatMul(f, narrow)  z = Add(g, r)
        l = ReduceMean<keepdims=0>(z, tokens)  y = MatMul(l, head) }""",
        opset=20,
        constants={
            "tokens": np.array([1]), "scale": np.ones(16, np.float32),
            "bias": np.zeros(16, np.float32),
        },
        table=(17, 16), positions=(64, 16), wq=(16, 16), wk=(16, 16), wv=(16, 16), wide=(16, 32),
        narrow=(32, 16), head=(16, 10),
    )  # fmt: skip


def digits(shape: tuple[int, ...], dtype: type, scale: float) -> Array:
    images = load_digits().images
    return np.ascontiguousarray((images / scale).astype(dtype).reshape(len(images), *shape))


def networks() -> dict[str, tuple[onnx.ModelProto, dict[str, Any], Array, dict[str, Any]]]:
    """Network -> model, settings of the Trainer, input, options of export_training."""
    accuracy = {"loss": "cross_entropy", "metrics": ["accuracy"]}
    image = digits((1, 8, 8), np.float32, 16)
    flat = digits((64,), np.float32, 16)
    decay = onnxfit.schedules.Warmup(onnxfit.schedules.Cosine(0.02, decay_steps=30), steps=5)
    adam = {**accuracy, "optimizer": "adam"}
    momentum = onnxfit.optimizers.SGD(decay, momentum=0.9)
    groups = onnxfit.optimizers.Groups(
        {"b*": momentum, "w1": {"learning_rate": 0.01}}, default="adam", layer_decay=0.8
    )
    web = {"target": "web"}
    return {
        "cnn": (cnn(), adam, image, web),
        "cnn-fixed": (cnn(), adam, image, {**web, "batch_size": ROWS}),
        "mlp-sgd": (mlp(), {**accuracy, "optimizer": 0.1, "penalty": 0.001}, flat, {}),
        "mlp-adam": (mlp(), {**adam, "clip_norm": 1.0}, flat, web),
        "mlp-webgpu": (mlp(), adam, flat, {"target": "webgpu"}),
        "frozen": (mlp(), {**adam, "weights": ["w3", "b3"]}, flat, web),
        "adapters": (mlp(), {**adam, "adapters": onnxfit.LoRA(rank=2, target="w*")}, flat, web),
        "integers": (onnxfit.quantize(cnn(), image[:64], verbose=0), adam, image, web),
        "schedule": (mlp(), {**accuracy, "optimizer": momentum}, flat, web),
        "groups": (mlp(), {**accuracy, "optimizer": groups}, flat, web),
        "lstm": (lstm(), adam, digits((8, 8), np.float32, 16), web),
        "transformer": (transformer(), adam, digits((64,), np.int64, 1), web),
    }


def write(name: str, out: Path) -> None:
    """Write the folder of a network, then train it here and write what came of it."""
    model, settings, x, options = networks()[name]
    y = load_digits().target
    trainer = onnxfit.Trainer(model, threads=1, seed=3, **settings)
    folder = trainer.export_training(out / name, **options)
    batches = [slice(i * ROWS, (i + 1) * ROWS) for i in range(STEPS)]
    losses = [trainer.train_on_batch(x[rows], y[rows])["loss"] for rows in batches]
    after_steps = trainer.evaluate(x[:64], y[:64])
    rows = 3 * ROWS if "batch_size" in options else 100
    fit = trainer.fit(
        x[:rows],
        y[:rows],
        epochs=2,
        batch_size=ROWS,
        validation_data=(x[200:264], y[200:264]),
        verbose=0,
    )
    predicted = trainer.predict(x[:40])
    arrays = {"x": x[:640], "y": y[:640], "predicted": predicted}
    save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, folder / "data.safetensors")
    save_state(trainer, folder)
    expected = {
        "losses": losses,
        "history": fit.history,
        "rows": rows,
        "evaluated": trainer.evaluate(x[:64], y[:64]),
        "after_steps": after_steps,
    }
    (folder / "expected.json").write_text(json.dumps(expected, indent=1), encoding="utf-8")
    print(name, f"{losses[0]:.4f} -> {losses[-1]:.4f}", folder)


def schedule_cases() -> list[dict[str, Any]]:
    """Each schedule as a manifest describes it, with the rates of its first updates."""
    from onnxfit import schedules as s

    cosine = s.Cosine(0.2, decay_steps=7)
    cases = [
        s.Constant(0.1),
        s.Exponential(0.8, decay_steps=3, decay_rate=0.5),
        s.Exponential(0.8, decay_steps=3, decay_rate=0.5, staircase=True),
        s.InverseTime(0.1, decay_steps=10, decay_rate=2.0),
        s.Step(0.5, step_size=4),
        s.Piecewise(boundaries=(2, 9), values=(1.0, 0.1, 0.01)),
        s.Polynomial(0.4, decay_steps=11, power=2.0),
        s.Polynomial(0.4, decay_steps=11, end_learning_rate=0.1, cycle=True),
        cosine,
        s.Cosine(0.2, decay_steps=7, end_learning_rate=0.01, restarts=True, m_mul=0.5),
        s.Cosine(0.2, decay_steps=3, restarts=True, t_mul=1.5, m_mul=0.9),
        s.OneCycle(1.0, total_steps=30),
        s.OneCycle(1.0, total_steps=30, anneal_strategy="linear", three_phase=True),
        s.Warmup(cosine, steps=6, start=0.01),
        s.Warmup(0.3, steps=6),
        s.InverseScaling(),
        s.Optimal(0.01, alpha=1e-3),
        s.MultiStep(0.1, (3, 9, 9), gamma=0.5),
        *(s.Cyclic(0.1, 0.3, 4, 7, mode, 0.9) for mode in ("triangular", "triangular2")),
        s.Cyclic(0.95, 0.85, 4, mode="exp_range", gamma=0.9),
        s.Sequential([0.1, cosine, s.Optimal()], [5, 20]),
        *(s.WarmupStableDecay(0.2, 5, 9, 11, 0.1, 0.05, d) for d in ("linear", "cos", "sqrt")),
        s.InverseSquareRoot(0.1),
        s.InverseSquareRoot(0.1, warmup_steps=7),
    ]
    missing = {name for name in s.__all__ if name != "Schedule"} - {type(c).__name__ for c in cases}
    assert not missing, missing
    model, settings, _, _ = networks()["mlp-sgd"]
    described = []
    for schedule in cases:
        optimizer = onnxfit.optimizers.SGD(schedule)
        trainer = onnxfit.Trainer(model, **{**settings, "optimizer": optimizer})
        with tempfile.TemporaryDirectory() as folder:
            path = trainer.export_training(folder, include=["train"]) / "manifest.json"
            manifest = json.loads(path.read_text(encoding="utf-8"))
        rates = [schedule(step) for step in range(50)]
        described.append({"description": manifest["learning_rate"]["schedule"], "rates": rates})
    return described


def metric_cases() -> list[dict[str, Any]]:
    """Metrics of random labels and outputs, over two batches."""
    rng = np.random.default_rng(0)
    classes = rng.integers(0, 4, 12)
    scores = rng.normal(size=(12, 4))
    scores[3, 1:3] = 5.0  # two highest scores
    scores[5, 2] = np.nan
    binary, logit = rng.integers(0, 2, (12, 1)), rng.normal(size=(12, 1))
    images = rng.normal(size=(12, 3, 2, 2))
    cases = [
        ("Accuracy", {}, classes, scores),
        ("Accuracy", {}, np.where(np.arange(12) == 2, -100, classes), scores),
        ("Accuracy", {}, np.eye(4)[classes], scores),
        ("Accuracy", {"from_logits": True}, binary, logit),
        ("Accuracy", {"threshold": 0.2}, binary, logit),
        ("Accuracy", {}, rng.integers(0, 3, (12, 2, 2)), images),
        ("SparseCategoricalAccuracy", {}, classes, scores),
        ("CategoricalAccuracy", {}, np.eye(4)[classes], scores),
        ("BinaryAccuracy", {"threshold": 0.3, "from_logits": True}, binary, logit),
        ("MeanSquaredError", {}, binary, logit),
        ("RootMeanSquaredError", {}, binary, logit),
        ("MeanAbsoluteError", {}, images, images[::-1]),
    ]
    described = []
    for name, settings, labels, outputs in cases:
        metric = getattr(onnxfit.metrics, name)(**settings)
        for rows in (slice(0, 5), slice(5, 12)):
            metric.update(labels[rows], outputs[rows])
        described.append(
            {
                "metric": name,
                "settings": settings,
                "labels": array_json(labels),
                "outputs": array_json(outputs),
                "result": metric.result(),
                "mode": metric.mode,
            }
        )
    return described


def array_json(array: Array) -> dict[str, Any]:
    data = [None if value != value else value for value in array.ravel().tolist()]
    return {"dims": array.shape, "data": data}


def scalar_cases() -> list[dict[str, Any]]:
    """Programs of optimizers and penalties, with the numbers that scalars.onnx gives."""
    from onnxfit import optimizers, penalties
    from onnxfit.registry import registry

    settings: list[dict[str, Any]] = [
        *({"optimizer": name} for name in registry("onnxfit.optimizers", optimizers.Optimizer)),
        *({"penalty": name} for name in registry("onnxfit.penalties", penalties.Penalty)),
        {"optimizer": optimizers.Adam(amsgrad=True, ema_momentum=0.9)},
    ]
    described = []
    for own in settings:
        trainer = onnxfit.Trainer(dropping(), loss="cross_entropy", **own)
        with tempfile.TemporaryDirectory() as out:
            folder = trainer.export_training(out, target="web", include=["train"])
            graph = json.loads((folder / "manifest.json").read_text())["graphs"]["scalars"]
            session = onnxruntime.InferenceSession(folder / "scalars.onnx")
        for step, rate, seed in ((0, 0.001, 0), (1, 0.3, -1), (12, 3.0, 7), (10_000, 1e-8, 2**53)):
            numbers = {"step": step, "learning_rate": rate, "seed": seed}
            feeds = {t["name"]: np.array(numbers[t["role"]], t["type"]) for t in graph["inputs"]}
            values = dict(zip([t["name"] for t in graph["outputs"]], session.run(None, feeds)))
            described.append(
                {
                    "settings": str(own),
                    "graph": graph,
                    "feeds": {name: texts(value) for name, value in feeds.items()},
                    "expected": {name: texts(value) for name, value in values.items()},
                }
            )
    return described


def texts(array: Array) -> list[str]:
    return [
        str(value) if array.dtype.kind == "i" else repr(value) for value in array.ravel().tolist()
    ]


def save_state(trainer: onnxfit.Trainer, folder: Path) -> None:
    """Write the state of a trainer as `expected.safetensors`."""
    with tempfile.TemporaryDirectory() as other:
        state = trainer.export_training(other) / "state.safetensors"
        (folder / "expected.safetensors").write_bytes(state.read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("networks", nargs="*", default=list(networks()))
    arguments = parser.parse_args()
    for name in arguments.networks:
        write(name, arguments.out)
    tables = {"schedules": schedule_cases, "metrics": metric_cases, "scalars": scalar_cases}
    for name, cases in tables.items():
        (arguments.out / f"{name}.json").write_text(json.dumps(cases()), encoding="utf-8")


if __name__ == "__main__":
    main()
