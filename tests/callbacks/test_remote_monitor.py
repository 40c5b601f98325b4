"""RemoteMonitor, against a server on the loopback."""

import itertools
import json
import socket
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
        requests = self.requests = []
        self.answers = [(status, {}) for status in statuses]
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                posted.append((self.path, dict(self.headers), body.decode()))
                self.answer()

            def do_GET(self):
                self.answer()

            def answer(self):
                requests.append((self.command, self.path))
                status, headers = server.answers.pop(0) if server.answers else (200, {})
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
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
        pytest.warns(RuntimeWarning, match=r"cannot reach .*500") as warned,
    ):
        assert fit(RemoteMonitor(server.root), epochs=3).epoch == 3
    assert (len(warned), len(server.posted)) == (1, 3)
    monitor = RemoteMonitor(server.root, timeout=1)  # nobody listens any more
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="Training continues") as warned:
            assert fit(monitor, epochs=2).epoch == 2
        assert len(warned) == 1
    for settings in ({"root": "ftp://a/"}, {"root": "http:"}, {"timeout": 0}):
        with pytest.raises(SettingError, match="RemoteMonitor needs"):
            RemoteMonitor(**settings)


class RawServer:
    """A server that answers every connection with bytes, each after a pause, and never closes."""

    def __init__(self, chunks, pause=0.0):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.root = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.chunks = chunks
        self.pause = pause
        self.ended = threading.Event()
        self.hung_up = threading.Event()
        self.thread = threading.Thread(target=self.serve)

    def serve(self):
        connection, _ = self.listener.accept()
        with connection:
            if not connection.recv(65536):  # the client hung up before it sent anything
                self.hung_up.set()
                return
            for chunk in self.chunks:
                try:
                    connection.sendall(chunk)
                except OSError:
                    self.hung_up.set()
                    return
                if self.ended.wait(self.pause):
                    return

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.ended.set()
        self.thread.join()
        self.listener.close()


@pytest.mark.usefixtures("no_proxy")
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("same_host", [True, False])
def test_a_redirect_is_not_followed(status, same_host):
    """Another host would get the headers, and a POST would become a GET without figures."""
    with Server() as other, Server() as server:
        target = f"{server.root if same_host else other.root}/elsewhere"
        server.answers = [(status, {"Location": target})]
        headers = {"Authorization": "Bearer secret", "X-Key": "secret"}
        with pytest.warns(RuntimeWarning, match=f"{status}.*elsewhere.*does not follow") as warned:
            fit(RemoteMonitor(server.root, headers=headers), epochs=1)
    assert len(warned) == 1
    assert other.posted == []
    assert [(method, path) for method, path in server.requests] == [("POST", "/publish/epoch/end/")]
    assert other.requests == []


@pytest.mark.usefixtures("no_proxy")
@pytest.mark.parametrize("location", [None, "", "file:///etc/passwd", "ftp://a/", "//other/"])
def test_redirects_to_nowhere_are_a_warning_too(location):
    with Server() as server:
        server.answers = [(302, {} if location is None else {"Location": location})]
        with pytest.warns(RuntimeWarning, match="302"):
            fit(RemoteMonitor(server.root), epochs=1)


@pytest.mark.usefixtures("no_proxy")
@pytest.mark.parametrize(
    "beginning", [b"", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 100 Continue\r\n"]
)
def test_a_server_that_drips_is_left_when_the_time_is_over(beginning):
    """Each byte comes in time, and the answer never ends: only a limit of the whole ends it."""
    chunks = itertools.chain([beginning], itertools.repeat(b"x"))
    with RawServer(chunks, pause=0.01) as server:
        with pytest.warns(RuntimeWarning, match=r"no answer within 0\.2 seconds"):
            on = fit(RemoteMonitor(server.root, timeout=0.2), epochs=1)
        assert on.epoch == 1
        assert server.hung_up.wait(30)  # the connection is closed, too


@pytest.mark.usefixtures("no_proxy")
def test_no_thread_is_left_behind():
    with Server() as server:
        threads = set(threading.enumerate())
        fit(RemoteMonitor(server.root), epochs=2)
        assert set(threading.enumerate()) == threads


@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), -1.0])
def test_timeouts_that_never_end(timeout):
    with pytest.raises(SettingError, match="timeout"):
        RemoteMonitor("http://a/", timeout=timeout)


@pytest.mark.parametrize(
    "headers", [{"A": "b\r\nHost: evil"}, {"A\n": "b"}, {"A:": "b"}, {"": "b"}, {"A": "\u20ac"}]
)
def test_headers_that_http_cannot_send(headers):
    with pytest.raises(SettingError, match="cannot send the header"):
        RemoteMonitor("http://a/", headers=headers)
