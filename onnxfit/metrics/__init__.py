"""Metrics: measures of predictions, exact over the data set instead of averaged over batches.

To add a metric, add the class to the module of its family, and its name to that module's `__all__`.
The package exports every name in the `__all__` of its modules; `make docs` then writes the lines
for type checkers below, and the entry in docs/reference.md.
"""

from typing import TYPE_CHECKING

from onnxfit.registry import exported_members

if TYPE_CHECKING:
    # Type checkers do not run the search below, so `make docs` writes these imports.
    # begin of generated imports
    from onnxfit.metrics.accuracy import Accuracy as Accuracy
    from onnxfit.metrics.accuracy import BinaryAccuracy as BinaryAccuracy
    from onnxfit.metrics.accuracy import CategoricalAccuracy as CategoricalAccuracy
    from onnxfit.metrics.accuracy import SparseCategoricalAccuracy as SparseCategoricalAccuracy
    from onnxfit.metrics.accuracy import TopKAccuracy as TopKAccuracy
    from onnxfit.metrics.base import Metric as Metric
    from onnxfit.metrics.confusion import CohenKappa as CohenKappa
    from onnxfit.metrics.confusion import ConfusionMatrix as ConfusionMatrix
    from onnxfit.metrics.confusion import MatthewsCorrelation as MatthewsCorrelation
    from onnxfit.metrics.correlation import R2 as R2
    from onnxfit.metrics.correlation import ConcordanceCorrelation as ConcordanceCorrelation
    from onnxfit.metrics.correlation import ExplainedVariance as ExplainedVariance
    from onnxfit.metrics.correlation import PearsonCorrelation as PearsonCorrelation
    from onnxfit.metrics.correlation import SpearmanCorrelation as SpearmanCorrelation
    from onnxfit.metrics.decisions import F1 as F1
    from onnxfit.metrics.decisions import BalancedAccuracy as BalancedAccuracy
    from onnxfit.metrics.decisions import FalseNegatives as FalseNegatives
    from onnxfit.metrics.decisions import FalsePositives as FalsePositives
    from onnxfit.metrics.decisions import FBeta as FBeta
    from onnxfit.metrics.decisions import Precision as Precision
    from onnxfit.metrics.decisions import Recall as Recall
    from onnxfit.metrics.decisions import Specificity as Specificity
    from onnxfit.metrics.decisions import TrueNegatives as TrueNegatives
    from onnxfit.metrics.decisions import TruePositives as TruePositives
    from onnxfit.metrics.detection import MeanAveragePrecision as MeanAveragePrecision
    from onnxfit.metrics.external import ExternalMetric as ExternalMetric
    from onnxfit.metrics.functions import EpochMetric as EpochMetric
    from onnxfit.metrics.images import PSNR as PSNR
    from onnxfit.metrics.images import SSIM as SSIM
    from onnxfit.metrics.lookup import get_metric as get_metric
    from onnxfit.metrics.means import MeanMetric as MeanMetric
    from onnxfit.metrics.probability import BrierScore as BrierScore
    from onnxfit.metrics.probability import ExpectedCalibrationError as ExpectedCalibrationError
    from onnxfit.metrics.probability import LogLoss as LogLoss
    from onnxfit.metrics.probability import Perplexity as Perplexity
    from onnxfit.metrics.ranking import AUC as AUC
    from onnxfit.metrics.ranking import AveragePrecision as AveragePrecision
    from onnxfit.metrics.ranking import PrecisionAtRecall as PrecisionAtRecall
    from onnxfit.metrics.ranking import PrecisionRecallAUC as PrecisionRecallAUC
    from onnxfit.metrics.ranking import RecallAtPrecision as RecallAtPrecision
    from onnxfit.metrics.ranking import SensitivityAtSpecificity as SensitivityAtSpecificity
    from onnxfit.metrics.ranking import SpecificityAtSensitivity as SpecificityAtSensitivity
    from onnxfit.metrics.regression import CosineSimilarity as CosineSimilarity
    from onnxfit.metrics.regression import LogCosh as LogCosh
    from onnxfit.metrics.regression import MaxError as MaxError
    from onnxfit.metrics.regression import MeanAbsoluteError as MeanAbsoluteError
    from onnxfit.metrics.regression import (
        MeanAbsolutePercentageError as MeanAbsolutePercentageError,
    )
    from onnxfit.metrics.regression import MeanSquaredError as MeanSquaredError
    from onnxfit.metrics.regression import (
        MeanSquaredLogarithmicError as MeanSquaredLogarithmicError,
    )
    from onnxfit.metrics.regression import RootMeanSquaredError as RootMeanSquaredError
    from onnxfit.metrics.regression import (
        RootMeanSquaredLogarithmicError as RootMeanSquaredLogarithmicError,
    )
    from onnxfit.metrics.regression import (
        SymmetricMeanAbsolutePercentageError as SymmetricMeanAbsolutePercentageError,
    )
    from onnxfit.metrics.retrieval import NDCG as NDCG
    from onnxfit.metrics.retrieval import HitRate as HitRate
    from onnxfit.metrics.retrieval import MeanReciprocalRank as MeanReciprocalRank
    from onnxfit.metrics.retrieval import PrecisionAtK as PrecisionAtK
    from onnxfit.metrics.retrieval import RecallAtK as RecallAtK
    from onnxfit.metrics.segmentation import Dice as Dice
    from onnxfit.metrics.segmentation import IoU as IoU
    from onnxfit.metrics.segmentation import MeanIoU as MeanIoU
    from onnxfit.metrics.text import CharacterErrorRate as CharacterErrorRate
    from onnxfit.metrics.text import WordErrorRate as WordErrorRate
    # end of generated imports

_members = exported_members(__name__)
globals().update(_members)
__all__ = sorted(_members)
