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
    measures_memory: bool = False  # on every workload; the others on one
    precision: str = "float32"  # others stand beside the ratios, in none of them

    @property
    def ours(self) -> bool:
        return self.place.startswith("with_onnxfit.")

    def make(self) -> Contender:
        module, name = self.place.split(".")
        contender: Contender = getattr(import_module(f"contenders.{module}"), name)(
            **self.arguments
        )
        return contender


ENTRIES: dict[str, Entry] = {
    "onnxfit": Entry("onnxfit", "with_onnxfit.Onnxfit", measures_memory=True),
    "onnxfit-plain": Entry(
        "onnxfit, without C++ operators",
        "with_onnxfit.Onnxfit",
        {"kernels": False},
        measures_memory=True,
    ),
    "onnxfit-fb": Entry(
        "onnxfit, forward_backward", "with_onnxfit.Onnxfit", {"backend": "forward_backward"}
    ),
    "onnxfit-in-place": Entry(
        "onnxfit, in_place", "with_onnxfit.Onnxfit", {"backend": "in_place"}, measures_memory=True
    ),
    "onnxfit-ort": Entry(
        "onnxfit, onnxruntime's gradients",
        "with_onnxfit.Onnxfit",
        {"gradient": "onnxruntime"},
        environment="training",
    ),
    "torch": Entry("PyTorch eager", "with_torch.Eager", measures_memory=True),
    "torch-compile": Entry("PyTorch compiled", "with_torch.Compiled", measures_memory=True),
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
DEFAULT = "onnxfit"  # what an installation gives, which the headline begins with
PLAIN = "onnxfit-plain"  # ONNX's operators alone: a further column with a ratio of its own
IN_PLACE = "onnxfit-in-place"  # its memory is compared, too
HALF = "torch-bf16"  # a further column, too: fewer bits, on the processors that multiply them
RIVALS = ("torch", "torch-compile")  # the headline compares with the faster of them
DECIDING = (DEFAULT, PLAIN, *RIVALS)  # these take more turns than the others
BRIEF = (*DECIDING, HALF)  # these train the brief workloads, too
