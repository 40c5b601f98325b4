"""The output streams of progress: a terminal, a notebook or a file."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable
from typing import Any, TextIO

from onnxfit.drawing.notebook import in_notebook

__all__ = ["OutputAboveBar", "in_notebook", "progress_stream", "shows_bars"]


def progress_stream() -> TextIO:
    """Return standard error, or in a notebook standard output: notebooks show errors in red."""
    return sys.stdout if in_notebook() else sys.stderr


def shows_bars() -> bool:
    """Return whether a bar can be redrawn in place: in a terminal, or by a widget in a notebook.

    Without ipywidgets, a notebook stores every drawing of a bar as a separate line.
    """
    if in_notebook():
        return importlib.util.find_spec("ipywidgets") is not None
    return sys.stderr.isatty()


class OutputAboveBar:
    """Standard output and error that remove a progress bar before they write.

    The output of a callback therefore begins on its own line. The bar is drawn again below.

    - `hide`: removes the bar from the screen.
    """

    def __init__(self, hide: Callable[[], None]) -> None:
        self._streams = {
            name: _Stream(getattr(sys, name), hide)
            for name in ("stdout", "stderr")
            if getattr(sys, name) is not None  # pythonw has no streams
        }
        for name, stream in self._streams.items():
            setattr(sys, name, stream)

    def end_line(self) -> None:
        """End the line that the last `print` may have left open, so that a bar can be drawn."""
        for stream in self._streams.values():
            if stream.is_inside_line:
                stream.write("\n")
                stream.flush()

    def close(self) -> None:
        """Restore the original streams, unless other code has replaced them since."""
        for name, stream in self._streams.items():
            if getattr(sys, name) is stream:
                setattr(sys, name, stream.wrapped)


class _Stream:
    """Stream that calls a function before it writes."""

    def __init__(self, stream: TextIO, before: Callable[[], None]) -> None:
        self.wrapped = stream
        self.is_inside_line = False
        self._before = before

    def write(self, text: str) -> int:
        self._before()
        if text:
            self.is_inside_line = not text.endswith("\n")
        return self.wrapped.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)
