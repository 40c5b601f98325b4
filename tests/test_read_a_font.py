"""examples/stories/read_a_font.py: its pictures and labels, without the model."""

from __future__ import annotations

import unicodedata

import numpy as np
import onnx
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("yaml")
from PIL import ImageFont

from examples.stories import read_a_font as story
from onnxfit.ctc import greedy_decode

LETTERS = story.LATIN + story.LATIN.upper()


def test_fraktur_letters_are_compatible_with_latin_ones() -> None:
    shown = story.fraktur(LETTERS)
    assert unicodedata.normalize("NFKC", shown) == LETTERS
    assert not set(shown) & set(LETTERS)
    names = {unicodedata.name(letter) for letter in shown}
    assert all("FRAKTUR" in name or "BLACK-LETTER" in name for name in names)


@pytest.mark.parametrize("name", story.PRINTS)
def test_fonts_have_every_letter(name: str) -> None:
    kind = story.PRINTS[name]
    letters = kind.letters + (kind.letters.upper() if kind.letters == story.LATIN else "")
    shown = story.fraktur(letters) if kind.is_fraktur else letters
    for font in kind.fonts:
        shape = ImageFont.truetype(str(story.FONTS / font), 30)
        missing = bytes(shape.getmask("\uffff"))
        masks = {bytes(shape.getmask(letter)) for letter in shown}
        assert len(masks) == len(shown)
        assert missing not in masks
    assert set("".join(kind.words.split())) <= set(letters)


def test_a_line_is_scaled_to_the_height_and_followed_by_zeros() -> None:
    line = story.drawn("ab", "DejaVuSans.ttf", np.random.default_rng(0))
    assert line.shape == (3, 48, 160)
    assert line.dtype == np.float32
    assert np.array_equal(line[0], line[1])
    assert np.array_equal(line[0], line[2])
    used = np.abs(line[0]).sum(axis=0) > 0
    width = used.sum()
    assert 30 < width < 90
    assert used[:width].all()
    assert line.min() < -0.3
    assert line.max() > 0.3
    wide = story.drawn("ab" * 20, "DejaVuSans.ttf", np.random.default_rng(0))
    assert np.abs(wide[0]).sum(axis=0).all()


def test_pictures_repeat_with_the_seed() -> None:
    kind = story.PRINTS["Fraktur"]
    a, b, c = (story.pictures_of(["Fox"], kind, np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert np.array_equal(a, b)
    assert not np.array_equal(a, c)
    plain = story.pictures_of(["Fox"], story.PRINTS["ordinary Latin"], np.random.default_rng(0))
    assert not np.array_equal(a, plain)


def test_labels_read_as_their_texts() -> None:
    alphabet = ["", *LETTERS, " ", *story.GEORGIAN]
    texts = ["abba", "Fox", "მთა"]
    labels = story.labels_of(texts, alphabet)
    assert labels.shape == (3, 4)
    assert labels[1, 3] == labels[2, 3] == -1
    # a blank after each character
    steps = np.stack([np.maximum(labels, 0), np.zeros_like(labels)], axis=2).reshape(3, -1)
    outputs = np.eye(len(alphabet))[steps]
    assert story.texts_of(outputs, alphabet) == texts
    assert story.error_rate(outputs, labels) == 0
    assert [len(row) for row in greedy_decode(outputs)] == [4, 3, 3]
    assert story.error_rate(outputs[[0, 2, 1]], labels) == 0.6


def test_training_has_every_letter_and_no_word_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(story, "ROWS", 400)
    alphabet = ["", *LETTERS, " ", *story.GEORGIAN]
    images, labels = story.training_of(story.PRINTS, alphabet, np.random.default_rng(0))
    assert images.shape == (400, 3, 48, 160)
    assert len(labels) == 400
    texts = {"".join(alphabet[i] for i in row if i >= 0) for row in labels}
    assert set(story.LATIN + story.GEORGIAN) <= set("".join(texts)) <= set(LETTERS + story.GEORGIAN)
    assert not texts & {*story.WORDS.split(), *story.GEORGIAN_WORDS.split()}


def test_the_characters_are_in_the_metadata() -> None:
    model = onnx.ModelProto()
    model.metadata_props.add(key="character", value="'\na\n疗")
    assert story.characters(model) == ["", "'", "a", "疗", " "]
    story.note_characters(model, [*story.characters(model), "ა"])
    assert story.characters(model)[:-1] == ["", "'", "a", "疗", " ", "ა"]


def test_the_picture_shows_two_words_in_a_row() -> None:
    line = story.drawn("ab", "DejaVuSans.ttf", np.random.default_rng(0))
    image = story.picture_of([(line, "x", "ab")] * 3)
    rows = 34 + 2 * (48 + 8)
    assert image.size == (2 * story.COLUMN, rows)
    pixels = np.asarray(image)
    assert (pixels[-40:, : story.COLUMN] < 100).any()
    assert (pixels[-40:, story.COLUMN :] == 255).all()


def test_chinese_characters_are_the_common_ones() -> None:
    letters = story.CHINESE.decode("gb2312", "ignore")
    assert len(set(letters)) == len(letters) == 3755
    assert set("".join(story.CHINESE_WORDS.split())) <= set(letters)
