"""Send every epoch's figures to a server."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import ClassVar
from urllib.parse import urlsplit

from onnxfit.callbacks.callback import Callback
from onnxfit.callbacks.csv_logger import _json
from onnxfit.callbacks.logs import Logs
from onnxfit.errors import SettingError

__all__ = ["RemoteMonitor"]


class RemoteMonitor(Callback):
    """Posts `{"epoch": 0, "loss": 0.5, ...}` as JSON to `url` at the end of every epoch;

    NaN and infinities as JSONLLogger writes them.

    - `headers`: sent with every request, such as `{"Authorization": "Bearer ..."}`. They are not
      saved.
    - `timeout` > 0 seconds: how long training waits for the server at most.

    A server that is not there, or refuses, never stops training: there is one warning a fit, and
    the next epoch is sent all the same. SettingError: an address that is not http or https, a
    timeout out of its range.

    >>> RemoteMonitor("file:///etc/passwd")
    Traceback (most recent call last):
        ...
    onnxfit.errors.SettingError: RemoteMonitor needs an address that begins with http:// or https://, got 'file:///etc/passwd'.
    """

    phase: ClassVar[str] = "logger"

    def __init__(
        self, url: str, headers: Mapping[str, str] | None = None, timeout: float = 5.0
    ) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise SettingError(
                f"RemoteMonitor needs an address that begins with http:// or https://, got {url!r}."
            )
        if not timeout > 0:
            raise SettingError(f"RemoteMonitor needs timeout > 0, got {timeout}.")
        self.url = url
        self.headers = dict(headers or {})
        self.timeout = timeout
        self._warned = False

    @property
    def state_key(self) -> str:
        return f"RemoteMonitor({self.url})"

    def on_train_begin(self, logs: Logs) -> None:
        self._warned = False

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        import urllib.request  # 4 MB that a training on a device can do without
        from http.client import HTTPException

        data = json.dumps(
            {"epoch": epoch, **{name: _json(value) for name, value in logs.items()}}
        ).encode()
        request = urllib.request.Request(
            self.url, data, {"Content-Type": "application/json", **self.headers}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout):
                pass
        except (OSError, HTTPException) as error:  # URLError and time-outs are OSErrors
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"RemoteMonitor could not reach {self.url}: {error}. Training goes on.",
                    RuntimeWarning,
                    stacklevel=2,
                )
