"""Check the hooks of a callback before training begins."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from onnxfit.errors import SettingError, nearest_name, warn_user

if TYPE_CHECKING:
    from onnxfit.callbacks.callback import Callback
    from onnxfit.trainer import Trainer

__all__: list[str] = []  # no class of the public package

# Keras's older names. The base class calls these methods if a callback has them.
OLDER_NAMES = {
    "on_train_batch_begin": "on_batch_begin",
    "on_train_batch_end": "on_batch_end",
}
# Parts of the names of hooks in PyTorch Lightning -> parts of ours, one after another
LIGHTNING = (
    ("_start", "_begin"),
    ("on_validation", "on_test"),
    ("on_fit", "on_train"),
    ("on_train_epoch", "on_epoch"),
    ("on_test_epoch", "on_test"),
    ("on_predict_epoch", "on_predict"),
)
TYPING_ERROR = 0.85  # minimum similarity, from 0 to 1, of a misspelt hook to the real one


class KerasModelAlias:
    """Descriptor that returns a callback's trainer, unless the callback sets the attribute."""

    @overload
    def __get__(self, callback: None, owner: type) -> KerasModelAlias: ...

    @overload
    def __get__(self, callback: Callback, owner: type) -> Trainer: ...

    def __get__(self, callback: Callback | None, owner: type) -> Trainer | KerasModelAlias:
        return self if callback is None else callback.trainer


def older_hook(callback: Callback, hook: str) -> Callable[[int, Any], None] | None:
    """Return a callback's method under Keras's older name of a hook, or None."""
    method: Callable[[int, Any], None] | None = getattr(callback, OLDER_NAMES.get(hook, ""), None)
    return method


def check_hooks(callback: Callback, hooks: Mapping[str, Sequence[str]]) -> None:
    """Raise SettingError for a misspelt hook, and for one that does not take its arguments.

    - `callback`: the callback.
    - `hooks`: hook -> names of its arguments.

    A method `on_...` that resembles no hook only causes a warning.
    """
    name = type(callback).__name__
    known = {*hooks, *OLDER_NAMES.values()}
    for method in sorted({method for method in dir(callback) if method.startswith("on_")} - known):
        ours = _hook_of_lightning(method)
        meant = ours if ours in hooks else nearest_name(method, hooks, TYPING_ERROR)
        if meant is not None:
            raise SettingError(
                f"{name}.{method} is not a hook and would never be called. Did you mean {meant}?"
                " Rename the method. If you call it yourself, give it a name without 'on_'."
            )
        near = nearest_name(method, hooks, 0)
        warn_user(f"{name}.{method} is not a hook and is never called. Did you mean {near}?")
    for hook, arguments in hooks.items():
        method_name = OLDER_NAMES[hook] if older_hook(callback, hook) else hook
        if callback.overrides(hook):
            _check_arguments(callback, method_name, arguments)


def _check_arguments(callback: Callback, method: str, arguments: Sequence[str]) -> None:
    try:
        signature = inspect.signature(getattr(callback, method))
    except (TypeError, ValueError):  # a built-in without a signature
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        listed = ", ".join(arguments)
        raise SettingError(
            f"{type(callback).__name__}.{method} takes {signature}, but is called with ({listed})."
            f" Define it as def {method}(self, {listed})."
        ) from None


def _hook_of_lightning(method: str) -> str:
    """Return our name of a hook of PyTorch Lightning."""
    for theirs, ours in LIGHTNING:
        method = method.replace(theirs, ours)
    return method
