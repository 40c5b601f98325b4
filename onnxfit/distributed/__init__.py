"""Several processes that train one model together, each on its share of every batch.

`mpiexec -n 4 python train.py` starts four of them: `Trainer(..., distribute="auto")` sees that.
`pip install onnxfit[mpi]` brings mpi4py and an MPI library with mpiexec along.

An exception in one of the processes (ranks), a rank that is killed, and a rank that leaves early
end all of them, with one traceback. So does a rank that waits longer than the `timeout` of `MPI` or
`Torch`; the message names the exchange that it waits in.
"""

from onnxfit.distributed.communicator import Communicator
from onnxfit.distributed.launcher import launch
from onnxfit.distributed.mpi import MPI
from onnxfit.distributed.process_group import Torch

__all__ = ["MPI", "Communicator", "Torch", "launch"]
