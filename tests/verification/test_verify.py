"""A file trained by `fit` is the same, bit for bit, when its lineage is trained again."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxfit
from onnxfit import LoRA, Trainer, verify
from onnxfit.callbacks import (
    BatchSizeFinder,
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateScheduler,
    ModelCheckpoint,
    ReduceLROnPlateau,
    TerminateOnNaN,
)
from onnxfit.data import DataLoader, ImageFolder
from onnxfit.errors import CheckpointError, OnnxfitError, UnknownNameError
from onnxfit.load.trainable import fingerprint
from onnxfit.optimizers import SGD, Adam
from onnxfit.schedules import Exponential
from onnxfit.training.lineage import KEY
from tests.models import convolutional, mlp, two_inputs

RNG = np.random.default_rng(0)
X = RNG.normal(size=(22, 4)).astype(np.float32)
Y = RNG.normal(size=(22, 3)).astype(np.float32)
CLASSES = RNG.integers(0, 3, 22)
IMAGES = RNG.normal(size=(22, 1, 8, 8)).astype(np.float32)
BACKENDS = ("full", "forward_backward", "in_place")
Fit = Callable[[Trainer], Any]


class Dies(Callback):
    """Saves and raises after a batch of an epoch, or after the epoch."""

    phase = "checkpoint"

    def __init__(self, path: Path, epoch: int, batch: int | None) -> None:
        self.path, self.at, self.epoch = path, (epoch, batch), 0

    def on_epoch_begin(self, epoch: int, logs: Any) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        if (self.epoch, batch) == self.at:
            self.trainer.save(self.path)
            raise InterruptedError

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        if (epoch, None) == self.at:
            self.trainer.save(self.path)
            raise InterruptedError


class Restores(Callback):
    """Goes back to the weights of epoch 1 after epoch 2, and sets a rate in the middle of one."""

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        if batch == 2:
            self.trainer.learning_rate *= 0.5

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        if epoch == 1:
            self.weights = self.trainer.get_weights()
        if epoch == 2:
            self.trainer.set_weights(self.weights)


class Stops(Callback):
    """Stops in the middle of an epoch and of a window."""

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        if self.trainer.global_batch == 9:
            self.trainer.stop_training = True


class Freezes(Callback):
    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self.trainer.frozen = ["fc0.*"] if batch % 2 else ()


def fit(**arguments: Any) -> Fit:
    callbacks = arguments.pop("callbacks", lambda: [])
    defaults = {"epochs": 3, "batch_size": 4, "verbose": 0}
    return lambda trainer: trainer.fit(X, Y, callbacks=callbacks(), **{**defaults, **arguments})


def several(trainer: Trainer) -> None:
    trainer.fit(X, Y, epochs=2, batch_size=4, verbose=0)
    trainer.learning_rate = 0.003
    trainer.fit(X, Y, epochs=1, batch_size=5, shuffle=False, verbose=0)
    trainer.frozen = ["fc1.*"]
    trainer.fit(X, Y, epochs=4, initial_epoch=2, batch_size=7, verbose=0)
    trainer.frozen = ()


def loader(trainer: Trainer) -> None:
    data = DataLoader(X, Y, batch_size=4, seed=9, drop_last=True, prefetch=2)
    trainer.fit(data, epochs=2, verbose=0)


FITS: dict[str, Fit] = {
    "plain": fit(),
    "order": fit(shuffle=False),
    "validation split": fit(validation_split=0.3, callbacks=lambda: [EarlyStopping(patience=1)]),
    "validation data": fit(validation_data=(X, Y)),
    "steps": fit(steps_per_epoch=4, epochs=4),
    "weights of rows": lambda t: t.fit(X, Y, np.linspace(0, 2, 22), epochs=2, verbose=0),
    "best weights": fit(
        epochs=9,
        validation_split=0.5,
        callbacks=lambda: [EarlyStopping(patience=2, restore_best_weights=True)],
    ),
    "plateau": fit(
        epochs=9, callbacks=lambda: [ReduceLROnPlateau("loss", patience=1, min_delta=0.05)]
    ),
    "scheduler": fit(callbacks=lambda: [LearningRateScheduler(lambda e: 0.1 / (e + 1))]),
    "finder": fit(callbacks=lambda: [LearningRateFinder()]),
    "own callback": fit(epochs=5, callbacks=lambda: [Restores()]),
    "freezing": fit(callbacks=lambda: [Freezes()]),
    "stop": fit(callbacks=lambda: [EarlyStopping("loss", stopping_threshold=1e9)]),
    "stop in an epoch": fit(callbacks=lambda: [Stops()]),
    "several": several,
    "loader": loader,
}  # fmt: skip


def check(trainer: Trainer, model: Any, tmp_path: Path, **data: Any) -> onnxfit.Verification:
    path = tmp_path / "child.onnx"
    trainer.export(path)
    found = verify(path, model, data.pop("x", X), data.pop("y", Y), verbose=0, **data)
    assert str(found).startswith("same bits"), str(found)
    assert (found.exit_code, found.reasons, found.differences) == (0, (), ())
    assert found.batches == trainer.global_batch
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FITS)
def test_the_same_bits(name: str, backend: str, tmp_path: Path) -> None:
    model = mlp()
    rates = {"freezing": 0.01}
    trainer = Trainer(
        model, loss="mse", optimizer=Adam(rates.get(name, 0.02)), backend=backend, seed=3
    )
    FITS[name](trainer)
    weights = {"sample_weight": np.linspace(0, 2, 22)} if name == "weights of rows" else {}
    check(trainer, model, tmp_path, **weights)


AT = [(0, 0), (0, 5), (1, 2), (1, None), (2, 5), (2, None)]


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("at", AT, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_training_that_was_interrupted(
    backend: str, at: tuple[int, int | None], accumulate: int, tmp_path: Path
) -> None:
    model, path = mlp(), tmp_path / "last.onnxfit"
    optimizer = Adam(Exponential(0.05, decay_steps=4, decay_rate=0.8))
    settings: dict[str, Any] = {"loss": "mse", "optimizer": optimizer, "accumulate": accumulate}
    trainer = Trainer(model, backend=backend, penalty=0.01, clip_norm=1.0, **settings)
    with pytest.raises(InterruptedError):
        trainer.fit(X, Y, epochs=3, batch_size=4, verbose=0, callbacks=[Dies(path, *at)])
    resumed = Trainer.load(path)
    resumed.fit(X, Y, epochs=4, batch_size=4, verbose=0)
    found = check(resumed, model, tmp_path)
    assert len(found.lineage["fits"]) == 1  # as if it had not been interrupted
    # the file of the interrupted training itself, and a fit that begins anew in the same trainer
    check(trainer, model, tmp_path)
    trainer.fit(X, Y, epochs=1, batch_size=4, verbose=0)
    check(trainer, model, tmp_path)


def test_an_export_in_the_middle_of_a_fit(tmp_path: Path) -> None:
    class Exports(Callback):
        phase = "checkpoint"

        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            if self.trainer.global_batch == 9:
                self.trainer.export(tmp_path / "middle.onnx")

    trainer = Trainer(mlp(), loss="mse", optimizer="adam")
    best = ModelCheckpoint(
        tmp_path / "best.onnx", monitor="loss", save_best_only=True, save_weights_only=True
    )
    trainer.fit(X, Y, epochs=3, batch_size=4, verbose=0, callbacks=[Exports(), best])
    for name, batches in (("middle", 9), ("best", 18)):
        found = verify(tmp_path / f"{name}.onnx", mlp(), X, Y, verbose=0)
        assert (found.verdict, found.batches) == ("same bits", batches)


def images(trainer: Trainer) -> None:
    trainer.fit(
        IMAGES, CLASSES, epochs=2, batch_size=5, class_weight={0: 1, 1: 2.5, 2: 0.5}, verbose=0
    )
    trainer.fit(IMAGES, CLASSES, epochs=2, batch_size=5, class_weight="balanced", verbose=0)


SETTINGS: dict[str, dict[str, Any]] = {
    "momentum": {"optimizer": SGD(0.01, momentum=0.9, nesterov=True)},
    "statistics": {"batch_norm": "frozen"},
    "some weights": {"weights": ["fc*", "!*bias"]},
    "metrics": {"metrics": ["accuracy", "auc"]},
    "half": {"precision": "bf16"},
    "adaptive clipping": {"clip_adaptive": 0.01},
    "adapters": {"adapters": LoRA(rank=2, target="fc*")},
    "principal adapters": {"adapters": LoRA(rank=2, target="fc*", init="pissa")},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_bits_of_a_network_with_dropout(name: str, backend: str, tmp_path: Path) -> None:
    model = convolutional(dropout=0.3)
    settings = {"loss": "cross_entropy", "optimizer": "adam", **SETTINGS[name]}
    trainer = Trainer(model, backend=backend, seed=11, **settings)
    images(trainer)
    check(trainer, model, tmp_path, x=IMAGES, y=CLASSES)


@pytest.mark.parametrize("adapters", ["merged", "inputs"])
def test_adapters_of_a_resumed_training(adapters: str, tmp_path: Path) -> None:
    model, path = mlp(), tmp_path / "last.onnxfit"
    trainer = Trainer(model, loss="mse", optimizer="adam", adapters=LoRA(rank=2))
    trainer.fit(X, Y, epochs=2, verbose=0)
    trainer.save(path, adapters_only=True)
    resumed = Trainer.load(path, model_onnx=model)
    resumed.fit(X, Y, epochs=3, verbose=0)
    child = tmp_path / "child.onnx"
    resumed.export(child, adapters=adapters)
    found = verify(child, model, X, Y, verbose=0)
    assert (found.verdict, found.reasons) == ("same bits", ())


def test_quantized_files(tmp_path: Path) -> None:
    model = onnxfit.quantize(mlp(), X)
    trainer = Trainer(model, loss="mse", optimizer="adam")
    trainer.fit(X, Y, epochs=3, batch_size=4, verbose=0)
    check(trainer, model, tmp_path)


def test_a_stop_in_a_window(tmp_path: Path) -> None:
    trainer = Trainer(mlp(), loss="mse", optimizer="adam", accumulate=4)
    trainer.fit(X, Y, epochs=4, batch_size=4, verbose=0, callbacks=[Stops()])
    check(trainer, mlp(), tmp_path)
    trainer.fit(X, Y, epochs=1, batch_size=4, verbose=0)
    check(trainer, mlp(), tmp_path)


def test_averages_and_accumulation_that_changes(tmp_path: Path) -> None:
    trainer = Trainer(mlp(), loss="mse", optimizer=Adam(0.01, ema_momentum=0.9), accumulate=2)
    schedule = GradientAccumulationScheduler({1: 4, 3: 2})
    trainer.fit(X, Y, epochs=4, batch_size=3, verbose=0, callbacks=[schedule])
    trainer.export(tmp_path / "child.onnx", averaged=True)
    assert verify(tmp_path / "child.onnx", mlp(), X, Y, verbose=0).verdict == "same bits"


def test_batch_sizes_that_a_callback_found(tmp_path: Path) -> None:
    trainer = Trainer(mlp(), loss="mse", optimizer="adam")
    trainer.fit(X, Y, epochs=2, verbose=0, callbacks=[BatchSizeFinder(max_trials=2)])
    check(trainer, mlp(), tmp_path)


@pytest.mark.parametrize("row", [2, 10, 20])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_that_were_undone(row: int, accumulate: int, tmp_path: Path) -> None:
    trainer = Trainer(mlp(), loss="mse", optimizer=SGD(0.05), accumulate=accumulate)
    y = Y.copy()
    y[row] = 3e38  # its square is infinite
    trainer.fit(X, y, batch_size=4, shuffle=False, verbose=0, callbacks=[TerminateOnNaN()])
    assert trainer.stop_reason
    check(trainer, mlp(), tmp_path, y=y)


def test_several_data_sets(tmp_path: Path) -> None:
    trainer = Trainer(two_inputs(), loss="mse", optimizer=0.01)
    first = {"left": X[:, :1], "right": X[:, 1:2]}
    second = {"left": X[:, 2:3], "right": X[:, 3:4]}
    trainer.fit(first, Y[:, :1], epochs=2, batch_size=4, verbose=0)
    trainer.fit(second, Y[:, 1:2], epochs=1, batch_size=4, verbose=0)
    check(trainer, two_inputs(), tmp_path, x=second, y=Y[:, 1:2], more_data=[(first, Y[:, :1])])
    found = verify(tmp_path / "child.onnx", two_inputs(), first, Y[:, :1], verbose=0)
    assert found.verdict == "not the same"
    assert found.differences[0].startswith("Fit 2: the array 'left' of the data differs")


def test_files_of_data_and_doubles(tmp_path: Path) -> None:
    """The hashes are those of the numbers that a step reads, wherever they come from."""
    np.save(tmp_path / "x.npy", X.astype(np.float64))
    np.savez(tmp_path / "data.npz", X)
    trainer = Trainer(mlp(), loss="mse", optimizer="adam")
    trainer.fit(str(tmp_path / "x.npy"), Y, epochs=2, batch_size=4, verbose=0)
    check(trainer, mlp(), tmp_path)
    check(trainer, mlp(), tmp_path, x=X.tolist(), y=np.asfortranarray(Y))
    check(trainer, mlp(), tmp_path, x=str(tmp_path / "x.npy"))


def test_a_teacher_and_a_model_for_any_batch(tmp_path: Path) -> None:
    model, teacher = mlp(), mlp((4, 16, 3), seed=1)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 2
    trainer = Trainer(model, loss="mse", optimizer="adam", teacher=teacher, dynamic_batch=True)
    trainer.fit(X, Y, epochs=2, batch_size=4, verbose=0)
    path = tmp_path / "child.onnx"
    trainer.export(path)
    found = verify(path, model, X, Y, verbose=0)
    assert (found.verdict, found.exit_code) == ("not reproducible", 5)
    found = verify(path, model, X, Y, teacher=teacher, verbose=0)
    assert (found.verdict, found.batches) == ("same bits", 12)
    assert found.notes == (
        "The argument teacher was passed: the file does not store its contents.",
    )
    found = verify(path, model, X, Y, teacher=mlp((4, 16, 3), seed=2), verbose=0)
    assert found.differences == ("the teacher is another model.",)


# ------------------------------------------------------------------ what is caught


@pytest.fixture
def child(tmp_path: Path) -> str:
    trainer = Trainer(mlp(), loss="mse", optimizer="adam", seed=3)
    trainer.fit(X, Y, epochs=2, batch_size=4, verbose=0)
    trainer.export(tmp_path / "child.onnx")
    return str(tmp_path / "child.onnx")


def edit_lineage(path: str, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change the record in a file, as somebody who wants to deceive would."""
    model = onnx.load(path)
    entry = next(entry for entry in model.metadata_props if entry.key == KEY)
    lineage = json.loads(entry.value)
    edit(lineage)
    entry.value = json.dumps(lineage)
    onnx.save(model, path)


