"""Damage to checkpoints: to the archive as a file, or to the contents of its entries."""

from __future__ import annotations

import io
import json
import random
import warnings
import zipfile
from typing import Any

from scripts.fuzz.byte_mutations import INTEGERS, NUMBERS, WORDS, mutated_bytes
from scripts.fuzz.model_mutations import mutated_model
from scripts.fuzz.sandbox import PATHS


def mutated_checkpoint(data: bytes, rng: random.Random) -> bytes:
    """Return the checkpoint in `data` with a mutation of the archive or of one entry."""
    if rng.random() < 0.2:
        return mutated_bytes(data, rng)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = [(name, archive.read(name)) for name in archive.namelist()]
    index = rng.randrange(len(entries))
    if rng.random() < 0.6:
        index = next(i for i, (name, _) in enumerate(entries) if name.endswith(".json"))
    compression = zipfile.ZIP_STORED
    if rng.random() < 0.15:
        compression = _mutate_entries(entries, index, rng)
    else:
        name, content = entries[index]
        entries[index] = (name, mutated_entry(name, content, rng))
    archived = io.BytesIO()
    with zipfile.ZipFile(archived, "w", compression) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about entries of the same name
        for name, content in entries:
            archive.writestr(zipfile.ZipInfo(name or "e"), content, compression)
    return archived.getvalue()


def _mutate_entries(entries: list[tuple[str, bytes]], index: int, rng: random.Random) -> int:
    """Drop, double, rename or exchange an entry in place, and return the archive's compression."""
    name, content = entries[index]
    kind = rng.randrange(5)
    if kind == 0:
        del entries[index]
    elif kind == 1:
        entries.append(entries[index])
    elif kind == 2:
        entries[index] = (rng.choice(("../../x", "/etc/passwd", "", *WORDS)), content)
    elif kind == 3:
        return rng.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    else:
        entries[index] = (name, entries[rng.randrange(len(entries))][1])
    return zipfile.ZIP_STORED


def mutated_entry(name: str, content: bytes, rng: random.Random) -> bytes:
    """Return a mutation of a file in JSON, ONNX, safetensors or another format, by its name."""
    if name.endswith(".json"):
        try:
            value = json.loads(content)
            for _ in range(rng.choice((1, 1, 2, 4))):
                value = mutated_json(value, rng)
            return json.dumps(value).encode()
        except RecursionError:
            return b"[" * 100_000
    if name.endswith(".onnx"):
        return mutated_model(content, rng)
    if name.endswith(".safetensors") and rng.random() < 0.6:
        return _mutated_safetensors(content, rng)
    return mutated_bytes(content, rng)


def _mutated_safetensors(data: bytes, rng: random.Random) -> bytes:
    """Put another header before the same tensors."""
    size = int.from_bytes(data[:8], "little")
    try:
        header = mutated_json(json.loads(data[8 : 8 + size] or "{}"), rng)
        text = json.dumps(header).encode()
    except (ValueError, RecursionError):
        return data[:100]
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def mutated_json(value: Any, rng: random.Random) -> Any:
    """Return `value` with one thing somewhere inside it changed."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.9:
        return _mutated_list(value, rng) if isinstance(value, list) else _mutated_dict(value, rng)
    return _any_json(rng)


def _mutated_list(value: list[Any], rng: random.Random) -> list[Any]:
    index = rng.randrange(len(value))
    kind = rng.randrange(8)
    if kind == 0:
        return value[:index] + value[index + 1 :]
    if kind == 1:
        return [*value, value[index]]
    return [*value[:index], mutated_json(value[index], rng), *value[index + 1 :]]


def _mutated_dict(value: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    key = rng.choice(list(value))
    kind = rng.randrange(10)
    if kind == 0:
        return {k: v for k, v in value.items() if k != key}
    if kind == 1:
        return {(rng.choice((*value, *WORDS)) if k == key else k): v for k, v in value.items()}
    if kind == 2:
        return {**value, key: value[rng.choice(list(value))]}
    return {**value, key: mutated_json(value[key], rng)}


def _any_json(rng: random.Random) -> Any:
    """Any value: awkward numbers and words, deep lists, the words of onnxfit's own settings."""
    deep: Any = 1
    for _ in range(rng.choice((3, 2000))):
        deep = [deep]
    plain = [None, True, {}, [], "", "1", [1], {"a": 1}]
    classes = [{"onnxfit:class": {"class": c}} for c in ("os.system", "Adam", "Callable", 3)]
    arrays = [{"onnxfit:array": k} for k in ("0", 7)]
    choices = [*plain, *INTEGERS, *NUMBERS, *WORDS, *PATHS, deep, 10**400, *classes, *arrays]
    return rng.choice(choices)
