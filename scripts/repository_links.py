"""Links of Markdown files to other files of the repository, for places that show a page elsewhere.

The documentation site and PyPI each have another place for a file; `relinked` changes the links.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(
    r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)"
)
# fenced blocks hold code, in which brackets are no links
PIECES = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def repository() -> str:
    """Return the address of the repository, which pyproject.toml alone has."""
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return re.search(r'^Repository = "(.*)"$', settings, re.MULTILINE)[1]  # type: ignore[index]


def in_repository(path: str, *, raw: bool = False) -> str:
    """Return the address of a file on the forge; a raw one is the file itself, not a page of it."""
    return f"{repository()}/{'raw' if raw else 'blob'}/main/{path}"


def relinked(text: str, folder: str, target_of: Callable[[str, str, bool], str]) -> str:
    """Return a page with other targets for its links to files of the repository.

    - `folder`: the page's folder in the repository, to which its links are relative.
    - `target_of`: (path in the repository, anchor or "", whether it is a picture) -> target.
    """

    def replaced(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match["target"]))
        if not (ROOT / path).exists():
            return match[0]
        target = target_of(path, match["anchor"] or "", bool(match["image"]))
        return f"{match['image']}[{match['text']}]({target})"

    pieces = PIECES.split(text)
    pieces[::2] = [LINK.sub(replaced, prose) for prose in pieces[::2]]
    return "".join(pieces)
