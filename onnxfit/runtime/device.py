"""Devices that a step can run on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime.capi import _pybind_state as C

from onnxfit.errors import InstallationError, SettingError


@dataclass(frozen=True)
class Device:
    """Device of a session and its tensors.

    `kind` is "cpu" or "cuda"; `index` is the number of the device, 0 for the CPU.
    """

    kind: str
    index: int

    @staticmethod
    def parse(name: str) -> Device:
        """Return the device called `name`: "cpu", "cuda" or "cuda:N".

        Raises SettingError for any other name, and InstallationError for a device that the
        installed onnxruntime does not support.
        """
        match = re.fullmatch(r"(cpu|cuda)(?::(\d+))?", name) if isinstance(name, str) else None
        if match is None:
            is_gpu = isinstance(name, str) and name.lower().startswith(("gpu", "cuda", "nvidia"))
            hint = " Did you mean 'cuda'?" if is_gpu else ""
            raise SettingError(f"device must be 'cpu', 'cuda' or 'cuda:N', got {name!r}.{hint}")
        device = Device(match[1], int(match[2] or 0))
        offered = onnxruntime.get_available_providers()
        try:
            if device.provider not in offered:
                raise RuntimeError(f"this installation offers {', '.join(offered)}")
            C.OrtValue.ortvalue_from_shape_and_type([1], np.float32, device.handle)
        except RuntimeError as error:
            # onnxruntime's messages begin with a place in its sources.
            reason = re.sub(r"^\S+\.cc:\d+ .*?\) ", "", str(error).splitlines()[0]).rstrip(".")
            raise InstallationError(
                f"device={name!r} needs onnxruntime's {device.provider}, which is not available:"
                f" {reason}. Install onnxruntime's build for this device and its libraries, or use"
                " device='cpu'."
            ) from None
        return device

    @property
    def provider(self) -> str:
        """Name of onnxruntime's execution provider."""
        return {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}[self.kind]

    @property
    def options(self) -> dict[str, str]:
        """Options of the execution provider."""
        return {"device_id": str(self.index)} if self.kind != "cpu" else {}

    @cached_property
    def handle(self) -> Any:
        """The device as an OrtDevice."""
        return C.OrtDevice(
            getattr(C.OrtDevice, self.kind)(), C.OrtDevice.default_memory(), self.index
        )


CPU = Device("cpu", 0)
