"""Losses, penalties and updates as models of their own: they run in a bare onnxruntime, and say
what training says.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxfit
from onnxfit.errors import SettingError
from onnxfit.gradients.update import initial_slots
from onnxfit.graph.spec import TensorSpec
from onnxfit.losses import (
    CTC,
    BinaryCrossEntropy,
    CausalLM,
    CIoU,
    CrossEntropy,
    GaussianNLL,
    IoU,
    Loss,
    MeanSquaredError,
    get_loss,
)
from onnxfit.optimizers import SGD, Optimizer
from onnxfit.optimizers.base import WeightInfo, learning_rate_at
from onnxfit.penalties import Penalty
from onnxfit.schedules import InverseScaling
from tests import test_losses, test_optimizers, test_penalties
from tests.models import linear

every_loss = pytest.mark.parametrize("loss", test_losses.VARIANTS, ids=repr)
every_penalty = pytest.mark.parametrize("penalty", test_penalties.VARIANTS, ids=repr)
OPTIMIZERS = [
    *test_optimizers.VARIANTS,
    SGD(InverseScaling(0.1), momentum=0.9, scaled_velocity=True),
    onnxfit.optimizers.Adam(
        0.01, weight_decay=0.1, ema_momentum=0.9, learning_rate_multipliers={"w": 0.5}
    ),
    onnxfit.optimizers.AdamW(0.01, exclude_from_weight_decay="w"),
]
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
SYMBOLIC = ("batch", "outputs")


def run(model: onnx.ModelProto, feeds: dict[str, object]) -> dict[str, np.ndarray]:
    """The outputs by name, after onnx's checker has looked; numbers take the type of their input."""
    onnx.checker.check_model(model, full_check=True)
    assert model.ir_version == 10
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 21)]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    types = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(int64)": np.int64}
    arrays = {i.name: np.asarray(feeds[i.name], types[i.type]) for i in session.get_inputs()}
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, arrays)))


def names(values) -> list[str]:
    return [v.name for v in values]


