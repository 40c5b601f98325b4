"""Callbacks: what stands beside the training loop and acts at its hooks. `__all__` is the registry."""

from onnxfit.callbacks.callback import Callback, CallbackList
from onnxfit.callbacks.csv_logger import CSVLogger, JSONLLogger
from onnxfit.callbacks.early_stopping import EarlyStopping
from onnxfit.callbacks.history import History
from onnxfit.callbacks.lambda_callback import LambdaCallback
from onnxfit.callbacks.learning_rate import LearningRateScheduler, ReduceLROnPlateau
from onnxfit.callbacks.logs import Logs
from onnxfit.callbacks.model_checkpoint import ModelCheckpoint
from onnxfit.callbacks.progress import ProgressBar
from onnxfit.callbacks.tensorboard import TensorBoard
from onnxfit.callbacks.terminate_on_nan import TerminateOnNaN

__all__ = [
    "CSVLogger",
    "Callback",
    "CallbackList",
    "EarlyStopping",
    "History",
    "JSONLLogger",
    "LambdaCallback",
    "LearningRateScheduler",
    "Logs",
    "ModelCheckpoint",
    "ProgressBar",
    "ReduceLROnPlateau",
    "TensorBoard",
    "TerminateOnNaN",
]
