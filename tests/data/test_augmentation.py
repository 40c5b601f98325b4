"""Augmented images, and folders of images that are divided into training and validation."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import onnx.parser
import pytest

import onnxfit
from onnxfit.callbacks import BackupAndRestore, LambdaCallback
from onnxfit.errors import DataError, SettingError, UnknownNameError
from tests.data.kinds import make, spec, whole

Image = pytest.importorskip("PIL.Image")

INPUTS = [spec("x", "N", 3, 8, 8)]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Six and four images of noise, so that every change shows."""
    rng = np.random.default_rng(0)
    root = tmp_path / "pictures"
    for name, count in (("cat", 6), ("dog", 4)):
        (root / name).mkdir(parents=True)
        for i in range(count):
            values = rng.integers(0, 256, (8, 8, 3), np.uint8)
            Image.fromarray(values).save(root / name / f"{i}.png")
    return root


def folder(pictures: Path, **settings) -> onnxfit.ImageFolder:
    defaults = {"shuffle": False, "seed": 3, "prefetch": 0, "batch_size": 4}
    return onnxfit.ImageFolder(pictures, (8, 8), **{**defaults, **settings})


def images(loader: onnxfit.ImageFolder, epoch: int = 0, skip: int = 0) -> np.ndarray:
    return np.concatenate([x for x, _ in loader.batches(epoch, skip, None)])


