"""Several processes that train one model together, each on its share of every batch.

`mpiexec -n 4 python train.py` starts four processes, which `Trainer(..., distribute="auto")`
detects. `pip install onnxfit[mpi]` installs mpi4py and an MPI library with mpiexec.

If one of the processes (ranks) raises an exception, is killed, or exits early, all ranks end, with
one traceback. All ranks also end if one waits longer than the `timeout` of `MPI` or `Torch`; the
message names the exchange in which it waits.
"""

from onnxfit.distributed.communicator import Communicator
from onnxfit.distributed.launcher import launch
from onnxfit.distributed.mpi import MPI
from onnxfit.distributed.process_group import Torch

__all__ = ["MPI", "Communicator", "Torch", "launch"]
