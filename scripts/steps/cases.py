"""The cases of the suite: a network and the settings of its training."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes.common import RemoveUnusedNodesPass

import onnxfit
from onnxfit.graph.fold import fold_shapes
from onnxfit.optimizers import SGD, Adam, AdamW, Lion, RMSprop
from scripts.steps.float64 import Feeds
from scripts.steps.networks import BATCH, NETWORKS, Array, Network

STEP = 3  # the number of the step, which Adam's bias correction reads


@dataclass(frozen=True)
class Case:
    """A training step.

    - `settings`: arguments of `Trainer`.
    - `change`: what is done to the model before training, such as quantization.
    - `tolerance`: the largest difference from the outputs in float64, relative to the largest number
      of an output.
    """

    name: str
    network: Network
    settings: dict[str, Any] = field(default_factory=dict)
    change: Callable[[onnx.ModelProto, Array], onnx.ModelProto] = lambda model, x: model
    tolerance: float = 2e-4

    def step(self, target: str = "onnxruntime") -> tuple[onnx.ModelProto, Feeds]:
        """Return the graph of a step with a fixed batch, and its inputs.

        - `target`: "npu" for the step of a training folder for compilers that know inference only.

        SettingError or UnsupportedError: a folder for this target cannot express the training.
        """
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        network = self.network
        model = network.model(rng)
        x, y = network.batch(rng)
        settings = {"loss": network.loss, **self.settings}
        trainer = onnxfit.Trainer(self.change(model, x), **settings)
        if target != "onnxruntime":
            return self._step_of_folder(trainer, target, x, y, rng)
        graphs = trainer.save_onnx_graph(bytes)
        step = onnx.ModelProto.FromString(graphs["train"])
        step.producer_name, step.graph.name, step.doc_string = "onnxfit", self.name, ""
        fix_batch(step.graph, BATCH)
        step = with_folded_shapes(step)
        return step, inputs_of(step, trainer, x, y, rng)

    def _step_of_folder(
        self, trainer: onnxfit.Trainer, target: str, x: Array, y: Array, rng: np.random.Generator
    ) -> tuple[onnx.ModelProto, Feeds]:
        """Return the step of a training folder. Its scalars are inputs, as a host computes them."""
        with tempfile.TemporaryDirectory() as name:
            folder = trainer.export_training(name, target=target, batch_size=BATCH)
            step = onnx.load(folder / "train.onnx")
            scalars = folder / "scalars.onnx"
            computed = {}
            if scalars.exists():
                host = onnx.load(scalars)
                feeds = inputs_of(host, trainer, x, y, rng)
                names = [value.name for value in host.graph.output]
                computed = dict(zip(names, ReferenceEvaluator(host).run(None, feeds)))
        step.producer_name, step.graph.name, step.doc_string = "onnxfit", self.name, ""
        return step, inputs_of(step, trainer, x, y, rng, computed)


def inputs_of(
    step: onnx.ModelProto, trainer: onnxfit.Trainer, x: Array, y: Array, rng: np.random.Generator,
    computed: Mapping[str, Array] = MappingProxyType({}),
) -> Feeds:  # fmt: skip
    """Return a value for each input: the data, the weights, and slots as after some steps.

    Slots are not zero, because the first update of Adam is the sign of a gradient, in which rounding
    decides.

    - `computed`: the numbers that a host computes before the step.
    """
    weights = trainer.get_weights()
    fixed = {
        "train/learning_rate": 0.01, "train/step": STEP,
        "train/loss_scale": 1024, "train/finite_steps": 1, "train/skipped_steps": 0,
    }  # fmt: skip
    feeds = {}
    for value in step.graph.input:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        name = value.name
        if name in computed:
            array = computed[name]
        elif name == trainer.inputs[0].name:
            array = x
        elif name.startswith("y_true/"):
            array = y
        elif name in weights:
            array = weights[name]
        elif name in fixed:
            array = np.asarray(fixed[name])
        else:  # a slot
            array = 0.1 * rng.normal(size=shape)
            array = np.abs(array) + 0.05 if name.endswith(("/v", "/square")) else array
        feeds[name] = np.asarray(array, dtype)
    return feeds


def fix_batch(graph: onnx.GraphProto, size: int) -> None:
    """Replace the symbolic batch of inputs and outputs, and drop the shapes inferred with it."""
    for value in (*graph.input, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = size
    del graph.value_info[:]


def with_folded_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the graph without the arithmetic of shapes, which the fixed batch decides."""
    folded = ir.serde.deserialize_model(model)
    fold_shapes(folded)
    RemoveUnusedNodesPass()(folded)
    return ir.serde.serialize_model(folded)


def _quantized(model: onnx.ModelProto, x: Array) -> onnx.ModelProto:
    return onnxfit.quantize(model, x)


def _four_bits(model: onnx.ModelProto, x: Array) -> onnx.ModelProto:
    return onnxfit.quantize(model, weights="int4", activations=None)


def cases() -> Iterator[Case]:
    """Yield every case, by network and optimizer."""
    for name, network in NETWORKS.items():
        for optimizer in (SGD(0.01), Adam(0.01)):
            suffix = type(optimizer).__name__.lower()
            yield Case(f"{name}_{suffix}", network, {"optimizer": optimizer})
    dense, lenet, encoder = NETWORKS["dense_relu"], NETWORKS["lenet"], NETWORKS["encoder"]
    for optimizer in (
        SGD(0.01, momentum=0.9, nesterov=True),
        AdamW(0.01),
        Lion(0.01),
        RMSprop(0.01),
    ):
        suffix = "nesterov" if isinstance(optimizer, SGD) else type(optimizer).__name__.lower()
        yield Case(f"dense_relu_{suffix}", dense, {"optimizer": optimizer})
    yield Case("dense_relu_penalty", dense, {"penalty": {"w1": {"l1": 0.01, "l2": 0.02}}})
    yield Case("dense_relu_clipped", dense, {"clip_norm": 0.1})
    yield Case("linear_huber", NETWORKS["linear"], {"loss": "huber"})
    for precision in ("bf16", "fp16"):
        for name, network in (("dense_relu", dense), ("lenet", lenet), ("encoder", encoder)):
            settings = {"optimizer": SGD(0.01), "precision": precision}
            yield Case(f"{name}_{precision}", network, settings, tolerance=0.05)
    for name, network in (("dense_relu", dense), ("lenet", lenet)):
        yield Case(f"{name}_int8", network, {"optimizer": SGD(0.01)}, _quantized)
    lora = onnxfit.LoRA(rank=2, target="*")
    settings = {"optimizer": Adam(0.01), "adapters": lora}
    yield Case("encoder_lora", encoder, settings)
    yield Case("encoder_lora_int4", encoder, settings, _four_bits)
