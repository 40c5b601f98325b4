"""Devices that a step can run on."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from threading import RLock
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnxruntime.capi import _pybind_state as C

from onnxfit.environment import warn_of_mixed_distributions
from onnxfit.errors import InstallationError, SettingError
from onnxfit.runtime.plugins import Plugin, is_built_in, plugin_of
from onnxfit.step.providers import PROVIDERS, Provider

# While one thread makes a CUDA graph, CUDA refuses most calls of all other threads.
CUDA_CALLS = RLock()

ALIASES = {"gpu": "cuda", "nvidia": "cuda", "dml": "directml", "amd": "rocm", "mps": "coreml"}


@dataclass(frozen=True)
class Device:
    """Device of a session and its tensors.

    `kind` is a key of PROVIDERS; `index` is the number of the device, 0 where there is one. With
    `tf32`, a GPU rounds the factors of products in float32 to TF32.
    """

    kind: str
    index: int
    tf32: bool = False

    @staticmethod
    def parse(name: str) -> Device:
        """Return the device called `name`, such as "cpu", "cuda" or "cuda:1".

        SettingError: no device has this name. InstallationError: the installed onnxruntime does not
        support the device.
        """
        match = re.fullmatch(r"(\w+)(?::(\d+))?", name) if isinstance(name, str) else None
        provider = PROVIDERS.get(match[1]) if match else None
        if match is None or provider is None or (match[2] and not provider.numbered):
            kinds = ", ".join(map(repr, PROVIDERS))
            raise SettingError(
                f"device must be one of {kinds}, or have a number as in 'cuda:1', got {name!r}."
                f"{_hint(name)}"
            )
        warn_of_mixed_distributions()
        device = Device(match[1], int(match[2] or 0))
        offered = onnxruntime.get_available_providers()
        try:
            if device.plugin is None and device.provider not in offered:
                raise RuntimeError(f"the installed onnxruntime has only {', '.join(offered)}")
            device._try()
        except RuntimeError as error:
            # onnxruntime's messages begin with a place in its sources.
            reason = re.sub(r"^\S+\.cc:\d+ .*?\) ", "", str(error).splitlines()[0]).rstrip(".")
            raise InstallationError(
                f"device={name!r} needs onnxruntime's {provider.name}, which is not available"
                f" here: {reason}. {device._advice()}, with the libraries that it needs, or use"
                " device='cpu'."
            ) from None
        return device

    def _try(self) -> None:
        """Raise RuntimeError if the device does not work."""
        C.OrtValue.ortvalue_from_shape_and_type([1], np.float32, self.handle)
        if self.kind in ("cpu", "cuda"):
            return
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        try:
            self.start_session(_relu(), options)
        except Exception as error:  # onnxruntime raises its own classes, all plain Exceptions
            raise RuntimeError(str(error)) from None

    def start_session(
        self,
        model: bytes,
        options: Any,
        provider_options: Mapping[str, str] | None = None,
        disabled_optimizers: Collection[str] = (),
    ) -> Any:
        """Return an onnxruntime session on this device. RuntimeError: it would be on the CPU.

        - `provider_options`: further options of the execution provider.
        """
        provider_options = {**self.options, **(provider_options or {})}
        providers: list[tuple[str, dict[str, str]]] | None = [(self.provider, provider_options)]
        plugin = self.plugin
        if plugin is not None:
            # By its name, onnxruntime would not find the provider, and would use the CPU.
            options.add_provider_for_devices([self._plugin_device(plugin)], provider_options)
            providers = None
        session = onnxruntime.InferenceSession(
            model,
            options,
            providers=providers,
            enable_fallback=False,  # otherwise onnxruntime silently falls back to the CPU
            disabled_optimizers=list(disabled_optimizers),
        )
        if self.provider not in session.get_providers():
            raise RuntimeError(f"the session does not use {self.provider}, only the CPU")
        return session

    @property
    def plugin(self) -> Plugin | None:
        """The package of the provider, if it is not part of the installed onnxruntime."""
        if self.kind == "cpu":
            return None
        return None if is_built_in(self.provider) else plugin_of(self.kind)

    def _plugin_device(self, plugin: Plugin) -> Any:
        """Return the device that a plugin reports. RuntimeError: there is none."""
        wanted = self._provider.options.get("device_type")
        offered = plugin.register()
        suitable = [one for one in offered if wanted in (None, one.device.type.name)]
        if len(suitable) <= self.index:
            kinds = f" {wanted}" if wanted else ""
            raise RuntimeError(
                f"{plugin} reports {len(suitable)}{kinds} devices that it can run on"
            )
        return suitable[self.index]

    def _advice(self) -> str:
        """Return what to install, or to check, if the provider is not available."""
        provider, plugin = self._provider, self.plugin
        if plugin is not None:
            return f"{plugin} is installed: check that the machine has such a device"
        beside = f" {provider.plugin} beside a plain onnxruntime" if provider.plugin else ""
        if not provider.package:
            return f"Install{beside}"
        instead = f" {provider.package} in place of other builds of onnxruntime"
        return f"Install{instead}{f', or{beside}' if beside else ''}"

    @property
    def _provider(self) -> Provider:
        return PROVIDERS[self.kind]

    @property
    def provider(self) -> str:
        """Name of onnxruntime's execution provider."""
        return self._provider.name

    @property
    def forms(self) -> str:
        """The forms of operators that the provider has kernels for, as for GraphBuilder."""
        return self._provider.forms

    @property
    def options(self) -> dict[str, str]:
        """Options of the execution provider."""
        numbers = {"device_id": str(self.index)} if self._provider.numbered else {}
        if self.plugin is not None:  # the device has its number, and its type
            return dict(self._provider.plugin_options)
        rounding = {"use_tf32": str(int(self.tf32))} if self.kind == "cuda" else {}
        return {**self._provider.options, **numbers, **rounding}

    @property
    def on_host(self) -> bool:
        """Whether tensors are in the memory of the CPU. Other providers copy them in each step."""
        return self.kind != "cuda"

    @property
    def calls(self) -> AbstractContextManager[object]:
        """A lock for calls that use the device; no lock for devices that need none."""
        return nullcontext() if self.on_host else CUDA_CALLS

    @property
    def draws(self) -> bool:
        """Whether the provider has the integers of 64 bits that random numbers are made of."""
        return self._provider.wide_integers

    @cached_property
    def copies_inputs(self) -> bool:
        """Whether a binding copies tensors to the provider when they are bound, and never again."""
        return self.on_host and self.kind != "cpu"

    @cached_property
    def handle(self) -> Any:
        """The memory of tensors as an OrtDevice."""
        memory = C.OrtDevice.cpu() if self.on_host else C.OrtDevice.cuda()
        index = 0 if self.on_host else self.index
        return C.OrtDevice(memory, C.OrtDevice.default_memory(), index)


def _hint(name: object) -> str:
    """Return the question whether a name like the given one was meant."""
    lower = name.lower() if isinstance(name, str) else ""
    known = {**ALIASES, **{kind: kind for kind in PROVIDERS}}
    meant = next((kind for begin, kind in known.items() if lower.startswith(begin)), None)
    return "" if meant is None else f" Did you mean {meant!r}?"


def _relu() -> bytes:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        relu (float[1] x) => (float[1] y) { y = Relu(x) }"""
    )
    return bytes(model.SerializeToString())


CPU = Device("cpu", 0)