def dense() -> onnx.ModelProto:
    """y = flatten(x) @ w."""
    return onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        dense (float[N, 1, 8, 8] x) => (float[N, 2] y)
        <float[64, 2] w = {{{", ".join(["0"] * 128)}}}> {{ f = Flatten(x)  y = MatMul(f, w) }}"""
    )


def jitter(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return rng.permuted(image, axis=0)


def global_jitter(image: np.ndarray) -> np.ndarray:
    """A function that draws from the generators of the process."""
    shift = np.random.randint(8) + random.randrange(8)  # noqa: NPY002
    if "torch" in sys.modules:
        shift += int(sys.modules["torch"].randint(8, ()))
    return np.roll(image, shift, axis=1)


@pytest.mark.parametrize("augment", ["flip", ["flip", "crop"], jitter, global_jitter])
def test_images_depend_on_seed_epoch_and_row_alone(augment, pictures: Path) -> None:
    loader = folder(pictures, augment=augment)
    first = images(loader)
    np.random.default_rng(1)
    random.seed(7)
    np.testing.assert_array_equal(images(folder(pictures, augment=augment)), first)
    np.testing.assert_array_equal(images(loader, skip=1), first[4:])
    assert (images(loader, epoch=1) != first).any()
    assert (images(folder(pictures, augment=augment, seed=4)) != first).any()
    assert (first != images(folder(pictures))).any()
    whole_batches = folder(pictures, augment=augment, batch_size=10, prefetch=2)
    np.testing.assert_array_equal(next(iter(whole_batches))[0], first)


def test_the_generators_of_the_process_are_left_alone(pictures: Path) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    images(folder(pictures, augment=global_jitter))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002


def test_flips_exchange_sides(pictures: Path) -> None:
    plain = images(folder(pictures))
    for name, axis in (("flip", 3), ("flip_vertical", 2)):
        changed = images(folder(pictures, augment=name))
        flipped = np.flip(plain, axis)
        kinds = [np.array_equal(x, f) for x, f in zip(changed, flipped)]
        assert 0 < sum(kinds) < len(kinds)
        for x, p, f in zip(changed, plain, flipped):
            assert np.array_equal(x, p) or np.array_equal(x, f)


def test_a_crop_is_a_part_that_is_scaled(tmp_path: Path) -> None:
    rows, columns = np.mgrid[:100, :80]
    Image.fromarray(np.stack([rows, columns, 0 * rows], -1).astype(np.uint8)).save(
        tmp_path / "0.png"
    )
    loader = onnxfit.ImageFolder(tmp_path, (50, 40), std=1 / 255, augment="crop", prefetch=0)
    spans, places = [], []
    for epoch in range(20):
        ((x,),) = loader.batches(epoch, 0, None)
        height = np.ptp(x[0, 0])
        assert 60 <= height <= 100
        assert np.ptp(x[0, 1]) == pytest.approx(0.8 * height, abs=4)  # proportions are kept
        spans.append(height)
        places.append(x[0, 0].min())
    assert np.ptp(spans) > 5
    assert np.ptp(places) > 5


def test_erasing_fills_one_rectangle_with_random_values(tmp_path: Path) -> None:
    Image.fromarray(np.full((60, 50, 3), 100, np.uint8)).save(tmp_path / "0.png")
    loader = onnxfit.ImageFolder(tmp_path, (60, 50), std=1 / 255, augment="erase", prefetch=0)
    areas = []
    for epoch in range(60):
        ((x,),) = loader.batches(epoch, 0, None)
        erased = (np.rint(x[0]) != 100).any(0)
        areas.append(erased.mean())
        if erased.any():
            rows, columns = np.flatnonzero(erased.any(1)), np.flatnonzero(erased.any(0))
            height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
            assert erased.sum() == height * width
            assert 0.25 < height / width < 4
            assert 0.01 < areas[-1] < 0.35
            assert x[0][:, erased].std() > 50
    assert 15 < np.count_nonzero(areas) < 45  # half of them
    np.testing.assert_array_equal(*[next(loader.batches(3, 0, None))[0] for _ in range(2)])


def test_only_training_sees_changes(pictures: Path) -> None:
    loader = folder(pictures, augment="flip", seed=None)
    plain = images(folder(pictures))
    for purpose in ("validation", "evaluation", "prediction"):
        with make(loader, inputs=INPUTS, purpose=purpose) as data:
            np.testing.assert_array_equal(whole(data)["x"], plain)
    with make(loader, inputs=INPUTS, seed=3) as data:  # without a seed, the trainer's counts
        np.testing.assert_array_equal(
            whole(data, 2)["x"], images(folder(pictures, augment="flip"), 2)
        )
    assert (images(loader) != plain).any()  # the caller's loader has its changes still


def test_a_fit_with_augmentation_resumes_exactly(pictures: Path, tmp_path: Path) -> None:
    def trainer() -> onnxfit.Trainer:
        return onnxfit.Trainer(dense(), loss="cross_entropy")

    def loader() -> onnxfit.ImageFolder:
        return folder(pictures, channels=1, augment=["flip", jitter], shuffle=True, batch_size=3)

    def stop(batch: int, logs: object) -> None:
        if killed.global_batch == 6:
            raise KeyboardInterrupt

    whole_run, killed = trainer(), trainer()
    whole_run.fit(loader(), epochs=2, verbose=0)
    backup = BackupAndRestore(str(tmp_path / "backup"), every_n_steps=1)
    with pytest.raises(KeyboardInterrupt):
        killed.fit(
            loader(),
            epochs=2,
            callbacks=[backup, LambdaCallback(on_train_batch_end=stop)],
            verbose=0,
        )
    resumed = trainer()
    resumed.fit(
        loader(),
        epochs=2,
        callbacks=[BackupAndRestore(str(tmp_path / "backup"), every_n_steps=1)],
        verbose=0,
    )
    for name, value in whole_run.get_weights().items():
        np.testing.assert_array_equal(resumed.get_weights()[name], value)


class FakeTransform:
    """Stands for a transform of albumentations."""

    __module__ = "albumentations.core"

    def set_random_state(self, generator, python) -> None:
        self.state = generator, python

    def __call__(self, *, image):
        shift = self.state[0].integers(8) + self.state[1].randrange(8)
        return {"image": np.roll(image, shift, axis=1)}


def test_a_transform_of_albumentations_is_seeded_for_each_image(pictures: Path) -> None:
    loader = folder(pictures, augment=FakeTransform())
    first = images(loader)
    np.testing.assert_array_equal(images(loader, skip=1), first[4:])
    assert (images(loader, epoch=1) != first).any()


def test_albumentations_itself(pictures: Path) -> None:
    library = pytest.importorskip("albumentations")
    transform = library.Compose(
        [
            library.HorizontalFlip(p=0.5),
            library.VerticalFlip(p=0.5),
            library.OneOf([library.GaussNoise(p=1), library.ColorJitter(p=1)], p=0.3),
            library.RandomResizedCrop((6, 6), p=0.3),
        ]
    )
    loader = folder(pictures, augment=transform)
    first = images(loader)
    assert (images(loader, epoch=1) != first).any()
    np.testing.assert_array_equal(images(loader, skip=1), first[4:])
    flips = library.Compose([library.HorizontalFlip(p=0.5), library.VerticalFlip(p=0.5)])
    plain, changed = images(folder(pictures)), images(folder(pictures, augment=flips))
    alone = [
        np.array_equal(x, np.flip(p, 1)) or np.array_equal(x, np.flip(p, 2))
        for x, p in zip(changed, plain)
    ]
    assert any(alone), "transforms of a Compose draw the same numbers"
    grey = folder(pictures, channels=1, augment=flips)
    assert images(grey).shape == (10, 1, 8, 8)


def test_torchvision_itself(pictures: Path) -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    torch = sys.modules["torch"]
    before = torch.get_rng_state()
    for last in ([], [v2.ToImage()], [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]):
        transform = v2.Compose([v2.RandomResizedCrop(6), v2.RandomHorizontalFlip(), *last])
        loader = folder(pictures, augment=transform)
        first = images(loader)
        assert (images(loader, epoch=1) != first).any()
        np.testing.assert_array_equal(images(loader, skip=1), first[4:])
    np.testing.assert_array_equal(torch.get_rng_state(), before)
    plain, changed = (
        images(folder(pictures)),
        images(folder(pictures, augment=v2.RandomHorizontalFlip(1.0))),
    )
    np.testing.assert_array_equal(changed, plain[..., ::-1])
    normalized = v2.Compose(
        [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)]
    )
    with pytest.raises(DataError, match=r"mean=, std="):
        images(folder(pictures, augment=normalized))


def test_floats_and_grey_images_are_accepted(pictures: Path) -> None:
    plain = images(folder(pictures))
    np.testing.assert_array_equal(images(folder(pictures, augment=lambda i: i / 255)), plain)
    grey = images(folder(pictures, channels=1, augment=lambda i: i[..., 0]))
    np.testing.assert_array_equal(grey, images(folder(pictures, channels=1)))


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        (
            lambda image: image[..., :2],
            r"returned an array of shape \(8, 8, 2\)\. Expected.*width, 3\)",
        ),
        (lambda image: image[:0], r"returned an array of shape \(0, 8, 3\)"),
        (lambda image: image * 1.0, r"returned float64 values from 0 to.*mean=, std="),
        (lambda image: image / np.nan, "returned float64 values from nan"),
        (lambda image: image.absent, "augment failed on .*0.png.: AttributeError"),
    ],
)
def test_a_result_that_is_no_image_is_refused(augment, message: str, pictures: Path) -> None:
    with pytest.raises(DataError, match=message) as error:
        images(folder(pictures, augment=augment))
    assert "0.png" in str(error.value)


def test_impossible_augmentations(pictures: Path) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'flip'"):
        folder(pictures, augment="flop")
    for augment in (3, [3], dict):
        with pytest.raises(SettingError, match="augment must be a name, a function"):
            folder(pictures, augment=augment)
    with pytest.raises(SettingError, match=r"\(image\) or \(image, rng\)"):
        folder(pictures, augment=lambda a, b, c: a)


# ---------------------------------------------------------------------- split


def test_a_split_shares_no_image_and_keeps_the_classes(pictures: Path) -> None:
    loader = folder(pictures, augment="flip", shuffle=True, drop_last=True)
    training, validation = loader.split(0.5)
    assert set(training.files) | set(validation.files) == set(loader.files)
    assert len(training.files) + len(validation.files) == 10
    assert np.bincount(validation.labels).tolist() == [3, 2]
    assert validation.files == [f for f in loader.files if f in set(validation.files)]
    for part in (training, validation):
        assert [loader.classes[label] for label in part.labels] == [
            file.parent.name for file in part.files
        ]
    assert (training.rows, len(training), len(validation)) == (5, 1, 2)
    assert (training.shuffle, validation.shuffle) == (True, False)
    plain = images(folder(pictures))
    kept = [loader.files.index(file) for file in validation.files]
    np.testing.assert_array_equal(images(validation), plain[kept])
    assert loader.split(0.5)[1].files == validation.files
    assert loader.split(0.5, seed=1)[1].files != validation.files


@pytest.mark.parametrize(
    ("fraction", "validation"), [(0.05, 1), (0.2, 2), (0.29, 3), (1 / 3, 4), (0.9, 9)]
)
def test_a_split_has_as_many_rows_as_that_of_arrays(
    fraction: float, validation: int, pictures: Path
) -> None:
    training, held_out = folder(pictures).split(fraction)
    assert (training.rows, held_out.rows) == (10 - validation, validation)
    assert abs(np.sum(held_out.labels == 0) - 0.6 * validation) < 1


def test_images_without_classes_are_split(pictures: Path) -> None:
    training, validation = folder(pictures / "cat").split(0.5)
    assert (training.rows, validation.rows, len(validation.labels)) == (3, 3, 0)
    assert not set(training.files) & set(validation.files)


def test_a_fraction_that_leaves_nothing_is_refused(pictures: Path) -> None:
    for fraction in (0, 1, 0.99, -0.5):
        with pytest.raises(SettingError, match="validation_split"):
            folder(pictures).split(fraction)


def test_fit_splits_a_folder(pictures: Path) -> None:
    trainer = onnxfit.Trainer(dense(), loss="cross_entropy")
    loader = folder(pictures, channels=1, augment="flip", shuffle=True)
    history = trainer.fit(loader, validation_split=0.2, verbose=0).history
    assert trainer.samples_seen == 8
    expected = trainer.evaluate(loader.split(0.2)[1])["loss"]
    assert history["val_loss"] == pytest.approx([expected])
    with pytest.raises(SettingError, match="Remove the argument y"):
        trainer.fit(loader, np.zeros(10), validation_split=0.2, verbose=0)
