"""Train again what a lineage records, event by event."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from onnxfit.callbacks.callback import Callback
from onnxfit.callbacks.logs import Logs
from onnxfit.data import DataLoader
from onnxfit.data.content import Content, differences, digest_of
from onnxfit.data.memory import split_rows
from onnxfit.data.structure import holds_arrays
from onnxfit.trainer import Trainer
from onnxfit.training.saving import pending_now
from onnxfit.training.training import Training, training_of

Array = npt.NDArray[Any]
Data = tuple[Any, Any, Any]  # x, y and sample_weight, as `fit` takes them


class NotTheSame(Exception):
    """The replay cannot begin, because the data or a loader differs from the record."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(*problems)
        self.problems = list(problems)


class EndReached(Exception):
    """The replay is at the position where the recorded fit ended."""


class Events(Callback):
    """Repeats the events of a recorded fit, and ends it where the recorded fit ended.

    - `fit`: the record.
    - `wanted`: positions whose weights a later event sets again.
    - `kept`: the weights at these positions, which this callback adds.
    - `generator`: with it, each step ends with the trained weights moved by one unit in the last
      place, up or down at random. None changes nothing.
    """

    # After the callbacks of the user, which a replay does not have, and before the progress bar.
    phase: ClassVar[str] = "monitor"

    def __init__(
        self,
        fit: Mapping[str, Any],
        wanted: set[tuple[int, ...]],
        kept: dict[tuple[int, ...], dict[str, Array]],
        generator: np.random.Generator | None,
    ) -> None:
        self._changes = list(fit["changes"])
        self._end = fit["end"]
        self._wanted = wanted
        self._kept = kept
        self._generator = generator

    def on_train_begin(self, logs: Logs) -> None:
        self._repeat()
        self._end_here()

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        self._repeat()

    def on_train_batch_begin(self, batch: int, logs: Logs) -> None:
        self._repeat()

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        if self._generator is not None:
            _move_by_one_ulp(training_of(self.trainer), self._generator)
        self._repeat()
        self._end_here()
        # The last batch before a callback stopped the fit, or the end of the last epoch.
        if self._position()[0] == self._end[0]:
            self.trainer.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        self._repeat()
        self._end_here()
        # The fit was interrupted between its last update and the end of the epoch.
        if self._position()[0] == self._end[0]:
            raise EndReached

    def _end_here(self) -> None:
        if self._position() == self._end:
            raise EndReached

    def _position(self) -> list[int]:
        trainer = self.trainer
        return [trainer.global_batch, trainer.global_step, trainer.epoch]

    def _repeat(self) -> None:
        """Repeat the changes up to this position."""
        here = self._position()[:2]
        if tuple(here) in self._wanted - self._kept.keys():
            self._kept[tuple(here)] = self.trainer.get_weights()
        while self._changes and self._changes[0][:2] <= here:
            _, _, name, value = self._changes.pop(0)
            if name == "weights":
                if tuple(value) not in self._kept:
                    raise NotTheSame([f"A callback set weights that batch {value[0]} never had."])
                self.trainer.set_weights(self._kept[tuple(value)])
            elif name == "revert_step":
                self.trainer.revert_step()
            elif name != "learning_rate" or value is not None:
                setattr(self.trainer, name, value)


def replay(
    trainer: Trainer,
    lineage: Mapping[str, Any],
    data: Sequence[Data],
    *,
    verbose: int | str = 0,
    generator: np.random.Generator | None = None,
) -> None:
    """Train all fits of a lineage again.

    - `trainer`: a new trainer with the parent and the settings.
    - `data`: data sets; each fit takes the one whose hash it recorded.
    - `verbose`: as for `fit`.
    - `generator`: as for `Events`.

    NotTheSame: no data set has the hash of a fit, or a loader gives other batches.
    """
    fits = lineage["fits"]
    wanted = {
        tuple(value) for fit in fits for _, _, name, value in fit["changes"] if name == "weights"
    }
    kept: dict[tuple[int, ...], dict[str, Array]] = {}
    chosen = [chosen_data(trainer, lineage, number, data) for number in range(len(fits))]
    for fit, arguments in zip(fits, chosen):
        training = training_of(trainer)
        if fit["resumes"]:
            training.pending_fit = pending_now(training)
        if fit["learning_rate"] is not None:
            trainer.learning_rate = fit["learning_rate"]
        if fit["accumulate"] != trainer.accumulate:
            trainer.accumulate = fit["accumulate"]
        trainer.frozen = fit["frozen"]
        # The training itself warned of losses that are not finite.
        with suppress(EndReached), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            trainer.fit(
                **arguments,
                epochs=fit["epochs"],
                initial_epoch=fit["initial_epoch"],
                steps_per_epoch=fit["steps_per_epoch"],
                class_weight=class_weight_of(fit),
                callbacks=[Events(fit, wanted, kept, generator)],
                verbose=verbose,
            )


