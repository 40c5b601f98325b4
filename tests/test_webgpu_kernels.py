"""Every node of a training step for WebGPU has a WebGPU kernel, by onnxruntime-web's own list.

No GPU is needed: `scripts/webgpu_kernels.py` reads the list. The steps run on the CPU here, to show
that their forms compute what the forms of the CPU do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

from onnxfit.graph import names
from onnxfit.graph.model import OnnxModel
from onnxfit.graph.tensors import initializer_arrays
from onnxfit.load.trainable import TrainableModel
from onnxfit.losses import (
    CTC,
    CausalLM,
    CIoU,
    DIoU,
    GaussianNLL,
    GIoU,
    IoU,
    Loss,
    LovaszHinge,
    LovaszSoftmax,
)
from onnxfit.optimizers import Optimizer
from onnxfit.registry import registry
from onnxfit.step.graphs import compact_train_graph, evaluate_graph, predict_graph
from onnxfit.step.host_scalars import cut_host_scalars
from onnxfit.step.recipe import Batch, Recipe
from onnxfit.step.recipe_builder import build_recipe
from onnxfit.step.settings import TrainerSettings
from onnxfit.step.update import NO_FUSED_WEIGHTS
from scripts import webgpu_kernels
from tests.models import mlp
from tests.test_cuda_kernels import NETWORKS, _with_rows

TABLES = webgpu_kernels.tables()
LOOPS = "The CPU runs loops and recurrent networks; a Scan's body runs on WebGPU."
BITS = "Packed weights are unpacked on the CPU."
# Nodes that may run on the CPU: (network, operator) -> the reason.
EXCEPTIONS = {
    ("LSTM and GRU", "GRU"): LOOPS,
    ("LSTM and GRU", "Identity"): "onnxruntime removes it when it compiles the graph.",
    ("LSTM and GRU", "LSTM"): LOOPS,
    ("LSTM and GRU", "Scan"): LOOPS,
    ("packed weights", "BitShift"): BITS,
    ("packed weights", "BitwiseAnd"): BITS,
    ("packed weights", "DequantizeLinear"): BITS,
    ("packed weights", "IsNaN"): BITS,
    ("packed weights", "Where"): BITS,
}
# They need an output of another shape than that of the network here. The CPU runs the loop of CTC.
SORTED = (LovaszHinge, LovaszSoftmax)  # TopK has no kernel
OTHER_OUTPUTS = (CTC, CausalLM, CIoU, DIoU, GaussianNLL, GIoU, IoU)
ROWS = 8


# Half precision is for the CPU and CUDA.
FLOAT32 = [name for name, (_, options) in NETWORKS.items() if "precision" not in options]


def recipe_of(name: str, **others: Any) -> Recipe:
    model, options = NETWORKS[name]
    settings = TrainerSettings(**{"loss": "cross_entropy", **options, **others})
    recipe = build_recipe(TrainableModel.of(OnnxModel(model)), settings)
    return replace(recipe, sums_metrics=False)  # as training folders have it


def graphs(recipe: Recipe, batch: Batch) -> Iterator[onnx.ModelProto]:
    step, _ = cut_host_scalars(compact_train_graph(recipe, batch, NO_FUSED_WEIGHTS))
    yield from (step, evaluate_graph(recipe, batch), predict_graph(recipe, batch))


def missing(recipe: Recipe, batch: Batch) -> list[webgpu_kernels.Missing]:
    return [
        node
        for graph in graphs(recipe.for_device("webgpu"), batch)
        for kernels in TABLES.values()
        for node in webgpu_kernels.missing(graph, kernels)
    ]


@pytest.mark.filterwarnings("ignore:.*quantized")
@pytest.mark.parametrize("rows", ["known", "any"])
@pytest.mark.parametrize("name", FLOAT32)
def test_every_node_has_a_webgpu_kernel(name: str, rows: str) -> None:
    recipe = recipe_of(name)
    declared = {**recipe.declared_batch}
    found = missing(recipe, declared if rows == "any" else _with_rows(declared))
    allowed = {operator for network, operator in EXCEPTIONS if network == name}
    assert [str(node) for node in found if node.operator not in allowed] == []
    assert {node.operator for node in found} == allowed


def by_class(module: str, base: type[Any]) -> list[str]:
    """Return a name for each class of a registry that fits the network."""
    names_of = {found: name for name, found in registry(module, base).items()}
    excluded = (*OTHER_OUTPUTS, *SORTED)
    return [name for found, name in names_of.items() if found not in excluded]


@pytest.mark.filterwarnings("ignore:NLL needs log-probabilities")
@pytest.mark.parametrize(
    "options",
    [
        *({"optimizer": name} for name in by_class("onnxfit.optimizers", Optimizer)),
        *({"loss": name} for name in by_class("onnxfit.losses", Loss)),
    ],
    ids=lambda options: "-".join(options.values()),
)
def test_every_optimizer_and_loss_has_webgpu_kernels(options: dict[str, Any]) -> None:
    settings = TrainerSettings(**{"loss": "mse", **options})
    recipe = build_recipe(TrainableModel.of(OnnxModel(mlp())), settings)
    assert [str(node) for node in missing(recipe, recipe.declared_batch)] == []


def test_the_cpu_has_forms_that_webgpu_lacks() -> None:
    """The comparison can fail."""
    step = compact_train_graph(
        recipe := recipe_of("CNN, Adam"), recipe.declared_batch, NO_FUSED_WEIGHTS
    )
    for kernels in TABLES.values():
        found = {node.operator for node in webgpu_kernels.missing(step, kernels)}
        assert found >= {"MaxUnpool", "LogSoftmax", "ScatterElements", "Sum", "Max"}


@pytest.mark.filterwarnings("ignore:.*quantized")
@pytest.mark.parametrize("name", [name for name in FLOAT32 if name != "packed weights"])
def test_the_forms_compute_the_same_step(name: str) -> None:
    # Adam's first update has the sign of the gradient, however small that is.
    recipe = recipe_of(name, optimizer="sgd")
    feeds = _feeds(recipe, NETWORKS[name][0])
    results = []
    for device in ("cpu", "webgpu"):
        batch = _with_rows({**recipe.declared_batch})
        step = compact_train_graph(recipe.for_device(device), batch, NO_FUSED_WEIGHTS)
        session = onnxruntime.InferenceSession(
            step.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        outputs = [value.name for value in session.get_outputs()]
        taken = {value.name for value in session.get_inputs()}
        given = {key: value for key, value in feeds.items() if key in taken}
        results.append(dict(zip(outputs, session.run(outputs, given))))
    cpu, webgpu = results
    assert cpu.keys() == webgpu.keys()
    for key, value in cpu.items():
        np.testing.assert_allclose(webgpu[key], value, rtol=1e-5, atol=1e-6, err_msg=key)


def _feeds(recipe: Recipe, model: onnx.ModelProto) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    feeds: dict[str, Any] = {names.SEED: np.array(1), names.STEP: np.array(0)}
    feeds[names.LEARNING_RATE] = np.array(0.01, np.float32)
    for name, spec in _with_rows({**recipe.declared_batch}).items():
        is_float = spec.dtype.kind == "f"
        values = rng.normal(size=spec.shape) if is_float else rng.integers(0, 3, spec.shape)
        feeds[name] = values.astype(spec.dtype)
    arrays = initializer_arrays(model, recipe.state)
    feeds |= {name: np.asarray(array) for name, array in arrays.items()}
    for weight, slots in recipe.slots.items():
        feeds |= {names.slot(weight, slot): np.array(v) for slot, v in slots.items()}
    return feeds


# The table
# ------------------------------------------------------------------------------------------------

DOCUMENT = """## Operators Support Table

