"""An adapter goes into the weights of a file, and comes out again."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from onnx.numpy_helper import from_array, to_array

import onnxfit
from onnxfit import LoRA, SettingError, Trainer, UnknownNameError
from tests import models
from tests.trainable.adapters.files import KINDS, file_of, initializers, packed_file, rows_of, run
from tests.trainable.adapters.test_adapted import X, fitted, trainer_of

SIZES = (4, 8, 8, 3)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "tied"])
@pytest.mark.parametrize("init", ["kaiming", "pissa"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_unmerging_gives_the_base_within_rounding(
    kind: str, init: str, dtype: type[np.floating], tmp_path: Path
) -> None:
    if "conv" in kind and dtype == np.float64:
        pytest.skip("onnxruntime has no Conv of float64")
    file = file_of(kind, dtype)
    trainer = fitted(trainer_of(file, LoRA(rank=2, target="*", init=init)), rows_of(kind, dtype))
    folder = trainer.export_adapter(tmp_path)
    merged = onnxfit.merge(file, folder)
    exported = trainer.export()
    base = onnxfit.unmerge(merged, LoRA.load(folder))
    assert base.graph.node == merged.graph.node == file.graph.node
    unit = np.finfo(dtype).eps / 2
    tensors = zip(*(model.graph.initializer for model in (file, merged, base, exported)))
    for was, with_adapter, now, trained in (map(to_array, group) for group in tensors):
        changed = np.abs(with_adapter - was).max()
        assert (np.abs(now - was) <= unit * (np.abs(was) + np.abs(with_adapter))).all()
        if changed:
            assert changed > 1e-3
        np.testing.assert_allclose(with_adapter, trained, atol=20 * unit * np.abs(was).max())


def test_merging_equals_the_export_of_a_trainer(tmp_path: Path) -> None:
    trainer = fitted(trainer_of(models.mlp(SIZES), LoRA(rank=2, dora=True)), X)
    folder = trainer.export_adapter(tmp_path)
    merged = onnxfit.merge(models.mlp(SIZES), folder)
    assert initializers(merged) == initializers(trainer.export())
    assert np.array_equal(run(merged)(X), trainer.predict(X))


def test_adapters_of_packed_integers_are_merged_as_nodes(tmp_path: Path) -> None:
    x = np.random.default_rng(8).normal(size=(12, 32)).astype(np.float32)
    trainer = fitted(trainer_of(packed_file(), LoRA(rank=2)), x)
    folder = trainer.export_adapter(tmp_path)
    assert np.array_equal(run(onnxfit.merge(packed_file(), folder))(x), run(trainer.export())(x))
    with pytest.raises(SettingError, match="contains integers, whose adapters are separate nodes"):
        onnxfit.unmerge(packed_file(), folder)


def test_what_cannot_be_unmerged_is_refused(tmp_path: Path) -> None:
    model = models.mlp(SIZES)
    folder = fitted(trainer_of(model, LoRA(rank=2)), X).export_adapter(tmp_path / "plain")
    with pytest.raises(SettingError, match="not merged with the adapter: the weights of fc0, fc1"):
        onnxfit.unmerge(model, folder)
    with pytest.raises(UnknownNameError, match="'fc0'"):
        onnxfit.unmerge(models.linear(4, 3), folder)
    scaled = fitted(trainer_of(model, LoRA(rank=2, dora=True)), X).export_adapter(tmp_path / "dora")
    with pytest.raises(SettingError, match=r"DoRA divided the columns of 'fc0\.weight'"):
        onnxfit.unmerge(onnxfit.merge(model, scaled), scaled)


@pytest.mark.parametrize("function", [onnxfit.merge, onnxfit.unmerge])
def test_settings_alone_are_no_adapter(function: object) -> None:
    assert callable(function)
    with pytest.raises(SettingError, match=r"has settings but no matrices to merge"):
        function(models.mlp(SIZES), LoRA(rank=2))


def test_merging_into_another_base_is_warned_of(tmp_path: Path) -> None:
    model = models.mlp(SIZES)
    folder = fitted(trainer_of(model, LoRA(rank=2)), X).export_adapter(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        once = onnxfit.merge(model, folder)
    with pytest.warns(
        UserWarning, match="were trained for a model whose weights have other values"
    ):
        onnxfit.merge(once, folder)


def test_half_precision_comes_back_within_its_rounding(tmp_path: Path) -> None:
    model = file_of("matmul", np.float16)
    array = np.random.default_rng(0).normal(size=(6, 6)).astype(np.float16)
    model.graph.initializer[0].CopyFrom(from_array(array, "w"))
    trainer = Trainer(model, adapters=LoRA(rank=2, target="*"))
    rng = np.random.default_rng(1)
    trainer.set_weights({n: rng.normal(size=w.shape) for n, w in trainer.get_weights().items()})
    folder = trainer.export_adapter(tmp_path)
    merged = onnxfit.merge(model, folder)
    base = to_array(onnxfit.unmerge(merged, folder).graph.initializer[0]).astype(np.float32)
    sizes = np.abs(array.astype(np.float32)) + np.abs(to_array(merged.graph.initializer[0]))
    assert (np.abs(base - array) <= 2.0**-11 * sizes + 1e-6).all()