def shape_of(value: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    return tuple(d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim)


# ---------------------------------------------------------------------- losses


def fitting(loss: Loss, shape: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The shape of outputs, with three tokens and the classes last for a loss of next tokens, and
    four numbers last for boxes and quantiles.
    """
    of_four = isinstance(loss, IoU) or isinstance(getattr(loss, "quantile", None), tuple)
    if of_four and shape[-1] == 2:
        return (*shape[:-1], 4)
    return (shape[0], 3, shape[1]) if isinstance(loss, (CausalLM, CTC)) else shape


@every_loss
@pytest.mark.parametrize("shape", [SYMBOLIC, ("batch", 4), (6, 4)], ids=str)
def test_a_loss_has_the_value_and_gradient_of_its_formula(loss: Loss, shape) -> None:
    shape = fitting(loss, shape)
    y, p = test_losses.draw(loss)
    s = np.random.default_rng(1).uniform(0.5, 2, len(p)).astype(np.float32)
    result = run(
        loss.build_onnx_function(shape, np.float64, gradient=True, sample_weight=True),
        {"y_true": y, "y_pred": p, "sample_weight": s},
    )
    assert result["loss"] == pytest.approx(test_losses.formula(loss, y, p, s), rel=1e-10)
    if isinstance(loss, CIoU):
        return  # its alpha has no gradient by definition
    differences = np.zeros_like(p)
    for i in np.ndindex(p.shape):
        step = np.zeros_like(p)
        step[i] = 1e-5
        above, below = (test_losses.formula(loss, y, p + sign * step, s) for sign in (1, -1))
        differences[i] = (above - below) / 2e-5
    assert np.abs(differences).max() > 1e-3
    np.testing.assert_allclose(result["y_pred_grad"], differences, rtol=1e-5, atol=1e-8)


@every_loss
@pytest.mark.parametrize("weighted", [False, True])
def test_a_loss_is_what_add_loss_adds(loss: Loss, weighted: bool) -> None:
    y, p = test_losses.draw(loss, dtype=np.float32)
    s = np.arange(len(p)).astype(np.float32)
    sizes = ", ".join(map(str, fitting(loss, ("N", 4))))
    identity = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
        same (float[{sizes}] x) => (float[{sizes}] y) {{ y = Identity(x) }}""")
    whole = run(
        onnxfit.add_loss(identity, loss, sample_weight=weighted),
        {"x": p, "y_true/y": y, "sample_weight": s},
    )
    alone = run(
        loss.build_onnx_function(fitting(loss, ("N", 4)), sample_weight=weighted),
        {"y_true": y, "y_pred": p, "sample_weight": s},
    )
    assert list(alone) == ["loss"]
    assert (alone["loss"].dtype, alone["loss"].shape) == (np.float32, ())
    assert alone["loss"] == pytest.approx(whole["train/loss"], rel=1e-6)


@every_loss
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("shape", [(6, 4), (3, 4, 2, 2)], ids=str)
def test_the_losses_of_rows_are_those_of_the_rows_alone(loss: Loss, reduction: str, shape) -> None:
    plain = (
        {}
        if len(shape) == 2
        else {"pos_weight": None}
        if isinstance(loss, BinaryCrossEntropy)
        else {}
    )
    loss = dataclasses.replace(loss, reduction=reduction, **plain)
    shape = fitting(loss, shape)
    y, p = test_losses.draw(loss, shape)
    s = np.arange(len(p)).astype(np.float32)
    symbolic = ("batch", *shape[1:])
    result = run(
        loss.build_onnx_function(
            symbolic, np.float64, by_row=True, gradient=True, sample_weight=True
        ),
        {"y_true": y, "y_pred": p, "sample_weight": s},
    )
    assert list(result) == ["loss", "losses", "y_pred_grad"]
    cost = test_losses.FORMULAS[type(loss).__name__](loss, test_losses.labels_of(loss, y), p)
    rows = (cost.sum if reduction == "sum" else cost.mean)(axis=tuple(range(1, cost.ndim)))
    np.testing.assert_allclose(result["losses"], s * rows, rtol=1e-9, atol=1e-12)
    if reduction == "sum":
        assert result["losses"].sum() == pytest.approx(result["loss"], rel=1e-9)


def test_a_number_for_the_whole_batch_cannot_be_told_by_row() -> None:
    largest = get_loss(lambda op, y_true, y_pred: op.ReduceMax(abs(y_true - y_pred), keepdims=0))
    with pytest.raises(SettingError, match="cannot be split by row"):
        largest.build_onnx_function(by_row=True)


@every_loss
def test_what_a_loss_takes_and_gives_has_always_the_same_name(loss: Loss) -> None:
    for gradient in (False, True):
        for sample_weight in (False, True):
            shape = fitting(loss, SYMBOLIC)
            model = loss.build_onnx_function(shape, gradient=gradient, sample_weight=sample_weight)
            assert names(model.graph.input) == [
                "y_true",
                "y_pred",
                *["sample_weight"] * sample_weight,
            ]
            assert names(model.graph.output) == ["loss", *["y_pred_grad"] * gradient]
            assert shape_of(model.graph.input[1]) == shape
            assert shape_of(model.graph.output[0]) == ()
            again = loss.build_onnx_function(shape, gradient=gradient, sample_weight=sample_weight)
            assert model.SerializeToString(deterministic=True) == again.SerializeToString(
                deterministic=True
            )


@every_loss
def test_labels_have_the_type_and_shape_that_prepare_gives(loss: Loss) -> None:
    shape = fitting(loss, ("batch", 4))
    spec = TensorSpec("y", np.dtype(np.float32), shape)
    y_true, y_pred = loss.build_onnx_function(shape).graph.input
    wanted = loss.target(spec)
    assert onnx.helper.tensor_dtype_to_np_dtype(y_true.type.tensor_type.elem_type) == wanted.dtype
    assert wanted.shape is not None
    assert shape_of(y_true) == tuple(size or 0 for size in wanted.shape)  # None has no number
    assert shape_of(y_pred) == shape


def test_a_function_of_ones_own_is_a_function_too() -> None:
    squares = get_loss(lambda op, y_true, y_pred: (y_true - y_pred) ** 2)
    feeds = {"y_true": [[1.0], [2.0]], "y_pred": [[0.0], [4.0]]}
    result = run(squares.build_onnx_function(gradient=True), feeds)
    assert (result["loss"], result["y_pred_grad"].tolist()) == (2.5, [[-1], [2]])


def test_images_have_their_classes_on_axis_1() -> None:
    model = CrossEntropy().build_onnx_function(("batch", 3, "height", "width"), gradient=True)
    assert shape_of(model.graph.input[0]) == ("batch", "height", "width")
    result = run(model, {"y_true": np.zeros((2, 5, 4)), "y_pred": np.zeros((2, 3, 5, 4))})
    assert result["loss"] == pytest.approx(np.log(3), rel=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: CrossEntropy().build_onnx_function(("batch", 1)),
            "CrossEntropy needs at least 2 classes",
        ),
        (
            lambda: GaussianNLL().build_onnx_function(("batch", 3)),
            "GaussianNLL needs an output whose last axis has an even size",
        ),
    ],
)
def test_a_shape_that_a_loss_cannot_take_is_refused(make, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        make()


# ---------------------------------------------------------------------- penalties


@every_penalty
@pytest.mark.parametrize("shape", [(), (3,), (4, 3), ("rows", "columns"), ("a", 1, "b")], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_penalty_has_the_value_and_gradient_of_its_formula(
    penalty: Penalty, shape, dtype
) -> None:
    sizes = [d if isinstance(d, int) else 3 for d in shape]
    w = np.asarray(np.random.default_rng(0).normal(size=sizes), dtype)
    model = penalty.build_onnx_function(shape, dtype, gradient=True)
    assert names(model.graph.input) == ["weight"]
    assert names(model.graph.output) == ["penalty", "weight_grad"]
    assert names(penalty.build_onnx_function(shape, dtype).graph.output) == ["penalty"]
    result = run(model, {"weight": w})
    wide, formula = w.astype(float), test_penalties.FORMULAS[type(penalty).__name__]
    rtol = 1e-5 if dtype == np.float32 else 1e-8
    assert result["penalty"].dtype == result["weight_grad"].dtype == dtype
    assert result["penalty"] == pytest.approx(formula(penalty, wide), rel=rtol)
    assert result["weight_grad"].shape == w.shape
    for i in np.ndindex(w.shape):
        step = np.zeros(sizes)
        step[i] = 1e-6
        expected = (formula(penalty, wide + step) - formula(penalty, wide - step)) / 2e-6
        assert result["weight_grad"][i] == pytest.approx(expected, rel=max(rtol, 1e-6), abs=1e-7)


@every_penalty
def test_a_penalty_is_what_add_loss_adds(penalty: Penalty) -> None:
    line = linear(3, 2, 0.5)
    feeds = {"x": np.zeros((1, 3)), "y_true/y": np.zeros((1, 2))}  # the loss itself is 0
    whole = run(onnxfit.add_loss(line, "mse", penalty), feeds)["train/loss"]
    assert run(penalty.build_onnx_function(), {"weight": np.full((3, 2), 0.5)})[
        "penalty"
    ] == pytest.approx(whole, rel=1e-6)


def test_a_gradient_that_is_a_constant_is_given_as_well() -> None:
    @dataclasses.dataclass(frozen=True)
    class Itself(Penalty):
        def __call__(self, op, w):
            return w

    assert run(Itself().build_onnx_function((), gradient=True), {"weight": 3.0}) == {
        "penalty": 3,
        "weight_grad": 1,
    }


# ---------------------------------------------------------------------- updates


class ByHand:
    """The weight called `w`, changed by an optimizer's function."""

    def __init__(self, optimizer: Optimizer, w: np.ndarray, shape=None) -> None:
        self.optimizer, self.steps, self.w = optimizer, 0, w
        self.slots = initial_slots(optimizer, "w", w)
        self.model = optimizer.build_onnx_function(
            w.shape if shape is None else shape, w.dtype, name="w"
        )

    def __call__(self, gradient: np.ndarray) -> None:
        feeds: dict[str, object] = {"weight": self.w, "gradient": gradient, "step": self.steps}
        feeds["learning_rate"] = learning_rate_at(self.optimizer, self.steps)
        results = run(
            self.model, feeds | {f"weight/{slot}": array for slot, array in self.slots.items()}
        )
        self.w = results.pop("weight/next")
        self.slots = {
            name.removeprefix("weight/").removesuffix("/next"): array
            for name, array in results.items()
        }
        self.steps += 1


@every_optimizer
@pytest.mark.parametrize("shape", [(3, 2), ("rows", "columns")], ids=str)
def test_an_update_by_hand_is_an_update_in_training(optimizer: Optimizer, shape) -> None:
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(16, 3)).astype(np.float32), rng.normal(size=(16, 2)).astype(np.float32)
    trainer = onnxfit.Trainer(linear(3, 2, 0.25), loss="mse", optimizer=optimizer)
    hand = ByHand(optimizer, trainer.get_weights()["w"], shape)
    for _ in range(5):
        distance = X @ hand.w - y
        hand(2 * X.T @ distance / distance.size)
        trainer.train_on_batch(X, y)
        np.testing.assert_allclose(hand.w, trainer.get_weights()["w"], rtol=1e-4, atol=1e-6)
    slots = trainer.get_state()["slots"]
    assert [f"w/{name}" for name in hand.slots] == list(slots)
    for name, array in hand.slots.items():
        np.testing.assert_allclose(array, slots[f"w/{name}"], rtol=1e-4, atol=1e-6)


@pytest.mark.table
@every_optimizer
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "shape", [(), (3,), ("rows", "columns"), (2, 3, 4), ("a", 3, "b")], ids=str
)
def test_what_an_update_takes_and_gives_has_always_the_same_name_and_the_slots_shapes(
    optimizer: Optimizer, shape, dtype
) -> None:
    model = optimizer.build_onnx_function(shape, dtype)
    onnx.checker.check_model(model, full_check=True)
    concrete = np.zeros([d if isinstance(d, int) else 5 for d in shape], dtype)
    info = WeightInfo("weight", concrete.shape, concrete.dtype)
    own = optimizer.for_weights([info])["weight"].optimizer
    slots = initial_slots(own, "weight", concrete)
    assert names(model.graph.input) == [
        "weight",
        "gradient",
        "learning_rate",
        "step",
        *(f"weight/{slot}" for slot in slots),
    ]
    assert names(model.graph.output) == ["weight/next", *(f"weight/{slot}/next" for slot in slots)]
    for value, array in zip(model.graph.input[4:], slots.values()):
        assert onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type) == array.dtype
        assert tuple(5 if isinstance(d, str) else d for d in shape_of(value)) == array.shape
    again = optimizer.build_onnx_function(shape, dtype)
    assert model.SerializeToString(deterministic=True) == again.SerializeToString(
        deterministic=True
    )


