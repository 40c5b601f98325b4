"""Folders of images, one folder a class, in batches that are decoded when they come."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxfit.data.batch import Array
from onnxfit.data.loader import Loader
from onnxfit.data.optional import optional
from onnxfit.data.order import batch_indices
from onnxfit.errors import DataError, SettingError

SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)
MODES = {1: "L", 3: "RGB", 4: "RGBA"}


class ImageFolder(Loader):
    """The images of a folder, each in the folder of its class: `root/cat/1.png` is of class "cat".

    - Batches are `(x, y)`: x float32 of shape `(batch, channels, height, width)`, $(v / 255 - mean)
      / std$ for values $v$ from 0 to 255; y int64 of shape `(batch,)`, the place of the class in
      `classes`. A root without folders gives `(x,)`, its own images.
    - `size`: (height, width), to which images are scaled, bilinearly. `crop=True` cuts the middle
      out, so that nothing is distorted.
    - `channels`: 1 (grey), 3 (RGB) or 4 (RGBA), to which images are converted.
    - `mean`, `std`: one number, or one for each channel.
    - `classes`: the folders to take, in the order that numbers them. By default all of them,
      sorted.
    - `batch_size`, `shuffle`, `seed`, `drop_last`, `prefetch`: as in `DataLoader`; two batches are
      decoded ahead.

    Images are found in folders of folders, too, by their suffix; what begins with a dot is passed
    over. `files` lists them.

    DataError: no images; while batches are made, an image that cannot be decoded, or has more than
    8 bits a channel, by its name. SettingError: an impossible setting. InstallationError: Pillow is
    missing.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        size: tuple[int, int],
        *,
        channels: int = 3,
        mean: float | Sequence[float] = 0.0,
        std: float | Sequence[float] = 1.0,
        crop: bool = False,
        classes: Sequence[str] | None = None,
        batch_size: int = 32,
        shuffle: bool = True,
        seed: int | None = None,
        drop_last: bool = False,
        prefetch: int = 2,
    ) -> None:
        optional("PIL.Image", "images", "Pillow")
        if channels not in MODES:
            raise SettingError(
                f"ImageFolder needs channels 1 (grey), 3 (RGB) or 4 (RGBA), got {channels}."
            )
        self.size = _checked_size(size)
        self.channels = channels
        self.crop = bool(crop)
        self._mean, self._std = (
            _per_channel(name, value, channels) for name, value in (("mean", mean), ("std", std))
        )
        if not np.all(self._std > 0):
            raise SettingError(f"ImageFolder needs std > 0, got {std}.")
        self.root = Path(root)
        found = sorted(
            path.name
            for path in self.root.iterdir()
            if path.is_dir() and not path.name.startswith(".")
        )
        self.classes = tuple(found if classes is None else classes)
        missing = [name for name in self.classes if name not in found]
        if missing:
            raise DataError(
                f"{str(self.root)!r} has no folder {', '.join(map(repr, missing))}; there are"
                f" {', '.join(map(repr, found))}."
            )
        folders = [(self.root / name, number) for number, name in enumerate(self.classes)]
        labelled = [
            (path, label)
            for folder, label in folders
            for path in _images(folder, folder.rglob("*"))
        ]
        self.labels = np.array([label for _, label in labelled], np.int64)
        self.files = (
            [path for path, _ in labelled] if folders else _images(self.root, self.root.iterdir())
        )
        if not self.files:
            raise DataError(f"{str(self.root)!r} has no images ({', '.join(sorted(SUFFIXES))}).")
        super().__init__(len(self.files), batch_size, shuffle, seed, drop_last, prefetch)

    def batches(self, epoch: int, skip: int, seed: int | None) -> Iterator[tuple[Any, ...]]:
        for index in batch_indices(self.rows, self.batch_size, len(self), seed, epoch, skip):
            rows = np.arange(self.rows)[index]
            x = np.stack([self._read(self.files[row]) for row in rows])
            yield (x, self.labels[rows]) if self.classes else (x,)

    def _read(self, path: Path) -> Array:
        """One image of shape `(channels, height, width)`."""
        image_module, operations = (
            optional("PIL.Image", "images", "Pillow"),
            optional("PIL.ImageOps", "images", "Pillow"),
        )
        try:
            with image_module.open(path) as file:
                # a palette may hold transparent colours
                image = file.convert("RGBA") if file.mode == "P" else file
                if image.mode[0] in "IF":
                    raise DataError(
                        f"{str(path)!r} has more than 8 bits a channel (mode {image.mode}): convert"
                        " it first."
                    )
                image = image.convert(MODES[self.channels])
        except DataError:
            raise
        except Exception as error:  # each format's decoder raises its own
            raise DataError(f"{str(path)!r} cannot be read as an image: {error}") from error
        width_and_height = self.size[::-1]
        bilinear = image_module.Resampling.BILINEAR
        image = (
            operations.fit(image, width_and_height, bilinear)
            if self.crop
            else image.resize(width_and_height, bilinear)
        )
        values = np.asarray(image, np.float32).reshape(*self.size, self.channels).transpose(2, 0, 1)
        scaled: Array = (values / np.float32(255) - self._mean) / self._std
        return scaled


def _images(root: Path, paths: Iterator[Path]) -> list[Path]:
    """Images in the order of their names, none of them hidden below `root`."""
    return sorted(
        path
        for path in paths
        if path.suffix.lower() in SUFFIXES
        and not any(part.startswith(".") for part in path.relative_to(root).parts)
    )


def _checked_size(size: tuple[int, int]) -> tuple[int, int]:
    try:
        height, width = map(operator.index, size)
    except (TypeError, ValueError):
        raise SettingError(f"ImageFolder needs size=(height, width), got {size!r}.") from None
    if min(height, width) < 1:
        raise SettingError(f"ImageFolder needs a height and width of at least 1, got {size!r}.")
    return height, width


def _per_channel(name: str, value: float | Sequence[float], channels: int) -> Array:
    """Of shape `(channels, 1, 1)`."""
    numbers = np.asarray(value, np.float32)
    if numbers.shape not in ((), (1,), (channels,)) or not np.isfinite(numbers).all():
        raise SettingError(
            f"ImageFolder needs {name} to be a number, or one for each of {channels} channels, got"
            f" {value}."
        )
    return np.broadcast_to(numbers, channels).reshape(channels, 1, 1)
