"""Templates of file names, such as `{epoch:03d}-{val_loss:.3f}.ckpt`.

A field is a name from the logs, and after a colon a format, as in `str.format`. Other than there,
the name may have any characters but braces: exporters call outputs `Identity:0` or `/head/Gemm`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from typing import Any

from onnxfit.errors import SettingError, UnknownNameError

__all__ = ["fields", "fill", "parts", "pattern", "split", "split_path"]

PIECE = re.compile(r"(?P<text>\{\{|\}\}|[^{}]+)|\{(?P<field>[^{}]*)\}")


def parts(template: str) -> list[tuple[str, str | None]]:
    """Return the literal texts of a template, each with the next field: its name and format.

    - `template`: text with fields in braces; `{{` and `}}` are braces. Text after the last field
      has None.

    SettingError: a brace is not closed, or a name contains a brace.
    """
    found: list[tuple[str, str | None]] = []
    text, end = "", 0
    while end < len(template):
        piece = PIECE.match(template, end)
        if piece is None:
            raise SettingError(
                f"The path template {template!r} is not valid from {template[end:]!r} on. Put each"
                " name into braces, as in '{epoch}-{val_loss:.3f}.ckpt'. The name itself cannot"
                " have braces."
            )
        end = piece.end()
        if piece["field"] is None:
            text += piece["text"].replace("{{", "{").replace("}}", "}")
        else:
            found.append((text, piece["field"]))
            text = ""
    return [*found, (text, None)] if text else found


def fields(template: str) -> list[str]:
    """Return the fields of a template, each a name and its format, in order.

    SettingError: as for `parts`.
    """
    return [field for _, field in parts(template) if field is not None]


def split_path(template: str) -> tuple[str, str]:
    """Return the folder and the name of a template, as `os.path.split` does for a path.

    A separator of folders in the name of a field does not count.

    >>> split_path("runs/{val_/head/Gemm_loss:.3f}.ckpt")
    ('runs', '{val_/head/Gemm_loss:.3f}.ckpt')
    """
    hidden = PIECE.sub(lambda m: m[0] if m["field"] is None else "_" * len(m[0]), template)
    folder, name = os.path.split(hidden)
    return template[: len(folder)], template[len(template) - len(name) :]


def split(field: str, known: Collection[str]) -> tuple[str, str]:
    """Return the name and the format of a field.

    A colon may belong to the name. The longest name that is known is chosen; if none is known, the
    text before the last colon.

    >>> split("val_out:0_loss:.3f", ["val_loss", "val_out:0_loss"])
    ('val_out:0_loss', '.3f')
    """
    ends = [len(field), *(i for i in reversed(range(len(field))) if field[i] == ":")]
    for end in ends:
        if field[:end] in known:
            return field[:end], field[end + 1 :]
    name, colon, specification = field.rpartition(":")
    return (name, specification) if colon else (field, "")


def fill(template: str, values: Mapping[str, Any]) -> str:
    """Return the name that a template gives for the values of its fields.

    - `values`: name -> number.

    UnknownNameError: a field is not among the names. SettingError: a number does not have the
    format of its field.
    """
    filled = []
    for text, field in parts(template):
        filled.append(text)
        if field is None:
            continue
        name, specification = split(field, values)
        if name not in values:
            raise UnknownNameError(f"field of the filepath {template!r}", name, values)
        try:
            filled.append(format(values[name], specification))
        except ValueError as error:
            raise SettingError(
                f"The path template {template!r} cannot be filled: in its field {{{field}}},"
                f" {error}. Use a format such as {{val_loss:.3f}}, or {{epoch:03d}} for the whole"
                " numbers epoch and step."
            ) from None
    return "".join(filled)


def pattern(template: str) -> re.Pattern[str]:
    """Return a pattern that matches every name that a template gives when filled with numbers.

    A field matches a number in any notation, NaN, or an infinity. It therefore never matches a
    separator of folders, or a name without a digit, such as `..`.

    - `template`: text with fields, as `parts` takes it.
    """
    text = ""
    for before, field in parts(template):
        text += re.escape(before)
        if field is not None:
            # The format may have a fill character.
            _, specification = split(field, ())
            fill_characters = re.escape(re.sub(r"[/\\\w]", "", specification))
            other = rf"[-+., _%#a-fA-FxXo{fill_characters}]*"
            text += rf"(?:{other}\d(?:{other}\d)*{other}|{other}(?:nan|inf|NAN|INF){other})"
    return re.compile(text)
