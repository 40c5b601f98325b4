"""TerminateOnNaN, and training without it."""

import json
import math

import numpy as np
import pytest

from onnxfit.callbacks import CSVLogger, JSONLLogger, LambdaCallback, TerminateOnNaN
from onnxfit.errors import DivergenceError
from tests.callbacks.helpers import Recorder, fit, line, rows


def poisoned():
    """Four batches of one row; the third row's loss is infinite, and its update would make w
    infinite or NaN.
    """
    x = np.ones((4, 1), np.float32)
    x[2] = 3e38
    return x, np.zeros((4, 1), np.float32)


def test_terminate_on_nan_stops_in_that_batch_with_the_weights_before_it(tmp_path):
    x, y = poisoned()
    weights = []
    record = Recorder()
    look = LambdaCallback(
        on_train_batch_begin=lambda batch, logs: weights.append(look.trainer.get_weights()["w"])
    )
    on = fit(
        look,
        TerminateOnNaN(),
        CSVLogger(tmp_path / "log.csv"),
        record,
        x=x,
        y=y,
        batch_size=1,
        shuffle=False,
        epochs=3,
    )
    assert len(weights) == 3
    assert np.array_equal(on.get_weights()["w"], weights[2])
    assert np.isfinite(weights[2])
    assert [row["loss"] for row in rows(tmp_path / "log.csv")] == ["inf"]
    assert record.hooks()[-3:] == ["epoch_end0", "train_end", "close"]
    assert on.stop_reason.startswith("TerminateOnNaN: the loss is inf at step ")


@pytest.mark.parametrize("bad", range(4))
def test_terminate_on_nan_takes_back_what_was_accumulated(bad):
    x = np.ones((4, 1), np.float32)
    x[bad] = 3e38
    weights = []
    look = LambdaCallback(
        on_train_batch_begin=lambda batch, logs: weights.append(look.trainer.get_weights()["w"])
    )
    on = fit(
        look, TerminateOnNaN(), on=line(accumulate=2), x=x, y=0 * x, batch_size=1, shuffle=False
    )
    assert len(weights) == bad + 1
    assert np.array_equal(on.get_weights()["w"], weights[-1])


def test_terminate_on_nan_raises_with_step_rate_and_last_losses():
    x, y = poisoned()
    on = line()
    with pytest.raises(
        RuntimeError, match=r"step \d.*learning rate 0\.1, last losses 1, 0\.64, inf"
    ) as raised:
        fit(TerminateOnNaN(raise_error=True), on=on, x=x, y=y, batch_size=1, shuffle=False)
    assert type(raised.value) is DivergenceError
    assert np.isfinite(on.get_weights()["w"])


def test_the_losses_reported_are_the_last_five_of_this_fit():
    x, y = poisoned()
    on = fit(on=line(), x=np.ones((7, 1), np.float32), y=np.zeros((7, 1), np.float32), batch_size=1)
    assert len(on.last_losses) == 5
    assert list(on.last_losses) == pytest.approx([0.64**number for number in range(2, 7)])
    on.set_weights({"w": np.ones((1, 1), np.float32)})
    with pytest.raises(DivergenceError, match=r"last losses 1, 0\.64, inf[.]"):
        fit(TerminateOnNaN(raise_error=True), on=on, x=x, y=y, batch_size=1, shuffle=False)


def test_without_it_training_goes_on_with_one_warning(tmp_path):
    x, y = poisoned()
    with pytest.warns(Warning, match=r"(?i)loss") as warned:
        on = fit(
            CSVLogger(tmp_path / "log.csv"),
            JSONLLogger(tmp_path / "log.jsonl"),
            x=x,
            y=y,
            batch_size=1,
            shuffle=False,
            epochs=2,
        )
    assert len(warned) == 1
    assert on.history.epoch == [0, 1]
    last = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    assert not math.isfinite(float(last["loss"]))


def test_the_reason_counts_epochs_and_batches_from_1():
    x, y = poisoned()
    on = fit(TerminateOnNaN(), x=x, y=y, batch_size=1, shuffle=False)
    assert "(epoch 1, batch 3)" in on.stop_reason
