"""The state of a checkpoint under other settings, which `Trainer.load` was given."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxfit.errors import OnnxfitError, SettingError, listed_names, warn_user
from onnxfit.graph import names
from onnxfit.optimizers import get_optimizer
from onnxfit.training.contents import CheckpointContents
from onnxfit.training.position import Position
from onnxfit.training.setting_values import decode_setting
from onnxfit.training.state import TrainerState

Array = npt.NDArray[Any]
# the settings of a Trainer that choose the tensors of its state, apart from its weights
SLOT_SETTINGS = ("optimizer", "precision", "accumulate", "backend")


def with_passed_settings(
    contents: CheckpointContents, own: TrainerState, passed: Collection[str], *, has_numbers: bool
) -> TrainerState:
    """Return the state of a checkpoint for a trainer with other settings, which win.

    A passed optimizer sets the learning rate. Slots that the checkpoint lacks, or has in another
    form, keep the values of `own`, those before the first update; a warning names them. If no slot
    of the optimizer remains, its bias correction counts from the next update.

    - `own`: the state of the new trainer, before it is restored.
    - `passed`: the names of the passed settings.
    - `has_numbers`: whether the model of the checkpoint has the numbers of all weights.

    SettingError: weights are no longer trained, and the model of the checkpoint lacks their
    numbers.
    """
    saved: TrainerState = contents.state
    differ = saved["weights"].keys() != own["weights"].keys()
    if differ and not {"weights", "loss", "loss_weights"}.isdisjoint(passed):
        saved = _with_own_weights(saved, own, has_numbers=has_numbers)
    counters = dict(saved["counters"])
    if "optimizer" in passed:
        rate = own["counters"]["learning_rate"]
        _warn_of_rate(contents, rate, counters["learning_rate"])
        counters["learning_rate"] = rate
    slots = dict(saved["slots"])
    if _forms(slots) != _forms(own["slots"]) and not set(passed).isdisjoint(SLOT_SETTINGS):
        slots = _fitting_slots(saved, own)
        _warn_of_slots(saved["slots"], own["slots"], slots)
        if any(map(_is_sum, own["slots"].keys() ^ saved["slots"].keys())):
            counters["window"] = 0
        needed = set(filter(_is_slot, own["slots"]))
        if needed and needed.isdisjoint(saved["slots"]):
            counters["first_step"] = counters["global_step"]
    _warn_of_seed(contents, passed)
    return {**saved, "slots": slots, "counters": counters}


def _with_own_weights(saved: TrainerState, own: TrainerState, *, has_numbers: bool) -> TrainerState:
    """Return a state with the weights and slots of the weights that the new trainer trains.

    New weights have the numbers of the model, and slots as before the first update.
    """
    weights = saved["weights"]
    new = [name for name in own["weights"] if name not in weights]
    left = [name for name in weights if name not in own["weights"]]
    if left and not has_numbers:
        raise SettingError(
            f"The checkpoint trains {listed_names(left)} in another form than the model has them,"
            " so weights= cannot leave them out. Load it without weights=, export the model, and"
            " train that file."
        )
    old = {name: slot for name, slot in saved["slots"].items() if name in own["slots"]}
    is_mixed = any(map(_is_slot, old))
    parts = []
    if new:
        counts = ", and bias correction counts the updates of the checkpoint, too"
        parts.append(
            f"{listed_names(new)} {'is' if len(new) == 1 else 'are'} new: the slots begin anew"
            f"{counts * is_mixed}"
        )
    if left:
        parts.append(
            f"{listed_names(left)} {'is' if len(left) == 1 else 'are'} no longer trained, with the"
            " numbers of the checkpoint"
        )
    warn_user(f"weights= differs from the checkpoint. {'; '.join(parts)}.")
    slots: dict[str, Any] = {**{n: np.array(own["slots"][n]) for n in own["slots"]}, **old}
    counters = dict(saved["counters"])
    if counters["window"]:
        warn_user("The checkpoint has gradients that wait for an update. They are dropped.")
        counters["window"] = 0
        slots |= {n: np.array(array) for n, array in own["slots"].items() if _is_sum(n)}
    if not is_mixed and any(map(_is_slot, own["slots"])):
        counters["first_step"] = counters["global_step"]
    kept = {name: weights.get(name, array) for name, array in own["weights"].items()}
    return {**saved, "weights": kept, "slots": slots, "counters": counters}


def _fitting_slots(saved: TrainerState, own: TrainerState) -> dict[str, Array]:
    """Return the saved slots that fit, and the first values of all others.

    The average of a weight begins at the weight.
    """
    slots = {}
    averages = {names.slot(weight, names.EMA): array for weight, array in saved["weights"].items()}
    for name, array in own["slots"].items():
        found = saved["slots"].get(name)
        if found is None or _forms({name: found}) != _forms({name: array}):
            found = averages.get(name, array)
        slots[name] = np.array(found)
    return slots


def _forms(slots: Mapping[str, Array]) -> dict[str, tuple[Any, ...]]:
    return {name: (array.shape, array.dtype) for name, array in slots.items()}


def _is_sum(name: str) -> bool:
    """Whether a slot has the gradients that wait for an update."""
    return name == names.gradient_sum(name.rpartition("/")[0])


def _is_slot(name: str) -> bool:
    """Whether a slot belongs to the optimizer's own update rule."""
    is_average = name == names.slot(name.rpartition("/")[0], names.EMA)
    return not (_is_sum(name) or is_average or name.startswith("train/"))


