"""Execution providers in packages beside onnxruntime: fakes with the interface of real packages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest

from onnxfit import Trainer
from onnxfit.cli import doctor
from onnxfit.errors import InstallationError
from onnxfit.runtime import plugins
from onnxfit.runtime.device import Device
from tests.models import mlp

NAME = "OpenVINOExecutionProvider"
USUAL = f"def get_library_path(): return '/lib.so'\ndef get_ep_name(): return {NAME!r}\n"
CONSTANT = f"def library_path(): return '/lib.so'\nEP_NAME = {NAME!r}\n"

if NAME in onnxruntime.get_available_providers():
    pytest.skip("this onnxruntime has the provider itself", allow_module_level=True)


def add_package(folder: Path, package: str, module: str | None, code: str, version: str) -> None:
    metadata = folder / f"{package}-{version}.dist-info"
    metadata.mkdir(parents=True)
    lines = [f"{metadata.name}/METADATA,,"]
    if module is not None:
        (folder / module).mkdir()
        (folder / module / "__init__.py").write_text(code)
        lines.append(f"{module}/__init__.py,,")
    (metadata / "RECORD").write_text("\n".join(lines))


def device_of(kind: str, vendor: str = "Intel", **metadata: str) -> SimpleNamespace:
    hardware = SimpleNamespace(type=SimpleNamespace(name=kind), vendor=vendor, metadata=metadata)
    return SimpleNamespace(ep_name=NAME, device=hardware, ep_metadata={"library_path": "/lib.so"})


class Runtime:
    """The functions of onnxruntime for plugins. Sessions run on the CPU under the plugin's name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loads: list[tuple[str, str]] = []
        self.reports: list[SimpleNamespace] = [device_of("GPU"), device_of("CPU")]
        self.added: list[tuple[Any, dict[str, str]]] = []
        self.used = [NAME, "CPUExecutionProvider"]
        runtime = self

        class Options(onnxruntime.SessionOptions):
            def add_provider_for_devices(self, devices: Any, options: dict[str, str]) -> None:
                runtime.added.append((devices, options))

        class Session(onnxruntime.InferenceSession):
            def __init__(self, model: bytes, options: Any, **named: Any) -> None:
                self.given = named.pop("providers")
                super().__init__(model, options, providers=["CPUExecutionProvider"], **named)

            def get_providers(self) -> list[str]:
                return runtime.used if self.given is None else super().get_providers()

        for name, value in {
            "register_execution_provider_library": self.register,
            "get_ep_devices": lambda: self.reports if self.loads else [],
            # which also has a plugin that another test of this process has loaded
            "get_available_providers": lambda: ["CPUExecutionProvider"],
            "SessionOptions": Options,
            "InferenceSession": Session,
        }.items():
            monkeypatch.setattr(onnxruntime, name, value, raising=False)

    def register(self, name: str, path: str) -> None:
        self.loads.append((name, path))


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    return Runtime(monkeypatch)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(tmp_path)
    # Real plugins, which this environment may have, are not searched.
    monkeypatch.setattr(plugins, "sys", SimpleNamespace(path=[str(tmp_path)]))
    plugins.plugin_of.cache_clear()

    def add(
        code: str = USUAL,
        package: str = "onnxruntime_ep_openvino",
        module: str | None = "onnxruntime_ep_openvino",
        version: str = "1.8.1",
    ) -> None:
        add_package(tmp_path, package, module, code, version)

    yield add
    plugins.plugin_of.cache_clear()
    for name in [name for name in sys.modules if name.startswith("onnxruntime_ep_")]:
        del sys.modules[name]


Install = Callable[..., None]


