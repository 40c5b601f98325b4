"""Mixed precision: the operators that compute in half precision, and their gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
from onnx.numpy_helper import from_array

from onnxfit import LoRA, SettingError, Trainer
from onnxfit.gradients.backward import gradients
from onnxfit.gradients.blocker import refuse
from onnxfit.graph.model import OnnxModel, initializers_to_inputs
from onnxfit.graph.values import GraphBuilder
from onnxfit.load.normalize import normalize
from onnxfit.load.trainable import TrainableModel
from onnxfit.runtime.device import CPU, Device
from onnxfit.step.finish import finish
from onnxfit.step.limits import largest
from onnxfit.step.precision import ALIASES, OPERATORS, autocast, get_precision
from onnxfit.step.recipe_builder import build_recipe
from onnxfit.step.settings import TrainerSettings
from tests.gradients.rules.cases import Arrays, Case, families, runner, seeds
from tests.helpers import classification
from tests.models import mlp

HALVES = {"bf16": ir.DataType.BFLOAT16, "fp16": ir.DataType.FLOAT16}
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}
half_types = pytest.mark.parametrize("precision", HALVES)


def in_the_table(case: Case) -> bool:
    """Whether a node of the case is in the table; a body around it would keep it in float32."""
    nodes = [node for node in case.model().graph.node if not any(a.HasField("g") for a in node.attribute)]  # fmt: skip
    return any(node.op_type in OPERATORS for node in nodes)


CASES = [
    pytest.param(case, id=f"{family}: {case.name}")
    for family, cases in families().items()
    for case in cases
    if in_the_table(case)
]


def rounded(arrays: Arrays, half: ir.DataType) -> Arrays:
    """The arrays, whose floats are numbers of the half type."""
    return {
        name: array.astype(half.numpy()).astype(np.float32) if array.dtype == np.float32 else array
        for name, array in arrays.items()
    }


def narrow_inputs(op: GraphBuilder, half: ir.DataType) -> None:
    """Cast the inputs of a graph, as if another node had computed them in half precision."""
    with op.replacing(op.graph.node(0)):
        for value in [v for v in op.graph.inputs if v.dtype == ir.DataType.FLOAT]:
            uses = list(value.uses())
            cast = op.cast(op.wrap(value), half.numpy())
            for node, i in uses:
                node.replace_input_with(i, cast.ir)


def with_gradients(case: Case, feeds: Arrays, half: ir.DataType | None) -> Arrays:
    """Outputs and gradients of a case; in mixed precision, its inputs come in the half type."""
    arriving = seeds(case, runner(case.model(), "onnxruntime")(feeds))
    work = normalize(case.model())
    op = GraphBuilder(work.graph)
    inputs = {v.name: v for v in work.graph.inputs}
    if half is not None:
        narrow_inputs(op, half)
        autocast(op, half, ())
    given = {
        i: op.input(f"{value.name}_grad", np.float32, arriving[f"{value.name}_grad"].shape)
        for i, value in enumerate(list(work.graph.outputs))
        if value.name in case.outputs
    }
    found, blocking = gradients(op, given, [inputs[name] for name in case.wrt])
    refuse(blocking)
    for name in case.wrt:
        op.output(f"{name}_grad", found[inputs[name]])
    return runner(finish(op), "onnxruntime")({**feeds, **arriving})


@pytest.mark.table
@half_types
@pytest.mark.parametrize("case", CASES, scope="module")
def test_outputs_and_gradients_differ_from_float32_by_rounding(case: Case, precision: str) -> None:
    half = HALVES[precision]
    feeds = rounded(case.feeds(), half)
    expected = with_gradients(case, feeds, None)
    found = with_gradients(case, feeds, half)
    for name, array in expected.items():
        assert found[name].dtype == np.float32
        error = np.linalg.norm(found[name].astype(np.float64) - array)
        scale = np.linalg.norm(array)
        assert error <= 8 * ROUNDING[precision] * scale + 1e-6, (name, error / scale)


def autocasted(text: str, weights: dict[str, np.ndarray], half: ir.DataType) -> ir.Graph:
    """The graph of a model in mixed precision, with its weights as inputs."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 20]> g {text}')
    model.graph.initializer.extend(from_array(array, name) for name, array in weights.items())
    work = normalize(model)
    initializers_to_inputs(work.graph, [name for name in weights if name.startswith("w")])
    autocast(GraphBuilder(work.graph), half, [name for name in weights if name.startswith("w")])
    return work.graph


