"""Objects that a notebook shows as HTML.

Every text is escaped, and pictures are embedded as images, in which browsers run no script: names
may come from an untrusted file.
"""

from __future__ import annotations

import base64
import html
import sys
from collections.abc import Iterable
from typing import Any

from onnxfit.drawing.labels import clean


def in_notebook() -> bool:
    """Return whether the code runs in a Jupyter kernel."""
    # A Jupyter kernel has always imported IPython.
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_ipython is not None and hasattr(get_ipython(), "kernel")


class TextWithHtml(str):
    """A str that a notebook shows as HTML.

    - `text`: the text.
    - `markup`: the HTML.
    """

    markup: str

    def __new__(cls, text: str, markup: str) -> TextWithHtml:
        made = super().__new__(cls, text)
        made.markup = markup
        return made

    def __getnewargs__(self) -> Any:  # for pickle and copy
        return str(self), self.markup

    def _repr_html_(self) -> str:
        return self.markup


class Png(bytes):
    """The bytes of a PNG file, which a notebook shows as a picture."""

    def _repr_html_(self) -> str:
        return image("png", self)


def image(kind: str, data: bytes) -> str:
    """Return the HTML of a picture, at most as wide as the page.

    - `kind`: "png" or "svg+xml".
    - `data`: the bytes of the file.
    """
    encoded = base64.b64encode(data).decode()
    return f'<img src="data:image/{kind};base64,{encoded}" style="max-width: 100%">'


def preformatted(text: str) -> str:
    """Return the HTML of a `text` in a font of equal widths."""
    cleaned = "\n".join(map(clean, text.splitlines()))
    # The style sheets of notebooks give a <pre> among results the font of the page.
    style = "font-family: monospace; white-space: pre; overflow-x: auto"
    return f'<pre style="{style}">{html.escape(cleaned)}</pre>'


def paragraph(text: str) -> str:
    """Return the HTML of one line of a `text`."""
    return f"<p>{html.escape(clean(text))}</p>"


def bullets(texts: Iterable[str]) -> str:
    """Return the HTML of a list of `texts`; nothing without any."""
    items = [f"<li>{html.escape(clean(text.strip()))}</li>" for text in texts]
    return f"<ul>{''.join(items)}</ul>" if items else ""