def test_the_patterns_of_an_optimizer_know_a_weight_by_its_name() -> None:
    optimizer = SGD(
        1.0,
        weight_decay=0.5,
        exclude_from_weight_decay="*.bias",
        learning_rate_multipliers={"fc.*": 0.5},
    )
    feeds = {"weight": [4.0], "gradient": [1.0], "learning_rate": 1.0, "step": 0}
    moved = {
        name: run(optimizer.build_onnx_function((1,), name=name), feeds)["weight/next"].item()
        for name in ("fc.bias", "fc.w", "w")
    }
    assert moved == {"fc.bias": 4 - 0.5, "fc.w": 4 * (1 - 0.25) - 0.5, "w": 4 * (1 - 0.5) - 1}


def test_a_slot_with_sizes_of_its_own_keeps_them() -> None:
    """One number for each row, two for each weight, and a table whose rank is not the weight's."""

    @dataclasses.dataclass(frozen=True)
    class Remembering(Optimizer):
        def slots(self, w):
            return {"rows": np.zeros(w.shape[:1]), "pair": np.zeros(2), "same": w}

        def update(self, op, w, g, lr, step, rows, pair, same):
            return w - lr * g, rows + 1, pair + 1, same

    inputs = Remembering().build_onnx_function(("rows", 2)).graph.input
    assert {v.name: shape_of(v) for v in inputs[4:]} == {
        "weight/rows": (0,),
        "weight/pair": (2,),
        "weight/same": ("rows", 2),
    }
    assert not inputs[4].type.tensor_type.shape.dim[0].WhichOneof("value")  # of any size
    hand = ByHand(Remembering(1.0), np.zeros((7, 2), np.float32), ("rows", 2))
    hand(np.ones((7, 2)))
    assert hand.slots["rows"].tolist() == [1] * 7


