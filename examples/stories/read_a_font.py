"""PP-OCR learns to read blackletter, and the letters of an alphabet that it does not know.

    python examples/stories/read_a_font.py [--chinese FONT] [--out FOLDER]

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

The network forgets what it does not rehearse: without more, it then reads Chinese as Georgian. The
option --chinese names a font with Chinese characters, such as wqy-microhei.ttc of Debian's package
fonts-wqy-microhei. Training then has a quarter more pictures, of Chinese, and the table a row more.

Limits: the pictures are drawn, clean and of one line; a scan of an old book has worse ink. Training
has one blackletter font; the new file reads other ones worse than the old file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
import onnx
import onnxruntime
from PIL import Image, ImageDraw, ImageFont

if not __package__:  # run as a file: modules are found from the root of the repository
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import onnxfit
from onnxfit.ctc import greedy_decode
from onnxfit.metrics import CharacterErrorRate
from scripts.files.catalogue import read_catalogue
from scripts.files.processes import ROOT
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
Zebra"""
GEORGIAN_WORDS = """მთა მდინარე ტყე ფანჯარა ბაღი ზამთარი ზაფხული წერილი ხიდი ციხე ბაზარი სოფელი ჩრდილი
ოქრო დილა საღამო კუნძული ექიმი მხატვარი მწერალი მზე მთვარე წყალი ცეცხლი მიწა ჰაერი პური ყველი ღვინო
რძე თაფლი ვაშლი ყურძენი წიგნი სკოლა ქალაქი გზა სახლი კარი ჟოლო ძაღლი ჯაჭვი"""
# The 3755 common characters, which GB 2312 has in these rows
CHINESE = bytes(b for r in range(0xB0, 0xD8) for c in range(0xA1, 0xFF) for b in (r, c))
CHINESE_WORDS = """中国 北京 今天 学习 老师 学生 朋友 工作 公司 电话 时间 问题 世界 城市 天气 音乐 电影 汽车
飞机 火车 医院 银行 商店 水果 苹果 咖啡 牛奶 面包 米饭 鸡蛋 红色 蓝色 春天 夏天 秋天 冬天 山水 河流 森林 花园"""
ROWS, BATCH, WARMUP = 1800, 8, 20
COLUMN = 450  # of the picture for people, in pixels


@dataclass(frozen=True)
class Print:
    """A way of printing: its fonts, the letters that training draws, and the words of the test."""

    fonts: tuple[str, ...]
    letters: str
    words: str
    is_fraktur: bool = False
    lengths: tuple[int, int] = (3, 7)


