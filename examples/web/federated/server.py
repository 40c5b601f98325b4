"""Average the weights of three pages, on loopback: python server.py FOLDER [PORT]."""

import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from safetensors import SafetensorError
from safetensors.numpy import load, save

import onnxfit

PAGES, MAX_ROWS, MAX_WEIGHT, MAX_BYTES = 3, 10_000, 1e4, 1 << 20


class Server(ThreadingHTTPServer):
    """Holds the mean of the pages' weights: version n is that of n rounds."""

    def __init__(self, folder, port=0):
        super().__init__(("127.0.0.1", port), partial(Handler, directory=folder))
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.trainer, self.file = onnxfit.Trainer.load(f"{folder}/training"), f"{folder}/mean.onnx"
        self.version, self.received, self.lock = 0, {}, threading.Lock()

    def add(self, version, page, rows, data):
        """Take the weights of a page. The last page of a round makes the next version."""
        own, given = self.trainer.get_weights(), load(data)
        for name in own.keys() | given.keys():  # a name that one of them lacks is a KeyError
            forms = {(a.dtype, a.shape) for a in (own[name], given[name])}
            if len(forms) > 1 or not (abs(given[name]) < MAX_WEIGHT).all():
                raise ValueError(f"{name!r} has another type, another shape, or huge numbers")
        if version != self.version or not (0 <= page < PAGES and 0 < rows <= MAX_ROWS):
            raise ValueError(f"expected version {self.version}, a page, and its rows")
        self.received[page] = rows, given
        if len(self.received) == PAGES:
            total = sum(rows for rows, _ in self.received.values())
            sums = {name: sum(n * w[name] for n, w in self.received.values()) for name in own}
            self.trainer.set_weights({name: array / total for name, array in sums.items()})
            self.trainer.export(self.file)
            self.version, self.received = version + 1, {}


class Handler(SimpleHTTPRequestHandler):
    """GET /weights gives the mean, POST /weights takes those of a page; the rest are files."""

    def do_GET(self):
        if urlsplit(self.path).path != "/weights":
            return super().do_GET()
        with self.server.lock:
            return self.answer(200, save(self.server.trainer.get_weights()))

    def do_POST(self):
        try:
            size, query = int(self.headers["content-length"]), parse_qs(urlsplit(self.path).query)
            if self.headers["origin"] != self.server.url or not 0 <= size <= MAX_BYTES:
                raise ValueError(f"expected at most {MAX_BYTES} bytes from a page of this server")
            data = self.rfile.read(size)
            with self.server.lock:
                self.server.add(*(int(query[n][0]) for n in ("version", "page", "rows")), data)
            self.answer(200)
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            self.answer(400, repr(error).encode())

    def answer(self, status, body=b""):
        self.send_response(status)
        self.send_header("version", str(self.server.version))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    server = Server(sys.argv[1], int((sys.argv[2:] or [8001])[0]))
    print(f"Open {server.url}/?page=0, 1 and 2", flush=True)
    server.serve_forever()
