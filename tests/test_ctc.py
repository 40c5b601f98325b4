"""CTC: the loss against PyTorch, the decoders against all paths, and the error rates.

The laws for every loss and every metric are in tests/test_losses.py and tests/test_metrics.py. They
compare the loss with its definition.
"""

from __future__ import annotations

import collections
import itertools
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx.numpy_helper import from_array
from scipy import special

from onnxfit import Trainer, gradient_model
from onnxfit.ctc import Reading, beam_search_decode, greedy_decode
from onnxfit.errors import DataError, SettingError
from onnxfit.graph.spec import TensorSpec
from onnxfit.losses import CTC
from onnxfit.metrics import CharacterErrorRate, WordErrorRate
from onnxfit.metrics.text import edit_distance
from onnxfit.registry import from_config, to_config
from tests.test_losses import Graph
from tests.training_folder.host import Host

SPEC = TensorSpec("y", np.dtype(np.float32), ("batch", 6, 4))


def drawn(seed: int) -> tuple[CTC, np.ndarray, np.ndarray]:
    """A loss with settings at random, labels of each length with repeats, and outputs."""
    rng = np.random.default_rng(seed)
    rows, steps, classes, width = (int(rng.integers(*r)) for r in ((1, 6), (1, 12), (2, 6), (0, 6)))
    blank = int(rng.integers(-1, classes))
    loss = CTC(
        blank,
        ignore_index=int(rng.choice([-1, -100, blank % classes])),
        input_lengths=bool(rng.integers(2)),
        zero_infinity=bool(rng.integers(2)),
    )
    others = [c for c in range(classes) if c != blank % classes]
    lengths = rng.integers(0, width + 1, (rows, 1))
    labels = np.where(
        np.arange(width) < lengths, rng.choice(others, (rows, width)), loss.ignore_index
    )
    if loss.input_lengths:
        labels = np.column_stack([rng.integers(0, steps + 1, rows), labels])
    return loss, labels, 3 * rng.normal(size=(rows, steps, classes))


