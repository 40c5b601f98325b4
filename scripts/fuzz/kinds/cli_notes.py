"""The options that `onnxfit fit` leaves beside its checkpoints for `onnxfit resume`."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from scripts.fuzz.attempt import Attempt, Stage
from scripts.fuzz.byte_mutations import mutated_bytes
from scripts.fuzz.checkpoint_mutations import mutated_json
from scripts.fuzz.commands import call, model_and_data
from scripts.fuzz.sandbox import PATHS

HERE = "<the folder of the training>"  # in the place of an absolute path, which differs
NOTE = "run/last.onnxfit.json"
PATH_OPTIONS = ("model", "data", "validation_data", "tensorboard", "checkpoint", "csv", "output")
TRAINING = (
    "fit", "m.onnx", "-d", "d.npz", "--loss", "cross_entropy", "-e", "1", "-b", "5", "--validation-split", "0.25", "--metrics", "accuracy",
    "--checkpoint", "run/last.onnxfit", "-o", "run/out.onnx", "--csv", "run/log.csv", "--tensorboard", "run/board", "-q",
)  # fmt: skip


class CLINotes(Attempt):
    share: ClassVar[int] = 6
    own: ClassVar[tuple[str, ...]] = ("run/*", "work/*")  # of a note, the working folder too

    def make(self, rng: random.Random, originals: Mapping[str, bytes]) -> None:
        self.original = "note"
        self.main = NOTE
        self.links = {"work/link": "../other", "run/link": "../../outside"}
        names = ("run/last.onnxfit", "run/log.csv")
        self.files = {**model_and_data(), **{name: originals[name] for name in names}}
        self.files["work/notes.txt"] = b""
        self.files[NOTE] = _damaged_note(originals[NOTE], rng)

    def run(self, rng: random.Random, stage: Stage) -> str:
        stage("resume")
        note = Path(NOTE)
        note.write_bytes(note.read_bytes().replace(HERE.encode(), os.fsencode(os.getcwd())))
        epochs = ["--epochs", "2"] if rng.random() < 0.9 else []
        path = rng.choice(("../run", "../run/last.onnxfit"))
        os.chdir("work")
        return call("resume", path, *epochs, "-q")


def _damaged_note(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.1:
        return mutated_bytes(data, rng)
    note = json.loads(data)
    for _ in range(rng.choice((1, 1, 2))):
        if isinstance(note, dict) and isinstance(note.get("options"), dict) and rng.random() < 0.6:
            name = rng.choice(PATH_OPTIONS)
            note["options"][name] = _other_path(note["options"].get(name), rng)
        else:
            note = mutated_json(note, rng)
    try:
        return json.dumps(note).encode()
    except RecursionError:
        return b"[" * 100_000


def _other_path(path: Any, rng: random.Random) -> Any:
    """Return another path, relative or absolute, alone or in a list as the option had it."""
    other = rng.choice(
        (*PATHS, "m.onnx", "d.npz", "run/last.onnxfit", "run/../other/new.csv", "work/link/new.csv")
    )
    if rng.random() < 0.5:
        other = f"{HERE}/{other}"
    return [other] if isinstance(path, list) else other
