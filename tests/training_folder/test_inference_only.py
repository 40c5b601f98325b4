"""Folders for compilers that know inference only train as ordinary folders do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

import onnxfit
from onnxfit import Trainer
from onnxfit.errors import SettingError, UnsupportedError
from onnxfit.kernels import library
from onnxfit.optimizers import SGD, Adam
from onnxfit.training_folder.inference_operators import OPERATORS, TYPES, outside
from scripts.steps.networks import BATCH, NETWORKS
from tests.models import convolutional, mlp
from tests.training_folder.host import Host

STEPS = 4
# A dense network, convolutions of one to three axes with strides, pads, dilations and groups, a
# transposed convolution, poolings, normalizations, an embedding and a transformer.
TRAINED = (
    "dense_relu", "conv1d", "conv2d", "conv2d_dilated", "conv3d", "conv_depthwise", "conv_grouped",
    "lenet", "average_pool", "batch_norm", "instance_norm", "autoencoder", "embedding", "encoder",
    "decoder",
)  # fmt: skip
# gradients by which Adam divides are not tiny, where rounding would decide
OPTIMIZERS = {"sgd": SGD(0.1), "adam": Adam(0.01, eps=0.01)}


class PlainHost(Host):
    """A host whose onnxruntime runs every node as it is in the graph."""

    def _session(self, file: str) -> Any:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        return onnxruntime.InferenceSession(self.folder / file, options)


class ReferenceHost(Host):
    """A host that runs the graphs by ONNX's reference implementation."""

    def _session(self, file: str) -> Any:
        return ReferenceEvaluator(str(self.folder / file))


@pytest.fixture(autouse=True)
def operators_of_onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.SWITCH, "off")


def trainer_of(name: str, optimizer: str) -> Trainer:
    network = NETWORKS[name]
    model = network.model(np.random.default_rng(0))
    return Trainer(model, loss=network.loss, optimizer=OPTIMIZERS[optimizer])


def batch_of(trainer: Trainer, name: str, seed: int) -> dict[str, np.ndarray]:
    x, y = NETWORKS[name].batch(np.random.default_rng(seed))
    (output,) = trainer._training.recipe.outputs
    return {trainer.inputs[0].name: x, f"y:{output}": y}


def assert_inside(folder: Path) -> None:
    """Assert what `outside` does, by ONNX's own inference."""
    for graph in ("train", "evaluate", "predict"):
        model = onnx.load(folder / f"{graph}.onnx")
        onnx.checker.check_model(model, full_check=True)
        model = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
        assert not list(outside(model))
        inferred = model.graph
        assert {node.domain for node in inferred.node} == {""}
        assert {node.op_type for node in inferred.node} <= OPERATORS
        assert not any(a.HasField("g") for node in inferred.node for a in node.attribute)
        values = {v.name: v for v in (*inferred.value_info, *inferred.input, *inferred.output)}
        for name in (name for node in inferred.node for name in node.output):
            tensor = values[name].type.tensor_type
            assert tensor.elem_type in {int(one) for one in TYPES}
            assert all(dim.HasField("dim_value") for dim in tensor.shape.dim)


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", [PlainHost, ReferenceHost])
def test_a_step_of_inference_operators_trains_as_the_ordinary_one(
    name: str, optimizer: str, kind: type[Host], tmp_path: Path
) -> None:
    trainer = trainer_of(name, optimizer)
    ordinary = Host(trainer.export_training(tmp_path / "a", batch_size=BATCH))
    folder = trainer.export_training(tmp_path / "b", batch_size=BATCH, target="npu")
    host = kind(folder)
    assert_inside(folder)
    data = [batch_of(trainer, name, seed) for seed in range(STEPS)]
    losses = [ordinary.train(batch) for batch in data]
    np.testing.assert_allclose([host.train(batch) for batch in data], losses, rtol=1e-5)
    assert len(set(losses)) == STEPS
    for key, array in ordinary.state.items():
        np.testing.assert_allclose(host.state[key], array, rtol=1e-4, atol=1e-5, err_msg=key)
    for graph in ("evaluate", "predict"):
        expected = ordinary.run(graph, data[0])
        for key, array in host.run(graph, data[0]).items():
            np.testing.assert_allclose(array, expected[key], rtol=1e-4, atol=1e-5, err_msg=key)


def test_the_host_draws_the_masks_of_dropout(tmp_path: Path) -> None:
    def trainer() -> Trainer:
        return Trainer(convolutional(dropout=0.5), loss="cross_entropy", seed=7)

    folder = trainer().export_training(tmp_path / "b", batch_size=BATCH, target="npu")
    assert_inside(folder)
    ordinary = Host(trainer().export_training(tmp_path / "a", batch_size=BATCH))
    host = PlainHost(folder)
    scalars = [t for t in host.graphs["train"]["inputs"] if t["role"] == "scalar"]
    assert max(np.prod(tensor["shape"]) for tensor in scalars) > 100
    assert "seed" not in {tensor["role"] for tensor in host.graphs["train"]["inputs"]}
    assert "program" not in host.graphs["scalars"]  # its operators are more than the short list
    rng = np.random.default_rng(0)
    shape = [BATCH, *trainer().inputs[0].shape[1:]]
    for _ in range(STEPS):
        batch = {"x": rng.normal(size=shape).astype(np.float32)}
        batch["y:logits"] = rng.integers(0, 3, BATCH)
        np.testing.assert_allclose(host.train(batch), ordinary.train(batch), rtol=1e-5)


