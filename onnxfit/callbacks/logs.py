"""What hooks are told: a read-only mapping of Python floats, each computed when it is first read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn, SupportsFloat, Union

from onnxfit.errors import SettingError

__all__ = ["Logs"]

LogValue = Union[SupportsFloat, Callable[[], SupportsFloat]]


class Logs(Mapping[str, float]):
    """The figures of one event, name -> Python float.

    `values` holds numbers, or functions without arguments that are called at the first reading of
    their name: a metric that nobody reads costs nothing. A dict becomes part of the logs, since a
    copy in every batch costs as much as an operator; any other mapping is copied. `dict(logs)` is a
    copy of one's own; callbacks add a figure with `trainer.log(name, value)`. After a batch's hooks
    what was not read is gone, since the next batch changes it: reading it then is a SettingError.

    >>> logs = Logs({"loss": 0.5, "auc": lambda: 0.75})
    >>> logs["auc"], dict(logs)
    (0.75, {'loss': 0.5, 'auc': 0.75})
    >>> logs["auc"] = 1.0
    Traceback (most recent call last):
        ...
    TypeError: logs are read-only: use trainer.log('auc', value), or change a copy, dict(logs).
    """

    __slots__ = ("_over", "_values")

    def __init__(self, values: Mapping[str, LogValue] | None = None) -> None:
        self._values: dict[str, LogValue] = values if type(values) is dict else dict(values or ())
        self._over = False

    def __getitem__(self, name: str) -> float:
        value = self._values[name]
        if type(value) is not float:
            if self._over and callable(value):
                raise SettingError(
                    f"logs[{name!r}] was not read while its hook ran: keep a copy, dict(logs),"
                    " rather than the logs."
                )
            value = self._values[name] = float(value() if callable(value) else value)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: object) -> bool:  # Mapping's own would compute the value
        return name in self._values

    def __repr__(self) -> str:
        return f"Logs({dict(self)})"

    def __setitem__(self, name: str, value: object) -> NoReturn:
        raise TypeError(
            f"logs are read-only: use trainer.log({name!r}, value), or change a copy, dict(logs)."
        )

    def __delitem__(self, name: str) -> NoReturn:
        raise TypeError("logs are read-only: change a copy, dict(logs).")

    def add(self, name: str, value: SupportsFloat) -> None:
        """Add or replace a figure; for `trainer.log`."""
        self._values[name] = float(value)

    def end(self) -> None:
        """The hook has run: from now on what was not read cannot be."""
        self._over = True
