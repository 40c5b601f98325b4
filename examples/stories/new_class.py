"""A classifier of file types learns one more type, and keeps the 214 that it knows.

    python examples/stories/new_class.py [--out FOLDER]

The file is the network of magika 1.0.3, from its wheel on PyPI. Package and model have the licence
Apache-2.0, which allows changing the file, and using and distributing the result, if the licence
and a note on the changes go with it. pip downloads the wheel into build/. Its code is not run.

The new type is made up for this example: notes of a hike. Its lines resemble INI files and logs,
and a third of the files lacks the first line, which names the format. `replace_head(keep=True)`
adds a class behind the old ones. Training changes the last layer alone. Its data are 40 such files,
and 25 files of each of eight old types. Other old types are not shown: their figures tell whether
the network forgets what it does not rehearse. For comparison, the same training begins with a last
layer of random weights, which has nothing to say about these types.

All files of the test are others than those of training. onnxruntime alone computes all figures.
The example writes new_class.onnx, new_class.json, the list of its labels, and, for comparison,
random_head.onnx.

Limits: the files of the old types are Python's own, or written by Python. They are easier than
files from elsewhere, and of 214 old types only 19 are here. magika itself also has rules for short
files and a least score for each type, which are not part of the network.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import gzip
import importlib.util
import io
import json
import marshal
import pickle
import sqlite3
import sys
import sysconfig
import tarfile
import wave
import zipfile
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import onnxruntime
from PIL import Image

if not __package__:  # run as a file: modules are found from the root of the repository
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import onnxfit
from scripts.files.catalogue import read_catalogue
from scripts.files.processes import ROOT
from scripts.files.wheels import fetch, read_file

FILE = "magika/models/standard_v3_3/model.onnx"
CONFIG = "magika/models/standard_v3_3/config.min.json"
CONFIG_SHA256, CONFIG_SIZE = (
    "ae24c742205358f6ff6dfd5facb6743fb69743dbba8373e73da58ff0cbd695db",
    2141,
)
PART, BLOCK, PADDING = 1024, 4096, 256  # what the network sees of each end of a file; in CONFIG
NEW = "hike"
TRAINED, TESTED = 25, 15  # files of each old type
NEW_TRAINED, NEW_TESTED = 40, 60
EPOCHS, BATCH = 5, 20

Rng = np.random.Generator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(), help="the folder of the new files")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)

    old, labels = original()
    labels = [*labels, NEW]  # the new class is the last one
    training, tests = collect(labels, rng)
    for keep, file in ((False, "random_head.onnx"), (True, "new_class.onnx")):
        trainer = onnxfit.Trainer(
            onnxfit.replace_head(old, len(labels), keep=keep),
            weights=["*Const_24*", "*Dense_1*"],  # the last layer
            loss="cross_entropy",
            optimizer=onnxfit.optimizers.Adam(0.001),
            metrics=["accuracy"],
            threads=1,  # the same numbers on each run
        )
        trainer.fit(*training, epochs=EPOCHS, batch_size=BATCH)
        trainer.export(options.out / file)
    (options.out / "new_class.json").write_text(json.dumps(labels))

    files = [
        old,
        *((options.out / f).read_bytes() for f in ("random_head.onnx", "new_class.onnx")),
    ]
    print(f"\n{'right answers':34}{'files':>7}{'before':>9}{'random head':>13}{'kept head':>11}")
    for name, (x, y) in tests.items():
        before, fresh, kept = (np.mean(answers(file, x) == y) for file in files)
        print(f"{name:34}{len(y):7}{before:9.1%}{fresh:13.1%}{kept:11.1%}")


def original() -> tuple[bytes, list[str]]:
    """Return the model file and its labels, by pip unless they are in build/ already."""
    row = next(row for row in read_catalogue() if row.path == FILE)
    wheel = fetch(row.package, row.version, ROOT / "build/files/wheels")
    config = dataclasses.replace(row, path=CONFIG, sha256=CONFIG_SHA256, size=CONFIG_SIZE)
    return read_file(wheel, row), json.loads(read_file(wheel, config))["target_labels_space"]


Examples = tuple[np.ndarray, np.ndarray]


def collect(labels: list[str], rng: np.random.Generator) -> tuple[Examples, dict[str, Examples]]:
    """Return the features and classes of the files of training, and of each part of the test."""
    training: list[tuple[np.ndarray, int]] = []
    tests: dict[str, list[tuple[np.ndarray, int]]] = {}
    for name, writers, trained, tested in (
        ("the new type", {NEW: hike}, NEW_TRAINED, NEW_TESTED),
        (f"{len(SHOWN)} old types, shown in training", SHOWN, TRAINED, TESTED),
        (f"{len(NOT_SHOWN)} old types, not shown", NOT_SHOWN, 0, TESTED),
    ):
        tests[name] = []
        for label, write in writers.items():
            files = [(features(write(rng)), labels.index(label)) for _ in range(trained + tested)]
            training += files[:trained]
            tests[name] += files[trained:]
    return as_arrays(training), {name: as_arrays(files) for name, files in tests.items()}


def as_arrays(files: list[tuple[np.ndarray, int]]) -> Examples:
    numbers, classes = zip(*files)
    return np.stack(numbers), np.array(classes)


def answers(model: bytes, files: np.ndarray) -> np.ndarray:
    """Return the most probable class of each file, by onnxruntime alone."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    parts = [
        session.run(None, {"bytes": part})[0] for part in np.split(files, range(50, len(files), 50))
    ]
    return np.concatenate(parts).argmax(axis=1)


