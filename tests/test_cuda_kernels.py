"""Every node of a training step for CUDA has a CUDA kernel, by the lists of onnxruntime itself.

No GPU is needed: `scripts/cuda_kernels.py` reads the lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx.numpy_helper import from_array

from onnxfit.graph.model import OnnxModel
from onnxfit.graph.spec import TensorSpec
from onnxfit.graph.tensors import initializer_arrays
from onnxfit.load.trainable import TrainableModel
from onnxfit.runtime.backends import get_backend
from onnxfit.runtime.backends.forward_backward import loss_and_passes
from onnxfit.runtime.device import CPU
from onnxfit.runtime.kernel_opset import kernel_opset
from onnxfit.step.recipe_builder import build_recipe
from onnxfit.step.settings import TrainerSettings
from scripts import cuda_kernels
from tests.models import convolutional, mlp

TABLES = cuda_kernels.tables()
ROWS = 8

# Nodes that may run on the CPU: (version of onnxruntime, operator) -> the reason.
EXCEPTIONS = {
    ("1.19.0", "ArgMax"): "GlobalMaxPool's gradient: 1.19 has ArgMax up to opset 11, 1.24 has it.",
}


def network(text: str, opset: int = 17, **shapes: tuple[int, ...]) -> onnx.ModelProto:
    """Parse a graph, and add weights of these shapes."""
    imports = f'"": {opset}, "com.microsoft": 1'
    model = onnx.parser.parse_model(f"<ir_version: 8, opset_import: [{imports}]> g {text}")
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        array = (rng.normal(size=shape) / 3).astype(
            np.float32
        )  # in this order: numpy 1 widens scalars
        model.graph.initializer.append(from_array(array, name))
    return model


def spatial() -> onnx.ModelProto:
    """Overlapping pools, a depthwise and a transposed convolution."""
    return network(
        """(float[N,2,9,9] x) => (float[N,4] y) {
        a = Conv<pads=[1,1,1,1]>(x, first)  b = MaxPool<kernel_shape=[3,3], strides=[2,2]>(a)
        c = Conv<group=4, pads=[1,1,1,1], strides=[2,2]>(b, deep)  d = Clip(c, low, high)
        e = ConvTranspose<strides=[2,2]>(d, up)  f = AveragePool<kernel_shape=[2,2]>(e)
        g = GlobalMaxPool(f)  h = GlobalAveragePool(f)  s = Add(g, h)  y = Flatten(s) }""",
        first=(4, 2, 3, 3), deep=(4, 1, 3, 3), up=(4, 4, 2, 2), low=(), high=(),
    )  # fmt: skip


def recurrent() -> onnx.ModelProto:
    model = network(
        """(float[5,N,3] x) => (float[N,4] y) <int64[1] axis = {0}> {
        s, h, c = LSTM<hidden_size=4>(x, w, r, b)  z = Squeeze(s, one)
        t, k = GRU<hidden_size=4>(z, v, q)  y = Squeeze(k, axis) }""",
        w=(1, 16, 3), r=(1, 16, 4), b=(1, 32), v=(1, 12, 4), q=(1, 12, 4),
    )  # fmt: skip
    model.graph.initializer.append(from_array(np.array([1], np.int64), "one"))
    return model


def transformer() -> onnx.ModelProto:
    """An embedding, attention with a Dropout, LayerNormalization and both forms of Gelu."""
    return network(
        """(int64[N,6] x) => (float[N,5] y) <int64[1] tokens = {1}> {
        e = Gather(table, x)  p = Add(e, positions)  n = LayerNormalization(p, scale, bias)
        q = MatMul(n, wq)  k = MatMul(n, wk)  t = Transpose<perm=[0,2,1]>(k)  s = MatMul(q, t)
        a = Softmax<axis=-1>(s)  d = Dropout(a)  o = MatMul(d, n)  r = Add(o, p)
        u = MatMul(r, wide)  f = Gelu(u)  g = Gelu<approximate="tanh">(f)
        l = ReduceMean<keepdims=0>(g, tokens)  y = MatMul(l, head) }""",
        opset=20, table=(20, 4), positions=(6, 4), scale=(4,), bias=(4,), wq=(4, 4), wk=(4, 4),
        wide=(4, 8), head=(8, 5),
    )  # fmt: skip


def packed() -> onnx.ModelProto:
    """Weights in 4 bits after a layer of floats, in a decoder's normalization."""
    model = network(
        """(float[N,32] x) => (float[N,4] y) {
        h = MatMul(x, first)  n = SimplifiedLayerNormalization<axis=-1>(h, scale)
        y = com.microsoft.MatMulNBits<K=32, N=4, bits=4, block_size=16>(n, q, scales) }""",
        first=(32, 32), scale=(32,), scales=(4, 2),
    )  # fmt: skip
    array = np.random.default_rng(0).integers(0, 256, (4, 2, 8)).astype(np.uint8)
    model.graph.initializer.append(from_array(array, "q"))
    return model


