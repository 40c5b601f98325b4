"""The exceptions of onnxfit.

A message says what happened, what was given, what was expected, and how to fix it.

    OnnxfitError
    ├── ModelError           (ValueError)    the model cannot be read, converted or trained
    │   └── GradientError                    operators on the gradient path have no gradient
    ├── SettingError         (ValueError)    an argument names or sets something impossible
    │   ├── UnknownNameError (KeyError)      a name is unknown; the nearest known one is suggested
    │   └── ArgumentError    (TypeError)     a call has an unknown, surplus or missing argument
    ├── UnsupportedError     (TypeError)     an object does not support an operation
    │   └── MissingAttributeError (AttributeError)  an object lacks an attribute
    ├── DataError            (ValueError)    a batch, a label or a shape does not fit the model
    ├── CheckpointError      (ValueError)    a checkpoint cannot be written or read
    ├── InstallationError    (ImportError, RuntimeError)  a package is missing or lacks a feature
    ├── OutOfMemoryError     (MemoryError)   memory ran out while a model or a state was written
    ├── StepError            (RuntimeError)  onnxruntime failed to compile or run a step
    └── DivergenceError      (RuntimeError)  the loss became NaN or infinite

The classes in brackets are base classes, too, so that `except ValueError` works as expected.
"""

from __future__ import annotations

import difflib
import inspect
import sys
import sysconfig
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = [
    "ArgumentError",
    "CheckpointError",
    "DataError",
    "DivergenceError",
    "GradientError",
    "InstallationError",
    "MissingAttributeError",
    "ModelError",
    "OnnxfitError",
    "OutOfMemoryError",
    "SettingError",
    "StepError",
    "UnknownNameError",
    "UnsupportedError",
]

