"""The execution providers of onnxruntime that a step can be built for and run on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Provider:
    """An execution provider, which computes the nodes that it has kernels for.

    - `name`: onnxruntime's name of it.
    - `package`: the package on PyPI whose onnxruntime has it; "" for none.
    - `plugin`: the package on PyPI that adds it to a plain onnxruntime; "" for none.
    - `forms`: the forms of operators that a graph has for it, as for GraphBuilder.
    - `options`: its options. A `device_type` also selects among the devices that a plugin reports.
    - `plugin_options`: the options of the plugin.
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
    plugin: str = ""
    plugin_options: Mapping[str, str] = field(default_factory=dict)


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
        tested="1.27 and plugin 0.4.0, on SwiftShader, a GPU computed by the CPU: losses as on the"
        " CPU to 2e-7",
        plugin="onnxruntime-ep-webgpu",
    ),
    "openvino": Provider(
        "OpenVINOExecutionProvider",
        "onnxruntime-openvino",
        forms="openvino",
        options={"device_type": "CPU"},
        wide_integers=False,
        tested="1.24 and plugin 1.8.1, on a CPU: losses as on the CPU to 1e-6; no dropout",
        plugin="onnxruntime-ep-openvino",
        # By default, a CPU with instructions for bfloat16 rounds to it.
        plugin_options={"load_config": '{"CPU": {"INFERENCE_PRECISION_HINT": "f32"}}'},
    ),
    "directml": Provider("DmlExecutionProvider", "onnxruntime-directml", numbered=True),
    "coreml": Provider("CoreMLExecutionProvider", "onnxruntime"),
    "rocm": Provider("ROCMExecutionProvider", "onnxruntime-rocm", forms="cuda", numbered=True),
    "mlx": Provider("MLXExecutionProvider", "", plugin="onnxruntime-ep-mlx"),
    "qnn": Provider("QNNExecutionProvider", "", plugin="onnxruntime-qnn"),
    "nv_tensorrt_rtx": Provider(
        "NvTensorRTRTXExecutionProvider",
        "",
        numbered=True,
        plugin="onnxruntime-ep-nv-tensorrt-rtx",
    ),
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
