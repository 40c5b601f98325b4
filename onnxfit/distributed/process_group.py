"""Ranks that exchange messages by torch.distributed."""

from __future__ import annotations

import atexit
import os
import socket
import zlib
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxfit.checks import check_arguments
from onnxfit.distributed.communicator import TIMEOUT, require_settings
from onnxfit.errors import InstallationError, SettingError, UnknownNameError, listed_names

__all__ = ["Torch"]

BACKENDS = ("gloo", "nccl")
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # torchrun sets them
# The watchdog ends a wait that takes too long. torch's own limit would also end the last exchange.
NO_TIMEOUT = timedelta(days=365)


class Torch:
    """Processes that `torchrun` started, by torch.distributed: `Trainer(distribute=Torch(...))`.

    If the program has already initialized a process group, this object uses it. Otherwise it
    initializes one from the environment of `torchrun`. Every rank must create this object at the
    same time.

    - `backend`: "gloo", which sends arrays from the memory of the CPU, or "nccl", which sends them
      from the GPU of number `LOCAL_RANK`.
    - `timeout`: seconds > 0 that a rank waits for the others before it ends the job; None for no
      limit.
    - `average_every`: number of updates >= 1 after which the ranks average their weights (local
      SGD); None shares the gradients of every update.
    - `local_size`: number of ranks on this machine.
    - `overlaps`: whether the ranks of several machines sum gradients while they compute others:
      with gloo.

    InstallationError: PyTorch is missing, or lacks the backend. SettingError: a setting is
    impossible, or no launcher started this process.

    A script that `torchrun --nproc-per-node 4 train.py` starts:

        from onnxfit.distributed import Torch
        trainer = onnxfit.Trainer("model.onnx", distribute=Torch("gloo"))
    """

    @check_arguments
    def __init__(
        self,
        backend: str = "gloo",
        *,
        timeout: float | None = TIMEOUT,
        average_every: int | None = None,
    ) -> None:
        require_settings(self, timeout, average_every)
        if backend not in BACKENDS:
            raise UnknownNameError("backend of torch.distributed", backend, BACKENDS)
        self.timeout = timeout
        self.average_every = average_every
        self._torch, self._group = _libraries(backend)
        if not self._group.is_initialized():
            missing = [name for name in VARIABLES if not os.environ.get(name)]
            if missing:
                raise SettingError(
                    "Torch needs a process group, but the environment lacks"
                    f" {listed_names(missing)}. Start the script with torchrun, or call"
                    " torch.distributed.init_process_group first."
                )
            self._group.init_process_group(backend, timeout=NO_TIMEOUT)
            atexit.register(self._destroy)
        self.rank: int = self._group.get_rank()
        self.size: int = self._group.get_world_size()
        self._device: Any = None
        if "nccl" in self._group.get_backend():
            number = int(os.environ.get("LOCAL_RANK", self.rank % self._torch.cuda.device_count()))
            self._device = self._torch.device("cuda", number)
        self.overlaps = self._device is None
        hosts = np.zeros(self.size, np.int64)
        hosts[self.rank] = own = zlib.crc32(socket.gethostname().encode())
        self.allreduce(hosts)
        self.local_size = int((hosts == own).sum())

    @property
    def is_closed(self) -> bool:
        """Whether the program has destroyed the process group."""
        return not self._group.is_initialized()

    def allreduce(self, buffer: npt.NDArray[Any]) -> None:
        """Replace every element of `buffer` by its sum over all ranks.

        - `buffer`: an array in C order, of the same shape and type on every rank.
        """
        tensor = self._torch.from_numpy(buffer)
        if self._device is None:
            self._group.all_reduce(tensor)
            return
        on_device = tensor.to(self._device)
        self._group.all_reduce(on_device)
        tensor.copy_(on_device)

    def broadcast(self, data: bytes) -> bytes:
        """Return the bytes that rank 0 passed.

        - `data`: the bytes; the bytes of other ranks are ignored.
        """
        length = np.array([len(data)], np.int64)
        self._send_from_0(length)
        message = np.empty(int(length[0]), np.uint8)
        if not message.size:
            return b""
        if self.rank == 0:
            message[...] = np.frombuffer(data, np.uint8)
        self._send_from_0(message)
        return message.tobytes()

    def abort(self) -> None:
        """End this rank at once; torchrun, or the lost connection, ends the others."""
        os._exit(1)

    def _destroy(self) -> None:
        """Destroy the process group that this object initialized, as torch recommends."""
        if self._group.is_initialized():
            self._group.destroy_process_group()

    def _send_from_0(self, array: npt.NDArray[Any]) -> None:
        tensor = self._torch.from_numpy(array)
        if self._device is None:
            self._group.broadcast(tensor, 0)
            return
        on_device = tensor.to(self._device)
        self._group.broadcast(on_device, 0)
        tensor.copy_(on_device)


def _libraries(backend: str) -> tuple[Any, Any]:
    """Return torch and torch.distributed."""
    try:
        import torch
        import torch.distributed
    except ImportError as error:
        raise InstallationError(
            "Torch needs PyTorch, which is not installed: pip install torch. Or use"
            " onnxfit.distributed.MPI (pip install onnxfit[mpi])."
        ) from error
    group = torch.distributed
    if not group.is_available() or (backend == "nccl" and not group.is_nccl_available()):
        raise InstallationError(
            f"PyTorch {torch.__version__} was built without {backend!r}. Install a build with"
            f" {backend!r}, or use another backend."
        )
    return torch, group
