"""A host trains weights in Constant nodes, and writes them into the deployable model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

import onnxfit
from tests import models
from tests.constants import batch_for, constants_of, structure, trained, with_constants
from tests.training_folder.host import Host


def test_a_folder_for_hosts(tmp_path: Path) -> None:
    model = with_constants(models.mlp())
    bias = model.graph.node[1].attribute[0]
    numbers = numpy_helper.to_array(bias.t).astype(np.float32) + 0.5
    bias.CopyFrom(onnx.helper.make_attribute("value_floats", numbers.tolist()))
    trainer = trained(model)
    host = Host(trainer.export_training(tmp_path / "folder"))
    x, y = batch_for(model)
    host.train({**x, "y:y": y["y"]})
    deployed = onnx.ModelProto.FromString(host.deploy())
    trainer.import_state(host.save(tmp_path / "state.safetensors"))
    kinds = [node.op_type for node in deployed.graph.node]
    # A list of floats is not one field of bytes, so it becomes an initializer.
    assert kinds == ["Constant"] * 3 + ["Gemm", "Tanh", "Gemm"]
    arrays = constants_of(deployed)
    arrays |= {t.name: numpy_helper.to_array(t) for t in deployed.graph.initializer}
    for name, array in trainer.get_weights().items():
        np.testing.assert_array_equal(arrays[name], array)
    again = onnxfit.Trainer.load(tmp_path / "folder")
    assert again.get_weights().keys() == trainer.get_weights().keys()
    assert structure(trainer.export()) == structure(model)
