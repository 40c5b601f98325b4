"""Scores of the estimators as they are, beside scikit-learn's networks:

`python benchmarks/estimators.py [--seeds 3] [--folds 5]`.

`OnnxRegressor()` and `OnnxClassifier()` get raw data, with no setting but the random state. Beside
them are scikit-learn's `MLPRegressor` and `MLPClassifier` with early stopping and without, on raw
data and, as the best that is known, on data that a pipeline has standardized (the targets, too).
Each figure is the mean over all folds and seeds: R² for numbers, accuracy for classes. Each seed
divides the rows anew, and is the random state of the estimators.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.compose import TransformedTargetRegressor
from sklearn.datasets import (
    load_breast_cancer,
    load_diabetes,
    load_digits,
    load_wine,
    make_friedman1,
)
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import KFold, StratifiedKFold, cross_val_score
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from onnxfit.sklearn import OnnxClassifier, OnnxRegressor

Array = npt.NDArray[Any]
MakeEstimator = Callable[[int], Any]  # of a random state


def houses(rows: int = 2000) -> tuple[Array, Array]:
    """Return data with the features and units of the California housing data, made up.

    The price in dollars depends on income, age, rooms and occupancy of a block, on the distance to
    a coast, and on two cities, with noise; it is clipped from 15,000 to 500,000.
    """
    rng = np.random.default_rng(0)
    income = rng.lognormal(1.2, 0.45, rows)
    age = rng.integers(1, 53, rows).astype(float)
    rooms = rng.lognormal(1.65, 0.25, rows)
    bedrooms = rooms * rng.uniform(0.17, 0.24, rows)
    population = rng.lognormal(7, 0.7, rows)
    occupancy = rng.lognormal(1.05, 0.25, rows)
    latitude = rng.uniform(32.5, 42, rows)
    from_coast = rng.uniform(0, 4, rows)
    longitude = -124.3 + 0.8 * (42 - latitude) + from_coast
    coast = np.exp(-((from_coast / 1.2) ** 2))
    south = np.exp(-((latitude - 34) ** 2 + (longitude + 118.2) ** 2) / 2)
    north = np.exp(-((latitude - 37.7) ** 2 + (longitude + 122.2) ** 2) / 1.5)
    place = 0.9 * coast + 1.1 * (south + north)
    house = 0.01 * age - 0.35 * np.log(occupancy) + 0.02 * rooms * bedrooms
    price = 50_000 * (0.8 * income + place + house) + rng.normal(0, 25_000, rows)
    features = [income, age, rooms, bedrooms, population, occupancy, latitude, longitude]
    return np.stack(features, axis=1), np.clip(price, 15_000, 500_000)


def scaled(estimator: Any) -> Any:
    return make_pipeline(StandardScaler(), estimator)


def scaled_with_targets(estimator: Any) -> Any:
    return TransformedTargetRegressor(scaled(estimator), transformer=StandardScaler())


REGRESSORS: dict[str, MakeEstimator] = {
    "OnnxRegressor()": lambda seed: OnnxRegressor(random_state=seed),
    "OnnxRegressor(early_stopping=True)": lambda seed: OnnxRegressor(
        early_stopping=True, random_state=seed
    ),
    "MLPRegressor(early_stopping=True)": lambda seed: MLPRegressor(
        early_stopping=True, random_state=seed
    ),
    "MLPRegressor()": lambda seed: MLPRegressor(random_state=seed),
    "the same, standardized, early stopping": lambda seed: scaled_with_targets(
        MLPRegressor(early_stopping=True, random_state=seed)
    ),
    "the same, standardized": lambda seed: scaled_with_targets(MLPRegressor(random_state=seed)),
}
CLASSIFIERS: dict[str, MakeEstimator] = {
    "OnnxClassifier()": lambda seed: OnnxClassifier(random_state=seed),
    "OnnxClassifier(early_stopping=True)": lambda seed: OnnxClassifier(
        early_stopping=True, random_state=seed
    ),
    "MLPClassifier(early_stopping=True)": lambda seed: MLPClassifier(
        early_stopping=True, random_state=seed
    ),
    "MLPClassifier()": lambda seed: MLPClassifier(random_state=seed),
    "the same, standardized, early stopping": lambda seed: scaled(
        MLPClassifier(early_stopping=True, random_state=seed)
    ),
    "the same, standardized": lambda seed: scaled(MLPClassifier(random_state=seed)),
}


def compare(
    title: str,
    estimators: dict[str, MakeEstimator],
    data: dict[str, tuple[Array, Array]],
    folds: Callable[[int], Any],
    seeds: int,
) -> None:
    """Print a table of scores, a row for each estimator."""
    print(f"| {title} | {' | '.join(data)} |\n|---|{'---:|' * len(data)}", flush=True)
    for name, make in estimators.items():
        figures = []
        for x, y in data.values():
            scores = [cross_val_score(make(s), x, y, cv=folds(s)).mean() for s in range(seeds)]
            figures.append(f"{np.mean(scores):.3f}")
        print(f"| {name} | {' | '.join(figures)} |", flush=True)
    print()


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--folds", type=int, default=5)
    options = arguments.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)

    def folds(seed: int) -> Any:
        return KFold(options.folds, shuffle=True, random_state=seed)

    def stratified(seed: int) -> Any:
        return StratifiedKFold(options.folds, shuffle=True, random_state=seed)

    numbers = {
        "diabetes": load_diabetes(return_X_y=True),
        "houses": houses(),
        "friedman1": make_friedman1(1000, noise=1.0, random_state=0),
    }
    classes = {
        "digits": load_digits(return_X_y=True),
        "wine": load_wine(return_X_y=True),
        "breast_cancer": load_breast_cancer(return_X_y=True),
    }
    compare("R²", REGRESSORS, numbers, folds, options.seeds)
    compare("accuracy", CLASSIFIERS, classes, stratified, options.seeds)


if __name__ == "__main__":
    main()
