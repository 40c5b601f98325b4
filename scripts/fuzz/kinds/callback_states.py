"""Checkpoints in which the state of one callback is damaged, loaded beside decoys."""

from __future__ import annotations

import io
import json
import random
import zipfile
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from onnxfit import Trainer
from onnxfit.callbacks import (
    BackupAndRestore,
    BatchSizeFinder,
    Callback,
    CSVLogger,
    EarlyStopping,
    JSONLLogger,
    LearningRateFinder,
    LearningRateScheduler,
    ModelCheckpoint,
    ReduceLROnPlateau,
    StochasticWeightAveraging,
    SwapEMAWeights,
    TensorBoard,
    Timer,
    Unfreeze,
)
from scripts.fuzz.attempt import Attempt, Stage
from scripts.fuzz.byte_mutations import INTEGERS, NUMBERS
from scripts.fuzz.checkpoint_mutations import mutated_json
from scripts.fuzz.data import SMALL
from scripts.fuzz.sandbox import PATHS

INFO = "onnxfit.json"
# Every callback that keeps a state. Files are in the folder `own`; History is fit's own.
CALLBACKS: tuple[Callable[[], Callback], ...] = (
    lambda: BackupAndRestore("own/backup", background=False),
    lambda: CSVLogger("own/log.csv"),
    lambda: EarlyStopping("loss", restore_best_weights=True),
    lambda: JSONLLogger("own/log.jsonl"),
    lambda: LearningRateScheduler(lambda epoch, rate: rate),
    lambda: ModelCheckpoint("own/epoch-{epoch}.ckpt", monitor="loss", top_k=1, save_last=True),
    lambda: ModelCheckpoint("own/best.ckpt", monitor="loss", save_best_only=True),
    lambda: ReduceLROnPlateau("loss"),
    lambda: StochasticWeightAveraging(1),
    lambda: SwapEMAWeights(),
    lambda: TensorBoard("own/board", write_graph=False, histogram_freq=1),
    lambda: Timer(),
    lambda: Unfreeze({1: "fc0.*"}),
    lambda: LearningRateFinder(steps=3),
    lambda: BatchSizeFinder(min_gain=None, steps_per_trial=1, init_val=4, max_trials=2),
)
FINDERS = (LearningRateFinder, BatchSizeFinder)  # they run before training begins


# paths that are almost those of a callback
NEAR = (
    "own/precious.ckpt", "own/epoch-9.ckpt", "own/epoch-../../precious.ckpt", "own/epoch-1/../precious.ckpt", "./own/epoch-1.ckpt",
    "own//epoch-1.ckpt", "own/epoch-1.ckpt/", "own/epoch-1.ckpt\0", "own/epoch-1.ckpt\n", "own/epoch-١.ckpt", "own/epoch-nan.ckpt",
    "own/epoch-3.ckpt", "own/epoch-4.ckpt", "own/last.ckpt", "own/best.ckpt", "OWN/epoch-1.ckpt", "another0run0", "0" * 12, "own/log.csv",
)  # fmt: skip


class CallbackStates(Attempt):
    share: ClassVar[int] = 10
    own: ClassVar[tuple[str, ...]] = (
        "own/log.csv", "own/log.jsonl", "own/epoch-*.ckpt", "own/last.ckpt", "own/best.ckpt", "own/board", "own/board/*", "own/backup",
        "own/backup/backup-*.onnxfit",
    )  # fmt: skip
    decoys: ClassVar[dict[str, bytes]] = {
        "own/precious.ckpt": b"precious",
        "own/backup/precious.txt": b"precious",
        "own/board/train/events.out.tfevents.1.another0run0.0000": b"another run",
        "own/board/train/precious.txt": b"precious",
    }

    def make(self, rng: random.Random, originals: Mapping[str, bytes]) -> None:
        self.new_callback = rng.choice(CALLBACKS)
        key = self.new_callback().state_key
        self.original = key
        self.main = "own/damaged.onnxfit"
        self.files[self.main] = _with_damaged_state(originals["callbacks"], key, rng)
        self.files["own/epoch-4.ckpt/file"] = b""
        # no epoch of the case, so that only a damaged state names it
        self.links = {"own/epoch-9.ckpt": "../precious.txt"}
        self.files["own/log.csv"] = b"epoch,loss\n0,1.0\n1,0.5\n"
        self.files["own/log.jsonl"] = b'{"epoch": 0, "loss": 1.0}\n'

    def run(self, rng: random.Random, stage: Stage) -> str:
        stage("make")
        trainer = Trainer.load(self.main)
        stage("train")
        fit(trainer, [self.new_callback()], epochs=3)
        return "trained"


def fit(trainer: Trainer, callbacks: list[Callback], epochs: int) -> None:
    """Train with callbacks as every case does, and the checkpoint that the cases damage."""
    x, y = SMALL["X"], SMALL["y"]
    trainer.fit(
        x, y, epochs=epochs, batch_size=4, validation_data=(x, y), callbacks=callbacks, verbose=0
    )


def _with_damaged_state(checkpoint: bytes, key: str, rng: random.Random) -> bytes:
    """Return the checkpoint with a mutation of one callback's state."""
    with zipfile.ZipFile(io.BytesIO(checkpoint)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    info = json.loads(entries[INFO])
    states = info["callbacks"]
    for _ in range(rng.choice((1, 1, 2, 3))):
        mutate = rng.choice((mutated_json, _with_other_value, _with_same_types, _with_same_types))
        states[key] = mutate(states[key], rng)
    try:
        entries[INFO] = json.dumps(info).encode()
    except RecursionError:
        return checkpoint
    archived = io.BytesIO()
    with zipfile.ZipFile(archived, "w") as archive:
        for name, content in entries.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return archived.getvalue()


def _with_other_value(state: Any, rng: random.Random) -> Any:
    """Replace one value of a state by a path, a number, or what the state's code expects."""
    decoys = ("own/precious.ckpt", "own/epoch-7.ckpt", "another0run0", "own/log.csv")
    others: list[Any] = [
        *PATHS,
        *decoys,
        *decoys,
        *INTEGERS,
        *NUMBERS,
        10**400,
        [],
        {},
        None,
        True,
        "7",
    ]
    pairs = [[path, 0.5] for path in (*PATHS, *NEAR, *NEAR)]
    others += [[pair] for pair in pairs] + [[pair, ["own/epoch-1.ckpt", 1.0]] for pair in pairs]
    others += [[path] for path in NEAR]
    others += [{path: 0} for path in (*PATHS, *NEAR)]
    if not isinstance(state, dict) or not state:
        return rng.choice(others)
    return {**state, rng.choice(list(state)): rng.choice(others)}


def _with_same_types(state: Any, rng: random.Random) -> Any:
    """Replace one number, flag or text somewhere in a state by another, so that it is used."""
    if isinstance(state, dict) and state:
        key = rng.choice(list(state))
        return {**state, key: _with_same_types(state[key], rng)}
    if isinstance(state, list) and state:
        index = rng.randrange(len(state))
        other = _with_same_types(state[index], rng)
        return [*state[:index], *[other] * rng.choice((1, 1, 2, 100)), *state[index + 1 :]]
    if isinstance(state, bool):
        return not state
    if isinstance(state, int):
        return rng.choice(INTEGERS)
    if isinstance(state, float):
        return rng.choice((*NUMBERS, *INTEGERS))
    if isinstance(state, str):
        return rng.choice(("0", "1", "7", *NEAR))
    return rng.choice((1, 0.5, NEAR[0], [], {}))
