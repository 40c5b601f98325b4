"""A teacher beside labels: laws for every loss, and whole steps against PyTorch and by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import numpy_helper
from scipy import special

from onnxfit import Distillation, ModelError, Quantization, SettingError, Trainer, UnknownNameError
from onnxfit.gradients.functions import new_function, to_model_proto
from onnxfit.graph.spec import TensorSpec
from onnxfit.load.reading import read_model
from onnxfit.load.trainable import TrainableModel
from onnxfit.losses import (
    CTC,
    Asymmetric,
    BinaryCrossEntropy,
    ClassLoss,
    CosineSimilarity,
    CrossEntropy,
    DistillationKL,
    Focal,
    GaussianNLL,
    IoU,
    KLDivergence,
    ListNet,
    Loss,
    LovaszHinge,
    MeanSquaredError,
    Tversky,
    get_loss,
)
from onnxfit.losses.base import SoftTargets
from onnxfit.optimizers import SGD
from onnxfit.step.graphs import evaluate_graph, train_graph
from onnxfit.step.recipe_builder import build_recipe
from onnxfit.step.settings import TrainerSettings
from tests.builds import every_way
from tests.distributed.threads import on_ranks
from tests.test_losses import _counts, draw, every_loss, labels_of, outputs_for, takes_logits

Array = npt.NDArray[Any]

# ---------------------------------------------------------------------- laws for every loss


def distilled(
    loss: Loss, arrays: dict[str, Array], temperature: float = 2.0, share: float = 1.0
) -> tuple[float, Array]:
    """The loss of a batch with a teacher, and its gradient, as bare onnxruntime computes them."""
    op = new_function(loss)
    values = {name: op.input(name, a.dtype, a.shape) for name, a in arrays.items()}
    targets = SoftTargets(values["y_teacher"], temperature, share)
    weight = values.get("sample_weight")
    cost, _ = loss.reduce(op, values["y_true"], values["y_pred"], weight, targets)
    op.output("loss", cost)
    model = to_model_proto(op, ("loss", "y_pred")).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    value, gradient = session.run(None, arrays)
    return float(value), gradient


def drawn(loss: Loss, seed: int = 0) -> dict[str, Array]:
    y_true, y_pred = draw(loss, seed=seed)
    raw = 2 * np.random.default_rng(seed + 1).normal(size=y_pred.shape)
    return {"y_true": y_true, "y_pred": y_pred, "y_teacher": outputs_for(loss, raw)}


def distance(loss: Loss, arrays: dict[str, Array], temperature: float) -> Array:
    """The distance of the outputs, by the textbook's formula."""
    s, t = arrays["y_pred"], arrays["y_teacher"]
    by_class = isinstance(loss, (ClassLoss, KLDivergence, DistillationKL, ListNet, CTC))
    of_masks = isinstance(loss, (Tversky, LovaszHinge))
    if not by_class and not isinstance(loss, (BinaryCrossEntropy, Asymmetric)) and not of_masks:
        square = (s - t) ** 2
        of_vectors = isinstance(loss, (CosineSimilarity, IoU)) or isinstance(
            getattr(loss, "quantile", None), tuple
        )
        if of_vectors:
            return square.mean(-1)
        return (square[:, :2] + square[:, 2:]) / 2 if isinstance(loss, GaussianNLL) else square
    if by_class:
        if takes_logits(loss) is False:
            s, t = np.log(s), np.log(t)
        log_p, log_q = (special.log_softmax(z / temperature, axis=-1) for z in (s, t))
        divergence = temperature**2 * (np.exp(log_q) * (log_q - log_p)).sum(-1)
        return divergence.mean(1) if isinstance(loss, CTC) else divergence
    if not takes_logits(loss):
        s, t = special.logit(s), special.logit(t)
    p, q = special.expit(s / temperature), special.expit(t / temperature)
    divergence = temperature**2 * (q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p)))
    return divergence.mean(1) if of_masks else divergence


