"""The gradient builder of onnxruntime that is not installed: the commands that install it."""

from __future__ import annotations

import platform
import sys
import types
from pathlib import Path

import onnxruntime
import pytest

from onnxfit.environment import OnnxruntimeDistribution
from onnxfit.errors import InstallationError
from onnxfit.gradients.onnxruntime import builder as source


def test_without_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(
        InstallationError, match=r"(?s)cannot be imported.*\n  pip install onnxruntime"
    ):
        source.require_builder()


@pytest.mark.parametrize(
    ("version", "system", "machine", "has_wheel"),
    [
        ((3, 10), "Linux", "x86_64", True),
        ((3, 12), "Linux", "x86_64", True),
        ((3, 13), "Linux", "x86_64", False),
        ((3, 11), "Linux", "aarch64", False),
        ((3, 12), "Darwin", "arm64", True),
        ((3, 14), "Darwin", "arm64", False),
        ((3, 12), "Windows", "AMD64", True),
        ((3, 12), "Windows", "ARM64", False),
    ],
)
def test_with_an_inference_distribution(
    monkeypatch: pytest.MonkeyPatch,
    version: tuple[int, int],
    system: str,
    machine: str,
    has_wheel: bool,
) -> None:
    plain = types.ModuleType("onnxruntime.capi._pybind_state")
    monkeypatch.setattr(onnxruntime.capi, "_pybind_state", plain)
    monkeypatch.setitem(sys.modules, plain.__name__, plain)
    monkeypatch.setattr(sys, "version_info", version)
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    distributions = [
        OnnxruntimeDistribution(name, "1.32.0", Path()) for name in ("onnxruntime", "ort-nightly")
    ]
    monkeypatch.setattr(source, "installed_distributions", lambda: distributions)
    with pytest.raises(InstallationError) as caught:
        source.require_builder()
    first, *commands = str(caught.value).splitlines()
    assert f"onnxruntime {onnxruntime.__version__} is an inference build" in first
    if has_wheel:
        assert commands == [
            "  pip uninstall -y ort-nightly onnxruntime",
            '  pip install "onnxfit[ort-training]"',
        ]
    else:
        assert f"no wheel for Python {version[0]}.{version[1]} on {system} {machine}" in first
        assert "gradient='onnx'" in first
        assert commands == []
