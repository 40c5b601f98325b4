"""Habits that people bring from Keras, PyTorch, Lightning and scikit-learn, and their mistakes.

Each row of `WORKS` is a call and a check of its result. Each row of `REFUSED` is a call and the fix
that its error names: an OnnxfitError of at most four lines.
"""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from onnxfit import OnnxfitError, Trainer, callbacks
from onnxfit.callbacks import (
    Callback,
    EarlyStopping,
    LambdaCallback,
    ModelCheckpoint,
    ReduceLROnPlateau,
    TensorBoard,
)
from onnxfit.losses import NLL, BinaryCrossEntropy, CrossEntropy, Huber
from onnxfit.optimizers import SGD, Adam, RMSprop
from onnxfit.schedules import Cosine
from tests.models import linear, mlp, two_outputs

X = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)
CLASSES = (X @ np.eye(4, 3)).argmax(axis=1)
MAX_LINES = 4


class Bench:
    """What the rows use: trainers that are built once, and files in the current folder."""

    def __init__(self) -> None:
        self.regression = Trainer(linear(4), loss="mse", optimizer=0.1, metrics=["mae"])
        self.classification = Trainer(mlp((4, 3)), loss="cross_entropy", optimizer=0.1)
        self.state = self.regression.get_state()

    def fit(self, **settings: Any) -> Any:
        return self.regression.fit(X, Y, **{"verbose": 0, **settings})


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("habits"))
        bench = Bench()
        write_files(bench)
        yield bench


