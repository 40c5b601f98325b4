"""Metrics of several ranks are those of one process: figures of each class, and of dicts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxfit import Trainer
from onnxfit.losses import Joint
from onnxfit.metrics import AUC, F1, EpochMetric, IoU, MeanAveragePrecision
from tests.distributed.threads import on_ranks
from tests.metrics.test_detection import W, X, Y, detection, detector, mean_score, share
from tests.models import mlp

CLASSES = X[:, :3].argmax(axis=1)


def classifier(distribute: Any) -> dict[str, Any]:
    metrics: list[Any] = [
        F1(average=None), IoU(average=None, class_names=["a", "b", "c"]), AUC(average=None, weighted=True),
        "log_loss", "ece", "ndcg", "cohen_kappa", "mean_iou",
    ]  # fmt: skip
    trainer = Trainer(
        mlp((8, 6, 3)),
        loss="cross_entropy",
        optimizer="adam",
        metrics=metrics,
        distribute=distribute,
    )
    history = trainer.fit(
        X, CLASSES, W, epochs=2, batch_size=7, validation_split=0.25, verbose=0
    ).history
    return {**history, **trainer.evaluate(X, CLASSES, W, batch_size=9)}


def finder(distribute: Any) -> dict[str, Any]:
    labels = {"mask": "bool[b, 3]", "boxes": "float[b, 3, 4]"}
    metrics: list[Any] = [MeanAveragePrecision(0.1, weighted=True), mean_score, EpochMetric(share)]
    trainer = Trainer(
        detector(), loss=Joint(detection, ["boxes", "scores"], labels=labels), metrics=metrics,
        distribute=distribute,
    )  # fmt: skip
    return dict(trainer.evaluate(X, Y, W, batch_size=9))


@pytest.mark.parametrize("run", [classifier, finder])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_have_the_figures_of_one_process(run: Any, size: int) -> None:
    alone = run(None)
    for figures in on_ranks(size, run):
        assert list(figures) == list(alone)
        for name, value in alone.items():
            np.testing.assert_allclose(figures[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
