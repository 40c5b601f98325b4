"""Random changes to the images of a training epoch, by a library or by built-in functions.

Every image gets its own random generator, derived from the seed, the epoch and its row. A resumed
fit therefore sees the same images as an uninterrupted fit.
"""

from __future__ import annotations

import inspect
import math
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from onnxfit.checks import shortened
from onnxfit.data.batch import Array
from onnxfit.data.optional import import_optional
from onnxfit.errors import DataError, SettingError, UnknownNameError

# An augmentation of uint8 images (height, width, channels). The type of its generator is a string,
# because NumPy imports its module of random numbers only when it is first used.
Augmentation = Callable[[Array, "np.random.Generator"], Any]

LEAST_SIDE = 0.7  # of a cropped image, as a fraction of the original side
# of a rectangle that `erase` fills: its share of the area, its greatest aspect ratio
ERASED_AREA, ERASED_RATIO = (0.02, 1 / 3), 10 / 3
ERASING_ATTEMPTS = 10
STREAM = 1  # separates the random numbers of images from those of the order of rows
MAX_SEED = 2**32
MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # of Pillow, by the number of channels
# Only one thread at a time may seed the generators of the whole process.
_process_generators = threading.Lock()


def get_augmentation(augment: Any) -> Augmentation:
    """Return the function for `augment`, which is a name, a function, a transform or a list.

    SettingError: `augment` is something else.
    """
    if isinstance(augment, str):
        return _augmentation_by_name(augment)
    if isinstance(augment, (list, tuple)):
        return _Sequence([get_augmentation(one) for one in augment])
    if callable(augment) and not isinstance(augment, type):
        modules = {kind.__module__.partition(".")[0] for kind in type(augment).__mro__}
        if "albumentations" in modules:
            return _Albumentations(augment)
        if modules & {"torchvision", "torch"}:
            return _Torchvision(augment)
        return _Function(augment)
    raise SettingError(
        "augment must be a name, a function of an image, a transform of albumentations or"
        f" torchvision, or a list of them, got {shortened(augment)}."
    )


def _augmentation_by_name(name: str) -> Augmentation:
    functions = {"flip": flip, "flip_vertical": flip_vertical, "crop": crop, "erase": erase}
    aliases = {"flip_horizontal": "flip", "random_flip": "flip", "random_crop": "crop"}
    aliases |= {"random_erasing": "erase", "cutout": "erase"}
    key = name.lower().replace("-", "_").replace(" ", "_")
    key = aliases.get(key, key)
    if key not in functions:
        raise UnknownNameError("augmentation", name, functions)
    return functions[key]


def flip(image: Array, rng: np.random.Generator) -> Array:
    """Return the image with left and right exchanged, with probability 1/2."""
    return image[:, ::-1] if rng.random() < 0.5 else image


def flip_vertical(image: Array, rng: np.random.Generator) -> Array:
    """Return the image with top and bottom exchanged, with probability 1/2."""
    return image[::-1] if rng.random() < 0.5 else image


def crop(image: Array, rng: np.random.Generator) -> Array:
    """Return a random part of the image with the same proportions."""
    share = rng.uniform(LEAST_SIDE, 1)
    height, width = (max(1, math.ceil(share * size)) for size in image.shape[:2])
    top = rng.integers(image.shape[0] - height + 1)
    left = rng.integers(image.shape[1] - width + 1)
    return image[top : top + height, left : left + width]


def erase(image: Array, rng: np.random.Generator) -> Array:
    """Return the image with a rectangle of random values, with probability 1/2.

    The rectangle has 2 % to 33 % of the area, and an aspect ratio from 0.3 to 3.3 (Zhong et al.
    2020, arXiv:1708.04896). If none fits in 10 attempts, the image stays.
    """
    if rng.random() >= 0.5:
        return image
    rows, columns = image.shape[:2]
    for _ in range(ERASING_ATTEMPTS):
        area = rng.uniform(*ERASED_AREA) * rows * columns
        ratio = math.exp(rng.uniform(-math.log(ERASED_RATIO), math.log(ERASED_RATIO)))
        height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < height < rows and 0 < width < columns:
            top, left = rng.integers(rows - height + 1), rng.integers(columns - width + 1)
            image = image.copy()
            shape = (height, width, image.shape[2])
            image[top : top + height, left : left + width] = rng.integers(256, size=shape)
            return image
    return image


class _Sequence:
    """Several augmentations, applied one after the other."""

    def __init__(self, augmentations: list[Augmentation]) -> None:
        self.augmentations = augmentations

    def __call__(self, image: Array, rng: np.random.Generator) -> Array:
        for augmentation in self.augmentations:
            image = checked_image(augmentation(image, rng), image.shape[2])
        return image


