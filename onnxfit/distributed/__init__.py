"""Several processes that train one model together, each on its share of every batch.

`mpiexec -n 4 python train.py` starts four of them: `Trainer(..., distribute="auto")` sees that.
"""

from onnxfit.distributed.communicator import Communicator
from onnxfit.distributed.launcher import launch
from onnxfit.distributed.mpi import MPI
from onnxfit.distributed.process_group import Torch

__all__ = ["MPI", "Communicator", "Torch", "launch"]