def test_a_step_counts_from_zero_as_a_schedule_does() -> None:
    """Adam's first update moves by the learning rate, whatever the gradient."""
    result = run(
        onnxfit.optimizers.Adam().build_onnx_function((1,), np.float64),
        {
            "weight": [1.0],
            "gradient": [123.0],
            "learning_rate": 0.25,
            "step": 0,
            "weight/m": [0.0],
            "weight/v": [0.0],
        },
    )
    assert result["weight/next"].item() == pytest.approx(0.75, rel=1e-9)


def test_pieces_make_a_training_loop_without_onnxfit() -> None:
    """Loss, penalty and update, with the model's own gradient by hand: ridge regression."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(64, 3))
    y = X @ np.array([[1.0], [-2.0], [0.5]])
    loss = MeanSquaredError().build_onnx_function(dtype=np.float64, gradient=True)
    penalty = onnxfit.penalties.L2(0.1).build_onnx_function(dtype=np.float64, gradient=True)
    hand = ByHand(SGD(0.1, momentum=0.5), np.zeros((3, 1)))
    for _ in range(100):
        dy = run(loss, {"y_true": y, "y_pred": X @ hand.w})["y_pred_grad"]
        hand(X.T @ dy + run(penalty, {"weight": hand.w})["weight_grad"])
    expected = np.linalg.solve(X.T @ X / 64 + 0.1 * np.eye(3), X.T @ y / 64)
    np.testing.assert_allclose(hand.w, expected, rtol=1e-8)