def edit_weight(path: str) -> None:
    model = onnx.load(path)
    tensor = model.graph.initializer[0]
    array = onnx.numpy_helper.to_array(tensor).copy()
    array.flat[3] = np.nextafter(array.flat[3], np.float32(9))
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    onnx.save(model, path)


def test_changed_rows_are_named(child: str) -> None:
    x = X.copy()
    x[17, 2] = np.nextafter(x[17, 2], np.float32(9))
    found = verify(child, mlp(), x, Y, verbose=0)
    assert (found.verdict, found.exit_code, found.batches) == ("not the same", 4, 0)
    assert found.differences == ("the array 'x' of the data differs in the rows 17.",)
    found = verify(child, mlp(), X[:20], Y[:20], verbose=0)
    assert (
        found.differences[0]
        == "the array 'x' of the data is float32[20, 4], expected float32[22, 4]."
    )
    found = verify(child, mlp(), verbose=0)
    assert found.differences == ("The training needs data, and none was given.",)


def test_another_parent_is_caught(child: str) -> None:
    found = verify(child, mlp(seed=1), X, Y, verbose=0)
    assert found.verdict == "not the same"
    assert found.differences[0].startswith("the parent is another model")


def test_another_seed_is_caught(child: str) -> None:
    found = verify(child, mlp(), X, Y, verbose=0, seed=4)
    assert found.differences == ("the setting seed is 3 in the file, but 4 was passed.",)
    edit_lineage(child, lambda lineage: lineage["settings"].update(seed=4))
    found = verify(child, mlp(), X, Y, verbose=0)
    assert (found.verdict, found.batches) == ("not the same", 12)
    assert found.largest_difference is not None
    assert "the seed" in found.notes[0]


