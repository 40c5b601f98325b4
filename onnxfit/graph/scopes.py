"""Scopes of the nodes that a step adds to a model's graph; no other module spells a scope.

A scope is the beginning of a node's name, up to a "/". It tells the origin of the node: error
messages quote it, and drawings group nodes by it. Nodes without one of these scopes are the model's
own.
"""

from __future__ import annotations

MODEL = "model"
TEACHER = "distillation"
LOSS = "loss"
PENALTY = "penalty"
METRICS = "metrics"
GRADIENT = "gradient"
GRADIENT_SUM = "gradient/sum"  # where a value is used more than once
LOSS_SCALE = "gradient/loss_scale"  # in float16
ACCUMULATION = "accumulation"
OPTIMIZER = "optimizer"
STOP_GRADIENT = "stop_gradient"  # within the model

# The stages of a step in the order in which they run, and their titles. Each but the first is the
# outermost scope of its nodes.
STAGES = {
    MODEL: "model",
    TEACHER: "teacher",
    LOSS: "loss",
    PENALTY: "penalty",
    METRICS: "metrics",
    GRADIENT: "gradient",
    ACCUMULATION: "gradient accumulation",
    OPTIMIZER: "optimizer",
}


def range_of(scale: str) -> str:
    """Return the scope of the range of activations that a scale describes."""
    return f"{scale}/range"


def loss_of(output: str) -> str:
    """Return the scope of the loss of a model output."""
    return f"{LOSS}/{output}"


def penalty_of(weight: str) -> str:
    """Return the scope of the penalty of a weight."""
    return f"{PENALTY}/{weight}"


def gradient_of(node: str) -> str:
    """Return the scope of the gradient of a node, which replaces the scope outside.

    >>> gradient_of("fc1"), gradient_of(f"{GRADIENT}/{copy_of('fc1')}")
    ('gradient/fc1', 'gradient/fc1/again')
    """
    return f"{GRADIENT}/{node.removeprefix(f'{GRADIENT}/')}"


def copy_of(name: str) -> str:
    """Return the name, in the scope GRADIENT alone, of a node or value that a gradient copies.

    The name of a copy of a copy grows by one word, however deeply the gradients are nested.

    >>> copy_of("fc1"), copy_of(f"{GRADIENT}/fc1/again")
    ('fc1/again', 'fc1/again/again')
    """
    return f"{name.removeprefix(f'{GRADIENT}/')}/again"


def original_of(name: str) -> str:
    """Return the name of the node or value that a gradient has copied, perhaps several times.

    >>> original_of(f"{GRADIENT}/fc1/again/again"), original_of("fc1")
    ('fc1', 'fc1')
    """
    name = name.removeprefix(f"{GRADIENT}/")
    while name.endswith("/again"):
        name = name.removesuffix("/again")
    return name


def update_of(weight: str) -> str:
    """Return the scope of the update of a weight."""
    return f"{OPTIMIZER}/{weight}"


def random_stream(number: int) -> str:
    """Return the scope of the random numbers of one node, within the scope of that node."""
    return f"random_{number}"


def stage_of(node: str) -> str:
    """Return the stage of the step, a key of STAGES, that a node of this name belongs to.

    >>> stage_of("loss/y/Sub"), stage_of("encoder/fc1"), stage_of("fc1_Grad/MatMul_0")
    ('loss', 'model', 'gradient')
    """
    # onnxruntime's gradient builder appends _Grad to the name of the node it differentiates, and
    # names a sum of gradients after a value.
    if "_Grad/" in node or node.endswith("_Grad") or node.startswith("AccumulateGrad_"):
        return GRADIENT
    scope, slash, _ = node.partition("/")
    return scope if slash and scope in STAGES else MODEL


def maker_of(node: str) -> str:
    """Return the origin of the node of this name, as text for messages.

    >>> maker_of("loss/y/Sub"), maker_of("gradient/fc1/MatMul"), maker_of("fc1")
    ('the loss', "the gradient of 'fc1'", 'the model')
    """
    if node.startswith(f"{GRADIENT_SUM}/"):
        return "the sum of gradients"
    if node.startswith(f"{GRADIENT}/"):
        differentiated = node.removeprefix(f"{GRADIENT}/").rpartition("/")[0]
        return f"the gradient of {differentiated!r}"
    return f"the {STAGES[stage_of(node)]}"
