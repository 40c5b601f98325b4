"""Photograph TensorBoard's pages of the demo and of a sweep for the README and docs/tensorboard.md;
run `make demo` first.

Needs Chromium and its driver (on Debian: apt-get install chromium chromium-driver). Everything
stays on this machine: TensorBoard and the driver listen on the loopback address, and the browser
gets a profile of its own that is thrown away.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
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
    "--window-size=1500,940",
]
PINNED = [
    {"plugin": "scalars", "tag": "loss/epoch_loss"},
    {"plugin": "scalars", "tag": "metrics/epoch_accuracy"},
    {
        "plugin": "histograms",
        "tag": "weights/conv2.weight",
        "runId": "defaultExperimentId/digits/train",
    },
]
TIME_SERIES = {"darkMode": "false", "smoothing": "0", "pinnedCards": json.dumps(PINNED)}

# the settings on the right take a quarter of the window and say nothing; what remains is then laid
# out anew
CLOSE_SETTINGS = """document.querySelector('[aria-label="Close side pane"]').click()"""
# elements are in shadow roots within shadow roots
FIND = """
const find = (wanted, root = document) => {
  for (const element of root.querySelectorAll("*")) {
    if (wanted(element)) return element;
    const inner = element.shadowRoot && find(wanted, element.shadowRoot);
    if (inner) return inner;
  }
};
"""
SELECT_NODE = (
    FIND
    + """
const node = find(e => e.matches("g.node") && e.__data__ && e.__data__.node.name === "conv2");
node.querySelector(":scope > .nodeshape > .nodecolortarget").dispatchEvent(new MouseEvent("click", {bubbles: true}));
"""
)
FIT_GRAPH = FIND + "find(e => e.localName === 'tf-graph-scene').fit()"
LEARNING_RATES = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)


@dataclass(frozen=True)
class Page:
    """A page to photograph: its address within TensorBoard, the window's width, where the page
    ends, and what to do there.
    """

    image: str
    runs: str
    view: str
    width: int
    bottom: int
    scripts: tuple[str, ...] = ()


PAGES = [
    Page(
        "tensorboard",
        "runs",
        "?" + urllib.parse.urlencode(TIME_SERIES) + "#timeseries",
        1500,
        596,
        (CLOSE_SETTINGS,),
    ),
    Page(
        "tensorboard-scalars",
        "runs",
        "?darkMode=false#scalars&tagFilter=epoch_(loss|acc|learn)&_smoothingWeight=0",
        1500,
        620,
    ),
    Page(
        "tensorboard-graph", "runs", "?darkMode=false#graphs", 1100, 790, (SELECT_NODE, FIT_GRAPH)
    ),
    Page(
        "tensorboard-histograms", "runs", "?darkMode=false#histograms&tagFilter=weight", 1500, 452
    ),
    Page("tensorboard-hparams", "sweep", "?darkMode=false#hparams", 1500, 430),
]


def main() -> None:
    if shutil.which("chromedriver") is None:
        sys.exit("screenshots: chromedriver is not installed")
    runs = sorted((ROOT / "runs" / "digits").glob("*/"))
    if not runs:
        sys.exit("screenshots: runs/digits is empty, run `make demo` first")
    IMAGES.mkdir(exist_ok=True)
    shutil.copy(ROOT / "digits.png", IMAGES / "digits.png")
    with tempfile.TemporaryDirectory() as folder:
        # the newest run, under a name without its date
        shutil.copytree(runs[-1], Path(folder, "runs", "digits"))
        sweep(Path(folder, "sweep"))
        with browser(Path(folder, "profile")) as command:
            for name in ("runs", "sweep"):
                with tensorboard(Path(folder), name) as address:
                    photograph_all(name, address, command)
    for image in sorted(IMAGES.glob("*.png")):
        print(f"{image.relative_to(ROOT)}  {image.stat().st_size / 1000:.0f} kB")


def sweep(folder: Path) -> None:
    """The demo's model trained with several learning rates, each a run."""
    sys.path.insert(0, str(ROOT / "examples"))
    from models import convolutional
    from sklearn.datasets import load_digits

    import onnxfit

    digits = load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)
    for rate in LEARNING_RATES:
        trainer = onnxfit.Trainer(
            convolutional(),
            loss="cross_entropy",
            optimizer=onnxfit.optimizers.Adam(rate),
            metrics=["accuracy"],
        )
        board = onnxfit.callbacks.TensorBoard(folder / f"rate-{rate:g}")
        trainer.fit(
            images, digits.target, epochs=5, validation_split=0.2, verbose=0, callbacks=[board]
        )


def photograph_all(runs: str, address: str, command: Callable[..., Any]) -> None:
    for page in PAGES:
        if page.runs == runs:
            photograph(page, address, command)


def photograph(page: Page, address: str, command: Callable[..., Any]) -> None:
    command("window/rect", {"width": page.width, "height": 940})
    command("url", {"url": "about:blank"})  # else a new fragment is no new page
    command("url", {"url": address + page.view})
    time.sleep(6)  # charts are drawn by a worker, which reports to nobody
    for script in page.scripts:
        command("execute/sync", {"script": script, "args": []})
        time.sleep(4)
    picture = Image.open(io.BytesIO(base64.b64decode(command("screenshot"))))
    shown = picture.convert("RGB").crop((0, 0, picture.width, min(page.bottom, picture.height)))
    # a palette of 256 colours loses nothing one can see and keeps the file small
    shown.quantize(256, dither=Image.Dither.NONE).save(IMAGES / f"{page.image}.png", optimize=True)


@contextmanager
def tensorboard(folder: Path, runs: str) -> Iterator[str]:
    """A TensorBoard over `runs` in a folder (it shows the name as it is given) that has read the
    training run and the validation run; its address.
    """
    port = free_port()
    arguments = [
        "--logdir",
        runs,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--load_fast",
        "false",
    ]
    address = f"http://127.0.0.1:{port}/"
    with running([sys.executable, "-m", "tensorboard.main", *arguments], folder):
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
        session = request(f"{address}/session", {"capabilities": {"alwaysMatch": options}})[
            "value"
        ]["sessionId"]

        def command(name: str, arguments: dict[str, Any] | None = None) -> Any:
            return request(f"{address}/session/{session}/{name}", arguments)["value"]

        try:
            yield command
        finally:
            request(f"{address}/session/{session}", method="DELETE")


@contextmanager
def running(command: list[str], folder: Path | None = None) -> Iterator[None]:
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def request(
    address: str, arguments: dict[str, Any] | None = None, method: str | None = None
) -> Any:
    data = None if arguments is None else json.dumps(arguments).encode()
    call = urllib.request.Request(
        address, data, {"Content-Type": "application/json"}, method=method
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
        call, timeout=60
    ) as answer:
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
