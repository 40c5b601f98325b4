"""Logs: read-only, computed at their first reading."""

import numpy as np
import pytest

from onnxfit.callbacks import LambdaCallback, Logs
from onnxfit.errors import SettingError
from tests.callbacks.helpers import fit, line


def test_logs_compute_a_figure_at_its_first_reading_and_once():
    calls = []
    logs = Logs({"loss": np.float32(0.5), "auc": lambda: calls.append(1) or 1})
    assert list(logs) == ["loss", "auc"]
    assert "auc" in logs
    assert len(logs) == 2
    assert not calls
    assert logs["auc"] == logs["auc"] == 1.0
    assert type(logs["loss"]) is type(logs["auc"]) is float
    assert len(calls) == 1
    assert repr(logs) == "Logs({'loss': 0.5, 'auc': 1.0})"
    assert dict(logs) == {"loss": 0.5, "auc": 1.0}


def test_logs_are_read_only():
    logs = Logs({"loss": 0.5})
    with pytest.raises(TypeError, match=r"trainer.log\('loss', value\)"):
        logs["loss"] = 1.0
    with pytest.raises(TypeError, match="read-only"):
        del logs["loss"]
    with pytest.raises(KeyError):
        logs["auc"]
    assert dict(logs) == {"loss": 0.5}


def test_what_a_batch_s_logs_no_longer_know_is_an_error_not_another_batch_s_value():
    kept = []
    keep = LambdaCallback(on_train_batch_end=lambda batch, logs: kept.append(logs))
    fit(keep, on=line(metrics=["mean_absolute_error"]))
    assert kept[0]["loss"] == 1.0
    with pytest.raises(SettingError, match=r"Store a copy instead: dict\(logs\)"):
        kept[0]["mean_absolute_error"]