@every_loss
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_distance_is_its_formula(loss: Loss, temperature: float) -> None:
    arrays = drawn(loss)
    entries = distance(loss, arrays, temperature)
    labels = labels_of(loss, arrays["y_true"])
    weights = np.broadcast_to(_counts(loss, labels, arrays["y_pred"]), entries.shape)
    value, _ = distilled(loss, arrays, temperature)
    assert value == pytest.approx((weights * entries).sum() / weights.sum(), rel=1e-9)


@every_loss
def test_shares_mix_labels_and_teacher(loss: Loss) -> None:
    arrays = drawn(loss)
    arrays["sample_weight"] = np.array([1, 0, 2, 0.5, 1, 3])
    of_labels, g_labels = distilled(loss, arrays, share=1e-12)
    of_teacher, g_teacher = distilled(loss, arrays, share=1.0)
    value, gradient = distilled(loss, arrays, share=0.3)
    assert value == pytest.approx(0.7 * of_labels + 0.3 * of_teacher, rel=1e-8, abs=1e-10)
    np.testing.assert_allclose(gradient, 0.7 * g_labels + 0.3 * g_teacher, rtol=1e-7, atol=1e-10)


@every_loss
def test_a_teacher_with_the_same_output_costs_nothing(loss: Loss) -> None:
    arrays = drawn(loss)
    value, gradient = distilled(loss, {**arrays, "y_teacher": arrays["y_pred"]})
    assert value == pytest.approx(0, abs=1e-12)
    np.testing.assert_allclose(gradient, 0, atol=1e-12)


@every_loss
def test_the_gradient_is_that_of_finite_differences(loss: Loss) -> None:
    arrays = drawn(loss)
    arrays["sample_weight"] = np.array([1, 0, 2, 0.5, 1, 3])
    direction = np.random.default_rng(5).normal(size=arrays["y_pred"].shape)
    if takes_logits(loss) is False:
        direction *= 0.01
    _, gradient = distilled(loss, arrays)
    step = 1e-5
    ends = [
        distilled(loss, {**arrays, "y_pred": arrays["y_pred"] + sign * step * direction})[0]
        for sign in (1, -1)
    ]
    slope = (ends[0] - ends[1]) / (2 * step)
    assert (gradient * direction).sum() == pytest.approx(slope, rel=1e-5, abs=1e-8)


@every_loss
def test_a_row_of_weight_0_may_hold_nan(loss: Loss) -> None:
    arrays = drawn(loss)
    arrays["sample_weight"] = np.array([1, 0, 2, 0.5, 1, 3])
    value, gradient = distilled(loss, arrays, share=0.5)
    for name in ("y_pred", "y_teacher"):
        arrays[name] = arrays[name].copy()
        arrays[name][1] = np.nan
    other, other_gradient = distilled(loss, arrays, share=0.5)
    assert other == pytest.approx(value, rel=1e-12)
    np.testing.assert_array_equal(other_gradient[1], 0)
    np.testing.assert_allclose(np.delete(other_gradient, 1, 0), np.delete(gradient, 1, 0))


def test_an_ignored_label_ignores_the_teacher() -> None:
    loss = CrossEntropy(ignore_index=-1)
    arrays = drawn(loss)
    arrays["y_true"] = np.array([0, -1, 2, -1, 1, 3])
    value, gradient = distilled(loss, arrays, share=0.5)
    arrays["y_teacher"] = arrays["y_teacher"].copy()
    arrays["y_teacher"][[1, 3]] = 9
    assert distilled(loss, arrays, share=0.5)[0] == value
    np.testing.assert_array_equal(gradient[[1, 3]], 0)


def test_binary_labels_of_focal_are_binary_for_the_teacher() -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "y_true": rng.integers(0, 2, (6, 4)).astype(float),
        "y_pred": rng.normal(size=(6, 4)),
        "y_teacher": rng.normal(size=(6, 4)),
    }
    expected = distance(BinaryCrossEntropy(from_logits=True), arrays, 2.0).mean()
    assert distilled(Focal(), arrays)[0] == pytest.approx(expected, rel=1e-9)


