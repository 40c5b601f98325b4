"""`--config`: options from a file. Options on the command line override them."""

from __future__ import annotations

import importlib
import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from onnxfit.errors import InstallationError, SettingError, UnknownNameError
from onnxfit.files import read_regular_file

MAX_DEPTH = 20  # of lists and mappings in YAML
MAX_CHARACTERS = 3000  # of a number in YAML; Python refuses to print much longer integers


def config_option(command: Any) -> Any:
    """Add `--config` to a command."""
    return click.option(
        "--config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=_apply,
        metavar="FILE",
        help=(
            'Options from FILE: .yaml (needs pip install "onnxfit[yaml]") or .json, such as'
            " `epochs: 10` and `metrics: [accuracy]`. Options on the command line override them."
        ),
    )(command)


def _apply(ctx: click.Context, _: click.Parameter, path: Path | None) -> None:
    """Make the file's options the defaults of this command.

    click then converts and checks them like options on the command line.
    """
    if path is not None and not ctx.resilient_parsing:
        ctx.default_map = defaults(read(path), ctx.command, path)


def read(path: Path) -> dict[str, Any]:
    """Return the dict of options in a file.

    SettingError: the file has other contents. InstallationError: YAML needs PyYAML, which is not
    installed.
    """
    try:
        text = read_regular_file(path)
        if path.suffix == ".json":
            contents = json.loads(text)
        else:
            contents = _load_yaml(text, path)
    except (OSError, ValueError, RecursionError) as error:
        raise SettingError(
            f"{str(path)!r} cannot be read: {' '.join(str(error).split())}"
        ) from None
    if contents is None:
        return {}
    if not isinstance(contents, dict):
        raise SettingError(
            f"{str(path)!r} contains a {type(contents).__name__}. Expected options, such as"
            " `epochs: 10`."
        )
    return contents


def defaults(options: Mapping[Any, Any], command: click.Command, path: Path) -> dict[str, Any]:
    """Return the options of a file, by click's names.

    `batch-size` and `batch_size` are the same option. An option that is null is left out.
    """
    known = {
        _names(p)[0]: p
        for p in command.params
        if p.name != "config" and not getattr(p, "is_eager", False)
    }
    aliases = {alias: name for name, p in known.items() for alias in _names(p)}
    values = {}
    for key, value in options.items():
        name = str(key).replace("_", "-")
        if name not in aliases:
            raise UnknownNameError(
                f"option of `onnxfit {command.name}` (from {str(path)!r})", key, known
            )
        parameter = known[aliases[name]]
        if parameter.name in values:
            raise SettingError(f"{str(path)!r} gives the option {aliases[name]} twice.")
        if value is not None:
            values[str(parameter.name)] = _as_option_value(value, parameter, name, path)
    return values


def _names(parameter: click.Parameter) -> list[str]:
    """Return an option's long names, or an argument's name."""
    names = [name.removeprefix("--") for name in parameter.opts if name.startswith("--")]
    return names or [str(parameter.name).replace("_", "-")]


def _as_option_value(value: Any, parameter: click.Parameter, name: str, path: Path) -> Any:
    """Return a value as click would get it from the command line.

    An option that may be repeated takes a list, or a dict whose items become KEY=VALUE.
    SettingError: the value does not fit the option.
    """
    flag = bool(getattr(parameter, "is_flag", False))
    if flag is not isinstance(value, bool):
        raise SettingError(
            f"{str(path)!r} has {name}: {reprlib.repr(value)}. Expected"
            f" {'true or false' if flag else 'a value'}."
        )
    if flag:
        return value
    if not getattr(parameter, "multiple", False):
        return _typed(value, name, path)
    if isinstance(value, dict):
        return [
            f"{key}={_typed(item, name, path)}"
            for key, items in value.items()
            for item in _as_list(items)
        ]
    return [_typed(item, name, path) for item in _as_list(value)]


def _typed(value: Any, name: str, path: Path) -> str:
    """Return a value as command-line text, so that click does not round 1.5 epochs to 1."""
    if not isinstance(value, (str, int, float)):
        raise SettingError(
            f"{str(path)!r} has {name}: {reprlib.repr(value)}. Expected a single value."
        )
    return str(value)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _load_yaml(text: bytes, path: Path) -> Any:
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise InstallationError(
            f'{str(path)!r} needs PyYAML: pip install "onnxfit[yaml]", or write the options as'
            " .json."
        ) from None
    try:
        # parse creates no objects, and safe_load only plain ones, so an untrusted file runs no
        # code.
        depth = 0
        for event in yaml.parse(text):
            _require_bounded(event, yaml)
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            # The time of PyYAML grows with the square of the depth.
            if depth > MAX_DEPTH:
                raise ValueError(
                    f"its lists and mappings are nested more than {MAX_DEPTH} levels deep."
                )
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(error) from None


def _require_bounded(event: Any, yaml: Any) -> None:
    """Raise ValueError for YAML that expands without limit, and for extremely long numbers."""
    if isinstance(event, yaml.CollectionStartEvent) and event.anchor:
        # Forty lines, each a list that refers twice to the previous list, expand to 2^40 items.
        raise ValueError(
            f"it uses the YAML anchor {event.anchor!r} for a list or a mapping. Write the list or"
            " mapping in full wherever it is used."
        )
    is_plain = isinstance(event, yaml.ScalarEvent) and event.implicit[0]
    if is_plain and len(event.value) > MAX_CHARACTERS:
        raise ValueError(f"the number {event.value[:20]}... has {len(event.value)} characters.")
