"""Learning-rate schedules: laws for every one, torch's schedulers, closed formulas and numbers
worked out by hand.
"""

import dataclasses
import json
import math

import numpy as np
import pytest

import onnxfit.schedules
from onnxfit.errors import SettingError
from onnxfit.registry import from_config, lookup, registry, to_config
from onnxfit.schedules import (
    Constant,
    Cosine,
    Cyclic,
    Exponential,
    InverseScaling,
    InverseSquareRoot,
    InverseTime,
    MultiStep,
    OneCycle,
    Optimal,
    Piecewise,
    Polynomial,
    Schedule,
    Sequential,
    Step,
    Warmup,
    WarmupStableDecay,
)

MODULE = "onnxfit.schedules"
REGISTRY = registry(MODULE, Schedule)
FILLERS = {"int": 7, "float": 0.5, "LearningRate": 0.5}


def filled(cls):
    """An instance with a plain value for every field that has no default."""
    missing = dataclasses.MISSING
    fields = [
        f
        for f in dataclasses.fields(cls)
        if f.init and f.default is missing and f.default_factory is missing
    ]
    return cls(**{f.name: FILLERS[f.type] for f in fields})


SCHEDULES = [
    *(
        filled(cls)
        for name, cls in REGISTRY.items()
        if cls not in (Piecewise, MultiStep, Sequential)
        and name not in vars(cls).get("aliases", ())
    ),
    Piecewise((3, 7, 50), (0.1, 0.3, 0.02, 0.0)),
    Piecewise((), (0.1,)),
    Exponential(0.1, 7, 0.5, staircase=True),
    InverseTime(0.1, 7, 0.5, staircase=True),
    Polynomial(0.1, 30, 0.01, power=2.5, cycle=True),
    Cosine(0.1, 10, 0.001, restarts=True),
    Cosine(0.1, 10, 0.001, restarts=True, t_mul=1.5, m_mul=0.7),
    OneCycle(0.1, 100, anneal_strategy="linear", three_phase=True),
    OneCycle(0.1, 1),
    OneCycle(0.1, 10, pct_start=0.1),
    OneCycle(0.1, 10, pct_start=0.0),
    OneCycle(0.1, 10, pct_start=1.0),
    OneCycle(0.1, 10, pct_start=0.5, three_phase=True),
    Warmup(Cosine(0.1, 50), 10),
    Warmup(Warmup(0.1, 3), 4, start=0.2),
    Warmup(0.1, 0),
    Constant(0.0),
    Constant(1),
    MultiStep(0.1, (3, 7, 7, 50), 0.5),
    MultiStep(0.1, ()),
    Cyclic(0.01, 0.1, 5, 9, "triangular2"),
    Cyclic(0.95, 0.85, 5, mode="exp_range", gamma=0.9),
    Sequential((Cosine(0.1, 10), 0.05, Step(0.02, 7)), (20, 30)),
    Sequential((0.1,), ()),
    WarmupStableDecay(0.1, 5, 10, 20, 0.01, 0.02, "cos"),
    WarmupStableDecay(0.1, 0, 0, 1, decay="sqrt"),
    InverseSquareRoot(0.1, 10, 3),
]
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
STEPS = [*range(120), 1000, 10**6]


@every_schedule
def test_rates_are_finite_floats_not_below_zero(schedule):
    for step in STEPS:
        rate = schedule(step)
        assert isinstance(rate, (float, int))
        assert math.isfinite(rate)
        assert rate >= 0


@every_schedule
def test_a_schedule_is_a_pure_function(schedule):
    forwards = [schedule(step) for step in STEPS]
    assert [schedule(step) for step in reversed(STEPS)] == forwards[::-1]


@every_schedule
def test_repr_equality_hash_and_json(schedule):
    again = eval(repr(schedule), vars(onnxfit.schedules))
    assert again == schedule
    assert hash(again) == hash(schedule)
    config = json.loads(json.dumps(to_config(schedule)))
    restored = from_config(config, MODULE)
    assert restored == schedule
    assert [restored(step) for step in STEPS] == [schedule(step) for step in STEPS]
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.learning_rate = 1.0


@every_schedule
def test_numbers_of_numpy_become_pythons(schedule):
    fields = {f.name: getattr(schedule, f.name) for f in dataclasses.fields(schedule)}
    fields = {
        k: np.array(v)[()] if isinstance(v, (int, float)) and not isinstance(v, bool) else v
        for k, v in fields.items()
    }
    fields = {k: np.array(v) if isinstance(v, tuple) and v else v for k, v in fields.items()}
    again = type(schedule)(**fields)
    assert again == schedule
    json.dumps(to_config(again))


