"""The inputs of a session: the rows of a batch, and the scalars of a step."""

from __future__ import annotations

from onnxfit.data import Batch
from onnxfit.graph import names
from onnxfit.graph.spec import TensorSpec
from onnxfit.runtime.session import BoundSession
from onnxfit.runtime.values import Array


def run_on(session: BoundSession, batch: Batch) -> BoundSession:
    """Run a session on a batch and return the session."""
    session.run(write_batch(session, batch))
    return session


def write_batch(session: BoundSession, batch: Batch) -> dict[str, Array]:
    """Copy the rows of a batch into the session's buffers; return the arrays for `session.run`.

    These arrays are the inputs without a buffer, such as inputs of unknown size.
    """
    per_run = session.per_run_inputs
    if not per_run or not any(name in per_run for name, _ in (*batch.columns, *batch.scalars)):
        batch.write(session.feeds)
        return {}
    arrays = batch.arrays()
    for name in arrays.keys() & session.feeds.keys():
        session.feeds[name][...] = arrays[name]
    return arrays


def write_scalars(session: BoundSession, learning_rate: float, step: int, seed: int) -> None:
    """Write the scalars of a step into the session's inputs for them."""
    feeds = session.feeds
    if names.LEARNING_RATE in feeds:
        feeds[names.LEARNING_RATE][()] = learning_rate
    if names.STEP in feeds:
        feeds[names.STEP][()] = step
    if names.SEED in feeds:
        feeds[names.SEED][()] = seed


def specs_of(batch: Batch) -> dict[str, TensorSpec]:
    """Return the specs of a batch's arrays."""
    return {n: TensorSpec(n, array.dtype, array.shape) for n, array in batch.arrays().items()}


def share_of_rows(batch: Batch) -> float:
    """Return the rows of a batch, divided by those of the whole batch of all ranks."""
    return 1.0 if batch.whole_rows is None else batch.rows / batch.whole_rows