def features(data: bytes) -> np.ndarray:
    """Return the numbers that magika makes of a file: its first and its last bytes.

    White space before the first bytes and after the last is left out. A short file is padded.

    >>> found = features(b"  ab\n")
    >>> found[:4].tolist(), found[-4:].tolist(), found.shape
    ([97, 98, 10, 256], [32, 32, 97, 98], (2048,))
    """
    first, last = data[:BLOCK].lstrip()[:PART], data[-BLOCK:].rstrip()[-PART:]
    numbers = np.full(2 * PART, PADDING, np.int32)
    numbers[: len(first)] = list(first)
    numbers[2 * PART - len(last) :] = list(last)
    return numbers


def hike(rng: Rng) -> bytes:
    """Return a file of the new type."""
    lines = []
    if rng.random() < 2 / 3:
        lines.append(f"%HIKE {rng.integers(1, 4)}")
    lines.append(
        f"@ {words(rng, 2).title()} -- {rng.uniform(3, 30):.1f} km, {rng.integers(1500)} m up"
    )
    minutes = int(rng.integers(300, 700))
    for _ in range(rng.integers(5, 80)):
        kind = rng.random()
        if kind < 0.15:
            lines.append(f"! {words(rng, 5)}")
        elif kind < 0.25:
            lines.append(
                f"~ {rng.integers(-10, 30)} C, wind {rng.choice(['N', 'SW', 'E'])} {rng.integers(9)}"
            )
        else:
            minutes += int(rng.integers(3, 40))
            clock = f"{minutes // 60 % 24:02}:{minutes % 60:02}"
            place = (
                f"N{rng.uniform(40, 50):.4f} E{rng.uniform(5, 15):.4f} {rng.integers(200, 3000)}m"
            )
            lines.append(f"> {clock} {place}  {words(rng, int(rng.integers(4)))}".rstrip())
    return ("\r\n" if rng.random() < 0.2 else "\n").join([*lines, ""]).encode()


WORDS = """steep path to the old bridge left at fork snow above hut good water here lost marker rest
under trees view of lake long climb north ridge wet stone field gate closed follow river then turn
right behind chapel summit windy short cut through forest rain cable handrail meadow cows"""


def words(rng: Rng, count: int) -> str:
    return " ".join(rng.choice(WORDS.split(), count))


def table(rng: Rng) -> list[list[str]]:
    return [
        [words(rng, 1), str(rng.integers(1000)), f"{rng.normal():.3f}"]
        for _ in range(rng.integers(20, 60))
    ]


def as_json(rng: Rng) -> bytes:
    rows = [dict(zip(("name", "count", "value"), row)) for row in table(rng)]
    return json.dumps(
        {"title": words(rng, 3), "rows": rows}, indent=int(rng.integers(1, 5))
    ).encode()


def as_xml(rng: Rng) -> bytes:
    root = ElementTree.Element("table", title=words(rng, 3))
    for name, count, value in table(rng):
        ElementTree.SubElement(root, "row", name=name, count=count).text = value
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)


