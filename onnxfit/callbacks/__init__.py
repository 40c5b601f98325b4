"""Callbacks: what stands beside the training loop and acts at its hooks.

`__all__` is the registry.
"""

from onnxfit.callbacks.accumulation import GradientAccumulationScheduler
from onnxfit.callbacks.averaging import StochasticWeightAveraging, SwapEMAWeights
from onnxfit.callbacks.backup import BackupAndRestore
from onnxfit.callbacks.batch_size_finder import BatchSizeFinder
from onnxfit.callbacks.callback import Callback, CallbackList
from onnxfit.callbacks.csv_logger import CSVLogger, JSONLLogger
from onnxfit.callbacks.device_stats import DeviceStats
from onnxfit.callbacks.early_stopping import EarlyStopping
from onnxfit.callbacks.freezing import Freeze, Unfreeze
from onnxfit.callbacks.history import History
from onnxfit.callbacks.lambda_callback import LambdaCallback
from onnxfit.callbacks.learning_rate import LearningRateScheduler, ReduceLROnPlateau
from onnxfit.callbacks.learning_rate_finder import LearningRateFinder
from onnxfit.callbacks.learning_rate_monitor import LearningRateMonitor
from onnxfit.callbacks.logs import Logs
from onnxfit.callbacks.mlflow_logger import MLflowLogger
from onnxfit.callbacks.model_checkpoint import ModelCheckpoint
from onnxfit.callbacks.prediction_writer import PredictionWriter
from onnxfit.callbacks.progress import ProgressBar
from onnxfit.callbacks.remote_monitor import RemoteMonitor
from onnxfit.callbacks.tensorboard import TensorBoard
from onnxfit.callbacks.terminate_on_nan import TerminateOnNaN
from onnxfit.callbacks.threshold_stop import ThresholdStop
from onnxfit.callbacks.timer import Timer

__all__ = [
    "BackupAndRestore",
    "BatchSizeFinder",
    "CSVLogger",
    "Callback",
    "CallbackList",
    "DeviceStats",
    "EarlyStopping",
    "Freeze",
    "GradientAccumulationScheduler",
    "History",
    "JSONLLogger",
    "LambdaCallback",
    "LearningRateFinder",
    "LearningRateMonitor",
    "LearningRateScheduler",
    "Logs",
    "MLflowLogger",
    "ModelCheckpoint",
    "PredictionWriter",
    "ProgressBar",
    "ReduceLROnPlateau",
    "RemoteMonitor",
    "StochasticWeightAveraging",
    "SwapEMAWeights",
    "TensorBoard",
    "TerminateOnNaN",
    "ThresholdStop",
    "Timer",
    "Unfreeze",
]
