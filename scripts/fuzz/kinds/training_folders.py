"""Training folders whose manifest, state or model is damaged, with hashes that fit or do not."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
from collections.abc import Mapping
from typing import Any, ClassVar

from onnxfit import Trainer
from onnxfit.training_folder.manifest import MANIFEST, MODEL, STATE
from scripts.fuzz.attempt import Attempt, Stage
from scripts.fuzz.batch import train_one_batch
from scripts.fuzz.checkpoint_mutations import mutated_entry
from scripts.fuzz.data import small_trainer
from scripts.fuzz.sandbox import FIFO, PATHS

FOLDER = "trained"
# names of files that an export might take for its own
OTHERS = ("precious.onnx", "notes.json", "train.onnx.data", "model.onnx.data", "train/x.onnx")


class TrainingFolders(Attempt):
    share: ClassVar[int] = 8
    own: ClassVar[tuple[str, ...]] = (f"{FOLDER}/*.onnx", f"{FOLDER}/*.json", f"{FOLDER}/*.safetensors")  # fmt: skip
    decoys: ClassVar[dict[str, bytes]] = {f"{FOLDER}/{name}": b"precious" for name in OTHERS}

    def make(self, rng: random.Random, originals: Mapping[str, bytes]) -> None:
        self.original = rng.choice(("folder", "folder of adapters"))
        prefix = f"{self.original}/"
        files = {k.removeprefix(prefix): v for k, v in originals.items() if k.startswith(prefix)}
        name = rng.choice((MANIFEST, MANIFEST, MANIFEST, STATE, MODEL, *files))
        files[name] = mutated_entry(name, files[name], rng)
        if name != MANIFEST and rng.random() < 0.9:
            files[MANIFEST] = _with_hashes(files)
        elif rng.random() < 0.2:
            files[MANIFEST] = _with_other_names(files[MANIFEST], rng)
        self.main = f"{FOLDER}/{name}"
        self.files = {f"{FOLDER}/{name}": data for name, data in files.items()}
        if rng.random() < 0.05:
            self._replace_by_link(rng.choice((MANIFEST, STATE, MODEL)), rng)

    def _replace_by_link(self, name: str, rng: random.Random) -> None:
        """Put a link to a pipe, a device or a folder in the place of a file, which is empty."""
        del self.files[f"{FOLDER}/{name}"]
        self.links[f"{FOLDER}/{name}"] = rng.choice((FIFO, "/dev/zero", "/dev/null", "."))
        if name != MANIFEST:
            with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                manifest = json.loads(self.files[f"{FOLDER}/{MANIFEST}"])
                manifest["files"][name]["bytes"] = 0
                self.files[f"{FOLDER}/{MANIFEST}"] = json.dumps(manifest).encode()

    def run(self, rng: random.Random, stage: Stage) -> str:
        stage("make")
        if rng.random() < 0.2:
            trainer = small_trainer()
            trainer.import_state(f"{FOLDER}/{STATE}")
            return train_one_batch(trainer, rng, stage)
        trainer = Trainer.load(FOLDER)
        outcome = train_one_batch(trainer, rng, stage)
        stage("write")
        trainer.export_training(FOLDER)
        return outcome


def _with_hashes(files: Mapping[str, bytes]) -> bytes:
    """Return the manifest with the sizes and hashes of the files."""
    manifest: dict[str, Any] = json.loads(files[MANIFEST])
    for name in manifest["files"]:
        digest = hashlib.sha256(files[name]).hexdigest()
        manifest["files"][name] = {"sha256": digest, "bytes": len(files[name])}
    return json.dumps(manifest).encode()


def _with_other_names(data: bytes, rng: random.Random) -> bytes:
    """Return the manifest with the name of another file, which it may list too."""
    try:
        manifest = json.loads(data)
        name = rng.choice((*PATHS, *OTHERS))
        manifest["model"]["file"] = rng.choice((name, MODEL))
        manifest["files"][name] = rng.choice([*manifest["files"].values()])
        return json.dumps(manifest).encode()
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
        return data