ADAM = {"optimizer": "adam", "clip_norm": 1.0, "metrics": ["accuracy"]}
NETWORKS: dict[str, tuple[onnx.ModelProto, dict[str, Any]]] = {
    "MLP, SGD": (mlp((20, 16, 8, 3), "Relu"), {"penalty": 0.01, "clip_value": 0.5}),
    "CNN, Adam": (convolutional(batch_norm=True, dropout=0.3), ADAM),
    "pools and convolutions": (spatial(), {}),
    "LSTM and GRU": (recurrent(), {}),
    "transformer, Adam": (transformer(), ADAM),
    "MLP, bf16": (mlp((20, 16, 8, 3), "Relu"), {"precision": "bf16"}),
    "CNN, fp16": (convolutional(batch_norm=True, dropout=0.3), {"precision": "fp16", **ADAM}),
    "CNN, bf16": (convolutional(batch_norm=True, dropout=0.3), {"precision": "bf16", **ADAM}),
    "pools and convolutions, fp16": (spatial(), {"precision": "fp16"}),
    "pools and convolutions, bf16": (spatial(), {"precision": "bf16"}),
    "LSTM and GRU, fp16": (recurrent(), {"precision": "fp16"}),
    "transformer, fp16": (transformer(), {"precision": "fp16", **ADAM}),
    "transformer, bf16": (transformer(), {"precision": "bf16", **ADAM}),
    "packed weights": (packed(), {"weights": ["first", "scale", "scales"]}),
}


def graphs(name: str, backend: str, device: str) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Return every graph that a backend compiles for a device, by its kind."""
    model, options = NETWORKS[name]
    settings = TrainerSettings(loss="cross_entropy", device=device, **options)
    recipe = build_recipe(TrainableModel.of(OnnxModel(model)), settings)
    arrays = initializer_arrays(model, recipe.state)
    created = get_backend(backend)(recipe, arrays, device=CPU, threads=1, accumulate=1)
    shapes = _with_rows({**recipe.declared_batch})
    kinds = [kind for kind in (*created.kinds, "apply", "update") if kind not in ("counts", "step")]
    if backend != "full":
        split = loss_and_passes(recipe, shapes)
        yield "forward", split.passes.forward
        yield "backward", split.passes.backward
        yield "loss", split.loss
        kinds += ["accumulate", *["penalty"] * bool(recipe.penalties)]
    for kind in kinds:
        yield kind, created.graph(kind, shapes)


def _with_rows(batch: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(
            name, spec.dtype, tuple(d if isinstance(d, int) else ROWS for d in spec.shape or ())
        )
        for name, spec in batch.items()
    }


@pytest.mark.filterwarnings("ignore:.*quantized")
@pytest.mark.parametrize("backend", ["full", "forward_backward"])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_node_has_a_cuda_kernel(name: str, backend: str) -> None:
    for kind, graph in graphs(name, backend, "cuda"):
        for version, kernels in TABLES.items():
            found = [
                str(node)
                for node in missing(graph, kernels)
                if (version, node.operator) not in EXCEPTIONS
            ]
            assert not found, f"onnxruntime {version}, {kind} graph of {name}"


def missing(graph: onnx.ModelProto, kernels: cuda_kernels.Kernels) -> list[cuda_kernels.Missing]:
    """Return the nodes without a kernel in a graph as it is compiled for CUDA."""
    with kernel_opset(graph):
        return cuda_kernels.missing(graph, kernels)


def test_the_cpu_has_a_form_that_cuda_lacks() -> None:
    """The comparison can fail."""
    _, train = next(graphs("CNN, Adam", "full", "cpu"))
    for version, kernels in TABLES.items():
        found = {node.operator for node in missing(train, kernels)}
        assert {name for name in found if (version, name) not in EXCEPTIONS} == {"MaxUnpool"}


def test_every_exception_is_needed() -> None:
    found = {
        (version, node.operator)
        for _, graph in graphs("pools and convolutions", "full", "cuda")
        for version, kernels in TABLES.items()
        for node in missing(graph, kernels)
    }
    assert found == set(EXCEPTIONS)


# The table
# ------------------------------------------------------------------------------------------------

DOCUMENT = """## Operators implemented by CPUExecutionProvider
|**Operator Domain:** *ai.onnx*||||
|Abs|*in* X:**T**<br> *out* Y:**T**|13+|**T** = tensor(double)|
## Operators implemented by CUDAExecutionProvider

