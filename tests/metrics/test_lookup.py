"""Names of metrics in Keras, torchmetrics and scikit-learn."""

from __future__ import annotations

import pytest

from onnxfit.errors import UnknownNameError
from onnxfit.metrics import get_metric

KERAS = {
    "AUC": "AUC", "BinaryAccuracy": "BinaryAccuracy", "BinaryCrossentropy": "LogLoss", "BinaryIoU": "IoU",
    "CategoricalAccuracy": "CategoricalAccuracy", "CategoricalCrossentropy": "LogLoss", "ConcordanceCorrelation": "ConcordanceCorrelation",
    "CosineSimilarity": "CosineSimilarity", "F1Score": "F1", "FBetaScore": "FBeta", "FalseNegatives": "FalseNegatives",
    "FalsePositives": "FalsePositives", "LogCoshError": "LogCosh", "MeanAbsoluteError": "MeanAbsoluteError",
    "MeanAbsolutePercentageError": "MeanAbsolutePercentageError", "MeanIoU": "MeanIoU", "MeanSquaredError": "MeanSquaredError",
    "MeanSquaredLogarithmicError": "MeanSquaredLogarithmicError", "OneHotMeanIoU": "MeanIoU", "PearsonCorrelation": "PearsonCorrelation",
    "Precision": "Precision", "PrecisionAtRecall": "PrecisionAtRecall", "R2Score": "R2", "Recall": "Recall",
    "RecallAtPrecision": "RecallAtPrecision", "RootMeanSquaredError": "RootMeanSquaredError",
    "SensitivityAtSpecificity": "SensitivityAtSpecificity", "SparseCategoricalAccuracy": "SparseCategoricalAccuracy",
    "SparseCategoricalCrossentropy": "LogLoss", "SparseTopKCategoricalAccuracy": "TopKAccuracy",
    "SpecificityAtSensitivity": "SpecificityAtSensitivity", "TopKCategoricalAccuracy": "TopKAccuracy", "TrueNegatives": "TrueNegatives",
    "TruePositives": "TruePositives",
}  # fmt: skip
TORCHMETRICS = {
    "AUROC": "AUC", "AveragePrecision": "AveragePrecision", "CalibrationError": "ExpectedCalibrationError", "CharErrorRate": "CharacterErrorRate",
    "CohenKappa": "CohenKappa", "ConcordanceCorrCoef": "ConcordanceCorrelation", "ConfusionMatrix": "ConfusionMatrix",
    "ExplainedVariance": "ExplainedVariance", "JaccardIndex": "IoU", "MatthewsCorrCoef": "MatthewsCorrelation",
    "MeanAveragePrecision": "MeanAveragePrecision", "MeanSquaredLogError": "MeanSquaredLogarithmicError", "PeakSignalNoiseRatio": "PSNR",
    "PearsonCorrCoef": "PearsonCorrelation", "Perplexity": "Perplexity", "RetrievalHitRate": "HitRate", "RetrievalMRR": "MeanReciprocalRank",
    "RetrievalNormalizedDCG": "NDCG", "RetrievalPrecision": "PrecisionAtK", "RetrievalRecall": "RecallAtK",
    "SpearmanCorrCoef": "SpearmanCorrelation", "Specificity": "Specificity", "StructuralSimilarityIndexMeasure": "SSIM",
    "SymmetricMeanAbsolutePercentageError": "SymmetricMeanAbsolutePercentageError", "BinaryF1Score": "F1", "DiceScore": "Dice",
}  # fmt: skip
SKLEARN = {
    "accuracy_score": "Accuracy", "average_precision_score": "AveragePrecision", "balanced_accuracy_score": "BalancedAccuracy",
    "brier_score_loss": "BrierScore", "cohen_kappa_score": "CohenKappa", "confusion_matrix": "ConfusionMatrix",
    "explained_variance_score": "ExplainedVariance", "f1_score": "F1", "fbeta_score": "FBeta", "jaccard_score": "IoU", "log_loss": "LogLoss",
    "matthews_corrcoef": "MatthewsCorrelation", "max_error": "MaxError", "mean_absolute_error": "MeanAbsoluteError",
    "mean_absolute_percentage_error": "MeanAbsolutePercentageError", "mean_squared_error": "MeanSquaredError",
    "mean_squared_log_error": "MeanSquaredLogarithmicError", "ndcg_score": "NDCG", "precision_score": "Precision", "r2_score": "R2",
    "recall_score": "Recall", "roc_auc_score": "AUC", "root_mean_squared_error": "RootMeanSquaredError",
    "root_mean_squared_log_error": "RootMeanSquaredLogarithmicError", "top_k_accuracy_score": "TopKAccuracy",
}  # fmt: skip
NAMES = [*KERAS.items(), *TORCHMETRICS.items(), *SKLEARN.items()]
ADVICE = {
    "neg_mean_squared_error": "Did you mean 'mean_squared_error'?",
    "MulticlassAccuracy": "Did you mean 'accuracy'?",
    "MulticlassF1Score": "Did you mean 'f1_score'?",
    "BinaryCohenKappa": "Did you mean 'cohen_kappa'?",
    "MultilabelAUROC": "Did you mean 'auroc'?",
    "MultilabelF1Score": r"onnxfit\.metrics\.F1\(multi_label=True\)",
    "hamming_loss": "1 minus it the Hamming distance",
    "StatScores": "Pass 'true_positives'",
    "KLDivergence": "It is a loss of onnxfit",
    "median_absolute_error": r"EpochMetric\(sklearn\.metrics\.median_absolute_error\)",
    "Mean": r"Pass a function \(y_true, y_pred\)",
    "mean_intersection_over_unoin": r"Known: .* more\.",
}


@pytest.mark.parametrize(("name", "cls"), NAMES, ids=[name for name, _ in NAMES])
def test_a_name_of_another_library(name: str, cls: str) -> None:
    assert type(get_metric(name)).__name__ == cls


@pytest.mark.parametrize(("name", "advice"), ADVICE.items(), ids=ADVICE)
def test_advice_for_other_names(name: str, advice: str) -> None:
    with pytest.raises(UnknownNameError, match=rf"No metric is called '{name}'\. .*{advice}"):
        get_metric(name)
