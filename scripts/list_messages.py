"""List the messages that a user may read: `python scripts/list_messages.py [FOLDER]`.

One line for each place that raises an error or warns: file and line, class, and text. What is
filled in stands in braces, as in the f-strings of the code. Whoever edits messages reads this list
from top to bottom; whoever has not seen the code should understand each line.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "onnxfit"


@dataclass(frozen=True)
class Message:
    """A text that the code shows: where it stands, its class, and the text with names in braces."""

    file: str
    line: int
    kind: str
    text: str


def messages(folder: Path = PACKAGE) -> Iterator[Message]:
    """Yield the messages of every module in a folder, file by file, from top to bottom."""
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder.parent).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found = [m for node in ast.walk(tree) for m in _of_node(name, node)]
        yield from sorted(found, key=lambda message: message.line)


def _of_node(file: str, node: ast.AST) -> Iterator[Message]:
    if not isinstance(node, ast.Call) or not node.args:
        return
    called = ast.unparse(node.func)
    kind = called.rpartition(".")[2]
    if kind in ("warn", "warn_user"):
        category = node.args[1] if len(node.args) > 1 else None
        kind = "UserWarning" if category is None else ast.unparse(category)
    elif not (kind.endswith("Error") and kind[0].isupper()):
        return
    texts = [text for text in map(_text, node.args) if " " in text]
    if texts:
        yield Message(file, node.lineno, kind, " ".join(" ".join(texts).split()))


def _text(node: ast.expr) -> str:
    """Return the text of an argument; an expression that is no text stands in braces."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value)}}}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return f"{{{ast.unparse(node)}}}"


def main() -> None:
    for message in messages(*map(Path, sys.argv[1:2])):
        print(f"{message.file}:{message.line}  {message.kind}\n    {message.text}")


if __name__ == "__main__":
    main()
