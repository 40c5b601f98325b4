"""The data adapter, which matches data with a model's inputs and labels, and converts the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from onnxfit.checks import check_arguments
from onnxfit.data.batch import Array, Batch, Columns, Target, signature_of
from onnxfit.data.convert import (
    as_array,
    in_c_order,
    in_dtype,
    in_shape,
    is_float,
    narrows,
    rows_first,
    whole_array,
)
from onnxfit.data.order import checked_batch_size
from onnxfit.data.source import Batching, Source, source_class
from onnxfit.data.structure import by_name, common_rows, is_list_of_arrays, length_of
from onnxfit.data.weights import (
    check_shape_of_weights,
    checked_class_weight,
    checked_weights,
    weights_by_class,
    without_weightless_labels,
    without_weightless_rows,
)
from onnxfit.errors import DataError, SettingError, UnknownNameError, warn_user
from onnxfit.graph.names import SAMPLE_WEIGHT, weight_of
from onnxfit.graph.names import sample_weight as sample_weight_name
from onnxfit.graph.spec import TensorSpec

__all__ = ["DataAdapter"]

T = TypeVar("T")

# Purposes that ignore labels and sample weights
WITHOUT_LABELS = ("prediction", "calibration")
# Up to this number of bytes, doubles become floats without a warning: it takes little time.
MAX_SILENT_BYTES = 100 * 10**6
LABEL_KEYS = ("label", "labels", "y")  # names that data sets have for their only target


@dataclass(frozen=True)
class MatchedData:
    """Data matched with a model, but neither read nor checked yet.

    `inputs` maps each input's name, and `labels` each output's name, to the value passed for it.
    `weights` maps the names of the graph's inputs to the sample weights of all outputs, or of one.
    """

    inputs: Mapping[str, Any]
    labels: Mapping[str, Any]
    weights: Mapping[str, Any]

    def named_values(self) -> list[tuple[str, Any]]:
        """Return every value with the name that messages use for it."""
        labels = [(_label_name(output), value) for output, value in self.labels.items()]
        weights = [(_weight_name(name), value) for name, value in self.weights.items()]
        return [*self.inputs.items(), *labels, *weights]

    def map(self, function: Callable[[str, Any], Any]) -> MatchedData:
        """Return a copy with each value replaced by `function(name, value)`."""
        return MatchedData(
            {name: function(name, value) for name, value in self.inputs.items()},
            {output: function(_label_name(output), value) for output, value in self.labels.items()},
            {name: function(_weight_name(name), value) for name, value in self.weights.items()},
        )


@dataclass(frozen=True)
class ConvertedData:
    """Arrays in the types and shapes of the graph, in C order."""

    rows: int
    columns: Columns
    scalars: Columns

    def signature(self, rows: int) -> str:
        """Return the names, types and shapes of a batch of `rows` rows, as one string."""
        return signature_of(self.columns, self.scalars, rows)


class DataAdapter:
    """Adapter of data to a model: it matches data by name with inputs and labels, checks and casts.

    - `inputs`: the TensorSpecs of the model's inputs, in the model's order. Data has their layout.
      Batches have the batch on the first axis.
    - `targets`: a dict output -> Target of the outputs that need labels, in the model's order.
      Prediction and calibration ignore it.
    - `purpose`: "training", "validation", "evaluation", "prediction" or "calibration". Messages
      name it; loaders shuffle for training only; prediction and calibration ignore labels and
      sample weights. Prediction accepts NaN; calibration also rejects infinite numbers.
    - `seed`: the seed of the order of rows, if they are shuffled. A loader's own seed takes
      precedence.
    - `class_weight`: a dict class number -> weight, for a model with one output that needs labels.
    - `losses`: a dict loss -> the keys of its labels in `targets`, for losses with several arrays
      of labels, or without labels. None for one array for each loss, under its name.
    - `ranks`: processes that share each batch. A model with a fixed batch dimension of b rows then
      needs batches of b * ranks rows.

    SettingError: the class weights are not finite numbers, or the model does not have exactly one
    output that needs labels.
    """

    @check_arguments
    def __init__(
        self,
        inputs: Sequence[TensorSpec],
        targets: Mapping[str, Target],
        *,
        purpose: str = "training",
        seed: int = 0,
        class_weight: Mapping[int, float] | None = None,
        ranks: int = 1,
        losses: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.inputs = tuple(inputs)
        self.targets: dict[str, Target] = {} if purpose in WITHOUT_LABELS else dict(targets)
        self.losses: dict[str, list[str]] = {name: [name] for name in self.targets}
        if losses is not None and purpose not in WITHOUT_LABELS:
            self.losses = {name: list(labels) for name, labels in losses.items()}
        self.purpose = purpose
        self.seed = seed
        self.class_weight = checked_class_weight(class_weight, self.targets)
        self.ranks = ranks
        self._converts_shares = False
        self._warned = False
        self._narrowed_bytes = 0  # so far, of the current source

    def shared_by(self, ranks: int, *, converts_shares: bool = False) -> DataAdapter:
        """Return an adapter for batches that `ranks` processes share.

        - `ranks`: the number of processes.
        - `converts_shares`: whether `batch` and `matched_batch` get the share of one rank instead
          of the rows of all ranks.
        """
        adapter = copy(self)
        adapter.ranks = ranks
        adapter._converts_shares = converts_shares
        return adapter

    @check_arguments
    def source(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        batch_size: int,
        shuffle: bool = False,
    ) -> Source:
        """Return the source of batches for any kind of data that `fit` takes.

        - `x`: arrays, dicts and lists of arrays, pandas and `DataLoader` are checked and cast here,
          once. Arrays on disk (`np.memmap`, paths of .npy and .npz files), `ParquetLoader`,
          `ImageFolder`, Hugging Face datasets, objects with `__len__` and `__getitem__` of
          batches, iterables of batches and functions that return an iterator are checked and cast
          batch by batch. `Prefetch` does the same in a thread, for data that comes in batches.
        - `y`, `sample_weight`: labels and weights for arrays. Data that comes in batches contains
          its own.
        - `batch_size`: rows of a batch, if the data does not come in batches.
        - `shuffle`: give the rows of arrays, and batches that can be indexed, a new order every
          epoch. Iterables keep their own order, and loaders have their own setting.

        DataError: the data does not fit the model. SettingError: two arguments cannot be combined.
        """
        source_type = source_class(x)
        if source_type is None:
            kind = "None" if x is None else f"of type {type(x).__name__}"
            raise DataError(
                f"The {self.purpose} data is {kind}. Expected arrays, a dict or list of arrays, an"
                " onnxfit.DataLoader, an iterable of batches, or a function that returns an"
                " iterator of batches."
            )
        size = checked_batch_size(batch_size)
        if not source_type.takes_labels:
            _refuse_beside_batches(x, y, sample_weight)
        adapter = copy(self)  # each source warns once
        adapter._warned = False
        adapter._narrowed_bytes = 0
        batching = Batching(size, adapter.seed if shuffle else None)
        data = (x, y, sample_weight) if source_type.takes_labels else x
        return source_type.from_data(adapter, data, batching)

    @property
    def fixed_input(self) -> TensorSpec | None:
        """First input whose batch dimension is a number, or None."""
        return next((spec for spec in self.inputs if isinstance(spec.rows, int)), None)

    @cached_property
    def is_whole(self) -> bool:
        """Whether arrays cannot be divided into batches, because no input has rows."""
        sized = [spec for spec in self.inputs if spec.shape != ()]
        return bool(sized) and not any(spec.has_rows for spec in sized)

    def selected(self, matched: MatchedData, select: Callable[[Any], Any]) -> MatchedData:
        """Return `matched` with the function `select` applied to the values that have rows."""
        without = {spec.name for spec in self.inputs if not spec.has_rows}
        return matched.map(lambda name, value: value if name in without else select(value))

    def batch(self, item: Any) -> Batch:
        """Return the batch for an item of a loader or an iterable.

        - `item`: `(x,)`, `(x, y)`, `(x, y, sample_weight)`, an array, or a dict of inputs that also
          contains the labels.

        DataError: the item does not fit the model.
        """
        elements: Sequence[Any] = (item,)
        if isinstance(item, (tuple, list)):
            if not 1 <= len(item) <= 3:
                raise DataError(
                    "a batch must be (x,), (x, y) or (x, y, sample_weight), got a tuple of"
                    f" {len(item)} items. Pass several inputs as a tuple or dict: ((a, b), y)."
                )
            elements = item
        return self.matched_batch(self.match(*elements))

    def matched_batch(self, matched: MatchedData) -> Batch:
        """Return a batch of `matched`, the result of `match`. DataError: it does not fit."""
        data = self.convert(matched)
        rows = data.rows
        self._check_fixed_rows(rows)
        return Batch(rows, data.signature(rows), data.columns, data.scalars, slice(0, rows))

    def _check_fixed_rows(self, rows: int) -> None:
        """Raise DataError if the model's batch dimension is fixed at another number of rows."""
        fixed = self.fixed_input
        if fixed is None:
            return
        each = fixed.rows
        assert isinstance(each, int)
        needed = each * self.ranks
        if rows == (each if self._converts_shares else needed):
            return
        kind = "share of a batch" if self._converts_shares else "batch"
        shares = "" if self.ranks == 1 else f" ({each} for each of {self.ranks} ranks)"
        raise DataError(
            f"the batch dimension of input {fixed} is fixed, but this {kind} has {rows} rows. Pass"
            f" batches of {needed} rows{shares}, and drop a shorter last batch (drop_last=True)."
        )

    def match(self, x: Any, y: Any = None, sample_weight: Any = None) -> MatchedData:
        """Match `x`, `y` and `sample_weight` with inputs and outputs, without reading them.

        DataError: data is missing, or the model does not take it. SettingError: there are both
        sample weights and class weights.
        """
        x, y, sample_weight = self._split_dict(x, y, sample_weight)
        inputs = self._match_inputs(x)
        labels = self._match_labels(y)
        if sample_weight is not None and not self.losses:
            sample_weight = self._without_targets("sample weights", None)
        if sample_weight is not None and self.class_weight is not None:
            raise SettingError(
                "Pass class_weight or sample_weight, not both. To use both, multiply the class"
                " weights into sample_weight."
            )
        return MatchedData(inputs, labels, self._match_weights(sample_weight))

    def convert(self, matched: MatchedData) -> ConvertedData:
        """Check and cast `matched`, the result of `match`. DataError: it does not fit."""
        inputs = [_shaped(as_array(matched.inputs[spec.name], spec), spec) for spec in self.inputs]
        labels = {
            output: as_array(value, _label_name(output)) for output, value in matched.labels.items()
        }
        weights = {
            name: checked_weights(value, _weight_name(name))
            for name, value in matched.weights.items()
        }
        label_arrays = [(_label_name(output), array) for output, array in labels.items()]
        weight_arrays = [(_weight_name(name), array) for name, array in weights.items()]
        rows = self._rows([*zip(self.inputs, inputs)], [*label_arrays, *weight_arrays])
        if self.class_weight is not None:
            ((label, classes),) = labels.items()
            loss = next(name for name, own in self.losses.items() if label in own)
            name = SAMPLE_WEIGHT if len(self.losses) == 1 else sample_weight_name(loss)
            weights = {name: weights_by_class(classes, self.class_weight)}
        inputs, labels = self._without_weightless(inputs, labels, weights)
        columns, scalars = self._convert_inputs(inputs, matched.inputs)
        columns += self._convert_labels(labels, rows)
        columns += [(name, in_c_order(array)) for name, array in weights.items()]
        if self.is_whole:  # several outputs may have their own numbers of rows
            scalars += [(name, array) for name, array in columns if len(array) != rows]
            columns = [(name, array) for name, array in columns if len(array) == rows]
        return ConvertedData(rows, tuple(columns), tuple(scalars))

    def _rows(self, inputs: list[tuple[TensorSpec, Array]], labels: list[tuple[str, Array]]) -> int:
        """Return the number of rows, which is that of the first labels if no input has rows."""
        if not self.is_whole:
            having = [(spec, array) for spec, array in inputs if spec.has_rows]
            return self.common_rows([*having, *labels])
        return next((len(array) for _, array in labels if array.ndim), 1)

    def common_rows(self, arrays: Iterable[tuple[object, Any]]) -> int:
        """Return the common number of rows of `arrays`, pairs (name, array).

        DataError: the numbers differ, or there are no rows.
        """
        pairs = [(name, array) for name, array in arrays if length_of(array) is not None]

        def hint(rows: int) -> str:
            by_name = {str(name): array for name, array in pairs}
            sizes = {name: len(array) for name, array in by_name.items()}
            wrong = [n for n in self.targets if sizes.get(_label_name(n), rows) != rows]
            advice: Any = getattr(self.targets[wrong[0]], "hint", None) if wrong else None
            if advice is None:
                return ""
            shape = getattr(by_name[_label_name(wrong[0])], "shape", ())
            return str(advice(rows, shape))

        return common_rows(pairs, self.purpose, hint)

    def _without_weightless(
        self, inputs: list[Array], labels: dict[str, Array], weights: Mapping[str, Array]
    ) -> tuple[list[Array], dict[str, Array]]:
        """Return inputs and labels in which rows and labels of weight 0 are finite numbers."""
        shared = weights.get(SAMPLE_WEIGHT)
        for name, array in weights.items():
            of = {
                _label_name(label): labels[label]
                for loss, own_labels in self.losses.items()
                for label in own_labels
                # The weights belong to the entries of the loss, which need not be the labels.
                if not getattr(self.targets[label], "is_declared", False)
                and name in (SAMPLE_WEIGHT, sample_weight_name(loss))
            }
            check_shape_of_weights(array, of, _weight_name(name))
        places = [i for i, spec in enumerate(self.inputs) if spec.has_rows]
        having = [inputs[i] for i in places]
        if shared is not None:
            arrays = without_weightless_rows([*having, *labels.values()], shared)
            having, label_values = arrays[: len(having)], arrays[len(having) :]
            labels = dict(zip(labels, label_values))
        elif len(weights) == len(self.losses) > 0 and having:
            # a row counts if it counts for any output
            counts = [(w != 0).any(axis=tuple(range(1, w.ndim))) for w in weights.values()]
            having = without_weightless_rows(having, np.logical_or.reduce(counts))
        inputs = [*inputs]
        for i, array in zip(places, having):
            inputs[i] = array
        finite = dict(labels)
        for loss, label in ((one, label) for one, own in self.losses.items() for label in own):
            own_weights, array = weight_of(loss, weights), labels[label]
            if own_weights is None:
                continue
            if shared is None:
                (array,) = without_weightless_rows([array], own_weights)
            finite[label] = without_weightless_labels(array, own_weights)
        return inputs, finite

    def _convert_inputs(
        self, arrays: Sequence[Array], values: Mapping[str, Any]
    ) -> tuple[list[tuple[str, Array]], list[tuple[str, Array]]]:
        """Return the inputs with rows and the inputs without rows, in the types of the graph."""
        columns: list[tuple[str, Array]] = []
        scalars: list[tuple[str, Array]] = []
        narrowed: list[str] = []
        for spec, array in zip(self.inputs, arrays):
            # A list of numbers has no element type, so no warning about narrowing applies.
            typed = hasattr(values[spec.name], "__array__") and array.ndim
            if typed and narrows(array.dtype, spec.dtype):
                narrowed.append(f"{spec.name!r} was converted from {array.dtype} to {spec.dtype}")
                self._narrowed_bytes += array.nbytes
            array = in_c_order(in_dtype(array, spec))
            self._check_numbers(array, spec)
            (columns if spec.has_rows and array.ndim else scalars).append((spec.name, array))
        if self._narrowed_bytes > MAX_SILENT_BYTES and narrowed and not self._warned:
            self._warned = True
            warn_user(
                f"{'; '.join(narrowed)}. To save time and memory and avoid this warning, convert"
                " the data once with astype."
            )
        return columns, scalars

    def _convert_labels(self, labels: Mapping[str, Array], rows: int) -> list[tuple[str, Array]]:
        """Return the labels under the names of the graph inputs that take them.

        A single number is the label of the only row.
        """
        columns = []
        for output, array in labels.items():
            if not array.ndim and (rows == 1 or self.is_whole):
                array = array[None]
            if not array.ndim:
                raise DataError(
                    f"{_label_name(output)} is a single number. Expected one label per row."
                )
            array = in_c_order(self.targets[output].prepare(array))
            self._check_numbers(array, _label_name(output))
            columns.append((self.targets[output].input, array))
        return columns

    def _check_numbers(self, array: Array, name: object) -> None:
        """Raise DataError for NaN, except in prediction; in calibration also for infinite numbers.

        A model may handle NaN in prediction. In training and calibration, NaN would spread to the
        gradients and to the ranges of values.
        """
        if self.purpose == "prediction" or not is_float(array.dtype) or not array.size:
            return
        # The minimum is NaN if any element is NaN, and computing it needs no array of booleans.
        if np.isnan(array.min()):
            rows = np.isnan(array).reshape(len(array) if array.ndim else 1, -1)
            raise DataError(f"{name} has NaN in row {int(rows.any(axis=1).argmax())}.")
        if self.purpose == "calibration" and np.isinf((array.min(), array.max())).any():
            rows = np.isinf(array).reshape(len(array) if array.ndim else 1, -1)
            raise DataError(
                f"{name} has an infinite number in row {int(rows.any(axis=1).argmax())}."
            )

    def _split_dict(self, x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
        """Return x, y and sample_weight, with labels and weights taken out of a dict of inputs."""
        if not isinstance(x, Mapping):
            return x, y, sample_weight
        names = {spec.name for spec in self.inputs}
        others = {key: value for key, value in x.items() if key not in names}
        if self.purpose in WITHOUT_LABELS:
            for key in (*LABEL_KEYS, SAMPLE_WEIGHT):
                others.pop(key, None)
        else:
            if y is None:
                y = self._pop_labels(others) or None
            if sample_weight is None:
                sample_weight = others.pop(SAMPLE_WEIGHT, None)
        inputs = {spec.name: x[spec.name] for spec in self.inputs if spec.name in x}
        return inputs | others, y, sample_weight

    def _pop_labels(self, values: dict[str, Any]) -> dict[str, Any]:
        """Remove the labels of each output from a dict, and return them by output."""
        labels: dict[str, Any] = {}
        for label in self.targets:
            present = [key for key in self._keys_of(label) if key in values]
            if present:
                labels[label] = values.pop(present[0])
        for loss, own in self.losses.items():
            if [loss] != own and isinstance(values.get(loss), Mapping):
                labels[loss] = values.pop(loss)
        return labels

    def _keys_of(self, label: str) -> list[str]:
        """Return the names that data may have for an array of labels."""
        keys = [label, self.targets[label].input]
        if len(self.targets) == 1:
            keys += LABEL_KEYS
        elif sum(map(bool, self.losses.values())) == 1:
            keys.append(label.rpartition("/")[2])
        return keys

    @property
    def label_names(self) -> set[str]:
        """All names that data may have for arrays of labels."""
        return {key for label in self.targets for key in self._keys_of(label)}

    def _match_inputs(self, x: Any) -> dict[str, Any]:
        names = [spec.name for spec in self.inputs]
        values = by_name(x, names, "input")
        missing = [spec for spec in self.inputs if spec.name not in values]
        surplus = [name for name in values if name not in names]
        if missing or surplus:
            problems = [f"The {self.purpose} data does not match the model's inputs."]
            if missing:
                problems.append(f"Missing: {'; '.join(map(str, missing))}.")
            if surplus:
                problems.append(f"Not inputs of the model: {', '.join(map(repr, surplus))}.")
            problems.append(f"Expected: {'; '.join(map(str, self.inputs))}.")
            raise DataError(" ".join(problems))
        for spec in self.inputs:
            values[spec.name] = rows_first(values[spec.name], spec)
        return values

    def _match_labels(self, y: Any) -> dict[str, Any]:
        if not self.targets:
            if y is not None and self.losses:
                raise DataError(
                    "The loss takes no labels, but the data has y. Remove y, or declare the labels"
                    " in the loss: Joint(..., labels='int64[b]')."
                )
            return {} if y is None else self._without_targets("labels", {})
        if y is None:
            raise DataError(
                f"The {self.purpose} data has no labels, but the loss of"
                f" {', '.join(map(repr, self.targets))} needs labels. Pass y, or batches (x, y)."
            )
        labels = by_name(y, list(self.targets), "output with a loss")
        for loss, own in self.losses.items():
            nested = labels.get(loss) if own != [loss] else None
            if isinstance(nested, Mapping):
                labels |= {f"{loss}/{name}": value for name, value in labels.pop(loss).items()}
        known = {key: label for label in self.targets for key in self._keys_of(label)}
        labels = {known.get(name, name): value for name, value in labels.items()}
        if set(labels) != set(self.targets):
            raise DataError(
                f"The labels are for {', '.join(map(repr, labels)) or 'no output'}, but the"
                f" outputs with a loss are {', '.join(map(repr, self.targets))}."
            )
        return {output: labels[output] for output in self.targets}

    def _match_weights(self, sample_weight: Any) -> dict[str, Any]:
        """Return the weights under the names of the graph inputs that take them.

        Several outputs may have weights of their own, by name, or as a list in the order of the
        outputs. An output without weights counts every row once.
        """
        if sample_weight is None:
            return {}
        outputs = list(self.losses)
        if is_list_of_arrays(sample_weight) and len(sample_weight) == len(outputs) > 1:
            sample_weight = dict(zip(outputs, sample_weight))
        if not isinstance(sample_weight, Mapping):
            return {SAMPLE_WEIGHT: sample_weight}
        for name in sample_weight:
            if name not in outputs:
                raise UnknownNameError("output with a loss, in sample_weight,", name, outputs)
        given = {name: value for name, value in sample_weight.items() if value is not None}
        if len(outputs) == 1:
            return {SAMPLE_WEIGHT: given[outputs[0]]} if given else {}
        return {sample_weight_name(name): given[name] for name in outputs if name in given}

    def _without_targets(self, kind: str, default: T) -> T:
        """Return `default` in prediction and calibration, which ignore labels and weights.

        DataError, for other purposes: labels or weights would be ignored silently.
        """
        if self.purpose not in WITHOUT_LABELS:
            raise DataError(
                f"The model computes its own loss and cannot use {kind} from y or sample_weight."
                f" Pass them as inputs. The inputs are {'; '.join(map(str, self.inputs))}."
            )
        return default


def _shaped(array: Array, spec: TensorSpec) -> Array:
    """Return the array of an input, rows first. DataError: its shape does not fit."""
    return in_shape(array, spec.rows_first()) if spec.has_rows else whole_array(array, spec)


def _label_name(output: str) -> str:
    """Return the name that messages use for the labels of an output."""
    return f"y for {output}"


def _weight_name(name: str) -> str:
    """Return the name that messages use for the sample weights of all outputs, or of one."""
    output = name.removeprefix(f"{SAMPLE_WEIGHT}/")
    return SAMPLE_WEIGHT if output == name else f"{SAMPLE_WEIGHT} for {output}"


def _refuse_beside_batches(data: Any, y: Any, sample_weight: Any) -> None:
    for name, value in (("y", y), ("sample_weight", sample_weight)):
        if value is not None:
            raise SettingError(
                f"{type(data).__name__} returns batches, which must contain their labels and sample"
                f" weights. Remove the argument {name}."
            )
