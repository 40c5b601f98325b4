"""Messages about Python arguments, in the words of the command line.

Errors and warnings below the command line speak of `Trainer(fixed_inputs={"sr": 16000})`. A user of
`onnxfit fit` reads `--fixed-input sr=16000`. The options of a command have the names of the
arguments that they set, so the translation needs no table of messages.
"""

from __future__ import annotations

import ast
import re
import shlex
import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import click

from onnxfit.drawing.labels import stream_width

# An argument whose option has another name
OTHER_NAMES = {"adapters": "lora"}
# Calls whose arguments are options, in addition to the functions of the commands
CALLEES = {"Trainer", "fit", "evaluate", "predict", "load"}
# Objects whose settings are SETTING=VALUE,... of an option
SETTINGS_OBJECTS = {"Quantization": "quantization", "LoRA": "lora"}
# Arguments that are settings of losses, optimizers or schedules, too, unless a value follows
OTHER_SETTINGS = {"learning_rate"}
CALL = re.compile(r"(?<![\w.`=-])(?:\w+\.)*([A-Za-z_]\w*)\(")
BARE_KEYWORD = re.compile(r"(?<![\w.:,=(-])([a-z]+(?:_[a-z]+)*)=(?=[\s,.;)]|$)")
KEYWORD = re.compile(
    r"(?<![\w.:,=(-])([a-z]+(?:_[a-z]+)*)=(?=[\[{(\'\"\d.]|(?:None|True|False)\b|onnxfit\.)"
)
CALLED = re.compile(r"[A-Za-z_][\w.]*(?=\()")
NUMBER_OR_NAME = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?|\.\.\.|\w+")
CLOSING = {"(": ")", "[": "]", "{": "}"}

Options = Mapping[str, click.Option]  # argument -> option


def options_by_argument(command: click.Command) -> dict[str, click.Option]:
    """Return the options of a command by the names of the arguments that they set."""
    options = {str(p.name): p for p in command.params if isinstance(p, click.Option)}
    others = {name: options[own] for name, own in OTHER_NAMES.items() if own in options}
    return {**options, **others}


def wrapped(message: str, before: str) -> str:
    """Return a message in which a terminal breaks no word; the message itself for a file or pipe.

    - `before`: the text in front of the message, in the same line.
    """
    width = stream_width(sys.stderr)
    if width is None:
        return message
    first, *others = message.split("\n")
    settings: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    indent = " " * len(before)
    lines = [textwrap.fill(first, width, initial_indent=indent, **settings)[len(before) :]]
    lines += [textwrap.fill(line, width, **settings) for line in others]
    return "\n".join(lines)


def in_options(message: str, command: click.Command, commands: Collection[str] = ()) -> str:
    """Return a message with the options of `command` instead of Python's arguments and calls.

    Arguments without an option stay as they are.

    - `commands`: the names of all commands. A call of their function becomes the command.
    """
    options = options_by_argument(command)
    functions = {name.replace("-", "_"): name for name in commands}
    position, parts = 0, []
    for start, end, call in _calls(message):
        between = message[position:start]
        text = _translated(call, options, functions) or message[start:end]
        parts += [_words(_keywords(between, options), options), text]
        position = end
    return "".join([*parts, _words(_keywords(message[position:], options), options)])


def name_of(option: click.Option) -> str:
    """Return the long name of an option, such as --fixed-input."""
    own = f"--{str(option.name).replace('_', '-')}"
    return own if own in option.opts else max(option.opts, key=len)


# ---------------------------------------------------------------------- places in a message


def _calls(message: str) -> Iterator[tuple[int, int, ast.Call]]:
    """Return the start, the end and the syntax tree of each call, such as Trainer(clip_norm=1)."""
    position = 0
    while match := CALL.search(message, position):
        position = _end_of(message, match.end() - 1)
        call = _parsed(message[match.start() : position])
        if isinstance(call, ast.Call):
            yield match.start(), position, call
        else:
            position = match.end()


def _keywords(message: str, options: Options) -> str:
    """Replace arguments with a value, such as clip_norm=1."""
    position, parts = 0, []
    while match := KEYWORD.search(message, position):
        end = _end_of(message, match.end())
        value = _parsed(message[match.end() : end])
        text = None
        if match[1] in options and value is not None:
            text = _option(options[match[1]], value)
        stop = match.end() if text is None else end
        parts += [message[position : match.start()], text or message[match.start() : stop]]
        position = stop
    message = "".join([*parts, message[position:]])
    return BARE_KEYWORD.sub(lambda m: name_of(options[m[1]]) if m[1] in options else m[0], message)


def _words(message: str, options: Options) -> str:
    """Replace the bare names of arguments, such as fixed_inputs, which are no English words."""
    for name in options:
        if "_" in name and name not in OTHER_SETTINGS:
            word = rf"(?<![\w.:,=(/'\"`-]){name}(?![\w=('\"`/]|\.\w)"
            message = re.sub(word, name_of(options[name]), message)
    return message


