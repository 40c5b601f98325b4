"""Names that other libraries have for optimizers and schedules."""

from __future__ import annotations

from onnxfit.registry import find

# Names of optimizers of Keras, torch, timm and optax that are settings here.
OPTIMIZERS = {
    "adam_amsgrad": "Adam(0.001, amsgrad=True)",
    "adamaxw": "Adamax(0.002, weight_decay=0.01)",
    "adanw": "Adan(0.001, weight_decay=0.01)",
    "adoptw": "Adopt(0.001, weight_decay=0.01)",
    "amsgrad": "Adam(0.001, amsgrad=True)",
    "cadamw": "AdamW(0.001, cautious=True)",
    "clion": "Lion(0.0001, cautious=True)",
    "csgdw": "SGD(0.01, momentum=0.9, nesterov=True, cautious=True)",
    "gradient_descent": "SGD(0.01)",
    "lookahead": 'Lookahead("adam")',
    "lookahead_adam": 'Lookahead("adam")',
    "lookahead_adamw": 'Lookahead("adamw")',
    "lookahead_radam": 'Lookahead("radam")',
    "lookahead_sgd": 'Lookahead("sgd")',
    "momentum": "SGD(0.01, momentum=0.9)",
    "multi_transform": 'Groups({"pattern": ...}, default="adam")',
    "nadamw": "NAdam(0.002, weight_decay=0.01)",
    "nesterov": "SGD(0.01, momentum=0.9, nesterov=True)",
    "partition": 'Groups({"pattern": ...}, default="adam")',
    "radamw": "RAdam(0.001, weight_decay=0.01)",
    "ranger": 'Lookahead("radam", k=6)',
    "rmsprop_momentum": "RMSprop(0.001, momentum=0.9)",
    "sgd_momentum": "SGD(0.01, momentum=0.9)",
    "sgdw": "SGD(0.01, momentum=0.9, weight_decay=0.0001)",
    "sign_sgd": "Lion(0.0001, betas=(0.0, 0.0))",
    "signum": "Lion(0.0001, betas=(0.9, 0.9))",
}
# Optimizers that onnxfit lacks, and the nearest one that it has.
SIMILAR = {
    "adamp": "AdamW(0.001)",
    "asgd": "SGD(0.01, ema_momentum=0.999)",
    "ftrl": "Adagrad(0.01)",
    "kron": "Muon(0.001)",
    "laprop": "Adam(0.001)",
    "larc": "Lars(0.1)",
    "madgrad": "Adagrad(0.01)",
    "mars": "AdamW(0.001)",
    "schedule_free_sgd": "ScheduleFreeAdamW(0.0025)",
    "sgdp": "SGD(0.01, momentum=0.9, nesterov=True)",
    "shampoo": "Muon(0.001)",
    "sm3": "Adafactor(0.01)",
    "soap": "Muon(0.001)",
    "sparse_adam": "Adam(0.001)",
    "yogi": "AdaBelief(0.001)",
}
COSINE = "Cosine(0.01, decay_steps=...)"
EXPONENTIAL = "Exponential(0.01, decay_steps=..., decay_rate=...)"
POLYNOMIAL = "Polynomial(0.01, decay_steps=...)"
WARMUP_COSINE = "Warmup(Cosine(0.01, decay_steps=...), steps=...)"
RESTARTS = "Cosine(0.01, decay_steps=..., restarts=True)"
ONE_CYCLE = "OneCycle(0.01, total_steps=...)"
PIECEWISE = "Piecewise(boundaries=[...], values=[...])"
# Names of schedules, onnxfit's own among them: each needs an object, with at least one number.
SCHEDULES = {
    "constant": "Constant(0.01)",
    "constant_lr": PIECEWISE,
    "constant_schedule": "Constant(0.01)",
    "constant_with_warmup": "Warmup(0.01, steps=...)",
    "cosine": COSINE,
    "cosine_annealing": COSINE,
    "cosine_annealing_lr": COSINE,
    "cosine_annealing_warm_restarts": RESTARTS,
    "cosine_decay": COSINE,
    "cosine_decay_restarts": RESTARTS,
    "cosine_decay_schedule": COSINE,
    "cosine_onecycle_schedule": ONE_CYCLE,
    "cosine_with_restarts": RESTARTS,
    "cyclic": "Cyclic(0.001, 0.01)",
    "cyclic_lr": "Cyclic(0.001, 0.01)",
    "exponential": EXPONENTIAL,
    "exponential_decay": EXPONENTIAL,
    "exponential_lr": EXPONENTIAL,
    "inverse_sqrt": "InverseSquareRoot(0.01, warmup_steps=...)",
    "inverse_square_root": "InverseSquareRoot(0.01, warmup_steps=...)",
    "inverse_time": "InverseTime(0.01, decay_steps=..., decay_rate=...)",
    "inverse_time_decay": "InverseTime(0.01, decay_steps=..., decay_rate=...)",
    "join_schedules": "Sequential([...], milestones=[...])",
    "linear": POLYNOMIAL,
    "linear_lr": "Warmup(0.01, steps=...)",
    "linear_onecycle_schedule": 'OneCycle(0.01, total_steps=..., anneal_strategy="linear")',
    "linear_schedule": POLYNOMIAL,
    "multi_step": "MultiStep(0.01, milestones=[...])",
    "multi_step_lr": "MultiStep(0.01, milestones=[...])",
    "noam": "InverseSquareRoot(0.01, warmup_steps=...)",
    "one_cycle": ONE_CYCLE,
    "one_cycle_lr": ONE_CYCLE,
    "piecewise": PIECEWISE,
    "piecewise_constant": PIECEWISE,
    "piecewise_constant_decay": PIECEWISE,
    "piecewise_constant_schedule": PIECEWISE,
    "poly": POLYNOMIAL,
    "polynomial": POLYNOMIAL,
    "polynomial_decay": POLYNOMIAL,
    "polynomial_lr": POLYNOMIAL,
    "polynomial_schedule": POLYNOMIAL,
    "sequential": "Sequential([...], milestones=[...])",
    "sequential_lr": "Sequential([...], milestones=[...])",
    "sgdr_schedule": RESTARTS,
    "step": "Step(0.01, step_size=...)",
    "step_lr": "Step(0.01, step_size=...)",
    "warmup": "Warmup(0.01, steps=...)",
    "warmup_constant_schedule": "Warmup(0.01, steps=...)",
    "warmup_cosine": WARMUP_COSINE,
    "warmup_cosine_decay_schedule": WARMUP_COSINE,
    "warmup_exponential_decay_schedule": f"Warmup({EXPONENTIAL}, steps=...)",
    "warmup_stable_decay": (
        "WarmupStableDecay(0.01, warmup_steps=..., stable_steps=..., decay_steps=...)"
    ),
    "wsd": "WarmupStableDecay(0.01, warmup_steps=..., stable_steps=..., decay_steps=...)",
}
LBFGS = ("lbfgs", "l_bfgs_b")
PLATEAU = ("plateau", "reduce_lr_on_plateau", "reduce_on_plateau")


