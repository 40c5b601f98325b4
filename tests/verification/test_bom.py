"""A bill of materials says what the lineage of a file says, and follows the schema of CycloneDX."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxfit
from onnxfit import Trainer
from onnxfit.errors import ModelError, SettingError
from onnxfit.load.trainable import fingerprint
from tests.models import mlp

RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 4)).astype(np.float32)
Y = RNG.normal(size=(20, 3)).astype(np.float32)


def write_child(path: Path, **metadata: str) -> Path:
    model = mlp()
    onnx.helper.set_model_props(model, metadata)
    trainer = Trainer(model, loss="mse", optimizer="adam")
    trainer.fit(X, Y, epochs=1, verbose=0)
    trainer.fit(X[:10], Y[:10], epochs=1, verbose=0)
    trainer.export(path)
    return path


def test_a_trained_file(tmp_path: Path) -> None:
    child = write_child(tmp_path / "child.onnx", model_license="Apache-2.0")
    bill = onnxfit.model_bom(child, tmp_path / "bom.json")
    assert json.loads((tmp_path / "bom.json").read_text()) == bill == onnxfit.model_bom(child)
    model = bill["metadata"]["component"]
    (digest,) = model["hashes"]
    assert digest["content"] == hashlib.sha256(child.read_bytes()).hexdigest()
    assert model["licenses"] == [{"license": {"name": "Apache-2.0"}}]
    (parent,) = model["pedigree"]["ancestors"]
    assert parent["properties"][0]["value"] == fingerprint(mlp())
    assert model["properties"][0]["value"] == fingerprint(onnx.load(child))
    parameters = model["modelCard"]["modelParameters"]
    assert len(parameters["datasets"]) == 2
    assert (parameters["inputs"], parameters["outputs"]) == ([{"format": "x"}], [{"format": "y"}])
    assert {one["name"] for one in bill["components"]} >= {"onnxfit", "onnx", "numpy"}


def test_a_file_without_a_lineage(tmp_path: Path) -> None:
    onnx.save(mlp(), tmp_path / "m.onnx")
    bill = onnxfit.model_bom(tmp_path / "m.onnx")
    assert bill["components"] == []
    assert "pedigree" not in bill["metadata"]["component"]


def test_wrong_files(tmp_path: Path) -> None:
    child = write_child(tmp_path / "child.onnx")
    with pytest.raises(SettingError, match=r"bom\.onnx"):
        onnxfit.model_bom(child, tmp_path / "bom.onnx")
    with pytest.raises(ModelError):
        onnxfit.model_bom(tmp_path / "missing.onnx")


@pytest.mark.parametrize("metadata", [{}, {"license": "Ours: ask"}])
def test_the_schema(metadata: dict[str, str], tmp_path: Path) -> None:
    """cyclonedx-python-lib has the published schema."""
    validators = pytest.importorskip("cyclonedx.validation.json")
    schema = pytest.importorskip("cyclonedx.schema")
    validator = validators.JsonStrictValidator(schema.SchemaVersion.V1_6)
    bill = onnxfit.model_bom(write_child(tmp_path / "child.onnx", **metadata))
    assert validator.validate_str(json.dumps(bill)) is None
    bill["metadata"]["component"]["type"] = "something else"
    assert validator.validate_str(json.dumps(bill)) is not None
