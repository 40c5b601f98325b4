"""What the tests of sessions and devices share."""

from __future__ import annotations

import pytest

from onnxfit.runtime.device import CPU, Device

HANDLE = CPU.handle


@pytest.fixture
def called_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let "cuda" be the CPU, by another name: its memory is read and written by copies and
    addresses alone.
    """
    monkeypatch.setattr(Device, "provider", "CPUExecutionProvider")
    monkeypatch.setattr(Device, "options", {})
    monkeypatch.setattr(Device, "handle", HANDLE)
