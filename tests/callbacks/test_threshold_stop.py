"""ThresholdStop."""

import pytest

from onnxfit.callbacks import LambdaCallback, ThresholdStop
from tests.callbacks.helpers import fit


@pytest.mark.parametrize(
    ("values", "threshold", "mode", "ran"),
    [
        ([3, 2, 1, 0], 1, "min", 3),
        ([3, 2, 1, 0], 1.5, "min", 3),
        ([0.5, 0.9, 1.0], 0.9, "max", 2),
        ([float("nan"), 0.5], 1, "min", 2),
        ([3, 2], 0, "auto", 2),
    ],
)
def test_training_stops_when_the_threshold_is_reached(values, threshold, mode, ran):
    script = LambdaCallback(
        on_epoch_end=lambda epoch, logs: script.trainer.log("val_loss", values[epoch])
    )
    on = fit(script, ThresholdStop("val_loss", threshold=threshold, mode=mode), epochs=len(values))
    assert len(on.history.epoch) == ran
    assert on.stop_reason is None or "ThresholdStop: val_loss is" in on.stop_reason


def test_a_threshold_of_a_figure_that_is_not_there_is_warned_of_once():
    with pytest.warns(UserWarning, match="ThresholdStop monitors 'val_loss'") as warned:
        fit(ThresholdStop("val_loss", threshold=1), logging_anything(), epochs=3)
    assert len(warned) == 1


def logging_anything():
    """Return a callback that may log a figure of any name, as far as can be known."""
    return LambdaCallback(on_epoch_end=lambda epoch, logs: None)


def test_the_reason_counts_epochs_from_1():
    script = LambdaCallback(on_epoch_end=lambda epoch, logs: script.trainer.log("score", epoch))
    on = fit(script, ThresholdStop("score", threshold=1, mode="max"), epochs=5)
    assert on.history.epoch == [0, 1]
    assert on.stop_reason == "ThresholdStop: score is 1 at epoch 2 and has reached the threshold 1."
