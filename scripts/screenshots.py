"""Photograph the demo's TensorBoard for the README, and copy its curves: run `make demo` first.

Needs Chromium and its driver (on Debian: apt-get install chromium chromium-driver). Everything stays on this machine: TensorBoard
and the driver listen on the loopback address, and the browser gets a profile of its own that is thrown away.
"""

from __future__ import annotations

import base64
import io
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--window-size=1500,800",
]
PINNED = [
    {"plugin": "scalars", "tag": "epoch_loss"},
    {"plugin": "scalars", "tag": "epoch_accuracy"},
    {"plugin": "histograms", "tag": "conv2.weight/histogram", "runId": "defaultExperimentId/digits/train"},
]
VIEW = "?" + urllib.parse.urlencode({"darkMode": "false", "smoothing": "0", "pinnedCards": json.dumps(PINNED)}) + "#timeseries"
BOTTOM = 596  # the pinned cards end here

# the settings on the right take a quarter of the window and say nothing; what remains is then laid out anew
CLOSE_SETTINGS = """document.querySelector('[aria-label="Close side pane"]').click()"""


def main() -> None:
    if shutil.which("chromedriver") is None:
        sys.exit("screenshots: chromedriver is not installed")
    runs = sorted((ROOT / "runs" / "digits").glob("*/"))
    if not runs:
        sys.exit("screenshots: runs/digits is empty, run `make demo` first")
    IMAGES.mkdir(exist_ok=True)
    shutil.copy(ROOT / "digits.png", IMAGES / "digits.png")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(runs[-1], Path(folder, "runs", "digits"))  # the newest run, under a name without its date
        with tensorboard(Path(folder, "runs")) as address, browser(Path(folder, "profile")) as command:
            command("url", {"url": address + VIEW})
            time.sleep(5)
            command("execute/sync", {"script": CLOSE_SETTINGS, "args": []})
            time.sleep(5)  # charts are drawn by a worker, which reports to nobody
            picture = Image.open(io.BytesIO(base64.b64decode(command("screenshot"))))
    shown = picture.convert("RGB").crop((0, 0, picture.width, BOTTOM))
    # a palette of 256 colours loses nothing one can see and keeps the file small
    shown.quantize(256, dither=Image.Dither.NONE).save(IMAGES / "tensorboard.png", optimize=True)
    for image in sorted(IMAGES.glob("*.png")):
        print(f"{image.relative_to(ROOT)}  {image.stat().st_size / 1000:.0f} kB")


@contextmanager
def tensorboard(runs: Path) -> Iterator[str]:
    """A TensorBoard over `runs` that has read the training run and the validation run; its address."""
    port = free_port()
    arguments = ["--logdir", str(runs), "--host", "127.0.0.1", "--port", str(port), "--load_fast", "false"]
    address = f"http://127.0.0.1:{port}/"
    with running([sys.executable, "-m", "tensorboard.main", *arguments]):
        wait(lambda: len(request(f"{address}data/runs")) >= 2, "TensorBoard showed no runs")
        yield address


@contextmanager
def browser(profile: Path) -> Iterator[Callable[..., Any]]:
    """A headless Chromium, as a function that sends it WebDriver commands."""
    port = free_port()
    with running(["chromedriver", f"--port={port}"]):
        address = f"http://127.0.0.1:{port}"
        wait(lambda: request(f"{address}/status")["value"]["ready"], "chromedriver did not start")
        options = {"goog:chromeOptions": {"args": [*FLAGS, f"--user-data-dir={profile}"]}}
        session = request(f"{address}/session", {"capabilities": {"alwaysMatch": options}})["value"]["sessionId"]

        def command(name: str, arguments: dict[str, Any] | None = None) -> Any:
            return request(f"{address}/session/{session}/{name}", arguments)["value"]

        try:
            yield command
        finally:
            request(f"{address}/session/{session}", method="DELETE")


@contextmanager
def running(command: list[str]) -> Iterator[None]:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def request(address: str, arguments: dict[str, Any] | None = None, method: str | None = None) -> Any:
    data = None if arguments is None else json.dumps(arguments).encode()
    call = urllib.request.Request(address, data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(call, timeout=60) as answer:
        return json.load(answer)


def wait(ready: Callable[[], bool], complaint: str, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if ready():
                return
        except OSError:
            pass  # not listening yet
        time.sleep(0.2)
    sys.exit(f"screenshots: {complaint} within {seconds:.0f} s")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
