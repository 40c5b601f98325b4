"""Ranks of torch.distributed, as two processes that find each other by the variables of torchrun."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from onnxfit.distributed import Torch
from onnxfit.errors import SettingError
from tests.distributed import ranks

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

# The ranks make a group, exchange, and then one of them does what the other does not.
SCRIPT = """
from onnxfit.distributed import Torch
from onnxfit.distributed.find import world_of
world = world_of("torch")
assert world is world_of("torch") and world.size == 2
assert world.communicator.local_size == 2
again = Torch(average_every=2)  # in the same process group
assert again.average_every == 2 and again.rank == world.rank == int(os.environ["RANK"])
for kind in ("float32", "float64", "int64", "uint8"):
    for n in (1, 3, 100_003):
        buffer = np.resize(np.arange(50), n).astype(kind).reshape(1, n) + np.asarray(world.rank, kind)
        world.sum("numbers", buffer)
        assert (buffer[0] == 2 * np.resize(np.arange(50), n) + 1).all()
rng = np.random.default_rng(world.rank)
noise = rng.standard_normal(10_001).astype(np.float32)
world.sum("noise", noise)
world.require_same("sums", {"noise": noise.tobytes().hex()})
assert world.broadcast("main", {"rank": world.rank, "a": np.ones(3)})["rank"] == 0
assert world.communicator.broadcast(b"") == b""
assert world.gather("ranks", world.rank) == [0, 1]
assert not world.communicator.is_closed
print("rank", world.rank, flush=True)
if world.is_main:
    world.gather("evaluate", 1)
"""


def test_two_processes_exchange_messages_and_end_together() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = [
        subprocess.Popen(
            ranks.command(SCRIPT),
            env=ranks.environment(
                RANK=str(rank),
                WORLD_SIZE="2",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    results = [ranks.finish(process) for process in processes]
    assert [output for _, output, _ in results] == ["rank 0\n", "rank 1\n"], results
    assert [status for status, _, _ in results] == [1, 1]
    for _, _, errors in results:
        assert "rank 0: evaluate; rank 1: the end of the program" in errors
    assert "rank 0 of 2 failed" in results[0][2]


def test_a_process_that_no_launcher_started_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        SettingError, match=r"the environment lacks RANK, WORLD_SIZE.*with torchrun"
    ):
        Torch()
