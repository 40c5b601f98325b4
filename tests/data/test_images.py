"""Folders of images."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
from packaging.version import Version

import onnxfit
from onnxfit.data import permutation
from onnxfit.errors import DataError, SettingError
from tests.data.kinds import make, spec, threads, whole
from tests.models import convolutional

Image = pytest.importorskip("PIL.Image")


COLOURS = {"cat": (200, 0, 100), "dog": (0, 255, 51)}


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Four of cats, two of dogs, each of one colour, the first channel of which tells them apart."""
    root = tmp_path / "pictures"
    for name, number in (("dog", 2), ("cat", 4)):
        (root / name / "more").mkdir(parents=True)
        for i in range(number):
            folder = root / name / "more" if i == 0 else root / name
            red, green, blue = COLOURS[name]
            Image.new("RGB", (5 + i, 9), (red + i, green, blue)).save(
                folder / (f"{i}.PNG" if i else "0.bmp")
            )
    (root / "cat" / "notes.txt").write_text("no image")
    (root / "cat" / ".hidden.png").write_text("no image")
    (root / ".cache").mkdir()
    (root / "beside.png").write_text("no image")
    return root


def test_folders_are_classes_and_images_nchw(pictures: Path) -> None:
    loader = onnxfit.ImageFolder(pictures, (3, 2), batch_size=4, shuffle=False)
    assert loader.classes == ("cat", "dog")
    assert loader.labels.tolist() == [0, 0, 0, 0, 1, 1]
    assert [file.name for file in loader.files] == [
        "1.PNG",
        "2.PNG",
        "3.PNG",
        "0.bmp",
        "1.PNG",
        "0.bmp",
    ]
    (x, y), (_, second) = loader
    assert (x.shape, x.dtype, y.dtype) == ((4, 3, 3, 2), np.float32, np.int64)
    assert (y.tolist(), second.tolist()) == ([0] * 4, [1] * 2)
    np.testing.assert_allclose(x[0, :, 1, 1], np.array([201, 0, 100]) / 255, rtol=1e-6)
    assert not threads()


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_may_come_last(pictures: Path, channels: int) -> None:
    settings = {"channels": channels, "mean": 0.3, "std": 0.2, "batch_size": 4, "augment": "flip"}
    (first, labels), _ = onnxfit.ImageFolder(pictures, (3, 2), **settings)
    last = onnxfit.ImageFolder(pictures, (3, 2), channels_last=True, **settings)
    (images, same_labels), _ = last
    assert images.shape == (4, 3, 2, channels)
    assert np.array_equal(images, first.transpose(0, 2, 3, 1))
    assert np.array_equal(labels, same_labels)
    training, validation = last.split(0.5)
    assert (
        next(iter(training))[0].shape[1:] == next(iter(validation))[0].shape[1:] == (3, 2, channels)
    )


