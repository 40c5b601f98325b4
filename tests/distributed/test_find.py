"""Which ranks a process belongs to, and what it imports for that."""

import importlib.util
import os
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from onnxfit.distributed import find, launcher, watchdog
from onnxfit.distributed.find import launched_ranks, world_of
from onnxfit.distributed.world import ALONE, World
from onnxfit.errors import InstallationError, SettingError, UnknownNameError
from tests.distributed import ranks
from tests.distributed.threads import on_ranks

VARIABLES = (*find.SIZES, *find.SLURM_CONNECTIONS, *find.SLURM_SIZES, "WORLD_SIZE")


class Pair:
    """A communicator of two ranks of which nobody asks anything."""

    rank = 0
    size = 2

    def allreduce(self, buffer: Any) -> None: ...

    def broadcast(self, data: bytes) -> bytes:
        return data

    def abort(self) -> None: ...


@pytest.fixture(autouse=True)
def nothing_found_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(find, "_by_way", {})
    monkeypatch.setattr(find, "protect", lambda world: None)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    return


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 1),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 4),
        ({"PMI_SIZE": "3", "MPI_LOCALNRANKS": "2"}, 3),
        ({"MPI_LOCALNRANKS": "2"}, 2),
        ({"MV2_COMM_WORLD_SIZE": "2"}, 2),
        ({"SLURM_NTASKS": "8"}, 1),
        ({"SLURM_NTASKS": "8", "PMIX_RANK": "0"}, 8),
        ({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0"}, 1),
        ({"PMI_SIZE": "many"}, 1),
    ],
)
def test_launchers_tell_the_number_of_ranks(environment: dict[str, str], expected: int) -> None:
    assert launched_ranks(environment) == expected


