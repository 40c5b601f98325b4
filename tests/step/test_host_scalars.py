"""A host computes the numbers of a step that need 64 bits; host and step do what the step did."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxfit import optimizers, penalties
from onnxfit.graph import names
from onnxfit.graph.model import OnnxModel
from onnxfit.graph.tensors import initializer_arrays
from onnxfit.load.trainable import TrainableModel
from onnxfit.optimizers import Optimizer
from onnxfit.penalties import Penalty
from onnxfit.registry import registry
from onnxfit.step.graphs import compact_train_graph, train_graph
from onnxfit.step.host_scalars import MAX_HOST_ELEMENTS, SOURCES, cut_host_scalars
from onnxfit.step.recipe import Recipe
from onnxfit.step.recipe_builder import build_recipe
from onnxfit.step.settings import TrainerSettings
from onnxfit.step.update import NO_FUSED_WEIGHTS
from tests.models import convolutional, mlp

ROWS = 8
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"optimizer": name} for name in registry("onnxfit.optimizers", Optimizer)},
    **{f"penalty {n}": {"penalty": n} for n in registry("onnxfit.penalties", Penalty)},
    "AMSGrad": {"optimizer": optimizers.Adam(amsgrad=True, ema_momentum=0.9)},
    "decay": {"optimizer": optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1)},
    "multipliers": {"optimizer": optimizers.Adam(0.1, learning_rate_multipliers={"fc0*": 0.1})},
    "clipping": {"optimizer": "adam", "clip_norm": 0.5, "clip_value": 0.1},
    "a penalty by name": {"penalty": {"*.weight": penalties.L2(0.1)}, "optimizer": "adamw"},
}
WIDE = {onnx.TensorProto.INT64, onnx.TensorProto.UINT64, onnx.TensorProto.DOUBLE}


def recipe_of(model: onnx.ModelProto, **settings: Any) -> Recipe:
    return build_recipe(
        TrainableModel.of(OnnxModel(model)), TrainerSettings(loss="cross_entropy", **settings)
    )


def batch_of(recipe: Recipe) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    batch = {}
    for name, spec in recipe.declared_batch.items():
        shape = tuple(d if isinstance(d, int) else ROWS for d in spec.shape or ())
        if spec.dtype.kind == "f":
            batch[name] = rng.normal(size=shape).astype(spec.dtype)
        else:
            batch[name] = rng.integers(0, 3, shape).astype(spec.dtype)
    return batch


def run(model: onnx.ModelProto, feeds: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    taken = {value.name for value in session.get_inputs()}
    outputs = [value.name for value in session.get_outputs()]
    given = {name: value for name, value in feeds.items() if name in taken}
    return dict(zip(outputs, session.run(outputs, given)))


def require_equal_steps(step: onnx.ModelProto, recipe: Recipe, model: onnx.ModelProto) -> None:
    """Run a step whole and cut, from the same state, for three updates."""
    rest, host = cut_host_scalars(step)
    onnx.checker.check_model(rest, full_check=True)
    feeds: dict[str, Any] = {**batch_of(recipe), names.SEED: np.array(5)}
    arrays = initializer_arrays(model, recipe.state)
    feeds |= {name: np.asarray(array) for name, array in arrays.items()}
    for weight, slots in recipe.slots.items():
        feeds |= {names.slot(weight, slot): np.array(v) for slot, v in slots.items()}
    for number, rate in enumerate([0.1, 0.07, 0.02]):
        feeds[names.STEP] = np.array(number)
        feeds[names.LEARNING_RATE] = np.array(rate, np.float32)
        whole = run(step, feeds)
        scalars = {} if host is None else run(host, feeds)
        cut = run(rest, feeds | scalars)
        assert cut.keys() == whole.keys()
        for name, value in whole.items():
            np.testing.assert_array_equal(cut[name], value, err_msg=f"{name} in step {number}")
        feeds |= {
            name: whole[names.updated(name)] for name in feeds if names.updated(name) in whole
        }


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_host_and_step_compute_the_step(name: str, compact: bool) -> None:
    model = mlp()
    recipe = recipe_of(model, **SETTINGS[name])
    if compact:
        step = compact_train_graph(recipe, recipe.declared_batch, NO_FUSED_WEIGHTS)
    else:
        step = train_graph(recipe, recipe.declared_batch)
    before = step.SerializeToString()
    require_equal_steps(step, recipe, model)
    assert step.SerializeToString() == before
    rest, host = cut_host_scalars(step)
    assert computed_in_64_bits(rest) == []
    if host is not None:
        assert {value.name for value in host.graph.input} <= set(SOURCES)
        assert not {names.STEP, names.SEED} & {value.name for value in rest.graph.input}
        for value in host.graph.output:
            assert value.type.tensor_type.elem_type not in WIDE


def test_the_keys_of_dropout_are_computed_on_the_host() -> None:
    model = convolutional(batch_norm=True, dropout=0.4)
    recipe = recipe_of(model, optimizer="adam").for_device("webgpu")
    step = train_graph(recipe, recipe.declared_batch)
    require_equal_steps(step, recipe, model)
    rest, host = cut_host_scalars(step)
    assert computed_in_64_bits(step) != []
    assert computed_in_64_bits(rest) == []
    assert host is not None
    sizes = [[d.dim_value for d in v.type.tensor_type.shape.dim] for v in host.graph.output]
    assert [8] in sizes
    assert all(np.prod(size) <= MAX_HOST_ELEMENTS for size in sizes)


def test_a_step_without_such_numbers_stays() -> None:
    recipe = recipe_of(mlp(), optimizer="sgd")
    step = compact_train_graph(recipe, recipe.declared_batch, NO_FUSED_WEIGHTS)
    rest, host = cut_host_scalars(step)
    assert host is None
    assert rest is step


def test_operators_that_hosts_do_not_know_stay_in_the_step() -> None:
    step = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (int64 "train/step", float[3] w) => (float[3] a, float[3] b, float[3] d) {
            s = Cast <to = 1> ("train/step")
            t = Add(s, s)
            e = Erf(t)
            u = Mul(e, e)
            i = Pow("train/step", "train/step")
            j = Cast <to = 1> (i)
            a = Mul(w, t)  b = Mul(w, u)  d = Mul(w, j)
        }""")
    rest, host = cut_host_scalars(onnx.shape_inference.infer_shapes(step))
    assert host is not None
    assert [value.name for value in host.graph.output] == ["t"]
    assert {node.op_type for node in rest.graph.node} == {"Erf", "Mul", "Pow", "Cast"}
    feeds = {names.STEP: np.array(3), "w": np.arange(3, dtype=np.float32)}
    cut, whole = run(rest, feeds | run(host, feeds)), run(step, feeds)
    for name, array in whole.items():
        np.testing.assert_array_equal(cut[name], array)


def computed_in_64_bits(model: onnx.ModelProto) -> list[str]:
    """Return the nodes that compute 64 bits from anything but sizes, constants and labels."""
    inferred = onnx.shape_inference.infer_shapes(model).graph
    values = (*inferred.value_info, *inferred.input, *inferred.output)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    allowed = {tensor.name for tensor in inferred.initializer}
    allowed |= {v.name for v in inferred.input if v.name.startswith("y_true/")}
    found = []
    for node in inferred.node:
        wide = [name for name in node.output if types.get(name) in WIDE]
        if node.op_type in ("Shape", "Size") or allowed.issuperset(filter(None, node.input)):
            allowed.update(node.output)
        elif wide:
            found.append(f"{node.op_type} {node.name}")
    return found
