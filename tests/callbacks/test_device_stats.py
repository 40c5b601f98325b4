"""DeviceStats."""

import sys

import numpy as np

from onnxfit.callbacks import DeviceStats, LambdaCallback, device_stats
from tests.callbacks.helpers import X, Y, fit


def test_the_machine_s_figures(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(device_stats, "monotonic", lambda: now[0])
    monkeypatch.setattr(device_stats, "process_time", lambda: now[0] * 1.5)

    def pass_a_second(batch, logs):
        now[0] += 1

    second = LambdaCallback(on_train_batch_begin=pass_a_second, on_test_batch_begin=pass_a_second)
    history = fit(second, DeviceStats(), epochs=2, validation_data=(X, Y)).history.history
    assert history["samples_per_second"] == [2, 2]  # 4 rows in the 2 seconds of training
    assert history["cpu_percent"] == [150, 150]
    if sys.platform != "win32":
        before = history["memory_megabytes"][-1]
        assert 10 < before < 1e6
        if sys.platform == "linux":
            held = np.ones(25_000_000, np.float64)
            more = fit(DeviceStats()).history.history["memory_megabytes"][-1]
            assert more - before > 100 + 0 * held[0]
