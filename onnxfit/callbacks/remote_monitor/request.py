"""A POST request with a limit on its total time, which is never sent to another host."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse
from threading import Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
)

__all__ = ["post"]


def post(url: str, body: bytes, headers: Mapping[str, str], timeout: float) -> None:
    """Post a body to a server, and wait until the server has accepted it.

    - `url`: the address.
    - `body`: the bytes to post.
    - `headers`: HTTP headers. They are sent to no other host, because redirects are not followed.
    - `timeout`: seconds for the whole request: name lookup, connecting, sending, and the answer.

    OSError: the server is down, refuses, redirects, takes longer, or does not speak HTTP.
    """
    attempt = _Attempt(Request(url, body, dict(headers), method="POST"), timeout)
    attempt.start()
    attempt.join(timeout)
    if attempt.is_alive():
        attempt.hang_up()
        raise TimeoutError(f"no answer within {timeout:g} seconds")
    error = attempt.error
    if isinstance(error, HTTPError):
        error.close()
        if 300 <= error.code < 400:
            raise OSError(
                f"{error}: the server redirects to {error.headers.get('Location')!r}, but"
                " RemoteMonitor does not follow redirects. If you trust that address, pass it as"
                " root"
            )
    if isinstance(error, HTTPException):
        raise OSError(f"{type(error).__name__}: {error}") from error
    if error is not None:
        raise error


class _Attempt(Thread):
    """Thread that sends one request.

    A socket's timeout limits each wait, not the sum of all waits. A server that answers byte by
    byte could therefore keep the thread forever. `hang_up` ends the connection from outside.
    """

    def __init__(self, request: Request, timeout: float) -> None:
        super().__init__(name="onnxfit-post", daemon=True)
        self.request = request
        self.timeout = timeout
        self.connections: list[HTTPConnection] = []
        self.is_over = False
        self.error: BaseException | None = None

    def run(self) -> None:
        opener = OpenerDirector()
        # These handlers do not follow redirects.
        for handler in (
            ProxyHandler(),
            _Handler(self),
            _SecureHandler(self),
            HTTPDefaultErrorHandler(),
            HTTPErrorProcessor(),
        ):
            opener.add_handler(handler)
        try:
            with opener.open(self.request, timeout=self.timeout):
                pass
        except BaseException as error:
            self.error = error

    def hang_up(self) -> None:
        """End the connection, even a connection opened later, so that the thread ends."""
        self.is_over = True
        for connection in self.connections:
            try:
                if connection.sock is not None:
                    connection.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the connection has ended by itself


class _Remembering:
    """Mixin for urllib handlers that reports opened connections to their `_Attempt`."""

    def __init__(self, attempt: _Attempt) -> None:
        super().__init__()
        self.attempt = attempt

    def do_open(self, http_class: Any, req: Request, **http_conn_args: Any) -> HTTPResponse:
        def connect(host: str, **more: Any) -> HTTPConnection:
            connection: HTTPConnection = http_class(host, **more)
            self.attempt.connections.append(connection)
            open_socket = connection.connect

            def connect_in_time() -> None:
                open_socket()
                if self.attempt.is_over:
                    connection.close()
                    raise TimeoutError("the connection was opened after the timeout")

            connection.connect = connect_in_time  # type: ignore[method-assign]
            return connection

        response: HTTPResponse = super().do_open(connect, req, **http_conn_args)  # type: ignore[misc]
        return response


class _Handler(_Remembering, HTTPHandler):
    """Handler of http://."""


class _SecureHandler(_Remembering, HTTPSHandler):
    """Handler of https://."""
