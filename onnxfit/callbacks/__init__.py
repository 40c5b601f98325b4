"""Callbacks: objects whose hooks the training loop calls.

The package exports every class in the `__all__` of its modules. To add a callback, add a file with
the class and its `__all__`, and for type checkers a line below. `make docs` then writes the entry
in docs/reference.md.
"""

from onnxfit.callbacks.accumulation import *
from onnxfit.callbacks.averaging import *
from onnxfit.callbacks.backup import *
from onnxfit.callbacks.batch_size_finder import *
from onnxfit.callbacks.callback import Callback as Callback  # and not HOOKS, a table
from onnxfit.callbacks.callback_list import *
from onnxfit.callbacks.csv_logger import *
from onnxfit.callbacks.device_stats import *
from onnxfit.callbacks.early_stopping import *
from onnxfit.callbacks.freezing import *
from onnxfit.callbacks.generate_samples import *
from onnxfit.callbacks.gradient_norm import *
from onnxfit.callbacks.history import *
from onnxfit.callbacks.lambda_callback import *
from onnxfit.callbacks.learning_rate import *
from onnxfit.callbacks.learning_rate_finder import *
from onnxfit.callbacks.learning_rate_monitor import *
from onnxfit.callbacks.logs import *
from onnxfit.callbacks.mlflow_logger import *
from onnxfit.callbacks.model_checkpoint import *
from onnxfit.callbacks.optuna_pruning import *
from onnxfit.callbacks.prediction_writer import *
from onnxfit.callbacks.progress import *
from onnxfit.callbacks.stateful_callback import *
from onnxfit.callbacks.tensorboard import *
from onnxfit.callbacks.terminate_on_nan import *
from onnxfit.callbacks.threshold_stop import *
from onnxfit.callbacks.timer import *
from onnxfit.callbacks.wandb_logger import *
from onnxfit.registry import exported_members

_classes = {
    name: member for name, member in exported_members(__name__).items() if isinstance(member, type)
}
globals().update(_classes)
__all__ = sorted(_classes)
