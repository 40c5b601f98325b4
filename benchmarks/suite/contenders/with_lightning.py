"""Lightning's Trainer.fit, with what it logs by itself switched off."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from workloads import COMPARED_STEPS, Job

from contenders.contender import Contender
from contenders.with_torch import fused_optimizer, loss_of, rows_of, torch_module


class Lightning(Contender):
    def load(self) -> None:
        import lightning

        self.library = lightning
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    def build(self, job: Job) -> None:
        import torch

        torch.set_num_threads(job.threads)
        self.job = job
        self.module = self._module()

    def _module(self) -> Any:
        job, loss_function, classifies = self.job, loss_of(self.job), self.job.workload.classifies
        network = torch_module(job)

        class Module(self.library.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.network, self.losses = network, []

            def training_step(self, batch: Any, index: int) -> Any:
                x, y = batch
                output = self.network(x)
                loss = loss_function(output, y)
                self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(x))
                if classifies:
                    right = (output.detach().argmax(-1) == y).float().mean()
                    self.log("accuracy", right, on_step=False, on_epoch=True, batch_size=len(x))
                if len(self.losses) < COMPARED_STEPS:
                    self.losses.append(loss.item())
                return loss

            def configure_optimizers(self) -> Any:
                return fused_optimizer(job, self)

        return Module()

    def _fit(self, rows: Any, callbacks: Sequence[Any], shuffle: bool, **limits: int) -> None:
        from torch.utils.data import DataLoader

        trainer = self.library.Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=list(callbacks), **limits,
        )  # fmt: skip
        trainer.fit(
            self.module, DataLoader(rows, batch_size=self.job.workload.batch_size, shuffle=shuffle)
        )

    def losses(self) -> list[float]:
        rows = rows_of(*map(np.concatenate, zip(*self.job.workload.split())))
        self._fit(rows, [], shuffle=False, max_steps=COMPARED_STEPS)
        found: list[float] = self.module.losses
        return found

    def fit(self, epochs: int, on_batch: Callable[[], None]) -> None:
        class Told(self.library.Callback):
            def on_train_batch_end(self, *_: object, **__: object) -> None:
                on_batch()

        self._fit(rows_of(*self.job.workload.data()), [Told()], shuffle=True, max_epochs=epochs)
