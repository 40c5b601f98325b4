"""Cases as files, in the layout of ONNX's own backend tests.

NAME/model.onnx                     the graph
NAME/test_data_set_0/input_0.pb     a TensorProto for each input, in the order of the graph
NAME/test_data_set_0/output_0.pb    the right outputs, rounded from float64
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx.helper import tensor_dtype_to_np_dtype
from onnx.numpy_helper import from_array, to_array

from scripts.steps.float64 import Array, Feeds

DATA = "test_data_set_0"


def write_case(
    folder: Path, model: onnx.ModelProto, feeds: Mapping[str, Array], right: Mapping[str, Array]
) -> None:
    """Write a case. Its outputs get the element types of the graph."""
    data = folder / DATA
    data.mkdir(parents=True, exist_ok=True)
    (folder / "model.onnx").write_bytes(model.SerializeToString(deterministic=True))
    for kind, values, arrays in (
        ("input", model.graph.input, feeds), ("output", model.graph.output, right),
    ):  # fmt: skip
        for i, value in enumerate(values):
            dtype = tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            tensor = from_array(np.asarray(arrays[value.name]).astype(dtype), value.name)
            (data / f"{kind}_{i}.pb").write_bytes(tensor.SerializeToString())


def read_case(folder: Path) -> tuple[onnx.ModelProto, Feeds, Feeds]:
    """Return the model, its inputs and the right outputs."""
    model = onnx.load(folder / "model.onnx")

    def arrays(kind: str, number: int) -> Feeds:
        files = (folder / DATA / f"{kind}_{i}.pb" for i in range(number))
        tensors = [onnx.TensorProto.FromString(file.read_bytes()) for file in files]
        return {tensor.name: to_array(tensor) for tensor in tensors}

    return model, arrays("input", len(model.graph.input)), arrays("output", len(model.graph.output))


def write_list(folder: Path, tolerances: Mapping[str, float], version: str) -> None:
    """Write the list of cases, with the tolerance of each and the version of the suite."""
    described = {"version": version, "tolerances": dict(tolerances)}
    (folder / "steps.json").write_text(json.dumps(described, indent=2) + "\n")


def read_list(folder: Path) -> tuple[dict[str, float], str]:
    """Return the tolerance of each case, and the version of the suite."""
    described = json.loads((folder / "steps.json").read_text())
    return described["tolerances"], described["version"]
