"""onnxfit: the exported file, one of its backends, one of its sources of gradients."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from workloads import Array, Job

from contenders.contender import Contender, Refused, first_losses, over


class Onnxfit(Contender):
    def __init__(self, backend: str = "full", gradient: str = "onnx", kernels: bool = True) -> None:
        self.backend, self.gradient, self.kernels = backend, gradient, kernels

    def load(self) -> None:
        if not self.kernels:
            os.environ["ONNXFIT_KERNELS"] = "off"
        import onnxfit

        self.library = onnxfit
        self.library.Trainer  # noqa: B018  # imports the modules that train; `import` alone does not

    def build(self, job: Job) -> None:
        self.job = job
        self.trainer = None
        self.trainer = self._trainer(metrics=[])
        self.fitted: Any = None

    def _trainer(self, metrics: list[str]) -> Any:
        library, job = self.library, self.job
        optimizer = {"sgd": library.optimizers.SGD, "adam": library.optimizers.Adam}[job.optimizer](
            job.learning_rate
        )
        try:
            return library.Trainer(
                str(job.model), loss=job.workload.loss, optimizer=optimizer, metrics=metrics, backend=self.backend,
                gradient=self.gradient, batch_norm="train", threads=job.threads,
            )  # fmt: skip
        except library.errors.OnnxfitError as error:
            raise Refused(f"{type(error).__name__}: {error}") from error

    def losses(self) -> list[float]:
        return first_losses(
            lambda x, y: self.trainer.train_on_batch(x, y)["loss"], self.job.workload.split()
        )

    def step(self) -> Callable[[], object]:
        """Return a function that takes a step as the loop of `fit` does: copy the batch into the
        buffers, write the scalars, run, and update if the backend updates separately.
        """
        x, y = self.job.workload.data()
        backend, rate = self.trainer._training.backend, self.job.learning_rate
        with self.trainer._training.source(
            x, y, None, self.job.workload.batch_size, "training"
        ) as source:
            batches = list(source.batches(0))
        numbers = iter(range(10, 1 << 62))

        def train(batch: Any, _: object) -> None:
            backend.train(batch, rate, next(numbers), 0)
            backend.finish_step()

        return over(train, [(batch, None) for batch in batches])

    def fit(self, epochs: int, on_batch: Callable[[], None]) -> None:
        if self.fitted is None:
            self.trainer = None  # which was for the bare step: the memory is to be that of one
            self.fitted = self._trainer(["accuracy"] if self.job.workload.classifies else [])
        x, y = self._data()
        self.fitted.fit(
            x,
            y,
            epochs=epochs,
            batch_size=self.job.workload.batch_size,
            callbacks=[self._callback(on_batch)],
            verbose=0,
        )

    def _data(self) -> tuple[Array, Array]:
        return self.job.workload.data()

    def _callback(self, on_batch: Callable[[], None]) -> Any:
        class Told(self.library.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: object) -> None:
                on_batch()

        return Told()