def class_weight_of(fit: Mapping[str, Any]) -> dict[int, float] | None:
    """Return the class weights of a recorded fit."""
    given = fit["class_weight"]
    return None if given is None else {int(label): float(w) for label, w in given.items()}


def chosen_data(
    trainer: Trainer, lineage: Mapping[str, Any], number: int, data: Sequence[Data]
) -> dict[str, Any]:
    """Return the arguments of `fit` with the data that a recorded fit had.

    - `number`: the number of the fit.
    - `data`: the data sets to choose from.

    NotTheSame: no data set has the recorded hash, or a loader gives other batches.
    """
    fit = lineage["fits"][number]
    problems: list[list[str]] = []
    for candidate in data:
        arguments = _fit_arguments(trainer, fit, candidate)
        found, content = _data_description(trainer, fit, arguments)
        problems.append([])
        digest = None if content is None else digest_of(content)
        if fit["data"] not in (None, digest):
            problems[-1] += _data_problems(content, lineage["data"][fit["data"]])
            continue
        expected = {**fit["source"], "seed": _seed_of_order(trainer, fit)}
        for name in ("rows", "steps", "batch_size", "seed"):
            own = found.get(name)
            if own != expected[name] and None not in (own, expected[name]):
                problems[-1].append(f"{name} of the data is {own}, expected {expected[name]}.")
        if not problems[-1]:
            return arguments
    if not problems:
        raise NotTheSame(["The training needs data, and none was given."])
    prefix = f"Fit {number + 1}: " if len(lineage["fits"]) > 1 else ""
    raise NotTheSame([prefix + problem for problem in min(problems, key=len)])


def _fit_arguments(trainer: Trainer, fit: Mapping[str, Any], data: Data) -> dict[str, Any]:
    """Return the arguments of `fit` for a data set, in the batches of a recorded fit."""
    x, y, sample_weight = data
    source, fraction = fit["source"], fit["validation_split"]
    if fraction:
        inputs = {spec.name: spec for spec in trainer.inputs}
        (x, y, sample_weight), _ = split_rows(x, y, sample_weight, fraction, inputs)
    batch_size, rows, steps = source["batch_size"] or 32, source["rows"], source["steps"]
    seed = _seed_of_order(trainer, fit)
    drops_last = rows is not None and steps is not None and steps * batch_size < rows
    if holds_arrays(x) and (drops_last or source["seed"] is not None):
        loader = DataLoader(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            shuffle=seed is not None,
            seed=seed,
            drop_last=drops_last,
        )
        return {"x": loader}
    arguments = {"x": x, "y": y, "sample_weight": sample_weight}
    return {**arguments, "batch_size": batch_size, "shuffle": seed is not None}


def _seed_of_order(trainer: Trainer, fit: Mapping[str, Any]) -> int | None:
    """Return the seed of the order of rows in a recorded fit; None for their own order."""
    source = fit["source"]
    if not source["shuffle"]:
        return None
    return int(trainer.settings["seed"] if source["seed"] is None else source["seed"])


def _data_description(
    trainer: Trainer, fit: Mapping[str, Any], arguments: Mapping[str, Any]
) -> tuple[dict[str, Any], Content | None]:
    """Return the description and the hashes of data, as a fit records them."""
    source = training_of(trainer).source(
        arguments["x"],
        arguments.get("y"),
        arguments.get("sample_weight"),
        arguments.get("batch_size"),
        "training",
        arguments.get("shuffle", True),
        class_weight_of(fit),
    )
    with source:
        return source.fingerprint(), source.content()


def _data_problems(content: Content | None, expected: Mapping[str, Any]) -> list[str]:
    if content is None:
        return ["The data that was given has no hash, but the file has one."]
    return differences(content, expected) or ["The data differs."]


def _move_by_one_ulp(training: Training, generator: np.random.Generator) -> None:
    """Move each trained weight to one of its two neighbours among the floats."""
    state, moved = training.state, {}
    for name in training.recipe.weights:
        if name in state.frozen.weights:
            continue
        weight = state.get_weights(copy=False)[name]
        up = generator.random(weight.shape, np.float32) < 0.5
        limit = np.where(up, np.inf, -np.inf).astype(weight.dtype)
        moved[name] = np.nextafter(weight, limit)
    state.set_weights(moved)
