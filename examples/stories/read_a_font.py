"""PP-OCR learns to read blackletter, and the letters of an alphabet that it does not know.

    python examples/stories/read_a_font.py [--out FOLDER]

The file is the recognizer of PP-OCRv4 for Chinese and English, from the wheel of
rapidocr-onnxruntime on PyPI. Package and model have the licence Apache-2.0, which allows changing
the file, and using and distributing the result, if the licence and a note on the changes go with
it. pip downloads the wheel into build/. Its code is not run.

The file reads ordinary fonts well, blackletter (Fraktur) with mistakes, and no Georgian: its
dictionary has none of the 33 letters. `replace_head(keep=True)` adds 33 classes behind the old
ones. The network then trains on pictures of random letters in fonts that matplotlib brings: a
quarter Fraktur, half Georgian, and a quarter ordinary Latin, so that the network does not forget
it. The loss CTC needs the texts alone, not the places of their letters.

The test reads words, none of which was in training. onnxruntime alone computes all figures, once
with the old file and once with the new one. The example writes read_a_font.onnx and a picture of
the words.

Limits: the pictures are drawn, clean and of one line; a scan of an old book has worse ink. Chinese
is not rehearsed, and nothing here measures how much of it the new file has forgotten.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
import onnx
import onnxruntime
from PIL import Image, ImageDraw, ImageFont

import onnxfit
from onnxfit.ctc import greedy_decode
from onnxfit.metrics import CharacterErrorRate

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from scripts.files.catalogue import read_catalogue
from scripts.files.wheels import fetch, read_file

FILE = "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx"
FONTS = Path(mpl.get_data_path()) / "fonts" / "ttf"
HEIGHT, WIDTH = 48, 160  # of a picture; the height is the model's
LATIN = "abcdefghijklmnopqrstuvwxyz"
GEORGIAN = "აბგდევზთიკლმნოპჟრსტუფქღყშჩცძწჭხჯჰ"
# Fraktur letters are characters of their own in Unicode, for formulas; these were there before.
OLDER_FRAKTUR = dict(zip("CHIRZ", "ℭℌℑℜℨ"))
WORDS = """River Mountain forest Window garden Winter summer Letter kitchen Bridge castle Market
village Shadow silver Golden copper Morning evening Thunder island Harbour captain Soldier doctor
Teacher student Painter miller Baker farmer Hunter singer Dancer writer Queen journey Yellow fox
Zebra""".split()
GEORGIAN_WORDS = """მთა მდინარე ტყე ფანჯარა ბაღი ზამთარი ზაფხული წერილი ხიდი ციხე ბაზარი სოფელი ჩრდილი
ოქრო დილა საღამო კუნძული ექიმი მხატვარი მწერალი მზე მთვარე წყალი ცეცხლი მიწა ჰაერი პური ყველი ღვინო
რძე თაფლი ვაშლი ყურძენი წიგნი სკოლა ქალაქი გზა სახლი კარი ჟოლო ძაღლი ჯაჭვი""".split()
ROWS, BATCH = 1600, 16


@dataclass(frozen=True)
class Print:
    """A way of printing: its fonts, the letters that training draws, and the words of the test."""

    fonts: tuple[str, ...]
    letters: str
    words: Sequence[str]
    is_fraktur: bool = False


PRINTS = {
    "ordinary Latin": Print(
        ("DejaVuSans", "DejaVuSerif", "cmr10", "STIXGeneral", "DejaVuSansMono"), LATIN, WORDS
    ),
    "Fraktur": Print(("STIXGeneral",), LATIN, WORDS, is_fraktur=True),
    "Georgian": Print(("DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono"), GEORGIAN, GEORGIAN_WORDS),
    "Georgian, another font": Print(("DejaVuSerif",), GEORGIAN, GEORGIAN_WORDS),
}
SHARES = {"ordinary Latin": 0.25, "Fraktur": 0.25, "Georgian": 0.5}  # of the training pictures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(), help="the folder of the new files")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)

    old = onnx.load_from_string(original())
    known = characters(old)
    alphabet = [*known, *GEORGIAN]  # the classes; class 0 is the blank
    model = onnxfit.replace_head(old, len(alphabet), keep=True)
    note_characters(model, alphabet)

    tests = {name: test_of(print_, alphabet, rng) for name, print_ in PRINTS.items()}
    images, labels = training_of(alphabet, rng)
    trainer = onnxfit.Trainer(
        model,
        loss="ctc",
        optimizer=onnxfit.optimizers.Adam(
            onnxfit.schedules.Cosine(0.001, decay_steps=ROWS // BATCH)
        ),
        metrics=["character_error_rate"],
        batch_norm="frozen",
    )
    trainer.fit(images, labels, epochs=1, batch_size=BATCH)
    trainer.export(options.out / "read_a_font.onnx")

    print(f"\n{'wrong characters':24}{'before':>9}{'after':>9}")
    new = (options.out / "read_a_font.onnx").read_bytes()
    for name, (x, y) in tests.items():
        found = [outputs_of(file, x, len(alphabet)) for file in (old.SerializeToString(), new)]
        print(f"{name:24}" + "".join(f"{error_rate(outputs, y):9.1%}" for outputs in found))


def original() -> bytes:
    """Return the model file, by pip unless it is in build/ already."""
    row = next(row for row in read_catalogue() if row.path == FILE)
    return read_file(fetch(row.package, row.version, ROOT / "build/files/wheels"), row)


def characters(model: onnx.ModelProto) -> list[str]:
    """Return what the classes mean: a blank, the characters in the file's metadata, a space."""
    listed = next(entry.value for entry in model.metadata_props if entry.key == "character")
    return ["", *listed.splitlines(), " "]


