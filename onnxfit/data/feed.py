"""Data meets model: every input and label is found in what was given, checked and cast, once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from onnxfit.data.batch import Array, Batch, Columns, Target
from onnxfit.data.convert import as_array, in_c_order, in_dtype, in_shape, is_float, narrows
from onnxfit.data.structure import by_name, common_rows
from onnxfit.data.weights import row_weights, weights_by_class
from onnxfit.errors import DataError, SettingError, warn_user
from onnxfit.graph.names import SAMPLE_WEIGHT
from onnxfit.graph.spec import TensorSpec

T = TypeVar("T")

LABEL_KEYS = ("label", "labels", "y")  # what data sets call the only target


@dataclass(frozen=True)
class MatchedData:
    """What was given for each input, by its name, and as labels of each output; nothing is read
    yet.
    """

    inputs: Mapping[str, Any]
    labels: Mapping[str, Any]
    sample_weight: Any

    def leaves(self) -> list[tuple[str, Any]]:
        """Everything, and where it stands."""
        labels = ((f"y for {output}", value) for output, value in self.labels.items())
        weights = () if self.sample_weight is None else ((SAMPLE_WEIGHT, self.sample_weight),)
        return [*self.inputs.items(), *labels, *weights]

    def map(self, function: Callable[[str, Any], Any]) -> MatchedData:
        """The same with function(place, value) of each value."""
        inputs = {name: function(name, value) for name, value in self.inputs.items()}
        labels = {
            output: function(f"y for {output}", value) for output, value in self.labels.items()
        }
        return MatchedData(
            inputs,
            labels,
            None if self.sample_weight is None else function(SAMPLE_WEIGHT, self.sample_weight),
        )


@dataclass(frozen=True)
class Prepared:
    """Arrays as the graph wants them, in C order."""

    rows: int
    columns: Columns
    scalars: Columns

    def signature(self, rows: int) -> str:
        """Names, types and shapes of a batch of so many rows."""
        columns = (f"{name}:{a.dtype.str}{(rows, *a.shape[1:])}" for name, a in self.columns)
        return ";".join((*columns, *(f"{name}:{a.dtype.str}()" for name, a in self.scalars)))


@dataclass
class DataAdapter:
    """Fits data to a model: finds every input and label, checks and casts them."""

    inputs: tuple[TensorSpec, ...]
    targets: Mapping[str, Target]
    class_weight: Mapping[int, float] | None
    what: str
    _warned: bool = field(default=False, init=False)

    @property
    def fixed(self) -> TensorSpec | None:
        """An input whose batch dimension is a number."""
        return next(
            (spec for spec in self.inputs if spec.shape and isinstance(spec.shape[0], int)), None
        )

    def batch(self, given: Any) -> Batch:
        """A batch as loaders give them:

        `(x,)`, `(x, y)`, `(x, y, sample_weight)`, an array, or a dict.
        """
        x, y, sample_weight = given, None, None
        if isinstance(given, (tuple, list)):
            if not 1 <= len(given) <= 3:
                raise DataError(
                    f"a batch is (x,), (x, y) or (x, y, sample_weight), got {len(given)} items. "
                    "Several inputs are a tuple or dict inside: ((a, b), y)."
                )
            x, y, sample_weight = (*given, None, None)[:3]
        return self.matched_batch(self.match(x, y, sample_weight))

    def matched_batch(self, given: MatchedData) -> Batch:
        """A batch of what was found before."""
        prepared = self.convert(given)
        if (
            self.fixed is not None
            and self.fixed.shape is not None
            and prepared.rows != self.fixed.shape[0]
        ):
            raise DataError(
                f"the batch dimension of input {self.fixed} is fixed, and this batch has"
                f" {prepared.rows} rows. Make batches of {self.fixed.shape[0]}, and leave out a"
                " shorter last one (drop_last=True)."
            )
        return Batch(
            prepared.rows,
            prepared.signature(prepared.rows),
            prepared.columns,
            prepared.scalars,
            slice(0, prepared.rows),
        )

    def prepare(self, x: Any, y: Any, sample_weight: Any) -> Prepared:
        """Everything as the graph wants it. DataError where it does not fit."""
        return self.convert(self.match(x, y, sample_weight))

    def match(self, x: Any, y: Any, sample_weight: Any) -> MatchedData:
        """Every input and label, found but not looked at.

        DataError for what is missing or left over.
        """
        x, y, sample_weight = self._out_of_dict(x, y, sample_weight)
        inputs, labels = self._inputs(x), self._labels(y)
        if sample_weight is not None and not self.targets:
            sample_weight = self._ignore("sample weights", None)
        if sample_weight is not None and self.class_weight is not None:
            raise SettingError(
                "Give class_weight or sample_weight, not both: multiply the class weights into"
                " sample_weight."
            )
        return MatchedData(inputs, labels, sample_weight)

    def convert(self, given: MatchedData) -> Prepared:
        """What was found, checked and cast."""
        raw_inputs, raw_labels, sample_weight = given.inputs, given.labels, given.sample_weight
        inputs = [in_shape(as_array(raw_inputs[spec.name], spec), spec) for spec in self.inputs]
        labels = {
            output: as_array(value, f"y for {output}") for output, value in raw_labels.items()
        }
        weights = None if sample_weight is None else row_weights(sample_weight)
        rows = common_rows(
            [
                *zip(self.inputs, inputs),
                *((f"y for {o}", a) for o, a in labels.items()),
                (SAMPLE_WEIGHT, weights),
            ],
            self.what,
        )
        if self.class_weight is not None:
            weights = weights_by_class(next(iter(labels.values())), self.class_weight)
        columns: list[tuple[str, Array]] = []
        scalars: list[tuple[str, Array]] = []
        narrowed: list[str] = []
        for spec, array in zip(self.inputs, inputs):
            # a list has no type to lose
            if (
                hasattr(raw_inputs[spec.name], "__array__")
                and array.ndim
                and narrows(array.dtype, spec.dtype)
            ):
                narrowed.append(f"{spec.name!r} is {array.dtype} and was converted to {spec.dtype}")
            array = in_c_order(in_dtype(array, spec))
            self._check_numbers(array, spec)
            (columns if array.ndim else scalars).append((spec.name, array))
        for output, array in labels.items():
            if not array.ndim:
                raise DataError(f"y for {output} is a single number, expected one label a row.")
            array = in_c_order(self.targets[output].prepare(array))
            self._check_numbers(array, f"y for {output}")
            columns.append((self.targets[output].input, array))
        if weights is not None:
            weights = in_c_order(weights)
            self._check_numbers(weights, SAMPLE_WEIGHT)
            columns.append((SAMPLE_WEIGHT, weights))
        if narrowed and not self._warned:
            self._warned = True
            warn_user(
                f"{'; '.join(narrowed)}. Convert once with astype to save time and silence this."
            )
        return Prepared(rows, tuple(columns), tuple(scalars))

    def _check_numbers(self, array: Array, place: object) -> None:
        """DataError for NaN, except in prediction: a model may know what to do with it, a gradient
        does not.
        """
        # the minimum is NaN if anything is, and needs no array of booleans
        if (
            self.what != "prediction"
            and is_float(array.dtype)
            and array.size
            and np.isnan(array.min())
        ):
            row = int(
                np.isnan(array).reshape(len(array) if array.ndim else 1, -1).any(axis=1).argmax()
            )
            raise DataError(f"{place} is NaN in row {row}.")

    def _out_of_dict(self, x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
        """Labels and weights that stand beside the inputs in one dict."""
        if not isinstance(x, Mapping):
            return x, y, sample_weight
        others = {
            key: value for key, value in x.items() if key not in {spec.name for spec in self.inputs}
        }
        if self.what == "prediction":
            for key in (*LABEL_KEYS, SAMPLE_WEIGHT):
                others.pop(key, None)
        else:
            if y is None:
                found: dict[str, Any] = {}
                for output, target in self.targets.items():
                    keys = (output, target.input, *(LABEL_KEYS if len(self.targets) == 1 else ()))
                    present = [key for key in keys if key in others]
                    if present:
                        found[output] = others.pop(present[0])
                y = found or None
            if sample_weight is None:
                sample_weight = others.pop(SAMPLE_WEIGHT, None)
        return (
            {spec.name: x[spec.name] for spec in self.inputs if spec.name in x} | others,
            y,
            sample_weight,
        )

    def _inputs(self, x: Any) -> dict[str, Any]:
        match = by_name(x, [spec.name for spec in self.inputs], "input")
        missing = [spec for spec in self.inputs if spec.name not in match]
        surplus = [name for name in match if name not in {spec.name for spec in self.inputs}]
        if missing or surplus:
            raise DataError(
                f"The {self.what} data does not match the model's inputs."
                + (f" Missing: {'; '.join(map(str, missing))}." if missing else "")
                + (f" Not an input: {', '.join(map(repr, surplus))}." if surplus else "")
                + f" Expected: {'; '.join(map(str, self.inputs))}."
            )
        return match

    def _labels(self, y: Any) -> dict[str, Any]:
        if y is None or not self.targets:
            if self.targets:
                raise DataError(
                    f"The {self.what} data has no labels, and the loss of"
                    f" {', '.join(map(repr, self.targets))} needs them: pass y, or batches (x, y)."
                )
            return {} if y is None else self._ignore("labels", {})
        entrances = {target.input: output for output, target in self.targets.items()}
        match = {
            entrances.get(name, name): value
            for name, value in by_name(y, list(self.targets), "output with a loss").items()
        }
        if set(match) != set(self.targets):
            raise DataError(
                f"The labels are for {', '.join(map(repr, match)) or 'nothing'}; "
                f"the outputs with a loss are {', '.join(map(repr, self.targets))}."
            )
        return {output: match[output] for output in self.targets}

    def _ignore(self, given: str, nothing: T) -> T:
        """Prediction passes over labels and weights; elsewhere they would be lost silently."""
        if self.what != "prediction":
            raise DataError(
                f"The model computes its own loss, so that {given} have no place: feed them as"
                f" inputs. The inputs are {'; '.join(map(str, self.inputs))}."
            )
        return nothing
