"""One arena of memory for the values of several sessions.

Normally, each session of onnxruntime has an arena of its own, which keeps the memory of its largest
run. In a shared arena, a session gets memory that other sessions have freed, which saves most if
the sessions run one after another.
"""

from __future__ import annotations

import platform
from functools import cache
from typing import Any

from onnxruntime.capi import _pybind_state as C

from onnxfit.runtime.version import onnxruntime_version

__all__ = ["share_arena"]

ARCHITECTURES = ("x86_64", "AMD64")  # on which every version of onnxruntime can share an arena


def share_arena(options: Any) -> None:
    """Let the session of these options take the memory of its values from the shared arena.

    All such sessions of the process share it, also in several threads, until the process ends. The
    memory of each value is requested when its node runs: a plan for all values, which onnxruntime
    makes otherwise, would hold the memory of all of them until the end of a run, so outputs that
    the run allocates could not use what is already free. In large graphs, `plan_memory` leaves the
    reuse of memory to the arena, too: with onnxruntime's own, ResNet-18 takes up to 8 % more.

    On processors other than x86, versions of onnxruntime before 1.21 share memory without an arena,
    which is slow, so there each session keeps its own.
    """
    options.enable_mem_pattern = False
    if platform.machine() in ARCHITECTURES or onnxruntime_version() >= (1, 21):
        _create_arena()
        options.add_session_config_entry("session.use_env_allocators", "1")


@cache
def _create_arena() -> None:
    """Create the arena of the process.

    If the program has already created one, onnxruntime 1.19 keeps and shares it, and 1.32 replaces
    it.
    """
    memory = C.OrtMemoryInfo("Cpu", C.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, C.OrtMemType.DEFAULT)
    try:
        C.create_and_register_allocator(memory, C.OrtArenaCfg({}))
    except RuntimeError as error:
        if "already been registered" not in str(error):
            raise
