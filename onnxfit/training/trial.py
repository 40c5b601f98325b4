"""Steps that are undone, with which a callback tries learning rates."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import ExitStack, closing
from itertools import count

from onnxfit.checks import is_finite, is_number, shortened
from onnxfit.errors import SettingError
from onnxfit.runtime.backends.shape_cache import trial_shapes
from onnxfit.training.training import Training


def trial_steps(
    training: Training, rates: Iterable[float], epochs: int | None, batch_size: int | None
) -> Generator[float, None, None]:
    """Take one step at each learning rate, and undo all of them; see `Trainer.trial_steps`."""
    backend, state, guard = training.backend, training.state, training.guard
    data = training.fit_state.data_for_trials if training.fit_state is not None else None
    if data is None:
        raise SettingError(
            "trial_steps can be called only in on_train_begin and on_train_end of a callback."
        )
    if batch_size is not None and data.rows is not None and batch_size > data.rows:
        return
    with ExitStack() as stack:
        if batch_size is not None:
            data = stack.enter_context(data.with_batch_size(batch_size, drop_last=True))
            stack.enter_context(trial_shapes(backend.caches.values()))
        data.require_re_iterable(2)
        numbers = count() if epochs is None else range(epochs)
        batches = stack.enter_context(closing(b for n in numbers for b in data.batches(n)))
        before, on_gradients = state.get(), backend.on_gradients
        averaged_step = state.averaged_step
        carried = state.carried.state_dict()
        state.carried.reset()
        backend.accumulator.count = 0  # no gradients wait for an update
        backend.on_gradients = None
        try:
            for rate, batch in zip(rates, batches):
                if not (is_number(rate) and is_finite(rate)):
                    raise SettingError(
                        f"A learning rate must be a finite number, got {shortened(rate)}."
                    )
                with guard.advancing:
                    loss = training.step(batch, rate, training.tracker)
                yield training.trial_loss(batch, loss)
        finally:
            with guard, guard.advancing, backend.lock:
                state.set(before)
            state.carried.load_state_dict(carried)
            state.averaged_step = averaged_step
            backend.on_gradients = on_gradients
