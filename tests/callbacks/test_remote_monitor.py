"""RemoteMonitor, against a server on the loopback."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from onnxfit.callbacks import (
    LambdaCallback,
    RemoteMonitor,
)
from onnxfit.errors import SettingError
from tests.callbacks.helpers import fit


class Server:
    """A server on the loopback that keeps what is posted, and answers with the statuses of a list."""

    def __init__(self, *statuses):
        posted = self.posted = []
        statuses = list(statuses)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                posted.append((self.path, dict(self.headers), json.loads(body)))
                self.send_response(statuses.pop(0) if statuses else 200)
                self.end_headers()

            def log_message(self, *arguments):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/logs"

    def __enter__(self):
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")


@pytest.mark.usefixtures("no_proxy")
def test_figures_are_posted_and_nan_too():
    nan = LambdaCallback(on_epoch_end=lambda epoch, logs: nan.trainer.log("odd", float("nan")))
    with Server() as server:
        on = fit(RemoteMonitor(server.url, headers={"X-Key": "secret"}), nan, epochs=2)
    assert [path for path, *_ in server.posted] == ["/logs"] * 2
    assert all(
        headers["Content-Type"] == "application/json" and headers["X-Key"] == "secret"
        for _, headers, _ in server.posted
    )
    bodies = [body for *_, body in server.posted]
    assert [body["epoch"] for body in bodies] == [0, 1]
    assert [body["loss"] for body in bodies] == on.history.history["loss"]
    assert bodies[0]["odd"] == "NaN"


@pytest.mark.usefixtures("no_proxy")
def test_a_server_that_refuses_or_is_away_costs_one_warning_and_no_epoch():
    with (
        Server(500, 200, 404) as server,
        pytest.warns(RuntimeWarning, match=r"could not reach .*500") as warned,
    ):
        assert fit(RemoteMonitor(server.url), epochs=3).epoch == 3
    assert (len(warned), len(server.posted)) == (1, 3)
    monitor = RemoteMonitor(server.url, timeout=1)  # nobody listens any more
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="Training goes on") as warned:
            assert fit(monitor, epochs=2).epoch == 2
        assert len(warned) == 1
    for settings in ({"url": "ftp://a/"}, {"url": "http:"}, {"url": "http://a", "timeout": 0}):
        with pytest.raises(SettingError, match="RemoteMonitor needs"):
            RemoteMonitor(**settings)
