"""The names of everything a step adds to a model's graph; no other module spells a tensor's name."""

from __future__ import annotations

LOSS = "loss"  # the scalar a model that brings its own loss calls so, and what a step reports
SAMPLE_WEIGHT = "sample_weight"
LEARNING_RATE = "train/learning_rate"
STEP = "train/step"  # updates done before this one, int64
SEED = "train/seed"
FIRST = "train/first_of_window"  # with accumulated gradients: the sum starts anew
WINDOW = "train/batches_in_window"
TOTAL = "train/loss"
SCALED = "train/scaled_loss"  # times the learning rate
PENALTY = "train/penalty"  # where it is a graph of its own


def target(output: str) -> str:
    """The labels of an output."""
    return f"y_true/{output}"


def part(output: str) -> str:
    """The loss of one output among several."""
    return f"train/{output}_loss"


def count(output: str) -> str:
    """What the loss of an output divides by, where that is not the number of rows."""
    return f"train/{output}_count"


def slot(weight: str, name: str) -> str:
    """What an optimizer remembers for a weight."""
    return f"{weight}/{name}"


def gradient(name: str) -> str:
    """The gradient that arrives at an output, or leaves a weight or an input."""
    return f"{name}_grad"


def penalised(weight: str) -> str:
    """The gradient of a weight, the penalty's added."""
    return f"{gradient(weight)}/penalised"


def gradient_sum(weight: str) -> str:
    """The gradients of a window of batches, added up."""
    return f"{weight}/gradient_sum"


def fused(number: int) -> str:
    """A flat tensor of small weights that are updated together, or of one of their slots."""
    return f"train/fused/{number}"


def reserved(name: str) -> bool:
    """Whether a step gives this name to something of its own."""
    return name == SAMPLE_WEIGHT or name.startswith(("train/", "y_true/"))


def updated(state: str) -> str:
    """The value a state has after the step."""
    return f"{state}/next"
