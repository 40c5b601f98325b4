"""Small trainers, data and callbacks that the tests of several callbacks share."""

import csv
import functools

import numpy as np
import pytest

import onnxfit
from onnxfit.callbacks import Callback, Logs
from onnxfit.callbacks.callback import HOOKS
from onnxfit.optimizers import SGD
from onnxfit.schedules import Cosine
from tests.models import linear, mlp

both_backends = pytest.mark.parametrize("backend", ["full", "forward_backward", "in_place"])
X = np.ones((4, 1), np.float32)
Y = np.zeros((4, 1), np.float32)
# one batch of two rows
X2 = X[:2]
Y2 = Y[:2]


def line(optimizer=0.1, **settings):
    """Return a trainer of y = w x with w = 1; on X and Y every update brings w nearer to 0."""
    return onnxfit.Trainer(linear(w=1.0), loss="mse", optimizer=optimizer, **settings)


@functools.cache
def built(learning_rate, backend, gradient):
    trainer = line(learning_rate, backend=backend, gradient=gradient)
    return trainer, trainer.get_state()


def ready(way, learning_rate=0.1):
    """Return a `line` as new that trains this way; built once, because compiling takes longest."""
    trainer, state = built(learning_rate, **way)
    trainer.set_state(state)
    return trainer


def ten_rows():
    """Return data for `network`."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(10, 4)).astype(np.float32)
    return x, (x.sum(1) > 0).astype(np.int64)


def network(backend="full", **settings):
    """Return a trainer with momentum and a schedule."""
    optimizer = SGD(Cosine(0.1, 40), momentum=0.9)
    return onnxfit.Trainer(
        mlp(), loss="cross_entropy", optimizer=optimizer, backend=backend, **settings
    )


def fit(*callbacks, on=None, x=X, y=Y, **settings):
    """Train `on`, or a new `line`, with these callbacks; return the trainer."""
    on = on or line()
    on.fit(x, y, **{"batch_size": 2, "verbose": 0, "callbacks": list(callbacks)} | settings)
    return on


def run(values, *callbacks, name="val_loss", on=None, **settings):
    """Train for one epoch for each value, logged as `name`; return the Script."""
    script = Script(values, name)
    (on or line()).fit(
        X2,
        Y2,
        epochs=len(values),
        batch_size=2,
        verbose=0,
        callbacks=[script, *callbacks],
        **settings,
    )
    return script


class Script(Callback):
    """Log one value an epoch (None: not this epoch), and keep the weights after each epoch."""

    def __init__(self, values, name="val_loss"):
        self.values = values
        self.name = name
        self.weights = []

    def on_epoch_end(self, epoch, logs):
        if self.values[epoch] is not None:
            self.trainer.log(self.name, self.values[epoch])
        self.weights.append(self.trainer.get_weights())

    @property
    def ran(self):
        return len(self.weights)


class Recorder(Callback):
    """Write down every call of every hook."""

    def __init__(self, calls=None, name="", leave_out=("on_gradients",)):
        self.calls = [] if calls is None else calls
        self.name = name
        for hook in HOOKS:
            if hook not in leave_out:
                setattr(self, hook, lambda *arguments, hook=hook: self._record(hook, *arguments))

    @property
    def state_key(self):
        return f"Recorder({self.name})"

    def _record(self, hook, *arguments):
        self.calls.append(
            (self.name + hook, *(dict(a) if isinstance(a, Logs) else a for a in arguments))
        )

    def hooks(self):
        return [
            call[0].removeprefix("on_")
            + (str(call[1]) if len(call) > 1 and isinstance(call[1], int) else "")
            for call in self.calls
        ]


class Killed(BaseException):
    """The end of a process, as far as callbacks can tell."""


class KillAfter(Callback):
    """Raise Killed once `batches` batches have been trained, the last of all callbacks."""

    phase = "logger"

    def __init__(self, batches):
        self.left = batches
        self.ran = 0

    def on_train_batch_begin(self, batch, logs):
        self.ran += 1

    def on_train_batch_end(self, batch, logs):
        if self.ran == self.left:
            raise Killed


def same(one, other):
    """Return whether two dicts hold the same arrays under the same names."""
    return set(one) == set(other) and all(np.array_equal(one[name], other[name]) for name in one)


def row(values, settings, *expected):
    """Return a row of a table of parameters, with its values and settings as the id."""
    named = " ".join(f"{name} {value}" for name, value in settings.items())
    return pytest.param(values, settings, *expected, id=f"{values} {named}".replace(" True", ""))


def files(folder):
    """Return the paths of all files below a folder, relative to it."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def rows(path, separator=","):
    """Return the rows of a CSV file as dicts."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter=separator))
