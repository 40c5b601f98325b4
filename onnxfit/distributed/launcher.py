"""The start of several processes by mpiexec."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from onnxfit.checks import check_arguments, shortened
from onnxfit.distributed.find import is_launched
from onnxfit.errors import InstallationError, SettingError

__all__ = ["launch"]

NAMES = ("mpiexec", "mpirun")
FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP")
# Variables of batch systems and of lists of machines: ranks may then run on other machines, too.
OTHER_MACHINES = (
    "SLURM_JOB_ID",
    "PBS_NODEFILE",
    "LSB_HOSTS",
    "PE_HOSTFILE",
    "HYDRA_HOST_FILE",
    "I_MPI_HYDRA_HOST_FILE",
    "PRTE_MCA_prte_default_hostfile",
    "OMPI_MCA_orte_default_hostfile",
)


@check_arguments
def launch(arguments: Sequence[str], ranks: int) -> int:
    """Run a command in several processes by mpiexec, and return its exit status.

    - `arguments`: the command, such as [sys.executable, "train.py"].
    - `ranks`: number of processes, from 1. It may exceed the number of cores.

    The mpiexec next to this Python is preferred to others. SIGINT, SIGTERM and SIGHUP are forwarded
    to mpiexec while it runs. Environment variables that are already set are not changed. The ranks
    send nothing over a network, unless a batch system or a list of machines is configured.

    SettingError: there is less than one rank, the command is empty, or mpiexec started this
    process itself. InstallationError: mpiexec is not installed.

    Four processes that train together:

        status = onnxfit.distributed.launch([sys.executable, "train.py"], ranks=4)
    """
    return run_ranks(arguments, ranks)


def run_ranks(
    arguments: Sequence[str], ranks: int, answers: Callable[[int], bool] | None = None
) -> int:
    """Run a command in several processes, as `launch` does, with a handler of signals.

    - `answers`: called with each signal; if it returns True, the signal is not forwarded.
    """
    if ranks < 1 or ranks != int(ranks):
        raise SettingError(f"launch needs ranks to be a whole number >= 1, got {shortened(ranks)}.")
    if not arguments:
        raise SettingError(
            "launch needs a command, such as [sys.executable, 'train.py'], got an empty list."
        )
    if is_launched(os.environ):
        raise SettingError(
            f"This process cannot start {ranks} processes, because it was itself started by"
            " mpiexec. Use launch, or --ranks, without mpiexec."
        )
    program = find_mpiexec()
    process = subprocess.Popen(
        [program, "-n", str(int(ranks)), *arguments],
        env=ranks_environment(os.environ),
        stdin=subprocess.DEVNULL,
        # Otherwise Ctrl-C would reach mpiexec twice, from the terminal and from here, and after the
        # second one mpiexec exits without ending the ranks.
        start_new_session=os.name == "posix",
    )
    status = _wait(process, answers)
    return status if status >= 0 else 128 - status


def find_mpiexec() -> str:
    """Return the path of mpiexec, next to this Python or in PATH. InstallationError: not found."""
    beside = Path(sys.executable).parent
    folders = (beside, beside / "Scripts", beside.parent / "Library" / "bin")
    for path in (*map(str, folders), None):
        for name in NAMES:
            found = shutil.which(name, path=path)
            if found:
                return found
    raise InstallationError(
        f"mpiexec was found neither next to {sys.executable} nor in PATH. Install it with pip"
        " install onnxfit[mpi]."
    )


def ranks_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which mpiexec starts ranks.

    Each MPI implementation reads its own variables, so the variables of all are set.
    """
    chosen = {
        # Each rank has threads, so no rank is bound to one core.
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "I_MPI_PIN": "off",
    }
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        # Open MPI refuses to run as root, the only user of many containers.
        for prefix in ("OMPI", "PRTE"):
            chosen[f"{prefix}_ALLOW_RUN_AS_ROOT"] = "1"
            chosen[f"{prefix}_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    if not any(name in environment for name in OTHER_MACHINES):
        # Open MPI counts physical cores, and refuses to start more ranks.
        chosen["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"  # Open MPI 5
        chosen["OMPI_MCA_rmaps_base_oversubscribe"] = "1"  # Open MPI 4
        chosen["OMPI_MCA_btl"] = "self,sm"  # Open MPI: shared memory
        chosen["UCX_TLS"] = "self,sm"  # MPICH
        chosen["HYDRA_LAUNCHER"] = "fork"  # MPICH, whose default is ssh
        chosen["I_MPI_FABRICS"] = "shm"  # Intel MPI
        chosen["I_MPI_HYDRA_BOOTSTRAP"] = "fork"
    return {**chosen, **environment}


def _wait(process: subprocess.Popen[bytes], answers: Callable[[int], bool] | None = None) -> int:
    """Wait for the end of a process, and forward signals to it.

    Signals that this process ignores, as under nohup, stay ignored.
    """

    def forward(number: int, frame: FrameType | None) -> None:
        if answers is None or not answers(number):
            process.send_signal(number)

    numbers = [getattr(signal, name) for name in FORWARDED if hasattr(signal, name)]
    if os.name != "posix":
        numbers = []  # Windows has no signals to forward; Ctrl-C reaches mpiexec directly
    numbers = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    try:
        before = {number: signal.signal(number, forward) for number in numbers}
    except ValueError:  # only the main thread can handle signals
        before = {}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
