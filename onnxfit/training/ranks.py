"""Comparisons and decisions that the ranks of a training share between two steps."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx

from onnxfit.data import Source
from onnxfit.distributed.world import World
from onnxfit.environment import installed_distributions, versions
from onnxfit.errors import DataError, SettingError
from onnxfit.files import as_checkpoint_error
from onnxfit.runtime.values import join_batches
from onnxfit.step.distillation import Distillation
from onnxfit.step.precision import StepPrecision
from onnxfit.step.recipe import Recipe
from onnxfit.step.tracker import Tracker

Array = npt.NDArray[Any]

if TYPE_CHECKING:
    from onnxfit.callbacks.callback import Callback
    from onnxfit.training.training import Training

# Packages whose versions influence the numbers of a training, beside those of onnxruntime.
COMPARED_VERSIONS = ("python", "onnxfit", "onnx", "numpy")
RANKS = "ranks"  # key of the sums of each rank in a checkpoint
OWN_TRAINING = "To train separately on each rank, pass Trainer(..., distribute=None)."


def verify_identical_trainers(
    world: World,
    model: onnx.ModelProto,
    arrays: Mapping[str, Array],
    settings: Mapping[str, Any],
    distillation: Distillation | None = None,
) -> None:
    """Raise SettingError on all ranks if they build different trainers; it names the difference.

    - `world`: the ranks.
    - `model`, `arrays`, `settings`: the given model, its weights and the arguments.
    - `distillation`: the teacher, read, and its settings.
    """
    if world.size == 1:
        return
    installed = versions()
    names = [*COMPARED_VERSIONS, *(one.name for one in installed_distributions())]
    compared: dict[str, Any] = {f"version of {name}": installed.get(name) for name in names}
    compared["the model"] = _model_checksum(model)
    compared["the weights"] = checksum(arrays.values())
    if distillation is not None and isinstance(distillation.teacher, onnx.ModelProto):
        teacher = distillation.teacher
        numbers = map(onnx.numpy_helper.to_array, teacher.graph.initializer)
        compared["the teacher"] = [_model_checksum(teacher), checksum(numbers)]
    compared |= {f"{name}=": described(value) for name, value in settings.items()}
    world.require_same("Trainer(...)", compared, OWN_TRAINING)


def check_loss_scaling_with_averaging(world: World, precision: StepPrecision) -> None:
    """Raise SettingError where ranks that average their weights scale their losses, too."""
    if precision.scales_loss and world.average_every is not None:
        raise SettingError(
            f"precision={precision.name!r} cannot be combined with"
            f" average_every={world.average_every}, because each rank would adapt its own loss"
            " scale. Use precision='bf16', or share every gradient with average_every=None."
        )


def require_rows_to_share(world: World, recipe: Recipe) -> None:
    """Raise SettingError if several ranks would share batches that cannot be divided."""
    layout = recipe.layout
    if world.size > 1 and recipe.state_outputs:
        raise SettingError(
            f"{world.size} processes share the rows of each batch, but state_outputs= carries the"
            " rows of whole batches. Pass distribute=None."
        )
    if world.size > 1 and layout.is_whole:
        raise SettingError(
            f"{world.size} processes share the rows of each batch, but the batches of this model"
            f" cannot be divided ({'; '.join(layout.lines())}). Pass distribute=None."
        )


def check_accumulate_with_averaging(world: World, accumulate: int) -> None:
    """Raise SettingError if ranks average their weights and accumulate gradients as well."""
    if accumulate > 1 and world.average_every is not None:
        raise SettingError(
            f"accumulate={accumulate} cannot be combined with average_every={world.average_every}:"
            " both wait for several batches. Use accumulate with average_every=None, or"
            " average_every with accumulate=1."
        )


def require_same_fits(
    training: Training,
    arguments: Mapping[str, Any],
    data: Source,
    validation: Source | None,
    callbacks: Sequence[Callback],
) -> None:
    """Raise SettingError on all ranks if they call `fit` differently; it names the difference.

    SettingError, too: a batch has fewer rows than there are ranks.
    """
    world = training.world
    if world.size == 1:
        return
    training.tracker.merged([])  # raises the error of a metric that cannot be merged
    names = [type(callback).__name__ for callback in callbacks]
    compared = {**arguments, "batch_size": data.batch_size, "callbacks": names}
    for source, whose in ((data, "the data's"), (validation, "the validation data's")):
        if source is not None:
            compared |= {f"{whose} {name}": found for name, found in source.fingerprint().items()}
    compared["step"] = training.state.global_step
    compared["the weights"] = checksum(training.state.get_weights(copy=False).values())
    world.require_same("fit(...)", compared, OWN_TRAINING)
    require_rows_for_ranks(data.batch_size, world)


def require_rows_for_ranks(batch_size: int | None, world: World) -> None:
    """Raise SettingError if batches have fewer rows than there are ranks."""
    if batch_size is not None and batch_size < world.size:
        raise SettingError(
            f"A batch of {batch_size} rows cannot be shared among {world.size} ranks, because each"
            f" rank needs a row. Pass batch_size={world.size} or more, or start fewer ranks."
        )


def agree(training: Training, hook: str) -> bool:
    """Apply the decisions of rank 0 in a hook on all ranks; return whether training stops.

    Rank 0 decides whether to stop, and sets the learning rate, `accumulate` and `frozen`.
    """
    state = training.state
    decided = [training.stop_training, training.stop_reason, state.fixed_rate]
    own = [training.accumulate, list(state.frozen.weights)]
    decided, chosen = training.world.broadcast(f"the end of {hook}", [decided, own])
    training.stop_training, training.stop_reason, state.fixed_rate = decided
    if chosen != own:
        training.accumulate = chosen[0]
        state.freeze(chosen[1])
    return training.stop_training


def require_same_weights(
    world: World, name: str, weights: Mapping[str, Any], *, may_differ: bool = False
) -> bool:
    """Raise SettingError on all ranks if they set different weights, or not all set weights.

    Return whether the weights are the same. After an error, a rank sets only its own weights.

    - `name`: the call that sets the weights.
    - `may_differ`: raise no error for different weights.
    """
    if world.size == 1 or world.is_failing:
        return True
    arrays = {key: np.asarray(weights[key]) for key in sorted(weights)}
    # Arrays of other types raise an error later.
    numbers = [array for array in arrays.values() if array.dtype != object]
    own = {"the names": list(arrays), f"the weights of {name}": checksum(numbers)}
    if may_differ:
        return len({str(theirs) for theirs in world.gather(name, own)}) == 1
    world.require_same(name, own)
    return True


def merged_over_ranks(world: World, where: str, tracker: Tracker) -> tuple[Tracker, dict[str, Any]]:
    """Return a tracker with the sums of all ranks, and these sums as a checkpoint stores them.

    A fit that resumes on the same number of ranks continues from each rank's sums, bit for bit.
    """
    if world.size == 1:
        return tracker, {}
    states = world.gather(f"the figures at {where}", tracker.state_dict())
    whole = tracker.merged(states)
    return whole, {**whole.state_dict(), RANKS: states}


def joined_over_ranks(
    world: World, batches: Sequence[Mapping[str, Array]]
) -> list[dict[str, Array | list[Array]]]:
    """Return the outputs of whole batches, from the outputs of each rank.

    An element of `batches` has this rank's outputs by name; it is empty for a share without rows.
    """
    if world.size == 1:
        return [dict(batch) for batch in batches]
    shares = world.gather("the outputs of a prediction", list(batches))
    lengths = [len(share) for share in shares]
    if len(set(lengths)) > 1:
        raise DataError(
            f"The ranks predicted different numbers of batches: {', '.join(map(str, lengths))}. The"
            " data's shard method must give every rank the same number of batches."
        )
    joined = []
    for all_parts in zip(*shares):
        parts = [part for part in all_parts if part]
        names = parts[0] if parts else ()
        joined.append({name: _join_output(name, parts) for name in names})
    return joined


def _join_output(name: str, parts: Sequence[Mapping[str, Array]]) -> Array | list[Array]:
    """Join the ranks' rows of an output.

    A float without rows, such as the model's own loss, becomes the mean over the rows, as in
    training. The number of rows is taken from the first output that has rows.
    """
    arrays = [part[name] for part in parts]
    if arrays[0].ndim:
        return join_batches(arrays)
    if arrays[0].dtype.kind != "f":
        return arrays[0]
    rows = [next((len(array) for array in part.values() if array.ndim), 1) for part in parts]
    return np.average(arrays, axis=0, weights=rows).astype(arrays[0].dtype)


def own_sums(world: World, sums: Mapping[str, Any], tracker: Tracker) -> Mapping[str, Any]:
    """Return the sums from which this rank resumes, or {}.

    With another number of ranks than before, rank 0 continues from the sums of all. CheckpointError
    on all ranks: the sums do not fit `tracker`.
    """
    states = sums.get(RANKS, [])
    if states:
        problem = "The metrics cannot continue from the sums that the ranks saved in the checkpoint"
        with as_checkpoint_error(problem), np.errstate(all="ignore"):
            tracker.merged(states)
    if len(states) == world.size:
        own: Mapping[str, Any] = states[world.rank]
        return own
    whole = {name: value for name, value in sums.items() if name != RANKS}
    return whole if world.is_main else {}


def checksum(arrays: Iterable[Array]) -> int:
    """Return a number that almost certainly differs for different arrays."""
    code = 0
    for array in arrays:
        code = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, code)
    return code


def described(value: Any) -> Any:
    """Return a setting as JSON that is equal on all ranks of the same program.

    A function is described by its name, because its address differs.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.ndarray):
        return [value.dtype.name, [*value.shape], checksum([value])]
    if isinstance(value, Mapping):
        return {str(key): described(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [described(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        own = {one.name: described(getattr(value, one.name)) for one in fields(value)}
        return {"class": type(value).__qualname__, **own}
    return getattr(value, "__qualname__", type(value).__qualname__)


def _model_checksum(model: onnx.ModelProto) -> int:
    code = 0
    for node in model.graph.node:
        code = zlib.crc32(node.SerializeToString(deterministic=True), code)
    for value in (*model.graph.input, *model.graph.output):
        code = zlib.crc32(value.SerializeToString(deterministic=True), code)
    return code
