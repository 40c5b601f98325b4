"""Attributes of other libraries' models and trainers, and their equivalents in Trainer."""

from __future__ import annotations

from typing import Any, Generic, TypeVar, overload

from onnxfit.errors import MissingAttributeError, listed_names, nearest_name

_WEIGHTS = "get_weights() returns the weights by name, and set_weights(weights) replaces them."
_STEP = "train_on_batch(x, y) takes one step; fit(x, y) trains."
_FILES = "save(path) and Trainer.load(path) keep the training state, export(path) the model."
_MODE = "There is no mode to set: fit trains; predict and evaluate run in inference mode."
_DEVICE = "Trainer(..., device='cuda') chooses the device."
_EVALUATE = "evaluate(x, y) returns the loss and the metrics."
_CLASSES = "predict(x) returns the outputs; onnxfit.sklearn.OnnxClassifier returns classes."
_COUNT = "summary() counts the weights; sum(w.size for w in get_weights().values()) is the number."
_FROZEN = (
    "frozen = ['encoder.*'] freezes weights by name or pattern, and frozen = [] unfreezes all."
)
_MODEL = "model is the ONNX model, with its nodes, inputs and outputs; settings are the arguments."
_PRECISION = (
    "Trainer(..., precision='bf16') computes a step in half precision; weights stay float32."
)
_SKLEARN = "onnxfit.sklearn.OnnxClassifier and OnnxRegressor have the methods of scikit-learn."
_OPTIMIZER = "Pass Trainer(..., optimizer=...), with a schedule as its learning_rate."
_HOOK = "predict(x) returns the outputs of the model; callbacks are called in fit(callbacks=[...])."
_RATE = "learning_rate is the learning rate of the next update, and can be set."
_DATA = "Pass the data to fit(x, y), evaluate(x, y) and predict(x); they take loaders, too."
_EXPORT = (
    "export(path) writes the trained model; Trainer(path) reads a model, Trainer.load a checkpoint."
)

T = TypeVar("T")

# How similar a name is to that of an attribute to be suggested, and to count as misspelt when it is
# set, from 0 to 1.
SIMILAR = 0.7
MISSPELT = 0.85

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
    **dict.fromkeys(("count_params", "num_parameters", "num_params", "n_params"), _COUNT),
    **dict.fromkeys(("nparams", "param_count", "parameter_count", "size", "numel"), _COUNT),
    **dict.fromkeys(("trainable_variables", "trainable_parameters", "variables"), _WEIGHTS),
    **dict.fromkeys(("non_trainable_weights", "freeze", "unfreeze", "requires_grad_"), _FROZEN),
    **dict.fromkeys(("get_config", "to_json", "to_yaml", "get_layer", "named_modules"), _MODEL),
    **dict.fromkeys(("from_pretrained", "save_pretrained", "load_model", "from_config"), _EXPORT),
    **dict.fromkeys(
        ("load_checkpoint", "load_from_checkpoint", "save_params", "load_params"), _FILES
    ),
    **dict.fromkeys(("half", "bfloat16", "double"), _PRECISION),
    **dict.fromkeys(("get_params", "set_params", "fit_transform", "decision_function"), _SKLEARN),
    **dict.fromkeys(("configure_optimizers", "create_optimizer", "lr_scheduler"), _OPTIMIZER),
    **dict.fromkeys(("register_hook", "register_forward_hook"), _HOOK),
    **dict.fromkeys(("evaluate_generator", "predict_generator", "train_dataloader"), _DATA),
    **dict.fromkeys(("reset_metrics", "add_metric"), "Pass Trainer(..., metrics=[...])."),
    **dict.fromkeys(("add_loss", "loss_fn", "criterion"), "Pass Trainer(..., loss=...)."),
    **dict.fromkeys(("lr", "get_lr", "set_lr", "param_groups"), _RATE),
    "current_epoch": "epoch is the number of the epoch, from 0 on.",
}