MAX_NAMES_LISTED = 5  # names that an error lists
# Prefixes of the paths of Python's own modules and of installed packages, such as scikit-learn
LIBRARY_FOLDERS = (
    "<frozen ",
    *{sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")},
)

# Names of arguments in other libraries -> onnxfit's names; the first that exists is suggested
OTHER_NAMES = {
    "accumulate_grad_batches": ("accumulate",),
    "amp": ("precision",),
    "batch": ("batch_size",),
    "bf16": ("precision",),
    "bs": ("batch_size",),
    "criterion": ("loss",),
    "cuda": ("device",),
    "data": ("x",),
    "dirpath": ("filepath", "log_dir"),
    "epsilon": ("eps", "min_delta"),
    "eta": ("learning_rate",),
    "eta0": ("learning_rate",),
    "eval_set": ("validation_data",),
    "dtype_policy": ("precision",),
    "filename": ("filename", "filepath"),
    "fp16": ("precision",),
    "gpu": ("device",),
    "gradient_accumulation_steps": ("accumulate",),
    "gradient_clip_val": ("clip_norm",),
    "clipnorm": ("clip_norm",),
    "global_clipnorm": ("clip_norm",),
    "max_grad_norm": ("clip_norm",),
    "clipvalue": ("clip_value",),
    "clip_factor": ("clip_adaptive",),
    "adaptive_grad_clip": ("clip_adaptive",),
    "adaptive_clip": ("clip_adaptive",),
    "agc": ("clip_adaptive",),
    "inputs": ("x",),
    "labels": ("y",),
    "init_lora_weights": ("init",),
    "learning_rate_init": ("learning_rate",),
    "lora_alpha": ("alpha",),
    "lora_dropout": ("dropout",),
    "loss_fn": ("loss",),
    "lr": ("learning_rate",),
    **dict.fromkeys(
        ("bias_constraint", "constraint", "kernel_constraint", "weight_constraint"),
        ("constraints",),
    ),
    **dict.fromkeys(("lr_mult", "lr_scale"), ("learning_rate_multipliers",)),
    **dict.fromkeys(("no_weight_decay", "no_weight_decay_list"), ("exclude_from_weight_decay",)),
    "max_epochs": ("epochs",),
    "max_iter": ("epochs",),
    "mixed_precision": ("precision",),
    "model": ("model_onnx",),
    "n_iter_no_change": ("patience",),
    "n_jobs": ("threads",),
    "net": ("model_onnx",),
    "objective": ("loss",),
    "path": ("filepath", "log_dir"),
    "period": ("every_n_epochs", "save_freq"),
    "r": ("rank",),
    "random_state": ("seed",),
    "regularizer": ("penalty",),
    "rho": ("rho", "alpha"),
    "target": ("y",),
    "target_modules": ("target",),
    "targets": ("y",),
    "threshold": ("min_delta",),
    "tol": ("min_delta",),
    "use_dora": ("dora",),
    "use_ema": ("ema_momentum",),
    "use_rslora": ("scaling",),
    "val_data": ("validation_data",),
    **dict.fromkeys(("beta_1", "beta_2", "beta1", "beta2"), ("betas",)),
}
# Names of arguments that belong elsewhere -> the place
ELSEWHERE = {
    **dict.fromkeys(
        ("lr", "learning_rate", "momentum", "weight_decay", "constraints", "layer_decay"),
        "It is a setting of the optimizer: Trainer(..., optimizer=Adam(learning_rate=0.001)).",
    ),
    **dict.fromkeys(
        ("loss", "optimizer", "metrics", "loss_weights", "penalty", "accumulate", "seed"),
        "It is a setting of the Trainer: Trainer(model, loss=..., optimizer=..., metrics=...).",
    ),
    **dict.fromkeys(
        ("clipnorm", "clip_norm", "global_clipnorm", "max_grad_norm", "clipvalue", "clip_value"),
        "It is a setting of the Trainer: Trainer(..., clip_norm=...) or Trainer(...,"
        " clip_value=...).",
    ),
    **dict.fromkeys(
        ("epochs", "batch_size", "callbacks", "validation_data", "validation_split", "verbose"),
        "It is an argument of fit: trainer.fit(x, y, ...).",
    ),
    **dict.fromkeys(
        ("workers", "num_workers", "max_queue_size", "use_multiprocessing"),
        "Use onnxfit.Prefetch to prepare batches in the background.",
    ),
    "modules_to_save": "Pass weights to train in addition to adapters: Trainer(..., weights=...).",
    "decay": "To decay the learning rate, pass learning_rate=onnxfit.schedules.InverseTime(...); to"
    " decay the weights, pass weight_decay.",
    "params": "Remove it: the Trainer passes the weights to the optimizer.",
}


class OnnxfitError(Exception):
    """Base class of all exceptions of onnxfit."""


class ModelError(OnnxfitError, ValueError):
    """The model cannot be read, converted or trained."""


class GradientError(ModelError):
    """Operators between the loss and the weights have no gradient; the message lists them."""


class SettingError(OnnxfitError, ValueError):
    """An argument names or sets something impossible."""


class UnknownNameError(SettingError, KeyError):
    """A name is unknown.

    - `kind`: the thing it should name, such as "loss".
    - `given`: the unknown name.
    - `known`: the names that exist; the message suggests the nearest one.
    - `advice`: a sentence that takes the place of the suggestion.

    >>> print(UnknownNameError("loss", "huver", ["mse", "huber"]))
    No loss is called 'huver'. Did you mean 'huber'? Known: huber, mse.
    """

    def __init__(self, kind: str, given: object, known: Iterable[str], advice: str = "") -> None:
        known = sorted(known)
        near = nearest_name(given, known)
        hint = f" Did you mean {near!r}?" if near else ""
        hint = f" {advice}" if advice else hint
        listed = listed_names(known, given) or "none"
        self.message = f"No {kind} is called {given!r}.{hint} Known: {listed}."
        super().__init__(self.message)

    def __str__(self) -> str:  # KeyError would print the repr
        return self.message


class ArgumentError(SettingError, TypeError):
    """A call has an argument with an unknown name, too many arguments, or too few."""


class UnsupportedError(OnnxfitError, TypeError):
    """An object does not support an operation, such as pickling a Trainer or changing logs."""


class MissingAttributeError(UnsupportedError, AttributeError):
    """An object lacks an attribute; the message says what to use instead."""


class DataError(OnnxfitError, ValueError):
    """A batch, a label or a shape does not fit the model."""


class CheckpointError(OnnxfitError, ValueError):
    """A checkpoint cannot be written or read."""


class InstallationError(OnnxfitError, ImportError, RuntimeError):
    """A package is missing or broken, or lacks a feature.

    It is an ImportError, so that programs for which onnxfit is optional can catch it: `from onnxfit
    import Trainer` raises it if onnxruntime is missing.
    """


class OutOfMemoryError(OnnxfitError, MemoryError):
    """Memory ran out while a model or a training state was written or copied.

    The trainer is as it was, and a file has its old contents.
    """


@contextmanager
def out_of_memory_errors(call: str, instead: str) -> Iterator[None]:
    """Raise Python's MemoryError as OutOfMemoryError.

    - `call`: the call that needs memory, such as "export()".
    - `instead`: a sentence that says what needs less memory.
    """
    try:
        yield
    except OutOfMemoryError:
        raise
    except MemoryError as error:
        reason = f": {error}" if str(error) else ""
        raise OutOfMemoryError(
            f"There is not enough memory for {call}{reason}. The trainer is unchanged. {instead}"
        ) from error


class StepError(OnnxfitError, RuntimeError):
    """onnxruntime failed to compile or run a step."""


class DivergenceError(OnnxfitError, RuntimeError):
    """The loss became NaN or infinite."""


def nearest_name(given: object, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """Return the name in `known` most similar to `given`, ignoring case, or None."""
    by_lower_case = {name.lower(): name for name in known}
    near = difflib.get_close_matches(str(given).lower(), by_lower_case, 1, cutoff)
    return by_lower_case[near[0]] if near else None


def listed_names(names: Iterable[object], given: object = None) -> str:
    """Return names for a message: all names, or five of them and the number of the others.

    If there are more, the five names nearest to `given` are shown, or else the first five.

    >>> listed_names(["adam", "sgd"]), listed_names("abcdefgh", given="g")
    ('adam, sgd', 'g, a, b, c, d and 3 more')
    """
    listed = [str(name) for name in names]
    if len(listed) <= MAX_NAMES_LISTED:
        return ", ".join(listed)
    if given is not None:
        compared = difflib.SequenceMatcher(None, "", str(given).lower())
        similarity = {}
        for name in listed:
            compared.set_seq1(name.lower())
            similarity[name] = compared.ratio()
        listed.sort(key=lambda name: -similarity[name])
    shown = ", ".join(listed[:MAX_NAMES_LISTED])
    return f"{shown} and {len(listed) - MAX_NAMES_LISTED} more"


def argument_error(
    owner: str, signature: inspect.Signature, positional: int, named: Collection[str]
) -> ArgumentError:
    """Return the error for a call that does not fit a signature.

    - `owner`: the function or class that was called.
    - `positional`, `named`: the number of arguments by position, and the names of the others.
    """
    parameters = {
        name: parameter
        for name, parameter in signature.parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
    by_position = [name for name, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]
    has_self = by_position[:1] in (["self"], ["cls"])
    known = [name for name in parameters if not (has_self and name == by_position[0])]
    unknown = [name for name in named if name not in parameters]
    if unknown:
        return ArgumentError(_unknown_argument(owner, unknown[0], known))
    if positional > len(by_position):
        taken = by_position[has_self:]
        others = [name for name in known if name not in taken]
        hint = f" Pass the others by name: {listed_names(others)}." if others else ""
        count = f"{len(taken)} argument{'s' * (len(taken) != 1)}"
        return ArgumentError(
            f"{owner} takes {count} by position ({listed_names(taken) or 'none'}), but got"
            f" {positional - has_self}.{hint}"
        )
    twice = [name for name in by_position[:positional] if name in named]
    if twice:
        return ArgumentError(f"{owner} got {twice[0]!r} both by position and by name.")
    missing = [
        name
        for name in known
        if parameters[name].default is inspect.Parameter.empty
        and name not in (*named, *by_position[:positional])
    ]
    return ArgumentError(f"{owner} needs a value for {listed_names(missing)}.")


def _unknown_argument(owner: str, given: str, known: Collection[str]) -> str:
    """Return the message for an argument with an unknown name."""
    message = f"{owner} got an unexpected keyword argument {given!r}."
    ours = [name for name in OTHER_NAMES.get(given, ()) if name in known]
    if not ours and given in ELSEWHERE:
        return f"{message} {ELSEWHERE[given]}"
    near = ours[0] if ours else nearest_name(given, known, cutoff=0.6)
    if near:
        message += f" Did you mean {near!r}?"
    return f"{message} It takes {listed_names(known, near or given) or 'nothing'}."


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points at the line of the user's code.

    This is the innermost line outside of onnxfit, of Python's library and of installed packages. If
    there is no such line, it is the innermost line outside of onnxfit.
    """
    level = 1
    frame: FrameType | None = sys._getframe()
    fallback = None
    while frame is not None:
        if not _is_own(frame):
            fallback = fallback or level
            if not frame.f_code.co_filename.startswith(LIBRARY_FOLDERS):
                break
        level, frame = level + 1, frame.f_back
    if frame is None:
        level = fallback or level
    warnings.warn(message, category, stacklevel=level)


def _is_own(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__"))
    return module == "onnxfit" or module.startswith("onnxfit.")