def test_classes_that_a_teacher_masks_cost_nothing() -> None:
    arrays = drawn(CrossEntropy())
    arrays["y_teacher"][:, 2] = -np.inf
    value, gradient = distilled(CrossEntropy(), arrays)
    arrays["y_teacher"][:, 2] = -1e5
    assert value == pytest.approx(distilled(CrossEntropy(), arrays)[0])
    assert np.isfinite(gradient).all()


def test_a_function_is_a_loss_of_numbers() -> None:
    arrays = drawn(MeanSquaredError())
    square = (arrays["y_pred"] - arrays["y_teacher"]) ** 2
    for rank in (0, 1, 2):

        def by_hand(op: Any, y_true: Any, y_pred: Any, rank: int = rank) -> Any:
            axes = list(range(rank, 2))
            return op.ReduceMean(abs(y_true - y_pred), axes, keepdims=0) if axes else abs(y_pred)

        assert distilled(get_loss(by_hand), arrays)[0] == pytest.approx(square.mean())


# ---------------------------------------------------------------------- whole steps

ROWS, FEATURES, HIDDEN, CLASSES = 21, 5, 8, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, FEATURES)).astype(np.float32)
LABELS = RNG.integers(0, CLASSES, ROWS)
NUMBERS = RNG.normal(size=(ROWS, CLASSES)).astype(np.float32)
WEIGHTS = (RNG.integers(0, 4, ROWS) / 2).astype(np.float32)

SIZES = {"v": (FEATURES, HIDDEN), "u": (HIDDEN, CLASSES), "b": (CLASSES,), "g": (HIDDEN,)}
TEACHER_ARRAYS = {
    **{name: RNG.normal(size=SIZES[name]).astype(np.float32) for name in ("v", "u", "b", "g")},
    "mean": RNG.normal(size=HIDDEN).astype(np.float32),
    "variance": RNG.uniform(0.5, 2, HIDDEN).astype(np.float32),
    "zeros": np.zeros(HIDDEN, np.float32),
}


def model_of(text: str, arrays: dict[str, Array]) -> onnx.ModelProto:
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in arrays.items())
    return model


def student(end: str = "y = Identity(z)", head: str = "") -> onnx.ModelProto:
    """Floats and a bias of 32 bits, which is trained without rounding, and floats that stay."""
    rng = np.random.default_rng(1)
    arrays = {
        "v": rng.normal(size=SIZES["v"]).astype(np.float32),
        "u": rng.normal(size=SIZES["u"]).astype(np.float32) / 2,
        "b": rng.integers(-500, 500, CLASSES).astype(np.int32),
        "sb": np.array(1e-3, np.float32),
    }
    return model_of(
        f"""<ir_version: 8, opset_import: ["": 17]>
        student (float[N, {FEATURES}] x) => (float[N, {CLASSES}] y {head}) {{
            h = MatMul(x, v)  t = Tanh(h)  m = MatMul(t, u)
            c = DequantizeLinear(b, sb)  z = Add(m, c)  {end} }}""",
        arrays,
    )


def teacher(end: str = "y = Identity(z)", outputs: str = "") -> onnx.ModelProto:
    """An older opset, names of the student, a normalization and a dropout."""
    return model_of(
        f"""<ir_version: 7, opset_import: ["": 12]>
        teacher (float[M, {FEATURES}] x) => (float[M, {CLASSES}] y {outputs}) {{
            h = MatMul(x, v)  n = BatchNormalization(h, g, zeros, mean, variance)  d = Dropout(n)
            t = Tanh(d)  m = MatMul(t, u)  z = Add(m, b)  {end} }}""",
        TEACHER_ARRAYS,
    )


def teacher_outputs() -> Array:
    a = TEACHER_ARRAYS
    normalized = (X @ a["v"] - a["mean"]) / np.sqrt(a["variance"] + 1e-5) * a["g"]
    return np.asarray(np.tanh(normalized) @ a["u"] + a["b"])


def trainer(loss: Any = "cross_entropy", model: Any = None, **settings: Any) -> Trainer:
    chosen = settings.pop("teacher", teacher())
    names = {"temperature": "temperature", "teacher_weight": "weight", "features": "features",
             "feature_weight": "feature_weight"}  # fmt: skip
    own = {new: settings.pop(old) for old, new in names.items() if old in settings}
    return Trainer(
        student() if model is None else model,
        weights=["v", "b"],
        loss=loss,
        optimizer=SGD(0.2),
        quantization=Quantization(weights="b"),
        teacher=None if chosen is None else Distillation(chosen, **own),
        **settings,
    )


