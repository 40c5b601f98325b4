"""The rows of catalogue.yaml."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

CATALOGUE = Path(__file__).with_name("catalogue.yaml")


@dataclass(frozen=True)
class PublicFile:
    """A file in the wheel of a package, and how to train it.

    - `licence`: the package's, from its metadata.
    - `path`: the place inside the wheel; `sha256` and `size` are the file's, not the wheel's.
    - `losses`: output -> "mse", "binary_cross_entropy" or "cross_entropy".
    - `logits`: the outputs that are raw scores rather than probabilities.
    - `inputs`: input -> its `shape`, and `low` and `high` for uniform numbers or one `value`.
    - `fix`: arguments of Trainer, used only if an error without them names each of them.
    """

    package: str
    version: str
    licence: str
    path: str
    sha256: str
    size: int
    task: str
    losses: dict[str, str]
    inputs: dict[str, dict[str, Any]]
    logits: tuple[str, ...] = ()
    fix: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The package and the file's name, with as many folders as tell files apart."""
        return f"{self.package}: {'/'.join(PurePosixPath(self.path).parts[-2:])}"

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> PublicFile:
        return cls.from_row(json.loads(text))

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> PublicFile:
        return cls(**{**row, "logits": tuple(row.get("logits", ()))})

    @property
    def key(self) -> str:
        """A checksum of the row, by which its result is stored."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def read_catalogue(path: Path = CATALOGUE) -> list[PublicFile]:
    """Return the rows; those of a package share its name, version and licence."""
    packages = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [
        PublicFile.from_row({**{k: v for k, v in package.items() if k != "files"}, **row})
        for package in packages
        for row in package["files"]
    ]
