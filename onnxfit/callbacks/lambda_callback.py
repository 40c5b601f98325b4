"""Make a callback out of functions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from onnxfit.callbacks.callback import HOOKS, Callback
from onnxfit.callbacks.hooks import OLDER_NAMES
from onnxfit.checks import check_arguments
from onnxfit.errors import UnknownNameError

__all__ = ["LambdaCallback"]

_number = itertools.count()


class LambdaCallback(Callback):
    """Call functions as hooks.

    - `hooks`: keyword arguments, name of a hook -> a function that takes the hook's arguments; None
      for no function.

    UnknownNameError: a name is not a hook.

    >>> losses = []
    >>> show = LambdaCallback(on_epoch_end=lambda epoch, logs: losses.append(logs["loss"]))
    """

    @check_arguments
    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        for name, function in hooks.items():
            if name not in HOOKS and name not in OLDER_NAMES.values():
                raise UnknownNameError("hook", name, HOOKS)
            if function is not None:
                setattr(self, name, function)
        # Functions have no state, so any unique key will do.
        self._number = next(_number)

    @property
    def state_key(self) -> str:
        return f"LambdaCallback({self._number})"
