"""The world to which a process belongs."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import weakref
from collections.abc import Mapping
from typing import Any

from onnxfit.distributed.communicator import require_communicator
from onnxfit.distributed.failure import protect
from onnxfit.distributed.mpi import MPI
from onnxfit.distributed.process_group import Torch
from onnxfit.distributed.world import ALONE, World
from onnxfit.errors import UnknownNameError, warn_user

__all__: list[str] = []

WAYS = ("auto", "mpi", "torch")
# Variables in which launchers tell the number of processes: Open MPI; MPICH, Intel MPI and MS-MPI;
# MVAPICH; Hydra, for this machine alone.
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")
# srun sets one of the variables above if it connects the processes by MPI. The size of the step
# comes first: in a batch script, SLURM_NTASKS describes later steps.
SLURM_CONNECTIONS = ("PMIX_RANK", "PMI_RANK", "PMI_FD")
SLURM_SIZES = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")

_by_way: dict[str, World] = {}
_by_communicator: weakref.WeakValueDictionary[int, World] = weakref.WeakValueDictionary()


def world_of(distribute: Any = "auto") -> World:
    """Return the ranks that train together with this process.

    - `distribute`: "auto" for the processes that an MPI launcher started, or else this process
      alone; "mpi" for `MPI()`; "torch" for `Torch()`; None for this process alone; or a
      `Communicator`. The same argument gives the same world again.

    UnknownNameError: the name is unknown. SettingError: the object is not a communicator. After
    this call, the failure of a rank ends all ranks of this world.
    """
    if distribute is None:
        return ALONE
    if not isinstance(distribute, str):
        world = _world_of_communicator(distribute)
    elif distribute not in WAYS:
        raise UnknownNameError("value of distribute", distribute, WAYS)
    elif distribute in _by_way:
        world = _by_way[distribute]
    else:
        world = _found() if distribute == "auto" else _way_in_words(distribute)
        _by_way[distribute] = world
    protect(world)
    return world


def launched_ranks(environment: Mapping[str, str]) -> int:
    """Return the number of processes that an MPI launcher started; 1 without a launcher.

    >>> launched_ranks({"PMI_RANK": "0", "PMI_SIZE": "4"})
    4
    >>> launched_ranks({"SLURM_NTASKS": "4"})  # a batch script, not one of four processes
    1
    """
    counts = [_count_in_environment(environment, name) for name in SIZES]
    if any(name in environment for name in SLURM_CONNECTIONS):
        sizes = [
            _count_in_environment(environment, name) for name in SLURM_SIZES if name in environment
        ]
        counts += sizes[:1]
    return max(counts)


def is_launched(environment: Mapping[str, str]) -> bool:
    """Return whether an MPI launcher started this process, alone or with others."""
    return launched_ranks(environment) > 1 or any(name in environment for name in SIZES)


def _count_in_environment(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else 1


def _world_of_communicator(communicator: Any) -> World:
    require_communicator(communicator)
    world = _by_communicator.get(id(communicator))
    if world is None or world.communicator is not communicator:
        _by_communicator[id(communicator)] = world = World(communicator)
    return world


def _way_in_words(way: str) -> World:
    if way == "torch":
        return World(Torch())
    auto = _by_way.get("auto", ALONE)
    return World(MPI()) if auto is ALONE else auto


def _found() -> World:
    """Return the world of the launcher. mpi4py is imported only if there is a launcher."""
    if "mpi" in _by_way:
        return _by_way["mpi"]
    ranks = launched_ranks(os.environ)
    library: Any = sys.modules.get("mpi4py.MPI")
    if ranks > 1 and library is None and importlib.util.find_spec("mpi4py") is None:
        warn_user(
            f"A launcher started {ranks} processes, but each trains a separate model, because"
            " mpi4py is not installed: pip install onnxfit[mpi]. To train separate models without"
            " this warning, pass Trainer(distribute=None)."
        )
        return ALONE
    if library is None and ranks > 1:
        library = importlib.import_module("mpi4py.MPI")
    if library is None:
        _warn_of_torchrun()
        _warn_of_srun()
        return ALONE
    if not library.Is_initialized() or library.Is_finalized():
        return ALONE
    size = library.COMM_WORLD.Get_size()
    if size == 1 and ranks > 1:
        name = library.Get_library_version().split(",")[0].split("\n")[0].strip("\0 ")
        warn_user(
            f"A launcher started {ranks} processes, but each trains a separate model, because"
            f" mpi4py uses another MPI library ({name}) than the launcher. Use the mpiexec of that"
            " library. To train separate models without this warning, pass"
            " Trainer(distribute=None)."
        )
    return World(MPI()) if size > 1 else ALONE


def _warn_of_torchrun() -> None:
    ranks = _count_in_environment(os.environ, "WORLD_SIZE")
    if ranks > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
        warn_user(
            f"torchrun started {ranks} processes, but each trains a separate model. To train one"
            " model together, pass Trainer(distribute='torch'). To train separate models without"
            " this warning, pass Trainer(distribute=None)."
        )


def _warn_of_srun() -> None:
    """Warn about a Slurm step whose processes are not connected; a batch script is not a step."""
    ranks = _count_in_environment(os.environ, "SLURM_STEP_NUM_TASKS")
    if ranks > 1:
        warn_user(
            f"srun started {ranks} processes, but each trains a separate model, because srun did"
            " not connect them by MPI. Use srun --mpi=pmix. To train separate models without this"
            " warning, pass Trainer(distribute=None)."
        )
