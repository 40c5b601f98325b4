"""Contenders: for each a title, the class that trains, its arguments and its environment.

`bench` has the newest onnxruntime, PyTorch and the other libraries; `training` has the training build
of onnxruntime.
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
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: str = "bench"
    precision: str = "float32"
    mark: str = "*"  # in the table, where it is the fastest

    def make(self) -> Contender:
        module, name = self.place.split(".")
        contender: Contender = getattr(import_module(f"contenders.{module}"), name)(
            **self.arguments
        )
        return contender


ENTRIES: dict[str, Entry] = {
    "onnxfit": Entry("onnxfit", "with_onnxfit.Onnxfit"),
    "onnxfit-plain": Entry(
        "onnxfit, without C++ operators",
        "with_onnxfit.Onnxfit",
        {"kernels": False},
    ),
    "onnxfit-fb": Entry(
        "onnxfit, forward_backward", "with_onnxfit.Onnxfit", {"backend": "forward_backward"}
    ),
    "onnxfit-in-place": Entry("onnxfit, in_place", "with_onnxfit.Onnxfit", {"backend": "in_place"}),
    "onnxfit-ort": Entry(
        "onnxfit, onnxruntime's gradients",
        "with_onnxfit.Onnxfit",
        {"gradient": "onnxruntime"},
        environment="training",
    ),
    "torch": Entry("PyTorch eager (e)", "with_torch.Eager", mark="e"),
    "torch-compile": Entry("PyTorch compiled (c)", "with_torch.Compiled", mark="c"),
    "torch-bf16": Entry(
        "PyTorch eager, bf16 autocast", "with_torch.Autocast", precision="bfloat16"
    ),
    "onnxruntime": Entry(
        "onnxruntime on-device", "with_onnxruntime.OnDevice", environment="training"
    ),
    "keras-torch": Entry("Keras on PyTorch", "with_keras.Keras", {"backend": "torch"}),
    "keras-jax": Entry("Keras on JAX", "with_keras.Keras", {"backend": "jax"}),
    "lightning": Entry("Lightning", "with_lightning.Lightning"),
    "skorch": Entry("skorch", "with_skorch.Skorch"),
    "sklearn": Entry("scikit-learn MLP", "with_sklearn.Perceptron"),
    "sklearn-sgd": Entry("scikit-learn SGDRegressor", "with_sklearn.Linear"),
}
RIVALS = ("torch", "torch-compile")  # their losses are the right ones
DEFAULT = ("onnxfit", *RIVALS)  # what `pip install` gives is compared with the faster PyTorch