def type_of(graph: ir.Graph, op_type: str) -> set[ir.DataType | None]:
    """The element types of the float inputs and outputs of an operator."""
    nodes = [node for node in graph if node.op_type == op_type]
    assert nodes
    values = [v for node in nodes for v in (*node.inputs, *node.outputs) if v is not None]
    return {v.dtype for v in values} & {ir.DataType.FLOAT, *HALVES.values()}


@half_types
def test_the_table_decides_where_an_operator_computes(precision: str) -> None:
    half = HALVES[precision]
    square = np.eye(4, dtype=np.float32)
    graph = autocasted(
        """(float[N,4] x) => (float[N,4] y) {
        n = LayerNormalization(x, scale)  a = MatMul(n, w1)  b = Add(a, w2)  r = Relu(b)
        s = Softmax(r)  p = MatMul(s, w1)  e = Exp(p)  d = Div(e, ten)  y = Sub(p, x) }""",
        {"w1": square, "w2": square[0], "scale": square[0], "ten": np.float32(10)},
        half,
    )
    for name in ("MatMul", "Add", "Relu"):
        assert type_of(graph, name) == {half}
    # Exp gives float32 to Div, and Sub has a float32 input
    for name in ("LayerNormalization", "Softmax", "Exp", "Div", "Sub"):
        assert type_of(graph, name) == {ir.DataType.FLOAT}
    (y,) = graph.outputs
    assert (y.name, y.dtype) == ("y", ir.DataType.FLOAT)
    readers = [node for node in graph if node.op_type == "Cast" and node.inputs[0].name == "w1"]  # type: ignore[union-attr]
    assert len(readers) == 1  # for both products


@half_types
def test_constants_beyond_the_half_type_stay_finite(precision: str) -> None:
    """A mask of the smallest float32 is no minus infinity, of which a whole row would be NaN."""
    lowest = np.array([[np.finfo(np.float32).min, -np.inf, 0, 1]], np.float32)
    graph = autocasted(
        "(float[N,4] x) => (float[N,4] y) { p = MatMul(x, w)  y = Add(p, mask) }",
        {"w": np.eye(4, dtype=np.float32), "mask": lowest},
        HALVES[precision],
    )
    (add,) = (node for node in graph if node.op_type == "Add")
    mask = add.inputs[1]
    assert mask is not None
    assert mask.const_value is not None
    limit = largest(HALVES[precision].numpy())
    expected = [[-limit, -np.inf, 0, 1]]
    np.testing.assert_array_equal(mask.const_value.numpy().astype(np.float32), expected)


