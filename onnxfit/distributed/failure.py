"""The common end of all ranks, after the failure of one rank or after success."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import sys
import threading
import time
from types import TracebackType
from typing import Any

from onnxfit.distributed.world import World
from onnxfit.errors import OnnxfitError

# Seconds before a rank other than 0 writes its error. If all ranks have the same error, rank 0
# writes it and ends the others within this time.
FIRST_WAIT = 0.3
MORE_WAIT = 0.05  # for each further rank
LONGEST_WAIT = 1.0
# A rank that has finished waits longer, because the error of the other rank names the user's line.
WAIT_AT_END = 0.4

_protected: list[World] = []


def protect(world: World) -> None:
    """End the whole job when this rank fails, and wait for the others when it ends.

    Without this, an exception in one rank would make the others wait forever. A world of one rank
    needs no protection, and neither do ranks that are threads of one process: a call in a thread
    other than the main thread has no effect.
    """
    is_thread = threading.current_thread() is not threading.main_thread()
    if world.size < 2 or world in _protected or is_thread:
        return
    if not _protected:
        _install(world)
    _protected.append(world)
    atexit.register(_end, world)


def _install(world: World) -> None:
    # A launcher reads pipes, so Python would buffer lines, and aborting all ranks would lose them.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    previous = sys.excepthook

    def end_all(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> Any:
        try:
            if not issubclass(kind, KeyboardInterrupt):
                _wait_for_rank_0(world)
                _flush()
                print(f"onnxfit: rank {world.rank} of {world.size} failed:", file=sys.stderr)
                previous(kind, error, traceback)
        finally:
            _abort(world)

    sys.excepthook = end_all


def _end(world: World) -> None:
    """Wait for the end of all ranks; the job ends with an error if one does something else."""
    if getattr(world.communicator, "is_closed", False):
        return  # the program finalized the library itself
    try:
        world.final_barrier()
    except OnnxfitError as error:
        time.sleep(WAIT_AT_END)
        _wait_for_rank_0(world)
        _say(f"rank {world.rank} of {world.size}: {error}")
        _abort(world)
    except BaseException as error:  # a rank that failed has ended the connection
        _say(
            f"rank {world.rank} of {world.size} lost the connection to the other ranks when it"
            f" ended: {error}"
        )
        _abort(world)


def _wait_for_rank_0(world: World) -> None:
    if world.rank:
        time.sleep(min(FIRST_WAIT + MORE_WAIT * (world.rank - 1), LONGEST_WAIT))


def _say(message: str) -> None:
    _flush()
    print(f"onnxfit: {message}", file=sys.stderr)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # the stream may be missing, or its reader may have exited
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()


def _abort(world: World) -> None:
    _flush()
    try:
        world.abort()
    finally:
        os._exit(1)
