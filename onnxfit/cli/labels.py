"""Text labels: their classes are encoded as integers, and named in the file of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from onnxfit.cli.arrays import Data
from onnxfit.errors import DataError, listed_names, warn_user
from onnxfit.graph.class_names import ClassNames, read_class_names, write_class_names
from onnxfit.graph.model import to_ir
from onnxfit.graph.probabilities import decide_logits
from onnxfit.losses import ClassLoss
from onnxfit.step.objectives import LabelTarget, OutputTarget
from onnxfit.trainer import Trainer
from onnxfit.training.training import training_of

Array = npt.NDArray[Any]


def encode_for_training(
    trainer: Trainer, data: Data, validation: Data | None
) -> tuple[ClassNames, Data, Data | None]:
    """Return the classes of text labels, and the data with their indices instead of text.

    The classes are stored in the metadata of the trained model, so that exports and checkpoints
    have them.
    """
    training = training_of(trainer)
    file, targets = training.trainable.file.proto, training.recipe.targets
    stored = read_class_names(file)
    classes = learn_classes(data, targets, stored)
    if classes and not write_class_names(file, {**stored, **classes}):
        names = listed_names(next(iter(classes.values())))
        warn_user(
            "The metadata of the model has an entry 'classes' of another program, which stays. The"
            f" trained model therefore does not name its classes: {names}."
        )
    known = {**stored, **classes}
    encoded = None if validation is None else encode(validation, targets, known)
    return classes, encode(data, targets, known), encoded


def encode_as_stored(trainer: Trainer, data: Data) -> Data:
    """Return data with the indices of the classes that the model's file names."""
    training = training_of(trainer)
    return encode(data, training.recipe.targets, read_class_names(training.trainable.file.proto))


def learn_classes(data: Data, targets: Mapping[str, LabelTarget], stored: ClassNames) -> ClassNames:
    """Return the classes of the text labels of training data, by output.

    The classes are those stored in the file, or else the labels in sorted order, as scikit-learn's
    LabelEncoder numbers them. Stored classes that do not fit the output are not used.

    - `targets`: the outputs with a loss.
    - `stored`: the classes in the metadata of the file.

    DataError: the loss needs numbers, or the output has fewer classes than the labels.
    """
    learned: ClassNames = {}
    for output, labels in _text_labels(data).items():
        target = _output_target(output, targets[output])
        maximum = _number_of_classes(target)
        names = stored.get(output, [])
        if not names or (maximum is not None and len(names) > maximum):
            names = [str(name) for name in np.unique(labels)]
        if maximum is not None and len(names) > maximum:
            raise DataError(
                f"The labels of {output!r} have {len(names)} classes ({listed_names(names)}), but"
                f" the output {target.output} has room for {maximum}. `onnxfit replace-head"
                f" MODEL OUTPUT --classes {len(names)}` writes a model with a new last layer."
            )
        learned[output] = names
    return learned


def encode(data: Data, targets: Mapping[str, LabelTarget], classes: ClassNames) -> Data:
    """Return data whose text labels are replaced by the indices of their classes.

    - `classes`: the classes by output, of the training data or the file.

    DataError: the loss needs numbers, or the classes do not contain a label.
    """
    x, y, weights = data
    codes = {}
    for output, labels in _text_labels(data).items():
        target = _output_target(output, targets[output])
        codes[output] = _codes(output, labels, target, classes.get(output, []))
    return x, y and {**y, **codes}, weights


def _text_labels(data: Data) -> dict[str, Array]:
    return {
        output: labels.astype(np.str_)
        for output, labels in (data[1] or {}).items()
        if labels.dtype.kind in "US"
    }


def _output_target(name: str, target: LabelTarget) -> OutputTarget:
    """Return the target of an output. DataError: the loss declares labels of its own."""
    if isinstance(target, OutputTarget):
        return target
    raise DataError(
        f"The labels {name!r} are text, but their loss declares numbers. Encode the labels as"
        " numbers."
    )


def _number_of_classes(target: OutputTarget) -> int | None:
    """Return how many classes an output can have; None if its shape is unknown.

    DataError: the loss compares numbers.
    """
    loss, shape = target.loss, target.output.shape
    if loss.task == "binary":
        return 2
    if not isinstance(loss, ClassLoss):
        raise DataError(
            f"The labels of {target.output.name!r} are text, but {type(loss).__name__} needs"
            " numbers. Encode the labels as numbers, or choose a loss for classes: --loss"
            " cross_entropy."
        )
    size = None if shape is None else shape[loss.class_axis(len(shape))]
    return max(size, 2) if isinstance(size, int) else None


def _codes(output: str, labels: Array, target: OutputTarget, names: Sequence[str]) -> Array:
    _number_of_classes(target)  # raises the error of a loss that needs numbers
    if not names:
        raise DataError(
            f"The labels of {output!r} are text, but the model does not name its classes. `onnxfit"
            " fit` stores them if it trains on text. Encode the labels as 0, 1, ..."
        )
    index = {name: number for number, name in enumerate(names)}
    found, inverse = np.unique(labels, return_inverse=True)
    unknown = [str(name) for name in found if name not in index]
    if unknown:
        row = int(np.argwhere(labels == unknown[0])[0][0])
        raise DataError(
            f"The label {unknown[0]!r} of {output!r} (row {row}) is none of the {len(names)}"
            f" classes of the model: {listed_names(names, unknown[0])}."
        )
    codes = np.array([index[name] for name in found], np.int64)
    return codes[inverse].reshape(labels.shape)


def predicted_names(
    model: onnx.ModelProto, outputs: Mapping[str, Array], classes: ClassNames
) -> dict[str, Array]:
    """Return the names of the predicted classes of each output that has classes."""
    values = {value.name: value for value in to_ir(model).graph.outputs}
    return {
        name: scores_as_names(
            outputs[name], names, logits=decide_logits(None, values[name], True).logits
        )
        for name, names in classes.items()
    }


def scores_as_names(scores: Array, names: Sequence[str], *, logits: bool) -> npt.NDArray[np.str_]:
    """Return the name of the most probable class instead of the scores of all classes.

    The axis of the classes is axis 1 in an output of rank 4 or more, else the last axis. An output
    with one score has two classes.

    - `scores`: an output.
    - `names`: the names of its classes.
    - `logits`: whether one score is a logit, and not a probability.

    >>> scores_as_names(np.array([[0.1, 0.9], [3, 2]]), ["cat", "dog"], logits=True).tolist()
    ['dog', 'cat']
    """
    axis = 1 if scores.ndim >= 4 else -1
    if scores.ndim < 2 or scores.shape[axis] == 1:
        single = scores if scores.ndim < 2 else scores.squeeze(axis)
        chosen = (single > (0 if logits else 0.5)).astype(np.int64)
    else:
        chosen = scores.argmax(axis)
    if chosen.size and chosen.max() >= len(names):
        raise DataError(
            f"The model predicts class {int(chosen.max())}, but its metadata names only"
            f" {len(names)} classes: {listed_names(names)}."
        )
    return np.array(names, np.str_)[chosen]
