"""Folders of images, one folder for each class, decoded batch by batch."""

from __future__ import annotations

import hashlib
import operator
import os
from collections.abc import Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from onnxfit.checks import check_arguments, shortened
from onnxfit.data.adapter import DataAdapter
from onnxfit.data.augmentation import MODES, augmented, get_augmentation, to_picture
from onnxfit.data.batch import Array
from onnxfit.data.content import MAX_HASHED_BYTES, Content, content_of
from onnxfit.data.fingerprint import checksum
from onnxfit.data.loader import Loader
from onnxfit.data.memory import count_training_rows
from onnxfit.data.optional import import_optional
from onnxfit.data.order import permutation
from onnxfit.data.source import Splittable
from onnxfit.errors import DataError, SettingError, listed_names
from onnxfit.files import read_regular_file, require_path, require_regular_file

__all__ = ["ImageFolder"]

SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)
# Pillow's names of the allowed formats. For some other formats Pillow starts external programs.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")


class ImageFolder(Loader, Splittable):
    """Images in batches, from one folder per class: `root/cat/1.png` belongs to class "cat".

    Batches are `(x, y)`. `x` is float32 of shape `(batch, channels, height, width)`, with
    $(v / 255 - mean) / std$ for values $v$ from 0 to 255. `y` is int64 of shape `(batch,)`, the
    index of the class in `classes`. A root without folders gives `(x,)`, the images in the root.

    - `root`: the folder with a folder for each class. Images in subfolders count, too; names that
      begin with a dot are skipped. The content of a file must be BMP, GIF, JPEG, PNG, PPM, TIFF or
      WebP, too, not only its suffix.
    - `size`: (height, width) in pixels, to which images are scaled bilinearly.
    - `channels`: 1 (grey), 3 (RGB) or 4 (RGBA), to which images are converted.
    - `channels_last`: make batches of shape `(batch, height, width, channels)`, which models of
      Keras and TensorFlow expect.
    - `mean`, `std`: a number, or one for each channel, in units of the range [0, 1].
    - `crop`: scale the image and cut out its center, which keeps the proportions. False stretches
      the image to `size`.
    - `augment`: random changes to the images of training; validation, evaluation and prediction
      use the unchanged images. "flip" (left and right), "flip_vertical", "crop" (a part with 0.7
      to 1 of each side), "erase" (a rectangle of random values); a transform of albumentations or
      torchvision; a function that gets an image, uint8 of shape `(height, width, channels)`, and
      returns an image; or a list of these. The changes come before the image is scaled to `size`,
      and may change its size.
    - `classes`: the folders to read, in the order of the class indices. By default all folders,
      sorted by name.
    - `batch_size`: rows of a batch, 1 or more. The last batch may be shorter, unless `drop_last`.
    - `shuffle`: give the images a new order every epoch, which depends on `(seed, epoch)` only.
      Evaluation and prediction keep the order of `files`.
    - `seed`: an integer; None uses the trainer's seed, or 0 without a trainer.
    - `sampling`: the chances of images to be drawn for training, or "balanced", as for
      `DataLoader`.
    - `drop_last`: leave out a last batch that is shorter.
    - `prefetch`: batches that a background thread decodes ahead; 0 for no thread.

    The attribute `files` lists the images, and `labels` has the class index of each image.

    An augmented image depends on the seed, the epoch and its row only. Transforms of albumentations
    get their own random numbers. For transforms of torchvision, and for a function `(image)`, the
    global generators of Python, NumPy and torch are seeded and then restored. With `prefetch`, no
    other thread should use these generators at the same time. A function with two parameters,
    `(image, rng)`, gets a NumPy Generator instead. Results must be uint8, or floats from 0 to 1;
    normalize with `mean` and `std`.

    DataError: there are no images. DataError, while batches are made: an image cannot be decoded,
    has more than 8 bits per channel, or `augment` fails; the message names the file. SettingError:
    a setting is impossible. InstallationError: Pillow is missing.

        pictures = onnxfit.ImageFolder("pictures", (24, 32), mean=0.5, std=0.25, batch_size=16)
        trainer.fit(pictures, epochs=5)
    """

    _reads_share: ClassVar[bool] = True

    @check_arguments
    def __init__(
        self,
        root: str | os.PathLike[str],
        size: tuple[int, int],
        *,
        channels: int = 3,
        channels_last: bool = False,
        mean: float | Sequence[float] = 0.0,
        std: float | Sequence[float] = 1.0,
        crop: bool = False,
        augment: Any = None,
        classes: Sequence[str] | None = None,
        batch_size: int = 32,
        shuffle: bool = True,
        seed: int | None = None,
        sampling: Any = None,
        drop_last: bool = False,
        prefetch: int = 2,
    ) -> None:
        import_optional("PIL.Image", "images", "Pillow")
        if channels not in MODES:
            raise SettingError(
                f"ImageFolder needs channels to be 1 (grey), 3 (RGB) or 4 (RGBA), got {channels}."
            )
        self.size = _checked_size(size)
        self.channels = int(channels)  # turns True into 1
        self.channels_last = bool(channels_last)
        self.crop = bool(crop)
        self._augmentation = None if augment is None else get_augmentation(augment)
        self._trainer_seed = 0
        self._mean = _setting_per_channel("mean", mean, channels)
        self._std = _setting_per_channel("std", std, channels)
        if not np.all(self._std > 0):
            raise SettingError(f"ImageFolder needs std > 0, got {std}.")
        require_path(root)
        self.root = Path(root)
        try:
            folders = sorted(
                path.name
                for path in self.root.iterdir()
                if path.is_dir() and not path.name.startswith(".")
            )
        except OSError as error:
            raise DataError(
                f"The folder {str(self.root)!r} cannot be read: {error.strerror or error}."
            ) from error
        self.classes = tuple(folders if classes is None else classes)
        missing = [name for name in self.classes if name not in folders]
        if missing:
            raise DataError(
                f"{str(self.root)!r} has no folder {', '.join(map(repr, missing))}. Its folders are"
                f" {listed_names(map(repr, folders), missing[0]) or 'none'}."
            )
        self.files, self.labels = self._find_images()
        if not self.files:
            raise DataError(
                f"{str(self.root)!r} has no images. Images end in {', '.join(sorted(SUFFIXES))}."
            )
        super().__init__(len(self.files), batch_size, shuffle, seed, drop_last, prefetch)
        self._set_sampling(sampling, self.labels)

    def fingerprint(self) -> dict[str, Any]:
        root = os.fspath(self.root)  # left out, because it may differ among machines
        names = [os.fspath(path).removeprefix(root) for path in self.files]
        return {"files": checksum(*names), "classes": checksum(*self.classes)}

    def content(self) -> Content | None:
        """Return the hash of the names and bytes of all files; see `Loader.content`."""
        try:
            if sum(path.stat().st_size for path in self.files) > MAX_HASHED_BYTES:
                return None
            digests = np.stack([self._digest(path) for path in self.files])
        except OSError:  # the batch that reads the file reports the error
            return None
        return content_of(len(digests), lambda index: ((("files", digests[index]),), ()))

    def _digest(self, path: Path) -> Array:
        """Return the SHA-256 of a file and of its name below the root."""
        digest = hashlib.sha256(f"{path.relative_to(self.root).as_posix()}\0".encode())
        digest.update(read_regular_file(path))
        return np.frombuffer(digest.digest(), np.uint8)

    def bind(self, adapter: DataAdapter) -> ImageFolder:
        loader = copy(self)
        loader._trainer_seed = adapter.seed
        if adapter.purpose != "training":
            loader._augmentation = None
        return loader

    @check_arguments
    def split(self, fraction: float, seed: int = 0) -> tuple[ImageFolder, ImageFolder]:
        """Return two loaders, for training and for validation, that share no image.

        The validation images are chosen at random, the same fraction of each class. They keep their
        order, and are not augmented. `fit(pictures, validation_split=0.2)` does the same.

        - `fraction`: the fraction of the images used for validation, above 0 and below 1.
        - `seed`: the seed of the random choice.

        SettingError: training or validation would get no image.
        """
        training_rows = count_training_rows(self.rows, fraction)
        # Rows are ordered by class, so equal steps take the same fraction of each class.
        order = np.arange(self.rows)
        for block, label in enumerate(np.unique(self.labels), 1):
            members = np.flatnonzero(self.labels == label)
            order[members] = members[permutation(seed, 0, len(members), block)]
        if not self.classes:
            order = permutation(seed, 0, self.rows)
        counts = np.arange(self.rows + 1) * (self.rows - training_rows) // self.rows
        validates = np.zeros(self.rows, np.bool_)
        validates[order] = np.diff(counts) == 1
        training = self._select(~validates)
        validation = self._select(validates)
        validation._augmentation = validation._chances = None
        validation.shuffle = validation.drop_last = False
        return training, validation

    def _select(self, chosen: Array) -> ImageFolder:
        """Return a loader of the images where `chosen` is True, at the beginning of epoch 0."""
        loader = copy(self)
        loader.files = [file for file, wanted in zip(self.files, chosen) if wanted]
        loader.labels = self.labels[chosen] if self.classes else self.labels
        if self._chances is not None:
            loader._chances = self._chances[chosen]
        loader._reset(len(loader.files))
        return loader

    def _find_images(self) -> tuple[list[Path], Array]:
        """Return the images in the order of their classes, and the class index of each image."""
        if not self.classes:
            return _images(self.root, self.root.iterdir()), np.array([], np.int64)
        files: list[Path] = []
        labels: list[int] = []
        for number, name in enumerate(self.classes):
            folder = self.root / name
            images = _images(folder, folder.rglob("*"))
            files += images
            labels += [number] * len(images)
        return files, np.array(labels, np.int64)

    def batches(self, epoch: int, skip: int, seed: int | None) -> Iterator[tuple[Any, ...]]:
        for index in self._indices(epoch, skip, seed):
            rows = np.arange(self.rows)[self._share.select(index)]
            x = np.stack([self._read(row, epoch) for row in rows])
            yield (x, self.labels[rows]) if self.classes else (x,)

    def _read(self, row: int, epoch: int) -> Array:
        """Return an image as an array of shape `(channels, height, width)`, or channels last."""
        path = self.files[row]
        image = self._decode(path)
        if self._augmentation is not None:
            seed = self._trainer_seed if self.seed is None else self.seed
            array = np.array(image).reshape(image.height, image.width, self.channels)
            image = to_picture(
                augmented(self._augmentation, array, seed, epoch, int(row), str(path))
            )
        width_and_height = self.size[::-1]
        images = import_optional("PIL.Image", "images", "Pillow")
        bilinear = images.Resampling.BILINEAR
        if self.crop:
            operations = import_optional("PIL.ImageOps", "images", "Pillow")
            image = operations.fit(image, width_and_height, bilinear)
        else:
            image = image.resize(width_and_height, bilinear)
        values = np.asarray(image, np.float32).reshape(*self.size, self.channels).transpose(2, 0, 1)
        scaled: Array = (values / np.float32(255) - self._mean) / self._std
        return scaled.transpose(1, 2, 0) if self.channels_last else scaled

    def _decode(self, path: Path) -> Any:
        """Return a file's image as a Pillow image with the loader's number of channels."""
        images = import_optional("PIL.Image", "images", "Pillow")
        try:
            require_regular_file(path)
            with images.open(path, formats=FORMATS) as file:
                # A palette may have transparent colours.
                image = file.convert("RGBA") if file.mode == "P" else file
                if image.mode[0] in "IF":
                    raise DataError(
                        f"{str(path)!r} has more than 8 bits per channel (mode {image.mode})."
                        " Convert the image to 8 bits per channel first."
                    )
                return image.convert(MODES[self.channels])
        except DataError:
            raise
        except Exception as error:  # each format's decoder raises its own errors
            raise DataError(f"{str(path)!r} cannot be read as an image: {error}") from error