def test_an_edited_weight_is_caught(child: str) -> None:
    edit_weight(child)
    found = verify(child, mlp(), X, Y, verbose=0)
    assert (found.verdict, found.batches) == ("not the same", 0)
    assert found.differences[0].startswith("the nodes or weights of the file were changed")
    # also with the hash of the edited weights
    edit_lineage(child, lambda lineage: lineage.update(model=fingerprint(onnx.load(child))))
    found = verify(child, mlp(), X, Y, verbose=0)
    assert (found.verdict, found.batches) == ("not the same", 12)
    assert found.largest_difference == pytest.approx(0, abs=1e-6)
    assert found.tensor == "fc0.weight"


@pytest.mark.parametrize("device", ["another processor", "threads"])
def test_rounding_of_another_processor(child: str, device: str) -> None:
    """An edit by one unit in the last place is within rounding elsewhere; a large one is not."""
    edit_weight(child)
    edit_lineage(child, lambda lineage: lineage.update(model=fingerprint(onnx.load(child))))
    settings = {}
    if device == "threads":
        settings["threads"] = 2
    else:
        edit_lineage(child, lambda lineage: lineage["environments"][0].update(cores=1000))
    found = verify(child, mlp(), X, Y, verbose=0, **settings)
    assert (found.verdict, found.exit_code) == ("equal within rounding", 3)
    assert 0 < found.largest_difference < found.bound < 1e-4  # type: ignore[operator]
    assert any(device.split()[0] in note or "cores" in note for note in found.notes)
    edit_lineage(child, lambda lineage: lineage["settings"].update(seed=4))
    found = verify(child, mlp(), X, Y, verbose=0, **settings)
    assert found.verdict == "not the same"
    assert found.largest_difference > found.bound  # type: ignore[operator]


