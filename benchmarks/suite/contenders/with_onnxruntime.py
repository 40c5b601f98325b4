"""onnxruntime-training's own API for training on a device: artifacts made from the exported file,
then Module and Optimizer.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from workloads import Job

from contenders.contender import Contender, Refused, first_losses, over


class OnDevice(Contender):
    def load(self) -> None:
        import onnxruntime.training.api
        import onnxruntime.training.artifacts  # noqa: F401  # an attribute of self.library
        import onnxruntime.training.onnxblock  # noqa: F401  # the same

        onnxruntime.set_default_logger_severity(4)
        self.runtime, self.library = onnxruntime, onnxruntime.training

    def build(self, job: Job) -> None:
        import onnx

        if len(job.workload.outputs) > 1:
            raise Refused("its CrossEntropyLoss takes one label a row")
        self.job, library = job, self.library
        model = onnx.load(job.model)
        weights = [
            w.name
            for w in model.graph.initializer
            if w.data_type == onnx.TensorProto.FLOAT and "running_" not in w.name
        ]
        loss = (
            library.artifacts.LossType.CrossEntropyLoss
            if job.workload.classifies
            else library.artifacts.LossType.MSELoss
        )
        blocks = library.onnxblock.optim
        optimizer = blocks.SGD() if job.optimizer == "sgd" else blocks.AdamW(eps=1e-8)
        with tempfile.TemporaryDirectory() as folder:
            try:
                library.artifacts.generate_artifacts(
                    model,
                    requires_grad=weights,
                    loss=loss,
                    optimizer=optimizer,
                    artifact_directory=folder,
                    additional_output_names=["y"],
                )
                update = onnx.load(Path(folder) / "optimizer_model.onnx")
                # it gets onnx's newest, which the library does not read
                update.ir_version = model.ir_version
                onnx.save(update, Path(folder) / "optimizer_model.onnx")
                state = library.api.CheckpointState.load_checkpoint(Path(folder) / "checkpoint")
                options = self.runtime.SessionOptions()
                options.intra_op_num_threads = job.threads
                options.log_severity_level = 4
                files = [
                    Path(folder) / f"{name}_model.onnx"
                    for name in ("training", "eval", "optimizer")
                ]
                self.module = library.api.Module(files[0], state, files[1], session_options=options)
                self.optimizer = library.api.Optimizer(files[2], self.module)
            except (
                Exception
            ) as error:  # onnxruntime raises its own classes, all of them plain Exceptions
                raise _refusal(error) from error
        self.optimizer.set_learning_rate(job.learning_rate)
        self.module.train()
        self.data = job.workload.data()

    def _step(self, x: Any, y: Any) -> Any:
        try:
            loss, self.output = self.module(x, y)
            self.optimizer.step()
        except Exception as error:
            raise _refusal(error) from error
        self.module.lazy_reset_grad()
        return loss

    def losses(self) -> list[float]:
        return first_losses(self._step, self.job.workload.split())

    def step(self) -> Callable[[], object]:
        return over(self._step, self.job.workload.split())

    def fit(self, epochs: int, on_batch: Callable[[], None]) -> None:
        """A plain loop: the library has none."""
        (x, y), work = self.data, self.job.workload
        rng, history = np.random.default_rng(0), []
        for _ in range(epochs):
            total, right = 0.0, 0
            order = rng.permutation(len(x))
            for start in range(0, len(x), work.batch_size):
                rows = order[start : start + work.batch_size]
                labels = y[rows]
                total += float(self._step(x[rows], labels)) * len(rows)
                if work.classifies:
                    right += int((self.output.argmax(-1) == labels).sum())
                on_batch()
            history.append((total / len(x), right / y.size))


def _refusal(error: Exception) -> Refused:
    """Its message, without the place in its source."""
    text = str(error).strip().split("[ONNXRuntimeError]")[-1]
    return Refused(f"it cannot: {re.sub(r'^/.+?:[0-9]+ .*?[)] (const )?', '', text)}")
