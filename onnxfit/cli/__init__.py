"""The command line: `onnxfit --help`.

Each command is in the module of its own name (`add-biases` in `add_biases`), whose `__all__` lists
it. Adding a module adds the command; nothing else has to be edited. The module is imported when the
command is run.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import click

from onnxfit import __version__
from onnxfit.cli import ranks
from onnxfit.cli.ranks import ARGUMENTS
from onnxfit.cli.wording import in_options, wrapped
from onnxfit.distributed.find import launched_ranks
from onnxfit.errors import InstallationError, OnnxfitError

__all__ = ["main"]

# The order in `onnxfit --help`, which follows typical use. Other commands follow by name.
COMMAND_ORDER = (
    "init",
    "fit",
    "resume",
    "evaluate",
    "predict",
    "export",
    "export-training",
    "verify",
    "bom",
    "inspect",
    "untie",
    "tie",
    "add-biases",
    "add-dropout",
    "dynamic-batch",
    "replace-head",
    "to-float32",
    "quantization-report",
    "quantize",
    "dequantize",
    "ops",
    "draw",
    "doctor",
)


class UnavailableCommand(click.Command):
    """Command whose module needs a package that is missing. It raises the error when it is run."""

    def __init__(self, name: str, error: InstallationError) -> None:
        super().__init__(name, short_help="(needs onnxruntime: run `onnxfit doctor`)")
        self.error = error

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        raise self.error


class CommandGroup(click.Group):
    """Group of the commands, which are found by their modules.

    An error prints one message on standard error and sets an exit code, without a traceback. A
    warning prints one line on standard error. With several processes, rank 0 prints them.
    """

    def main(self, *args: Any, **extra: Any) -> Any:
        if extra.get("standalone_mode", True) and launched_ranks(os.environ) > 1:
            command = functools.partial(super().main, *args, **{**extra, "standalone_mode": False})
            ranks.run(command)
        return super().main(*args, **extra)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[ARGUMENTS] = list(args)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        resolved = super().resolve_command(ctx, args)
        if not ranks.takes_part(resolved[0]):
            ctx.exit()
        return resolved

    def invoke(self, ctx: click.Context) -> object:
        def worded(message: str) -> str:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            # A resumed training has the options of `fit`, and no other way to change them.
            command = (
                self.get_command(ctx, "fit") if ctx.invoked_subcommand == "resume" else command
            )
            return message if command is None else in_options(message, command, _module_names())

        def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
            ranks.say("Warning: " + wrapped(worded(str(message)), "Warning: "))

        with warnings.catch_warnings():
            warnings.showwarning = show_warning
            try:
                return super().invoke(ctx)
            except OnnxfitError as error:
                raise click.ClickException(wrapped(worded(str(error)), "Error: ")) from error
            except BrokenPipeError:
                # Without this, Python would fail again when it flushes at exit.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                ctx.exit(1)
            except OSError as error:
                message = error.strerror or str(error)
                if isinstance(error.filename, (str, os.PathLike)):
                    message = f"{os.fspath(error.filename)!r}: {message}"
                raise click.ClickException(wrapped(message, "Error: ")) from error
            except MemoryError as error:
                raise click.ClickException(f"Not enough memory. {error}".rstrip()) from error
            except KeyboardInterrupt:
                ranks.say("Interrupted.")
                ctx.exit(130)

    def list_commands(self, ctx: click.Context) -> list[str]:
        commands = {name: self.get_command(ctx, name) for name in _module_names()}
        # Without onnxruntime, modules that are no commands cannot be told from those that are.
        names = [
            name
            for name, command in commands.items()
            if command and (name in COMMAND_ORDER or not isinstance(command, UnavailableCommand))
        ]
        first = [name for name in COMMAND_ORDER if name in names]
        return first + sorted(set(names) - set(first))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _module_names():
            return None
        name = cmd_name.replace("-", "_")
        try:
            module = import_module(f"{__name__}.{name}")
        except InstallationError as error:
            return UnavailableCommand(cmd_name, error)
        if name not in getattr(module, "__all__", ()):
            return None
        command = getattr(module, name)
        return command if isinstance(command, click.Command) else None


def _module_names() -> list[str]:
    return [info.name.replace("_", "-") for info in iter_modules(__path__)]


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.version_option(__version__, prog_name="onnxfit")
def main() -> None:
    """Train ONNX models: a model.onnx and a file of data give a trained.onnx.

    \b
    onnxfit inspect model.onnx
    onnxfit fit model.onnx -d digits.npz --loss cross_entropy -o trained.onnx
    onnxfit predict trained.onnx -d new.csv -o predictions.csv

    Results go to standard output, progress and warnings to standard error. --json prints
    machine-readable results. Exit codes: 0 for success; 1 for a failure, with one message on
    standard error; 2 for a wrong option; 130 after Ctrl-C.
    """