BODY = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 20]>
    g (float[N,4] x) => (float[N,4] y) <float[4,4] w = {1,0,0,1,2,0,1,0,0,1,0,2,0,0,1,1}> {
    p = MatMul(x, w)  c = ReduceSum<keepdims=0>(x)  zero = Constant<value_float=0.0>()
    positive = Greater(c, zero)
    y = If(positive) <then_branch = then () => (float[N,4] t) { t = Mul(p, p) },
                      else_branch = other () => (float[N,4] e) { e = Exp(p) }> }""")


@half_types
@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_a_body_reads_values_of_half_precision(backend: str, precision: str) -> None:
    x = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
    losses = {}
    for name in ("float32", precision):
        trainer = Trainer(
            BODY,
            loss="mse",
            loss_weights={"y": 1e-3},
            optimizer=0.1,
            precision=name,
            backend=backend,
        )  # whose gradients are small enough for the first scale of a loss in float16
        losses[name] = [trainer.train_on_batch(x + s, x)["loss"] for s in (0.5, -0.5, 0.5)]
    rounding = 8 * ROUNDING[precision]
    np.testing.assert_allclose(losses[precision], losses["float32"], rtol=rounding)
    assert losses[precision] != losses["float32"]


@pytest.mark.parametrize("name", ALIASES)
def test_names_of_other_libraries_are_known(name: str) -> None:
    assert get_precision(name) == get_precision(ALIASES[name])


@half_types
def test_what_cannot_compute_in_half_precision_is_refused(precision: str, tmp_path: Path) -> None:
    message = f"precision='{precision}'.*gradient='onnxruntime'"
    with pytest.raises(SettingError, match=message):
        Trainer(BODY, loss="mse", precision=precision, gradient="onnxruntime")
    trainer = Trainer(BODY, loss="mse", precision=precision)
    with pytest.raises(SettingError, match=f"precision='{precision}'"):
        trainer.export_training(tmp_path / "folder")


@half_types
@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_adapters_train_beside_a_base_in_half_precision(backend: str, precision: str) -> None:
    x, y = classification(32)
    losses = {}
    for name in ("float32", precision):
        trainer = Trainer(
            mlp(), loss="cross_entropy", optimizer=0.5, precision=name, backend=backend,
            adapters=LoRA(rank=2), seed=1,
        )  # fmt: skip
        losses[name] = [trainer.train_on_batch(x, y)["loss"] for _ in range(5)]
        before = mlp().graph.initializer[0]
        assert trainer.export(None).graph.initializer[0].data_type == before.data_type
    rounding = 4 * ROUNDING[precision]
    np.testing.assert_allclose(losses[precision], losses["float32"], rtol=rounding)
    assert losses[precision] != losses["float32"]


def test_half_precision_is_for_the_cpu_and_cuda() -> None:
    settings = TrainerSettings(loss="mse", precision="fp16", device="webgpu")
    with pytest.raises(SettingError, match="is for the CPU and CUDA, got device='webgpu'"):
        build_recipe(TrainableModel.of(OnnxModel(mlp())), settings)


@pytest.mark.parametrize(("precision", "used"), [("float32", "0"), ("tf32", "1")])
def test_cuda_rounds_to_tf32_where_it_may(
    precision: str, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """onnxruntime's own default is to round, of which nobody would be told."""
    monkeypatch.setattr(Device, "parse", lambda name: Device(name, 0))
    monkeypatch.setattr(Device, "provider", "CPUExecutionProvider")
    monkeypatch.setattr(Device, "handle", CPU.handle)
    trainer = Trainer(
        mlp(), loss="cross_entropy", device="cuda", gradient="onnx", precision=precision
    )
    backend = trainer._training.backend
    x, y = classification(8)
    trainer.train_on_batch(x, y)
    trainer.evaluate(x, y, verbose=0)
    sessions = {
        kind: next(iter(backend.caches[kind].exact.values())) for kind in ("train", "evaluate")
    }
    tf32 = {kind: session._device.options["use_tf32"] for kind, session in sessions.items()}
    assert tf32 == {"train": used, "evaluate": "0"}  # an evaluation is that of the exported file


@pytest.mark.parametrize("device", ["cuda", "webgpu"])
def test_bf16x3_needs_the_cpu(device: str) -> None:
    settings = TrainerSettings(loss="mse", precision="bf16x3", device=device)
    with pytest.raises(SettingError, match=f"'bf16x3' is for the CPU, got device='{device}'"):
        build_recipe(TrainableModel.of(OnnxModel(mlp())), settings)


def test_bf16x3_needs_our_gradients() -> None:
    with pytest.raises(SettingError, match=r"precision='bf16x3'.*gradient='onnxruntime'"):
        Trainer(BODY, loss="mse", precision="bf16x3", gradient="onnxruntime")


def test_an_exported_step_of_bf16x3_is_in_float32(tmp_path: Path) -> None:
    for precision in ("float32", "bf16x3"):
        trainer = Trainer(mlp(), loss="cross_entropy", precision=precision)
        trainer.export_training(tmp_path / precision)
    written = [(tmp_path / p / "train.onnx").read_bytes() for p in ("float32", "bf16x3")]
    assert written[0] == written[1]


@pytest.mark.parametrize("device", ["cpu", "rocm", "webgpu"])
def test_tf32_needs_cuda(device: str) -> None:
    with pytest.raises(SettingError, match=f"'tf32' is for CUDA, got device='{device}'"):
        Trainer(mlp(), loss="cross_entropy", device=device, precision="tf32")
