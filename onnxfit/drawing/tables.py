"""Tables as text and as HTML, whose names may come from an untrusted file."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field

from onnxfit.drawing.labels import clean

Row = Sequence[str]


@dataclass
class Table:
    """Rows of text below a header.

    - `header`: the titles of the columns.
    - `rows`: one text for each column. Spaces at the beginning of the first are an indentation.
    - `right`: the titles of the columns that are aligned to the right.
    - `strong`: numbers of the rows that HTML shows in bold.

    Columns without a text in any row are left out.

    >>> table = Table(["name", "size", "unit"], [["a", "9", ""], ["b", "10", ""]])
    >>> print("\\n".join(table.lines()))
    name  size
    ────  ────
    a     9
    b     10
    """

    header: Row
    rows: Sequence[Row]
    right: frozenset[str] = frozenset()
    strong: frozenset[int] = field(default=frozenset())

    def lines(self) -> list[str]:
        """Return the lines of the table, with a rule below the header."""
        header, *rows = self._columns()
        widths = [max(map(len, column)) for column in zip(header, *rows)]
        rule = ["─" * width for width in widths]
        right = [title in self.right for title in header]
        return [
            "  ".join(
                cell.rjust(width) if is_right else cell.ljust(width)
                for cell, width, is_right in zip(row, widths, right)
            ).rstrip()
            for row in (header, rule, *rows)
        ]

    def html(self) -> str:
        """Return a `<table>`; every text is escaped."""
        header, *rows = self._columns()
        right = [title in self.right for title in header]
        lines = ["<table>", f"<thead>{_html_row('th', header, right)}</thead>", "<tbody>"]
        for i, row in enumerate(rows):
            lines.append(_html_row("td", row, right, strong=i in self.strong))
        return "\n".join([*lines, "</tbody>", "</table>"])

    def _columns(self) -> list[list[str]]:
        """Return the header and the rows, without the empty columns, as printable text."""
        shown = [
            i
            for i, _ in enumerate(self.header)
            if not self.rows or any(row[i].strip() for row in self.rows)
        ]
        return [[clean(row[i]) for i in shown] for row in (self.header, *self.rows)]


def _html_row(tag: str, row: Row, right: Sequence[bool], *, strong: bool = False) -> str:
    cells = []
    for text, is_right in zip(row, right):
        inner = text.lstrip(" ")
        style = f"text-align: {'right' if is_right else 'left'}"
        if len(inner) < len(text):
            style += f"; padding-left: {0.5 + 0.6 * (len(text) - len(inner)):.1f}em"
        inner = html.escape(inner)
        if strong:
            inner = f"<b>{inner}</b>"
        cells.append(f'<{tag} style="{style}">{inner}</{tag}>')
    return f"<tr>{''.join(cells)}</tr>"
