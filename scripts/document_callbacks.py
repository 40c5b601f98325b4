"""Write what is generated from the callbacks: `make docs`.

    python scripts/document_callbacks.py [--check]

- docs/callbacks.md: the table of callbacks, from the first sentences of their docstrings.
- onnxfit/callbacks/__init__.py: the imports for type checkers, which cannot search a folder.

With --check nothing is written; the exit status is 1 where a file is out of date.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

from onnxfit import callbacks
from onnxfit.callbacks import Callback
from onnxfit.registry import registry

ROOT = Path(__file__).parents[1]
MAX_LINE_LENGTH = 100


def table() -> list[str]:
    """Return the lines of the table: signature and first sentence of every callback."""
    classes = {kind.__name__: kind for kind in registry("onnxfit.callbacks", Callback).values()}
    rows = [
        f"| `{signature(kind)}` | {first_sentence(kind)} |"
        for name, kind in sorted(classes.items())
        if name != "Callback"
    ]
    return ["| callback | purpose |", "|---|---|", *rows]


def signature(kind: type) -> str:
    """Return the first argument of a class with its default, and "…" for further ones."""
    parameters = list(inspect.signature(kind).parameters.values())
    required = [p for p in parameters[1:] if p.default is p.empty and p.kind is p.KEYWORD_ONLY]
    shown = [text(parameter) for parameter in [*parameters[:1], *required]]
    return f"{kind.__name__}({', '.join([*shown, *['…'] * (len(parameters) > len(shown))])})"


def text(parameter: inspect.Parameter) -> str:
    """Return a parameter as it is written in a call."""
    if parameter.kind is parameter.VAR_KEYWORD:
        return f"**{parameter.name}"
    if parameter.default is parameter.empty:
        return parameter.name
    default = repr(parameter.default).replace("'", '"')
    return f"{parameter.name}={default}"


def first_sentence(kind: type) -> str:
    """Return the first sentence of a docstring."""
    return " ".join(inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].split())


def imports() -> list[str]:
    """Return an import of every public name, as type checkers need it to be re-exported."""
    lines = []
    for name in callbacks.__all__:
        module = getattr(callbacks, name).__module__
        line = f"    from {module} import {name} as {name}"
        if len(line) > MAX_LINE_LENGTH:
            line = f"    from {module} import (\n        {name} as {name},\n    )"
        lines.append((module, name.lower(), line))
    return [line for *_, line in sorted(lines)]


def replaced(content: str, begin: str, end: str, lines: list[str]) -> str:
    """Return a file's content with other lines between two markers."""
    pattern = re.compile(f"(?<={re.escape(begin)}\n).*?(?=^ *{re.escape(end)})", re.S | re.M)
    new, count = pattern.subn(lambda _: "".join(line + "\n" for line in lines), content)
    if count != 1:
        raise SystemExit(
            f"The markers {begin!r} and {end!r} were not found once, but {count} times."
        )
    return new


def main(check: bool) -> int:
    targets = [
        (ROOT / "docs" / "callbacks.md", "<!-- begin of generated table -->", "<!-- end of generated table -->", table()),
        (ROOT / "onnxfit" / "callbacks" / "__init__.py", "# begin of generated imports", "# end of generated imports", imports()),
    ]  # fmt: skip
    stale = []
    for path, begin, end, lines in targets:
        content = path.read_text(encoding="utf-8")
        new = replaced(content, begin, end, lines)
        if new != content:
            stale.append(path.relative_to(ROOT).as_posix())
            if not check:
                path.write_text(new, encoding="utf-8")
    if check and stale:
        print(f"Out of date: {', '.join(stale)}. Run `make docs`.", file=sys.stderr)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
