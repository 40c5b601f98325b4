"""Docstrings of onnxfit as reStructuredText, which autodoc of Sphinx reads: they are Markdown with formulas."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

# Parts of a line that are no prose: code, formulas and links.
INLINE = re.compile(
    r"`(?P<code>[^`]+)`|\$(?P<math>[^$]+)\$|\[(?P<text>[^\]]+)\]\((?P<url>[^)\s]+)\)"
)


def restructured(docstring: str, targets: dict[str, str]) -> str:
    """Return a docstring in reStructuredText; `targets` has the full name of what code links to."""
    blocks = re.split(r"\n[ \t]*\n", docstring)
    return "\n\n".join(piece for block in blocks for piece in _pieces(block, targets))


def _pieces(block: str, targets: dict[str, str]) -> Iterator[str]:
    """Yield a paragraph, a list or an example; a formula that stands alone is a piece of its own."""
    if re.match(r"\s*>>>", block):
        yield block
        return
    indent = re.match(r" *", block)[0]  # type: ignore[index]
    for i, piece in enumerate(re.split(r"\$\$(.*?)\$\$", block, flags=re.S)):
        if i % 2:
            yield f"{indent}.. math:: {' '.join(piece.split())}"
        elif piece.strip(" \n.,"):
            # reStructuredText begins a list only after an empty line
            text = re.sub(r"(?m)^(?! *- )(.*\S.*)\n(?= *- )", r"\1\n\n", piece.strip("\n"))
            yield INLINE.sub(partial(_inline, targets=targets), text)


def _inline(match: re.Match[str], targets: dict[str, str]) -> str:
    if match["math"]:
        return f"\\ :math:`{' '.join(match['math'].split())}`\\ "
    if match["url"]:
        return f"`{match['text']} <{match['url']}>`__"
    name = targets.get(match["code"].removeprefix("onnxfit."))
    code = " ".join(match["code"].split())
    return f"\\ :py:obj:`{code} <{name}>`\\ " if name else f"\\ ``{code}``\\ "
