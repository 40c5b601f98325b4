"""Data that several tests train on, and what they look at it with."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxfit.callbacks import Callback
from onnxfit.runtime import session


def column(*values: float) -> np.ndarray:
    return np.array(values, np.float32)[:, None]


def classification(rows: int = 96, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 4)).astype(np.float32)
    return x, (x @ rng.normal(size=(4, 3))).argmax(1)


def exchanged(value: Any) -> Any:
    """A state as another process reads it: JSON, and copies of the arrays."""
    arrays: list[np.ndarray] = []

    def stand_in(array: np.ndarray) -> dict[str, int]:
        arrays.append(array.copy())
        return {"array": len(arrays) - 1}

    text = json.dumps(value, default=stand_in)
    return json.loads(text, object_hook=lambda o: arrays[o["array"]] if set(o) == {"array"} else o)


def compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the graphs that are compiled from now on; the list grows."""
    compiled: list[str] = []
    original = session.compile_model

    def counting(model: Any, device: Any, threads: Any, name: str, **settings: Any) -> Any:
        compiled.append(name)
        return original(model, device, threads, name, **settings)

    monkeypatch.setattr(session, "compile_model", counting)
    return compiled


class Recorder(Callback):
    """Every logs of every event, in order."""

    def __init__(self) -> None:
        self.events: list[tuple] = []

    def on_train_batch_end(self, batch, logs):
        self.events.append(("batch", batch, dict(logs)))

    def on_epoch_end(self, epoch, logs):
        self.events.append(("epoch", epoch, dict(logs)))

    def logs(self, event: str, name: str) -> list[float]:
        return [logs.get(name) for kind, _, logs in self.events if kind == event]


def with_changed_description(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Return a copy of a checkpoint, beside it, whose description was changed."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    info = json.loads(entries["onnxfit.json"])
    change(info)
    entries["onnxfit.json"] = json.dumps(info).encode()
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    changed = path.with_name("changed")
    changed.write_bytes(data.getvalue())
    return changed
