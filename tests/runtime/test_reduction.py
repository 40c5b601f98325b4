"""Gradients and statistics that ranks share, on a device that is not the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxfit.runtime.buffers import DoubleBufferedState
from onnxfit.runtime.device import CPU, Device
from onnxfit.runtime.reduction import GradientReduction


class Twice:
    """Two ranks with the same numbers."""

    shares_memory = overlaps = False

    def sum(self, name: str, *arrays: np.ndarray[Any, Any]) -> None:
        for array in arrays:
            array *= 2


def test_statistics_are_read_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "handle", CPU.handle)  # the device is the CPU, called cuda
    device = Device("cuda", 0)
    state = DoubleBufferedState({"statistics": {"mean": np.array([1, 3], np.float32)}}, device)
    mean = state.buffer("mean")
    mean.array[:] = 0  # a step writes to the device, not to this copy
    reduction = GradientReduction(Twice(), {}, {"mean": mean.array}, device)  # type: ignore[arg-type]  # all that it uses
    assert reduction.sum(0.5, 2.0, state) == 4
    assert mean.read().tolist() == [1, 3]