def _images(root: Path, paths: Iterator[Path]) -> list[Path]:
    """Return the images in the order of their names, without hidden files and folders."""
    return sorted(
        path
        for path in paths
        if path.suffix.lower() in SUFFIXES
        and not any(name.startswith(".") for name in path.relative_to(root).parts)
    )


def _checked_size(size: tuple[int, int]) -> tuple[int, int]:
    try:
        height, width = map(operator.index, size)
    except (TypeError, ValueError):
        raise SettingError(f"ImageFolder needs size to be (height, width), got {size!r}.") from None
    if min(height, width) < 1:
        raise SettingError(f"ImageFolder needs size with a height and width >= 1, got {size!r}.")
    return height, width


def _setting_per_channel(name: str, value: float | Sequence[float], channels: int) -> Array:
    """Return a setting as an array of shape `(channels, 1, 1)`. SettingError: it does not fit."""
    try:
        numbers = np.asarray(value, np.float32)
    except OverflowError:
        numbers = np.array([np.nan])
    if numbers.shape not in ((), (1,), (channels,)) or not np.isfinite(numbers).all():
        raise SettingError(
            f"ImageFolder needs {name} to be a number, or {channels} numbers, one per channel, got"
            f" {shortened(value)}."
        )
    return np.broadcast_to(numbers, channels).reshape(channels, 1, 1)
