"""The lineage of trained weights: the parent model, the data, the settings and the fits.

A lineage says what happened, not what was called: a fit that a callback stopped ends at a batch,
and a learning rate that a callback set applies from a batch on. A replay of the events therefore
needs no code of a callback. Events that cannot be repeated, such as weights from outside, are
listed as reasons why the training is not reproducible.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Collection, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx

from onnxfit.data import Source
from onnxfit.data.content import Content, digest_of, hash_of
from onnxfit.environment import DISTRIBUTIONS, instruction_sets, is_switched_off, versions
from onnxfit.errors import CheckpointError, DataError, listed_names
from onnxfit.files import (
    COUNT,
    FLAG,
    LIST,
    MAPPING,
    POSITIVE_COUNT,
    RATE,
    TEXT,
    ValueType,
    list_of,
    mapping_of,
    optional,
    require_types,
)
from onnxfit.load.trainable import fingerprint
from onnxfit.step.distillation import Distillation
from onnxfit.training.forms import given_file, unstored_settings
from onnxfit.training.setting_values import custom_settings, encode_setting

if TYPE_CHECKING:
    from onnxfit.training.loop import FitLoop
    from onnxfit.training.training import Training

Array = npt.NDArray[Any]
KEY = "onnxfit.lineage"  # of a model's metadata
FORMAT = 1
# Packages whose versions influence the numbers of a training, beside those of onnxruntime.
PACKAGES = ("onnxfit", "onnx", "numpy", "python")
# Settings that may differ between two machines, and influence rounding only.
OF_MACHINE = ("device", "threads")
NOT_FINITE = "onnxfit:float"  # the key of an object that stands for NaN or an infinity in JSON
CHANGED = " changed the state after batch "  # in a reason why a training is not reproducible
MAX_TAKEN = 1000  # positions at which weights were copied, the newest
WHOLE_NUMBER = ValueType(
    "a whole number as text",
    lambda value: isinstance(value, str) and re.fullmatch("-?[0-9]{1,40}", value) is not None,
)
TYPES = {
    "format": POSITIVE_COUNT,
    "parent": optional(TEXT),
    "teacher": optional(TEXT),
    "settings": MAPPING,
    "needs": list_of(TEXT),
    "data": mapping_of(mapping_of(MAPPING)),
    "environments": list_of(MAPPING),
    "fits": list_of(MAPPING),
    "not_reproducible": list_of(TEXT),
}
TYPES_OF_FIT = {
    "epochs": COUNT,
    "initial_epoch": COUNT,
    "steps_per_epoch": optional(POSITIVE_COUNT),
    "validation_split": optional(RATE),
    "class_weight": optional(MAPPING),
    "source": MAPPING,
    "data": optional(TEXT),
    "resumes": FLAG,
    "learning_rate": optional(RATE),
    "accumulate": POSITIVE_COUNT,
    "frozen": list_of(TEXT),
    "changes": list_of(LIST),
    "begin": list_of(COUNT, 3),
    "end": list_of(COUNT, 3),
    "environment": COUNT,
}
TYPES_OF_SOURCE = {
    "kind": optional(TEXT),
    "rows": optional(COUNT),
    "steps": optional(COUNT),
    "batch_size": optional(POSITIVE_COUNT),
    "shuffle": FLAG,
    "seed": optional(WHOLE_NUMBER),
    "sampled": FLAG,
}
TYPES_OF_ARRAY = {"type": TEXT, "shape": list_of(COUNT), "sha256": TEXT, "blocks": list_of(TEXT)}
# Values that a callback or the program may set between two steps, in the order of `_values`
VALUES = ("learning_rate", "accumulate", "frozen")
# Name of a change in a fit -> the type of its value
TYPES_OF_CHANGE = {
    "learning_rate": optional(RATE),
    "accumulate": POSITIVE_COUNT,
    "frozen": list_of(TEXT),
    "weights": list_of(COUNT, 2),
    "revert_step": FLAG,
}


class Lineage:
    """The record of what made the weights of a training.

    - `parent`: the hash of the model with its weights before the first step; None until it is
      needed.
    - `settings`: the arguments of Trainer, as in a checkpoint.
    - `teacher`: the hash of the teacher; None without a teacher.
    - `needs`: the settings with contents that a file does not store.
    - `data`: the hashes of the arrays of each data set, by one hash for all.
    - `fits`: a dict for each call of `fit`. `begin` and `end` are positions: batches, updates and
      epochs. `changes` are [batches, updates, name, value]; "weights" are the weights that the
      training had at an earlier position.
    - `environments`: the versions and the processor of fits in other processes.
    - `reasons`: sentences that say why the training is not reproducible.
    """

    def __init__(self, needs: tuple[str, ...] = (), teacher: str | None = None) -> None:
        self.parent: str | None = None
        self.settings: dict[str, Any] = {}
        self.teacher = teacher
        self.needs = list(needs)
        self.data: dict[str, Content] = {}
        self.fits: list[dict[str, Any]] = []
        self.environments: list[dict[str, Any]] = []
        self.reasons: list[str] = []
        self._taken: dict[str, list[int]] = {}  # hash of copied weights -> their position
        self._seen: tuple[Any, ...] = ()  # the values that changes are compared with
        self._open = False  # whether the last fit runs

    @classmethod
    def restored(cls, value: Any, path: str) -> Lineage:
        """Return the lineage of a checkpoint. CheckpointError: it is damaged.

        - `value`: what `as_json` returned, or None in a checkpoint without a lineage.
        """
        lineage = cls()
        if value is None:
            lineage.reasons.append(
                "The state came from a file without a lineage, which another version of onnxfit or"
                " another program wrote."
            )
            return lineage
        checked(value, f"The lineage in {path!r}")
        for name in ("parent", "settings", "teacher", "needs", "data", "fits", "environments"):
            setattr(lineage, name, json.loads(json.dumps(value[name])))
        lineage.reasons = list(value["not_reproducible"])
        taken = value.get("taken", {})
        require_types(f"The lineage in {path!r}", {"taken": taken}, {"taken": _TAKEN})
        lineage._taken = {key: list(position) for key, position in taken.items()}
        return lineage

    @property
    def is_empty(self) -> bool:
        """Whether nothing has changed the weights of the model."""
        return not (self.fits or self.reasons)

    def begin(self, training: Training) -> None:
        """Record the model and the settings before the first change of a weight."""
        if self.parent is None and training.trainable.is_file:
            self.parent = given_hash(training)
        if not self.settings:
            self.settings = encoded_settings(training.settings)

    # ------------------------------------------------------------------ fits

    def begin_fit(self, training: Training, loop: FitLoop, arguments: Mapping[str, Any]) -> None:
        """Record the beginning of a fit, with the hashes of its data."""
        self.begin(training)
        self._compare_settings(training)
        source, factors = loop.state.batches.data, arguments["class_weight"]
        data = self._data(training, source)
        self._seen = _values(training)
        rate, accumulate, frozen = self._seen
        fit = {
            "epochs": arguments["epochs"],
            "initial_epoch": arguments["initial_epoch"],
            "steps_per_epoch": arguments["steps_per_epoch"],
            "validation_split": arguments["validation_split"] or None,
            "class_weight": factors and {str(k): float(factors[k]) for k in factors},
            "source": _data_description(training, source, data is not None),
            "data": data,
            "resumes": not loop.state.pending.position.nothing_to_resume,
            "learning_rate": rate,
            "accumulate": accumulate,
            "frozen": list(frozen),
            "changes": [],
            "begin": _position_record(training),
            "end": _position_record(training),
            "environment": None,
        }
        if not (fit["resumes"] and self._continue_fit(fit)):
            self.fits.append(fit)
        self._open = True
        if training.world.size > 1:
            self.add_reason(
                f"{training.world.size} processes trained together. A verification trains in one."
            )
        if loop.callbacks.gradients:
            names = listed_names([type(one).__name__ for one in loop.callbacks.gradients])
            self.add_reason(f"The callbacks {names} could change the gradients in on_gradients.")

    def _continue_fit(self, fit: Mapping[str, Any]) -> bool:
        """Let the last fit of the record go on, if a fit resumes it with the same arguments.

        Resuming is exact, so the record is that of a fit without an interruption.
        """
        if not self.fits:
            return False
        last, free = self.fits[-1], ("epochs", "resumes", "changes", "begin", "end", *VALUES)
        environments = [*self.environments, environment()]
        number = last["environment"]
        if number is not None and environments[number] != environments[-1]:
            return False
        same = all(last[name] == fit[name] for name in fit if name not in (*free, "environment"))
        if not same or last["end"] != fit["begin"]:
            return False
        last["epochs"] = fit["epochs"]
        values = {name: last[name] for name in VALUES}
        values.update({name: value for _, _, name, value in last["changes"] if name in VALUES})
        self._seen = tuple(_hashable(value) for value in values.values())
        return True

    def end_fit(self, training: Training) -> None:
        """Record the end of the running fit. A fit that changed nothing is left out."""
        if self._open:
            fit = self.fits[-1] = self._running_fit(training)
            self._open = False
            if fit["begin"] == fit["end"] and not fit["changes"]:
                self.fits.pop()

    def observe(self, training: Training) -> None:
        """Record changes of the values that a callback or the program may set between steps."""
        now = _values(training)
        if now != self._seen:
            for name, old, new in zip(VALUES, self._seen, now):
                if old != new:
                    self._add_change(training, name, [*new] if isinstance(new, tuple) else new)
            self._seen = now

    def _add_change(self, training: Training, name: str, value: Any) -> None:
        self.fits[-1]["changes"].append([*_position_record(training)[:2], name, value])

    def _running_fit(self, training: Training) -> dict[str, Any]:
        """Return the last fit; if it runs, as it would be if it ended here."""
        fit = self.fits[-1]
        if not self._open or training.fit_state is None:
            return fit
        # A callback may have changed the size of the batches.
        source = _data_description(
            training, training.fit_state.batches.data, fit["data"] is not None
        )
        return {**fit, "source": source, "end": _position_record(training)}

    def _data(self, training: Training, source: Any) -> str | None:
        """Return one hash for the data, after recording those of its arrays."""
        if not training.world.is_main:
            return None
        try:
            content: Content | None = source.content()
        except DataError:  # the batch that reads the data reports the error
            return None
        if content is None:
            return None
        digest = digest_of(content)
        self.data[digest] = content
        return digest

    def _compare_settings(self, training: Training) -> None:
        """Record that a training goes on with other settings than it began with."""
        now = encoded_settings(training.settings)
        names = [n for n in now if n not in OF_MACHINE and now[n] != self.settings.get(n)]
        if names:
            self.add_reason(
                f"The settings {listed_names(names)} changed after batch"
                f" {training.state.global_batch}, between two fits."
            )

    # ------------------------------------------------------------------ changes of weights

    def add_reason(self, reason: str) -> None:
        """Record a reason why the training is not reproducible."""
        if reason not in self.reasons:
            self.reasons.append(reason)

    def mark(self, training: Training, call: str) -> None:
        """Record a call that changes the state in a way that a replay cannot repeat."""
        self.begin(training)
        if not any(reason.startswith(call) for reason in self.reasons):
            self.add_reason(f"{call}{CHANGED}{training.state.global_batch}.")

    def take(self, training: Training, weights: Mapping[str, Array]) -> None:
        """Remember the weights that a callback copies, because it may set them again."""
        if self._open:
            self._taken[weights_hash(weights)] = _position_record(training)[:2]
            if len(self._taken) > MAX_TAKEN:
                del self._taken[next(iter(self._taken))]

    def set(self, training: Training) -> None:
        """Record weights that `set_weights` has set."""
        if self._open and self._taken:
            position = self._taken.get(weights_hash(training.state.get_weights(copy=False)))
            if position is not None:
                self._add_change(training, "weights", position)
                return
        self.mark(training, "set_weights")

    def revert(self, training: Training) -> None:
        """Record that the last step was undone."""
        if self._open:
            self._add_change(training, "revert_step", True)
        else:
            self.mark(training, "revert_step")

    # ------------------------------------------------------------------ files

    def as_json(self, training: Training) -> dict[str, Any]:
        """Return the lineage as it is now, for a checkpoint."""
        self.begin(training)
        if self.parent is None:  # a converted file, which training does not change
            self.parent = given_hash(training)
        here = environment()
        environments, fits = [*self.environments], [dict(fit) for fit in self.fits]
        if fits:
            fits[-1] = dict(self._running_fit(training))
        for fit in fits:
            if fit["environment"] is None:
                if here not in environments:
                    environments.append(here)
                fit["environment"] = environments.index(here)
        return {
            "format": FORMAT,
            "parent": self.parent,
            "teacher": self.teacher,
            "settings": self.settings,
            "needs": self.needs,
            "data": self.data,
            "environments": environments,
            "fits": fits,
            "not_reproducible": self.reasons,
            "taken": self._taken,
        }


def lineage_of(
    given: Mapping[str, Any], stored: Mapping[str, Any], distillation: Distillation | None
) -> Lineage:
    """Return the lineage of a new Trainer.

    - `given`, `stored`: its arguments, and its arguments as a checkpoint has them.
    - `distillation`: the teacher, read, and its settings.
    """
    teacher = None if distillation is None else distillation.teacher
    digest = fingerprint(teacher) if isinstance(teacher, onnx.ModelProto) else None
    return Lineage(unstored_settings(given, stored), digest)


def add_lineage(model: onnx.ModelProto, value: Mapping[str, Any] | None, **export: Any) -> None:
    """Write a lineage into the metadata of a trained model. Untrained models keep their entry.

    - `model`: the model with its trained weights.
    - `value`: the lineage of a checkpoint; None removes an entry.
    - `export`: the arguments of `Trainer.export`.
    """
    if value is None or value["fits"] or value["not_reproducible"]:
        kept = {name: entry for name, entry in (value or {}).items() if name != "taken"}
        known = {**kept, "export": export, "model": fingerprint(model)}
        write_lineage(model, None if value is None else known)


def write_lineage(model: onnx.ModelProto, value: Mapping[str, Any] | None) -> None:
    """Replace the lineage in a model's metadata by another one, or remove it."""
    others = [prop for prop in model.metadata_props if prop.key != KEY]
    if len(others) != len(model.metadata_props):
        copies = [onnx.StringStringEntryProto.FromString(p.SerializeToString()) for p in others]
        del model.metadata_props[:]
        model.metadata_props.extend(copies)
    if value is not None:
        text = json.dumps(_strict(value), allow_nan=False, separators=(",", ":"))
        model.metadata_props.add(key=KEY, value=text)


