"""Decide how a file is trained: the arguments of Trainer, and random data with which it runs."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onnxfit.errors import ModelError, OnnxfitError, SettingError
from onnxfit.gradients.inspection import Inspection
from onnxfit.graph.model import OnnxModel
from onnxfit.graph.spec import Dim
from onnxfit.load.batch_axis import INVENTED, BatchLayout
from onnxfit.load.caches import without_caches
from onnxfit.load.facts import FileFacts, InputFact
from onnxfit.load.reading import read_model
from onnxfit.script.fixes import Fix, fix_of, merged
from onnxfit.script.placeholders import (
    Array,
    Placeholder,
    drawn,
    input_placeholder,
    label_placeholder,
)
from onnxfit.tools.editing.to_float32 import to_float32
from onnxfit.trainable.adapters.lora import LoRA
from onnxfit.trainable.adapters.targets import match_adapters
from onnxfit.trainer import Trainer
from onnxfit.training.inspection import inspect_with
from onnxfit.training.training import training_of

MAX_FIXES = 4
TRIED_ROWS = 2  # rows of the batch with which sizes are tried, unless the file fixes them
MAX_TRIALS = 40
# Sizes that are tried for an axis that the file leaves open, by the kind of the input.
TRIED_SIZES = {
    "image": (64, 224, 320, 48, 32, 96, 128, 512),
    "signal": (512, 576, 1024, 4096, 16000, 48000),
    "numbers": (16, 64, 224, 32, 128, 256, 1),
}
TRIED_LENGTHS = (16, 64, 128, 8, 1)  # of all other inputs, such as token ids
TRIED_INTEGERS = (1, 0)  # the largest value of integers whose meaning is unknown
SAMPLE_RATE = 16000
RANKS = (8, 4, 2, 1)  # of adapters


@dataclass(frozen=True)
class Plan:
    """How a file is trained.

    - `path`: the file.
    - `report`: the inspection of the file, with its facts.
    - `settings`: the arguments of Trainer.
    - `fixes`: the errors that the file raised without these settings.
    - `converts`: whether the file must be converted by `to_float32`.
    - `inputs`, `labels`: random data.
    - `batch`: the rows of a batch if the file fixes them, else None.
    - `is_whole`: whether each batch is passed as it is, without rows.
    - `remarks`: the warnings of the Trainer.
    - `adapters`: the settings of adapters that fit the file, as code; None if none fit.
    - `row_seconds`: the time of a training step for each row.
    - `tried`: the names of the sizes that were chosen by trying, each with the size.
    """

    path: str
    report: Inspection
    settings: dict[str, Any]
    fixes: tuple[Fix, ...] = ()
    converts: bool = False
    inputs: tuple[Placeholder, ...] = ()
    labels: tuple[Placeholder, ...] = ()
    batch: int | None = None
    is_whole: bool = False
    remarks: tuple[str, ...] = ()
    adapters: str | None = None
    row_seconds: float = 0.0
    tried: tuple[tuple[str, int], ...] = ()

    @property
    def facts(self) -> FileFacts:
        """The facts of the report."""
        assert self.report.facts is not None
        return self.report.facts

    def trainer(self) -> Trainer:
        """Return a new trainer."""
        return trainer_of(self.path, self.settings, converts=self.converts)

    def data(self, rows: int) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return random inputs and labels."""
        return drawn(self.inputs, self.labels, rows)


def trainer_of(path: str, settings: Mapping[str, Any], *, converts: bool) -> Trainer:
    """Return a new trainer of a file, which is converted to float32 first if it must be."""
    return Trainer(to_float32(path) if converts else path, **settings)


