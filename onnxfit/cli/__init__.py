"""The command line: `onnxfit --help`. A module for each command."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import click

from onnxfit import __version__
from onnxfit.cli.draw import draw
from onnxfit.cli.evaluate import evaluate
from onnxfit.cli.export import export
from onnxfit.cli.fit import fit
from onnxfit.cli.inspect import inspect
from onnxfit.cli.ops import ops
from onnxfit.cli.predict import predict
from onnxfit.cli.resume import resume
from onnxfit.errors import OnnxfitError


class _Group(click.Group):
    """What goes wrong is one message on standard error and an exit code, not a traceback; a warning
    is a line.
    """

    def invoke(self, ctx: click.Context) -> object:
        with warnings.catch_warnings():
            warnings.showwarning = _show
            try:
                return super().invoke(ctx)
            except OnnxfitError as error:
                raise click.ClickException(str(error)) from error
            except BrokenPipeError:
                # Python would fail again when it flushes at its end
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                ctx.exit(1)
            except OSError as error:
                where = (
                    f"{os.fspath(error.filename)!r}: "
                    if isinstance(error.filename, (str, os.PathLike))
                    else ""
                )
                raise click.ClickException(f"{where}{error.strerror or error}") from error
            except MemoryError as error:
                raise click.ClickException(f"Not enough memory. {error}".rstrip()) from error
            except KeyboardInterrupt:
                click.echo("Interrupted.", err=True)
                ctx.exit(130)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order of use, not of the alphabet


def _show(message: Warning | str, *_: Any, **__: Any) -> None:
    click.echo(f"Warning: {message}", err=True)


@click.group(
    cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120}
)
@click.version_option(__version__, prog_name="onnxfit")
def main() -> None:
    """Train ONNX models: from a model.onnx and a file of data to a trained.onnx.

    \b
    onnxfit inspect model.onnx                                     can it be trained?
    onnxfit fit model.onnx -d digits.npz --loss cross_entropy -o trained.onnx
    onnxfit predict trained.onnx -d new.csv -o predictions.csv

    Results go to standard output, progress and warnings to standard error; --json prints results
    for machines. Exit codes: 0 for success, 1 for a failure, which is one message on standard
    error, 2 for a wrong option, 130 after Ctrl-C.
    """


for command in (fit, resume, evaluate, predict, export, inspect, ops, draw):
    main.add_command(command)
