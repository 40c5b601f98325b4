"""Templates of file names, such as `{epoch:03d}-{val_loss:.3f}.ckpt`."""

from __future__ import annotations

import re
import string

from onnxfit.errors import SettingError

__all__ = ["fields", "parts", "pattern"]


def parts(template: str) -> list[tuple[str, str | None, str]]:
    """Return the literal texts of a template, each with the name and format of the next field.

    - `template`: text with fields, as `str.format` takes it. Text after the last field has no
      name.

    SettingError: `str.format` cannot read the template.
    """
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as error:
        raise SettingError(f"The path template {template!r} is not valid: {error}.") from error
    return [(text, field, specification or "") for text, field, specification, _ in parsed]


def fields(template: str) -> list[str]:
    """Return the names of the fields of a template, in order.

    - `template`: text with fields, as `str.format` takes it.

    SettingError: `str.format` cannot read the template.
    """
    return [field for _, field, _ in parts(template) if field is not None]


def pattern(template: str) -> re.Pattern[str]:
    """Return a pattern that matches every name that a template gives when filled with numbers.

    A field matches a number in any notation, NaN, or an infinity. It therefore never matches a
    separator of folders, or a name without a digit, such as `..`.

    - `template`: text with fields, as `str.format` takes it.
    """
    text = ""
    for before, field, specification in parts(template):
        text += re.escape(before)
        if field is not None:
            # The format may have a fill character.
            fill = re.escape(re.sub(r"[/\\\w]", "", specification))
            other = rf"[-+., _%#a-fA-FxXo{fill}]*"
            text += rf"(?:{other}\d(?:{other}\d)*{other}|{other}(?:nan|inf|NAN|INF){other})"
    return re.compile(text)