def note_characters(model: onnx.ModelProto, alphabet: Sequence[str]) -> None:
    """Write the characters into the metadata, from which programs read them."""
    entry = next(entry for entry in model.metadata_props if entry.key == "character")
    entry.value = "\n".join(alphabet[1:])


def fraktur(text: str) -> str:
    """Return the text in Unicode's Fraktur letters.

    >>> fraktur("Cab")
    'ℭ𝔞𝔟'
    """
    return "".join(
        OLDER_FRAKTUR.get(letter)
        or chr((0x1D51E if letter.islower() else 0x1D504) + LATIN.index(letter.lower()))
        for letter in text
    )


def drawn(text: str, font: str, rng: np.random.Generator) -> np.ndarray:
    """Return a line of text as the model expects it: (3, HEIGHT, WIDTH), from -1 to 1.

    Size, place and shades of grey are random. As in PP-OCR, the picture is scaled to the height,
    made narrower if it is too wide, and followed by zeros.
    """
    shape = ImageFont.truetype(str(FONTS / f"{font}.ttf"), int(rng.integers(27, 34)))
    left, _, right, _ = shape.getbbox(text, anchor="lm")
    margin = int(rng.integers(3, 9))
    image = Image.new("L", (int(right - left) + 2 * margin, HEIGHT), int(rng.integers(190, 256)))
    place = (margin - left, HEIGHT // 2 + int(rng.integers(-3, 4)))
    ImageDraw.Draw(image).text(
        place, text, font=shape, fill=int(rng.integers(0, 80)), anchor="lm"
    )
    if image.width > WIDTH:
        image = image.resize((WIDTH, HEIGHT))
    pixels = np.asarray(image, np.float32) / 127.5 - 1
    pixels += rng.normal(0, 0.05, pixels.shape)
    line = np.zeros((3, HEIGHT, WIDTH), np.float32)
    line[:, :, : image.width] = pixels
    return line


def letters_at_random(letters: str, rng: np.random.Generator) -> str:
    """Return three to seven letters, of which the first may be a capital."""
    text = "".join(rng.choice(list(letters), rng.integers(3, 8)))
    return text.capitalize() if letters == LATIN and rng.random() < 0.5 else text


def pictures_of(
    texts: Sequence[str], print_: Print, rng: np.random.Generator
) -> np.ndarray:
    """Draw the texts, with each font in turn."""
    shown = [fraktur(text) for text in texts] if print_.is_fraktur else texts
    fonts = print_.fonts
    return np.stack([drawn(text, fonts[i % len(fonts)], rng) for i, text in enumerate(shown)])


def labels_of(texts: Sequence[str], alphabet: Sequence[str]) -> np.ndarray:
    """Return the classes of the characters; shorter rows end with -1."""
    index = {character: i for i, character in enumerate(alphabet)}
    labels = np.full((len(texts), max(map(len, texts))), -1)
    for row, text in zip(labels, texts):
        row[: len(text)] = [index[character] for character in text]
    return labels


def test_of(
    print_: Print, alphabet: Sequence[str], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    return pictures_of(print_.words, print_, rng), labels_of(print_.words, alphabet)


def training_of(
    alphabet: Sequence[str], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return pictures of random letters, and their labels."""
    images, texts = [], []
    for name, share in SHARES.items():
        print_ = PRINTS[name]
        new = [letters_at_random(print_.letters, rng) for _ in range(int(share * ROWS))]
        images.append(pictures_of(new, print_, rng))
        texts += new
    return np.concatenate(images), labels_of(texts, alphabet)


def outputs_of(model: bytes, images: np.ndarray, classes: int) -> np.ndarray:
    """Return the probabilities (rows, time, classes) by onnxruntime alone.

    Classes that the model lacks have the probability 0.
    """
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    (outputs,) = session.run(None, {session.get_inputs()[0].name: images})
    return np.pad(outputs, ((0, 0), (0, 0), (0, classes - outputs.shape[2])))


def error_rate(outputs: np.ndarray, labels: np.ndarray) -> float:
    metric = CharacterErrorRate()
    metric.reset()
    metric.update(labels, outputs)
    return float(metric.result())


if __name__ == "__main__":
    main()
