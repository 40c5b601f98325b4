"""RemoteMonitor, against a server on the loopback."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qsl

import pytest

from onnxfit.callbacks import LambdaCallback, RemoteMonitor
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
                posted.append((self.path, dict(self.headers), body.decode()))
                self.send_response(statuses.pop(0) if statuses else 200)
                self.end_headers()

            def log_message(self, *arguments):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.root = f"http://127.0.0.1:{self.server.server_port}"

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
        on = fit(
            RemoteMonitor(
                server.root, path="/logs", headers={"X-Key": "secret"}, send_as_json=True
            ),
            nan,
            epochs=2,
        )
    assert [path for path, *_ in server.posted] == ["/logs"] * 2
    assert all(
        headers["Content-Type"] == "application/json" and headers["X-Key"] == "secret"
        for _, headers, _ in server.posted
    )
    bodies = [json.loads(body) for *_, body in server.posted]
    assert [body["epoch"] for body in bodies] == [0, 1]
    assert [body["loss"] for body in bodies] == on.history.history["loss"]
    assert bodies[0]["odd"] == "NaN"


@pytest.mark.usefixtures("no_proxy")
def test_figures_are_posted_within_a_form_as_keras_posts_them():
    with Server() as server:
        fit(RemoteMonitor(server.root), epochs=1)
        fit(RemoteMonitor(server.root, path="/other", field="figures"), epochs=1)
    (path, headers, body), (other_path, _, other_body) = server.posted
    assert (path, other_path) == ("/publish/epoch/end/", "/other")
    assert headers["Content-Type"] == "application/x-www-form-urlencoded"
    for field, text in (("data", body), ("figures", other_body)):
        ((name, value),) = parse_qsl(text)
        assert name == field
        assert set(json.loads(value)) == {"epoch", "loss", "learning_rate"}
        assert json.loads(value)["epoch"] == 0


@pytest.mark.usefixtures("no_proxy")
def test_a_server_that_refuses_or_is_away_costs_one_warning_and_no_epoch():
    with (
        Server(500, 200, 404) as server,
        pytest.warns(RuntimeWarning, match=r"could not reach .*500") as warned,
    ):
        assert fit(RemoteMonitor(server.root), epochs=3).epoch == 3
    assert (len(warned), len(server.posted)) == (1, 3)
    monitor = RemoteMonitor(server.root, timeout=1)  # nobody listens any more
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="Training goes on") as warned:
            assert fit(monitor, epochs=2).epoch == 2
        assert len(warned) == 1
    for settings in ({"root": "ftp://a/"}, {"root": "http:"}, {"timeout": 0}):
        with pytest.raises(SettingError, match="RemoteMonitor needs"):
            RemoteMonitor(**settings)