class _Albumentations:
    """A transform of albumentations, which has its own random generators."""

    def __init__(self, transform: Any) -> None:
        if not hasattr(transform, "set_random_state"):
            raise SettingError(
                "augment needs a newer albumentations, whose transforms have set_random_state: pip"
                " install --upgrade albumentations."
            )
        self.transform = transform

    def __call__(self, image: Array, rng: np.random.Generator) -> Any:
        # set_random_seed would give every transform of a Compose the same random numbers, so that
        # two flips would always happen together.
        self.transform.set_random_state(rng, random.Random(_seed(rng)))
        result = self.transform(image=image)
        return result["image"] if isinstance(result, Mapping) else result


class _Torchvision:
    """A transform of torchvision, which takes a Pillow image as in torchvision's ImageFolder."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __call__(self, image: Array, rng: np.random.Generator) -> Any:
        picture = to_picture(image)
        with _seeded_process(_seed(rng)):
            return self.transform(picture)


class _Function:
    """A function `(image) -> image`, or `(image, rng) -> image` with a NumPy Generator."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # a callable without a signature
            parameters = ()  # type: ignore[assignment]
        required = [
            parameter
            for parameter in parameters
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        if len(required) > 2:
            raise SettingError(
                "augment must be a function that takes (image) or (image, rng), but"
                f" {getattr(function, '__name__', function)!r} takes other arguments. Wrap it in a"
                " function that does."
            )
        self.takes_generator = len(required) == 2

    def __call__(self, image: Array, rng: np.random.Generator) -> Any:
        if self.takes_generator:
            return self.function(image, rng)
        with _seeded_process(_seed(rng)):
            return self.function(image)


def augmented(
    augmentation: Augmentation, image: Array, seed: int, epoch: int, row: int, file: str
) -> Array:
    """Return the augmented image of an epoch, a pure function of seed, epoch and row.

    - `image`: uint8 of shape `(height, width, channels)`.
    - `file`: the name of the image's file, for messages.

    DataError: the augmentation fails, or its result is not an image.
    """
    rng = np.random.default_rng([seed % 2**64, epoch % 2**64, row, STREAM])
    try:
        return checked_image(augmentation(image, rng), image.shape[2])
    except DataError as error:
        raise DataError(f"{error} The image is {file!r}.") from None
    except Exception as error:  # each library raises its own errors
        raise DataError(f"augment failed on {file!r}: {type(error).__name__}: {error}") from error


def checked_image(result: Any, channels: int) -> Array:
    """Return the result of an augmentation as uint8 of shape `(height, width, channels)`."""
    if hasattr(result, "convert"):  # an image of Pillow
        array = np.asarray(result.convert(MODES[channels]))
    elif hasattr(result, "detach"):  # a tensor of torch has its channels first
        array = np.moveaxis(result.detach().numpy(), 0, -1)
    else:
        array = np.asarray(result)
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[2] != channels or not array.size:
        raise DataError(
            f"augment returned an array of shape {array.shape}. Expected an image of shape (height,"
            f" width, {channels})."
        )
    if array.dtype.kind == "f" and array.min() >= 0 and array.max() <= 1:
        array = np.rint(array * 255).astype(np.uint8)
    if array.dtype != np.uint8:
        # A comparison with NaN is False, so NaN fails this check too.
        raise DataError(
            f"augment returned {array.dtype} values from {array.min():g} to {array.max():g}."
            " Expected uint8, or floats from 0 to 1. To normalize images, use ImageFolder(mean=,"
            " std=), which normalizes validation images too."
        )
    return array


def to_picture(image: Array) -> Any:
    """Return an array of shape `(height, width, channels)` as an image of Pillow."""
    images = import_optional("PIL.Image", "images", "Pillow")
    return images.fromarray(np.ascontiguousarray(image[..., 0] if image.shape[2] == 1 else image))


def _seed(rng: np.random.Generator) -> int:
    return int(rng.integers(MAX_SEED))


@contextmanager
def _seeded_process(seed: int) -> Iterator[None]:
    """Seed the generators of Python, NumPy and torch that belong to the process, and restore them
    at the end.
    """
    torch: Any = sys.modules.get("torch")
    with _process_generators:
        python = random.getstate()
        numpy = np.random.get_state()  # noqa: NPY002  users draw from these
        tensors = None if torch is None else torch.get_rng_state()
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        if torch is not None:
            torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002
            if torch is not None:
                torch.set_rng_state(tensors)
