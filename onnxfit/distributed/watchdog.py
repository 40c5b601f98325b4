"""The watchdog, which ends a job whose ranks wait too long for each other."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnxfit.distributed.world import World

LONGEST_PAUSE = 1.0  # seconds between two looks
LOOKS = 10  # during a timeout, where that is short
# Between a rank's line and the end of the job. Ranks begin to wait, and look, at different times.
PAUSES_FOR_OTHERS = 5

_lock = threading.Lock()
_worlds: weakref.WeakSet[World] = weakref.WeakSet()
_changed = threading.Event()
_thread: threading.Thread | None = None


def watch(world: World) -> None:
    """End the job when a rank of `world` waits in one exchange longer than `world.timeout`.

    One daemon thread checks all worlds. It compares the numbers of their exchanges, so that an
    exchange itself need not read a clock.
    """
    global _thread
    with _lock:
        _worlds.add(world)
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_look, name="onnxfit-watchdog", daemon=True)
            _thread.start()
    _changed.set()


def _look() -> None:
    seen: weakref.WeakKeyDictionary[World, tuple[int, float]] = weakref.WeakKeyDictionary()
    while True:
        with _lock:
            worlds = list(_worlds)
        timeouts = [world.timeout for world in worlds if world.timeout is not None]
        pause = min([LONGEST_PAUSE, *(timeout / LOOKS for timeout in timeouts)])
        for world in worlds:
            _look_at(world, seen, pause)
        del worlds  # this thread must not keep unused worlds alive
        _changed.wait(pause)
        _changed.clear()


def _look_at(
    world: World, seen: weakref.WeakKeyDictionary[World, tuple[int, float]], pause: float
) -> None:
    name, number, now = world.waiting, world.exchanges, time.monotonic()
    if name is None:
        seen.pop(world, None)
        return
    if world not in seen or seen[world][0] != number:
        seen[world] = number, now
        return
    seconds = now - seen[world][1]
    if world.timeout is None or seconds < world.timeout:
        return
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
    print(
        f"onnxfit: rank {world.rank} of {world.size} has waited {seconds:.3g} s for the other"
        f" ranks, in {name} since {since}, and now ends the job. Every waiting rank writes this"
        " line. A rank that does not write it is busy with something else, or was stopped. To wait"
        " longer, pass a larger timeout= to the communicator.",
        file=sys.stderr,
        flush=True,
    )
    time.sleep(PAUSES_FOR_OTHERS * pause)  # the other waiting ranks write their lines meanwhile
    if world.waiting == name and world.exchanges == number and world.timeout is not None:
        world.abort()
