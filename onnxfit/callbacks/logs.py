"""The logs that hooks receive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn, SupportsFloat, Union

from onnxfit.checks import shortened
from onnxfit.errors import SettingError, UnsupportedError

__all__ = ["Logs"]

LogValue = Union[SupportsFloat, Callable[[], SupportsFloat]]


class Logs(Mapping[str, float]):
    """Read-only mapping of names to Python floats: the loss and metrics of one event.

    - `values`: name -> number, or a function without arguments that is called when the name is
      first read. A metric that nobody reads therefore costs nothing. A dict is used without a copy,
      because a copy in every batch would cost as much as an operator; other mappings are copied.

    `dict(logs)` is a copy to keep, and `trainer.log(name, value)` adds a value. After the hooks of
    a batch, values that were not read are lost, because the next batch changes them: reading one
    then raises SettingError.

    >>> logs = Logs({"loss": 0.5, "auc": lambda: 0.75})
    >>> logs["auc"], dict(logs)
    (0.75, {'loss': 0.5, 'auc': 0.75})
    >>> logs["auc"] = 1.0  # doctest: +NORMALIZE_WHITESPACE
    Traceback (most recent call last):
        ...
    onnxfit.errors.UnsupportedError: logs are read-only. Use trainer.log('auc', value), or change
    a copy: dict(logs).
    """

    __slots__ = ("_ended", "_values")

    def __init__(self, values: Mapping[str, LogValue] | None = None) -> None:
        self._values: dict[str, LogValue] = values if type(values) is dict else dict(values or ())
        self._ended = False

    def __getitem__(self, name: str) -> float:
        value = self._values[name]
        if type(value) is not float:
            if self._ended and callable(value):
                raise SettingError(
                    f"logs[{name!r}] cannot be read after its hook has returned. Store a copy"
                    " instead: dict(logs)."
                )
            value = self._values[name] = float(value() if callable(value) else value)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: object) -> bool:
        # The method of Mapping would compute the value.
        return name in self._values

    def __repr__(self) -> str:
        return f"Logs({dict(self)})"

    def __setitem__(self, name: str, value: object) -> NoReturn:
        raise UnsupportedError(
            f"logs are read-only. Use trainer.log({name!r}, value), or change a copy: dict(logs)."
        )

    def __delitem__(self, name: str) -> NoReturn:
        raise UnsupportedError("logs are read-only. Change a copy instead: dict(logs).")

    def add(self, name: str, value: SupportsFloat) -> None:
        """Add the `value` of a `name`, or replace it; for `trainer.log`.

        SettingError: the name is not a string, or the value is not a number.
        """
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = None
        if number is None or not isinstance(name, str) or isinstance(value, (str, bytes)):
            raise SettingError(
                f"trainer.log needs a name and a number, got {shortened(name)} and"
                f" {shortened(value)}."
            )
        self._values[name] = number

    def replace(self, values: Mapping[str, float]) -> None:
        """Take over the values of rank 0 when several processes train together.

        - `values`: name -> number, the values of rank 0.
        """
        self._values = {**values}

    def end(self) -> None:
        """End the hook: values that have not been read can no longer be read."""
        self._ended = True