def fit(
    one: Trainer, y: Any = LABELS, weights: Any = WEIGHTS, epochs: int = 2, **settings: Any
) -> dict[str, list[float]]:
    settings = {"batch_size": 8, "shuffle": False, "verbose": 0, **settings}
    return one.fit(X, y, weights, epochs=epochs, **settings).history


@every_way
@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_steps_are_those_of_torch(way: dict[str, Any], loss: str) -> None:
    torch = pytest.importorskip("torch")
    F = torch.nn.functional
    arrays = {t.name: numpy_helper.to_array(t) for t in student().graph.initializer}
    v = torch.tensor(arrays["v"], requires_grad=True)
    b = torch.tensor(arrays["b"] * arrays["sb"], requires_grad=True)
    u, x, w = map(torch.tensor, (arrays["u"], X, WEIGHTS))
    y = torch.tensor(LABELS if loss == "cross_entropy" else NUMBERS)
    soft, temperature, share = torch.tensor(teacher_outputs()), 3.0, 0.4
    optimizer = torch.optim.SGD([v, b], lr=0.2)
    costs = []
    for start in [0, 8, 16] * 2:  # the last batch of an epoch has 5 rows
        rows = slice(start, start + 8)
        output = torch.tanh(x[rows] @ v) @ u + b
        if loss == "cross_entropy":
            hard = F.cross_entropy(output, y[rows], reduction="none")
            p, q = (F.log_softmax(z / temperature, dim=-1) for z in (output, soft[rows]))
            kl = F.kl_div(p, q, reduction="none", log_target=True).sum(-1)
            entries = (1 - share) * hard + share * temperature**2 * kl
        else:
            hard, other = ((output - target[rows]) ** 2 for target in (y, soft))
            entries = ((1 - share) * hard + share * other).mean(-1)
        cost = (w[rows] * entries).mean()
        optimizer.zero_grad()
        cost.backward()
        optimizer.step()
        costs.append(cost.item())
    ours = trainer(loss, temperature=temperature, teacher_weight=share, **way)
    history = fit(ours, LABELS if loss == "cross_entropy" else NUMBERS)
    for name, expected in (("v", v), ("b", b)):
        np.testing.assert_allclose(
            ours.get_weights()[name], expected.detach(), rtol=2e-4, atol=1e-5
        )
    sizes = np.array([8, 8, 5])
    means = [(np.array(costs[i : i + 3]) * sizes).sum() / ROWS for i in (0, 3)]
    np.testing.assert_allclose(history["loss"], means, rtol=1e-5)


@every_way
def test_a_weight_of_0_is_no_teacher(way: dict[str, Any]) -> None:
    one, other = trainer(teacher_weight=0, **way), trainer(teacher=None, **way)
    assert fit(one) == fit(other)
    for name, array in other.get_weights().items():
        np.testing.assert_array_equal(one.get_weights()[name], array)


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_a_weight_of_1_leaves_the_labels_out(backend: str) -> None:
    one, other = (trainer(teacher_weight=1, backend=backend) for _ in range(2))
    fit(one), fit(other, (LABELS + 1) % CLASSES)
    np.testing.assert_array_equal(one.get_weights()["v"], other.get_weights()["v"])


