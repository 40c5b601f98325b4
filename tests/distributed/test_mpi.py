"""Messages between ranks that mpiexec starts, and the end of all when one fails.

`ONNXFIT_SLOW=1` adds the failures that take the same path as another one.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest

import onnxfit.distributed
from onnxfit.distributed import MPI
from onnxfit.errors import SettingError, UnknownNameError
from tests.distributed import ranks

pytest.importorskip("mpi4py")  # the package alone, which starts nothing

SLOW = os.environ.get("ONNXFIT_SLOW") == "1"
WORLD = """
from onnxfit.distributed.find import world_of
world = world_of()
"""
EXCHANGES = (
    WORLD
    + """
import zlib
from mpi4py import MPI as library
from onnxfit.distributed import MPI, mpi
from onnxfit.errors import SettingError

rank, size = world.rank, world.size
assert (size, rank) == (int(os.environ["EXPECTED"]), library.COMM_WORLD.rank)
assert world is world_of("auto") is world_of("mpi")
own = MPI(average_every=8, timeout=None)
assert world_of(own) is world_of(own) is not world
assert world_of(own).average_every == 8
assert own.local_size == size and not own.is_closed

received = []  # checksums of what every rank must have to the bit

def numbers(rank, n, kind):
    rng = np.random.default_rng(rank)
    values = rng.standard_normal(min(n, 1000)) if kind.startswith("f") else rng.integers(0, 50, min(n, 1000))
    return np.resize(values, n).astype(kind)

for kind in ("float32", "float64", "int64", "uint8"):
    for n in (1, 3, 4097, 10**6):
        expected = sum(numbers(r, n, kind) for r in range(size))
        buffer = numbers(rank, n, kind)
        world.sum("numbers", buffer)
        assert np.abs(buffer - expected).max() < 1e-5, (kind, n)
        received.append((kind, n, zlib.crc32(buffer)))