def read_lineage(model: onnx.ModelProto, name: str) -> dict[str, Any] | None:
    """Return the lineage in a model's metadata, or None. CheckpointError: it is damaged."""
    text = next((prop.value for prop in model.metadata_props if prop.key == KEY), None)
    if text is None:
        return None
    place = f"The lineage in {name!r}"
    try:
        value = json.loads(text, object_hook=_with_floats)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{place} is not valid JSON: {error}") from None
    checked(value, place)
    require_types(place, value, {"model": TEXT, "export": MAPPING})
    exported = {"averaged": FLAG, "adapters": TEXT}
    require_types(f"The export of {place}", value["export"], exported)
    lineage: dict[str, Any] = value
    return lineage


def checked(value: Any, place: str) -> None:
    """Raise CheckpointError unless `value` has the types of a lineage."""
    require_types(place, value, {"format": POSITIVE_COUNT})
    if value["format"] > FORMAT:
        raise CheckpointError(
            f"{place} has format {value['format']}, from a newer version of onnxfit. This version"
            f" reads format {FORMAT}. Upgrade onnxfit."
        )
    require_types(place, value, TYPES)
    if "distribute" in value["settings"]:  # a file does not decide which processes train
        raise CheckpointError(
            f"{place} was not written by onnxfit: it has the setting 'distribute'"
        )
    for content in value["data"].values():
        for array in content.values():
            require_types(f"The data in {place}", array, TYPES_OF_ARRAY)
    for number, fit in enumerate(value["fits"], 1):
        where = f"Fit {number} in {place}"
        require_types(where, fit, TYPES_OF_FIT)
        require_types(f"The source of {where}", fit["source"], TYPES_OF_SOURCE)
        known = fit["environment"] < len(value["environments"])
        if not known or fit["data"] not in (None, *value["data"]):
            raise CheckpointError(f"{where} refers to an entry that is missing.")
        for change in fit["changes"]:
            batches, updates, name, new = change if len(change) == 4 else (-1, -1, "", None)
            if name not in TYPES_OF_CHANGE:
                raise CheckpointError(f"{where} has a change that is not known: {change!r:.80}.")
            types = {"batches": COUNT, "updates": COUNT, name: TYPES_OF_CHANGE[name]}
            require_types(where, {"batches": batches, "updates": updates, name: new}, types)


