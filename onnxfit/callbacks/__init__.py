"""Callbacks: objects whose hooks the training loop calls.

The package exports every class in the `__all__` of its modules. To add a callback, add a file with
the class and its `__all__`; `make docs` then writes the lines for type checkers below, and the
entry in docs/reference.md.
"""

from typing import TYPE_CHECKING

from onnxfit.registry import exported_members

if TYPE_CHECKING:
    # Type checkers do not run the search below, so `make docs` writes these imports.
    # begin of generated imports
    from onnxfit.callbacks.accumulation import (
        GradientAccumulationScheduler as GradientAccumulationScheduler,
    )
    from onnxfit.callbacks.averaging import StochasticWeightAveraging as StochasticWeightAveraging
    from onnxfit.callbacks.averaging import SwapEMAWeights as SwapEMAWeights
    from onnxfit.callbacks.backup import BackupAndRestore as BackupAndRestore
    from onnxfit.callbacks.batch_size_finder import BatchSizeFinder as BatchSizeFinder
    from onnxfit.callbacks.callback import Callback as Callback
    from onnxfit.callbacks.callback_list import CallbackList as CallbackList
    from onnxfit.callbacks.csv_logger import CSVLogger as CSVLogger
    from onnxfit.callbacks.csv_logger import JSONLLogger as JSONLLogger
    from onnxfit.callbacks.device_stats import DeviceStats as DeviceStats
    from onnxfit.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from onnxfit.callbacks.freezing import Freeze as Freeze
    from onnxfit.callbacks.freezing import Unfreeze as Unfreeze
    from onnxfit.callbacks.generate_samples import GenerateSamples as GenerateSamples
    from onnxfit.callbacks.gradient_norm import GradientNorm as GradientNorm
    from onnxfit.callbacks.history import History as History
    from onnxfit.callbacks.lambda_callback import LambdaCallback as LambdaCallback
    from onnxfit.callbacks.learning_rate import LearningRateScheduler as LearningRateScheduler
    from onnxfit.callbacks.learning_rate import ReduceLROnPlateau as ReduceLROnPlateau
    from onnxfit.callbacks.learning_rate_finder import LearningRateFinder as LearningRateFinder
    from onnxfit.callbacks.learning_rate_monitor import LearningRateMonitor as LearningRateMonitor
    from onnxfit.callbacks.logs import Logs as Logs
    from onnxfit.callbacks.mlflow_logger import MLflowLogger as MLflowLogger
    from onnxfit.callbacks.model_checkpoint import ModelCheckpoint as ModelCheckpoint
    from onnxfit.callbacks.optuna_pruning import OptunaPruning as OptunaPruning
    from onnxfit.callbacks.prediction_writer import PredictionWriter as PredictionWriter
    from onnxfit.callbacks.progress import ProgressBar as ProgressBar
    from onnxfit.callbacks.stateful_callback import StatefulCallback as StatefulCallback
    from onnxfit.callbacks.tensorboard import TensorBoard as TensorBoard
    from onnxfit.callbacks.terminate_on_nan import TerminateOnNaN as TerminateOnNaN
    from onnxfit.callbacks.threshold_stop import ThresholdStop as ThresholdStop
    from onnxfit.callbacks.timer import Timer as Timer
    from onnxfit.callbacks.wandb_logger import WandbLogger as WandbLogger
    # end of generated imports

_classes = {
    name: member for name, member in exported_members(__name__).items() if isinstance(member, type)
}
globals().update(_classes)
__all__ = sorted(_classes)
