"""Turn a logger's failure to write into a warning."""

from __future__ import annotations

from types import TracebackType

from onnxfit.callbacks.callback import Callback
from onnxfit.errors import CheckpointError, warn_user

__all__: list[str] = []  # no class of the public package


class WriteGuard:
    """Context in which a logger writes: an error becomes a warning, and training continues.

    - `owner`: the callback's class, named in the warning.
    - `target`: the file, folder or server, named in the warning.
    - `errors`: the exceptions that mean a failure to write. Others are raised.
    - `verb`: the failed action, for the warning, such as "write" or "reach".

    There is one warning between two calls of `reset`. Callbacks that write checkpoints or
    predictions use no guard: their errors are raised.
    """

    def __init__(
        self,
        owner: str,
        target: object,
        errors: tuple[type[Exception], ...] = (OSError, CheckpointError),
        verb: str = "write",
    ) -> None:
        self.owner = owner
        self.target = target
        self.errors = errors
        self.verb = verb
        self._warned = False

    def reset(self) -> None:
        """Allow a warning at the next error; called when a fit begins."""
        self._warned = False

    def warn(self, error: BaseException) -> None:
        """Issue a warning for an error, unless there was one since `reset`."""
        if not self._warned:
            self._warned = True
            warn_user(
                f"{self.owner} cannot {self.verb} {str(self.target)!r}:"
                f" {str(error).rstrip('.')}. Training continues, and the logger tries again later.",
                RuntimeWarning,
            )

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, self.errors):
            return False
        self.warn(error)
        return True


def writes_files(callback: Callback) -> bool:
    """Return whether this process writes files: rank 0, where several train together.

    - `callback`: a callback, which has no trainer before its first `fit`.
    """
    trainer = getattr(callback, "trainer", None)
    return trainer is None or trainer.is_main
