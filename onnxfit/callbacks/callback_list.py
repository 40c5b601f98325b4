"""The list of callbacks, which calls the hooks of each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, SupportsFloat

import numpy.typing as npt

from onnxfit.callbacks.callback import HOOKS, PHASES, Callback
from onnxfit.callbacks.hooks import check_hooks
from onnxfit.callbacks.logs import Logs
from onnxfit.checks import require_choice
from onnxfit.distributed.world import ALONE, World
from onnxfit.errors import SettingError, warn_user
from onnxfit.runtime.backends import get_backend

if TYPE_CHECKING:
    from onnxfit.trainer import Trainer

__all__ = ["CallbackList"]


# Hooks whose event a checkpoint keeps until all callbacks have been told.
TOLD_HOOKS = ("on_epoch_end", "on_train_batch_end")


class CallbackList:
    """Callbacks in the order in which they run: monitors, checkpoints, backups, loggers.

    - `trainer`: the Trainer that every callback gets as its attribute.
    - `callbacks`: the callbacks; within a phase they keep this order.
    - `params`: the dict that every callback gets as its attribute.
    - `states`: state_key -> state, loaded into the callbacks it names.
    - `world`: the processes that train together; rank 0 alone calls some of the callbacks.
    - `caller`: the method that runs the callbacks, for the error if the ranks call different ones.

    `figures` are the names that the logs will have at the end of an epoch, and `batch_figures` the
    names at the end of a batch. Both are None until `fit` sets them. Callbacks may log others.

    `on_train_begin` and the other hooks call the hook of every callback; `epoch`, `batch`, `logs`,
    `gradients` and `exception` are its arguments. For every hook there is a tuple of the methods
    that listen to it: `train_batch_end` for `on_train_batch_end`. If the tuple is empty, the loop
    need not prepare logs.

    SettingError: an entry is not a Callback, two have the same state_key, or a callback overrides a
    hook that `trainer.backend` never calls, misspells a hook, or does not take its arguments.
    """

    # Context in which the training state changes as a whole; see `Callback.is_brief`.
    advancing: AbstractContextManager[None] = nullcontext()
    figures: Collection[str] | None = None
    batch_figures: Collection[str] | None = None

    train_begin: tuple[Callable[[Logs], None], ...] = ()
    train_end: tuple[Callable[[Logs], None], ...] = ()
    epoch_begin: tuple[Callable[[int, Logs], None], ...] = ()
    epoch_end: tuple[Callable[[int, Logs], None], ...] = ()
    train_batch_begin: tuple[Callable[[int, Logs], None], ...] = ()
    train_batch_end: tuple[Callable[[int, Logs], None], ...] = ()
    test_begin: tuple[Callable[[Logs], None], ...] = ()
    test_end: tuple[Callable[[Logs], None], ...] = ()
    test_batch_begin: tuple[Callable[[int, Logs], None], ...] = ()
    test_batch_end: tuple[Callable[[int, Logs], None], ...] = ()
    predict_begin: tuple[Callable[[Logs], None], ...] = ()
    predict_end: tuple[Callable[[Logs], None], ...] = ()
    predict_batch_begin: tuple[Callable[[int, Logs], None], ...] = ()
    predict_batch_end: tuple[Callable[[int, Logs], None], ...] = ()
    gradients: tuple[Callable[[dict[str, npt.NDArray[Any]]], None], ...] = ()
    exception: tuple[Callable[[BaseException], None], ...] = ()
    close: tuple[Callable[[], None], ...] = ()

    def __init__(
        self,
        trainer: Trainer,
        callbacks: Iterable[Callback],
        params: Mapping[str, Any] | None = None,
        states: Mapping[str, dict[str, Any]] | None = None,
        world: World = ALONE,
        caller: str = "fit",
    ) -> None:
        callbacks = list(callbacks)
        _check_callbacks(callbacks, trainer.backend)
        self.callbacks = sorted(callbacks, key=lambda callback: PHASES.index(callback.phase))
        for callback in self.callbacks:
            callback.trainer = trainer
            callback.params = dict(params or {})
            callback.callbacks = self
        self.world = world
        # The callbacks whose hooks this rank calls.
        self._called = [c for c in self.callbacks if world.is_main or not c.runs_on_first]
        self.load_state_dict(states or {})
        listeners: dict[str, list[Callable[..., None]]] = {}
        for callback in self._called:
            for hook in HOOKS:
                if callback.overrides(hook):
                    method = self._listener(callback, hook)
                    if hook in TOLD_HOOKS:
                        method = self._noting(callback, method)
                    listeners.setdefault(hook, []).append(method)
        for hook, methods in listeners.items():
            setattr(self, hook.removeprefix("on_"), tuple(methods))
        # Hooks to which a callback of any rank listens; rank 0 calls all callbacks.
        self.subscribed: Collection[str] = list(listeners)
        self._hearing_batches: list[Callback] = []  # of all ranks; unused by a single process
        if world.size > 1:
            self._hearing_batches = [c for c in self.callbacks if c.overrides("on_train_batch_end")]
            self.subscribed = world.broadcast(f"the beginning of {caller}", self.subscribed)
        # Callbacks that have been told the running event, the end of a batch or an epoch.
        self.told: list[Callback] = []
        self._logs: Logs | None = None
        self._begun: list[Callback] = []
        self._failed = False

    def __iter__(self) -> Iterator[Callback]:
        return iter(self.callbacks)

    def __len__(self) -> int:
        return len(self.callbacks)

    def _listener(self, callback: Callback, hook: str) -> Callable[..., None]:
        """Return a callback's hook; on rank 0 alone, it rejects calls that need all ranks."""
        method: Callable[..., None] = getattr(callback, hook)
        if self.world.size == 1 or not callback.runs_on_first:
            return method

        def call(*arguments: Any) -> None:
            with self.world.forbid_collectives(f"{type(callback).__name__}.{hook}"):
                method(*arguments)

        return call

    def _noting(self, callback: Callback, method: Callable[..., None]) -> Callable[..., None]:
        """Return a hook that notes in `told` that it was called.

        An interrupted monitor counts as told, because its state may contain the event. An
        interrupted logger does not: when it resumes, it removes what it wrote twice.
        """

        def call(*arguments: Any) -> None:
            if callback.is_brief:
                with self.advancing:
                    method(*arguments)
                    self.told.append(callback)
                return
            if callback.phase == "monitor":
                self.told.append(callback)
            method(*arguments)
            if callback.phase != "monitor":
                self.told.append(callback)

        return call

    def told_by_key(self, hook: str) -> dict[str, list[str]]:
        """Return the keys of the loggers that were `told` the running event, and of the monitors
        that `missed` it, for `tell_rest`.

        - `hook`: the hook of the event.
        """
        listening = [callback for callback in self._called if callback.overrides(hook)]
        keys = {
            "told": [c.state_key for c in self.told if c.phase == "logger"],
            "missed": [
                c.state_key for c in listening if c.phase == "monitor" and c not in self.told
            ],
        }
        return {name: listed for name, listed in keys.items() if listed}

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return every callback's state, by its state_key."""
        return {callback.state_key: callback.state_dict() for callback in self.callbacks}

    def load_state_dict(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Load every callback's saved state; callbacks without one stay as they are.

        - `states`: state_key -> state.

        If a callback rejects its state, the attributes of all callbacks are restored. A callback
        that only rank 0 calls has a state only on rank 0.
        """
        before = [dict(vars(callback)) for callback in self.callbacks]
        try:
            for callback in self._called:
                if callback.state_key in states:
                    callback.load_state_dict(states[callback.state_key])
        except BaseException:
            for callback, attributes in zip(self.callbacks, before):
                vars(callback).clear()
                vars(callback).update(attributes)
            raise

    def log(self, name: str, value: SupportsFloat) -> None:
        """Add a value to the logs of the current event, for every callback still to be called.

        - `name`, `value`: the entry of the logs.

        SettingError: no hook is running.
        """
        if self._logs is None:
            raise SettingError(
                f"trainer.log({name!r}, ...) adds to the logs of the running hook, and no hook is"
                " running. Call it inside a hook of a callback."
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
            for callback in self._called:
                self._begun.append(callback)
                self._listener(callback, "on_train_begin")(logs)
        finally:
            self._logs = None

    def on_train_end(self, logs: Logs) -> None:
        self._call(self.train_end, logs, logs)

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        self._call(self.epoch_begin, logs, epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        if self.world.size == 1:
            self._call(self.epoch_end, logs, epoch, logs)
            return
        for callback in self._called:
            if not callback.overrides("on_epoch_end"):
                continue
            listener = self._noting(callback, self._listener(callback, "on_epoch_end"))
            self._call((listener,), logs, epoch, logs)
            if not callback.runs_on_first:
                # Callbacks decide by these figures, and times and memory differ among ranks.
                name = f"the end of {type(callback).__name__}.on_epoch_end"
                logs.replace(self.world.broadcast(name, dict(logs)))

    def save_after(self, batch: int) -> bool:
        """Return whether a callback may save after a batch in the middle of accumulated gradients.

        - `batch`: the number of batches trained so far, over all fits.
        """
        return any(callback.may_save_mid_window(batch) for callback in self.callbacks)

    def read_batch(self, batch: int) -> bool:
        """Return whether a callback reads figures or decides in `on_train_batch_end`.

        - `batch`: the argument of the hook.
        """
        # Ask every callback, without stopping at the first True: a callback may communicate with
        # the other processes.
        answers = [callback.needs_synced_logs(batch) for callback in self._hearing_batches]
        return any(answers)

    def begin_rest(self, hook: str, keys: Mapping[str, Collection[str]]) -> list[Callback]:
        """Return the callbacks that missed an event, when training resumes; the others are `told`.

        Checkpoints are written before loggers are called, so the loggers missed that event.

        - `hook`: "on_epoch_end" or "on_train_batch_end".
        - `keys`: what `told_by_key` returned.
        """
        told, missed = keys.get("told", ()), keys.get("missed", ())
        by_phase: dict[str, Callable[[str], bool]] = {
            "monitor": lambda key: key in missed,
            "logger": lambda key: key not in told,
        }
        listening = [c for c in self._called if c.overrides(hook) and c.phase in by_phase]
        rest = [c for c in listening if by_phase[c.phase](c.state_key)]
        self.told = [c for c in self._called if c not in rest]
        return rest

    def tell_rest(self, rest: Iterable[Callback], hook: str, index: int, logs: Logs) -> None:
        """Call a hook of the callbacks that `begin_rest` returned.

        - `rest`: these callbacks.
        - `hook`: the hook.
        - `index`, `logs`: the arguments of the hook.
        """
        methods = [self._noting(c, self._listener(c, hook)) for c in rest]
        self._call(tuple(methods), logs, index, logs)

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
        """Call `on_exception` of every callback that began.

        An error of a hook becomes a warning, because `exception` itself is about to be raised.
        """
        self._failed = True
        self._finish("on_exception", exception)

    def on_close(self) -> None:
        """Close every callback that began, even if closing one of them fails.

        The first error is raised at the end. After an exception it becomes a warning, so that it
        does not hide the exception.
        """
        try:
            self._finish("on_close")
        finally:
            self._begun.clear()
            self._failed = False

    def _begin_all(self) -> None:
        if not self._begun:  # `evaluate` or `predict` outside `fit`
            self._begun = list(self._called)

    def _finish(self, hook: str, *arguments: Any) -> None:
        errors: list[tuple[Callback, BaseException]] = []
        for callback in self._begun:
            try:
                with self.world.failing() if self._failed else nullcontext():
                    self._listener(callback, hook)(*arguments)
            # Even Ctrl-C must not keep the other callbacks from closing their files.
            except BaseException as error:
                errors.append((callback, error))
        if errors and not self._failed:
            raise errors[0][1]
        for callback, failure in errors:
            warn_user(f"{type(callback).__name__}.{hook} failed with {failure!r}.", RuntimeWarning)


def as_list(callbacks: Callback | Iterable[Callback] | None) -> list[Callback]:
    """Return one callback, several or None as a list, in their order."""
    return [callbacks] if isinstance(callbacks, Callback) else list(callbacks or ())


def _fix_for(value: Any) -> str:
    """Return how to make a callback of an object that is none; "" for an object without hooks."""
    if isinstance(value, type):
        return f" Create an object: {value.__name__}(...)."
    if not any(callable(getattr(value, hook, None)) for hook in HOOKS):
        return ""
    return (
        " Derive its class from onnxfit.callbacks.Callback: the hooks are the same as in Keras."
        " Keras's own callbacks are in onnxfit.callbacks under the same names."
    )


def _check_callbacks(callbacks: list[Any], backend: str) -> None:
    """Raise SettingError for callbacks that cannot run; warn about methods never called."""
    keys: set[str] = set()
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise SettingError(
                "callbacks must be instances of onnxfit.callbacks.Callback, got"
                f" {callback!r}.{_fix_for(callback)}"
            )
        name = type(callback).__name__
        require_choice(f"{name}.ranks must be", callback.ranks, ("all", "first", None))
        if callback.phase not in PHASES:
            raise SettingError(
                f"{name}.phase must be one of {', '.join(PHASES)}, got {callback.phase!r}."
            )
        check_hooks(callback, HOOKS)
        if callback.state_key in keys:
            raise SettingError(
                f"Two callbacks have the same state_key {callback.state_key!r}, so a checkpoint"
                " could not tell them apart. Remove one, or override state_key in each."
            )
        keys.add(callback.state_key)
        if callback.overrides("on_gradients") and not get_backend(backend).shows_gradients:
            raise SettingError(
                f"{name} overrides on_gradients, but backend={backend!r} never calls it, because"
                " its gradients exist only inside the step. Use Trainer(...,"
                " backend='forward_backward')."
            )
