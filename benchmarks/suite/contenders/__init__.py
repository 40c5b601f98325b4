"""Who takes part: a name, the module and class that trains, its arguments, and in which
environments it may be found.

Environments are tried in the order given; the first whose Python can import the library is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from contenders.contender import Contender


@dataclass(frozen=True)
class Entry:
    title: str
    place: str  # module.Class
    environments: tuple[str, ...]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    ours: bool = False
    measures_memory: bool = False  # on every workload; the others on one

    def make(self) -> Contender:
        module, name = self.place.split(".")
        contender: Contender = getattr(import_module(f"contenders.{module}"), name)(
            **self.arguments
        )
        return contender


def _ours(backend: str, gradient: str, environment: str) -> Entry:
    title = f"onnxfit {backend}, {gradient}" + (
        " (plain onnxruntime)" if environment == "plain" else ""
    )
    arguments = {"backend": backend, "gradient": gradient}
    return Entry(
        title,
        "with_onnxfit.Onnxfit",
        (environment,),
        arguments,
        ours=True,
        measures_memory=gradient == "onnx",
    )


ENTRIES: dict[str, Entry] = {
    "full-onnx": _ours("full", "onnx", "training"),
    "full-onnxruntime": _ours("full", "onnxruntime", "training"),
    "fb-onnx": _ours("forward_backward", "onnx", "training"),
    "fb-onnxruntime": _ours("forward_backward", "onnxruntime", "training"),
    "plain-full": _ours("full", "onnx", "plain"),
    "plain-fb": _ours("forward_backward", "onnx", "plain"),
    "torch": Entry(
        "PyTorch eager", "with_torch.Eager", ("training", "bench"), measures_memory=True
    ),
    "torch-compile": Entry(
        "PyTorch compiled", "with_torch.Compiled", ("training", "bench"), measures_memory=True
    ),
    "onnxruntime": Entry("onnxruntime on-device", "with_onnxruntime.OnDevice", ("training",)),
    "keras-torch": Entry(
        "Keras on PyTorch", "with_keras.Keras", ("bench", "training"), {"backend": "torch"}
    ),
    "keras-jax": Entry(
        "Keras on JAX", "with_keras.Keras", ("bench", "training"), {"backend": "jax"}
    ),
    "lightning": Entry("Lightning", "with_lightning.Lightning", ("bench", "training")),
    "skorch": Entry("skorch", "with_skorch.Skorch", ("bench", "training")),
    "sklearn": Entry("scikit-learn MLP", "with_sklearn.Perceptron", ("training", "bench", "plain")),
    "sklearn-sgd": Entry(
        "scikit-learn SGDRegressor", "with_sklearn.Linear", ("training", "bench", "plain")
    ),
}
RIVALS = ("torch", "torch-compile")  # with whom the bars compare
# between these a bar is met or missed: they take three times as many turns
DECIDING = ("full-onnx", "plain-full", *RIVALS)