_TAKEN = mapping_of(list_of(COUNT, 2))


def is_change(reason: str) -> bool:
    """Return whether a reason of `not_reproducible` is that a call changed the weights."""
    return CHANGED in reason


def needed(value: Mapping[str, Any]) -> list[str]:
    """Return the settings that must be passed again, because a file does not store them."""
    return sorted({*value["needs"], *custom_settings(value["settings"])})


def reasons_of(value: Mapping[str, Any], passed: Collection[str]) -> list[str]:
    """Return in sentences why a training cannot be repeated from its parent and data alone.

    - `passed`: the names of arguments that were passed again.
    """
    reasons = list(value["not_reproducible"])
    for name in needed(value):
        if name not in passed:
            reasons.append(f"The argument {name} has contents that the file does not store.")
    kinds = {str(fit["source"]["kind"]) for fit in value["fits"] if fit["data"] is None}
    if kinds:
        reasons.append(f"The data has no hash: {', '.join(sorted(kinds))}.")
    if any(fit["source"]["sampled"] for fit in value["fits"]):
        reasons.append("The loader drew rows by chances, which the file does not store.")
    return reasons


def given_hash(training: Training) -> str:
    """Return the hash of the given model, with its weights as they are now."""
    model = given_file(training.trainable, training.state.get_weights(copy=False))
    return fingerprint(model.proto)


