"""Names of the tensors that a step adds to a model's graph; no other module spells one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")
LOSS = "loss"  # the loss that a step reports, and the output of a model that computes its own
SAMPLE_WEIGHT = "sample_weight"
EMA = "ema"  # slot with the average of a weight
LEARNING_RATE = "train/learning_rate"
STEP = "train/step"  # number of updates before this one, int64
SEED = "train/seed"
FIRST = "train/first_of_window"  # bool; with accumulated gradients: True resets their sum
WINDOW = "train/batches_in_window"
TOTAL = "train/loss"  # the sum of the losses of all outputs and the penalties
SCALED = "train/scaled_loss"  # the loss times the learning rate, or times LOSS_SCALE
# state of a step in float16: the factor of the loss before its gradients are computed, the updates
# since it changed, and the updates that were skipped
LOSS_SCALE = "train/loss_scale"
FINITE_STEPS = "train/finite_steps"
SKIPPED_STEPS = "train/skipped_steps"
# where several ranks train together, this rank's summand of the loss of the whole batch
SHARED = "train/shared_loss"
SHARE = "train/share"  # the rows of this rank, divided by those of the whole batch, float64
GRADIENT_NORM = "train/gradient_norm"  # the common L2 norm of all gradients before clipping
SCHEDULED = "train/scheduled/"  # the start of the name of each scheduled value of a step
METRIC = "train/metric/"  # the start of the name of each sum of a metric
READ = "train/read/"  # the start of the name of a value that only a loss reads
OF_LOSS = "loss/"  # the start of the name of a tensor that a loss trains
PENALTY = "train/penalty"  # the penalties alone, where a step reports them or has them apart

PLACE = "onnxfit.constant_node/"  # the start of the output of a Constant without its tensor

# Note in the metadata of an initializer: the file has a Constant node.
LIFTED = "onnxfit.constant_node"
# Note in the metadata of an Identity through which no gradient flows.
STOP_GRADIENT = "onnxfit.stop_gradient"
# key in the metadata of a graph: the precision of the products in the model and in its gradient
PRODUCTS = "onnxfit.products"


def target(output: str, label: str = "") -> str:
    """Return the name of the labels of an output, or of one of its arrays of labels."""
    return f"y_true/{output}/{label}" if label else f"y_true/{output}"


def read(name: str) -> str:
    """Return the name of the output with a value of the model that only a loss reads."""
    return f"{READ}{name}"


def shown(name: str) -> str:
    """Return the name in messages of an output that a loss reads.

    >>> shown(read("encoder/mu")), shown("y")
    ('encoder/mu', 'y')
    """
    return name.removeprefix(READ)


def is_read(name: str) -> bool:
    """Return whether `read` has named an output."""
    return name.startswith(READ)


def loss_weight(name: str, objective: str = "") -> str:
    """Return the name of a tensor that a loss trains.

    - `objective`: the name of the loss, where others are beside it.

    >>> loss_weight("centers"), loss_weight("centers", "face")
    ('loss/centers', 'loss/face/centers')
    """
    return f"{OF_LOSS}{objective}/{name}" if objective else f"{OF_LOSS}{name}"


def is_loss_weight(name: str) -> bool:
    """Return whether `name` may belong to a tensor that a loss trains."""
    return name.startswith(OF_LOSS)


def sample_weight(output: str) -> str:
    """Return the name of the weights of one output, where outputs have weights of their own."""
    return f"{SAMPLE_WEIGHT}/{output}"


def is_sample_weight(name: str) -> bool:
    """Return whether `name` belongs to weights of rows or labels, of all outputs or of one."""
    return name == SAMPLE_WEIGHT or name.startswith(f"{SAMPLE_WEIGHT}/")


def weight_of(output: str, values: Mapping[str, T]) -> T | None:
    """Return the value of an output's sample weights among values by name, or None."""
    return values.get(sample_weight(output), values.get(SAMPLE_WEIGHT))


def output_loss(output: str) -> str:
    """Return the name of the loss of one of several outputs."""
    return f"train/{output}_loss"


def weighted_loss(output: str) -> str:
    """Return the name of the loss of one of several outputs times its learned factor."""
    return f"train/{output}_weighted_loss"