def by_torch(loss: CTC, labels: np.ndarray, outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The loss of each row, and the gradient of their mean, by PyTorch."""
    torch = pytest.importorskip("torch")
    steps, targets = np.full(len(labels), outputs.shape[1]), labels
    if loss.input_lengths:
        steps, targets = labels[:, 0], labels[:, 1:]
    counted = targets != loss.ignore_index
    leaf = torch.tensor(outputs, requires_grad=True)
    losses = torch.nn.functional.ctc_loss(
        leaf.log_softmax(-1).transpose(0, 1),
        torch.tensor(targets[counted]),
        torch.tensor(steps),
        torch.tensor(counted.sum(1)),
        blank=loss.blank % outputs.shape[2],
        reduction="none",
        zero_infinity=loss.zero_infinity,
    )
    losses.mean().backward()
    return losses.detach().numpy(), leaf.grad.numpy()


@pytest.mark.torch
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("symbolic", [None, "all"])
def test_torch_gives_the_same_value_and_gradient(seed: int, symbolic: str | None) -> None:
    loss, labels, outputs = drawn(seed)
    losses, slope = by_torch(loss, labels, outputs)
    result = Graph(loss, labels, outputs, gradient=True, symbolic=symbolic)(labels, outputs)
    np.testing.assert_allclose(result["loss"], losses.mean(), rtol=1e-9)
    possible = np.isfinite(losses)  # the gradient of other rows is NaN in PyTorch, here it is 0
    np.testing.assert_allclose(
        result["gradient"], np.where(possible[:, None, None], slope, 0), rtol=1e-7, atol=1e-9
    )
    narrow = outputs.astype(np.float32)
    result = Graph(loss, labels, narrow, gradient=True)(labels, narrow)
    np.testing.assert_allclose(result["loss"], losses.mean(), rtol=1e-5)
    np.testing.assert_allclose(result["gradient"][possible], slope[possible], atol=1e-5)


@pytest.mark.torch
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_long_outputs_and_certain_ones_are_stable(scale: float) -> None:
    """The states of 300 steps differ by factors that no float holds."""
    rng = np.random.default_rng(0)
    outputs = scale * rng.normal(size=(3, 300, 20))
    labels = rng.integers(1, 20, (3, 80))
    losses, slope = by_torch(CTC(), labels, outputs)
    narrow = outputs.astype(np.float32)
    for array, tolerance in ((outputs, 1e-9), (narrow, 1e-5)):
        result = Graph(CTC(), labels, array, gradient=True)(labels, array)
        np.testing.assert_allclose(result["loss"], losses.mean(), rtol=tolerance)
        np.testing.assert_allclose(result["gradient"], slope, atol=100 * tolerance)


@pytest.mark.torch
def test_divided_by_the_lengths_it_is_the_mean_of_torch() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    outputs, labels = (
        rng.normal(size=(4, 9, 5)),
        np.array([[1, 2, 2], [3, -1, -1], [-1] * 3, [4] * 3]),
    )
    expected = torch.nn.CTCLoss()(
        torch.tensor(outputs).log_softmax(-1).transpose(0, 1),
        torch.tensor(labels[labels >= 0]),
        torch.tensor([9] * 4),
        torch.tensor([3, 1, 0, 3]),
    )
    loss = CTC(divide_by_length=True)
    result = Graph(loss, labels, outputs)(labels, outputs)["loss"]
    assert result == pytest.approx(expected.item(), rel=1e-12)


def test_equal_outputs_share_the_gradient_of_a_tie() -> None:
    """With equal outputs, all states of a step tie; differences agree with the gradient."""
    labels, outputs = np.array([[1, 2, 2]]), np.zeros((1, 5, 3))
    graph = Graph(CTC(), labels, outputs, gradient=True)
    slope = graph(labels, outputs)["gradient"]
    for place in np.ndindex(outputs.shape):
        above, below = outputs.copy(), outputs.copy()
        above[place] += 1e-5
        below[place] -= 1e-5
        difference = graph(labels, above)["loss"] - graph(labels, below)["loss"]
        assert slope[place] == pytest.approx(difference / 2e-5, abs=1e-8)


def test_the_gradient_is_differentiated_again() -> None:
    rng = np.random.default_rng(0)
    labels, (outputs, arriving) = np.array([[1, 2, 2]]), rng.normal(size=(2, 6, 4))
    slope = CTC().build_onnx_function(("batch", 6, 4), np.float64, gradient=True)
    second = gradient_model(slope, "y_pred", gradient="onnx")
    once, twice = (
        onnxruntime.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"])
        for m in (slope, second)
    )
    feeds = {"y_true": labels, "y_pred": outputs[None]}
    more = {"loss_grad": np.zeros(()), "y_pred_grad_grad": arriving[None]}
    (curvature,) = twice.run(["y_pred_grad_2"], {**feeds, **more})
    for place in np.ndindex(outputs.shape):
        values = []
        for step in (1e-5, -1e-5):
            moved = outputs.copy()
            moved[place] += step
            (own,) = once.run(["y_pred_grad"], {**feeds, "y_pred": moved[None]})
            values.append((own * arriving).sum())
        difference = (values[0] - values[1]) / 2e-5
        assert curvature[0][place] == pytest.approx(difference, abs=1e-8)


@pytest.mark.parametrize("zero_infinity", [False, True])
def test_a_row_without_a_path_has_no_gradient_and_spoils_no_other_row(zero_infinity: bool) -> None:
    loss = CTC(zero_infinity=zero_infinity, reduction="sum")
    labels, outputs = np.array([[1, 1], [1, 2]]), np.random.default_rng(0).normal(size=(2, 2, 3))
    result = Graph(loss, labels, outputs, gradient=True)(labels, outputs)
    alone = Graph(loss, labels[1:], outputs[1:], gradient=True)(labels[1:], outputs[1:])
    assert result["loss"] == (alone["loss"] if zero_infinity else math.inf)
    assert not result["gradient"][0].any()
    np.testing.assert_allclose(result["gradient"][1:], alone["gradient"], rtol=1e-12)


@pytest.mark.parametrize(
    ("loss", "labels"),
    [
        (CTC(), [[1, -1, 2]]),
        (CTC(), [[1, 0, 2]]),
        (CTC(-1, ignore_index=-9), [[1, 3, 2]]),
        (CTC(input_lengths=True), [[7, 1, 2]]),
        (CTC(input_lengths=True), [[-1, 1, 2]]),
    ],
    ids=repr,
)
def test_labels_that_only_prepare_refuses_are_nan_in_a_graph(loss: CTC, labels: Any) -> None:
    labels, outputs = np.array(labels), np.zeros((1, 6, 4), np.float32)
    with pytest.raises(DataError):
        loss.prepare(labels, SPEC)
    assert np.isnan(Graph(loss, labels, outputs)(labels, outputs)["loss"])


def test_an_output_that_is_nan_makes_the_loss_nan() -> None:
    labels, outputs = np.array([[1, 2]]), np.zeros((1, 6, 4), np.float32)
    outputs[0, 2, 1] = np.nan
    assert np.isnan(Graph(CTC(zero_infinity=True), labels, outputs)(labels, outputs)["loss"])


@pytest.mark.parametrize(
    ("loss", "labels", "message"),
    [
        (CTC(), [[1, 4]], r"class indices from 0 to 3 except the blank 0 .*, got 4 at row 0\.$"),
        (CTC(), [[1, 2], [0, 1]], r"got 0 at row 1\. To pad labels with 0, set ignore_index=0\."),
        (CTC(-1), [[3, 1]], r"except the blank 3 .* got 3 at row 0\. To pad"),
        (CTC(), [[1, -100]], r"got -100 at row 0\. To pad labels with -100, set ignore_index=-100"),
        (CTC(), [[1, 1.5]], r"got 1.5 at row 0"),
        (CTC(), [1, 2], r"class indices of shape \(batch, \?\) .*got shape \(2,\)"),
        (
            CTC(),
            [[1, 2], [1, -1], [-1, 3]],
            r"only padding \(-1\) after the padding.*got 3 at row 2",
        ),
        (CTC(ignore_index=0), [[1, 0, 2]], r"only padding \(0\) after the padding of a row"),
        (
            CTC(),
            [[1, 2, 3, 1, 2, 3], [1, 1, 1, 1, -1, -1]],
            r"needs 7 time steps for the 4 labels of row 1, 3 of which .*, but has 6 of output y"
            r"(.|\n)*zero_infinity=True",
        ),
        (CTC(input_lengths=True), [[2, 1, 1]], r"needs 3 time steps .* but has 2 of output"),
        (CTC(input_lengths=True), [[7, 1, 1]], r"input lengths from 0 to 6 .*, got 7 at row 0"),
        (CTC(input_lengths=True), np.zeros((2, 0)), r"labels without columns"),
    ],
    ids=repr,
)
def test_wrong_labels_are_named(loss: CTC, labels: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        loss.prepare(np.array(labels), SPEC)


def test_labels_without_a_path_are_for_zero_infinity() -> None:
    labels = np.array([[1, 1, 1, 1, 2, 3]])
    assert CTC(zero_infinity=True).prepare(labels, SPEC).tolist() == labels.tolist()
    unknown = TensorSpec("y", np.dtype(np.float32), ("batch", "time", 4))
    assert CTC().prepare(labels, unknown).tolist() == labels.tolist()


@pytest.mark.parametrize(
    ("loss", "shape", "message"),
    [
        (CTC(), ("n", 3), r"needs an output of shape \(batch, time, classes\)"),
        (CTC(), ("n", 3, 1), "the blank and another class, got blank=0 for the 1 classes"),
        (CTC(5), ("n", 3, 5), "got blank=5 for the 5 classes"),
    ],
    ids=repr,
)
def test_outputs_that_do_not_fit(loss: CTC, shape: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        loss.target(TensorSpec("y", np.dtype(np.float32), shape))


@pytest.mark.parametrize("blank", [-2, 1.5, "0"])
def test_blanks_that_are_no_class(blank: Any) -> None:
    with pytest.raises(SettingError, match="CTC needs blank"):
        CTC(blank)


# ---------------------------------------------------------------------- training


def model(ending: str = "", steps: str = "6") -> onnx.ModelProto:
    """Return a dense layer over the time steps of rows of 8 numbers; its outputs have 4 classes."""
    rng = np.random.default_rng(0)
    last = f"y = {ending} (s)" if ending else "y = Identity (s)"
    text = f"""<ir_version: 8, opset_import: ["": 17]>
        reader (float[N, {steps}, 8] x) => (float[N, {steps}, 4] y)
        {{ m = MatMul (x, w)  s = Add (m, b)  {last} }}"""
    proto = onnx.parser.parse_model(text)
    weight = rng.normal(size=(8, 4)).astype(np.float32) / 3
    proto.graph.initializer.extend(
        [from_array(weight, "w"), from_array(np.zeros(4, np.float32), "b")]
    )
    return proto


def data(rows: int = 24, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return rows whose steps show a class by noisy codes, and the classes as labels."""
    rng = np.random.default_rng(seed)
    codes = np.random.default_rng(2).normal(size=(4, 8))
    path = rng.integers(0, 4, (rows, 6))
    labels = np.full((rows, 6), -1)
    for row, reading in zip(labels, greedy_decode(np.eye(4)[path])):
        row[: len(reading)] = reading
    return (codes[path] + 0.1 * rng.normal(size=(rows, 6, 8))).astype(np.float32), labels


@pytest.mark.parametrize("backend", ["full", "forward_backward", "in_place"])
@pytest.mark.parametrize("ending", ["", "Softmax <axis=-1>", "LogSoftmax <axis=-1>"])
def test_logits_and_probabilities_train_alike_in_each_backend(backend: str, ending: str) -> None:
    x, y = data()
    trainer = Trainer(model(ending), loss="ctc", optimizer=0.5, backend=backend)
    reference = Trainer(model(), loss=CTC(from_logits=True), optimizer=0.5)
    logs = [
        t.fit(x, y, epochs=3, batch_size=8, verbose=0).history["loss"] for t in (trainer, reference)
    ]
    np.testing.assert_allclose(*logs, rtol=1e-4)
    np.testing.assert_allclose(trainer.get_weights()["w"], reference.get_weights()["w"], atol=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_products_in_half_precision_leave_the_loss_in_float32(precision: str) -> None:
    x, y = data()
    settings: dict[str, Any] = {"loss": "ctc", "optimizer": 0.1}
    plain = Trainer(model("Softmax <axis=-1>"), **settings).train_on_batch(x, y)["loss"]
    half = Trainer(model("Softmax <axis=-1>"), precision=precision, **settings)
    assert half.train_on_batch(x, y)["loss"] == pytest.approx(plain, rel=0.01)


def test_a_trained_model_reads_its_labels() -> None:
    x, y = data(64)
    metrics = ["character_error_rate", WordErrorRate("_ab ")]
    trainer = Trainer(model("Softmax <axis=-1>"), loss="ctc", optimizer="adam", metrics=metrics)
    before = trainer.evaluate(x, y)
    trainer.learning_rate = 0.05
    trainer.fit(x, y, epochs=40, batch_size=16, verbose=0)
    after = trainer.evaluate(x, y)
    assert after["character_error_rate"] < 0.02 < before["character_error_rate"]
    assert after["word_error_rate"] < before["word_error_rate"]
    outputs = trainer.predict(x)
    expected = [[label for label in row if label >= 0] for row in y.tolist()]
    wrong = sum(a != b for a, b in zip(greedy_decode(outputs), expected))
    best = sum(r[0].labels != b for r, b in zip(beam_search_decode(outputs), expected))
    assert max(wrong, best) <= 2


def test_metrics_take_the_settings_of_the_loss(tmp_path: Path) -> None:
    x, y = data()
    moved = np.where(y < 0, -7, y - 1)  # the blank is the last class
    steps = np.column_stack([np.full(len(y), 6), moved])
    loss = CTC(-1, ignore_index=-7, input_lengths=True)
    trainer = Trainer(model(), loss=loss, metrics=["cer", CharacterErrorRate(name="own")])
    figures = trainer.evaluate(x, steps)
    outputs = trainer.predict(x)
    edits = sum(
        edit_distance(reading, [k for k in row if k != -7])
        for reading, row in zip(greedy_decode(outputs, blank=3), moved.tolist())
    )
    assert figures["cer"] == figures["own"] == pytest.approx(edits / (moved != -7).sum())
    loaded = Trainer.load(trainer.save(tmp_path / "c"))
    assert loaded.evaluate(x, steps) == figures


def test_steps_beyond_the_input_length_do_not_count() -> None:
    x, y = data()
    rng = np.random.default_rng(3)
    longer = np.concatenate([x, rng.normal(size=(len(x), 3, 8)).astype(np.float32)], axis=1)
    plain = Trainer(model(steps="T"), loss="ctc", metrics=["cer"]).evaluate(x, y)
    loss = CTC(input_lengths=True)
    steps = np.column_stack([np.full(len(y), 6), y])
    result = Trainer(model(steps="T"), loss=loss, metrics=["cer"]).evaluate(longer, steps)
    assert result == pytest.approx(plain, rel=1e-5)


def test_a_row_of_weight_zero_changes_nothing() -> None:
    x, y = data()
    weight = np.arange(len(x), dtype=np.float32) % 3
    x[weight == 0] = np.nan
    kept = weight > 0
    settings = {
        "loss": CTC(reduction="weighted_mean"),
        "metrics": [CharacterErrorRate(weighted=True)],
    }
    whole = Trainer(model(), **settings).evaluate(np.nan_to_num(x, nan=9), y, weight)
    part = Trainer(model(), **settings).evaluate(x[kept], y[kept], weight[kept])
    assert whole == pytest.approx(part, rel=1e-5)


@pytest.mark.parametrize("zero_infinity", [False, True])
def test_a_label_without_a_path_is_explained(zero_infinity: bool) -> None:
    x, y = data()
    y[0] = 1
    with pytest.raises(DataError, match="needs 11 time steps for the 6 labels of row 0"):
        Trainer(model(), loss="ctc").fit(x, y, verbose=0)
    trainer = Trainer(model(steps="T"), loss=CTC(zero_infinity=zero_infinity))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss = trainer.fit(x, y, verbose=0).history["loss"][0]
    told = ["too long for its time steps" in str(warning.message) for warning in caught]
    assert (math.isinf(loss), told) == ((False, []) if zero_infinity else (True, [True]))
    assert np.isfinite(trainer.get_weights()["w"]).all()


@pytest.mark.parametrize("reduction", ["mean", "weighted_mean", "sum"])
def test_an_evaluation_does_not_depend_on_the_batch_size(reduction: str) -> None:
    x, y = data()
    trainer = Trainer(model(), loss=CTC(reduction=reduction), penalty=0.1, metrics=["cer"])
    for weight in (None, np.linspace(-0.5, 2, len(x), dtype=np.float32)):
        whole = trainer.evaluate(x, y, weight, batch_size=len(x))
        for size in (1, 5, 16):
            part = trainer.evaluate(x, y, weight, batch_size=size)
            assert part == pytest.approx(whole, rel=1e-5), size


@pytest.mark.parametrize("target", ["onnxruntime", "web"])
def test_a_training_folder_trains_and_knows_its_labels(tmp_path: Path, target: str) -> None:
    x, y = data()
    trainer = Trainer(model("Softmax <axis=-1>"), loss="ctc", optimizer="adam")
    host = Host(trainer.export_training(tmp_path, target=target))
    (labels,) = (t["labels"] for t in host.graphs["train"]["inputs"] if t["role"] == "y")
    assert labels == {"least": 1, "greatest": 3, "values": None, "ignored": -1}
    for _ in range(3):
        own = trainer.train_on_batch(x, y)["loss"]
        assert host.train({"x": x, "y:y": y}) == pytest.approx(own, rel=1e-5)
    np.testing.assert_allclose(host.state["w"], trainer.get_weights()["w"], rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------------- decoding


def all_readings(p: np.ndarray, blank: int) -> tuple[dict[tuple[int, ...], float], tuple[int, ...]]:
    """The probability of each label, and the label of the most probable path, by all paths."""
    sums: dict[tuple[int, ...], float] = collections.defaultdict(float)
    best = (-1.0, ())
    for path in itertools.product(range(p.shape[1]), repeat=len(p)):
        probability = p[np.arange(len(p)), path].prod()
        label = tuple(k for k, _ in itertools.groupby(path) if k != blank)
        sums[label] += probability
        best = max(best, (probability, label))
    return sums, best[1]


@pytest.mark.parametrize("seed", range(20))
def test_decoders_find_what_all_paths_show(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps, classes = int(rng.integers(1, 6)), int(rng.integers(2, 5))
    blank = int(rng.integers(-1, classes))
    p = special.softmax(2 * rng.normal(size=(2, steps, classes)), axis=-1)
    p[0, 0, 0] = 0
    p[0, 0] /= p[0, 0].sum()
    greedy = greedy_decode(np.log(p + 1e-30), blank=blank)
    found = beam_search_decode(p, beam_width=4096, top_paths=4096, blank=blank)
    for row, best, readings in zip(p, greedy, found):
        sums, path = all_readings(row, blank % classes)
        assert tuple(best) == path
        assert len(readings) == sum(value > 0 for value in sums.values())
        for labels, log_probability in readings:
            assert log_probability == pytest.approx(math.log(sums[tuple(labels)]), abs=1e-10)
        values = [reading.log_probability for reading in readings]
        assert values == sorted(values, reverse=True)
    narrow = beam_search_decode(p, beam_width=3, top_paths=2, blank=blank)
    for row, readings in zip(found, narrow):
        assert len(readings) <= 2
        assert readings[0].log_probability <= row[0].log_probability + 1e-12


def test_logits_and_probabilities_read_alike() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 7, 5)).astype(np.float32)
    expected = beam_search_decode(logits, top_paths=3)
    for outputs, from_logits in (
        (special.softmax(logits, -1), None),
        (special.softmax(logits, -1), False),
        (special.log_softmax(logits, -1), None),
        (special.log_softmax(logits, -1), True),
    ):
        readings = beam_search_decode(outputs, top_paths=3, from_logits=from_logits)
        for row, own in zip(expected, readings):
            assert [r.labels for r in row] == [r.labels for r in own]
            np.testing.assert_allclose(
                *([r.log_probability for r in x] for x in (row, own)), rtol=1e-5
            )


def test_decoders_stop_at_the_input_length() -> None:
    outputs = np.eye(3)[[[1, 0, 2, 2], [1, 2, 1, 2]]]
    assert greedy_decode(outputs, input_lengths=[2, 3]) == [[1], [1, 2, 1]]
    read = beam_search_decode(outputs, input_lengths=np.array([0, 3]))
    assert read == [[Reading([], 0.0)], [Reading([1, 2, 1], 0.0)]]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: greedy_decode(np.zeros((2, 3))), DataError, r"shape \(2, 3\)"),
        (lambda: greedy_decode(np.full((1, 2, 3), np.nan)), DataError, "row 0 contain NaN"),
        (lambda: greedy_decode(np.zeros((1, 2, 3)), blank=3), SettingError, "from 0 to 2"),
        (lambda: greedy_decode(np.zeros((1, 2, 3)), input_lengths=[3]), DataError, "from 0 to 2"),
        (lambda: greedy_decode(np.zeros((1, 2, 3)), input_lengths=[1, 1]), DataError, "1 whole"),
        (lambda: beam_search_decode(np.zeros((1, 2, 3)), beam_width=0), SettingError, "beam_width"),
        (
            lambda: beam_search_decode(np.zeros((1, 2, 3)), beam_width=2, top_paths=3),
            SettingError,
            "from 1 to beam_width=2, got 3",
        ),
        (
            lambda: beam_search_decode(np.full((1, 2, 3), np.inf)),
            DataError,
            "row 0 are no logits",
        ),
        (
            lambda: beam_search_decode(np.full((1, 2, 3), -1.0), from_logits=False),
            DataError,
            "row 0 are no probabilities",
        ),
    ],
)
def test_impossible_arguments_of_decoders(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


# ---------------------------------------------------------------------- error rates


def plain_distance(a: str, b: str) -> int:
    """The distance by its definition, without a table."""
    if not a or not b:
        return len(a) + len(b)
    return min(
        plain_distance(a[1:], b) + 1,
        plain_distance(a, b[1:]) + 1,
        plain_distance(a[1:], b[1:]) + (a[0] != b[0]),
    )


def test_the_distance_is_the_fewest_edits() -> None:
    assert edit_distance("kitten", "sitting") == 3
    rng = np.random.default_rng(0)
    for _ in range(100):
        a, b = ("".join(rng.choice(list("abc"), rng.integers(0, 6))) for _ in range(2))
        assert edit_distance(a, b) == plain_distance(a, b), (a, b)


def test_rates_of_known_texts() -> None:
    alphabet = "_ab "
    texts, read = ["ab ba", "b", ""], ["ab a", "a b", "a"]
    labels = np.full((3, 5), -1)
    outputs = np.zeros((3, 10, 4))
    for row, (text, other) in enumerate(zip(texts, read)):
        labels[row, : len(text)] = [alphabet.index(c) for c in text]
        path = [0] * 10
        path[: 2 * len(other) : 2] = [alphabet.index(c) for c in other]
        outputs[row] = np.eye(4)[path]
    characters, words = CharacterErrorRate(), WordErrorRate(alphabet)
    for metric in (characters, words):
        metric.update(labels, outputs)
    assert characters.result() == pytest.approx((1 + 2 + 1) / 6)
    assert words.result() == pytest.approx((1 + 1 + 1) / 3)
    weighted = from_config(
        to_config(WordErrorRate(list(alphabet), weighted=True)), "onnxfit.metrics"
    )
    weighted.update(labels, outputs, np.array([2.0, 1.0, 0.0]))
    assert weighted.result() == pytest.approx((2 + 1) / 5)


def test_rates_that_are_not_defined_are_nan() -> None:
    metric = CharacterErrorRate()
    metric.update(np.array([[-1]]), np.eye(3)[[[1, 0]]])
    assert math.isnan(metric.result())
    metric.reset()
    metric.update(np.array([[1]]), np.full((1, 2, 3), np.nan))
    assert math.isnan(metric.result())


@pytest.mark.parametrize(
    ("metric", "labels", "message"),
    [
        (CharacterErrorRate(), [[0, 1]], "except the blank 0 as labels, got 0"),
        (CharacterErrorRate(), [[1, 3]], "from 0 to 2 .* got 3"),
        (CharacterErrorRate(input_lengths=True), [[9, 1]], "input_lengths must be"),
        (WordErrorRate("ab"), [[1]], "got 2 strings and outputs of 3 classes"),
    ],
    ids=repr,
)
def test_labels_that_error_rates_refuse(metric: Any, labels: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        metric.update(np.array(labels), np.zeros((1, 4, 3)))


@pytest.mark.parametrize("alphabet", [3, [1, 2], None])
def test_alphabets_that_are_no_strings(alphabet: Any) -> None:
    with pytest.raises(SettingError, match="a string for each class as alphabet"):
        WordErrorRate(alphabet)
