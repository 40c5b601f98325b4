"""Send the metrics of every epoch to a server."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import ClassVar
from urllib.parse import urlencode, urlsplit

from onnxfit.callbacks.callback import Callback
from onnxfit.callbacks.logs import Logs
from onnxfit.errors import SettingError
from onnxfit.files import json_float

__all__ = ["RemoteMonitor"]


class RemoteMonitor(Callback):
    """Post the metrics of every epoch to a server as JSON.

    - `root`: the server's address, which begins with http:// or https://.
    - `path`: the path that is added to `root`.
    - `field`: the field of the form that holds the JSON object `{"epoch": 0, "loss": 0.5, ...}`;
      unused with `send_as_json`. Epochs count from 0, and NaN and infinities are strings, as in
      JSONLLogger.
    - `headers`: HTTP headers of every request, such as `{"Authorization": "Bearer ..."}`. They are
      not saved in checkpoints.
    - `send_as_json`: send the JSON object as the body of the request, instead of within a form.
    - `timeout` > 0 seconds: training waits no longer than this for the server.

    A server that is down or refuses never stops training: there is one warning per fit, and the
    next epoch is sent all the same. SettingError: an address of another kind, or a timeout out of
    its range.

    >>> monitor = RemoteMonitor("https://example.org", path="/runs/7", send_as_json=True)
    >>> RemoteMonitor("file:///etc")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    onnxfit.errors.SettingError: RemoteMonitor needs an address that begins with http:// or ...
    """

    phase: ClassVar[str] = "logger"

    def __init__(
        self,
        root: str = "http://localhost:9000",
        *,
        path: str = "/publish/epoch/end/",
        field: str = "data",
        headers: Mapping[str, str] | None = None,
        send_as_json: bool = False,
        timeout: float = 5.0,
    ) -> None:
        if urlsplit(root).scheme not in ("http", "https") or not urlsplit(root).netloc:
            raise SettingError(
                "RemoteMonitor needs an address that begins with http:// or https://, got"
                f" {root!r}."
            )
        if not timeout > 0:
            raise SettingError(f"RemoteMonitor needs timeout > 0, got {timeout}.")
        self.root = root
        self.path = path
        self.field = field
        self.headers = dict(headers or {})
        self.send_as_json = send_as_json
        self.timeout = timeout
        self._warned = False

    @property
    def url(self) -> str:
        """Address to which every epoch is posted: `root` and `path`."""
        return self.root + self.path

    @property
    def state_key(self) -> str:
        return f"RemoteMonitor({self.url})"

    def on_train_begin(self, logs: Logs) -> None:
        self._warned = False

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        # Imported late: it takes 4 MB that a training on a small device can do without.
        import urllib.request
        from http.client import HTTPException

        text = json.dumps(
            {"epoch": epoch, **{name: json_float(value) for name, value in logs.items()}}
        )
        content_type = "application/json"
        if not self.send_as_json:
            text = urlencode({self.field: text})
            content_type = "application/x-www-form-urlencoded"
        headers = {"Content-Type": content_type, **self.headers}
        request = urllib.request.Request(self.url, text.encode(), headers, method="POST")
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
