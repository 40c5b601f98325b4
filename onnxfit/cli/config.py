"""`--config`: options from a file. What stands on the command line wins."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from onnxfit.errors import InstallationError, SettingError, UnknownNameError


def config_option(command: Any) -> Any:
    return click.option(
        "--config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=_apply,
        metavar="FILE",
        help=(
            'Options from FILE: .yaml (needs pip install "onnxfit[yaml]") or .json, such as'
            " `epochs: 10` and `metrics: [accuracy]`. Those on the command line win."
        ),
    )(command)


def _apply(ctx: click.Context, _: click.Parameter, path: Path | None) -> None:
    """Make the file's options the defaults of this command; click then converts and checks them as
    if they had been typed.
    """
    if path is not None and not ctx.resilient_parsing:
        ctx.default_map = defaults(read(path), ctx.command, path)


def read(path: Path) -> dict[str, Any]:
    """The file's mapping of options.

    SettingError for anything else, InstallationError for YAML without PyYAML.
    """
    text = path.read_bytes()
    try:
        if path.suffix == ".json":
            found = json.loads(text)
        else:
            yaml = _yaml(path)
            try:
                # makes no objects, so that a stranger's file runs no code
                found = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(error) from None
    except (ValueError, RecursionError) as error:
        raise SettingError(
            f"{str(path)!r} cannot be read: {' '.join(str(error).split())}"
        ) from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise SettingError(
            f"{str(path)!r} holds a {type(found).__name__}, expected options, such as `epochs: 10`."
        )
    return found


def defaults(options: Mapping[Any, Any], command: click.Command, path: Path) -> dict[str, Any]:
    """The options under click's names for them.

    Both `batch-size` and `batch_size` will do; null is as if the line were not there.
    """
    known = {
        _names(p)[0]: p
        for p in command.params
        if p.name != "config" and not getattr(p, "is_eager", False)
    }
    by_any = {name: key for key, p in known.items() for name in _names(p)}
    found = {}
    for key, value in options.items():
        name = str(key).replace("_", "-")
        if name not in by_any:
            raise UnknownNameError(
                f"option of `onnxfit {command.name}`, as {str(path)!r} has it,", key, known
            )
        parameter = known[by_any[name]]
        if parameter.name in found:
            raise SettingError(f"{str(path)!r} gives {by_any[name]} twice.")
        if value is not None:
            found[str(parameter.name)] = _as_typed(value, parameter, name, path)
    return found


def _names(parameter: click.Parameter) -> list[str]:
    """An option's long name, or an argument's name."""
    names = [name.removeprefix("--") for name in parameter.opts if name.startswith("--")]
    return names or [str(parameter.name).replace("_", "-")]


def _as_typed(value: Any, parameter: click.Parameter, name: str, path: Path) -> Any:
    """A value as it would have been typed: numbers and names; where an option may be repeated, a
    list, or a mapping KEY=VALUE.
    """
    flag = bool(getattr(parameter, "is_flag", False))
    if flag is not isinstance(value, bool):
        raise SettingError(
            f"{str(path)!r} has {name}: {value!r}, expected"
            f" {'true or false' if flag else 'a value'}."
        )
    if not getattr(parameter, "multiple", False):
        if isinstance(value, (list, dict)):
            raise SettingError(f"{str(path)!r} has {name}: {value!r}, expected one value.")
        return value
    if isinstance(value, dict):
        value = [
            f"{key}={one}"
            for key, many in value.items()
            for one in (many if isinstance(many, list) else [many])
        ]
    return [str(one) for one in (value if isinstance(value, list) else [value])]


def _yaml(path: Path) -> Any:
    try:
        return importlib.import_module("yaml")
    except ImportError:
        raise InstallationError(
            f'{str(path)!r} needs PyYAML: pip install "onnxfit[yaml]", or write the options as'
            " .json."
        ) from None