def as_html(rng: Rng) -> bytes:
    rows = "\n".join(f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in table(rng))
    title = words(rng, 3)
    return f"<!DOCTYPE html>\n<html><head><title>{title}</title></head>\n<body><h1>{title}</h1>\n<table>\n{rows}\n</table></body></html>".encode()


def as_csv(rng: Rng) -> bytes:
    text = io.StringIO()
    csv.writer(text).writerows([["name", "count", "value"], *table(rng)])
    return text.getvalue().encode()


def as_ini(rng: Rng) -> bytes:
    lines = []
    for name, count, value in table(rng):
        if rng.random() < 0.2:
            lines.append(f"\n[{words(rng, 1)}]")
        lines.append(f"{name}_{count} = {value}")
    return "\n".join(["[main]", *lines]).encode()


def as_markdown(rng: Rng) -> bytes:
    parts = [f"# {words(rng, 3).title()}"]
    for _ in range(rng.integers(3, 10)):
        parts.append(f"## {words(rng, 2).title()}")
        parts.append(
            f"{words(rng, 30).capitalize()}. See [{words(rng, 2)}](https://example.org/{words(rng, 1)})."
        )
        parts.append(
            "\n".join(
                f"- **{words(rng, 1)}**: `{words(rng, 1)}`" for _ in range(rng.integers(2, 6))
            )
        )
    return "\n\n".join(parts).encode()


def as_text(rng: Rng) -> bytes:
    return "\n".join(
        f"{words(rng, 12).capitalize()}." for _ in range(rng.integers(10, 40))
    ).encode()


def as_zip(rng: Rng) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for i in range(rng.integers(1, 6)):
            archive.writestr(f"{words(rng, 1)}{i}.txt", as_text(rng))
    return file.getvalue()


def as_tar(rng: Rng) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for i in range(rng.integers(1, 6)):
            text = as_text(rng)
            entry = tarfile.TarInfo(f"{words(rng, 1)}{i}.txt")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
    return file.getvalue()


def as_sqlite(rng: Rng) -> bytes:
    database = sqlite3.connect(":memory:")
    database.execute("create table rows (name text, count text, value text)")
    database.executemany("insert into rows values (?, ?, ?)", table(rng))
    database.commit()
    return b"".join(line.encode() for line in database.iterdump())


def picture(name: str) -> Callable[[Rng], bytes]:
    def write(rng: Rng) -> bytes:
        size = rng.integers(8, 24, 2)
        pixels = np.kron(rng.integers(0, 255, (*size, 3)), np.ones((4, 4, 1))).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, name)
        return file.getvalue()

    return write


def as_wav(rng: Rng) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(int(rng.choice([8000, 16000, 44100])))
        sound.writeframes(rng.integers(-9000, 9000, 4000).astype("<i2").tobytes())
    return file.getvalue()


def as_npy(rng: Rng) -> bytes:
    file = io.BytesIO()
    np.save(file, rng.normal(size=rng.integers(5, 50, 2)))
    return file.getvalue()


def files_of(folder: Path, pattern: str) -> Callable[[Rng], bytes]:
    """Return a function that reads another file of a folder at each call."""
    waiting = sorted(path for path in folder.glob(pattern) if path.stat().st_size > 500)
    return lambda rng: waiting.pop(int(rng.integers(len(waiting)))).read_bytes()


LIBRARY = Path(sysconfig.get_path("stdlib"))
python_file = files_of(LIBRARY, "*.py")


def as_bytecode(rng: Rng) -> bytes:
    """Return what Python writes into a .pyc file."""
    code = compile(python_file(rng), "module.py", "exec")
    return importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)


SHOWN = {
    "python": python_file,
    "json": as_json,
    "xml": as_xml,
    "html": as_html,
    "markdown": as_markdown,
    "ini": as_ini,
    "csv": as_csv,
    "zip": as_zip,
}
NOT_SHOWN = {
    "txt": as_text,
    "tar": as_tar,
    "gzip": lambda rng: gzip.compress(as_text(rng)),
    "sql": as_sqlite,
    "pickle": lambda rng: pickle.dumps(table(rng)),
    "npy": as_npy,
    "wav": as_wav,
    "png": picture("PNG"),
    "jpeg": picture("JPEG"),
    "gif": picture("GIF"),
    "pythonbytecode": as_bytecode,
}


if __name__ == "__main__":
    main()
