"""The server of examples/web/federated averages weights, and refuses everything else."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

import onnxfit
from onnxfit import Trainer
from tests.models import mlp

SERVER = Path(__file__).parents[1] / "examples/web/federated/server.py"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    Trainer(mlp(), loss="mse").export_training(tmp_path / "training", target="web")
    spec = importlib.util.spec_from_file_location("federated_server", SERVER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.Handler.log_message = lambda *_: None
    server = module.Server(str(tmp_path))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def ask(server: Any, method: str, path: str, body: bytes = b"", **headers: str) -> Any:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    given = {"origin": server.url, **headers} if method == "POST" else headers
    connection.request(method, path, body, given)
    response = connection.getresponse()
    data = response.read()
    connection.close()
    return response.status, int(response.headers["version"] or -1), data


def post(server: Any, data: bytes, version: Any = 0, page: Any = 0, rows: Any = 1) -> Any:
    return ask(server, "POST", f"/weights?version={version}&page={page}&rows={rows}", data)


def weights(value: float) -> dict[str, np.ndarray]:
    own = Trainer(mlp(), loss="mse").get_weights()
    return {name: np.full_like(array, value) for name, array in own.items()}


def test_the_mean_counts_each_row_once(server: Any, tmp_path: Path) -> None:
    for page, (value, rows) in enumerate([(1, 1), (2, 1), (5, 2)]):
        assert post(server, save(weights(value)), page=page, rows=rows)[0] == 200
    status, version, data = ask(server, "GET", "/weights")
    assert (status, version) == (200, 1)
    for name, array in load(data).items():
        np.testing.assert_array_equal(array, weights(3.25)[name])
    exported = Trainer(str(tmp_path / "mean.onnx"), loss="mse").get_weights()
    np.testing.assert_equal(exported, weights(3.25))
    assert post(server, save(weights(1)), version=0)[0] == 400
    assert post(server, save(weights(1)), version=1)[0] == 200


def test_a_page_that_sends_twice_counts_once(server: Any) -> None:
    for value in (7, 1):
        assert post(server, save(weights(value)), page=0)[:2] == (200, 0)
    for page in (1, 2):
        post(server, save(weights(1)), page=page)
    _, version, data = ask(server, "GET", "/weights")
    assert version == 1
    assert all((array == 1).all() for array in load(data).values())


def changed(name: str, array: Any) -> bytes:
    return save({**weights(1), name: np.asarray(array)})


HOSTILE: dict[str, Any] = {
    "no bytes": lambda: b"",
    "noise": lambda: bytes(range(256)),
    "a pickle": lambda: b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    "a header of 2 GB": lambda: (1 << 31).to_bytes(8, "little") + b"{}",
    "another tensor": lambda: changed("more", [1.0]),
    "a missing tensor": lambda: save({"fc0.weight": weights(1)["fc0.weight"]}),
    "another shape": lambda: changed("fc0.bias", np.ones(1, np.float32)),
    "another type": lambda: changed("fc0.bias", weights(1)["fc0.bias"].astype(np.float64)),
    "NaN": lambda: changed("fc0.bias", weights(1)["fc0.bias"] * np.nan),
    "infinity": lambda: changed("fc0.bias", weights(1)["fc0.bias"] * -np.inf),
    "huge weights": lambda: save(weights(1e30)),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_weights_are_refused(name: str, server: Any) -> None:
    before = ask(server, "GET", "/weights")
    assert post(server, HOSTILE[name]())[0] == 400
    assert server.received == {}
    assert ask(server, "GET", "/weights") == before


@pytest.mark.parametrize(
    "numbers",
    [{"version": 1}, {"version": -1}, {"page": 3}, {"page": -1}, {"rows": 0}, {"rows": 10**9},
     {"rows": "x"}, {"rows": ""}],
)  # fmt: skip
def test_impossible_numbers_are_refused(numbers: dict[str, Any], server: Any) -> None:
    assert post(server, save(weights(1)), **numbers)[0] == 400
    assert server.received == {}


def test_pages_of_others_and_other_addresses_are_refused(server: Any, tmp_path: Path) -> None:
    assert server.server_address[0] == "127.0.0.1"
    path = "/weights?version=0&page=0&rows=1"
    body = save(weights(1))
    assert ask(server, "POST", path, body, origin="http://example.org")[0] == 400
    assert ask(server, "POST", "/weights", body)[0] == 400
    for size in ("-1", "2000000", "x"):
        assert ask(server, "POST", path, **{"content-length": size})[0] == 400
    (tmp_path.parent / "secret").write_text("secret")
    assert ask(server, "GET", "/../secret")[0] == 404
    assert ask(server, "GET", "/training/manifest.json")[0] == 200
    assert server.received == {}
    assert onnxfit.Trainer.load(tmp_path / "training").global_step == 0
