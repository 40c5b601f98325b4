"""A host trains adapters, merges them by export.onnx, and the training comes back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from onnxfit import LoRA, Trainer
from onnxfit.errors import SettingError
from tests.models import convolutional, mlp
from tests.training_folder.host import Host

RNG = np.random.default_rng(0)
Y = RNG.integers(0, 3, 16)


def transposed() -> onnx.ModelProto:
    return onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[N, 4] x) => (float[N, 3] y) <float[3, 4] w = {
        0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2}, float[3] b = {0, 0, 0}>
        { y = Gemm<transB = 1>(x, w, b) }""")


NETWORKS = {
    "dense": (lambda: mlp((4, 64, 3)), {"rank": 2}, (16, 4)),
    "transposed": (transposed, {"rank": 2, "target": "w"}, (16, 4)),
    "convolutional": (
        lambda: convolutional(batch_norm=False),
        {"rank": 2, "target": "*weight", "alpha": 3},
        (16, 1, 8, 8),
    ),
    "dropout": (lambda: mlp((4, 64, 3)), {"rank": 2, "dropout": 0.2}, (16, 4)),
}


def adapted(name: str, **settings: object) -> Trainer:
    network, lora, _ = NETWORKS[name]
    return Trainer(
        network(), loss="cross_entropy", optimizer="adam", adapters=LoRA(**lora), **settings
    )


@pytest.mark.parametrize("target", ["onnxruntime", "web"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_host_merges_adapters_as_export_does(name: str, target: str, tmp_path: Path) -> None:
    trainer = adapted(name)
    host = Host(trainer.export_training(tmp_path / "folder", batch_size=16, target=target))
    x = RNG.normal(size=NETWORKS[name][2]).astype(np.float32)
    output = next(iter(trainer._training.recipe.objectives))
    losses = [host.train({"x": x, f"y:{output}": Y}) for _ in range(5)]
    assert losses[-1] < losses[0]
    before = {t.name: onnx.numpy_helper.to_array(t) for t in NETWORKS[name][0]().graph.initializer}
    trainer.import_state(host.save(tmp_path / "trained.safetensors"))
    own = trainer.export().graph.initializer
    hosts = onnx.ModelProto.FromString(host.deploy()).graph.initializer
    merged = [entry["name"] for entry in host.manifest["model"]["tensors"]]
    assert merged
    for ours, theirs in zip(own, hosts):
        array = onnx.numpy_helper.to_array(theirs)
        np.testing.assert_allclose(array, onnx.numpy_helper.to_array(ours), rtol=1e-6, atol=1e-7)
        assert np.array_equal(array, before[ours.name]) == (ours.name not in merged)


def test_a_folder_of_adapters_is_loaded_with_its_base(tmp_path: Path) -> None:
    trainer = adapted("dense", weights="fc1.bias")
    x = RNG.normal(size=(16, 4)).astype(np.float32)
    trainer.fit(x, Y, epochs=2, verbose=0)
    loaded = Trainer.load(trainer.export_training(tmp_path))
    for name, array in trainer.get_weights().items():
        np.testing.assert_array_equal(loaded.get_weights()[name], array)
    np.testing.assert_array_equal(loaded.predict(x), trainer.predict(x))
    assert loaded.train_on_batch(x, Y) == trainer.train_on_batch(x, Y)


def test_the_frozen_base_is_in_the_folder_once(tmp_path: Path) -> None:
    model = mlp((64, 256, 3))
    trainer = Trainer(model, loss="cross_entropy", adapters=LoRA(rank=2))
    folder = trainer.export_training(tmp_path)
    size = 4 * 64 * 256
    for graph in Host(folder).graphs.values():
        assert (folder / graph["file"]).stat().st_size < size
        assert graph["external"] == ["model.onnx"]
    assert (folder / "model.onnx").stat().st_size > size


def test_a_folder_without_adapters_has_no_export_graph(tmp_path: Path) -> None:
    adapted("dense").export_training(tmp_path)
    assert (tmp_path / "export.onnx").is_file()
    Trainer(mlp(), loss="cross_entropy").export_training(tmp_path)
    assert not (tmp_path / "export.onnx").exists()


@pytest.mark.parametrize("settings", [{"dora": True}, {"init": "pissa"}])
def test_adapters_that_no_graph_merges_are_refused(settings: dict, tmp_path: Path) -> None:
    adapters = LoRA(rank=2, **settings)
    trainer = Trainer(mlp((4, 64, 3)), loss="cross_entropy", adapters=adapters)
    with pytest.raises(SettingError, match="only Python can merge"):
        trainer.export_training(tmp_path)
    assert not list(tmp_path.iterdir())