def weights_hash(weights: Mapping[str, Array]) -> str:
    """Return one hash for named arrays."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{len(name)} {name} {hash_of(np.asarray(weights[name]))}\n".encode())
    return digest.hexdigest()


def encoded_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of Trainer as JSON values, without metrics, which change no weight."""
    values = {name: encode_setting(settings[name]) for name in settings if name != "metrics"}
    encoded: dict[str, Any] = json.loads(json.dumps(values))
    return encoded


def _values(training: Training) -> tuple[Any, ...]:
    """Return the learning rate, if it follows no schedule, `accumulate` and the frozen names."""
    state = training.state
    return state.fixed_rate, training.accumulate, state.frozen.weights


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _data_description(training: Training, source: Source, is_hashed: bool) -> dict[str, Any]:
    """Return what the order of batches depends on; the kind of data only if it has no hash."""
    found = source.fingerprint()
    seed = found.get("seed")
    return {
        "kind": None if is_hashed else found["kind"],
        **{name: found.get(name) for name in ("rows", "steps", "batch_size")},
        "shuffle": seed is not None,
        # a loader's own seed, which may have more than 64 bits
        "seed": None if seed in (None, training.settings["seed"]) else str(seed),
        "sampled": "column chances" in found,
    }


def _position_record(training: Training) -> list[int]:
    state = training.state
    return [state.global_batch, state.global_step, state.epoch]


def environment() -> dict[str, Any]:
    """Return the versions and the instruction sets that influence the last bits of a result."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    kernels = "off" if is_switched_off("ONNXFIT_KERNELS") else "on"
    return {**_installed(), "cores": cores, "operators": kernels}


@cache
def _installed() -> dict[str, str]:
    """Return the versions of packages and the processor, which no process changes."""
    installed = versions()
    packages = (*PACKAGES, *(name for name in installed if name in DISTRIBUTIONS))
    return {
        **{name: installed[name] for name in packages if name in installed},
        "machine": platform.machine(),
        "instruction_sets": instruction_sets(),
    }


def _strict(value: Any) -> Any:
    """Return a value with an object for each float that JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _strict(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {NOT_FINITE: repr(value)}
    return value


def _with_floats(entry: dict[str, Any]) -> Any:
    """Return the float that `_strict` replaced, or the object itself."""
    if set(entry) != {NOT_FINITE} or entry[NOT_FINITE] not in ("nan", "inf", "-inf"):
        return entry
    return float(entry[NOT_FINITE])
