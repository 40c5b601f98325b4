"""One arena of memory for the values of several sessions, of which one runs at a time.

Normally, each session of onnxruntime has an arena of its own, which keeps the memory of the largest
run. In a shared arena, a session gets the memory that the last one has freed.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any

from onnxruntime.capi import _pybind_state as C

__all__ = ["share_arena"]


def share_arena(options: Any) -> None:
    """Let the session of these options take the memory of its values from the shared arena.

    The sessions of the whole process share it, until the process ends. Several threads may use it
    at once. The memory of each value is requested when its node runs: a plan for all values, which
    onnxruntime makes otherwise, would hold the memory of all of them until the end of a run, so
    outputs that the run allocates could not use what is already free.
    """
    _create_arena()
    options.add_session_config_entry("session.use_env_allocators", "1")
    options.enable_mem_pattern = False


@cache
def _create_arena() -> None:
    """Create the arena of the process. If the program has created one itself, that one is used."""
    memory = C.OrtMemoryInfo("Cpu", C.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, C.OrtMemType.DEFAULT)
    with suppress(RuntimeError):  # there is one already
        C.create_and_register_allocator(memory, C.OrtArenaCfg({}))
