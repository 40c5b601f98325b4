"""The time of a grid search with the estimators, beside scikit-learn's networks:

`OMP_NUM_THREADS=1 python benchmarks/grid_search.py [--epochs 10] [--repeats 5]`.

GridSearchCV tries four learning rates on five folds. Both networks have one hidden layer of 100
units, Adam, batches of 200 rows and standardized inputs, and train for the same epochs; the
variable gives NumPy's products one thread, as onnxfit has. The two searches take turns. A line gives the ratios of their times and of their processor
times, as quartiles of the repeats: other programs on the machine disturb the first more.
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from onnxfit.sklearn import OnnxClassifier

Array = npt.NDArray[Any]
LEARNING_RATES = [0.0005, 0.001, 0.002, 0.005]
DATA = {"digits": load_digits, "breast_cancer": load_breast_cancer}


def ours(epochs: int) -> GridSearchCV:
    estimator = OnnxClassifier(epochs=epochs, random_state=0)
    return GridSearchCV(estimator, {"learning_rate": LEARNING_RATES}, cv=5)


def theirs(epochs: int) -> GridSearchCV:
    network = MLPClassifier(
        max_iter=epochs, n_iter_no_change=epochs + 1, alpha=0, tol=0, random_state=0
    )
    grid = {"mlpclassifier__learning_rate_init": LEARNING_RATES}
    return GridSearchCV(make_pipeline(StandardScaler(), network), grid, cv=5)


def times(search: GridSearchCV, x: Array, y: Array) -> tuple[float, float]:
    """Return the seconds and the processor seconds of a search."""
    start, processor = time.perf_counter(), time.process_time()
    search.fit(x, y)
    return time.perf_counter() - start, time.process_time() - processor


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--epochs", type=int, default=10)
    arguments.add_argument("--repeats", type=int, default=5)
    options = arguments.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)
    for name, load in DATA.items():
        x, y = load(return_X_y=True)
        ratios = []
        for _ in range(options.repeats + 1):
            own = times(ours(options.epochs), x, y)
            ratios.append(np.divide(own, times(theirs(options.epochs), x, y)))
        wall, processor = np.quantile(ratios[1:], [0.25, 0.5, 0.75], axis=0).T.round(2)
        print(f"{name:14} time {wall}, processor time {processor} of scikit-learn's", flush=True)


if __name__ == "__main__":
    main()
