"""Keras 3 on its PyTorch and JAX backends: the same architecture written again, the weights copied."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from workloads import Array, Job

from contenders.contender import Contender, Refused, first_losses, over


class Keras(Contender):
    def __init__(self, backend: str) -> None:
        self.backend = backend

    def load(self) -> None:
        os.environ["KERAS_BACKEND"] = self.backend
        import keras

        self.library = keras

    def build(self, job: Job) -> None:
        if not (job.workload.sizes or job.workload.name == "cnn"):
            raise Refused("not written for Keras")
        if self.backend == "torch":
            import torch

            torch.set_num_threads(job.threads)
        self.job, self.fitted = job, None
        self.library.utils.set_random_seed(0)
        self.model = self._model([])

    def _model(self, metrics: list[str]) -> Any:
        library, work = self.library, self.job.workload
        model = library.Sequential(
            [library.Input(self._images(np.empty((1, *work.inputs))).shape[1:]), *self._layers()]
        )
        self._copy(model)
        optimizer = {"sgd": library.optimizers.SGD, "adam": library.optimizers.Adam}[
            self.job.optimizer
        ](self.job.learning_rate)
        if self.job.optimizer == "adam":
            optimizer.epsilon = 1e-8
        loss = (
            library.losses.SparseCategoricalCrossentropy(from_logits=True)
            if work.classifies
            else "mean_squared_error"
        )
        model.compile(optimizer=optimizer, loss=loss, metrics=metrics)
        return model

    def _layers(self) -> list[Any]:
        layers = self.library.layers
        if self.job.workload.sizes:
            inner, last = self.job.workload.sizes[1:-1], self.job.workload.sizes[-1]
            return [*(layers.Dense(size, activation="relu") for size in inner), layers.Dense(last)]
        return [
            layers.Conv2D(6, 5, padding="same", activation="relu"), layers.MaxPooling2D(2), layers.Conv2D(16, 5, activation="relu"),
            layers.MaxPooling2D(2), layers.Flatten(), layers.Dense(120, activation="relu"), layers.Dense(84, activation="relu"), layers.Dense(10),
        ]  # fmt: skip

    def _copy(self, model: Any) -> None:
        """PyTorch's weights: rows and columns, and channels and places, are the other way round
        here.
        """
        arrays: list[Array] = []
        for name, array in self.job.weights().items():
            if name.endswith("weight") and array.ndim == 4:
                array = array.transpose(2, 3, 1, 0)
            elif name.endswith("weight"):
                array = array.T
                if not self.job.workload.sizes and len(array) == 400:  # the first after Flatten
                    array = array.reshape(16, 5, 5, -1).transpose(1, 2, 0, 3).reshape(400, -1)
            arrays.append(array)
        model.set_weights(arrays)

    def _images(self, x: Array) -> Array:
        """Channels last, which is what Keras's convolutions do on every backend."""
        return np.ascontiguousarray(x.transpose(0, 2, 3, 1)) if x.ndim == 4 else x

    def _batches(self) -> list[tuple[Array, Array]]:
        return [(self._images(x), y) for x, y in self.job.workload.split()]

    def losses(self) -> list[float]:
        """train_on_batch returns the mean since the last reset."""
        return first_losses(
            lambda x, y: (self.model.reset_metrics(), np.ravel(self.model.train_on_batch(x, y))[0])[
                1
            ],
            self._batches(),
        )

    def step(self) -> Callable[[], object]:
        return over(self.model.train_on_batch, self._batches())

    def fit(self, epochs: int, on_batch: Callable[[], None]) -> None:
        if self.fitted is None:
            self.fitted = self._model(["accuracy"] if self.job.workload.classifies else [])
            x, y = self.job.workload.data()
            self.data = self._images(x), y

        class Told(self.library.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: object = None) -> None:
                on_batch()

        x, y = self.data
        self.fitted.fit(
            x,
            y,
            batch_size=self.job.workload.batch_size,
            epochs=epochs,
            callbacks=[Told()],
            verbose=0,
        )
