"""Timer."""

from datetime import timedelta

import pytest

from onnxfit.callbacks import BackupAndRestore, LambdaCallback, Timer, timer
from onnxfit.errors import SettingError
from tests.callbacks.helpers import KillAfter, Killed, fit


@pytest.mark.parametrize(
    ("duration", "interval", "batches"),
    [(5, "batch", 5), (5, "epoch", 8), (timedelta(seconds=9), "batch", 9), (None, "batch", 12)],
)
def test_the_timer_stops_training_in_time(monkeypatch, duration, interval, batches):
    now = [100.0]
    monkeypatch.setattr(timer, "monotonic", lambda: now[0])

    def pass_a_second(batch, logs):
        now[0] += 1

    clock = Timer(duration, interval=interval)
    on = fit(LambdaCallback(on_train_batch_begin=pass_a_second), clock, epochs=3, batch_size=1)
    assert on.global_batch == batches
    now[0] += 50  # after the fit no time passes
    assert clock.elapsed == batches
    assert clock.remaining == (None if duration is None else 0)
    assert (on.stop_reason or "").startswith(
        "" if duration is None else f"Timer: {batches}.0 seconds have passed"
    )
    second = LambdaCallback(on_train_batch_begin=pass_a_second)
    fit(second, clock, on=on, epochs=1, batch_size=1)
    assert clock.elapsed == 4  # another fit counts from 0


def test_the_timer_counts_the_time_before_an_interruption(monkeypatch, tmp_path):
    now = [0.0]
    monkeypatch.setattr(timer, "monotonic", lambda: now[0])

    def pass_a_second(batch, logs):
        now[0] += 1

    def run(kill):
        second = LambdaCallback(on_train_batch_begin=pass_a_second)
        return fit(
            second,
            Timer(7),
            BackupAndRestore(tmp_path / "b", every_n_steps=1),
            kill,
            epochs=9,
            batch_size=1,
        )

    with pytest.raises(Killed):
        run(KillAfter(3))
    now[0] += 1000
    assert run(KillAfter(-1)).global_batch == 7
    for settings in ({"duration": -1}, {"duration": timedelta(0)}, {"interval": "step"}):
        with pytest.raises(SettingError, match="Timer needs"):
            Timer(**settings)