@pytest.mark.parametrize("of_student", [True, False], ids=["student", "teacher"])
def test_graphs_tell_logits_from_probabilities(of_student: bool) -> None:
    """A Softmax at the end of one of the models changes its output alone."""
    end = "y = Softmax(z)"
    changed = trainer(model=student(end)) if of_student else trainer(teacher=teacher(end))
    plain = trainer()
    np.testing.assert_allclose(fit(changed)["loss"], fit(plain)["loss"], rtol=1e-5)
    np.testing.assert_allclose(
        changed.get_weights()["v"], plain.get_weights()["v"], rtol=1e-3, atol=1e-5
    )


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_validation_is_by_the_labels_alone(backend: str) -> None:
    one = trainer(backend=backend, metrics=["accuracy"], teacher_weight=0.9)
    history = fit(one, weights=None, validation_data=(X, LABELS))
    log_p = special.log_softmax(one.predict(X).astype(np.float64), axis=-1)
    cost = -log_p[np.arange(ROWS), LABELS].mean()
    assert history["val_loss"][-1] == pytest.approx(cost, rel=1e-5)
    assert one.evaluate(X, LABELS)["loss"] == pytest.approx(cost, rel=1e-5)
    kl = distance(CrossEntropy(), {"y_pred": one.predict(X), "y_teacher": teacher_outputs()}, 2.0)
    step = one.train_on_batch(X, LABELS)
    assert step["loss"] == pytest.approx(0.1 * cost + 0.9 * kl.mean(), rel=1e-4)
    assert step["accuracy"] == pytest.approx((log_p.argmax(-1) == LABELS).mean())


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_the_teacher_runs_in_the_step_alone(backend: str) -> None:
    one, without = trainer(backend=backend), trainer(backend=backend, teacher=None)
    graphs = {
        name: onnx.load_from_string(graph) for name, graph in one.save_onnx_graph(bytes).items()
    }
    runs = {
        name
        for name, graph in graphs.items()
        if any(node.name.startswith("distillation/") for node in graph.graph.node)
    }
    assert runs == ({"train"} if backend == "full" else {"loss"})
    assert graphs["trained"] == without.export()
    assert one.get_weights().keys() == without.get_weights().keys()
    foot = [line for line in one.summary().splitlines() if line.startswith(("total", "trained"))]
    assert foot == [line for line in without.summary().splitlines() if line in foot]


def test_two_outputs_have_a_teacher_each() -> None:
    both = {"y": LABELS, "r": NUMBERS}
    end, more = "y = Identity(z)  r = Tanh(z)", f", float[N, {CLASSES}] r"
    one = trainer(
        {"y": "cross_entropy", "r": "mse"},
        student(end, more),
        teacher=teacher(f"{end}  o = Neg(z)", f"{more}, float[N, {CLASSES}] o"),
        loss_weights={"r": 0.5},
    )
    output, soft = one.predict(X), teacher_outputs()
    figures = one.train_on_batch(X, both)
    log_p = special.log_softmax(output["y"].astype(np.float64), axis=-1)
    kl = distance(CrossEntropy(), {"y_pred": output["y"], "y_teacher": soft}, 2.0)
    of_y = (-log_p[np.arange(ROWS), LABELS] + kl).mean() / 2
    of_r = ((output["r"] - NUMBERS) ** 2 + (output["r"] - np.tanh(soft)) ** 2).mean() / 2
    assert figures["y_loss"] == pytest.approx(of_y, rel=1e-5)
    assert figures["r_loss"] == pytest.approx(of_r, rel=1e-5)
    assert figures["loss"] == pytest.approx(of_y + 0.5 * of_r, rel=1e-5)


