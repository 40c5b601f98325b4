"""LearningRateMonitor."""

import pytest

from onnxfit.callbacks import LambdaCallback, LearningRateMonitor, TensorBoard
from onnxfit.errors import SettingError
from onnxfit.optimizers import SGD
from onnxfit.schedules import Cosine
from tests.callbacks.helpers import fit, line


def test_the_rate_of_every_step_is_in_the_logs_and_in_tensorboard(tmp_path):
    seen = []
    look = LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs["lr"]))
    schedule = Cosine(0.1, 4)
    board = TensorBoard(tmp_path, update_freq="batch")
    fit(board, LearningRateMonitor(), look, on=line(SGD(schedule)), epochs=2)
    assert seen == [schedule(step) for step in range(4)]
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "train"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("optimizer/batch_lr")] == [
        (s + 1, pytest.approx(schedule(s))) for s in range(4)
    ]
    with pytest.raises(SettingError, match="a name that the logs of a batch do not have yet"):
        LearningRateMonitor("loss")