def test_packages_are_found_without_importing_them(install: Install) -> None:
    install("raise AssertionError('imported')")
    install("", "onnxruntime_ep_nv_tensorrt_rtx_cu13", "onnxruntime_ep_nv_tensorrt_rtx", "0.5.0")
    install("", "onnxruntime_ep_nv_tensorrt_rtx", None, "0.5.0")  # a metapackage
    install("", "onnxruntime_qnn", "onnxruntime_qnn", "2.7.0")
    install("", "onnxruntime_extensions", "onnxruntime_extensions", "0.15.2")  # no provider
    found = {one.kind: str(one) for one in plugins.installed_plugins()}
    assert found == {
        "openvino": "onnxruntime-ep-openvino 1.8.1",
        "nv_tensorrt_rtx": "onnxruntime-ep-nv-tensorrt-rtx-cu13 0.5.0",
        "qnn": "onnxruntime-qnn 2.7.0",
    }


@pytest.mark.parametrize("code", [USUAL, CONSTANT])
@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_a_plugin_trains_as_the_cpu_does(
    install: Install, runtime: Runtime, code: str, backend: Any
) -> None:
    install(code)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 4)).astype(np.float32), rng.integers(0, 3, 20)
    losses = []
    for device in ("cpu", "openvino"):
        trainer = Trainer(
            mlp(), loss="cross_entropy", optimizer="adam", device=device, backend=backend
        )
        losses.append([trainer.train_on_batch(x, y)["loss"] for _ in range(4)])
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert len(set(losses[0])) == 4
    assert runtime.loads == [(NAME, "/lib.so")]  # once
    assert all(devices == [runtime.reports[1]] for devices, _ in runtime.added)  # the CPU
    assert all("INFERENCE_PRECISION_HINT" in options["load_config"] for _, options in runtime.added)


def test_a_session_on_the_cpu_alone_is_an_error(install: Install, runtime: Runtime) -> None:
    install()
    runtime.used = ["CPUExecutionProvider"]
    with pytest.raises(InstallationError, match=f"does not use {NAME}, only the CPU"):
        Device.parse("openvino")


@pytest.mark.parametrize("reports", [[], [device_of("GPU")], [device_of("CPU", is_virtual="1")]])
def test_a_plugin_without_a_device_is_an_error(
    install: Install, runtime: Runtime, reports: list[SimpleNamespace]
) -> None:
    install()
    runtime.reports = reports
    with pytest.raises(InstallationError, match=r"1\.8\.1 reports 0 CPU devices") as caught:
        Device.parse("openvino")
    assert "check that the machine has such a device" in str(caught.value)


def test_a_plugin_that_cannot_be_loaded_is_an_error(install: Install, runtime: Runtime) -> None:
    install("import a_missing_module")
    with pytest.raises(InstallationError, match="cannot be imported: No module named"):
        Device.parse("openvino")


def test_a_plugin_needs_an_onnxruntime_that_loads_it(
    install: Install, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    monkeypatch.delattr(onnxruntime, "register_execution_provider_library")
    with pytest.raises(InstallationError, match=r"cannot load plugins, as version 1\.23 can"):
        Device.parse("openvino")


def test_the_doctor_lists_plugins(install: Install, runtime: Runtime) -> None:
    install()
    install("import a_missing_module", "onnxruntime_ep_mlx", "onnxruntime_ep_mlx", "0.31.0")
    install(CONSTANT.replace(NAME, "Foo"), "onnxruntime_ep_foo", "onnxruntime_ep_foo", "0.1")
    found = doctor.diagnose()
    states = found.plugins
    assert states["onnxruntime-ep-openvino 1.8.1"] == (
        "device 'openvino'; reports GPU (Intel), CPU (Intel)"
    )
    assert (
        "cannot be used: onnxruntime-ep-mlx 0.31.0 cannot be imported"
        in (states["onnxruntime-ep-mlx 0.31.0"])
    )
    assert states["onnxruntime-ep-foo 0.1"] == (
        "device 'foo', which onnxfit does not use; reports no device that it can run on"
    )
    assert "plugins\n  onnxruntime-ep-" in str(found)
