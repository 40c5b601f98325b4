"""Metrics: measures of predictions, exact over the data set instead of averaged over batches.

To add a metric, add the class to the module of its family, and its name to that module's `__all__`.
The package exports every name in the `__all__` of its modules; for type checkers, each module has a
line below. `make docs` then writes the entry in docs/reference.md.
"""

from onnxfit.metrics.accuracy import *
from onnxfit.metrics.base import *
from onnxfit.metrics.confusion import *
from onnxfit.metrics.correlation import *
from onnxfit.metrics.decisions import *
from onnxfit.metrics.detection import *
from onnxfit.metrics.external import *
from onnxfit.metrics.functions import *
from onnxfit.metrics.images import *
from onnxfit.metrics.lookup import *
from onnxfit.metrics.means import *
from onnxfit.metrics.probability import *
from onnxfit.metrics.ranking import *
from onnxfit.metrics.regression import *
from onnxfit.metrics.retrieval import *
from onnxfit.metrics.segmentation import *
from onnxfit.metrics.text import *
from onnxfit.registry import exported_members

_members = exported_members(__name__)
globals().update(_members)
__all__ = sorted(_members)
