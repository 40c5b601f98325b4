"""The in_place backend: weights and slots are in memory once, and an update overwrites them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from onnxfit.data import Batch
from onnxfit.distributed.world import ALONE, World
from onnxfit.errors import SettingError, StepError
from onnxfit.graph import names
from onnxfit.runtime.backends.backend import Array
from onnxfit.runtime.backends.full import FullBackend
from onnxfit.runtime.backends.shape_cache import Specs
from onnxfit.runtime.buffers import Savepoint
from onnxfit.runtime.device import Device
from onnxfit.runtime.overwriting import overwritable_tensors
from onnxfit.runtime.session import BoundSession
from onnxfit.runtime.values import array_view
from onnxfit.step.recipe import Recipe

__all__ = ["InPlaceBackend"]


class InPlaceBackend(FullBackend):
    """Two graphs per step: the gradients, and an update that overwrites weights and slots.

    The update begins after loss, gradients and metrics have been computed. If one of these fails,
    nothing has changed. If the loss or a gradient is not finite, the step is skipped: weights,
    slots and running statistics stay as they are. An update cannot be undone.

    Weights and most slots are in memory once; the backend `full` has two sets of both. The
    gradients are allocated where the backward pass has freed activations, and the update uses the
    memory of the backward pass again. With `accumulate`, the sums of gradients have buffers of
    their own.
    """

    name = "in_place"
    shares_arena = True
    has_deferred_update = True
    kinds = ("gradients", "accumulate", "counts", "evaluate", "predict")

    def __init__(
        self,
        recipe: Recipe,
        arrays: Mapping[str, Array],
        *,
        device: Device,
        threads: int | None,
        accumulate: int,
        world: World = ALONE,
    ) -> None:
        for needed, given, fits in (
            ("device='cpu'", f"device={device.kind!r}", device.kind == "cpu"),
            ("a single process", f"{world.size} processes", world.size == 1),
        ):
            if not fits:
                raise SettingError(
                    f"backend='in_place' needs {needed}, got {given}. Use backend='full'."
                )
        super().__init__(
            recipe, arrays, device=device, threads=threads, accumulate=accumulate, world=world
        )
        # The gradients that wait for the update, as OrtValues by their names in the graphs. With
        # accumulated gradients, the state has their sums instead.
        self._gradients: dict[str, Any] = {}
        # The learning rate and the number of the step whose gradients wait for the update.
        self._pending: tuple[float, int] | None = None
        # Whether the losses since the last update, and their gradients, may be used.
        self._losses_are_finite = True
        self._began_finite = True  # `_losses_are_finite` before the running step
        self._keeps_update = False
        # The version of the state after the last step, if this step has updated the weights.
        self._updated_version = -1

    def _in_place_tensors(self) -> Collection[str]:
        graph = self.graph("update" if self.accumulator.enabled else "apply", {}).graph
        inputs, outputs = ({v.name for v in values} for values in (graph.input, graph.output))
        updates = {name: names.updated(name) for name in inputs if names.updated(name) in outputs}
        found = overwritable_tensors(graph, updates)
        for name, members in self.fused.items():
            if name in found:
                found.update(members)
            for slot in self.recipe.slots[members[0]]:
                if names.slot(name, slot) in found:
                    found.update(names.slot(member, slot) for member in members)
        return found

    # ------------------------------------------------------------------ a step

    def begin_step(self) -> Savepoint:
        self._began_finite = self._losses_are_finite
        # An update that this step does not undo, because it was made before or fails midway.
        self._keeps_update = self._updated_version == self.state.version
        return super().begin_step()

    def undo_step(self) -> None:
        super().undo_step()
        self._discard_gradients()
        self._losses_are_finite = self._began_finite
        if self._keeps_update:
            self._updated_version = self.state.version

    def train(
        self, batch: Batch, learning_rate: float, step: int, seed: int
    ) -> BoundSession | None:
        self._discard_gradients()
        self.last_update = None
        if not self.accumulator.count:
            self._losses_are_finite = True
        if self.accumulator.enabled:
            session = self._accumulate(batch, learning_rate, step, seed)
        else:
            session = self._run_share("gradients", batch, learning_rate, step, seed)
            if session is not None:
                self._gradients = session.take_outputs()
        self._updated_version = -1
        if session is not None and not math.isfinite(session.scalars[names.TOTAL].item()):
            self._losses_are_finite = False
            self.state.revert(["statistics"])  # of this batch; an earlier one's are kept
        if session is not None and (not self.accumulator.enabled or self.accumulator.is_full):
            self._pending = learning_rate, step
        return session

    def finish_step(self) -> bool:
        if self._pending is None:
            return False
        learning_rate, step = self._pending
        try:
            self._update(learning_rate, step)
        finally:
            self._discard_gradients()
        return True

    def flush(self, learning_rate: float, step: int) -> bool:
        if not self.accumulator.count:
            return False
        self._update(learning_rate, step)
        return True

    def _update(self, learning_rate: float, step: int) -> None:
        """Update with the gradients of a batch or a window, unless a number is not finite.

        A loss scale becomes smaller if a gradient is not finite. Its update skips itself.
        """
        finite_gradients = all(_all_finite(array) for array in self._gradient_arrays())
        finite = finite_gradients and self._losses_are_finite
        if not finite_gradients and self._losses_are_finite:  # else the statistics are reverted
            self.state.revert(["statistics"])
        if not finite and (finite_gradients or not self.recipe.precision.scales_loss):
            self.accumulator.count = 0
            return
        # Compiled before the update begins: if that fails, nothing has changed.
        update = self.batchless_session("update" if self.accumulator.enabled else "apply")
        try:
            if self.accumulator.enabled:
                super().flush(learning_rate, step)
            else:
                self.write_scalars(update, learning_rate, step, 0)
                update.run(self._gradients)
                self.last_update = update
        except StepError as error:
            self._keeps_update = True
            raise StepError(
                f"{error}\nbackend='in_place' may have updated some of the weights. Load the last"
                " checkpoint, or create the trainer again."
            ) from error
        if finite:  # otherwise the update has skipped itself
            self._updated_version = self.state.version

    def _gradient_arrays(self) -> Iterator[Array]:
        if self.accumulator.enabled:
            return (self.state.buffer(names.gradient_sum(w)).array for w in self.recipe.weights)
        # Type and shape are those of the weights. Asking each OrtValue takes longer.
        weights = {w: self.state.buffer(w).array for w in self.recipe.weights}
        return (
            array_view(self._gradients[names.gradient(name)], weight.dtype, weight.shape)
            for name, weight in weights.items()
        )

    def _discard_gradients(self) -> None:
        """Free the gradients of the last batch, after their update or instead of it."""
        self._pending = None
        if not self._gradients:
            return
        self._gradients = {}
        if "apply" in self._batchless:
            self._batchless["apply"].release_inputs()

    def revert(self) -> None:
        self._discard_gradients()
        if self._updated_version == self.state.version:
            raise SettingError(
                "backend='in_place' cannot undo an update, because it overwrites the weights. Use"
                " backend='full'."
            )
        self.accumulator.count = 0
        self.state.revert(["statistics"])

    # ------------------------------------------------------------------ graphs

    def compile(self, kind: str, shapes: Specs) -> Any:
        if kind != "gradients":
            return super().compile(kind, shapes)
        gradients = [names.gradient(weight) for weight in self.recipe.weights]
        return self.bind(kind, self.graph(kind, shapes), taken_outputs=gradients)


def _all_finite(array: Array) -> bool:
    """Return whether no number of an array is infinite or NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        # A sum is finite only if all numbers are, and needs no memory. It may overflow.
        return bool(np.isfinite(array.sum())) or bool(np.isfinite(array).all())