def test_a_process_is_alone_until_it_has_company() -> None:
    """It imports no MPI; from the first world of several ranks on, its failure ends them."""
    script = """
from onnxfit.distributed.find import world_of
before = sys.excepthook
assert world_of() is world_of(None) and world_of().size == 1
assert not [name for name in sys.modules if name.startswith(("mpi4py", "torch"))]
assert sys.excepthook is before
assert threading.active_count() == 1

class Pair:
    rank, size, timeout = 0, 2, 600.0
    allreduce = broadcast = None
    def abort(self): print("aborted")

pair = Pair()
thread = threading.Thread(target=world_of, args=[pair])  # a rank that is a thread
thread.start()
thread.join()
assert sys.excepthook is before
world = world_of(pair)
installed = sys.excepthook
assert installed is not before and sys.stdout.line_buffering
assert world_of(pair) is world and sys.excepthook is installed
assert [t.name for t in threading.enumerate()] == ["MainThread", "onnxfit-watchdog"]
raise ValueError("a bad row")
"""
    result = subprocess.run(
        ranks.command(script), env=ranks.environment(), capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (1, "aborted\n"), result.stderr
    assert result.stderr.startswith("onnxfit: rank 0 of 2 failed:\nTraceback")
    assert result.stderr.endswith("ValueError: a bad row\n")


def test_a_launcher_without_mpi4py_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_SIZE", "4")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.warns(
        UserWarning, match=r"started 4 processes.*pip install onnxfit\[mpi\]"
    ) as all_:
        assert world_of() is ALONE
    assert all_[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert world_of() is ALONE


class FakeLibrary(types.ModuleType):
    """mpi4py.MPI in a process that another library's mpiexec started."""

    class COMM_WORLD:
        Get_size = staticmethod(lambda: 1)

    Is_initialized = staticmethod(lambda: True)
    Is_finalized = staticmethod(lambda: False)
    Get_library_version = staticmethod(lambda: "MPICH Version: 5\nand more")


def test_the_mpiexec_of_another_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", FakeLibrary("mpi4py.MPI"))
    with pytest.warns(UserWarning, match=r"another MPI library \(MPICH Version: 5\) than"):
        assert world_of() is ALONE


def test_torchrun_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.warns(UserWarning, match=r"Trainer\(distribute='torch'\)"):
        assert world_of("auto") is ALONE


def test_srun_without_mpi_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert world_of("auto") is ALONE  # a batch script
    find._by_way.clear()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.warns(UserWarning, match="srun started 2 processes.*srun --mpi=pmix"):
        assert world_of("auto") is ALONE


def test_a_communicator_gives_one_world() -> None:
    pair = Pair()
    world = world_of(pair)
    assert isinstance(world, World)
    assert world.size == 2
    assert world_of(pair) is world
    assert world_of(Pair()) is not world


@pytest.mark.parametrize("name", ["rank", "size", "allreduce", "broadcast", "abort"])
def test_a_missing_member_is_named(name: str) -> None:
    members = {key: value for key, value in vars(Pair).items() if key != name}
    with pytest.raises(SettingError, match=f"lacks {name}"):
        world_of(type("Half", (), members)())


def test_what_is_no_communicator_is_refused() -> None:
    with pytest.raises(SettingError, match=r"got the class Pair. Create an object"):
        world_of(Pair)
    with pytest.raises(UnknownNameError, match="Did you mean 'mpi'"):
        world_of("mpy")
    with pytest.raises(SettingError, match="got 4, which lacks rank, size"):
        world_of(4)
    comm = type("Intracomm", (Pair,), {"__module__": "mpi4py.MPI"})()
    with pytest.raises(SettingError, match=r"onnxfit\.distributed\.MPI\(communicator\)"):
        world_of(comm)


def test_mpi_without_mpi4py_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(InstallationError, match=r"pip install onnxfit\[mpi\]"):
        world_of("mpi")


def test_the_watchdog_ends_a_rank_that_waits(capsys: pytest.CaptureFixture[str]) -> None:
    def exchange(communicator: Any) -> None:
        communicator.timeout = 0.05
        world = World(communicator)
        world.sum("gradients", *[])
        if not world.is_main:
            with pytest.raises(Exception, match=r"^$"):  # a broken barrier
                world.gather("evaluate", 1)
            assert world.waiting is None

    on_ranks(2, exchange)
    assert "rank 1 of 2 has waited 0.0" in capsys.readouterr().err


class Waiting:
    """A world whose rank waits, as the watchdog sees it."""

    waiting, exchanges, rank, size = "evaluate", 1, 0, 2

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout

    def abort(self) -> None: ...


def test_every_waiting_rank_writes_its_line_before_the_job_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pause = 0.4
    now = 0.0
    slept: list[float] = []
    clock = types.SimpleNamespace(
        monotonic=lambda: now,
        time=time.time,
        sleep=slept.append,
        localtime=time.localtime,
        strftime=time.strftime,
    )
    monkeypatch.setattr(watchdog, "time", clock)

    def line_and_end(first_look: float) -> tuple[float, float]:
        """Return when a rank writes its line, and when it ends the job."""
        nonlocal now
        slept.clear()
        seen: Any = {}
        world: Any = Waiting(watchdog.LOOKS * pause)
        now = first_look
        while True:
            watchdog._look_at(world, seen, pause)
            if slept:
                return now, now + slept[0]
            now += pause

    _, end = line_and_end(0.0)
    for pauses in (0.9, 2.5, 3.9):  # another rank begins to wait later
        line, _ = line_and_end(pauses * pause)
        assert line < end


# ------------------------------------------------------------------------------------------------
# launch


def test_launch_refuses_what_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="ranks to be a whole number >= 1, got 0"):
        launcher.launch(["true"], 0)
    with pytest.raises(SettingError, match="needs a command"):
        launcher.launch([], 2)
    monkeypatch.setattr(launcher.shutil, "which", lambda name, path: None)
    with pytest.raises(
        InstallationError, match=r"mpiexec was found neither .*pip install onnxfit\[mpi\]"
    ):
        launcher.launch(["true"], 2)
    monkeypatch.setenv("PMI_SIZE", "1")
    with pytest.raises(SettingError, match="was itself started by mpiexec"):
        launcher.launch(["true"], 2)


def test_ranks_share_cores_and_stay_on_this_machine() -> None:
    many = launcher.ranks_environment({"HOME": "/x", "I_MPI_PIN": "on"})
    assert many["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"
    assert (many["OMPI_MCA_btl"], many["HOME"], many["I_MPI_PIN"]) == ("self,sm", "/x", "on")
    in_a_cluster = launcher.ranks_environment({"SLURM_JOB_ID": "7"})
    assert "OMPI_MCA_btl" not in in_a_cluster
    assert "OMPI_MCA_rmaps_base_oversubscribe" not in in_a_cluster


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has no root")
@pytest.mark.parametrize("user", [0, 1000])
def test_root_is_allowed_where_root_starts_the_ranks(
    user: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    environment = launcher.ranks_environment({})
    assert ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM" in environment) == (user == 0)
