"""Folders of adapters in the format of PEFT: adapter_model.safetensors and adapter_config.json.

PEFT (https://github.com/huggingface/peft) stores A as (rank, inputs) and B as (outputs, rank),
under the names of the modules. The metadata of adapter_model.safetensors also stores checksums of
the base weights, which PEFT ignores. PEFT itself stores the base weight of an adapted embedding or
output layer, `base_layer.weight`, of which only the checksum is used here.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors

from onnxfit.checks import shortened
from onnxfit.errors import CheckpointError, SettingError, listed_names
from onnxfit.files import (
    COUNT,
    FLAG,
    MAPPING,
    RATE,
    TEXT,
    optional,
    read_regular_file,
    require_path,
    require_types,
)
from onnxfit.folders import finish_folder, write_folder
from onnxfit.graph.tensors import read_metadata, read_safetensors, write_safetensors

Array = npt.NDArray[Any]

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
FILES = (TENSORS, CONFIG)
PICKLE = "adapter_model.bin"  # of older versions of PEFT
CHECKSUMS = "onnxfit.base"  # in the metadata of the tensors
KEY = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?:(?P<table>embedding_)(?P<t>[AB])"
    r"|(?P<part>[AB])\.weight|(?P<magnitude>magnitude_vector))"
)
BASE = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.base_layer\.weight")
LITERAL = re.compile(r"[\w.-]+")
CONFIG_TYPES = {
    "peft_type": TEXT,
    "r": COUNT,
    "lora_alpha": RATE,
    "lora_dropout": RATE,
    "use_rslora": FLAG,
    "use_dora": FLAG,
    "alpha_pattern": optional(MAPPING),
}
DEFAULTS = {
    "lora_dropout": 0.0,
    "use_rslora": False,
    "use_dora": False,
    "alpha_pattern": None,
    "init_lora_weights": True,
    "bias": "none",
    "modules_to_save": None,
}
TASK_TYPES = (
    "CAUSAL_LM",
    "SEQ_CLS",
    "SEQ_2_SEQ_LM",
    "TOKEN_CLS",
    "QUESTION_ANS",
    "FEATURE_EXTRACTION",
)
# prefixes of the values of PEFT's init_lora_weights with which PEFT changes the model's weight
CHANGING_THE_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")


@dataclass(frozen=True, eq=False)
class Matrices:
    """The two matrices of an adapter as PEFT stores them, and its settings.

    - `a`, `b`: A of (rank, inputs), B of (outputs, rank); for a Conv, followed by the kernel's
      sizes.
    - `alpha`, `dropout`, `scaling`: as in `LoRA`.
    - `is_embedding`: whether they adapt the table of an embedding.
    - `checksums`: the checksums of the weight that they were trained with, one for each layout in
      which a file may store it; empty if the weight is unknown.
    - `magnitude`: DoRA's magnitude, of (outputs,); of a Conv (1, outputs, 1, ...).
    """

    a: Array
    b: Array
    alpha: float
    dropout: float
    scaling: str
    is_embedding: bool = False
    checksums: Collection[int] = ()
    magnitude: Array | None = None

    @property
    def rank(self) -> int:
        return len(self.a)

    @property
    def scale(self) -> float:
        return scale_of(self.alpha, self.rank, self.scaling)


def scale_of(alpha: float, rank: int, scaling: str) -> float:
    """Return the factor s of the product of two matrices, by the scaling "alpha/r" or another."""
    return alpha / (rank if scaling == "alpha/r" else math.sqrt(rank))


def checksum_of(weight: Array) -> int:
    """Return a checksum of the shape and the numbers of a weight."""
    data = np.ascontiguousarray(weight).tobytes()
    return zlib.crc32(data, zlib.crc32(str(weight.shape).encode()))


def require_task(task_type: str | None, base_model: str | None) -> None:
    """Raise SettingError for a description of the model that PEFT would refuse."""
    if task_type is not None and task_type not in TASK_TYPES:
        raise SettingError(
            f"task_type must be one of PEFT's {', '.join(map(repr, TASK_TYPES))}, or None, got"
            f" {shortened(task_type)}."
        )
    if base_model is not None and not (isinstance(base_model, str) and base_model):
        raise SettingError(
            "base_model must be the name or the folder of the model in PyTorch, or None, got"
            f" {shortened(base_model)}."
        )


def write_adapters(
    folder: str | os.PathLike[str],
    adapters: Mapping[str, Matrices],
    task_type: str | None = None,
    base_model: str | None = None,
) -> Path:
    """Write a folder of adapters that PEFT reads; both files are replaced, or none.

    - `adapters`: a mapping from module to matrices.
    - `task_type`, `base_model`: what PEFT's config says of the model; see `require_task`.

    SettingError: some adapters have DoRA and some do not. CheckpointError: a file cannot be
    written.
    """
    require_path(folder)
    plain = [module for module, one in adapters.items() if one.magnitude is None]
    if 0 < len(plain) < len(adapters):
        raise SettingError(
            "PEFT stores adapters that all have dora=True or all have dora=False, but only those"
            f" of {listed_names(plain)} have dora=False. Use one kind of adapter, or export the"
            " merged model with export(path)."
        )
    tensors: dict[str, Array] = {}
    for module, one in adapters.items():
        for part, array in (("A", one.a), ("B", one.b)):
            name = f"embedding_{part}" if one.is_embedding else f"{part}.weight"
            tensors[f"base_model.model.{module}.lora_{name}"] = np.ascontiguousarray(array)
        if one.magnitude is not None:
            tensors[f"base_model.model.{module}.lora_magnitude_vector"] = one.magnitude
    sums = {module: next(iter(one.checksums), None) for module, one in adapters.items()}
    metadata = {"format": "pt", CHECKSUMS: json.dumps(sums)}
    content = io.BytesIO()
    write_safetensors(content, tensors, metadata)
    model = {"task_type": task_type, "base_model_name_or_path": base_model}
    text = json.dumps(_config(adapters) | model, indent=2).encode()
    return write_folder(folder, {TENSORS: content.getvalue(), CONFIG: text})


def _config(adapters: Mapping[str, Matrices]) -> dict[str, Any]:
    """Return adapter_config.json, with patterns for modules of another rank or alpha."""
    first = next(iter(adapters.values()))
    is_rooted = first.scaling == "alpha/sqrt(r)"
    alphas = {}
    for module, one in adapters.items():
        alpha = one.alpha
        if one.scaling != first.scaling:  # the config has one scaling for all
            alpha = alpha / math.sqrt(one.rank) if is_rooted else alpha * math.sqrt(one.rank)
        alphas[module] = int(alpha) if alpha == int(alpha) else alpha
    alpha = next(iter(alphas.values()))
    return {
        "peft_type": "LORA",
        "r": first.rank,
        "lora_alpha": alpha,
        "lora_dropout": first.dropout,
        "use_rslora": is_rooted,
        "use_dora": first.magnitude is not None,
        "target_modules": sorted(adapters),
        "rank_pattern": {m: one.rank for m, one in adapters.items() if one.rank != first.rank},
        "alpha_pattern": {m: value for m, value in alphas.items() if value != alpha},
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def read_adapters(folder: str | os.PathLike[str]) -> dict[str, Matrices]:
    """Return a mapping from module to matrices, from a folder of PEFT or `write_adapters`.

    Nothing in the files is executed. CheckpointError: the folder has other or damaged contents.
    """
    require_path(folder)
    path = Path(folder)
    if (path / PICKLE).exists() and not (path / TENSORS).exists():
        raise CheckpointError(
            f"{str(path)!r} contains a pickle, {PICKLE}, which is not read because it may run"
            " code. Save the adapter again with PEFT's save_pretrained(folder), which writes"
            " safetensors."
        )
    try:
        finish_folder(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{str(path)!r} has a write that cannot be finished: {error}"
        ) from None
    config = _read_config(path / CONFIG)
    try:
        data = read_regular_file(path / TENSORS)
        arrays = read_safetensors(data)
        sums = json.loads(read_metadata(data).get(CHECKSUMS, "{}"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{str(path)!r} contains no {TENSORS}. Pass a folder written by trainer.export_adapter"
            " or by PEFT's save_pretrained."
        ) from None
    except (safetensors.SafetensorError, KeyError, ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{str(path / TENSORS)!r} is damaged: {error}") from None
    sums = sums if isinstance(sums, dict) else {}
    noted = {module: (one,) for module, one in sums.items() if isinstance(one, int)}
    checksums = {**noted, **_of_base_layers(arrays)}
    pairs: dict[str, dict[str, Array]] = {}
    tables = set()
    for name, array in arrays.items():
        match = KEY.fullmatch(name)
        if match is None or array.dtype.kind not in "fV":
            raise CheckpointError(
                f"{str(path / TENSORS)!r} contains {name!r}, which is not a LoRA matrix. Save the"
                " adapter without biases and modules_to_save."
            )
        require_finite(repr(str(path / TENSORS)), name, array)
        part = match["part"] or match["t"] or "magnitude"
        pairs.setdefault(match["module"], {})[part] = array
        if match["table"]:
            tables.add(match["module"])
    if not pairs:
        raise CheckpointError(
            f"{str(path / TENSORS)!r} contains no LoRA matrices. Save the adapter again."
        )
    return {
        module: _matrices_of_module(
            path, module, pair, config, module in tables, checksums.get(module, ())
        )
        for module, pair in sorted(pairs.items())  # safetensors reads in any order
    }


def _of_base_layers(arrays: dict[str, Array]) -> dict[str, tuple[int, ...]]:
    """Take the base weights of adapted layers from the arrays, and return their checksums."""
    adapted = {match["module"] for match in map(KEY.fullmatch, arrays) if match}
    found = {}
    for name, match in [(name, BASE.fullmatch(name)) for name in arrays]:
        if match and match["module"] in adapted:
            weight = arrays.pop(name)
            found[match["module"]] = tuple(checksum_of(array) for array in (weight, weight.T))
    return found


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_regular_file(path))
    except FileNotFoundError:
        raise CheckpointError(
            f"{str(path.parent)!r} contains no {CONFIG}. Pass a folder written by"
            " trainer.export_adapter or by PEFT's save_pretrained."
        ) from None
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read as JSON: {error}") from None
    config = {**DEFAULTS, **config} if isinstance(config, dict) else config
    require_types(repr(str(path)), config, CONFIG_TYPES)
    if config["peft_type"] != "LORA":
        kind = config["peft_type"]
        raise CheckpointError(f"{str(path)!r} describes an adapter of type {kind}, expected LoRA.")
    for setting, nothing in (("bias", "none"), ("modules_to_save", None)):
        if config[setting] not in (nothing, []):
            raise CheckpointError(
                f"{str(path)!r} has {setting}={config[setting]!r}, expected {setting}={nothing!r}:"
                " PEFT has trained tensors that are not LoRA matrices and would be ignored. Train"
                " the adapter without them, or merge it in PEFT."
            )
    start = config["init_lora_weights"]
    if isinstance(start, str) and start.lower().startswith(CHANGING_THE_BASE):
        raise CheckpointError(
            f"{str(path)!r} has init_lora_weights={start!r}, which changes the base weights. Save"
            " the adapter in PEFT for the original weights, with save_pretrained(folder,"
            " path_initial_model_for_weight_conversion=...)."
        )
    return dict(config)


def _matrices_of_module(
    path: Path,
    module: str,
    pair: Mapping[str, Array],
    config: Mapping[str, Any],
    is_embedding: bool,
    checksums: Collection[int],
) -> Matrices:
    if bool(config["use_dora"]) != ("magnitude" in pair):
        raise CheckpointError(
            f"{str(path / CONFIG)!r} has use_dora={config['use_dora']}, but {TENSORS} has"
            f" {'a' if 'magnitude' in pair else 'no'} magnitude for {module!r}. The two files are"
            " from different adapters. Save the adapter again."
        )
    if not is_pair(pair):
        shapes = {part: array.shape for part, array in pair.items()}
        raise CheckpointError(
            f"{str(path / TENSORS)!r} contains matrices for {module!r} of shapes {shapes},"
            " expected A of (rank, inputs) and B of (outputs, rank)."
        )
    return Matrices(
        a=pair["A"],
        b=pair["B"],
        alpha=_alpha(path, module, config),
        dropout=float(config["lora_dropout"]),
        scaling="alpha/sqrt(r)" if config["use_rslora"] else "alpha/r",
        is_embedding=is_embedding,
        checksums=checksums,
        magnitude=pair.get("magnitude"),
    )


def require_finite(place: str, name: str, array: Array) -> None:
    """Raise CheckpointError for a matrix with NaN or infinity.

    - `place`: the file, for the message.
    """
    if not np.isfinite(array.astype(np.float32)).all():
        raise CheckpointError(
            f"{place} contains NaN or infinity in {name!r}, so every output would be NaN. Use an"
            " adapter from before its training diverged."
        )


def is_pair(pair: Mapping[str, Array]) -> bool:
    """Return whether a pair has an "A" of (rank, inputs) and a "B" of (outputs, rank)."""
    shapes = {part: array.shape for part, array in pair.items()}
    a, b = shapes.get("A", ()), shapes.get("B", ())
    return len(a) >= 2 and len(a) == len(b) and a[0] == b[1] and 0 not in a and 0 not in b


def _alpha(path: Path, module: str, config: Mapping[str, Any]) -> float:
    """Return the alpha of a module; names in `alpha_pattern` may lack the outer modules."""
    patterns = config["alpha_pattern"] or {}
    expressions = [pattern for pattern in patterns if not LITERAL.fullmatch(pattern)]
    if expressions:
        raise CheckpointError(
            f"{str(path / CONFIG)!r} has regular expressions in alpha_pattern:"
            f" {listed_names(expressions)}. Replace them with names of modules."
        )
    alpha = config["lora_alpha"]
    for name, value in patterns.items():
        if module == name or module.endswith(f".{name}"):
            alpha = value
            break
    require_types(repr(str(path / CONFIG)), {"alpha": alpha}, {"alpha": RATE})
    return float(alpha)
