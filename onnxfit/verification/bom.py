"""A bill of materials of a trained file, in the format CycloneDX."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from onnxfit.checks import check_arguments
from onnxfit.environment import DISTRIBUTIONS
from onnxfit.errors import ModelError
from onnxfit.files import require_suffix, write_atomically
from onnxfit.graph.index import required_inputs
from onnxfit.load.facts import license_of
from onnxfit.load.reading import load_model
from onnxfit.load.trainable import fingerprint
from onnxfit.training.lineage import read_lineage

__all__ = ["model_bom"]

PACKAGES = ("onnxfit", "onnx", "numpy", *DISTRIBUTIONS)


@check_arguments
def model_bom(
    model: str | os.PathLike[str], path: str | os.PathLike[str] | None = None
) -> dict[str, Any]:
    """Return a bill of materials of a trained .onnx file (CycloneDX 1.6, ECMA-424); write it.

    It names the file with its SHA-256 and license, the parent that it was trained from, the arrays
    of the training data, and the packages that trained it, as the file's lineage says. The same
    file gives the same bill. Properties begin with `onnxfit:`.

    - `model`: the .onnx file. Its external data is part of the property
      `onnxfit:computation-sha256`, but not of the hash of the file.
    - `path`: the .json file to write.

    ModelError: the file cannot be read. CheckpointError: its lineage is damaged, or the bill cannot
    be written. SettingError: the suffix of `path` is that of another format.
    """
    if path is not None:
        require_suffix(path, "a bill of materials", ".json")
    proto = load_model(model)
    lineage = read_lineage(proto, os.fspath(model))
    component = {
        "type": "machine-learning-model",
        "bom-ref": "model",
        "name": Path(model).stem,
        "hashes": [{"alg": "SHA-256", "content": _file_hash(Path(model))}],
        **_license(license_of(proto)),
        **({} if lineage is None else _pedigree(lineage)),
        "modelCard": {
            "modelParameters": {
                "datasets": [] if lineage is None else [*_datasets(lineage)],
                "inputs": [{"format": name} for name in required_inputs(proto.graph)],
                "outputs": [{"format": value.name} for value in proto.graph.output],
            }
        },
        "properties": [_property("computation-sha256", fingerprint(proto))],
    }
    bill = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component},
        "components": [] if lineage is None else [*_packages(lineage)],
    }
    if path is not None:
        text = json.dumps(bill, indent=2) + "\n"
        write_atomically(path, lambda file: file.write(text.encode()))
    return bill


def _file_hash(path: Path) -> str:
    """Return the SHA-256 of a file. ModelError: it cannot be read."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while part := file.read(1 << 20):
                digest.update(part)
    except OSError as error:
        raise ModelError(f"{str(path)!r} cannot be read: {error.strerror or error}.") from error
    return digest.hexdigest()


def _license(name: str | None) -> dict[str, Any]:
    return {} if name is None else {"licenses": [{"license": {"name": name}}]}


def _pedigree(lineage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parent. Its hash is that of its nodes and numbers, not that of a file."""
    properties = [_property("computation-sha256", str(lineage["parent"]))]
    parent = {"type": "machine-learning-model", "name": "parent", "properties": properties}
    return {"pedigree": {"ancestors": [parent]}}


def _datasets(lineage: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the data sets, each with the hashes of its arrays."""
    for digest, content in lineage["data"].items():
        properties = [
            _property(f"{name}:sha256", array["sha256"]) for name, array in content.items()
        ]
        contents = {"properties": [_property("sha256", digest), *properties]}
        yield {"type": "dataset", "name": f"data {digest[:12]}", "contents": contents}


def _packages(lineage: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the packages that trained, each version once."""
    found = {
        (name, str(one[name])): None
        for one in lineage["environments"]
        for name in PACKAGES
        if name in one
    }
    for name, version in found:
        purl = f"pkg:pypi/{name}@{version}"
        yield {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def _property(name: str, value: str) -> dict[str, str]:
    return {"name": f"onnxfit:{name}", "value": value}
