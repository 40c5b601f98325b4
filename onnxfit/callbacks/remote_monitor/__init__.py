"""Send the metrics of every epoch to a server."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import ClassVar
from urllib.parse import urlencode, urlsplit

from onnxfit.callbacks.callback import Callback
from onnxfit.callbacks.logs import Logs
from onnxfit.callbacks.write_guard import WriteGuard
from onnxfit.errors import SettingError
from onnxfit.files import json_float
from onnxfit.registry import check_arguments

__all__ = ["RemoteMonitor"]

MAX_TIMEOUT_SECONDS = 86_400


class RemoteMonitor(Callback):
    """Post the metrics of every epoch to a server as JSON.

    - `root`: the server's address, which begins with http:// or https://.
    - `path`: the path that is added to `root`.
    - `field`: the field of the form that holds the JSON object `{"epoch": 0, "loss": 0.5, ...}`;
      unused with `send_as_json`. Epochs count from 0, and NaN and infinities are strings, as in
      JSONLLogger.
    - `headers`: HTTP headers of every request, such as `{"Authorization": "Bearer ..."}`. They are
      not saved in checkpoints, and no other host gets them, since redirects are not followed.
    - `send_as_json`: send the JSON object as the body of the request, instead of within a form.
    - `timeout`: the longest time that training waits for the server, in seconds: more than 0, and
      at most a day.

    A server that is down, refuses or redirects never stops training: there is one warning per fit,
    and the next epoch is sent all the same. SettingError: the address has another scheme, HTTP
    cannot send a header, or the timeout is out of its range.

    >>> monitor = RemoteMonitor("https://example.org", path="/runs/7", send_as_json=True)
    >>> RemoteMonitor("file:///etc")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    onnxfit.errors.SettingError: RemoteMonitor needs an address that begins with http:// or ...
    """

    phase: ClassVar[str] = "logger"

    @check_arguments
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
        if not 0 < timeout <= MAX_TIMEOUT_SECONDS:
            raise SettingError(
                f"RemoteMonitor needs 0 < timeout <= {MAX_TIMEOUT_SECONDS} seconds, got {timeout}."
            )
        for name, value in (headers or {}).items():
            if not (re.fullmatch(r"[!-9;-~]+", name) and re.fullmatch(r"[\t -~\xa0-\xff]*", value)):
                # The message leaves the value out, because it may be a password.
                raise SettingError(
                    f"RemoteMonitor cannot send the header {name!r}: its name or value has a"
                    " character that HTTP does not allow."
                )
        self.root = root
        self.path = path
        self.field = field
        self.headers = dict(headers or {})
        self.send_as_json = send_as_json
        self.timeout = timeout
        self._guard = WriteGuard("RemoteMonitor", self.url, (OSError,), verb="reach")

    @property
    def url(self) -> str:
        """Address to which every epoch is posted: `root` followed by `path`."""
        return self.root + self.path

    @property
    def state_key(self) -> str:
        return f"RemoteMonitor({self.url})"

    def on_train_begin(self, logs: Logs) -> None:
        self._guard.reset()

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        # Imported late: the module takes 4 MB, which matters on small devices.
        from onnxfit.callbacks.remote_monitor.request import post

        text = json.dumps(
            {"epoch": epoch, **{name: json_float(value) for name, value in logs.items()}}
        )
        content_type = "application/json"
        if not self.send_as_json:
            text = urlencode({self.field: text})
            content_type = "application/x-www-form-urlencoded"
        headers = {"Content-Type": content_type, **self.headers}
        with self._guard:
            post(self.url, text.encode(), headers, self.timeout)
