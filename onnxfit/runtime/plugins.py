"""Execution providers in packages of their own, beside a plain onnxruntime."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime

# Packages without the usual beginning of the name. Version 1 of onnxruntime-qnn is a build of
# onnxruntime, and has no module of this name.
OTHER_PACKAGES = ("onnxruntime_qnn", "onnxruntime_ggml")
# The packages agree on no names: functions or constants of the module, in order of preference.
LIBRARY = ("get_library_path", "library_path")
NAME = ("get_ep_name", "ep_name", "EP_NAME")


@dataclass(frozen=True)
class Plugin:
    """An installed package with an execution provider.

    - `kind`: the name of the device, such as "openvino" for `onnxruntime_ep_openvino`.
    - `module`: the module of the package, which is imported by `register` only.
    - `package`, `version`: as pip lists them.
    """

    kind: str
    module: str
    package: str
    version: str

    def __str__(self) -> str:
        return f"{self.package} {self.version}"

    @functools.cached_property
    def provider(self) -> str:
        """Name of the execution provider. RuntimeError: the package does not tell it."""
        return str(self._told(NAME))

    def register(self) -> tuple[Any, ...]:
        """Return the devices of the provider, after its library has been loaded.

        A library that is registered already, also by other code, is not registered again. Devices
        that are only compiled for are left out. RuntimeError: the library cannot be loaded.
        """
        add = getattr(onnxruntime, "register_execution_provider_library", None)
        if add is None:
            raise RuntimeError(
                f"onnxruntime {onnxruntime.__version__} cannot load plugins, as version 1.23 can"
            )
        if not self._devices():
            path = str(self._told(LIBRARY))
            try:
                add(self.provider, path)
            except Exception as error:  # onnxruntime raises its own classes
                if "already registered" not in str(error):
                    raise RuntimeError(str(error)) from None
        return self._devices()

    def _devices(self) -> tuple[Any, ...]:
        return tuple(
            one
            for one in onnxruntime.get_ep_devices()
            if one.ep_name == self.provider and one.device.metadata.get("is_virtual") != "1"
        )

    def _told(self, names: tuple[str, ...]) -> object:
        """Return what the module has under the first of these names."""
        try:
            module = importlib.import_module(self.module)
            found = next((getattr(module, name) for name in names if hasattr(module, name)), None)
            if found is None:
                raise RuntimeError(f"{self} has none of {', '.join(names)}")
            return found() if callable(found) else found
        except (ImportError, OSError) as error:  # a library is missing
            raise RuntimeError(f"{self} cannot be imported: {error}") from None


def installed_plugins() -> list[Plugin]:
    """Return the installed plugins. Only metadata is read: no module is imported."""
    found: dict[str, Plugin] = {}
    for folder in sys.path:
        for metadata in sorted(Path(folder or ".").glob("onnxruntime_*.dist-info")):
            for plugin in _plugins_of(metadata):
                found.setdefault(plugin.kind, plugin)  # an earlier folder hides a later one
    return list(found.values())


def _plugins_of(metadata: Path) -> Iterator[Plugin]:
    """Yield the plugin of a distribution, if it has one. Metapackages have no module."""
    package, _, version = metadata.name.removesuffix(".dist-info").partition("-")
    if not package.startswith("onnxruntime_ep_") and package not in OTHER_PACKAGES:
        return
    record = importlib.metadata.Distribution.at(metadata).read_text("RECORD") or ""
    module = re.search(r"^(onnxruntime_(?:ep_)?(\w+))/__init__\.py,", record, re.MULTILINE)
    if module:
        yield Plugin(module[2], module[1], package.replace("_", "-"), version)


@functools.cache
def plugin_of(kind: str) -> Plugin | None:
    """Return the installed plugin for a kind of device, or None."""
    return next((one for one in installed_plugins() if one.kind == kind), None)


def is_built_in(provider: str) -> bool:
    """Return whether the installed onnxruntime itself has an execution provider.

    Registered plugins are among its available providers as well. Their devices name a library.
    """
    if provider not in onnxruntime.get_available_providers():
        return False
    devices: list[Any] = getattr(onnxruntime, "get_ep_devices", list)()
    return not any(d.ep_name == provider and "library_path" in d.ep_metadata for d in devices)


def describe_device(device: Any) -> str:
    """Return the kind and maker of a device that a plugin reports, such as "GPU (NVIDIA)"."""
    maker = device.device.vendor
    return f"{device.device.type.name}{f' ({maker})' if maker else ''}"