def write_files(bench: Bench) -> None:
    bench.regression.save("a.ckpt")
    onnx.save(linear(4), "model.onnx")
    with zipfile.ZipFile("net.pt", "w") as archive:
        archive.writestr("net/data.pkl", b"")
    Path("net.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(64))
    Path("net.pkl").write_bytes(pickle.dumps({"weight": 1}))
    Path("damaged.onnx").write_bytes(b"\xff" * 64)


class Network:
    """What a module of PyTorch has."""

    def state_dict(self) -> None: ...

    def forward(self) -> None: ...


class OfKeras:
    """What a callback of Keras has."""

    def set_model(self, model: Any) -> None: ...

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None: ...


class Estimator:
    """What an estimator of scikit-learn has."""

    def get_params(self) -> None: ...

    def fit(self) -> None: ...


def build(**settings: Any) -> Trainer:
    return Trainer(linear(4), **{"loss": "mse", "optimizer": 0.1, **settings})


DOUBLE = """<ir_version: 8, opset_import: ["": 17]> double (float[N, 1] x) => (float[N, 1] y)
{ y = Add(x, x) }"""
SEQUENCES = """<ir_version: 8, opset_import: ["": 17]> line (float[N, T, 1] x) => (float[N, T, 1] y)
<float[1, 1] w = {2}> { y = MatMul(x, w) }"""


def sequences() -> Trainer:
    return Trainer(onnx.parser.parse_model(SEQUENCES))


def classified(class_weight: Any, labels: Any = CLASSES) -> list[float]:
    trainer = Trainer(mlp((4, 3)), loss="cross_entropy", optimizer=0.1)
    return trainer.fit(X, labels, class_weight=class_weight, verbose=0).history["loss"]


def inverse_frequencies() -> dict[int, float]:
    return {c: 40 / 3 / int((c == CLASSES).sum()) for c in range(3)}


def weights_set(weights: Any) -> Any:
    trainer = Trainer(linear(4))
    trainer.set_weights(weights)
    return trainer.get_weights()["w"]


def ended_trainer(operator: str, loss: Any) -> Trainer:
    """Return a trainer of a model that ends with an operator."""
    model = mlp((4, 3))
    model.graph.node[-1].output[0] = "scores"
    model.graph.node.add(op_type=operator, input=["scores"], output=["y"])
    return Trainer(model, loss=loss)


def ended(operator: str, loss: str) -> list[float]:
    """Return the loss of a model that ends with an operator, and of its scores without it."""
    labels = np.eye(3, dtype=np.float32)[CLASSES]
    raw = BinaryCrossEntropy(from_logits=True) if loss == "bce" else CrossEntropy(from_logits=True)
    trainers = ended_trainer(operator, loss), Trainer(mlp((4, 3)), loss=raw)
    return [trainer.evaluate(X, labels)["loss"] for trainer in trainers]


def sklearn_loss() -> Any:
    return pytest.importorskip("sklearn.metrics").mean_squared_error


class OwnModule:
    """A loss as PyTorch's users write it."""

    def parameters(self) -> list[Any]:
        return []

    def forward(self, predicted: Any, target: Any) -> Any:
        return (predicted - target) ** 2

    __call__ = forward


def of_torch(predicted: Any, target: Any, size_average: Any = None) -> Any:
    return predicted.size() if size_average else target


of_torch.__module__ = "torch.nn.functional"
of_torch.__name__ = "mse_loss"
SEEN: list[int] = []


class Older(Callback):
    """Keras's older names of the hooks of a batch."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.events.append(f"begin {batch}")

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.events.append(f"end {batch}")
        if batch == 1:
            self.model.stop_training = True


class StopByModel(Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = self.model is self.trainer


class OwnModel(Callback):
    def __init__(self) -> None:
        self.model = "mine"

    def on_train_end(self, logs: Any) -> None:
        assert self.model == "mine"


class LogsByDefault(Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        assert logs.get("loss") > 0


class Misspelt(Callback):
    def on_epoch_ends(self, epoch: int, logs: Any) -> None: ...


class Lightning(Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None: ...


class WithoutLogs(Callback):
    def on_epoch_end(self, epoch: int) -> None: ...


def called(bench: Bench, callback: Any) -> Any:
    bench.fit(callbacks=callback, batch_size=10)
    return callback


def on_batches(**weights: Any) -> list[float]:
    """The losses of three steps on the same batch, of which one has no weights."""
    trainer = Trainer(mlp((4, 3)), loss="cross_entropy", optimizer=0.1)
    steps = [weights, {}, weights]
    return [trainer.train_on_batch(X, CLASSES, **one)["loss"] for one in steps]


WORKS: dict[str, tuple[Callable[[Bench], Any], Callable[[Any], bool]]] = {
    "a loss by its name in PyTorch": (
        lambda _: build(loss="MSELoss").objectives["y"].loss,
        lambda loss: type(loss).__name__ == "MeanSquaredError",
    ),
    "a loss with hyphens": (
        lambda _: build(loss="mean-squared-error").objectives["y"].loss,
        lambda loss: type(loss).__name__ == "MeanSquaredError",
    ),
    # ------------------------------------------------------------------ Keras's arguments
    "predict(verbose=)": (
        lambda b: b.regression.predict(X, verbose=0),
        lambda y: y.shape == (40, 1),
    ),
    "predict(steps=)": (
        lambda b: b.regression.predict(X, batch_size=8, steps=2),
        lambda y: y.shape == (16, 1),
    ),
    "evaluate(verbose=, return_dict=)": (
        lambda b: b.regression.evaluate(X, Y, verbose=0, return_dict=True),
        lambda figures: list(figures) == ["loss", "mae"],
    ),
    "evaluate as a list": (
        lambda b: [b.regression.evaluate(X, Y, return_dict=flag) for flag in (False, True)],
        lambda results: results[0] == list(results[1].values()),
    ),
    "evaluate as a number": (
        lambda b: b.classification.evaluate(X, CLASSES, return_dict=False),
        lambda loss: isinstance(loss, float),
    ),
    "batch_size=None": (
        lambda b: (
            b.fit(batch_size=None).params["steps"],
            b.regression.evaluate(X, Y, batch_size=None, return_dict=False),
            b.regression.predict(X, batch_size=None).shape,
        ),
        lambda found: found[0] == 2 and len(found[1]) == 2 and found[2] == (40, 1),
    ),
    "train_on_batch(return_dict=)": (
        lambda _: [
            build(metrics=["mae"]).train_on_batch(X, Y, return_dict=flag) for flag in (True, False)
        ],
        lambda results: results[1] == list(results[0].values()) and len(results[1]) == 2,
    ),
    "test_on_batch(return_dict=)": (
        lambda b: (
            b.classification.test_on_batch(X, CLASSES, return_dict=False),
            b.classification.evaluate(X, CLASSES, return_dict=False),
        ),
        lambda both: both[0] == pytest.approx(both[1]),
    ),
    "train_on_batch(class_weight=)": (
        lambda _: [
            on_batches(class_weight=inverse_frequencies()),
            on_batches(class_weight="balanced"),
            on_batches(
                sample_weight=np.array([inverse_frequencies()[c] for c in CLASSES], np.float32)
            ),
        ],
        lambda losses: losses[0] == losses[1] == losses[2] and len(set(losses[0])) == 3,
    ),
    "evaluate(steps=)": (
        lambda b: (
            b.regression.evaluate(X, Y, batch_size=8, steps=1),
            b.regression.evaluate(X[:8], Y[:8]),
        ),
        lambda both: both[0] == both[1],
    ),
    "fit(validation_batch_size=, validation_steps=)": (
        lambda b: (
            b.fit(validation_data=(X, Y), validation_batch_size=4, validation_steps=1),
            b.regression.evaluate(X[:4], Y[:4])["loss"],
        ),
        lambda both: both[0].history["val_loss"] == [both[1]],
    ),
    "fit(class_weight='balanced')": (
        lambda _: [classified(weight) for weight in ("balanced", inverse_frequencies())],
        lambda losses: losses[0] == losses[1],
    ),
    "one-hot labels, balanced": (
        lambda _: [classified("balanced", labels) for labels in (CLASSES, np.eye(3)[CLASSES])],
        lambda losses: np.allclose(*losses),
    ),
    # ------------------------------------------------------------------ prediction alone
    "predict without a loss": (
        lambda _: Trainer(linear(4, w=1.0)).predict(X),
        lambda y: np.allclose(y, Y, atol=1e-5),
    ),
    "predict with a model in a file": (
        lambda _: (onnx.save(linear(4, w=1.0), "m.onnx"), Trainer("m.onnx").predict(X))[1],
        lambda y: np.allclose(y, Y, atol=1e-5),
    ),
    "predict with a model without weights": (
        lambda _: Trainer(onnx.parser.parse_model(DOUBLE)).predict(X[:, :1]),
        lambda y: np.array_equal(y, 2 * X[:, :1]),
    ),
    "export without a loss": (
        lambda _: Trainer(linear(4)).export(),
        lambda model: model.graph.output[0].name == "y",
    ),
    "the graphs of a trainer without a loss": (
        lambda _: Trainer(linear(4)).save_onnx_graph(bytes),
        lambda graphs: list(graphs) == ["model", "trained", "predict"],
    ),
    "sequences of several lengths": (
        lambda _: sequences().predict([(np.ones((2, n, 1), np.float32),) for n in (3, 5)]),
        lambda y: [part.shape for part in y] == [(2, 3, 1), (2, 5, 1)],
    ),
    "sequences of one length": (
        lambda _: sequences().predict([(np.ones((2, 3, 1), np.float32),) for _ in range(2)]),
        lambda y: y.shape == (4, 3, 1),
    ),
    # ------------------------------------------------------------------ losses
    "a name, and a Softmax at the end": (
        lambda _: ended("Softmax", "cross_entropy"),
        lambda losses: losses[0] == pytest.approx(losses[1]),
    ),
    "a name, and a Sigmoid at the end": (
        lambda _: ended("Sigmoid", "bce"),
        lambda losses: losses[0] == pytest.approx(losses[1]),
    ),
    "labels of class indices in a column": (
        lambda b: b.classification.evaluate(X, CLASSES[:, None]),
        lambda figures: figures["loss"] > 0,
    ),
    "labels of floats and one-hot labels": (
        lambda b: [
            b.classification.evaluate(X, y)["loss"]
            for y in (CLASSES.astype(np.float32), np.eye(3, dtype=np.float32)[CLASSES])
        ],
        lambda losses: losses[0] == pytest.approx(losses[1]),
    ),
    # ------------------------------------------------------------------ callbacks
    "EarlyStopping(verbose=)": (lambda _: EarlyStopping(verbose=1).verbose, lambda v: v == 1),
    "on_batch_begin and on_batch_end": (
        lambda b: called(b, Older()).events,
        lambda events: events == ["begin 0", "end 0", "begin 1", "end 1"],
    ),
    "self.model.stop_training": (
        lambda b: b.fit(callbacks=StopByModel(), epochs=5).epoch,
        lambda epochs: epochs == [0],
    ),
    "an attribute called model": (
        lambda b: b.fit(callbacks=OwnModel(), epochs=1).epoch,
        lambda epochs: epochs == [0],
    ),
    "logs=None in a hook": (
        lambda b: b.fit(callbacks=LogsByDefault(), epochs=1).epoch,
        lambda epochs: epochs == [0],
    ),
    "LambdaCallback(on_batch_end=)": (
        lambda b: b.fit(
            callbacks=LambdaCallback(on_batch_end=lambda batch, logs: SEEN.append(batch)),
            batch_size=20,
        ),
        lambda _: SEEN == [0, 1],
    ),
    "one callback without a list": (
        lambda b: b.fit(callbacks=EarlyStopping("loss"), epochs=1).epoch,
        lambda epochs: epochs == [0],
    ),
    "NaN in set_weights": (
        lambda _: weights_set({"w": np.full((4, 1), np.nan)}),
        lambda w: np.isnan(w).all(),
    ),
    "float64 and whole numbers in set_weights": (
        lambda _: [weights_set({"w": np.ones((4, 1), dtype)}) for dtype in (np.float64, np.int64)],
        lambda both: all((w == 1).all() for w in both),
    ),
}
REFUSED: dict[str, tuple[Callable[[Bench], Any], str]] = {
    # ------------------------------------------------------------------ keywords
    "Adam(lr=)": (lambda _: Adam(lr=0.1), "'learning_rate'?"),
    "Adam(beta_1=)": (lambda _: Adam(beta_1=0.9), "'betas'?"),
    "Adam(epsilon=)": (lambda _: Adam(epsilon=1e-7), "'eps'?"),
    "Adam(clipnorm=)": (lambda _: Adam(clipnorm=1.0), "Trainer(..., clip_norm=...)"),
    "TensorBoard(write_images=)": (lambda _: TensorBoard(write_images=True), "add_image("),
    "TensorBoard(profile_batch=)": (lambda _: TensorBoard(profile_batch=(2, 5)), "make profile"),
    "TensorBoard(embeddings_freq=)": (lambda _: TensorBoard(embeddings_freq=1), "add_embedding("),
    "a callback of Keras": (
        lambda b: b.fit(callbacks=[OfKeras()]),
        "onnxfit.callbacks.Callback: the hooks are the same as in Keras",
    ),
    "SGD(decay=)": (lambda _: SGD(decay=0.1), "schedules.InverseTime"),
    "SGD(params=)": (lambda _: SGD(params=[]), "Remove it"),
    "RMSprop(rho=)": (lambda _: RMSprop(rho=0.9), "'alpha'?"),
    "Huber(detla=)": (lambda _: Huber(detla=1.0), "'delta'?"),
    "Cosine(0.1)": (lambda _: Cosine(0.1), "needs a value for decay_steps"),
    "Trainer(lr=)": (lambda _: build(lr=0.1), "optimizer=Adam(learning_rate=0.001)"),
    "Trainer(criterion=)": (lambda _: Trainer(linear(4), criterion="mse"), "'loss'?"),
    "Trainer(optimiser=)": (lambda _: build(optimiser="adam"), "'optimizer'?"),
    "Trainer(random_state=)": (lambda _: build(random_state=0), "'seed'?"),
    "Trainer(epochs=)": (lambda _: build(epochs=3), "argument of fit"),
    "Trainer()": (lambda _: Trainer(), "needs a value for model_onnx"),
    "fit(epoch=)": (lambda b: b.fit(epoch=2), "'epochs'?"),
    "fit(max_epochs=)": (lambda b: b.fit(max_epochs=2), "'epochs'?"),
    "fit(lr=)": (lambda b: b.fit(lr=0.1), "setting of the optimizer"),
    "fit(workers=)": (lambda b: b.fit(workers=2), "Prefetch"),
    "fit(val_data=)": (lambda b: b.fit(val_data=(X, Y)), "'validation_data'?"),
    "fit by position": (
        lambda b: b.regression.fit(X, Y, None, 10),
        "takes 3 arguments by position (x, y, sample_weight), but got 4",
    ),
    "EarlyStopping(patiance=)": (lambda _: EarlyStopping(patiance=3), "'patience'?"),
    "EarlyStopping by position": (lambda _: EarlyStopping("loss", 0, 3), "(monitor), but got 3"),
    "ModelCheckpoint(dirpath=)": (lambda _: ModelCheckpoint(dirpath="a"), "'filepath'?"),
    "ModelCheckpoint(save_best=)": (
        lambda _: ModelCheckpoint("a", save_best=True),
        "'save_best_only'?",
    ),
    "ReduceLROnPlateau(epsilon=)": (lambda _: ReduceLROnPlateau(epsilon=0.1), "'min_delta'?"),
    "predict by position": (lambda b: b.regression.predict(X, 32), "by name: batch_size"),
    "fit with the batch size third": (lambda b: b.regression.fit(X, Y, 64), "batch_size=64?"),
    "evaluate with the batch size third": (lambda b: b.regression.evaluate(X, Y, 64), "=64?"),
    # ------------------------------------------------------------------ values
    "epochs=2.0": (lambda b: b.fit(epochs=2.0), "epochs to be a whole number"),
    "epochs='2'": (lambda b: b.fit(epochs="2"), "epochs to be a whole number"),
    "epochs=-1": (lambda b: b.fit(epochs=-1), "epochs must be >= 0"),
    "batch_size=0": (lambda b: b.fit(batch_size=0), "batch_size must be >= 1"),
    "batch_size=1.5": (lambda b: b.fit(batch_size=1.5), "batch_size to be a whole number"),
    "validation_batch_size=0": (
        lambda b: b.fit(validation_data=(X, Y), validation_batch_size=0),
        "batch_size must be >= 1",
    ),
    "validation_split=20": (lambda b: b.fit(validation_split=20), "between 0 and 1"),
    "steps=0": (lambda b: b.regression.predict(X, steps=0), "steps must be >= 1"),
    "verbose='yes'": (lambda b: b.fit(verbose="yes"), "0, 1, 2 or 'auto'"),
    "predict(verbose='yes')": (lambda b: b.regression.predict(X, verbose="yes"), "or 'auto'"),
    "shuffle='batch'": (lambda b: b.fit(shuffle="batch"), "True or False"),
    "class_weight='balance'": (lambda b: b.fit(class_weight="balance"), "or 'balanced'"),
    "class_weight as a list": (lambda b: b.fit(class_weight=[1.0, 2.0]), "a dict that maps"),
    "balanced without classes": (lambda b: b.fit(class_weight="balanced"), "integer classes"),
    "balanced with a loader": (
        lambda b: b.regression.fit([(X, Y)], class_weight="balanced"),
        "Pass y as an array",
    ),
    "loss_weights as a list": (
        lambda _: Trainer(two_outputs(), loss={"a": "mse"}, loss_weights=[1.0]),
        "a dict from output name to number",
    ),
    "one loss for two outputs": (lambda _: Trainer(two_outputs(), loss="mse"), "loss={'a'"),
    "seed=None": (lambda _: build(seed=None), "whole number"),
    "device='gpu'": (lambda _: build(device="gpu"), "Did you mean 'cuda'?"),
    "device='mps'": (lambda _: build(device="mps"), "Did you mean 'coreml'?"),
    "a device that is not there": (lambda _: build(device="cuda:99"), "or use device='cpu'"),
    "fit without a loss": (lambda _: Trainer(linear(4)).fit(X, Y), "loss='mean_squared_error'"),
    "evaluate without a loss": (lambda _: Trainer(linear(4)).evaluate(X, Y), "has no loss"),
    "metrics without a loss": (lambda _: Trainer(linear(4), metrics=["mae"]), "loss=None"),
    # ------------------------------------------------------------------ data
    "no labels": (lambda b: b.regression.fit(X), "Pass y"),
    "data and labels in one tuple": (
        lambda b: b.regression.fit((X, Y)),
        "Pass inputs and targets as two arguments: x, y",
    ),
    "too few labels": (lambda b: b.regression.fit(X, Y[:3]), "y for y has 3"),
    "too many features": (
        lambda b: b.regression.fit(np.ones((3, 5), np.float32), Y[:3]),
        "x: float32[N, 4] got an array of shape (3, 5)",
    ),
    "labels as text": (
        lambda b: b.classification.fit(X, np.array(["a"] * 40)),
        "return_inverse=True",
    ),
    "labels from 1": (lambda b: b.classification.fit(X, CLASSES + 1), "from 0 to 2"),
    "labels as scores": (lambda b: b.classification.fit(X, X[:, 0]), "class indices"),
    "NaN in the data": (lambda b: b.regression.fit(X * np.nan, Y), "NaN in row 0"),
    "no rows": (lambda b: b.regression.fit(X[:0], Y[:0]), "0 rows"),
    "an input misspelt": (lambda b: b.regression.fit({"X": X}, Y), "Expected: x"),
    "validation_data without labels": (lambda b: b.fit(validation_data=X), "Pass y"),
    # ------------------------------------------------------------------ losses
    "a loss of NumPy": (
        lambda _: build(loss=lambda op, y_true, y_pred: np.abs(y_true - y_pred)),
        "op.Abs(y_true - y_pred)",
    ),
    "a loss with np.mean": (
        lambda _: build(loss=lambda op, y_true, y_pred: np.mean((y_true - y_pred) ** 2)),
        "op.Abs(y_true - y_pred)",
    ),
    "a loss with methods of tensors": (
        lambda _: build(loss=lambda op, y_true, y_pred: ((y_true - y_pred) ** 2).mean()),
        "op.Abs(y_true - y_pred)",
    ),
    "a loss without op": (lambda _: build(loss=lambda a, b: (a - b) ** 2), "(op, y_true, y_pred)"),
    "a loss that returns nothing": (
        lambda _: build(loss=lambda op, y_true, y_pred: None),
        "must return a Value of floats",
    ),
    "a function of PyTorch": (lambda _: build(loss=of_torch), "loss='mean_squared_error'"),
    "a module of one's own": (lambda _: build(loss=OwnModule()), "op.Abs(y_true - y_pred)"),
    "a loss of scikit-learn": (
        lambda _: build(loss=sklearn_loss()),
        "loss='mean_squared_error'",
    ),
    # ------------------------------------------------------------------ callbacks
    "EarlyStopping('val_los')": (
        lambda b: b.fit(callbacks=EarlyStopping("val_los"), validation_split=0.2),
        "'val_loss'?",
    ),
    "EarlyStopping without validation data": (
        lambda b: b.fit(callbacks=EarlyStopping()),
        "validation_split, or monitor 'loss'",
    ),
    "ModelCheckpoint('val_acc')": (
        lambda b: b.fit(callbacks=ModelCheckpoint("a", monitor="acc", save_best_only=True)),
        "metrics=[...]",
    ),
    "a callback's class": (lambda b: b.fit(callbacks=[EarlyStopping]), "EarlyStopping(...)"),
    "a function as a callback": (lambda b: b.fit(callbacks=[print]), "instances of"),
    "on_epoch_ends": (lambda b: b.fit(callbacks=Misspelt()), "on_epoch_end?"),
    "on_train_epoch_end": (lambda b: b.fit(callbacks=Lightning()), "on_epoch_end?"),
    "on_epoch_end without logs": (
        lambda b: b.fit(callbacks=WithoutLogs()),
        "on_epoch_end(self, epoch, logs)",
    ),
    "LambdaCallback(on_epoch_ends=)": (
        lambda _: LambdaCallback(on_epoch_ends=print),
        "'on_epoch_end'?",
    ),
    # ------------------------------------------------------------------ weights
    "set_weights of a wrong name": (lambda b: b.regression.set_weights({"W": X}), "'w'?"),
    "set_weights of a wrong shape": (
        lambda b: b.regression.set_weights({"w": np.ones((1, 4))}),
        "w must be float32[4, 1]",
    ),
    "set_weights of a list": (lambda b: b.regression.set_weights([X]), "a dict that maps"),
    "set_weights of text": (lambda b: b.regression.set_weights({"w": "a"}), "float32[4, 1]"),
    "set_weights of complex numbers": (
        lambda b: b.regression.set_weights({"w": np.ones((4, 1), complex)}),
        "float32[4, 1]",
    ),
    "set_weights of rows of several lengths": (
        lambda b: b.regression.set_weights({"w": [[1], [1, 2]]}),
        "float32[4, 1]",
    ),
    "set_weights beyond float32": (
        lambda b: b.regression.set_weights({"w": np.full((4, 1), 1e300)}),
        "outside the range of float32",
    ),
    # ------------------------------------------------------------------ files
    "a file that is not there": (lambda _: Trainer("modle.onnx"), "Did you mean 'model.onnx'?"),
    "a folder that is not there": (lambda _: Trainer("no/m.onnx"), "there is no folder 'no'"),
    "a folder as a model": (lambda _: Trainer("."), "model.onnx."),
    "a checkpoint as a model": (lambda _: Trainer("a.ckpt"), "Trainer.load('a.ckpt')"),
    "a checkpoint's bytes as a model": (
        lambda _: Trainer(Path("a.ckpt").read_bytes()),
        "checkpoint of a Trainer",
    ),
    "a file of PyTorch": (lambda _: Trainer("net.pt"), "torch.onnx.export(module"),
    "a file of Keras": (lambda _: Trainer("net.h5"), "format='onnx'"),
    "a pickle": (lambda _: Trainer("net.pkl"), "torch.onnx.export(module"),
    "a damaged model": (lambda _: Trainer("damaged.onnx"), "not an ONNX model"),
    "no model": (lambda _: Trainer(None), "a path, bytes or an onnx.ModelProto"),
    "a module of PyTorch": (lambda _: Trainer(Network()), "torch.onnx.export(module"),
    "an estimator": (lambda _: Trainer(Estimator()), "skl2onnx.to_onnx"),
    "Trainer.load of a model": (lambda _: Trainer.load("model.onnx"), "Trainer('model.onnx', loss"),
    "restore of a model": (lambda b: b.regression.restore("model.onnx"), "is an ONNX model"),
    "Trainer.load of nothing": (
        lambda _: Trainer.load("no/a.ckpt"),
        "The checkpoint 'no/a.ckpt' does not exist",
    ),
    "Trainer.load(lr=)": (lambda _: Trainer.load("a.ckpt", lr=0.1), "learning_rate=0.001"),
    "save('m.onnx')": (lambda b: b.regression.save("m.onnx"), "export('m.onnx')"),
    "export into a folder": (lambda b: b.regression.export("."), "it is a folder"),
    "ModelCheckpoint('m.onnx')": (lambda _: ModelCheckpoint("m.onnx"), "save_weights_only=True"),
    # ------------------------------------------------------------------ attributes
    "trainer.compile": (lambda b: b.regression.compile("adam"), "Trainer(model, loss="),
    "trainer.train": (lambda b: b.regression.train(), "fit(x, y) trains"),
    "trainer.eval": (lambda b: b.regression.eval(), "no mode to set"),
    "trainer.parameters": (lambda b: b.regression.parameters(), "get_weights()"),
    "trainer.load_state_dict": (lambda b: b.regression.load_state_dict({}), "set_weights"),
    "trainer.save_weights": (lambda b: b.regression.save_weights("a"), "export(path)"),
    "trainer.predict_proba": (lambda b: b.regression.predict_proba(X), "OnnxClassifier"),
    "trainer.lr": (lambda b: b.regression.lr, "learning_rate"),
    "trainer.evalute": (lambda b: b.regression.evalute(X, Y), "'evaluate'?"),
    # ------------------------------------------------------------------ names
    "a loss misspelt": (lambda _: build(loss="mean_sqared_error"), "'mean_squared_error'?"),
    "many known names": (lambda _: build(loss="mean_sqared_error"), " more."),
    "an optimizer misspelt": (lambda _: build(optimizer="adm"), "'adam'?"),
    "a metric misspelt": (lambda _: build(metrics=["acuracy"]), "'accuracy'?"),
    "a weight misspelt": (lambda _: build(weights="W"), "'w'?"),
    "an optimizer's class": (lambda _: build(optimizer=Adam), "Adam()"),
}


@pytest.mark.parametrize("name", WORKS)
def test_a_habit_works(name: str, bench: Bench) -> None:
    run, is_right = WORKS[name]
    result = run(bench)
    assert is_right(result), result


@pytest.mark.parametrize("name", REFUSED)
def test_a_habit_is_refused_with_its_fix(name: str, bench: Bench) -> None:
    run, fix = REFUSED[name]
    before = bench.regression.get_weights(), bench.regression.global_step
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(OnnxfitError) as refused:
            run(bench)
    message = str(refused.value)
    assert fix in message
    assert len(message.splitlines()) <= MAX_LINES
    np.testing.assert_equal((bench.regression.get_weights(), bench.regression.global_step), before)


# Every argument of Keras 3.15 with its default value, for the methods and callbacks that
# docs/coming-from.md calls the same.
DATA = {"x": X, "y": Y, "sample_weight": None}
KERAS_METHODS: dict[str, dict[str, Any]] = {
    "fit": {
        **DATA, "batch_size": None, "epochs": 1, "verbose": "auto", "callbacks": None,
        "validation_split": 0.0, "validation_data": None, "shuffle": True, "class_weight": None,
        "initial_epoch": 0, "steps_per_epoch": None, "validation_steps": None,
        "validation_batch_size": None, "validation_freq": 1,
    },
    "evaluate": {
        **DATA, "batch_size": None, "verbose": "auto", "steps": None, "callbacks": None,
        "return_dict": False,
    },
    "predict": {"x": X, "batch_size": None, "verbose": "auto", "steps": None, "callbacks": None},
    "train_on_batch": {**DATA, "class_weight": None, "return_dict": False},
    "test_on_batch": {**DATA, "return_dict": False},
    "predict_on_batch": {"x": X},
}  # fmt: skip
MONITORED = {"monitor": "loss", "mode": "auto", "verbose": 0}
KERAS_CALLBACKS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "EarlyStopping": ([], {
        **MONITORED, "min_delta": 0, "patience": 0, "baseline": None,
        "restore_best_weights": False, "start_from_epoch": 0,
    }),
    "ModelCheckpoint": (["keras.ckpt"], {
        **MONITORED, "save_best_only": False, "save_weights_only": False, "save_freq": "epoch",
        "initial_value_threshold": None,
    }),
    "ReduceLROnPlateau": ([], {
        **MONITORED, "factor": 0.1, "patience": 10, "min_delta": 0.0001, "cooldown": 0,
        "min_lr": 0.0,
    }),
    "BackupAndRestore": (["backup"], {
        "save_freq": "epoch", "double_checkpoint": False, "delete_checkpoint": True,
    }),
    "CSVLogger": (["log.csv"], {"separator": ",", "append": False}),
    "TensorBoard": ([], {
        "log_dir": "logs", "histogram_freq": 0, "write_graph": True, "write_images": False,
        "write_steps_per_second": False, "update_freq": "epoch", "profile_batch": 0,
        "embeddings_freq": 0, "embeddings_metadata": None,
    }),
    "LearningRateScheduler": ([lambda epoch, rate: rate], {"verbose": 0}),
    "TerminateOnNaN": ([], {"raise_error": False}),
    "LambdaCallback": ([], dict.fromkeys((
        "on_epoch_begin", "on_epoch_end", "on_train_begin", "on_train_end",
        "on_train_batch_begin", "on_train_batch_end",
    ))),
    "SwapEMAWeights": ([], {"swap_on_epoch": False}),
    "History": ([], {}),
}  # fmt: skip


@pytest.mark.parametrize("name", KERAS_METHODS)
def test_a_method_takes_every_argument_of_keras(name: str) -> None:
    build(metrics=["mae"]).__getattribute__(name)(**KERAS_METHODS[name])


@pytest.mark.parametrize("name", KERAS_CALLBACKS)
def test_a_callback_takes_every_argument_of_keras(name: str, bench: Bench) -> None:
    positional, named = KERAS_CALLBACKS[name]
    callback = getattr(callbacks, name)(*positional, **named)
    settings = {"optimizer": Adam(0.1, ema_momentum=0.9)} if name == "SwapEMAWeights" else {}
    build(**settings).fit(X, Y, callbacks=callback, verbose=0)


WARNED = {
    "CrossEntropy(from_logits=True) of a Softmax": (
        lambda: ended_trainer("Softmax", CrossEntropy(from_logits=True)),
        "Set from_logits=False",
    ),
    "bce_with_logits of a Sigmoid": (
        lambda: ended_trainer("Sigmoid", "bce_with_logits"),
        "Set from_logits=False",
    ),
    "NLL of a Softmax": (lambda: ended_trainer("Softmax", NLL()), "Use CrossEntropy"),
    "NLL of scores": (lambda: Trainer(mlp((4, 3)), loss="nll"), "Use CrossEntropy"),
}


@pytest.mark.parametrize("name", WARNED)
def test_a_loss_that_does_not_fit_is_warned_of_once_at_the_users_line(name: str) -> None:
    build_it, fix = WARNED[name]
    labels = np.eye(3)[CLASSES] if "bce" in name else CLASSES
    with pytest.warns(UserWarning, match=fix) as warned:
        build_it().fit(X, labels, verbose=0)
    assert [warning.filename for warning in warned] == [__file__]


def test_warnings_of_every_call_point_at_the_users_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxfit.data.adapter.MAX_SILENT_BYTES", 0)
    data = X.astype(np.float64)
    trainer = build()
    evaluating = LambdaCallback(on_train_begin=lambda logs: trainer.evaluate(data, Y))
    calls = (
        lambda: trainer.fit(data, Y, verbose=0),
        lambda: trainer.evaluate(data, Y),
        lambda: trainer.predict(data),
        lambda: trainer.train_on_batch(data, Y),
        lambda: trainer.fit(X, Y, verbose=0, callbacks=evaluating),
    )
    for call in calls:
        with pytest.warns(UserWarning, match="was converted from float64") as warned:
            call()
        assert [warning.filename for warning in warned] == [__file__]


def test_warnings_of_estimators_point_at_the_users_line() -> None:
    sklearn_model_selection = pytest.importorskip("sklearn.model_selection")
    from onnxfit.sklearn import OnnxRegressor

    class Helper(Callback):
        def on_anything(self) -> None: ...

    estimator = OnnxRegressor(linear(4), epochs=1, callbacks=[Helper()])
    with pytest.warns(UserWarning, match="is not a hook") as warned:
        sklearn_model_selection.cross_val_score(estimator, X, Y.ravel(), cv=2)
    assert {warning.filename for warning in warned} == {__file__}