@pytest.mark.parametrize("channels_last", [False, True])
def test_channels_on_another_axis_than_the_models_are_named(
    pictures: Path, channels_last: bool
) -> None:
    shape = [3, 4, 5] if channels_last else [4, 5, 3]
    sizes = ", ".join(map(str, shape))
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[N, {sizes}] x) => (float[N, {sizes}] y) <float[1] w = {{1}}> {{ y = Mul(x, w) }}""")
    images = onnxfit.ImageFolder(pictures, (4, 5), channels_last=channels_last, prefetch=0)
    with pytest.raises(DataError, match=rf"channels_last={not channels_last}\)"):
        onnxfit.Trainer(model, ["w"], loss="mse").predict(images)
    images = onnxfit.ImageFolder(pictures, (4, 5), channels_last=not channels_last, prefetch=0)
    assert onnxfit.Trainer(model, ["w"], loss="mse").predict(images).shape == (6, *shape)
    with pytest.raises(DataError, match=r"The first dimension is the batch\."):
        onnxfit.Trainer(model, ["w"], loss="mse").predict(np.ones((2, 4, 4, 4), np.float32))


def test_images_of_their_own_size_are_their_values(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)
    Image.fromarray(values).save(tmp_path / "0.png")
    mean, std = np.array([0.1, 0.2, 0.3], np.float32), np.array([0.5, 1, 2], np.float32)
    ((x,),) = onnxfit.ImageFolder(tmp_path, (4, 6), mean=mean.tolist(), std=std.tolist())
    np.testing.assert_allclose(
        x[0], ((values / 255.0 - mean) / std).transpose(2, 0, 1), rtol=1e-5, atol=1e-6
    )
    ((raw,),) = onnxfit.ImageFolder(tmp_path, (4, 6), std=1 / 255)
    np.testing.assert_allclose(raw[0], values.transpose(2, 0, 1), rtol=1e-6)
    ((grey,),) = onnxfit.ImageFolder(tmp_path, (4, 6), channels=1)
    np.testing.assert_allclose(grey[0, 0] * 255, values @ [0.299, 0.587, 0.114], atol=1)
    ((alpha,),) = onnxfit.ImageFolder(tmp_path, (4, 6), channels=4)
    assert alpha.shape == (1, 4, 4, 6)
    np.testing.assert_array_equal(alpha[0, 3], 1)


def test_only_images_of_the_formats_that_are_listed_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow gives PostScript to Ghostscript, a program that runs it, whatever the file's name."""
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **settings: pytest.fail(f"{args}"))
    monkeypatch.setattr(subprocess, "check_call", lambda *args, **settings: pytest.fail(f"{args}"))
    header = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n"
    (tmp_path / "1.png").write_bytes(header + b"showpage\n")
    with pytest.raises(DataError, match="cannot identify"):
        next(onnxfit.ImageFolder(tmp_path, (8, 8), prefetch=0).batches(0, 0, None))


# Pillow 12 writes YCbCr to an uncompressed TIFF and reads four bytes of each pixel instead of three
NEEDS_PILLOW_13 = pytest.mark.skipif(
    Version(importlib.metadata.version("pillow")) < Version("13"),
    reason="Pillow does not read what it writes",
)


@pytest.mark.parametrize(
    "mode",
    ["1", "L", "LA", "P", "RGBA", "CMYK", pytest.param("YCbCr", marks=NEEDS_PILLOW_13)],
)
def test_images_of_every_mode_are_converted(mode: str, tmp_path: Path) -> None:
    image = Image.new("RGB", (3, 3), (255, 255, 255)).convert(mode)
    settings = {"transparency": bytes([0] * 10)} if mode == "P" else {}
    image.save(tmp_path / ("0.tif" if mode in ("CMYK", "YCbCr") else "0.png"), **settings)
    for channels in (1, 3):
        ((x,),) = onnxfit.ImageFolder(tmp_path, (3, 3), channels=channels)
        np.testing.assert_allclose(x, np.ones((1, channels, 3, 3)), atol=0.01)


def test_a_cropped_image_keeps_its_proportions(tmp_path: Path) -> None:
    values = np.zeros((10, 30), np.uint8)
    values[:, 10:20] = 255  # the middle third
    Image.fromarray(values).save(tmp_path / "0.png")
    ((cropped,),) = onnxfit.ImageFolder(tmp_path, (5, 5), channels=1, crop=True)
    np.testing.assert_allclose(cropped, 1, atol=0.13)  # the filter sees a little beyond the edge
    ((squeezed,),) = onnxfit.ImageFolder(tmp_path, (5, 5), channels=1)
    assert squeezed[0, 0, 0, 0] == 0
    ((wide,),) = onnxfit.ImageFolder(tmp_path, (2, 6), channels=1)
    np.testing.assert_allclose(wide[0, 0], np.tile([0, 0, 1, 1, 0, 0], (2, 1)), atol=0.3)


