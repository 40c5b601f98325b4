"""Compare a trained file with what its parent, its data and its settings give."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from onnxfit.checks import check_arguments, shortened
from onnxfit.errors import (
    CheckpointError,
    OnnxfitError,
    SettingError,
    UnknownNameError,
    listed_names,
)
from onnxfit.graph.shared_tensors import array_of
from onnxfit.load.reading import ModelSource, load_model, read_model
from onnxfit.load.trainable import fingerprint
from onnxfit.step.distillation import Distillation
from onnxfit.trainer import SETTINGS, Trainer
from onnxfit.training.export import exported
from onnxfit.training.forms import source_of
from onnxfit.training.lineage import (
    OF_MACHINE,
    environment,
    needed,
    read_lineage,
    reasons_of,
)
from onnxfit.training.setting_values import decode_setting, encode_setting
from onnxfit.training.training import training_of
from onnxfit.verification.replay import Data, NotTheSame, chosen_data, replay

__all__ = ["Verification", "verify"]

Array = npt.NDArray[Any]
SAME, ROUNDING, DIFFERENT = "same bits", "equal within rounding", "not the same"
UNKNOWN = "not reproducible"
EXIT_CODES = {SAME: 0, ROUNDING: 3, DIFFERENT: 4, UNKNOWN: 5}
RUNS_MOVED = 2  # trainings with moved weights, whose differences bound those of rounding
FACTOR = 10.0  # of the bound over the largest of these differences
# Above this share of the change that training made, a bound tells a training from no other.
MAX_SHARE = 0.1


@dataclass(frozen=True)
class Verification:
    """The result of `verify`.

    - `verdict`: "same bits", "equal within rounding", "not the same" or "not reproducible".
    - `differences`: sentences that say what differs: the parent, an array of the data, a setting,
      or a weight.
    - `reasons`: sentences that say why the training cannot be repeated from its parent and data
      alone.
    - `notes`: sentences about what the verdict depends on.
    - `tensor`, `largest_difference`, `bound`: the tensor that differs most, its largest absolute
      difference, and the bound of that for rounding; None if they were not computed. The tensor
      is the one with the largest ratio of the two.
    - `batches`: the number of batches trained again.
    - `lineage`: the record in the file.
    """

    verdict: str
    differences: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    tensor: str | None = None
    largest_difference: float | None = None
    bound: float | None = None
    batches: int = 0
    lineage: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def exit_code(self) -> int:
        """The exit code of `onnxfit verify`: 0, 3, 4 or 5, in the order of the verdicts."""
        return EXIT_CODES[self.verdict]

    def __str__(self) -> str:
        lines = [f"{self.verdict}" + (f", after {self.batches} batches" if self.batches else "")]
        if self.largest_difference is not None:
            bound = "" if self.bound is None else f"; rounding explains {self.bound:.3g}"
            lines.append(
                f"largest difference: {self.largest_difference:.3g} in {self.tensor!r}{bound}"
            )
        because = "not reproducible because" if self.verdict == UNKNOWN else "note"
        for title, several in (
            ("differs", self.differences),
            (because, self.reasons),
            ("note", self.notes),
        ):
            lines += [f"{title}: {one}" for one in several]
        return "\n".join(lines)


@check_arguments
def verify(
    child: ModelSource,
    parent: ModelSource,
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    *,
    more_data: Sequence[Sequence[Any]] = (),
    verbose: int | str = "auto",
    **settings: Any,
) -> Verification:
    """Train `parent` again as the lineage of `child` says, and compare the weights bit by bit.

    The lineage is data: a file runs no code. Nothing is written.

    - `child`: a file of `Trainer.export`: a path, bytes or an `onnx.ModelProto`.
    - `parent`: the model that was trained.
    - `x`, `y`, `sample_weight`: the training data, as for `Trainer.fit`. With `validation_split`,
      they have all rows. Validation data has no influence on the weights and is not needed.
    - `more_data`: further data sets (x, y) or (x, y, sample_weight), if fits had different data.
      Each fit takes the data set with its hash.
    - `verbose`: as for `Trainer.fit`.
    - `settings`: arguments of Trainer that the file does not store, such as a custom loss or a
      teacher; `device` and `threads`, if this machine has others; or the arguments that the file is
      claimed to have, which are compared.

    Returns a Verification. On another processor or with another onnxruntime, the weights may differ
    by rounding. Two trainings whose weights are moved by one unit in the last place after each
    batch then show how far rounding can reach; see the page "Verifying" in docs.

    ModelError: a file cannot be read. CheckpointError: the lineage is damaged. UnknownNameError: a
    setting does not exist.

    >>> import numpy as np, onnx.parser
    >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    ...     line (float[N, 1] x) => (float[N, 1] y) <float[1, 1] slope = {0}>
    ...     { y = MatMul(x, slope) }''')
    >>> x = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]
    >>> trainer = Trainer(model, loss="mean_squared_error", optimizer=0.5)
    >>> history = trainer.fit(x, 3 * x, epochs=2, verbose=0)
    >>> child = trainer.export()
    >>> print(verify(child, model, x, 3 * x, verbose=0))
    same bits, after 4 batches
    >>> print(verify(child, model, x, 2 * x, verbose=0))
    not the same
    differs: the array of labels 'y' differs in all parts.
    """
    for name in settings:
        if name not in SETTINGS:
            raise UnknownNameError("argument of Trainer", name, SETTINGS)
    name = os.fspath(child) if isinstance(child, (str, os.PathLike)) else "the child"
    data: list[Data] = [] if x is None else [(x, y, sample_weight)]
    for one in more_data:
        if not isinstance(one, (tuple, list)) or not 1 <= len(one) <= 3:
            raise SettingError(
                "more_data must have data sets (x, y) or (x, y, sample_weight), got"
                f" {shortened(one)}."
            )
        data.append((*one, *(None,) * (3 - len(one))))
    return verified(load_model(child), str(name), parent, lambda _: data, settings, verbose)


def verified(
    child: onnx.ModelProto,
    name: str,
    parent: ModelSource,
    read: Callable[[Trainer], Sequence[Data]],
    passed: Mapping[str, Any],
    verbose: int | str,
) -> Verification:
    """Return the result of `verify` for a file that was read.

    - `name`: the file's path, for messages.
    - `read`: a function that returns the data sets for a trainer of the parent.
    - `passed`: the arguments of Trainer.
    """
    lineage = read_lineage(child, name)
    if lineage is None:
        reason = (
            "The file does not say how it was trained: it has no metadata of onnxfit. It was"
            " exported with lineage=False, by another version, or by another program."
        )
        return Verification(UNKNOWN, reasons=(reason,))
    unknown = [setting for setting in lineage["settings"] if setting not in SETTINGS]
    if unknown:
        raise CheckpointError(
            f"The lineage in {name!r} has the settings {listed_names(unknown)}, which this version"
            " of Trainer does not have."
        )
    return _Comparison(child, name, parent, lineage, passed, verbose).result(read)


class _Comparison:
    """A file and its lineage, beside the parent and the settings that were passed to `verify`."""

    def __init__(
        self,
        child: onnx.ModelProto,
        name: str,
        parent: ModelSource,
        lineage: Mapping[str, Any],
        passed: Mapping[str, Any],
        verbose: int | str,
    ) -> None:
        self.child = child
        self.name = name
        self.parent = parent
        self.lineage = lineage
        self.data: Sequence[Data] = ()
        self.passed = passed
        self.verbose = verbose
        self.notes: list[str] = []

    def result(self, read: Callable[[Trainer], Sequence[Data]]) -> Verification:
        """Compare the hashes, train again, and compare the weights.

        - `read`: a function that returns the data sets for a trainer of the parent.
        """
        unstored = needed(self.lineage)
        missing = [name for name in unstored if name not in self.passed]
        self.notes += [
            f"The argument {name} was passed: the file does not store its contents."
            for name in unstored
            if name in self.passed
        ]
        differences = self._differences_of_files()
        reasons = reasons_of(self.lineage, self.passed)
        if self.lineage["not_reproducible"] or missing:
            verdict = DIFFERENT if differences else UNKNOWN
            return self._verification(verdict, differences, reasons)
        if differences:
            return self._verification(DIFFERENT, differences, reasons)
        try:
            self._check_data(read)
            found, _ = self._train(self.verbose)
        except NotTheSame as error:
            return self._verification(DIFFERENT, error.problems, reasons)
        return self._compared(found, reasons)

    def _verification(
        self, verdict: str, differences: Sequence[str], reasons: Sequence[str], **fields: Any
    ) -> Verification:
        notes = tuple(self.notes)
        return Verification(
            verdict, tuple(differences), tuple(reasons), notes, lineage=self.lineage, **fields
        )

    # ------------------------------------------------------------------ before training

    def settings(self) -> dict[str, Any]:
        """Return the arguments of Trainer: those of the file, and those that were passed.

        A teacher that is a model gets the settings of the file.
        """
        settings = {**self.passed}
        for name, value in self.lineage["settings"].items():
            if name not in self.passed:
                settings[name] = decode_setting(name, value, self.name)
        teacher = Distillation.of(settings.get("teacher"))
        if teacher is not None and not isinstance(settings["teacher"], Distillation):
            stored = decode_setting("teacher", self.lineage["settings"].get("teacher"), self.name)
            if isinstance(stored, Distillation):
                settings["teacher"] = replace(stored, teacher=teacher.teacher)
        return settings

    def _differences_of_files(self) -> list[str]:
        """Return what differs before any training: the child's own hash, settings, the parent."""
        problems = []
        if fingerprint(self.child) != self.lineage["model"]:
            problems.append(
                "the nodes or weights of the file were changed after its export: they do not have"
                " the hash in its lineage."
            )
        recorded = self.lineage["settings"]
        unstored = needed(self.lineage)
        for name, value in self.passed.items():
            if name in OF_MACHINE or (name in unstored and not hasattr(value, "without_files")):
                continue
            own = encode_setting(value.without_files() if name in unstored else value)
            if own != recorded.get(name):
                problems.append(
                    f"the setting {name} is {shortened(recorded.get(name))} in the file, but"
                    f" {shortened(own)} was passed."
                )
        teacher = Distillation.of(self.passed.get("teacher"))
        if teacher is not None and self.lineage["teacher"] is not None:
            model = teacher.with_teacher_read().teacher
            assert isinstance(model, onnx.ModelProto)
            if fingerprint(model) != self.lineage["teacher"]:
                problems.append("the teacher is another model.")
        axes = {
            name: self.passed.get(name, decode_setting(name, recorded.get(name), self.name))
            for name in ("dynamic_batch", "batch_axes")
        }
        try:
            found = fingerprint(load_model(source_of(self.parent, axes)))
        except OnnxfitError as error:
            raise type(error)(f"The parent: {error}") from error
        if found != self.lineage["parent"]:
            problems.append(
                f"the parent is another model: the SHA-256 of its nodes and weights is"
                f" {found[:12]}, expected {str(self.lineage['parent'])[:12]}."
            )
        return problems

    def _check_data(self, read: Callable[[Trainer], Sequence[Data]]) -> None:
        """Read the data. NotTheSame: it has other hashes; this is found before any step."""
        if self.lineage["fits"]:
            trainer = self._trainer()
            self.data = read(trainer)
            for number in range(len(self.lineage["fits"])):
                chosen_data(trainer, self.lineage, number, self.data)

    # ------------------------------------------------------------------ training

    def _trainer(self) -> Trainer:
        return Trainer(self.parent, **self.settings(), distribute=None)

    def _train(
        self, verbose: int | str, generator: np.random.Generator | None = None
    ) -> tuple[onnx.ModelProto, onnx.ModelProto]:
        """Return the exported model of a new training, and that before it."""
        trainer = self._trainer()
        before = self._export(trainer)
        replay(trainer, self.lineage, self.data, verbose=verbose, generator=generator)
        return self._export(trainer), before

    def _export(self, trainer: Trainer) -> onnx.ModelProto:
        export = self.lineage["export"]
        return exported(
            training_of(trainer),
            averaged=export["averaged"],
            adapters=export["adapters"],
            lineage=False,
        ).whole()

    # ------------------------------------------------------------------ after training

    def _compared(self, found: onnx.ModelProto, reasons: Sequence[str]) -> Verification:
        batches = sum(fit["end"][0] - fit["begin"][0] for fit in self.lineage["fits"])
        if fingerprint(found) == fingerprint(self.child):
            return self._verification(SAME, (), reasons, batches=batches)
        expected, own = arrays_of(self.child), arrays_of(found)
        if forms_of(expected) != forms_of(own):
            problem = "training gives a graph with other nodes or tensors."
            return self._verification(DIFFERENT, [problem], reasons, batches=batches)
        distances = distances_between(expected, own)
        others = self._other_environment()
        if not others:
            tensor = max(distances, key=lambda name: distances[name])
            self.notes.append(
                "The processor and the versions are those of the file, so rounding does not explain"
                " a difference. A setting in the file, such as the seed, is not the one of the"
                " training, or the weights were not made by it."
            )
            return self._verification(
                DIFFERENT,
                [f"the weights {tensor!r}, and {self._count(distances) - 1} other tensors."],
                reasons,
                tensor=tensor,
                largest_difference=distances[tensor],
                batches=batches,
            )
        self.notes += others
        return self._within_rounding(own, distances, reasons, batches)

    @staticmethod
    def _count(distances: Mapping[str, float]) -> int:
        return sum(1 for distance in distances.values() if distance != 0)

    def _within_rounding(
        self,
        own: Mapping[str, Array],
        distances: Mapping[str, float],
        reasons: Sequence[str],
        batches: int,
    ) -> Verification:
        """Compare the differences with those of trainings whose weights were moved by an ulp."""
        moved = []
        for seed in range(RUNS_MOVED):
            found, before = self._train(0, np.random.default_rng(seed))
            moved.append(distances_between(arrays_of(found), own))
        bounds = {
            name: FACTOR * max(*(one[name] for one in moved), _ulp(own[name])) for name in distances
        }
        changes = distances_between(arrays_of(before), own)
        ratios = {name: distances[name] / bounds[name] for name in distances}
        tensor = max(ratios, key=lambda name: ratios[name])
        share = max((bounds[name] / changes[name] for name in ratios if changes[name]), default=0.0)
        fields = {
            "tensor": tensor,
            "largest_difference": distances[tensor],
            "bound": bounds[tensor],
            "batches": batches,
        }
        if ratios[tensor] > 1 or not np.isfinite(distances[tensor]):
            problem = f"{tensor!r} differs by more than rounding."
            return self._verification(DIFFERENT, [problem], reasons, **fields)
        if share > MAX_SHARE:
            reason = (
                f"Rounding alone may change the weights by {share:.0%} of what training changed, so"
                " a comparison on another processor tells nothing. Verify on a processor and with"
                " versions like those of the file."
            )
            return self._verification(UNKNOWN, (), [*reasons, reason], **fields)
        return self._verification(ROUNDING, (), reasons, **fields)

    def _other_environment(self) -> list[str]:
        """Return sentences about what differs between this machine and that of the file."""
        here, notes = environment(), []
        used = {fit["environment"] for fit in self.lineage["fits"]}
        for number in sorted(used):
            there = self.lineage["environments"][number]
            for name in sorted({*here, *there}):
                if here.get(name) != there.get(name):
                    notes.append(f"{name}: {there.get(name)} in the file, {here.get(name)} here.")
        for name in OF_MACHINE:
            if name in self.passed and self.passed[name] != self.lineage["settings"].get(name):
                own = self.lineage["settings"].get(name)
                notes.append(f"{name}: {own} in the file, {self.passed[name]} here.")
        return list(dict.fromkeys(notes))


def arrays_of(model: onnx.ModelProto) -> dict[str, Array]:
    """Return the tensors of a model, also those of Constant nodes that may be weights."""
    tensors = read_model(model).graph.initializer
    return {tensor.name: np.array(array_of(tensor)) for tensor in tensors}


def forms_of(arrays: Mapping[str, Array]) -> dict[str, tuple[Any, ...]]:
    """Return the element type and shape of each array."""
    return {name: (array.dtype, array.shape) for name, array in arrays.items()}


def distances_between(arrays: Mapping[str, Array], others: Mapping[str, Array]) -> dict[str, float]:
    """Return the largest absolute difference of each pair of arrays; inf for NaN in one alone."""
    distances = {}
    for name, array in arrays.items():
        first, second = array.astype(np.float64), others[name].astype(np.float64)
        with np.errstate(invalid="ignore"):
            difference = np.where(first == second, 0.0, np.abs(first - second))
        difference[np.isnan(first) & np.isnan(second)] = 0
        difference[np.isnan(difference)] = np.inf
        distances[name] = float(difference.max(initial=0.0))
    return distances


def _ulp(array: Array) -> float:
    """Return the distance to the next number at the largest element of an array."""
    if array.dtype.kind in "biu":
        return 0.1  # a bound of one unit, FACTOR times this
    largest = np.abs(array.astype(np.float64)).max(initial=0.0)
    eps = np.finfo(array.dtype).eps if array.dtype.kind == "f" else 2.0**-7
    return float(largest * eps) or float(np.finfo(np.float32).tiny)