@every_schedule
def test_nonsense_is_refused_in_every_number(schedule):
    for field in dataclasses.fields(schedule):
        value = getattr(schedule, field.name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            bad_ones = [-1, math.nan, math.inf, "x", True]
            for bad in bad_ones if field.default is None else [*bad_ones, None]:
                with pytest.raises(SettingError, match=f"{type(schedule).__name__}.*{field.name}"):
                    dataclasses.replace(schedule, **{field.name: bad})


def test_names():
    assert {"constant", "invscaling", "inverse_scaling", "optimal", "one_cycle", "warmup"} <= set(
        REGISTRY
    )
    assert lookup("schedule", "invscaling", REGISTRY) == InverseScaling(0.01, 0.25)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constant(-0.1), r"Constant needs learning_rate >= 0, got -0.1\."),
        (lambda: Constant("fast"), r"Constant needs learning_rate >= 0, got 'fast'\."),
        (
            lambda: Exponential(0.1, 10, 1.5),
            r"Exponential needs decay_rate > 0 and <= 1, got 1.5\.",
        ),
        (lambda: Step(0.1, 2.5), r"Step needs step_size to be a whole number >= 1, got 2.5\."),
        (lambda: Piecewise((3, 3), (1, 2, 3)), r"increasing boundaries, got \(3, 3\)"),
        (
            lambda: Piecewise((3,), (1.0,)),
            r"one more value than boundaries, got 1 values for 1 boundaries",
        ),
        (lambda: Piecewise(3, (1.0, 2.0)), r"boundaries to be whole numbers >= 0, got 3"),
        (lambda: Piecewise((3,), (1.0, -2.0)), r"values to be numbers >= 0, got \(1.0, -2.0\)"),
        (lambda: Cosine(0.1, 10, t_mul=2), r"need restarts=True, got t_mul=2"),
        (
            lambda: OneCycle(0.1, 10, pct_start=0.6, three_phase=True),
            r"pct_start >= 0 and <= 0.5, got 0.6",
        ),
        (lambda: OneCycle(0.1, 10, anneal_strategy="cosine"), r"'cos' or 'linear', got 'cosine'"),
        (lambda: MultiStep(0.1, (3, 2)), r"MultiStep needs ascending milestones, got \(3, 2\)"),
        (lambda: Cyclic(0.1, 0.2, mode="saw"), r"Cyclic's mode must be 'triangular', .* got 'saw'"),
        (lambda: Sequential([], []), r"Sequential needs schedules to be a list .* got \[\]"),
        (lambda: Sequential([-1.0], []), r"schedules or numbers >= 0, got \[-1\.0\]"),
        (lambda: Sequential(Constant(1), []), r"got Constant"),
        (lambda: Sequential([0.1, 0.2], [3, 4]), "one more schedule than milestones, got 2"),
        (lambda: Sequential([0.1, 0.2, 0.3], [3, 3]), "increasing milestones"),
        (lambda: WarmupStableDecay(1.0, 1, 1, 1, decay="x"), "decay must be 'linear', 'cos' or"),
    ],
)
def test_impossible_settings(make, message):
    with pytest.raises(SettingError, match=message):
        make()