def plan_of(path: str, progress: Callable[[str], None]) -> Plan:
    """Return how a file is trained.

    If an error names an argument that lets the file train, the plan has this argument.

    - `path`: the file.
    - `progress`: called with the name of each stage.

    ModelError, SettingError, DataError or StepError: the file does not train, and no error names an
    argument that helps.
    """
    settings: dict[str, Any] = {}
    fixes: list[Fix] = []
    converts = False
    while True:
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                plan = _attempt(path, settings, converts, progress)
        except OnnxfitError as error:
            fix = fix_of(str(error))
            if fix is None or len(fixes) == MAX_FIXES or fix in fixes:
                raise
            fixes.append(fix)
            converts |= fix.converts
            settings = merged(settings, fix.settings)
            continue
        texts = [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
        return replace(plan, fixes=tuple(fixes), remarks=tuple(dict.fromkeys(texts)))


def _attempt(
    path: str, fixed: Mapping[str, Any], converts: bool, progress: Callable[[str], None]
) -> Plan:
    """Return the plan of a file with some settings, after a step with random data."""
    progress("reading the file")
    file = read_model(to_float32(path) if converts else path)
    report = inspect_with(file, fixed)
    assert report.facts is not None
    settings = {**_settings(report.facts), **fixed}
    report = _with_constants(report, file, settings)
    plan = _with_losses(Plan(path, report, settings, converts=converts), file)
    progress("building the training step")
    trainer = plan.trainer()
    layout = training_of(trainer).recipe.layout
    plan = replace(plan, batch=_fixed_rows(plan, layout), is_whole=layout.is_whole)
    progress("trying sizes")
    plan, outputs = _with_inputs(plan, trainer)
    plan = _with_labels(plan, outputs, layout)
    progress("training one step")
    x, y = plan.data(plan.batch or TRIED_ROWS)
    trainer.train_on_batch(x, y or None)  # compiles the step
    began = time.perf_counter()
    trainer.train_on_batch(x, y or None)
    seconds = (time.perf_counter() - began) / (plan.batch or TRIED_ROWS)
    return replace(plan, adapters=_adapters(file), row_seconds=seconds)


def _with_constants(report: Inspection, file: OnnxModel, settings: Mapping[str, Any]) -> Inspection:
    """Return the report on what trains if some inputs are constants, with the facts of the file."""
    if not settings.get("fixed_inputs"):
        return report
    later = inspect_with(file, settings)
    assert report.facts is not None
    assert later.facts is not None
    facts = replace(report.facts, last_layer=later.facts.last_layer)
    return replace(later, facts=facts, batch_axes=report.batch_axes)


def _settings(facts: FileFacts) -> dict[str, Any]:
    """Return the arguments of Trainer that the facts ask for."""
    settings: dict[str, Any] = {"optimizer": "adam"}
    values = {"sample rate": SAMPLE_RATE, "state": 0}
    fixed: dict[str, Any] = {
        one.name: values.get(one.kind, 1) for one in facts.inputs if one.is_fixed
    }
    # A state without a batch axis belongs to a batch as a whole. Its open sizes are taken as 1.
    fixed |= {
        one.name: np.zeros([_size_or_one(size) for size in one.shape or ()], one.dtype)
        for one in facts.inputs
        if one.next_state is not None and one.batch_axis is None and _open_axes(one)
    }
    if fixed:
        settings["fixed_inputs"] = fixed
    if facts.state_outputs:
        settings["state_outputs"] = facts.state_outputs
    return settings


def _size_or_one(size: Dim) -> int:
    return size if isinstance(size, int) else 1


def _with_losses(plan: Plan, file: OnnxModel) -> Plan:
    """Return the plan with a loss for each output that weights can be trained by."""
    losses = {one.name: one.loss for one in plan.facts.outputs if one.loss is not None}
    own = next((one for one in plan.facts.outputs if (one.name, one.shape) == ("loss", ())), None)
    if own is not None:
        return plan
    if len(losses) > 1:
        form = {name: plan.settings[name] for name in ("quantization",) if name in plan.settings}
        trains = [name for name in losses if inspect_with(file, form, outputs=[name]).trains]
        losses = {name: losses[name] for name in trains or losses}
    if not losses:
        raise ModelError(" ".join(["The file does not train.", *plan.report.problems]))
    return replace(plan, settings={**plan.settings, "loss": losses})


def _data_inputs(plan: Plan) -> list[InputFact]:
    """Return the inputs that the data has."""
    taken = {*plan.settings.get("fixed_inputs", ()), *plan.facts.state_outputs.values()}
    return [one for one in plan.facts.inputs if one.name not in taken]


def _fixed_rows(plan: Plan, layout: BatchLayout) -> int | None:
    """Return the rows of a batch if the file fixes them."""
    rows = [layout.inputs[one.name].spec.rows for one in _data_inputs(plan)]
    sizes = [size for size in rows if isinstance(size, int)]
    scores = [one for one in plan.facts.outputs if one.loss is not None]
    first_states = plan.settings.get("fixed_inputs", {}).values()
    if any(isinstance(value, np.ndarray) for value in first_states):
        return 1
    if not sizes and any(one.shape == () for one in scores):
        return 1  # the output has one number for each batch
    return sizes[0] if sizes else None


# ---------------------------------------------------------------------- sizes


def _with_inputs(plan: Plan, trainer: Trainer) -> tuple[Plan, dict[str, Any]]:
    """Return the plan with inputs for which the file runs, and its outputs."""
    inputs = _data_inputs(plan)
    error: Exception | None = None
    rows = plan.batch or TRIED_ROWS
    for sizes, maximum in _trials(inputs):
        tried = replace(plan, inputs=_placeholders(inputs, sizes, maximum))
        try:
            outputs = trainer.predict_on_batch(tried.data(rows)[0])
        except Exception as raised:  # onnxruntime raises its own classes
            error = error or raised
            continue
        if not isinstance(outputs, dict):
            outputs = {plan.facts.outputs[0].name: outputs}
        names = {
            key if isinstance(key, str) else f"axis {key[1]} of {key[0]}": size
            for key, size in sizes.items()
        }
        return replace(tried, tried=tuple(names.items())), outputs
    if plan.batch is None and rows > 1:  # the graph may need one row, although the file names none
        return _with_inputs(replace(plan, batch=1), trainer)
    if isinstance(error, OnnxfitError):
        raise error
    raise SettingError(f"The file runs with none of the sizes tried. First error: {error}")


Key = Any  # the name of a size, or input and axis for a size without a name


def _open_axes(one: InputFact) -> dict[int, Key]:
    """Return the axes whose size the file leaves open, except that of the rows."""
    found: dict[int, Key] = {}
    for axis, size in enumerate(one.shape or ()):
        if axis != one.batch_axis and not isinstance(size, int):
            named = isinstance(size, str) and size and not INVENTED.fullmatch(size)
            found[axis] = size if named else (one.name, axis)
    return found


def _trials(inputs: Sequence[InputFact]) -> Iterator[tuple[dict[Key, int], int]]:
    """Yield sizes and a greatest integer, the most usual ones first."""
    candidates: dict[Key, Sequence[int]] = {}
    for one in inputs:
        for key in _open_axes(one).values():
            candidates.setdefault(key, TRIED_SIZES.get(one.kind, TRIED_LENGTHS))
    choices = [range(len(sizes)) for sizes in candidates.values()]
    places = sorted(itertools.product(*choices), key=lambda p: (max(p, default=0), len(set(p))))
    guesses = any(one.kind == "integers" for one in inputs)
    for place in places[:MAX_TRIALS]:
        sizes = {key: candidates[key][i] for key, i in zip(candidates, place)}
        for maximum in TRIED_INTEGERS[: 2 if guesses else 1]:
            yield sizes, maximum


def _placeholders(
    inputs: Sequence[InputFact], sizes: Mapping[Key, int], maximum: int
) -> tuple[Placeholder, ...]:
    found = []
    length = next(iter(sizes.values()), 1)
    for one in inputs:
        open_axes = _open_axes(one)
        shape = tuple(
            None
            if axis == one.batch_axis
            else sizes[open_axes[axis]]
            if axis in open_axes
            else int(size or 0)
            for axis, size in enumerate(one.shape or ())
        )
        found.append(input_placeholder(one, shape, length, maximum))
    return tuple(found)


# ---------------------------------------------------------------------- labels


def _with_labels(plan: Plan, outputs: Mapping[str, Any], layout: BatchLayout) -> Plan:
    """Return the plan with labels that fit the outputs of a batch."""
    losses: Mapping[str, str] = plan.settings.get("loss") or {}
    types = {one.name: one.dtype for one in plan.facts.outputs}
    ids = next((one.name for one in plan.facts.inputs if one.kind == "token ids"), None)
    rows = plan.batch or TRIED_ROWS
    labels = []
    for name, loss in losses.items():
        array = outputs[name]
        if isinstance(array, list):  # an output without rows has an array for each batch
            array = array[0]
        if not plan.is_whole:
            array = layout.outputs[name].in_view(array)
        counted = -1 if plan.is_whole else rows
        labels.append(label_placeholder(name, loss, array, counted, types[name], ids))
    return replace(plan, labels=tuple(labels))


def _adapters(file: OnnxModel) -> str | None:
    """Return the code of adapters that fit linear layers of the file; None if none fit."""
    view = without_caches(file.proto)
    for rank in RANKS:
        try:
            if match_adapters(view, [LoRA(rank=rank)]):
                return f"onnxfit.LoRA(rank={rank})"
        except OnnxfitError:
            continue
    return None