def count(output: str) -> str:
    """Return the name of the divisor of an output's loss if it is not the number of rows."""
    return f"train/{output}_count"


def metric_sum(metric: str, attribute: str) -> str:
    """Return the name of what a batch adds to an attribute of a metric.

    >>> metric_of_sum(metric_sum("accuracy", "_total"))
    ('accuracy', '_total')
    """
    return f"{METRIC}{metric}/{attribute}"


def metric_of_sum(name: str) -> tuple[str, str] | None:
    """Return the metric and the attribute that `metric_sum` has named; None for another name."""
    if not name.startswith(METRIC):
        return None
    metric, _, attribute = name[len(METRIC) :].rpartition("/")
    return metric, attribute


def share(output: str) -> str:
    """Return the name of this rank's divisor of an output's loss, divided by that of all ranks."""
    return f"train/{output}_share"


def announcement(number: int) -> str:
    """Return the name of the node that announces finished gradients."""
    return f"train/announcement/{number}"


def unannounced(gradient: str) -> str:
    """Return the name of a gradient before the node that announces it."""
    return f"train/unannounced/{gradient}"


def scheduled(number: int) -> str:
    """Return the name of the value of a schedule that only some weights follow."""
    return f"{SCHEDULED}{number}"


def slot(weight: str, name: str) -> str:
    """Return the name of an optimizer's slot `name` for a weight."""
    return f"{weight}/{name}"


def gradient(name: str) -> str:
    """Return the name of the gradient of an output, a weight or an input."""
    return f"{name}_grad"


def logits(output: str) -> str:
    """Return the name of the scores whose sigmoid is an output."""
    return f"train/logits/{output}"


def log_probabilities(output: str) -> str:
    """Return the name of the logarithms of an output that is probabilities."""
    return f"train/log_probabilities/{output}"


def log_softmax(output: str) -> str:
    """Return the name of an output that is a log-softmax, computed from its scores."""
    return f"train/log_softmax/{output}"


def gradient_norm(weight: str) -> str:
    """Return the name of the L2 norm of a weight's gradient before clipping."""
    return f"{GRADIENT_NORM}/{weight}"


def in_logs(name: str) -> str:
    """Return the name in logs of a figure that a step reports.

    >>> in_logs(gradient_norm("fc.weight"))
    'gradient_norm/fc.weight'
    """
    return name.removeprefix("train/")


def packed(weight: str) -> str:
    """Return the name of a packed weight as the backward pass reads it."""
    return f"train/packed/{weight}"


def penalised(weight: str) -> str:
    """Return the name of a weight's gradient that includes the penalty's."""
    return f"{gradient(weight)}/penalised"


def gradient_sum(weight: str) -> str:
    """Return the name of the sum of a weight's gradients in a window of batches."""
    return f"{weight}/gradient_sum"


def gradient_sums(dtype: str) -> str:
    """Return the name of all sums of gradients of an element type, as one tensor."""
    return f"train/gradient_sums/{dtype}"


def fused(number: int) -> str:
    """Return the name of a tensor of several small weights, which are updated together.

    A slot of such a tensor is named after it, as the slot of a weight is.
    """
    return f"train/fused/{number}"


def joined(number: int) -> str:
    """Return the name of a tensor of many weights of one shape, which a step reads as one."""
    return f"train/joined/{number}"


def reserved(name: str) -> bool:
    """Return whether `name` is reserved for tensors that a step adds."""
    return is_sample_weight(name) or name.startswith(("train/", "y_true/"))


def is_added(name: str) -> bool:
    """Return whether `name` belongs to an output that a step adds to those of the model."""
    return reserved(name) and not is_read(name)


def unused(name: str, is_used: Callable[[str], bool]) -> str:
    """Return the name, followed by `_2`, `_3`, ... if it is in use.

    >>> unused("y_grad", {"y_grad", "y_grad_2"}.__contains__)
    'y_grad_3'
    """
    candidate = name
    count = 1
    while is_used(candidate):
        count += 1
        candidate = f"{name}_{count}"
    return candidate


def updated(state: str) -> str:
    """Return the name of a state's value after the step."""
    return f"{state}/next"


def exported(initializer: str) -> str:
    """Return the name of the value that a trained model has for an initializer of its file."""
    return f"{initializer}/exported"
