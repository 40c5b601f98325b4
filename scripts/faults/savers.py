"""The functions of onnxfit that write files, and how each kind of file is read."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
from safetensors.numpy import load as load_safetensors

import onnxfit
from onnxfit import LoRA, Trainer
from onnxfit.callbacks import PredictionWriter
from onnxfit.cli import arrays, job, main
from onnxfit.drawing import draw
from onnxfit.files import write_atomically
from onnxfit.graph import tensors
from onnxfit.graph.tensors import write_safetensors
from onnxfit.tools.quantization import quantization_report
from onnxfit.trainable.adapters.onnx_adapter import read_onnx_adapter
from onnxfit.trainable.adapters.peft import read_adapters
from onnxfit.training import checkpoint
from tests.models import mlp

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 4)).astype(np.float32)
Y = RNG.normal(size=(12, 3)).astype(np.float32)


@dataclass(frozen=True)
class Saver:
    """A function that writes files.

    - `write`: writes the state of a trainer into a folder.
    - `read`: returns the contents of the files in the folder, or None if there are none.
    - `adapters`, `large`: the trainer has adapters; its model is too large for one file.
    - `is_divided`: `read` returns a dict, whose entries are replaced one after another.
    """

    write: Callable[[Trainer, Path], object]
    read: Callable[[Path], Any]
    adapters: bool = False
    large: bool = False
    is_divided: bool = False

    @contextlib.contextmanager
    def limits(self) -> Iterator[None]:
        """Let every model count as large, if this is about external data."""
        limit = tensors.MAX_MODEL_BYTES
        tensors.MAX_MODEL_BYTES = 0 if self.large else limit
        try:
            yield
        finally:
            tensors.MAX_MODEL_BYTES = limit

    def trainer(self, steps: int) -> Trainer:
        """Return a trainer after some steps; its network, too, depends on their number."""
        settings = {"adapters": LoRA(rank=1, alpha=1.0)} if self.adapters else {}
        model = mlp((4, 4 + steps, 3))
        trainer = Trainer(model, loss="mse", optimizer="adam", threads=1, **settings)
        trainer.fit(X, Y, epochs=steps, batch_size=len(X), verbose=0)
        return trainer


def state_of(trainer: Trainer) -> Any:
    """Return everything that a failed call must leave alone."""
    settings = {key: str(value) for key, value in trainer.settings.items()}
    history = trainer.history
    figures = [history.history, history.epoch, trainer.train_losses_]
    counters = [trainer.epoch, trainer.global_step, trainer.learning_rate, trainer.stop_reason]
    return trainer.get_state(), figures, counters, settings


def read_checkpoint(path: Path) -> Any:
    if not path.exists():
        return None
    found = checkpoint.load(path, {})
    return found.state, found.history, found.train_losses, found.resume, found.settings["loss"]


def read_model(path: Path) -> Any:
    """Return the weights of a model, read by onnx."""
    if not path.exists():
        return None
    graph = onnx.load(path).graph
    return {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}, len(graph.node)


def is_empty(folder: Path) -> bool:
    """Return whether a folder has neither files nor new files that only have to be moved."""
    names = os.listdir(folder) if folder.exists() else []
    return all(name.startswith(".") and not name.endswith(".ready") for name in names)


def read_training(folder: Path) -> Any:
    return None if is_empty(folder) else Trainer.load(folder).get_state()


def read_adapter(path: Path) -> Any:
    if path.is_dir():
        found = {} if is_empty(path) else read_adapters(path)
    else:
        found = read_onnx_adapter(path) if path.exists() else {}
    return {name: dataclasses.astuple(matrices) for name, matrices in found.items()}


def read_arrays(path: Path) -> Any:
    if not path.exists():
        return None
    found = np.load(path)
    return found if path.suffix == ".npy" else dict(found)


def read_bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def read_predictions(folder: Path) -> Any:
    return {path.name: read_arrays(path) for path in sorted(folder.glob("batch-*.npz"))}


def read_graphs(folder: Path) -> Any:
    models = {path.name: read_model(path) for path in sorted(folder.glob("*.onnx"))}
    return {**models, "trainer": read_checkpoint(folder / "trainer.onnxfit")}


def command(*words: str) -> None:
    """Run a command of onnxfit; raise the error of click for a failure."""
    with contextlib.redirect_stdout(io.StringIO()):
        main.main([*map(os.fspath, words)], standalone_mode=False)


def of_model(*words: str) -> Callable[[Trainer, Path], None]:
    """Return a function that runs a command for a model; the last word is the name of its file."""

    def write(trainer: Trainer, folder: Path) -> None:
        source = folder.parent / "source.onnx"
        trainer.export(source)
        if words[0] == "dequantize":
            command("quantize", source, "-o", source, "--activations", "none")
        command(words[0], source, *words[1:-1], "-o", folder / words[-1])

    return write


def predict(trainer: Trainer, folder: Path) -> None:
    """Predict as many batches as are left after the trained steps, so that old files are too many."""
    batches = 8 - 3 * int(trainer.global_step)
    trainer.predict(X[:batches], batch_size=1, callbacks=[PredictionWriter(folder)], verbose=0)


def at(name: str, function: Callable[[Path], Any]) -> Callable[[Path], Any]:
    return lambda folder: function(folder / name)


def file_of(name: str) -> Callable[[Trainer, Path], object]:
    return lambda trainer, folder: arrays.write(folder / name, {"y": trainer.predict(X, verbose=0)})


def weights(trainer: Trainer, folder: Path) -> None:
    state = trainer.get_weights()
    write_atomically(folder / "w.safetensors", lambda file: write_safetensors(file, state))


def options(trainer: Trainer, folder: Path) -> None:
    layout = job.CheckpointLayout(str(folder / "{epoch}.ckpt"))
    layout.write_options({"epochs": int(trainer.global_step)})


def report(trainer: Trainer, folder: Path) -> None:
    model = trainer.export()
    integers = onnxfit.quantize(model, weights="int4", activations=None)
    quantization_report(model, integers, X).save(folder / "report.txt")


SAVERS = {
    "save": Saver(lambda t, f: t.save(f / "a.ckpt"), at("a.ckpt", read_checkpoint)),
    "export": Saver(lambda t, f: t.export(f / "m.onnx"), at("m.onnx", read_model)),
    "export, external data": Saver(
        lambda t, f: t.model_snapshot().write(f / "m.onnx"), at("m.onnx", read_model), large=True
    ),
    "export_training": Saver(
        lambda t, f: t.export_training(f / "a", batch_size=4), at("a", read_training)
    ),
    "export_adapter": Saver(
        lambda t, f: t.export_adapter(f / "a"), at("a", read_adapter), adapters=True
    ),
    "export_adapter, .onnx_adapter": Saver(
        lambda t, f: t.export_adapter(f / "a.onnx_adapter"),
        at("a.onnx_adapter", read_adapter),
        adapters=True,
    ),
    "save_onnx_graph": Saver(lambda t, f: t.save_onnx_graph(f), read_graphs, is_divided=True),
    "safetensors": Saver(
        weights, at("w.safetensors", lambda p: p.exists() and load_safetensors(p.read_bytes()))
    ),
    "PredictionWriter": Saver(predict, read_predictions, is_divided=True),
    "onnxfit quantize": Saver(
        of_model("quantize", "--activations", "none", "q.onnx"), at("q.onnx", read_model)
    ),
    "onnxfit dequantize": Saver(of_model("dequantize", "d.onnx"), at("d.onnx", read_model)),
    "onnxfit predict, .npz": Saver(file_of("y.npz"), at("y.npz", read_arrays)),
    "onnxfit predict, .npy": Saver(file_of("y.npy"), at("y.npy", read_arrays)),
    "onnxfit predict, .csv": Saver(file_of("y.csv"), at("y.csv", read_bytes)),
    "onnxfit fit, options": Saver(options, at("{epoch}.ckpt.json", read_bytes)),
    "draw": Saver(lambda t, f: draw(t.export(), f / "m.txt", depth=None), at("m.txt", read_bytes)),
    "quantization_report": Saver(report, at("report.txt", read_bytes)),
}
