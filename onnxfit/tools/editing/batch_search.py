"""Find batch axes for a whole graph, although a Reshape may leave several to choose from."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnxfit.tools.editing.batch_axes import BatchAxisError
from onnxfit.tools.editing.batch_walk import BatchAxisPropagation

# Other choices among the possible batch axes that may fail in a row without getting any further
MAX_FAILURES = 20


def walk(
    model: ir.Model, shapes: Mapping[str, tuple[int, ...]], axes: Mapping[str, int], rows: int
) -> BatchAxisPropagation:
    """Return a walk after which the batch may have any size.

    - `model`: the model, which is not changed; its nodes have names.
    - `shapes`: a shape without unknown sizes for each input, with the batch of the file.
    - `axes`: the batch axis of each input that has one.
    - `rows`: the rows of the batch in the file.

    BatchAxisError: a node prevents another batch size.
    """
    attempt = BatchAxisPropagation(model, shapes, axes, rows)
    first: BatchAxisError | None = None
    farthest = failures = 0
    while failures <= MAX_FAILURES:
        try:
            attempt.run()
        except BatchAxisError as error:
            first = first or error
            failures = 0 if attempt.position > farthest else failures + 1
            farthest = max(farthest, attempt.position)
            if not attempt.choose_next():
                break
            continue
        if first is None or attempt.reaches_outputs():
            return attempt
        break  # another axis avoids the node, but the batch does not come to the end
    assert first is not None
    raise first