FIRST = [
    (Piecewise([2, 4], [1.0, 0.5, 0.1]), [1.0, 1.0, 0.5, 0.5, 0.1, 0.1]),
    (Exponential(1.0, 2, 0.25, staircase=True), [1.0, 1.0, 0.25, 0.25, 0.0625]),
    (Step(1.0, 3, 0.5), [1, 1, 1, 0.5, 0.5, 0.5, 0.25]),
    (InverseTime(1.0, 2, 1.0), [1, 1 / 1.5, 0.5, 0.4]),
    (InverseTime(1.0, 2, 1.0, staircase=True), [1, 1, 0.5, 0.5, 1 / 3]),
    (Polynomial(1.0, 4, 0.2), [1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
    # n = 2 until update 2, then 4 until update 4, then 6
    (Polynomial(1.0, 2, cycle=True), [1.0, 0.5, 0.0, 0.25, 0.0, 1 / 6, 0.0]),
    (Cosine(1.0, 2), [1.0, 0.5, 0.0, 0.0, 0.0]),
    (Cosine(1.0, 2, 0.2, restarts=True, m_mul=0.5), [1.0, 0.6, 0.6, 0.4, 0.4, 0.3]),
    (
        Cosine(1.0, 2, restarts=True, t_mul=2),
        [1, 0.5, 1, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2, 1],
    ),
    (
        Cosine(1.0, 1, restarts=True, t_mul=2, m_mul=0.5),
        [1, 0.5, 0.25, 0.25, (1 + 0.5**0.5) / 8, 0.125],
    ),
    (Warmup(0.4, 4), [0, 0.1, 0.2, 0.3, 0.4, 0.4]),
    (Warmup(lambda step: 1.0 / (1 + step), 2, start=0.5), [0.5, 0.75, 1.0, 0.5, 1 / 3]),
    (
        OneCycle(1.0, 11, 3 / 11, 10, 100, "linear"),
        [0.1, 0.55, 1.0, 1 - 0.999 / 8, 1 - 2 * 0.999 / 8],
    ),
    (InverseScaling(1.0, 0.5), [1.0, 0.5**0.5, 3**-0.5, 0.5]),
    (InverseScaling(), [0.01, 0.01 / 2**0.25]),
    # w = 10, e = 10/22, t0 = 22000; with alpha 1: w = 1, e = 1/4, t0 = 4
    (Optimal(), [0.01, 0.01 * 22000 / 22001]),
    (Optimal(1.0, alpha=1.0), [1.0, 4 / 5, 4 / 6, 4 / 7]),
    (MultiStep(1.0, [1, 1, 3], 0.5), [1.0, 0.25, 0.25, 0.125]),
    (Cyclic(1.0, 3.0, 2, 1, "triangular2"), [1, 2, 3, 1, 1.5, 2, 1, 1.25]),
    (Sequential([0.5, Polynomial(1.0, 2)], [2]), [0.5, 0.5, 1.0, 0.5, 0.0]),
    (WarmupStableDecay(1.0, 2, 1, 4, 0.5, decay="sqrt"), [0, 0.5, 1, 1, 0.75, 1 - 0.5**1.5]),
    (InverseSquareRoot(1.0, 2, 3), [0, 0.5, 1, (3 / 4) ** 0.5, (3 / 5) ** 0.5]),
]


@pytest.mark.parametrize(
    ("schedule", "rates"), FIRST, ids=[type(s).__name__ + str(i) for i, (s, _) in enumerate(FIRST)]
)
def test_first_rates_by_hand(schedule, rates):
    np.testing.assert_allclose(
        [schedule(step) for step in range(len(rates))], rates, rtol=1e-12, atol=1e-15
    )


def test_schedules_end_where_they_were_told_to():
    for schedule, end in [
        (Polynomial(0.3, 10, 0.1), 0.1),
        (Cosine(0.3, 10, 0.1), 0.1),
        (OneCycle(0.3, 10), 0.3 / 25 / 1e4),
        (Warmup(0.1, 3), 0.1),
    ]:
        assert schedule(10) == schedule(10**9) == end
    # 0.7 + (0.1 - 0.7) is 0.09999999999999998
    assert Polynomial(0.1, 10, 0.7)(0) == Warmup(0.1, 3, 0.7)(3) == 0.1


def test_restarts_fall_on_the_exact_update():
    """A logarithm of the step would round the start of some periods down into the one before."""
    for k in range(1, 30):
        assert Cosine(1.0, 3, restarts=True, t_mul=2)(3 * (2**k - 1)) == 1.0


def wsd(t, shape):
    """The factor of transformers' get_wsd_schedule, whose minimum and start are 0.1 and 0.2 here."""
    if t < 100:
        return t / 100 * (1 - 0.2) + 0.2
    if t < 400:
        return 1.0
    return shape((t - 400) / 200) * (1 - 0.1) + 0.1 if t < 600 else 0.1


RATE = 0.3
TORCH = [
    (Exponential(RATE, 1, 0.99), "ExponentialLR", {"gamma": 0.99}),
    (Step(RATE, 30, 0.7), "StepLR", {"step_size": 30, "gamma": 0.7}),
    (
        Piecewise((30, 80), (RATE, RATE / 10, RATE / 100)),
        "MultiStepLR",
        {"milestones": [30, 80], "gamma": 0.1},
    ),
    (Polynomial(RATE, 700, power=2.0), "PolynomialLR", {"total_iters": 700, "power": 2.0}),
    (
        Polynomial(RATE, 700, RATE / 4),
        "LinearLR",
        {"start_factor": 1.0, "end_factor": 0.25, "total_iters": 700},
    ),
    (Cosine(RATE, 1000, 0.01), "CosineAnnealingLR", {"T_max": 1000, "eta_min": 0.01}),
    (
        Cosine(RATE, 70, 0.01, restarts=True),
        "CosineAnnealingWarmRestarts",
        {"T_0": 70, "eta_min": 0.01},
    ),
    (
        Cosine(RATE, 70, 0.01, restarts=True, t_mul=2),
        "CosineAnnealingWarmRestarts",
        {"T_0": 70, "T_mult": 2, "eta_min": 0.01},
    ),
    (OneCycle(RATE, 1001), "OneCycleLR", {"max_lr": RATE, "total_steps": 1001}),
    (
        OneCycle(RATE, 1001, 0.2, 10.0, 1e3, "linear", three_phase=True),
        "OneCycleLR",
        {
            "max_lr": RATE,
            "total_steps": 1001,
            "pct_start": 0.2,
            "div_factor": 10.0,
            "final_div_factor": 1e3,
            "anneal_strategy": "linear",
            "three_phase": True,
        },
    ),
    (Warmup(RATE, 100, RATE / 3), "LinearLR", {"start_factor": 1 / 3, "total_iters": 100}),
    (InverseTime(RATE, 10, 0.5), "LambdaLR", {"lr_lambda": lambda t: 1 / (1 + 0.05 * t)}),
    (MultiStep(RATE, (30, 80, 700), 0.1), "MultiStepLR", {"milestones": [30, 80, 700]}),
    *(
        (
            Cyclic(0.1, RATE, 30, down, mode, 0.99),
            "CyclicLR",
            {
                "base_lr": 0.1,
                "max_lr": RATE,
                "step_size_up": 30,
                "step_size_down": down,
                "mode": mode,
                "gamma": 0.99,
                "cycle_momentum": False,
            },
        )
        for down in (None, 50)
        for mode in ("triangular", "triangular2", "exp_range")
    ),
    (
        InverseSquareRoot(RATE, 100, 250),  # transformers' formula
        "LambdaLR",
        {"lr_lambda": lambda t: t / 100 if t < 100 else 1 / math.sqrt((t + 150) / 250)},
    ),
    *(
        (
            WarmupStableDecay(RATE, 100, 300, 200, 0.1 * RATE, 0.2 * RATE, decay),
            "LambdaLR",
            {"lr_lambda": lambda t, shape=shape: wsd(t, shape)},
        )
        for decay, shape in {
            "linear": lambda s: 1 - s,
            "cos": lambda s: 0.5 * (1 + math.cos(math.pi * s)),
            "sqrt": lambda s: 1 - s**0.5,
        }.items()
    ),
    (InverseScaling(RATE, 0.4), "LambdaLR", {"lr_lambda": lambda t: (t + 1) ** -0.4}),
]


@pytest.mark.torch
@pytest.mark.parametrize(
    ("schedule", "name", "settings"),
    TORCH,
    ids=[f"{name}-{i}" for i, (_, name, _) in enumerate(TORCH)],
)
def test_torch_takes_the_same_rates(schedule, name, settings):
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], RATE)
    theirs = getattr(torch.optim.lr_scheduler, name)(optimizer, **settings)
    expected = []
    for _ in range(1000):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    # several of torch's accumulate: each rate is made from the one before
    np.testing.assert_allclose(
        [schedule(step) for step in range(1000)], expected, rtol=1e-9, atol=1e-12
    )


@pytest.mark.torch
def test_torch_chains_the_same_schedules():
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], RATE)
    own = torch.optim.lr_scheduler
    parts = [own.LinearLR(optimizer, 0.25, 1.0, 20), own.StepLR(optimizer, 7, 0.5)]
    theirs = own.SequentialLR(optimizer, parts, [30])
    schedule = Sequential([Warmup(RATE, 20, RATE / 4), Step(RATE, 7, 0.5)], [30])
    for step in range(100):
        assert schedule(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        theirs.step()


def test_inverse_scaling_is_scikit_learns_invscaling():
    linear_model = pytest.importorskip("sklearn.linear_model")
    rows = 40
    # every row touches one weight, once: 0 - rate * (0 - 1)
    model = linear_model.SGDRegressor(
        penalty=None,
        eta0=0.3,
        power_t=0.4,
        learning_rate="invscaling",
        fit_intercept=False,
        shuffle=False,
        max_iter=1,
        tol=None,
    )
    rates = model.fit(np.eye(rows), np.ones(rows)).coef_
    np.testing.assert_allclose(
        [InverseScaling(0.3, 0.4)(step) for step in range(rows)], rates, rtol=1e-12
    )