PRINTS = {
    "ordinary Latin": Print(
        ("DejaVuSans.ttf", "DejaVuSerif.ttf", "cmr10.ttf", "STIXGeneral.ttf", "DejaVuSansMono.ttf"),
        LATIN,
        WORDS,
    ),
    "Fraktur": Print(("STIXGeneral.ttf",), LATIN, WORDS, is_fraktur=True),
    "Georgian": Print(
        ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSansMono.ttf"), GEORGIAN, GEORGIAN_WORDS
    ),
    "Georgian, another font": Print(("DejaVuSerif.ttf",), GEORGIAN, GEORGIAN_WORDS),
}
# words in the picture
SHOWN = {
    "ordinary Latin": 2,
    "Fraktur": 8,
    "Georgian": 6,
    "Georgian, another font": 4,
    "Chinese": 0,
}
SHARES = {"ordinary Latin": 0.25, "Fraktur": 0.25, "Georgian": 0.5, "Chinese": 0.25}  # of ROWS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chinese", type=Path, help="a font with Chinese characters")
    parser.add_argument("--out", type=Path, default=Path(), help="the folder of the new files")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)

    old = onnx.load_from_string(original())
    known = characters(old)  # the old classes; class 0 is the blank
    alphabet = [*known, *GEORGIAN]
    model = onnxfit.replace_head(old, len(alphabet), keep=True)
    note_characters(model, alphabet)

    prints = dict(PRINTS)
    if options.chinese:
        letters = "".join(c for c in CHINESE.decode("gb2312", "ignore") if c in known)
        fonts = (str(options.chinese.resolve()),)
        prints["Chinese"] = Print(fonts, letters, CHINESE_WORDS, lengths=(2, 4))
    tests = {name: test_of(print_, alphabet, rng) for name, print_ in prints.items()}
    images, labels = training_of(prints, alphabet, rng)
    # With a rate of 0.001 from the first step on, the network unlearns everything but the blank.
    rate = onnxfit.schedules.Cosine(0.0004, decay_steps=len(images) // BATCH - WARMUP)
    trainer = onnxfit.Trainer(
        model,
        loss="ctc",
        optimizer=onnxfit.optimizers.Adam(
            onnxfit.schedules.Warmup(rate, steps=WARMUP),
            learning_rate_multipliers={"linear_85.*": 4},  # the head, where letters are new
        ),
        metrics=["character_error_rate"],
        batch_norm="frozen",
        threads=1,  # the same numbers on each run
    )
    trainer.fit(images, labels, epochs=1, batch_size=BATCH)
    trainer.export(options.out / "read_a_font.onnx")

    files = old.SerializeToString(), (options.out / "read_a_font.onnx").read_bytes()
    print(f"\n{'wrong characters':24}{'words':>7}{'before':>9}{'after':>9}")
    lines = []
    for name, (x, y) in tests.items():
        before, after = (outputs_of(file, x, len(alphabet)) for file in files)
        rates = f"{error_rate(before, y):9.1%}{error_rate(after, y):9.1%}"
        print(f"{name:24}{len(y):7}{rates}")
        readings = texts_of(before, alphabet), texts_of(after, alphabet)
        lines += [*zip(x, *readings)][: SHOWN[name]]
    picture_of(lines).save(options.out / "read_a_font.png")


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
    shape = ImageFont.truetype(str(FONTS / font), int(rng.integers(27, 34)))
    left, _, right, _ = shape.getbbox(text, anchor="lm")
    margin = int(rng.integers(3, 9))
    image = Image.new("L", (int(right - left) + 2 * margin, HEIGHT), int(rng.integers(190, 256)))
    place = (margin - left, HEIGHT // 2 + int(rng.integers(-3, 4)))
    ImageDraw.Draw(image).text(place, text, font=shape, fill=int(rng.integers(0, 80)), anchor="lm")
    if image.width > WIDTH:
        image = image.resize((WIDTH, HEIGHT))
    pixels = np.asarray(image, np.float32) / 127.5 - 1
    pixels += rng.normal(0, 0.05, pixels.shape)
    line = np.zeros((3, HEIGHT, WIDTH), np.float32)
    line[:, :, : image.width] = pixels
    return line


def letters_at_random(print_: Print, rng: np.random.Generator) -> str:
    """Return some letters, of which the first may be a capital."""
    text = "".join(rng.choice(list(print_.letters), rng.integers(*print_.lengths, endpoint=True)))
    return text.capitalize() if rng.random() < 0.5 and print_.letters == LATIN else text


def pictures_of(texts: Sequence[str], print_: Print, rng: np.random.Generator) -> np.ndarray:
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
    """Return pictures of the words of the test, and their labels."""
    words = print_.words.split()
    return pictures_of(words, print_, rng), labels_of(words, alphabet)


def training_of(
    prints: Mapping[str, Print], alphabet: Sequence[str], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return pictures of random letters, and their labels."""
    images, texts = [], []
    for name in [name for name in SHARES if name in prints]:
        new = [letters_at_random(prints[name], rng) for _ in range(int(SHARES[name] * ROWS))]
        images.append(pictures_of(new, prints[name], rng))
        texts += new
    return np.concatenate(images), labels_of(texts, alphabet)


def outputs_of(model: bytes, images: np.ndarray, classes: int) -> np.ndarray:
    """Return the probabilities (rows, time, classes) by onnxruntime alone.

    Classes that the model lacks have the probability 0.
    """
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    (outputs,) = session.run(None, {session.get_inputs()[0].name: images})
    return np.pad(outputs, ((0, 0), (0, 0), (0, classes - outputs.shape[2])))


def texts_of(outputs: np.ndarray, alphabet: Sequence[str]) -> list[str]:
    """Return what the outputs read as."""
    return ["".join(alphabet[i] for i in row) for row in greedy_decode(outputs)]


def error_rate(outputs: np.ndarray, labels: np.ndarray) -> float:
    metric = CharacterErrorRate()
    metric.reset()
    metric.update(labels, outputs)
    return float(metric.result())


def picture_of(lines: Sequence[tuple[np.ndarray, str, str]]) -> Image.Image:
    """Draw pictures of words, two in a row, each with its readings before and after training."""
    font = ImageFont.truetype(str(FONTS / "DejaVuSans.ttf"), 17)
    heads = ("picture", "read before", "read after")
    width, row = 2 * COLUMN, HEIGHT + 8
    image = Image.new("L", (width, 34 + row * -(-len(lines) // 2)), 255)
    pen = ImageDraw.Draw(image)
    for i, (line, *readings) in enumerate(lines):
        x, y = i % 2 * COLUMN, 34 + i // 2 * row
        used = np.abs(line[0]).sum(axis=0) > 0
        pixels = (line[0][:, used].clip(-1, 1) + 1) * 127.5
        image.paste(Image.fromarray(pixels.astype(np.uint8)), (x + 8, y))
        for text, start in zip(readings, (190, 310)):
            pen.text((x + start, y + HEIGHT // 2), text, font=font, fill=0, anchor="lm")
    for x in (0, COLUMN):
        for text, start in zip(heads, (8, 190, 310)):
            pen.text((x + start, 17), text, font=font, fill=100, anchor="lm")
    return image


if __name__ == "__main__":
    main()