def _warn_of_slots(
    saved: Mapping[str, Array], own: Mapping[str, Array], slots: Mapping[str, Array]
) -> None:
    new = [n for n in slots if n not in saved or saved[n].shape != own[n].shape]
    unused = [name for name in saved if name not in own]
    parts = []
    for found, what in ((new, "begin anew"), (unused, "of the checkpoint are not used")):
        found = [name for name in found if not _is_sum(name)]
        if found:
            parts.append(f"{len(found)} {what} ({listed_names(found)})")
    if parts:
        warn_user(
            "The optimizer's state in the checkpoint does not fit the settings that were passed."
            f" Of its slots, {'; '.join(parts)}. To keep them, load with the settings of the"
            " checkpoint."
        )
    if any(np.any(saved[name]) for name in saved if _is_sum(name) and name not in own):
        warn_user(
            "The checkpoint has gradients of batches that wait for an update. They are dropped,"
            " because the settings that were passed accumulate no gradients."
        )


def _warn_of_rate(contents: CheckpointContents, rate: float | None, saved: float | None) -> None:
    """Warn if a passed optimizer undoes a change of the rate that the user may not mean to undo.

    It is meant if the optimizer has another rate than the one with which training began.
    """
    if rate is None or saved is None or math.isclose(rate, saved):
        return
    first = _first_rate(contents)
    if first is None or math.isclose(rate, first):
        warn_user(
            f"The learning rate is {rate:g}, from the optimizer that was passed. The checkpoint had"
            f" {saved:g}, as a callback or the program had set it. To go on with that rate, set"
            f" trainer.learning_rate = {saved:g}."
        )


def _first_rate(contents: CheckpointContents) -> float | None:
    """Return the rate of the optimizer in the checkpoint's settings; None if it is unknown."""
    try:
        setting = decode_setting("optimizer", contents.replaced.get("optimizer"), "")
        rate = get_optimizer(setting).learning_rate
    except OnnxfitError:
        return None
    return None if callable(rate) else float(rate)


def _warn_of_seed(contents: CheckpointContents, passed: Collection[str]) -> None:
    """Warn if the rest of an interrupted epoch has another order of rows than its beginning."""
    other = "seed" in passed and contents.settings["seed"] != contents.replaced.get("seed")
    position = Position.restored(contents.resume)
    if other and position.data_batch:
        warn_user(
            f"The checkpoint was written after {position.data_batch} batches of an epoch whose"
            " order of rows came from another seed. If the data is shuffled, some rows are repeated"
            " in this epoch, and as many are skipped. To avoid this, start the next epoch with"
            f" initial_epoch={position.epoch + 1}."
        )
