"""Devices that a step can run on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime.capi import _pybind_state as C

from onnxfit.errors import InstallationError, SettingError


@dataclass(frozen=True)
class Device:
    """Where a step runs:

    `cpu`, or `cuda`, `cuda:1`, … with an onnxruntime that offers the provider.
    """

    kind: str
    index: int

    @staticmethod
    def parse(name: str) -> Device:
        """SettingError for a name that is none, InstallationError for a device this onnxruntime
        does not offer.
        """
        match = re.fullmatch(r"(cpu|cuda)(?::(\d+))?", name) if isinstance(name, str) else None
        if match is None:
            raise SettingError(f"device is 'cpu', 'cuda' or 'cuda:N', got {name!r}.")
        device = Device(match[1], int(match[2] or 0))
        offered = onnxruntime.get_available_providers()
        try:
            if device.provider not in offered:
                raise RuntimeError(f"this installation offers {', '.join(offered)}")
            C.OrtValue.ortvalue_from_shape_and_type([1], np.float32, device.handle)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise InstallationError(
                f"device={name!r} needs onnxruntime's {device.provider}, which is not to be had"
                f" here: {reason}."
            ) from None
        return device

    @property
    def provider(self) -> str:
        return {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}[self.kind]

    @property
    def options(self) -> dict[str, str]:
        return {"device_id": str(self.index)} if self.kind != "cpu" else {}

    @property
    def handle(self) -> Any:
        return C.OrtDevice(
            getattr(C.OrtDevice, self.kind)(), C.OrtDevice.default_memory(), self.index
        )


CPU = Device("cpu", 0)
