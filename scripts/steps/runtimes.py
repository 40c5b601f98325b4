"""The runtimes that the suite knows: each compiles a model and returns a function that runs it.

A runtime imports its packages when it is used, so that a Python with one of them is enough. To add a
runtime, write one function here.
"""

from __future__ import annotations

import base64
import importlib.metadata
import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

import numpy as np
import onnx

from scripts.steps.float64 import Array

JS = Path(__file__).resolve().parents[2] / "js"
Run = Callable[[Mapping[str, Array]], list[Array]]


@dataclass(frozen=True)
class Runtime:
    """A runtime; `version` returns None where it is not installed."""

    name: str
    version: Callable[[], str | None]
    compile: Callable[[onnx.ModelProto], Run]


def _onnxruntime(level: str) -> Callable[[onnx.ModelProto], Run]:
    def compile_model(model: onnx.ModelProto) -> Run:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        return lambda feeds: list(session.run(None, dict(feeds)))

    return compile_model


def _reference(model: onnx.ModelProto) -> Run:
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(model)
    return lambda feeds: list(evaluator.run(None, dict(feeds)))


def _openvino(model: onnx.ModelProto) -> Run:
    import openvino

    core = openvino.Core()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(model, path)
        # float32 products by default may be rounded to bfloat16
        options = {"INFERENCE_PRECISION_HINT": "f32"}
        compiled = core.compile_model(core.read_model(path), "CPU", options)

    def run(feeds: Mapping[str, Array]) -> list[Array]:
        ordered = [np.array(feeds[value.name]) for value in model.graph.input]  # writable copies
        result = compiled(ordered)
        return [np.asarray(result[i]) for i in range(len(model.graph.output))]

    return run


def _tinygrad(model: onnx.ModelProto) -> Run:
    from tinygrad import Tensor
    from tinygrad.nn.onnx import OnnxRunner

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(model, path)
        runner = OnnxRunner(path)

    def run(feeds: Mapping[str, Array]) -> list[Array]:
        outputs = runner({name: Tensor(array) for name, array in feeds.items()})
        return [np.asarray(outputs[value.name].numpy()) for value in model.graph.output]

    return run


def _browser(provider: str) -> Callable[[onnx.ModelProto], Run]:
    """Return a compiler that sends models to onnxruntime-web in one Chromium."""
    processes: list[subprocess.Popen[str]] = []

    def ask(request: dict[str, Any]) -> dict[str, Any]:
        if not processes:
            command = ["node", "scripts/run_steps.mjs", provider]
            processes.append(
                subprocess.Popen(
                    command, cwd=JS, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True
                )
            )
        process = processes[0]
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        answer: dict[str, Any] = json.loads(process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def compile_model(model: onnx.ModelProto) -> Run:
        text = base64.b64encode(model.SerializeToString()).decode()

        def run(feeds: Mapping[str, Array]) -> list[Array]:
            inputs = [
                {
                    "name": name, "type": array.dtype.name, "dims": list(array.shape),
                    "data": base64.b64encode(np.ascontiguousarray(array)).decode(),
                }
                for name, array in feeds.items()
            ]  # fmt: skip
            outputs = ask({"model": text, "inputs": inputs})["outputs"]
            return [
                np.frombuffer(base64.b64decode(one["data"]), one["type"]).reshape(one["dims"])
                for one in outputs
            ]

        return run

    return compile_model


def _web_version() -> str | None:
    """Return the version of onnxruntime-web, where `make js` has installed it and node exists."""
    package = JS / "node_modules/onnxruntime-web/package.json"
    if not package.exists() or not shutil.which("node"):
        return None
    return str(json.loads(package.read_text())["version"])


def _package_version(*packages: str) -> Callable[[], str | None]:
    def version() -> str | None:
        for package in packages:
            try:
                return importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        return None

    return version


_ORT = _package_version("onnxruntime", "onnxruntime-gpu", "onnxruntime-training")
RUNTIMES = {
    "onnxruntime": Runtime("onnxruntime", _ORT, _onnxruntime("ORT_ENABLE_ALL")),
    "onnxruntime-plain": Runtime(
        "onnxruntime, no optimizations", _ORT, _onnxruntime("ORT_DISABLE_ALL")
    ),
    "reference": Runtime("onnx.reference", _package_version("onnx"), _reference),
    "openvino": Runtime("OpenVINO", _package_version("openvino"), _openvino),
    "tinygrad": Runtime("tinygrad", _package_version("tinygrad"), _tinygrad),
    "wasm": Runtime("onnxruntime-web, WebAssembly", _web_version, _browser("wasm")),
    "webgpu": Runtime("onnxruntime-web, WebGPU", _web_version, _browser("webgpu")),
}
