"""The base class of the kinds of damaged input."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

Stage = Callable[[str], None]  # called with the name of each stage as it begins


class Attempt(ABC):
    """One damaged input, and what a user does with it in a sandbox.

    - `share`: how often the kind comes, compared with the other kinds.
    - `own`: patterns of the paths in the sandbox that the user named, and that may be written.
    - `decoys`: files in the sandbox that may not change, although a pattern in `own` fits.
    - `files`: the files of the input by their paths in the sandbox. `main` is the damaged one.
    - `links`: symbolic links by their paths in the sandbox, and where each leads.
    - `original`: a word for the undamaged input.
    """

    share: ClassVar[int]
    own: ClassVar[tuple[str, ...]] = ()
    decoys: ClassVar[dict[str, bytes]] = {}

    def __init__(self, rng: random.Random, originals: Mapping[str, bytes]) -> None:
        self.original = ""
        self.main = "damaged"
        self.files: dict[str, bytes] = {}
        self.links: dict[str, str] = {}
        self.make(rng, originals)

    @abstractmethod
    def make(self, rng: random.Random, originals: Mapping[str, bytes]) -> None:
        """Set `files` and `main`; nothing but `rng` and `originals` may decide on them."""

    @abstractmethod
    def run(self, rng: random.Random, stage: Stage) -> str:
        """Use the input in the working folder, which is the sandbox, and return the outcome.

        Every exception is let through.
        """