def test_weights_from_outside_are_not_reproducible(tmp_path: Path) -> None:
    trainer = Trainer(mlp(), loss="mse", optimizer="adam")
    trainer.train_on_batch(X, Y)
    trainer.set_weights(trainer.get_weights())
    trainer.export(tmp_path / "child.onnx")
    found = verify(tmp_path / "child.onnx", mlp(), X, Y, verbose=0)
    assert (found.verdict, found.exit_code) == ("not reproducible", 5)
    assert [reason.split()[0] for reason in found.reasons] == ["train_on_batch", "set_weights"]


def test_a_file_without_a_lineage(tmp_path: Path) -> None:
    trainer = Trainer(mlp(), loss="mse", optimizer="adam")
    trainer.export(tmp_path / "untrained.onnx")
    trainer.fit(X, Y, epochs=1, verbose=0)
    trainer.export(tmp_path / "child.onnx", lineage=False)
    for name in ("untrained", "child"):
        assert not onnx.load(tmp_path / f"{name}.onnx").metadata_props
        found = verify(tmp_path / f"{name}.onnx", mlp(), X, Y, verbose=0)
        assert found.verdict == "not reproducible"
    # a training of a trained file has a lineage of its own
    trainer.export(tmp_path / "child.onnx")
    second = Trainer(tmp_path / "child.onnx", loss="mse", optimizer="adam")
    second.fit(X, Y, epochs=1, verbose=0)
    check(second, tmp_path / "child.onnx", tmp_path / "second")