def advice_for_optimizer(name: str) -> str:
    """Return what to pass for the name of another library's optimizer or schedule, or ""."""
    ours = find(name, OPTIMIZERS)
    if ours is not None:
        return f" Pass optimizer=onnxfit.optimizers.{ours}."
    if find(name, dict.fromkeys(LBFGS, True)):
        return " It reads all rows at once: call onnxfit.fit_lbfgs(trainer, x, y)."
    is_schedule = find(name, SCHEDULES) is not None
    kind = " It is a schedule, the setting learning_rate of an optimizer." if is_schedule else ""
    return kind + advice_for_schedule(name)


def similar_optimizer(name: str) -> str:
    """Return advice for the name of an optimizer that onnxfit lacks, or ""."""
    similar = find(name, SIMILAR)
    return "" if similar is None else f"The most similar is onnxfit.optimizers.{similar}."


def advice_for_schedule(name: object) -> str:
    """Return what to pass for the name of a schedule, or "" for anything else."""
    if not isinstance(name, str):
        return ""
    ours = find(name, SCHEDULES)
    if ours is not None:
        return f" Pass learning_rate=onnxfit.schedules.{ours}."
    if find(name, dict.fromkeys(PLATEAU, True)):
        return " Pass callbacks=[onnxfit.callbacks.ReduceLROnPlateau()] to fit."
    return ""
