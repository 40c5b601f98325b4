"""One case: a damaged input, and the outcome of using it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

from onnxfit.errors import OnnxfitError
from scripts.fuzz.attempt import Stage
from scripts.fuzz.kinds import KINDS
from scripts.fuzz.sandbox import sandbox

TRAINING = ("batch", "train")  # the stages after a trainer is made


def kind_of(number: int) -> str:
    """Return the kind that a number chooses."""
    return _choose(random.Random(number))


def _choose(rng: random.Random) -> str:
    return rng.choices(list(KINDS), [kind.share for kind in KINDS.values()])[0]


class Case:
    """One damaged input. `number` alone determines it, given the same undamaged `originals`.

    - `kind`: one of KINDS; None for the one that the number chooses.
    """

    def __init__(
        self, number: int, originals: Mapping[str, bytes], kind: str | None = None
    ) -> None:
        rng = random.Random(number)
        chosen = _choose(rng)
        self.number = number
        self.kind = kind or chosen
        self.message = ""  # of the onnxfit error, if one was raised
        self.attempt = KINDS[self.kind](rng, originals)

    def __str__(self) -> str:
        return f"case {self.number} ({self.kind}: {self.attempt.original})"

    @property
    def data(self) -> bytes:
        """The damaged file."""
        return self.attempt.files.get(self.attempt.main, b"")

    def run(self, folder: Path, stage: Stage) -> str:
        """Use the input in a sandbox in `folder`, and return the outcome: "trained", "ModelError",
        "StepError in training", ...

        Exceptions that are not onnxfit's are let through, and so is Escape. `stage` is called with
        the name of each stage as it begins.
        """
        stages: list[str] = []

        def begin(name: str) -> None:
            stages.append(name)
            stage(name)

        with sandbox(folder, self.attempt):
            try:
                return self.attempt.run(random.Random(self.number), begin)
            except OnnxfitError as error:
                self.message = str(error)
                suffix = " in training" if stages and stages[-1] in TRAINING else ""
                return type(error).__name__ + suffix