def test_a_training_goes_on_in_python(tmp_path: Path) -> None:
    trainer = Trainer(mlp(), loss="mse", optimizer="adam")
    host = PlainHost(trainer.export_training(tmp_path / "a", batch_size=BATCH, target="npu"))
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(BATCH, 4)), rng.normal(size=(BATCH, 3))
    x, y = x.astype(np.float32), y.astype(np.float32)
    losses = [host.train({"x": x, "y:y": y}) for _ in range(6)]
    own = [trainer.train_on_batch(x, y)["loss"] for _ in range(3)]
    trainer.export_training(tmp_path / "a", batch_size=BATCH, target="npu")
    loaded = Trainer.load(tmp_path / "a")
    own += [loaded.train_on_batch(x, y)["loss"] for _ in range(3)]
    np.testing.assert_allclose(losses, own, rtol=1e-5)


def fixed() -> onnx.ModelProto:
    model = mlp()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = BATCH
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = BATCH
    return model


def test_the_batch_size_comes_from_the_model(tmp_path: Path) -> None:
    model = fixed()
    folder = Trainer(model, loss="mse").export_training(tmp_path / "a", target="npu")
    assert Host(folder).manifest["batch"]["rows"] == BATCH
    with pytest.raises(SettingError, match=r"needs a fixed batch size.*batch_size="):
        Trainer(mlp(), loss="mse").export_training(tmp_path / "b", target="npu")
    with pytest.raises(SettingError, match="fixed batch dimension"):
        Trainer(model, loss="mse").export_training(tmp_path / "b", target="npu", batch_size=3)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "lstm",
            r"LSTM 'node_1' in the model \(not in the list\), Scan in the gradient of 'node_1' \(con",
        ),
        (
            "mixture",
            r"Einsum 'node_2' in the model \(not in the list\), Einsum in the gradient of 'node_2'",
        ),
    ],
)
def test_the_error_names_the_parts_that_cannot_be_expressed(
    name: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        trainer_of(name, "sgd").export_training(tmp_path / "a", target="npu", batch_size=BATCH)
    assert not (tmp_path / "a").exists()


OUTSIDE = {
    "y = onnxfit.kernels.Wide(x)": "the domain onnxfit.kernels",
    "y = NonZero(x)": "not in the list",
    "y, z = MaxPool<kernel_shape = [2]>(x)": "several outputs",
    "d = Cast<to = 11>(x)  y = Cast<to = 1>(d)": "its type is DOUBLE",
    "s = Cast<to = 7>(f)  y = Reshape(x, s)": "a size, an axis or a position is computed",
    "s = Cast<to = 7>(f)  r = Reshape(x, s)  y = Relu(r)": "its sizes depend on data",
    "s = Cast<to = 7>(f)  y = Tile(x, s)": "a size, an axis or a position is computed",
    "s = Cast<to = 7>(f)  y = ReduceSum(x, s)": "a size, an axis or a position is computed",
}


@pytest.mark.parametrize("nodes", OUTSIDE)
def test_the_check_finds_each_reason(nodes: str) -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17, "onnxfit.kernels": 1]>
        g (float[2, 3, 4] x, float[3] f) => (float[2, 3, 4] y) {{ {nodes} }}"""
    )
    if "domain" not in OUTSIDE[nodes]:
        model = onnx.shape_inference.infer_shapes(model)
    reasons = [line.rpartition(" (")[2].rstrip(")") for line in outside(model)]
    assert OUTSIDE[nodes] in reasons


def test_frozen_weights_stay_in_the_model_file(tmp_path: Path) -> None:
    trainer = Trainer(mlp((4, 400, 400, 3)), ["fc2.*"], loss="mse", optimizer="adam")
    ordinary = Host(trainer.export_training(tmp_path / "a", batch_size=BATCH))
    host = PlainHost(trainer.export_training(tmp_path / "b", batch_size=BATCH, target="npu"))
    assert host.graphs["train"]["external"] == ["model.onnx"]
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(BATCH, 4)).astype(np.float32)}
    batch["y:y"] = rng.normal(size=(BATCH, 3)).astype(np.float32)
    for _ in range(STEPS):
        np.testing.assert_allclose(host.train(batch), ordinary.train(batch), rtol=1e-5)


def test_adapters_train_beside_frozen_weights(tmp_path: Path) -> None:
    network = NETWORKS["encoder"]
    model = network.model(np.random.default_rng(0))
    adapters = onnxfit.LoRA(rank=2, target="*")
    trainer = Trainer(model, loss=network.loss, optimizer=SGD(0.1), adapters=adapters)
    ordinary = Host(trainer.export_training(tmp_path / "a", batch_size=BATCH))
    host = PlainHost(trainer.export_training(tmp_path / "b", batch_size=BATCH, target="npu"))
    for seed in range(STEPS):
        batch = batch_of(trainer, "encoder", seed)
        np.testing.assert_allclose(host.train(batch), ordinary.train(batch), rtol=1e-5)
    one, other = (onnx.load_from_string(h.deploy()) for h in (ordinary, host))
    assert [t.name for t in one.graph.initializer] == [t.name for t in other.graph.initializer]


def test_the_page_lists_the_operators() -> None:
    page = Path(__file__).parents[2] / "docs/training-folder.md"
    section = page.read_text().partition("### Compilers that know inference only")[2]
    table = section.partition("| kind | operators |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"`(\w+)`", table)) == sorted(OPERATORS)