def custom(op: Any, y_true: Any, y_pred: Any) -> Any:
    return (y_true - y_pred) * (y_true - y_pred)


def test_code_comes_from_the_caller_only(tmp_path: Path) -> None:
    trainer = Trainer(mlp(), loss=custom, optimizer="adam")
    trainer.fit(X, Y, epochs=2, batch_size=4, verbose=0)
    path = tmp_path / "child.onnx"
    trainer.export(path)
    found = verify(path, mlp(), X, Y, verbose=0)
    assert (found.verdict, found.batches) == ("not reproducible", 0)
    assert found.reasons == ("The argument loss has contents that the file does not store.",)
    assert verify(path, mlp(), X, Y, verbose=0, loss=custom).verdict == "same bits"
    with pytest.raises(UnknownNameError, match="lss"):
        verify(path, mlp(), X, Y, lss=custom)


def test_folders_of_images(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for number, pixels in enumerate(RNG.integers(0, 256, (22, 8, 8)).astype(np.uint8)):
        folder = tmp_path / "images" / "abc"[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        image.fromarray(pixels).save(folder / f"{number:02}.png")

    def images() -> ImageFolder:
        return ImageFolder(tmp_path / "images", (8, 8), channels=1, batch_size=5, augment="flip")

    model = convolutional(dropout=0.3)
    trainer = Trainer(model, loss="cross_entropy", optimizer="adam")
    trainer.fit(images(), epochs=2, verbose=0)
    found = check(trainer, model, tmp_path, x=images(), y=None)
    assert found.reasons == ()
    image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "images" / "b" / "04.png")
    found = verify(tmp_path / "child.onnx", model, images(), verbose=0)
    assert found.differences == ("the array 'files' of the data differs in the rows 9.",)


HOSTILE: list[Any] = [None, -1, 2**70, 1e308, "x", [], {}, [[1, 2, 3, 4]], True, {"a": {}}]


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_lineage_is_refused(child: str, seed: int) -> None:
    """Any value in any place gives a verdict or an error of onnxfit."""
    rng = np.random.default_rng(seed)
    original = onnx.load(child)

    def damage(value: Any) -> None:
        keys = [*value] if isinstance(value, dict) else [*range(len(value))]
        key = keys[rng.integers(len(keys))]
        if isinstance(value[key], (dict, list)) and value[key] and rng.random() < 0.8:
            damage(value[key])
        else:
            value[key] = HOSTILE[rng.integers(len(HOSTILE))]

    for _ in range(30):
        onnx.save(original, child)
        edit_lineage(child, damage)
        with suppress(OnnxfitError):
            assert isinstance(verify(child, mlp(), X, Y, verbose=0), onnxfit.Verification)
    for text in ("", "[", "[]", "1", '{"format": 2}', '{"format": 1}'):
        onnx.save(original, child)
        model = onnx.load(child)
        next(entry for entry in model.metadata_props if entry.key == KEY).value = text
        with pytest.raises(CheckpointError):
            verify(model, mlp(), X, Y)