for ranks_of_machine in (1, 2):  # as if there were several machines
    apart = MPI()
    apart._group_by_machine(library.COMM_WORLD.Split(rank // ranks_of_machine))
    apart.local_size = 1  # also where two ranks are one machine
    for kind in ("float32", "float64", "int64", "uint8"):
        for n in (mpi.MAX_BYTES_OF_BUSY_SUM + 1, 10**6):
            buffer = numbers(rank, n, kind)
            apart.allreduce(buffer)
            expected = sum(numbers(r, n, kind) for r in range(size))
            assert np.abs(buffer - expected).max() < 1e-5, (kind, n)
            received.append((kind, n, zlib.crc32(buffer)))
compressed = MPI(compression="float16")
for n in (4096, 10**6 + 1):
    buffer = numbers(rank, n, "float32").reshape(1, n)
    exact = sum(numbers(r, n, "float32") for r in range(size))
    compressed.allreduce(buffer)
    received.append((n, zlib.crc32(buffer)))
    error = np.abs(buffer[0] - exact).max()
    assert 1e-6 < error < 2e-2, error
large = np.full(5000, 4e4, np.float32)
large[7] = 1e5
compressed.allreduce(large)
assert np.isinf(large).all()
small = np.full(5, 1 + 2.0**-20, np.float32)  # too few to be worth it
compressed.allreduce(small)
assert (small == size * (1 + 2.0**-20)).all()
doubles = np.full(5000, 1 + 2.0**-20)
compressed.allreduce(doubles)
assert (doubles == size * (1 + 2.0**-20)).all()

mpi.MAX_ELEMENTS_OF_MESSAGE = 2000  # messages in parts
buffer = np.arange(5001.0).reshape(5001, 1)
world.sum("parts", buffer)
np.testing.assert_array_equal(buffer[:, 0], size * np.arange(5001.0))
buffer = np.ones(5000, np.float32)
compressed.allreduce(buffer)
assert (buffer == size).all()
for message in (b"", b"x", os.urandom(5) * 500):
    back = world.communicator.broadcast(message if rank == 0 else b"other")
    assert len(back) == len(message)
    received.append(back.hex())

world.require_same("sums", {"received": received})
assert world.gather("ranks", {"rank": rank, "a": np.full(rank, rank)})[-1]["a"].tolist() == [size - 1] * (size - 1)
assert world.broadcast("main", rank) == 0
try:
    world.require_same("settings", {"seed": rank})
except SettingError as error:
    assert "Rank 1 has seed 1" in str(error)
else:
    raise AssertionError
try:
    MPI(library.COMM_WORLD.Split(0 if rank else library.UNDEFINED))
except SettingError:
    assert rank == 0
if rank == 0:
    time.sleep(0.1)  # the others wait for it
# one write, which cannot mix with those of the others
os.write(1, f"rank {rank} did all\\n".encode())
"""
)

# What happens -> the script, and what the errors of the job say.
IN_A_SUM = (
    WORLD
    + """
world.sum("gradients", np.ones(3, np.float32))
print(f"trained{world.rank}.")
world.gather("the end of epoch 1", 0)
"""
)
FAILURES: dict[str, tuple[str, list[str], list[str]]] = {
    "an exception on one rank": (
        IN_A_SUM + "if world.rank == 1: raise ValueError('a bad row')\n"
        "world.sum('gradients', np.ones(3, np.float32))",
        ["rank 1 of 3 failed", "ValueError: a bad row"],
        ["rank 0 of 3", "rank 2 of 3"],
    ),
    "the same exception on all ranks": (
        IN_A_SUM + "raise ValueError('a bad setting')",
        ["rank 0 of 3 failed", "ValueError: a bad setting"],
        ["rank 1 of 3", "rank 2 of 3"],
    ),
    "a rank that evaluates while the others end": (
        IN_A_SUM + "if world.rank == 0: world.gather('evaluate', 1)",
        [
            "rank 0 of 3 failed",
            "rank 0: evaluate; rank 1: the end of the program",
            "Traceback",
        ],
        ["rank 1 of 3", "rank 2 of 3"],
    ),
    "a rank that waits too long": (
        """
from onnxfit.distributed import MPI
from onnxfit.distributed.find import world_of
world = world_of(MPI(timeout=4))  # the ranks write their lines within half of it
if world.rank == 1:
    signal.pause()
world.gather("the end of epoch 3", 1)
""",
        ["rank 0 of 3 has waited 4", "rank 2 of 3 has waited 4", "in the end of epoch 3 since"],
        ["rank 1 of 3", "Traceback"],
    ),
}
MORE_FAILURES: dict[str, tuple[str, list[str], list[str]]] = {
    "a rank that is killed": (
        IN_A_SUM + "if world.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "world.sum('gradients', np.ones(3, np.float32))",
        [],
        ["Traceback"],
    ),
    "an interrupt on one rank": (
        IN_A_SUM + "if world.rank == 1: raise KeyboardInterrupt\n"
        "world.sum('gradients', np.ones(3, np.float32))",
        [],
        ["Traceback", "onnxfit:"],
    ),
    "a rank that exits while the others go on": (
        IN_A_SUM + "if world.rank == 1: sys.exit(3)\nworld.gather('evaluate', 1)",
        ["rank 0: evaluate; rank 1: the end of the program"],
        [],
    ),
    "a rank that exits with a status at the end": (IN_A_SUM + "sys.exit(3 * world.rank)", [], []),
}
if SLOW:
    FAILURES |= MORE_FAILURES


@pytest.fixture(scope="module")
def failed_job() -> Iterator[Callable[[str], tuple[int, str, str]]]:
    """The result of a job of `FAILURES`. Those after it start meanwhile: they mostly wait."""
    started: dict[str, subprocess.Popen[str]] = {}

    def result(what: str) -> tuple[int, str, str]:
        names = list(FAILURES)
        for name in names[names.index(what) :][:2]:
            if name not in started:
                started[name] = ranks.start(FAILURES[name][0], 3)
        return ranks.finish(started[what])

    yield result
    for process in started.values():
        if process.poll() is None:
            process.terminate()
            process.communicate()


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_exchange_messages(
    size: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ranks.environment(EXPECTED=str(size)).items():
        monkeypatch.setenv(name, value)
    status = onnxfit.distributed.launch(ranks.command(EXCHANGES), size)
    output, errors = capfd.readouterr()
    assert status == 0, errors
    assert sorted(output.split("\n")) == ["", *(f"rank {r} did all" for r in range(size))]


@pytest.mark.parametrize("what", FAILURES)
def test_a_failure_ends_all_ranks(
    what: str, failed_job: Callable[[str], tuple[int, str, str]]
) -> None:
    status, output, errors = failed_job(what)
    _, said, not_said = FAILURES[what]
    assert status != 0
    assert errors.count("Traceback (most recent call last)") <= 1, errors
    assert [text for text in said if text not in errors] == [], errors
    assert [text for text in not_said if text in errors] == [], errors
    if "trained" in FAILURES[what][0]:  # no output is lost
        assert [rank for rank in range(3) if f"trained{rank}." not in output] == [], output


@pytest.mark.skipif(not SLOW, reason="ONNXFIT_SLOW=1")
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_signal_ends_what_launch_started() -> None:
    script = (
        ranks.PRELUDE
        + """
from onnxfit.distributed import launch
sys.exit(launch([sys.executable, "-c", "import signal; print('ready', flush=True); signal.pause()"], 2))
"""
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env=ranks.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    status, _, _ = ranks.finish(process)
    assert status > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"timeout": 0.0}, "MPI needs timeout > 0 seconds, or None"),
        ({"timeout": "long"}, "MPI needs timeout to be"),
        ({"average_every": 0}, "average_every to be a whole number >= 1"),
        ({"average_every": 1.5}, "average_every"),
    ],
)
def test_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        MPI(**settings)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=message.replace("MPI", "Torch")):
        onnxfit.distributed.Torch(**settings)  # type: ignore[arg-type]


def test_an_unknown_compression_or_backend_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'float16'"):
        MPI(compression="float")
    with pytest.raises(UnknownNameError, match="gloo, nccl"):
        onnxfit.distributed.Torch("mpi")


def test_messages_of_different_sizes_name_the_cause() -> None:
    """MPI notices them where data gives one rank a batch more than the other."""

    class Failure(Exception):
        def __init__(self, code: int) -> None:
            self.Get_error_class = lambda: code

    class Communicator:
        def __init__(self, code: int) -> None:
            self.code = code

        def Allreduce(self, *_: object) -> None:
            raise Failure(self.code)

    def allreduce(code: int) -> None:
        mpi = MPI.__new__(MPI)
        mpi.rank, mpi.compression, mpi._communicator = 1, None, Communicator(code)
        mpi._library = SimpleNamespace(
            IN_PLACE=None, Exception=Failure, ERR_TRUNCATE=15, ERR_IN_STATUS=17
        )
        mpi.allreduce(np.zeros(4))

    for code in (15, 17):
        with pytest.raises(SettingError, match="rank 1 sums 32 bytes, but another rank sums more"):
            allreduce(code)
    with pytest.raises(Failure):
        allreduce(16)
