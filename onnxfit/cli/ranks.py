"""The processes (ranks) in which a command runs: `--ranks` starts them, and rank 0 prints.

A command that mpiexec started in several processes runs in each of them. Rank 0 prints and writes
files. All ranks exit together, with the exit status of a single process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import click
import numpy as np

from onnxfit.distributed.find import is_launched, launched_ranks, world_of
from onnxfit.distributed.launcher import run_ranks
from onnxfit.distributed.world import World
from onnxfit.errors import InstallationError, SettingError

ARGUMENTS = "onnxfit.arguments"  # in click's contexts: those of the whole command line
# Commands that share their work among the ranks. Other commands run on rank 0 alone: a prediction,
# for example, uses all cores of one machine through threads.
SHARED_COMMANDS = ("fit", "resume", "evaluate")
# The variable with the folder in which `--ranks` and rank 0 exchange messages. Signals would not
# work: mpiexec answers Ctrl-C by killing the ranks, and prints comments on an exit status.
FOLDER = "ONNXFIT_RANKS_FOLDER"
SIGNAL, STATUS = "signal", "status"  # files in that folder, each with a number
# Seconds within which all ranks with the same error raise it.
SECONDS_BETWEEN_ERRORS = 5.0
PAUSE = 0.005  # seconds between two checks of the other ranks

option = click.option(
    "--ranks",
    type=click.IntRange(min=1),
    metavar="N",
    help=(
        "Train in N processes, which are started by mpiexec and share every batch. Needs pip"
        ' install "onnxfit[mpi]".'
    ),
)


# ---------------------------------------------------------------------- the process that starts


def to_launch(ranks: int | None) -> bool:
    """Return whether this process must start `ranks` others; not if mpiexec started this process.

    SettingError: mpiexec started another number of processes.
    """
    if not is_launched(os.environ):
        return ranks is not None and ranks > 1
    launched = launched_ranks(os.environ)
    if ranks not in (None, launched):
        raise SettingError(
            f"--ranks {ranks} cannot start processes, because mpiexec already started this command"
            f" in {launched} processes. Remove --ranks, or run the command without mpiexec."
        )
    return False


def launch(arguments: Sequence[str], ranks: int) -> NoReturn:
    """Run onnxfit with these arguments in several processes, and exit with their status.

    The first Ctrl-C, or request to terminate, sends a message to rank 0, which saves the training.
    A second one ends all ranks at once.
    """
    if find_spec("mpi4py") is None:
        raise InstallationError('--ranks needs MPI: pip install "onnxfit[mpi]".')
    with tempfile.TemporaryDirectory(prefix="onnxfit-") as folder:
        received: list[int] = []

        def answers(number: int) -> bool:
            received.append(number)
            if len(received) > 1 or number not in (signal.SIGINT, signal.SIGTERM):
                return False
            (Path(folder) / SIGNAL).write_text(str(int(number)))
            return True

        os.environ[FOLDER] = folder
        try:
            status = run_ranks(command_line(arguments), ranks, answers)
        finally:
            del os.environ[FOLDER]
        noted = _number(Path(folder) / STATUS)
    if received and status:  # the ranks were killed, and their output may be lost
        click.echo("Interrupted.", err=True)
        noted = 128 + received[0]
    raise SystemExit(status if noted is None else noted)


def command_line(arguments: Sequence[str]) -> list[str]:
    """Return the command that runs onnxfit with these arguments in the way of this process."""
    own = sys.orig_argv
    count = len(arguments)
    if count < len(own) and own[len(own) - count :] == list(arguments):
        return [sys.executable, *own[1:]]
    return [sys.executable, "-m", "onnxfit", *arguments]


# ---------------------------------------------------------------------- the ranks


def is_main() -> bool:
    """Return whether this process prints and writes files: rank 0, or a single process."""
    return world_of().is_main


def say(message: str) -> None:
    """Print a message on standard error, once for all ranks."""
    if is_main():
        click.echo(message, err=True)


def takes_part(command: str | None) -> bool:
    """Return whether this process runs a command: rank 0 runs all, others only shared commands."""
    return command in SHARED_COMMANDS or is_main()


def signal_of_all(own: int) -> int:
    """Return a signal that any rank has received, 0 for none; the result is equal on all ranks.

    - `own`: the signal of this rank, 0 for none.
    """
    world = world_of()
    if world.size == 1:
        return own
    if world.is_main and not own and FOLDER in os.environ:
        own = _number(Path(os.environ[FOLDER]) / SIGNAL) or 0
    numbers = np.zeros(world.size, np.int64)
    numbers[world.rank] = own
    world.sum("the signals of a batch", numbers)
    return int(next(filter(None, numbers), 0))


def wait_for_main(name: str) -> None:
    """Wait until rank 0 has reached this point.

    - `name`: the name of this point, for the messages of ranks that wait at another point.
    """
    world_of().broadcast(name, None)


def run(command: Callable[[], Any]) -> NoReturn:
    """Run a command on one of several ranks, and exit. Only rank 0 prints messages and results."""
    world = _world()
    show: Callable[[], None] | None = None
    try:
        with contextlib.ExitStack() as stack:
            if not world.is_main:
                nowhere = stack.enter_context(Path(os.devnull).open("w"))
                stack.enter_context(contextlib.redirect_stdout(nowhere))
            result = command()
        status = result if isinstance(result, int) else 0
    except click.ClickException as error:
        status, show = error.exit_code, error.show
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 0
    _finish(world, status, show)


def _world() -> World:
    world = world_of()
    launched = launched_ranks(os.environ)
    if world.size != launched:  # each process would train alone, and write the same files
        raise SystemExit(
            f"Error: mpiexec started {launched} processes, but mpi4py cannot connect them, because"
            " it uses another MPI library. Install mpiexec and mpi4py together: pip install"
            ' "onnxfit[mpi]".'
        )
    return world


def _finish(world: World, status: int, show: Callable[[], None] | None) -> NoReturn:
    """Exit together with the other ranks; a rank that fails alone ends all others."""
    if show is not None and world.is_main:
        show()
    folder = Path(os.environ.get(FOLDER, os.devnull))
    statuses = _statuses(world, status, takes_note=folder.is_dir())
    if statuses is None:
        if not world.is_main:
            click.echo(f"Rank {world.rank} of {world.size}: ", nl=False, err=True)
            if show is not None:
                show()
        world.abort()
        raise AssertionError("abort ends the process")
    *own, takes_note = statuses
    failed = next((rank for rank, number in enumerate(own) if number), 0)
    if show is not None and world.rank == failed > 0:
        show()
    if not takes_note:
        raise SystemExit(status)
    if world.is_main:
        (folder / STATUS).write_text(str(own[failed]))
    raise SystemExit(0)


def _statuses(world: World, status: int, takes_note: bool) -> list[int] | None:
    """Return the statuses of all ranks, and whether rank 0 writes them to a file.

    The result is None if only this rank failed, while the others are still at work.
    """
    from mpi4py import MPI

    own = np.zeros(world.size + 1, np.int64)
    own[world.rank] = status
    own[-1] = world.is_main and takes_note
    everyone = np.zeros_like(own)
    # The world uses a duplicate of this communicator, so its messages cannot mix with these.
    request = MPI.COMM_WORLD.Iallreduce(own, everyone)
    until = time.monotonic() + SECONDS_BETWEEN_ERRORS
    while not request.Test():
        if status and time.monotonic() > until:
            return None
        time.sleep(PAUSE)
    return [int(number) for number in everyone]


def _number(path: Path) -> int | None:
    """Return the number in a file, or None if the file does not exist or is still empty."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
