"""skorch's fit: PyTorch behind scikit-learn's interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from workloads import Job

from contenders.contender import Contender, Refused, first_losses, over
from contenders.with_torch import torch_module


class Skorch(Contender):
    def load(self) -> None:
        import skorch
        import skorch.callbacks  # noqa: F401  # an attribute of self.library

        self.library = skorch

    def build(self, job: Job) -> None:
        import torch

        if len(job.workload.outputs) > 1:
            raise Refused("its classifier has one label a row")
        torch.set_num_threads(job.threads)
        self.job, library = job, self.library
        work = job.workload
        kind, loss = (
            (library.NeuralNetClassifier, torch.nn.CrossEntropyLoss)
            if work.classifies
            else (library.NeuralNetRegressor, torch.nn.MSELoss)
        )
        suite = self
        self.on_batch: Callable[[], None] = lambda: None

        class Told(library.callbacks.Callback):
            def on_batch_end(self, net: Any, **_: Any) -> None:
                suite.on_batch()

        callbacks: list[Any] = [Told()]
        if work.classifies:
            callbacks.append(
                (
                    "accuracy",
                    library.callbacks.EpochScoring(
                        "accuracy", on_train=True, name="train_accuracy"
                    ),
                )
            )
        self.net = kind(
            torch_module(job), criterion=loss, optimizer={"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[job.optimizer],
            optimizer__fused=True, lr=job.learning_rate, batch_size=work.batch_size, train_split=None, iterator_train__shuffle=True,
            callbacks=callbacks, verbose=0, **({"classes": np.arange(work.outputs[-1])} if work.classifies else {}),
        ).initialize()  # fmt: skip
        self.data = work.data()

    def _step(self, x: Any, y: Any) -> Any:
        return self.net.train_step((x, y))["loss"]

    def losses(self) -> list[float]:
        return first_losses(self._step, self._batches())

    def _batches(self) -> list[Any]:
        import torch

        return [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in self.job.workload.split()]

    def step(self) -> Callable[[], object]:
        return over(self._step, self._batches())

    def fit(self, epochs: int, on_batch: Callable[[], None]) -> None:
        self.on_batch = on_batch
        self.net.partial_fit(*self.data, epochs=epochs)  # fit would begin with new weights
