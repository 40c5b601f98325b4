"""The command line, called in this process."""

from __future__ import annotations

import contextlib
import functools
import io

import click
import numpy as np

from onnxfit.cli import main
from scripts.fuzz.data import SMALL
from tests.models import mlp


@functools.cache
def model_and_data() -> dict[str, bytes]:
    """Return the files of a model and of its data."""
    archive = io.BytesIO()
    np.savez(archive, **SMALL)
    return {"m.onnx": mlp().SerializeToString(), "d.npz": archive.getvalue()}


def call(*arguments: str) -> str:
    """Run a command silently, and return "ran" or the kind of its error.

    Exceptions for which the command line has no message are let through.
    """
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            main.main(list(arguments), standalone_mode=False)
    except click.UsageError:
        return "UsageError"
    except click.ClickException as error:
        cause = error.__cause__
        return type(cause or error).__name__
    except click.exceptions.Exit as error:
        return f"exit {error.exit_code}"
    return "ran"