def test_images_are_shuffled_by_seed_and_epoch_and_predicted_in_order(pictures: Path) -> None:
    loader = onnxfit.ImageFolder(pictures, (2, 2), batch_size=4, seed=3)
    plain = np.concatenate([x for x, _ in onnxfit.ImageFolder(pictures, (2, 2), shuffle=False)])
    for epoch in range(2):
        x, y = (np.concatenate(part) for part in zip(*loader))
        order = permutation(3, epoch, 6)
        np.testing.assert_array_equal(x, plain[order])
        np.testing.assert_array_equal(y, loader.labels[order])
    with make(loader, inputs=[spec("x", "N", 3, 2, 2)], targets={}, purpose="prediction") as data:
        np.testing.assert_array_equal(whole(data)["x"], plain)


def test_classes_may_be_chosen_and_ordered(pictures: Path) -> None:
    (pictures / "bird").mkdir()
    assert onnxfit.ImageFolder(pictures, (2, 2)).labels.tolist() == [
        1,
        1,
        1,
        1,
        2,
        2,
    ], "a folder without images has its number"
    chosen = onnxfit.ImageFolder(pictures, (2, 2), classes=["dog", "cat"])
    assert chosen.classes == ("dog", "cat")
    assert chosen.labels.tolist() == [0, 0, 1, 1, 1, 1]
    with pytest.raises(
        DataError, match=r"has no folder 'fish'\. Its folders are 'bird', 'cat', 'dog'\."
    ):
        onnxfit.ImageFolder(pictures, (2, 2), classes=["cat", "fish"])


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_image_that_cannot_be_decoded_is_named(pictures: Path, prefetch: int) -> None:
    def fails(message: str) -> None:
        with pytest.raises(DataError, match=message):
            list(onnxfit.ImageFolder(pictures, (2, 2), prefetch=prefetch))
        images = make(
            onnxfit.ImageFolder(pictures, (2, 2), prefetch=prefetch),
            inputs=[spec("x", "N", 3, 2, 2)],
        )
        with images as data, pytest.raises(DataError, match=message):
            list(data.batches(0))
        assert not threads()

    broken = pictures / "cat" / "1.PNG"
    whole_file = broken.read_bytes()
    broken.write_bytes(whole_file[:-25])
    fails(r"1\.PNG' cannot be read as an image: .*trunc")
    broken.write_bytes(b"text")
    fails(r"1\.PNG' cannot be read as an image: cannot identify")
    Image.fromarray(np.full((2, 2), 60000, np.uint16)).save(broken, "png")
    fails(r"has more than 8 bits per channel \(mode I")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 3}, r"\(height, width\), got 3\."),
        ({"size": (3, 0)}, r"1, got \(3, 0\)"),
        ({"channels": 2}, r"channels to be 1.* got 2"),
        ({"std": 0}, "std > 0, got 0"),
        ({"mean": (1, 2)}, r"mean to be a number, or 3 numbers, one per channel, got \(1, 2\)"),
        ({"std": float("nan")}, "std to be a number"),
        ({"batch_size": 0}, "batch_size must be >= 1"),
    ],
)
def test_impossible_settings_of_images(
    pictures: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        onnxfit.ImageFolder(pictures, **{"size": (2, 2), **settings})


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no images\. Images end in \.bmp"):
        onnxfit.ImageFolder(tmp_path, (2, 2))
    with pytest.raises(DataError, match=r"nowhere' cannot be read"):
        onnxfit.ImageFolder(tmp_path / "nowhere", (2, 2))


def test_a_network_learns_images_from_a_folder(pictures: Path) -> None:
    trainer = onnxfit.Trainer(
        convolutional(),
        loss="cross_entropy",
        optimizer=onnxfit.optimizers.Adam(learning_rate=0.01),
        metrics=["accuracy"],
    )
    loader = onnxfit.ImageFolder(pictures, (8, 8), channels=1, batch_size=3)
    trainer.fit(loader, epochs=20, verbose=0)
    x, y = (
        np.concatenate(part)
        for part in zip(*onnxfit.ImageFolder(pictures, (8, 8), channels=1, shuffle=False))
    )
    assert trainer.evaluate(loader) == pytest.approx(trainer.evaluate(x, y, batch_size=3))
    np.testing.assert_allclose(trainer.predict(loader), trainer.predict(x), rtol=1e-5, atol=1e-6)
    assert trainer.evaluate(loader)["accuracy"] == 1
