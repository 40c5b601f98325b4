"""A Trainer as a scikit-learn estimator, for GridSearchCV, Pipeline, cross_val_score and everything
else that calls `fit` and `predict`.
"""

from onnxfit.errors import InstallationError

try:
    import sklearn.base  # noqa: F401
    from sklearn.utils.validation import validate_data  # noqa: F401  new in scikit-learn 1.6
except ImportError as error:
    raise InstallationError(
        f"onnxfit.sklearn needs scikit-learn 1.6 or newer ({error}): pip install 'onnxfit[sklearn]'"
    ) from error

from onnxfit.sklearn.classifier import OnnxClassifier
from onnxfit.sklearn.regressor import OnnxRegressor

__all__ = ["OnnxClassifier", "OnnxRegressor"]