| Op Name | Parameters | OpSet Version | Types Supported |
|---------|------------|---------------|-----------------|
|**Operator Domain:** *ai.onnx*||||
|ArgMax|*in* data:**T**<br> *out* reduced:**tensor(int64)**|13+|**T** = tensor(double), tensor(float)|
|||[1, 11]|**T** = tensor(float)|
|MaxPool|*in* X:**T**<br> *out* Y:**T**<br><br>or<br><br>*in* X:**T**<br> *out* Y:**T**<br> *out* Indices:**I**|12+|**I** = tensor(int64)<br/> **T** = tensor(float)|
|Sum|*in* data_0:**T**<br> *out* sum:**T**|13|**T** = tensor(float)|
|**Operator Domain:** *com.microsoft*||||
|Gelu|*in* X:**T**<br> *out* Y:**T**|1+|**T** = tensor(float)|
|**Operator Domain:** *com.ms.internal.nhwc*||||
|Conv|*in* X:**T**<br> *out* Y:**T**|11+|**T** = tensor(float)|
## Operators implemented by DmlExecutionProvider
|**Operator Domain:** *ai.onnx*||||
|Abs|*in* X:**T**<br> *out* Y:**T**|13+|**T** = tensor(float)|
"""


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> cuda_kernels.Kernels:
    """The table of DOCUMENT, written and read."""
    monkeypatch.setattr(cuda_kernels, "FOLDER", tmp_path)
    document = tmp_path / "OperatorKernels.md"
    document.write_text(DOCUMENT)
    assert cuda_kernels.main(["--update", str(document), "1.2.3", "0a1b2c"]) == 0
    assert "0a1b2c" in (tmp_path / "cuda-1.2.3.txt").read_text()
    return cuda_kernels.tables()["1.2.3"]


def test_a_table_has_the_kernels_of_cuda(table: cuda_kernels.Kernels) -> None:
    assert set(table) == {("", "ArgMax"), ("", "MaxPool"), ("", "Sum"), ("com.microsoft", "Gelu")}
    assert [(k.first, k.last) for k in table["", "ArgMax"]] == [
        (13, None),
        (1, 11),
    ]
    assert [(k.first, k.last) for k in table["", "Sum"]] == [(13, 13)]


@pytest.mark.parametrize(
    ("operator", "inputs", "outputs", "accepted"),
    [
        ("ArgMax", ["float"], ["int64"], True),
        ("ArgMax", ["float16"], ["int64"], False),
        ("ArgMax", ["float"], ["int32"], False),
        ("MaxPool", ["float"], ["float"], True),
        ("MaxPool", ["float"], ["float", "int64"], True),
        ("MaxPool", ["float"], ["float", None], True),
        ("MaxPool", ["float"], ["float", "int32"], False),
        ("Sum", ["float", "float", "float"], ["float"], True),
        ("Sum", ["float", "float", "double"], ["float"], False),
    ],
)
def test_a_kernel_takes_its_types(
    table: cuda_kernels.Kernels, operator: str, inputs: list[str | None],
    outputs: list[str | None], accepted: bool,
) -> None:  # fmt: skip
    assert table["", operator][0].accepts(inputs, outputs) is accepted


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y = Sum(x, x)", []),
        ("y = Selu(x)", ["Selu"]),
        ("y = CastLike(x, x)", ["CastLike"]),  # there is no Cast in the table
        ("d = Cast<to=11>(x)  s = Sum(d, d)  y = Cast<to=1>(s)", ["Cast", "Sum", "Cast"]),
        # sizes are in the memory of the CPU, and constants are computed before the first run
        ("s = Shape(x)  p = Neg(s)  a = ArgMax(x)  n = Neg(a)  y = Sum(x)", ["Neg"]),
        ("a = Neg(one)  y = Sum(x, a)", []),
        ("""y = If(yes)<then_branch = a () => (float[N,2] z) { z = Sum(x) },
            else_branch = b () => (float[N,2] z) { z = Mish(x) }>""", ["Mish"]),
    ],
)  # fmt: skip
def test_missing_kernels_are_found(
    table: cuda_kernels.Kernels, body: str, expected: list[str]
) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 21]> g (float[N,2] x, bool yes) => (float[N,2] y)'
        f" <float[1] one = {{1}}> {{ {body} }}"
    )
    model = onnx.shape_inference.infer_shapes(model)
    with_branches = {**table, ("", "If"): [cuda_kernels.Kernel(1, 99, ((("B",), ("V",)),), {})]}
    assert [node.operator for node in cuda_kernels.missing(model, with_branches)] == expected


def test_the_definition_of_cast_like_counts() -> None:
    model = network("(float[N,2] x, int64[1] t) => (int64[N,2] y) { y = CastLike(x, t) }")
    model = onnx.shape_inference.infer_shapes(model)
    for kernels in TABLES.values():
        assert cuda_kernels.missing(model, kernels) == []
        assert cuda_kernels.missing(model, {**kernels, ("", "Cast"): []}) != []


def test_files_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = network("(float[N,2] x) => (float[N,2] y) { y = Det(x) }")
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    assert cuda_kernels.main([str(path)]) == 1
    assert "has no CUDA kernel for Det(float > float)" in capsys.readouterr().out
    onnx.save(mlp(), path)
    assert cuda_kernels.main([str(path)]) == 0
    assert "Every node has a CUDA kernel" in capsys.readouterr().out
