"""Weights in Constant nodes, in every file that a trainer writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnxruntime import InferenceSession

import onnxfit
from onnxfit.optimizers import Adam
from tests import models
from tests.constants import batch_for, constants_of, structure, trained, with_constants
from tests.trainable.quantized.integer_files import integer_file

LEARNED = onnxfit.Quantization(scales="learned")


@pytest.fixture
def model() -> onnx.ModelProto:
    return with_constants(models.mlp())


def assert_holds(found: onnx.ModelProto, given: onnx.ModelProto, trainer: onnxfit.Trainer) -> None:
    """The file has the nodes of the given file, and the numbers of the trainer."""
    assert structure(found) == structure(given)
    arrays = constants_of(found)
    for name, array in trainer.get_weights().items():
        np.testing.assert_array_equal(arrays[name], array, err_msg=name)


class TestFiles:
    def test_written_files(self, model: onnx.ModelProto, tmp_path: Path) -> None:
        trainer = trained(model)
        trainer.export(tmp_path / "exported.onnx")
        trainer.model_snapshot().write(tmp_path / "snapshot.onnx")
        trainer.save_onnx_graph(tmp_path / "graphs")
        for name in ("exported", "snapshot", "graphs/trained", "graphs/model"):
            assert_holds(onnx.load(tmp_path / f"{name}.onnx"), model, trainer)
        assert_holds(trainer.model, model, trainer)

    def test_large_files(
        self, model: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The tensors of a large model are arrays beside it."""
        monkeypatch.setattr("onnxfit.graph.tensors.MAX_COPIED_BYTES", 10)
        monkeypatch.setattr("onnxfit.graph.shared_tensors.MIN_BYTES", 16)
        half = with_constants(models.mlp(), ["fc0.weight", "fc1.weight"])
        trainer = trained(half)
        exported = trainer.export(tmp_path / "exported.onnx")
        assert structure(onnx.load(tmp_path / "exported.onnx")) == structure(half)
        onnx.load_external_data_for_model(exported, str(tmp_path))
        arrays = constants_of(exported)
        for name in ("fc0.weight", "fc1.weight"):
            np.testing.assert_array_equal(arrays[name], trainer.get_weights()[name])

    def test_checkpoints(self, model: onnx.ModelProto, tmp_path: Path) -> None:
        path = trained(model).save(tmp_path / "a.ckpt")
        trainer, other = onnxfit.Trainer.load(path), trained(model)
        x, y = batch_for(model)
        for one in (trainer, other):
            one.fit(x, y, epochs=one.epoch + 2, batch_size=2, verbose=0)
            assert_holds(one.export(), model, one)
        for name, array in other.get_weights().items():
            np.testing.assert_array_equal(trainer.get_weights()[name], array)


class TestAdapters:
    def test_merged(self, model: onnx.ModelProto, tmp_path: Path) -> None:
        adapters = onnxfit.LoRA(rank=2, target="*weight")
        trainer = trained(model, adapters=adapters)
        assert {"fc0.weight.lora_A", "fc1.weight.lora_A"} <= trainer.get_weights().keys()
        exported = trainer.export(lineage=False)
        assert structure(exported) == structure(model)
        x, _ = batch_for(model)
        (found,) = InferenceSession(exported.SerializeToString()).run(None, x)
        np.testing.assert_allclose(found, trainer.predict(x), rtol=1e-4, atol=1e-6)
        folder = trainer.export_adapter(tmp_path / "adapter")
        merged = onnxfit.merge(model, onnxfit.LoRA.load(folder))
        assert merged == exported
        base = onnxfit.unmerge(merged, onnxfit.LoRA.load(folder))
        for name, array in constants_of(model).items():
            np.testing.assert_allclose(constants_of(base)[name], array, rtol=1e-5, atol=1e-7)
        path = trainer.save(tmp_path / "adapter.ckpt", adapters_only=True)
        loaded = onnxfit.Trainer.load(path, model_onnx=model)
        assert loaded.export(lineage=False) == exported

    def test_as_inputs(self, model: onnx.ModelProto) -> None:
        trainer = trained(model, adapters=onnxfit.LoRA(rank=2, target="*weight"))
        exported = trainer.export(adapters="inputs")
        onnx.checker.check_model(exported)
        for name, array in constants_of(model).items():
            np.testing.assert_array_equal(constants_of(exported)[name], array)
        x, _ = batch_for(model)
        (found,) = InferenceSession(exported.SerializeToString()).run(None, x)
        (base,) = InferenceSession(model.SerializeToString()).run(None, x)
        np.testing.assert_allclose(found, base, rtol=1e-6)


class TestQuantization:
    @pytest.mark.parametrize("quantization", [None, onnxfit.Quantization(), LEARNED], ids=str)
    def test_constants_train_as_initializers(
        self, quantization: onnxfit.Quantization | None
    ) -> None:
        plain = integer_file(symmetric=False)
        constant = with_constants(plain)
        results = []
        for model in (plain, constant):
            trainer = onnxfit.Trainer(
                model, loss="mse", optimizer=Adam(0.01), quantization=quantization
            )
            x, y = batch_for(model, rows=8)
            trainer.fit(x, y, epochs=2, batch_size=4, verbose=0)
            exported = trainer.export()
            tensors = {t.name: numpy_helper.to_array(t) for t in exported.graph.initializer}
            results.append({**tensors, **constants_of(exported)})
            if model is constant:
                kinds = [(n.op_type, list(n.input), list(n.output)) for n in exported.graph.node]
                assert kinds == [
                    (n.op_type, list(n.input), list(n.output)) for n in constant.graph.node
                ]
        np.testing.assert_equal(results[1], results[0])
