"""Several processes that train one model together, each on its share of every batch.

`mpiexec -n 4 python train.py` starts four of them: `Trainer(..., distribute="auto")` sees that.
"""

from onnxfit.distributed.communicator import Communicator

__all__ = ["Communicator"]