# Attribute of an optimizer of another library -> its equivalent in onnxfit
WORDS_OF_OPTIMIZERS = {
    **dict.fromkeys(("get_lr", "set_lr"), _RATE),
    "param_groups": "learning_rates maps each weight to its rate; optimizers.Groups has groups.",
    **dict.fromkeys(("state_dict", "load_state_dict", "get_weights", "variables"), _FILES),
    **dict.fromkeys(("step", "zero_grad", "minimize", "apply_gradients"), _STEP),
    "iterations": "trainer.global_step is the number of updates.",
    "get_config": "settings is the optimizer as it was given, a dataclass.",
}


def missing_attribute(owner: type, name: str) -> MissingAttributeError:
    """Return the error for an attribute that instances of `owner` do not have."""
    message = f"A {owner.__name__} has no attribute {name!r}."
    if name in OTHER_WORDS:
        return MissingAttributeError(f"{message} {OTHER_WORDS[name]}")
    known = [own for own in dir(owner) if not own.startswith("_")]
    near = nearest_name(name, known, cutoff=SIMILAR)
    if near:
        return MissingAttributeError(f"{message} Did you mean {near!r}?")
    related = [own for own in known if _words(own) & _words(name)]
    hint = f" It has {listed_names(related, name)}." if related else ""
    return MissingAttributeError(f"{message}{hint} help({owner.__name__}) lists all attributes.")


def _words(name: str) -> set[str]:
    """Return the words in the name of an attribute, without a plural.

    >>> sorted(_words("num_epochs"))
    ['epoch', 'num']
    """
    return {word.removesuffix("s") for word in name.lower().split("_")}


class CheckedAttributes:
    """Base class whose errors suggest an attribute to use instead of one that does not exist.

    - `_is_complete`: set it to True at the end of the constructor.
    """

    _is_complete = False

    def __getattr__(self, name: str) -> Any:
        """Raise an error that suggests an attribute to use instead of one that does not exist."""
        if name.startswith("_") or hasattr(type(self), name):
            return object.__getattribute__(self, name)  # raises the error of Python or a property
        raise missing_attribute(type(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. Raise an error for the name of another library, or a misspelt one.

        Other names are free for subclasses and callbacks.
        """
        if name not in self.__dict__ and not name.startswith("_") and self._is_complete:
            self._require_no_mistake(name)
        super().__setattr__(name, value)

    def _require_no_mistake(self, name: str) -> None:
        """Raise MissingAttributeError for a new attribute that a user takes for an existing one."""
        owner = type(self)
        if hasattr(owner, name):
            return
        if name in OTHER_WORDS:
            raise missing_attribute(owner, name)
        known = {own for own in (*dir(owner), *vars(self)) if not own.startswith("_")}
        near = nearest_name(name, sorted(known), cutoff=MISSPELT)
        if near:
            raise MissingAttributeError(
                f"Setting {name!r} would change nothing, because a {owner.__name__} has no such"
                f" attribute. Did you mean {near!r}?"
            )


class Delegate(Generic[T]):
    """Attribute of a trainer that an object inside of its `_training` stores.

    - `path`: the attributes that lead from `_training` to the value, such as "state", "epoch".
    """

    def __init__(self, *path: str) -> None:
        *self._owners, self._name = path

    @overload
    def __get__(self, trainer: None, owner: type) -> Delegate[T]: ...

    @overload
    def __get__(self, trainer: Any, owner: type) -> T: ...

    def __get__(self, trainer: Any, owner: type) -> Delegate[T] | T:
        if trainer is None:
            return self
        value: T = getattr(self._owner(trainer), self._name)
        return value

    def __set__(self, trainer: Any, value: T) -> None:
        setattr(self._owner(trainer), self._name, value)

    def _owner(self, trainer: Any) -> Any:
        owner = trainer._training
        for name in self._owners:
            owner = getattr(owner, name)
        return owner
