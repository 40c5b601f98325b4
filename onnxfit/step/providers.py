"""The execution providers of onnxruntime that a step can be built for and run on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Provider:
    """An execution provider, which computes the nodes that it has kernels for.

    - `name`: onnxruntime's name of it.
    - `package`: the package on PyPI whose onnxruntime has it.
    - `forms`: the forms of operators that a graph has for it, as for GraphBuilder.
    - `options`: its options.
    - `numbered`: whether there may be several such devices, which have numbers.
    - `wide_integers`: whether it has integers of 64 bits. Random numbers are made of them.
    - `tested`: what was trained on it, for the page "Devices".
    """

    name: str
    package: str
    forms: str = "cpu"
    options: Mapping[str, str] = field(default_factory=dict)
    numbered: bool = False
    wide_integers: bool = True
    tested: str = "not tried"


# kind of device, as a user types it -> its provider
PROVIDERS = {
    "cpu": Provider("CPUExecutionProvider", "onnxruntime", tested="every test"),
    "cuda": Provider(
        "CUDAExecutionProvider",
        "onnxruntime-gpu",
        forms="cuda",
        numbered=True,
        tested="1.31, on an H100: losses as on the CPU to 6e-4; recurrent networks are slow",
    ),
    "webgpu": Provider(
        "WebGpuExecutionProvider",
        "onnxruntime-webgpu",
        forms="webgpu",
        tested="1.27, on SwiftShader, a GPU computed by the CPU: losses as on the CPU to 1e-7",
    ),
    "openvino": Provider(
        "OpenVINOExecutionProvider",
        "onnxruntime-openvino",
        forms="openvino",
        options={"device_type": "CPU"},
        wide_integers=False,
        tested="1.24, on a CPU: losses as on the CPU to 1e-7; no dropout",
    ),
    "directml": Provider("DmlExecutionProvider", "onnxruntime-directml", numbered=True),
    "coreml": Provider("CoreMLExecutionProvider", "onnxruntime"),
    "rocm": Provider("ROCMExecutionProvider", "onnxruntime-rocm", forms="cuda", numbered=True),
}


def kind_of_device(device: object) -> str:
    """Return the kind of a device: "cuda" for "cuda:1"."""
    return str(device).partition(":")[0]


def forms_of_device(device: object) -> str:
    """Return the forms of operators for a device; those of the CPU for an unknown one.

    >>> forms_of_device("rocm:1"), forms_of_device("openvino")
    ('cuda', 'openvino')
    """
    provider = PROVIDERS.get(kind_of_device(device))
    return "cpu" if provider is None else provider.forms
