"""Attributes of other libraries' models and trainers, and their equivalents in Trainer."""

from __future__ import annotations

from onnxfit.errors import MissingAttributeError, listed_names, nearest_name

_WEIGHTS = "get_weights() returns the weights by name, and set_weights(weights) replaces them."
_STEP = "train_on_batch(x, y) takes one step; fit(x, y) trains."
_FILES = "save(path) and Trainer.load(path) keep the training state, export(path) the model."
_MODE = "There is no mode to set: fit trains; predict and evaluate run in inference mode."
_DEVICE = "Trainer(..., device='cuda') chooses the device."
_EVALUATE = "evaluate(x, y) returns the loss and the metrics."
_CLASSES = "predict(x) returns the outputs; onnxfit.sklearn.OnnxClassifier returns classes."

# Attribute of a model or trainer of another library -> its equivalent in onnxfit
OTHER_WORDS = {
    **dict.fromkeys(("parameters", "named_parameters", "weights", "trainable_weights"), _WEIGHTS),
    **dict.fromkeys(("layers", "state_dict", "load_state_dict", "coef_"), _WEIGHTS),
    **dict.fromkeys(("step", "zero_grad", "training_step", "partial_fit"), _STEP),
    **dict.fromkeys(("train", "fit_generator"), _STEP),
    **dict.fromkeys(("eval", "training", "trainable"), _MODE),
    **dict.fromkeys(("load_weights", "save_weights", "save_model", "save_checkpoint"), _FILES),
    **dict.fromkeys(("to", "cuda", "cpu"), _DEVICE),
    **dict.fromkeys(("score", "test", "validate"), _EVALUATE),
    **dict.fromkeys(("predict_proba", "predict_classes", "transform"), _CLASSES),
    "add_callback": "fit(x, y, callbacks=[...]) takes the callbacks.",
    "callbacks": "fit(x, y, callbacks=[...]) takes the callbacks.",
    "compile": "Pass its arguments to Trainer(model, loss=..., optimizer=..., metrics=...).",
    "lr": "learning_rate is the learning rate of the next update, and can be set.",
}


def missing_attribute(owner: type, name: str) -> MissingAttributeError:
    """Return the error for an attribute that instances of `owner` do not have."""
    message = f"A {owner.__name__} has no attribute {name!r}."
    if name in OTHER_WORDS:
        return MissingAttributeError(f"{message} {OTHER_WORDS[name]}")
    known = [own for own in dir(owner) if not own.startswith("_")]
    near = nearest_name(name, known, cutoff=0.6)
    if near:
        message += f" Did you mean {near!r}?"
    return MissingAttributeError(f"{message} It has {listed_names(known, name)}.")
