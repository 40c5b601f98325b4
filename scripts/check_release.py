"""Say what a release lacks: `python scripts/check_release.py v0.1.0`, of the tag that releases it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# file -> how to find the version that it names
VERSIONS: dict[str, Callable[[str], str | None]] = {
    "onnxfit/__init__.py": lambda text: _found(r'^__version__ = "(.+)"', text),
    "CITATION.cff": lambda text: _found(r"^version: (.+)", text),
    "CHANGELOG.md": lambda text: _found(r"^## \[(.+)\] - \d{4}-\d\d-\d\d$", text),
    "js/package.json": lambda text: json.loads(text)["version"],
    "js/package-lock.json": lambda text: json.loads(text)["version"],
}
PLACEHOLDER = "https://example.org"


def _found(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text, re.MULTILINE)
    return match[1] if match else None


def problems(tag: str, root: Path = ROOT) -> list[str]:
    """Return a sentence for each thing that must be done before a tag is pushed."""
    version, found = tag.removeprefix("v"), []
    for file, version_in in VERSIONS.items():
        named = version_in((root / file).read_text(encoding="utf-8"))
        if named != version:
            found.append(f"{file} names the version {named}, but the tag is {tag}.")
    if PLACEHOLDER in (root / "pyproject.toml").read_text(encoding="utf-8"):
        found.append(f"[project.urls] of pyproject.toml still has {PLACEHOLDER}.")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(problems(sys.argv[1])) or None)