def test_a_penalty_counts_beside_the_teacher() -> None:
    plain, penalized = trainer(), trainer(penalty=0.1)
    squares = sum(float((w**2).sum()) for w in plain.get_weights().values())
    expected = plain.train_on_batch(X, LABELS)["loss"] + 0.1 * squares
    assert penalized.train_on_batch(X, LABELS)["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_window_is_a_batch() -> None:
    one, other = trainer(accumulate=3), trainer()
    fit(one, weights=None, batch_size=7)
    fit(other, weights=None, batch_size=21)
    np.testing.assert_allclose(
        one.get_weights()["v"], other.get_weights()["v"], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_ranks_have_shares_of_the_rows(backend: str) -> None:
    loss = CrossEntropy(ignore_index=3)

    def trained(distribute: Any) -> tuple[Array, list[float]]:
        one = trainer(loss, backend=backend, threads=1, distribute=distribute)
        losses = fit(one)["loss"]
        return one.get_weights()["v"], losses

    alone, losses = trained(None)
    for weights, history in on_ranks(2, trained):
        np.testing.assert_allclose(weights, alone, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(history, losses, rtol=1e-5)


def test_ranks_have_the_same_teacher() -> None:
    def built(distribute: Any) -> str:
        other = teacher() if distribute.rank else teacher("y = Neg(z)")
        with pytest.raises(SettingError, match="the teacher") as info:
            trainer(teacher=other, distribute=distribute)
        return str(info.value)

    assert len(on_ranks(2, built)) == 2


def test_names_of_the_student_may_be_those_of_the_teacher() -> None:
    model = student("distillation_h = Identity(z)  y = Identity(distillation_h)")
    for node in model.graph.node:
        for names in (node.input, node.output):
            for i, name in enumerate(names):
                names[i] = name.replace("distillation_h", "distillation/h")
    assert fit(trainer(model=model))["loss"] == fit(trainer())["loss"]


def test_a_branch_of_the_teacher_runs() -> None:
    arrays = {**TEACHER_ARRAYS, "flag": np.array(True), "two": np.array(2, np.float32)}
    branched = model_of(
        f"""<ir_version: 8, opset_import: ["": 17]>
        teacher (float[M, {FEATURES}] x) => (float[M, {CLASSES}] y) {{
            h = MatMul(x, v)  n = BatchNormalization(h, g, zeros, mean, variance)  t = Tanh(n)
            m = MatMul(t, u)  z = Add(m, b)  k = ReduceSum<keepdims = 0>(z)  c = Greater(k, two)
            y = If (c) <
                then_branch = yes () => (a) {{ h2 = Mul(z, two)  a = Div(h2, two) }},
                else_branch = no () => (e) {{ e = Identity(z) }}> }}""",
        arrays,
    )
    np.testing.assert_allclose(
        fit(trainer(teacher=branched))["loss"], fit(trainer())["loss"], rtol=1e-5
    )


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_the_teacher_may_be_numbers_of_the_batch(backend: str) -> None:
    """Its output is its input, which the model has too, and does not use."""
    model = student()
    model.graph.input.append(onnx.helper.make_tensor_value_info("soft", 1, ["N", CLASSES]))
    given = onnx.helper.make_tensor_value_info("soft", 1, ["N", CLASSES])
    graph = onnx.helper.make_graph([], "given", [given], [given])
    opset = [onnx.helper.make_opsetid("", 17)]
    identity = onnx.helper.make_model(graph, opset_imports=opset, ir_version=8)
    one = trainer("mse", model, teacher=identity, teacher_weight=1, backend=backend)
    x = {"x": X, "soft": NUMBERS}
    expected = ((one.predict(x) - NUMBERS) ** 2).mean()
    assert one.train_on_batch(x, 0 * NUMBERS)["loss"] == pytest.approx(expected, rel=1e-5)


def test_the_teacher_is_constants_of_the_step() -> None:
    distillation = Distillation(teacher()).with_teacher_read()
    settings = TrainerSettings(loss="cross_entropy")
    recipe = build_recipe(
        TrainableModel.of(read_model(teacher())), settings, distillation=distillation
    )
    graph = train_graph(recipe, recipe.declared_batch).graph
    frozen = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    np.testing.assert_array_equal(frozen["distillation/u"], TEACHER_ARRAYS["u"])
    assert "u" in {value.name for value in graph.input}
    evaluation = evaluate_graph(recipe, recipe.declared_batch).graph
    assert not any(t.name.startswith("distillation/") for t in evaluation.initializer)


FLOAT_SIZES = {"v": (FEATURES, HIDDEN), "u": (HIDDEN, CLASSES)}


def float_student() -> onnx.ModelProto:
    rng = np.random.default_rng(3)
    arrays = {n: rng.normal(size=s).astype(np.float32) for n, s in FLOAT_SIZES.items()}
    return model_of(
        f"""<ir_version: 8, opset_import: ["": 17]>
        student (float[N, {FEATURES}] x) => (float[N, {CLASSES}] logits) {{
            a = MatMul(x, v)  hidden = Tanh(a)  logits = MatMul(hidden, u) }}""",
        arrays,
    )


@every_way
@pytest.mark.parametrize("features", [False, True], ids=["outputs", "features"])
def test_a_float_model_learns_from_a_teacher_as_in_torch(
    features: bool, way: dict[str, Any]
) -> None:
    """Hinton's soft targets, the hard loss, and FitNets' features of a layer, over ten steps."""
    torch = pytest.importorskip("torch")
    F = torch.nn.functional
    student = float_student()
    begin = {t.name: numpy_helper.to_array(t) for t in student.graph.initializer}
    v, u = (torch.tensor(begin[name], requires_grad=True) for name in "vu")
    a = {name: torch.tensor(array) for name, array in TEACHER_ARRAYS.items()}
    x, y = torch.tensor(X), torch.tensor(LABELS)
    normalized = (x @ a["v"] - a["mean"]) / torch.sqrt(a["variance"] + 1e-5) * a["g"]
    layer = torch.tanh(normalized)
    soft = layer @ a["u"] + a["b"]
    optimizer = torch.optim.SGD([v, u], lr=0.1)
    costs = []
    for _ in range(10):
        hidden = torch.tanh(x @ v)
        output = hidden @ u
        p, q = (F.log_softmax(z / 4, dim=-1) for z in (output, soft))
        kl = F.kl_div(p, q, reduction="batchmean", log_target=True)
        cost = 0.3 * F.cross_entropy(output, y) + 0.7 * 16 * kl
        if features:
            cost = cost + 2 * F.mse_loss(hidden, layer)
        optimizer.zero_grad()
        cost.backward()
        optimizer.step()
        costs.append(cost.item())
    pairs = {"features": {"hidden": "t"}, "feature_weight": 2.0} if features else {}
    taught = Distillation(teacher(), temperature=4, weight=0.7, **pairs)
    ours = Trainer(student, loss="cross_entropy", optimizer=SGD(0.1), teacher=taught, **way)
    found = [ours.train_on_batch(X, LABELS)["loss"] for _ in range(10)]
    np.testing.assert_allclose(found, costs, rtol=1e-4)
    for name, expected in (("v", v), ("u", u)):
        weight = ours.get_weights()[name]
        np.testing.assert_allclose(weight, expected.detach(), rtol=2e-4, atol=1e-5)
    # one model for the user, without the teacher
    assert [value.name for value in ours.export().graph.output] == ["logits"]
    assert ours.evaluate(X, LABELS)["loss"] == pytest.approx(
        F.cross_entropy(torch.tensor(ours.predict(X)), y).item(), rel=1e-5
    )


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_ranks_share_the_terms_of_a_teacher(backend: str) -> None:
    def trained(communicator: Any = None) -> Any:
        taught = Distillation(teacher(), features={"hidden": "t"})
        one = Trainer(float_student(), loss="cross_entropy", optimizer=SGD(0.1), teacher=taught,
                      distribute=communicator, backend=backend)  # fmt: skip
        one.fit(X, LABELS, epochs=2, batch_size=8, verbose=0)
        return one.history.history["loss"], one.get_weights()

    losses, weights = trained()
    for found, own in on_ranks(2, trained):
        np.testing.assert_allclose(found, losses, rtol=1e-5)
        for name, array in weights.items():
            np.testing.assert_allclose(own[name], array, rtol=1e-4, atol=1e-6)


def test_features_alone_need_no_output_of_the_teacher() -> None:
    text = f"""<ir_version: 8, opset_import: ["": 17]>
        encoder (float[M, {FEATURES}] x) => (float[M, {HIDDEN}] code) {{ code = MatMul(x, v) }}"""
    encoder = model_of(text, {"v": TEACHER_ARRAYS["v"]})
    taught = Distillation(encoder, weight=0, features={"hidden": "code"})
    one = Trainer(float_student(), loss="cross_entropy", teacher=taught)
    loss = one.evaluate(X, LABELS)["loss"]
    hidden = np.tanh(X @ one.get_weights()["v"])
    expected = loss + ((hidden - X @ TEACHER_ARRAYS["v"]) ** 2).mean()
    assert one.train_on_batch(X, LABELS)["loss"] == pytest.approx(expected, rel=1e-5)


def test_features_that_do_not_fit_are_refused() -> None:
    def build(**features: str) -> Trainer:
        taught = Distillation(teacher(), features=features)
        return Trainer(float_student(), loss="cross_entropy", teacher=taught)

    with pytest.raises(UnknownNameError, match="value of the model"):
        build(hiden="t")
    with pytest.raises(UnknownNameError, match="value of the teacher"):
        build(hidden="layer")
    with pytest.raises(ModelError, match="does not fit the model's value"):
        build(hidden="z")
    with pytest.raises(SettingError, match="features must be a dict"):
        Distillation("t.onnx", features=["hidden"])


# ---------------------------------------------------------------------- teachers that do not fit


def renamed(model: onnx.ModelProto, **names: str) -> onnx.ModelProto:
    for values in (model.graph.input, model.graph.output, *_names(model)):
        for i, value in enumerate(values):
            if isinstance(value, str):
                values[i] = names.get(value, value)
            else:
                value.name = names.get(value.name, value.name)
    return model


def _names(model: onnx.ModelProto) -> list[Any]:
    return [names for node in model.graph.node for names in (node.input, node.output)]


def test_a_single_input_and_output_are_matched_by_position() -> None:
    other = trainer(teacher=renamed(teacher(), x="features", y="logits"))
    assert fit(other)["loss"] == fit(trainer())["loss"]


def fixed(axis: int, size: int, *, output: bool = False) -> onnx.ModelProto:
    model = teacher("y = Identity(z)") if axis or output else teacher()
    value = model.graph.output[0] if output else model.graph.input[0]
    value.type.tensor_type.shape.dim[axis].dim_value = size
    return model


def wide() -> onnx.ModelProto:
    model = teacher("y = Concat<axis = 1>(z, z)")
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 2 * CLASSES
    return model


def integer_input() -> onnx.ModelProto:
    model = teacher()
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    model.graph.input[0].name = "i"
    model.graph.node.insert(0, onnx.helper.make_node("Cast", ["i"], ["x"], to=1))
    return model


REFUSED = {
    "classes": (
        wide,
        r"output y: float32\[.*, 8\] does not fit the model's output y: float32\[N, 4",
    ),
    "batch": (lambda: fixed(0, 1), r"input x: float32\[1, 5\] does not .* onnxfit\.dynamic_batch"),
    "type": (integer_input, r"input i: int64\[M, 5\] does not fit the model's input x: float32"),
    "outputs": (
        lambda: renamed(teacher("y = Identity(z) o = Neg(z)", ", float[M, 4] o"), y="p"),
        r"outputs of the model include y: .* has only p: .*, o: ",
    ),
    "bytes": (lambda: b"no model", "The teacher cannot be read"),
    "path": (lambda: "/missing/float.onnx", "The teacher cannot be read. There is no file"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_a_teacher_that_does_not_fit_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message) as info:
        trainer(teacher=make())
    assert str(info.value).count("\n") < 4


def test_several_inputs_are_matched_by_name() -> None:
    text = f"""<ir_version: 8, opset_import: ["": 17]>
        t (float[M, {FEATURES}] x, float[M, {FEATURES}] w) => (float[M, {CLASSES}] y) {{
            h = Add(x, w)  p = MatMul(h, v)  y = MatMul(p, u) }}"""
    arrays = {name: TEACHER_ARRAYS[name] for name in ("v", "u")}
    with pytest.raises(
        ModelError, match=r"inputs of the teacher include w: .* the model has only x"
    ):
        trainer(teacher=model_of(text, arrays))


def test_a_teacher_needs_a_loss() -> None:
    with pytest.raises(SettingError, match="no output of the model has one"):
        trainer(loss=None)


def test_a_teacher_too_large_for_a_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxfit.graph.tensors.MAX_MODEL_BYTES", 400)
    with pytest.raises(ModelError, match="constants of the step's graph, which holds at most"):
        Distillation(teacher()).with_teacher_read().teacher_of(
            [TensorSpec("x", np.dtype(np.float32), ("N", FEATURES))],
            {"y": TensorSpec("y", np.dtype(np.float32), ("N", CLASSES))},
            ["y"],
            21,
            {},
        )
