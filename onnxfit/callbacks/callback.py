"""The base of every callback, and the list that calls them in order.

The loop, with every hook:

    on_train_begin()
    for epoch in ...:
        on_epoch_begin(epoch)
        for batch in ...:
            on_train_batch_begin(batch)
            ... one step: forward, loss, gradient, update ...     (forward_backward: on_gradients(gradients) before the update)
            on_train_batch_end(batch, {"loss", metrics, "batch_loss"})
        on_test_begin(); on_test_batch_begin/end ...; on_test_end({"loss", metrics})          where there is validation data
        on_epoch_end(epoch, {"loss", metrics, "val_loss", ..., "learning_rate"})
    on_train_end(logs of the last epoch)
    finally: on_exception(exception) if one came; on_close()
"""

from __future__ import annotations

import difflib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, SupportsFloat

import numpy.typing as npt

from onnxfit.callbacks.logs import Logs
from onnxfit.errors import CheckpointError, SettingError
from onnxfit.runtime.backends import get_backend

if TYPE_CHECKING:
    from onnxfit.trainer import Trainer

__all__ = ["HOOKS", "Callback", "CallbackList", "Logs", "StatefulCallback"]

PHASES = ("monitor", "checkpoint", "backup", "logger")


class Callback:
    """Override the hooks you need; every one is optional.

    `self.trainer`, `self.params` and `self.callbacks` are set before the first.

    `params` is `{"epochs", "steps", "verbose"}` of the running `fit` (`steps` None where the number
    of batches is not known), `callbacks` the list in which this callback runs. `epoch` and `batch`
    count from 0; `logs` is a read-only mapping of Python floats, to which `self.trainer.log(name,
    value)` adds for every later callback.

    >>> class Stop(Callback):
    ...     def on_epoch_end(self, epoch, logs):
    ...         if logs["loss"] < 0.01:
    ...             self.trainer.stop_training = True
    """

    # then "checkpoint", "backup", "logger", whatever the order of the list
    phase: ClassVar[str] = "monitor"

    trainer: Trainer
    params: dict[str, Any]
    callbacks: CallbackList

    @property
    def state_key(self) -> str:
        """What tells this callback's saved state from another's: the class name plus what
        distinguishes it.
        """
        return type(self).__name__

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of this callback, as JSON (numbers, strings, lists, dicts) and
        numpy arrays.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or a pickle, made after a fit has what the callback found out, and not the
        trainer it stood beside.
        """
        return {
            name: value
            for name, value in vars(self).items()
            if name not in ("trainer", "callbacks")
        }

    def listens(self, hook: str) -> bool:
        """Whether this hook is to be called: by default, whether it is overridden.

        Nothing is prepared for a hook nobody hears.
        """
        return getattr(getattr(self, hook), "__func__", None) is not getattr(Callback, hook)

    def prepare(self, trainer: Trainer) -> None:
        """Called by `fit` before it settles at which epoch and batch to begin: the moment for
        `trainer.restore`. Nothing has begun yet.
        """

    def on_train_begin(self, logs: Logs) -> None: ...
    def on_train_end(self, logs: Logs) -> None: ...
    def on_epoch_begin(self, epoch: int, logs: Logs) -> None: ...
    def on_epoch_end(self, epoch: int, logs: Logs) -> None: ...
    def on_train_batch_begin(self, batch: int, logs: Logs) -> None: ...
    def on_train_batch_end(self, batch: int, logs: Logs) -> None: ...
    def on_test_begin(self, logs: Logs) -> None: ...
    def on_test_end(self, logs: Logs) -> None: ...
    def on_test_batch_begin(self, batch: int, logs: Logs) -> None: ...
    def on_test_batch_end(self, batch: int, logs: Logs) -> None: ...
    def on_predict_begin(self, logs: Logs) -> None: ...
    def on_predict_end(self, logs: Logs) -> None: ...
    def on_predict_batch_begin(self, batch: int, logs: Logs) -> None: ...
    def on_predict_batch_end(self, batch: int, logs: Logs) -> None: ...
    def on_gradients(self, gradients: dict[str, npt.NDArray[Any]]) -> None: ...
    def on_exception(self, exception: BaseException) -> None: ...
    def on_close(self) -> None: ...


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class StatefulCallback(Callback, ABC):
    """A callback that starts afresh in every `fit`, unless a state has been loaded into it since
    the last one.

    `remembered` names the attributes that make up its state; `reset` gives them their first values,
    called where a `fit` begins afresh.
    """

    remembered: ClassVar[tuple[str, ...]] = ()
    _resumes = False

    @abstractmethod
    def reset(self) -> None:
        """Forget everything: a `fit` begins afresh."""

    def state_dict(self) -> dict[str, Any]:
        return {name: _snapshot(getattr(self, name)) for name in self.remembered}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        missing = [name for name in self.remembered if name not in state]
        if missing:
            raise CheckpointError(
                f"The saved state of {self.state_key} lacks {', '.join(missing)}; it has"
                f" {', '.join(state) or 'nothing'}."
            )
        for name in self.remembered:
            setattr(self, name, _snapshot(state[name]))
        self._resumes = True

    def on_train_begin(self, logs: Logs) -> None:
        if not self._resumes:
            self.reset()

    def on_close(self) -> None:
        self._resumes = False


def _snapshot(value: Any) -> Any:
    """A copy that later changes do not reach; arrays are shared, for they are replaced and never
    written.
    """
    if isinstance(value, dict):
        return {key: _snapshot(entry) for key, entry in value.items()}
    return [_snapshot(entry) for entry in value] if isinstance(value, list) else value


class CallbackList:
    """Callbacks in their order: monitors, checkpoints, backups, loggers; within a phase as given.

    Beside each hook's method stands the tuple of those who listen to it (`train_batch_end` beside
    `on_train_batch_end`), empty if nobody does, so that the loop need not prepare what nobody
    reads. `states`, state_key -> state, is loaded into the callbacks it names.

    SettingError: something that is no callback, two with the same state_key, or a hook that
    `trainer.backend` never calls.
    """

    train_begin: tuple[Callable[[Logs], None], ...]
    train_end: tuple[Callable[[Logs], None], ...]
    epoch_begin: tuple[Callable[[int, Logs], None], ...]
    epoch_end: tuple[Callable[[int, Logs], None], ...]
    train_batch_begin: tuple[Callable[[int, Logs], None], ...]
    train_batch_end: tuple[Callable[[int, Logs], None], ...]
    test_begin: tuple[Callable[[Logs], None], ...]
    test_end: tuple[Callable[[Logs], None], ...]
    test_batch_begin: tuple[Callable[[int, Logs], None], ...]
    test_batch_end: tuple[Callable[[int, Logs], None], ...]
    predict_begin: tuple[Callable[[Logs], None], ...]
    predict_end: tuple[Callable[[Logs], None], ...]
    predict_batch_begin: tuple[Callable[[int, Logs], None], ...]
    predict_batch_end: tuple[Callable[[int, Logs], None], ...]
    gradients: tuple[Callable[[dict[str, npt.NDArray[Any]]], None], ...]

    def __init__(
        self,
        trainer: Trainer,
        callbacks: Iterable[Callback],
        params: Mapping[str, Any] | None = None,
        states: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        callbacks = list(callbacks)
        _check(callbacks, trainer.backend)
        self.callbacks = sorted(callbacks, key=lambda callback: PHASES.index(callback.phase))
        for callback in self.callbacks:
            callback.trainer = trainer
            callback.params = dict(params or {})
            callback.callbacks = self
            if states and callback.state_key in states:
                callback.load_state_dict(states[callback.state_key])
        for hook in HOOKS:
            listeners = tuple(
                getattr(callback, hook) for callback in self.callbacks if callback.listens(hook)
            )
            setattr(self, hook.removeprefix("on_"), listeners)
        self._logs: Logs | None = None
        self._begun: list[Callback] = []
        self._failed = False

    def __iter__(self) -> Iterator[Callback]:
        return iter(self.callbacks)

    def __len__(self) -> int:
        return len(self.callbacks)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Every callback's state, by its state_key."""
        return {callback.state_key: callback.state_dict() for callback in self.callbacks}

    def load_state_dict(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Give every callback the state saved under its state_key; one without a saved state is
        left as it is.
        """
        for callback in self.callbacks:
            if callback.state_key in states:
                callback.load_state_dict(states[callback.state_key])

    def log(self, name: str, value: SupportsFloat) -> None:
        """Add a figure to the logs of the event under way, for every callback still to be called.
        """
        if self._logs is None:
            raise SettingError(
                f"trainer.log({name!r}, ...) adds to the logs of a hook: call it inside one."
            )
        self._logs.add(name, value)

    def _call(
        self, listeners: tuple[Callable[..., None], ...], logs: Logs, *arguments: Any
    ) -> None:
        if listeners:
            self._logs = logs
            try:
                for listener in listeners:
                    listener(*arguments)
            finally:
                self._logs = None

    def on_train_begin(self, logs: Logs) -> None:
        self._logs = logs
        try:
            for callback in self.callbacks:
                self._begun.append(callback)
                callback.on_train_begin(logs)
        finally:
            self._logs = None

    def on_train_end(self, logs: Logs) -> None:
        self._call(self.train_end, logs, logs)

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        self._call(self.epoch_begin, logs, epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        self._call(self.epoch_end, logs, epoch, logs)

    def tell_loggers(self, hook: str, index: int, logs: Logs) -> None:
        """Tell the loggers alone of an epoch's or batch's end: checkpoints are written before they
        are told, so where training resumes from one, they were not.
        """
        loggers = [c for c in self.callbacks if c.phase == "logger" and c.listens(hook)]
        self._call(tuple([getattr(c, hook) for c in loggers]), logs, index, logs)

    def on_train_batch_begin(self, batch: int, logs: Logs) -> None:
        self._call(self.train_batch_begin, logs, batch, logs)

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        self._call(self.train_batch_end, logs, batch, logs)
        logs.end()

    def on_test_begin(self, logs: Logs) -> None:
        self._begin_all()
        self._call(self.test_begin, logs, logs)

    def on_test_end(self, logs: Logs) -> None:
        self._call(self.test_end, logs, logs)

    def on_test_batch_begin(self, batch: int, logs: Logs) -> None:
        self._call(self.test_batch_begin, logs, batch, logs)

    def on_test_batch_end(self, batch: int, logs: Logs) -> None:
        self._call(self.test_batch_end, logs, batch, logs)
        logs.end()

    def on_predict_begin(self, logs: Logs) -> None:
        self._begin_all()
        self._call(self.predict_begin, logs, logs)

    def on_predict_end(self, logs: Logs) -> None:
        self._call(self.predict_end, logs, logs)

    def on_predict_batch_begin(self, batch: int, logs: Logs) -> None:
        self._call(self.predict_batch_begin, logs, batch, logs)

    def on_predict_batch_end(self, batch: int, logs: Logs) -> None:
        self._call(self.predict_batch_end, logs, batch, logs)

    def on_gradients(self, gradients: dict[str, npt.NDArray[Any]]) -> None:
        for listener in self.gradients:
            listener(gradients)

    def on_exception(self, exception: BaseException) -> None:
        """Tell every callback that began.

        A hook's own error becomes a warning, for the exception itself is about to be raised.
        """
        self._failed = True
        self._finish("on_exception", exception)

    def on_close(self) -> None:
        """Close every callback that began; if closing fails, the others are closed too and the
        first error is raised after all.

        After an exception the error becomes a warning, so that it does not hide the exception.
        """
        try:
            self._finish("on_close")
        finally:
            self._begun.clear()
            self._failed = False

    def _begin_all(self) -> None:
        if not self._begun:  # `evaluate` and `predict` by themselves, outside `fit`
            self._begun = list(self.callbacks)

    def _finish(self, hook: str, *arguments: Any) -> None:
        errors: list[tuple[Callback, BaseException]] = []
        for callback in self._begun:
            try:
                getattr(callback, hook)(*arguments)
            except (
                BaseException
            ) as error:  # even Ctrl-C must not keep the others from closing their files
                errors.append((callback, error))
        if errors and not self._failed:
            raise errors[0][1]
        for callback, failure in errors:
            warnings.warn(
                f"{type(callback).__name__}.{hook} failed with {failure!r}.",
                RuntimeWarning,
                stacklevel=3,
            )


def _check(callbacks: list[Any], backend: str) -> None:
    keys: set[str] = set()
    for callback in callbacks:
        if not isinstance(callback, Callback):
            wanted = f"; write {callback.__name__}(...)" if isinstance(callback, type) else ""
            raise SettingError(
                "callbacks must be instances of onnxfit.callbacks.Callback, got"
                f" {callback!r}{wanted}."
            )
        name = type(callback).__name__
        if callback.phase not in PHASES:
            raise SettingError(
                f"{name}.phase must be one of {', '.join(PHASES)}, got {callback.phase!r}."
            )
        for hook in {name for name in dir(callback) if name.startswith("on_")} - set(HOOKS):
            near = difflib.get_close_matches(hook, HOOKS, 1, 0)[0]
            warnings.warn(
                f"{name}.{hook} is no hook and is never called; did you mean {near}?",
                UserWarning,
                stacklevel=4,
            )
        if callback.state_key in keys:
            raise SettingError(
                f"Two callbacks have the state_key {callback.state_key!r}, so that a checkpoint"
                " could not tell them apart: drop one, or give each a state_key of its own."
            )
        keys.add(callback.state_key)
        if callback.listens("on_gradients") and not get_backend(backend).shows_gradients:
            raise SettingError(
                f"{name} overrides on_gradients, which backend={backend!r} never calls, since its"
                " gradients exist only inside the step: use Trainer(...,"
                " backend='forward_backward')."
            )