| Operator | Opset | Comments |
|:--------:|:-------------:|-----|
| Add | ai.onnx(7-12,13,14+) |  |
| Gelu | ai.onnx(20+); com.microsoft(1+) |  |
| MaxPool | ai.onnx(11,12+); com.ms.internal.nhwc(11,12+) | need perf optimization |
| MemcpyToHost | ai.onnx(1+) |  |
| QuickGelu | com.microsoft(1+) |  |
"""


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> webgpu_kernels.Kernels:
    """The table of DOCUMENT, written and read."""
    monkeypatch.setattr(webgpu_kernels, "FOLDER", tmp_path)
    document = tmp_path / "webgpu-operators.md"
    document.write_text(DOCUMENT)
    assert webgpu_kernels.main(["--update", str(document), "1.2.3"]) == 0
    return webgpu_kernels.tables()["1.2.3"]


def test_a_table_has_the_kernels_of_webgpu(table: webgpu_kernels.Kernels) -> None:
    assert set(table) == {
        ("", "Add"), ("", "Gelu"), ("com.microsoft", "Gelu"), ("", "MaxPool"),
        ("com.microsoft", "QuickGelu"),
    }  # fmt: skip
    assert [(k.first, k.last) for k in table["", "Add"]] == [(7, 12), (13, 13), (14, None)]
    (*_, add) = table["", "Add"]
    assert add.accepts(["int32", "int32"], ["int32"])
    assert not add.accepts(["int64", "int64"], ["int64"])
    (*_, pool) = table["", "MaxPool"]
    assert pool.accepts(["float"], ["float"])
    assert not pool.accepts(["float"], ["float", "int64"])


def test_files_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[N,2] x) => (float[N,2] y) { y = Det(x) }'
    )
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    assert webgpu_kernels.main([str(path)]) == 1
    assert "has no WebGPU kernel for Det(float > float)" in capsys.readouterr().out
    onnx.save(mlp(), path)
    assert webgpu_kernels.main([str(path)]) == 0
    assert "Every node has a WebGPU kernel" in capsys.readouterr().out