def _end_of(text: str, start: int) -> int:
    """Return the end of the expression that begins at `start`: brackets, a string or a word."""
    called = CALLED.match(text, start)
    if called:
        return _end_of(text, called.end())
    if text[start : start + 1] not in ("'", '"', *CLOSING):
        match = NUMBER_OR_NAME.match(text, start)
        return match.end() if match else start
    waiting: list[str] = []
    position = start
    while position < len(text):
        character = text[position]
        if character in ("'", '"'):
            closing = text.find(character, position + 1)
            if closing < 0:
                return start
            position = closing
        elif character in CLOSING:
            waiting.append(CLOSING[character])
        elif waiting and character == waiting[-1]:
            waiting.pop()
        position += 1
        if not waiting:
            return position
    return start


def _parsed(text: str) -> ast.expr | None:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


# ---------------------------------------------------------------------- options and values


def _translated(call: ast.Call, options: Options, functions: Mapping[str, str]) -> str | None:
    """Return the options or the command of a call; None if an argument has no option.

    - `functions`: a function of Python -> the command that calls it.
    """
    callee = _last_name(call.func)
    own = [(keyword.arg or "", keyword.value) for keyword in call.keywords]
    if callee in SETTINGS_OBJECTS:
        return _settings_option(SETTINGS_OBJECTS[callee], own, options)
    if own and callee in CALLEES | {*functions} and all(name in options for name, _ in own):
        return " ".join(_option(options[name], value) for name, value in own)
    return f"`onnxfit {functions[callee]}`" if callee in functions and not own else None


def _settings_option(
    name: str, own: Sequence[tuple[str, ast.expr]], options: Options
) -> str | None:
    """Return the option of a Quantization(...) or LoRA(...), and those of its files."""
    if name not in options:
        return None
    settings = [f"{n}={_value(value)}" for n, value in own if n not in options or n == "weights"]
    files = [_option(options[n], value) for n, value in own if n in options and n != "weights"]
    first = [f"{name_of(options[name])} {shlex.quote(','.join(settings))}"] if settings else []
    return " ".join([*first, *files]) or name_of(options[name])


def _option(option: click.Option, value: ast.expr) -> str:
    """Return an option with its value, once for each item of a dict or list."""
    name = name_of(option)
    if isinstance(value, ast.Constant) and value.value is ...:
        return name if option.is_flag else f"{name} {_placeholder(option)}"
    if option.is_flag:
        return name if isinstance(value, ast.Constant) and value.value is True else f"no {name}"
    choices = getattr(option.type, "choices", ())
    if isinstance(value, ast.Constant) and value.value is None and "none" not in choices:
        return f"no {name}"
    if isinstance(value, ast.Dict):
        placeholder = _placeholder(option).rpartition("=")[2]
        items = [(k, _value(v, placeholder)) for k, v in zip(value.keys, value.values) if k]
        texts = [f"{_value(key)}={item}" for key, item in items]
    elif isinstance(value, (ast.List, ast.Tuple)) and option.multiple:
        texts = list(map(_value, value.elts))
    else:
        settings = _settings_of(value)
        texts = [_value(value) if settings is None else settings]
    return " ".join(f"{name} {shlex.quote(text)}" for text in texts) or name


def _placeholder(option: click.Option) -> str:
    """Return what the help of an option shows for its value, such as NAME=VALUE."""
    return re.sub(r"\[.*?\]", "", option.metavar or "VALUE")


def _settings_of(value: ast.expr) -> str | None:
    """Return the settings of a LoRA(...) or Quantization(...), None for any other value."""
    if not isinstance(value, ast.Call) or _last_name(value.func) not in SETTINGS_OBJECTS:
        return None
    return ",".join(f"{keyword.arg}={_value(keyword.value)}" for keyword in value.keywords)


def _value(value: ast.expr, placeholder: str = "...") -> str:
    """Return a value as an option takes it. A variable is a placeholder in capitals.

    - `placeholder`: the text for an ellipsis.
    """
    if isinstance(value, ast.Constant):
        constant = value.value
        if constant is ...:
            return placeholder
        if constant is None or isinstance(constant, bool):
            return str(constant).lower()
        return str(constant)
    if isinstance(value, ast.Name):
        return value.id.upper()
    if isinstance(value, (ast.List, ast.Tuple)):
        return ",".join(map(_value, value.elts))
    if isinstance(value, ast.Call):
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", _last_name(value.func)).lower()
        settings = ",".join(f"{k.arg}={_value(k.value)}" for k in value.keywords)
        return f"{name}:{settings}" if settings else name
    return ast.unparse(value)


def _last_name(function: ast.expr) -> str:
    return ast.unparse(function).rsplit(".", 1)[-1]
