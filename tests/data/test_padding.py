"""Rows of different lengths in padded batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx.parser
import pytest

import onnxfit
from onnxfit import Bucket, Pad, Prefetch, Trainer, losses
from onnxfit.callbacks import LambdaCallback
from onnxfit.data import DataAdapter
from onnxfit.errors import DataError, SettingError
from onnxfit.graph.spec import TensorSpec

RNG = np.random.default_rng(0)
LENGTHS = [3, 7, 1, 5, 2, 6, 4, 7, 2, 1]
ROWS = [RNG.integers(1, 9, length).tolist() for length in LENGTHS]
LABELS = [[token % 3 for token in row] for row in ROWS]
NAMED = [{"input_ids": row, "labels": label} for row, label in zip(ROWS, LABELS)]
LOSS = losses.CrossEntropy(ignore_index=-100)


def transformer(mask: bool = True) -> onnx.ModelProto:
    """An embedding, self-attention over any number of tokens, and three classes for each."""
    numbers = ", ".join(f"{v:.3f}" for v in RNG.normal(size=36))
    weights = ", ".join(f"{v:.3f}" for v in RNG.normal(size=12))
    given = ", int64[N, T] attention_mask" if mask else ""
    counts = "Identity(attention_mask)" if mask else "Greater(input_ids, none)"
    return onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        attention (int64[N, T] input_ids{given}) => (float[N, T, 3] y)
        <float[9, 4] embedding = {{{numbers}}}, float[4, 3] w = {{{weights}}},
         float one = {{1}}, float far = {{-10000}}, int64[1] axis = {{1}}, int64 none = {{-1}}>
        {{
            x = Gather(embedding, input_ids)
            counts = {counts}  m = Cast<to: int = 1>(counts)
            r = Sub(one, m)  b = Mul(r, far)  bias = Unsqueeze(b, axis)
            xt = Transpose<perm: ints = [0, 2, 1]>(x)
            s = MatMul(x, xt)  sb = Add(s, bias)  a = Softmax<axis: int = -1>(sb)
            c = MatMul(a, x)  h = Add(c, x)  y = MatMul(h, w)
        }}"""
    )


def padded_by_hand(rows: list[int]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The batch of some rows."""
    longest = max(LENGTHS[row] for row in rows)
    ids = np.zeros((len(rows), longest), np.int64)
    mask = np.zeros_like(ids)
    labels = np.full_like(ids, -100)
    for i, row in enumerate(rows):
        ids[i, : LENGTHS[row]] = ROWS[row]
        mask[i, : LENGTHS[row]] = 1
        labels[i, : LENGTHS[row]] = LABELS[row]
    return {"input_ids": ids, "attention_mask": mask}, labels


def consecutive(size: int) -> Iterator[list[int]]:
    return (list(range(10))[i : i + size] for i in range(0, 10, size))


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_training_is_that_on_batches_padded_by_hand(backend: str) -> None:
    model = transformer()
    by_hand = Trainer(model, loss=LOSS, backend=backend)
    by_hand.fit(
        [padded_by_hand(rows) for rows in consecutive(4)], epochs=2, shuffle=False, verbose=0
    )
    trainer = Trainer(model, loss=LOSS, backend=backend)
    history = trainer.fit(Pad(NAMED, batch_size=4, shuffle=False), epochs=2, verbose=0).history
    assert history["loss"] == pytest.approx(by_hand.history.history["loss"])
    for name, value in by_hand.get_weights().items():
        np.testing.assert_array_equal(trainer.get_weights()[name], value)


def test_padding_changes_neither_loss_nor_predictions() -> None:
    trainer = Trainer(transformer(), loss=LOSS)
    expected = trainer.evaluate(Pad(NAMED, batch_size=1))["loss"]
    for data in (
        Pad(ROWS, LABELS, batch_size=4, pad_to_multiple_of=8),
        Bucket(NAMED, batch_size=4),
        Prefetch(Pad(NAMED, batch_size=3)),
    ):
        assert trainer.evaluate(data)["loss"] == pytest.approx(expected, rel=1e-5)
    batches = trainer.predict(Bucket(NAMED, batch_size=3))
    assert [batch.shape[0] for batch in batches] == [3, 3, 3, 1]
    outputs = [output for batch in batches for output in batch]
    for row, output in enumerate(outputs):
        alone = trainer.predict(
            {
                "input_ids": np.array([ROWS[row]]),
                "attention_mask": np.ones((1, LENGTHS[row]), np.int64),
            }
        )
        np.testing.assert_allclose(output[: LENGTHS[row]], alone[0], rtol=1e-4, atol=1e-5)


def test_rows_of_every_form_are_the_same() -> None:
    x, y = padded_by_hand([0, 1, 2, 3])
    settings: dict[str, Any] = {"batch_size": 4, "shuffle": False}
    columns = {"input_ids": ROWS, "labels": [np.array(label) for label in LABELS]}
    for data in (Pad(NAMED, **settings), Pad(columns, **settings)):
        (batch,) = next(iter(data))
        assert list(batch) == ["input_ids", "labels", "attention_mask"]
        for name, expected in {**x, "labels": y}.items():
            np.testing.assert_array_equal(batch[name], expected, strict=True)
    for data in (
        Pad(ROWS, LABELS, **settings),
        Pad(tuple(map(np.array, ROWS)), LABELS, **settings),
    ):
        ids, labels = next(iter(data))
        np.testing.assert_array_equal(ids, x["input_ids"], strict=True)
        np.testing.assert_array_equal(labels, y, strict=True)


def test_each_column_is_filled_as_it_should_be() -> None:
    data = Pad(
        {
            "token_type_ids": [[1] * length for length in LENGTHS],
            "input_ids": ROWS,
            "age": list(range(10)),
            "vector": RNG.normal(size=(10, 2)).astype(np.float32),
            "decoder_input_ids": [row[:2] for row in ROWS],
        },
        y=list(range(10)),
        sample_weight=[np.full(length, 0.5) for length in LENGTHS],
        batch_size=3,
        shuffle=False,
        pad_token_id=50,
        pad_to_multiple_of=4,
    )
    x, y, weights = next(iter(data))
    shapes = {name: array.shape for name, array in x.items()}
    assert shapes == {
        "token_type_ids": (3, 8),
        "input_ids": (3, 8),
        "age": (3,),
        "vector": (3, 2),
        "decoder_input_ids": (3, 4),
        "attention_mask": (3, 8),
    }
    assert x["input_ids"][0].tolist() == [*ROWS[0], *[50] * 5]
    assert x["token_type_ids"][0].tolist() == [1] * 3 + [0] * 5
    assert x["attention_mask"][0].tolist() == [1] * 3 + [0] * 5
    assert x["decoder_input_ids"][0].tolist() == [*ROWS[0][:2], 0, 0]
    assert weights[0].tolist() == [0.5] * 3 + [0] * 5
    assert y.tolist() == [0, 1, 2]


def test_labels_of_small_types_hold_the_padding() -> None:
    _, y = next(iter(Pad(ROWS, [np.array(label, np.uint8) for label in LABELS], shuffle=False)))
    assert y[0].tolist() == LABELS[0] + [-100] * 4
    _, y = next(iter(Pad(ROWS, [np.array(label, bool) for label in LABELS], shuffle=False)))
    assert y[0].tolist() == [bool(label) for label in LABELS[0]] + [-100] * 4


def test_features_are_padded_along_the_first_axis() -> None:
    frames = [np.full((length, 2), length, np.float32) for length in LENGTHS]
    ((x,),) = Pad(frames, batch_size=10, shuffle=False)
    assert (x.shape, x.dtype) == ((10, 7, 2), np.float32)
    np.testing.assert_array_equal(x.sum((1, 2)), [2 * length**2 for length in LENGTHS])
    ((x,),) = Pad([[0.5], [1, 2], []], batch_size=3, shuffle=False)
    assert (x.tolist(), x.dtype) == ([[0.5, 0], [1, 2], [0, 0]], np.float32)


def test_weights_of_tokens_are_padded_with_0() -> None:
    """Labels that count nothing by their weights are worth those that are left out."""
    keep = [[float(token > 3) for token in row] for row in ROWS]
    left_out = [[label if k else -100 for label, k in zip(*pair)] for pair in zip(LABELS, keep)]
    trainer = Trainer(
        transformer(), loss=losses.CrossEntropy(ignore_index=-100, reduction="weighted_mean")
    )
    expected = trainer.evaluate(Pad(ROWS, left_out, batch_size=4))["loss"]
    got = trainer.evaluate(Pad(ROWS, LABELS, keep, batch_size=4))["loss"]
    assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("drop_last", [False, True])
def test_buckets_have_every_row_once_in_batches_of_similar_length(drop_last: bool) -> None:
    lengths = np.random.default_rng(1).integers(1, 60, 103)
    rows = [np.full(length, row) for row, length in enumerate(lengths)]
    loader = Bucket(rows, batch_size=8, pool=13, seed=5, drop_last=drop_last)
    orders = []
    for _ in range(2):
        batches = [x for (x,) in loader]
        assert len(batches) == len(loader) == (12 if drop_last else 13)
        assert [len(x) for x in batches] == [8] * 12 + [7] * (not drop_last)
        orders.append([row for x in batches for row in x[:, 0]])
        assert len(set(orders[-1])) == len(orders[-1]) == (96 if drop_last else 103)
        padding = sum(x.size for x in batches) / lengths[orders[-1]].sum()
        assert padding < 1.15
        longest = [x.shape[1] for x in batches]
        assert longest != sorted(longest)
    assert orders[0] != orders[1]
    loader.set_epoch(0)
    assert [row for (x,) in loader for row in x[:, 0]] == orders[0]
    plain = sum(x.size for (x,) in Pad(rows, batch_size=8)) / lengths.sum()
    assert plain > 1.5


def test_a_bucket_resumes_within_an_epoch() -> None:
    whole = [x.tolist() for (x,) in Bucket(ROWS, batch_size=3, pool=2, seed=1)]
    loader = Bucket(ROWS, batch_size=3, pool=2, seed=1)
    iterator = iter(loader)
    first = [next(iterator)[0].tolist() for _ in range(2)]
    other = Bucket(ROWS, batch_size=3, pool=2)
    other.load_state_dict(loader.state_dict())
    assert first + [x.tolist() for (x,) in other] == whole
    iterator.close()


def test_a_fit_on_buckets_resumes_exactly(tmp_path) -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        tagger (int64[N, T] input_ids) => (float[N, T, 3] y)
        <float[9, 3] table = {{{", ".join(["0"] * 27)}}}> {{ y = Gather(table, input_ids) }}"""
    )

    def loader() -> Bucket:
        return Bucket(ROWS, LABELS, batch_size=3, pool=2, pad_to_multiple_of=8)

    def stop(batch: int, logs: object) -> None:
        if stopped.global_batch == 6:
            stopped.save(tmp_path / "stopped")
            raise KeyboardInterrupt

    whole = Trainer(model, loss=LOSS)
    whole.fit(loader(), epochs=2, verbose=0)
    stopped = Trainer(model, loss=LOSS)
    with pytest.raises(KeyboardInterrupt):
        stopped.fit(
            loader(),
            epochs=2,
            callbacks=LambdaCallback(on_train_batch_end=stop),
            verbose=0,
        )
    resumed = Trainer.load(tmp_path / "stopped")
    resumed.fit(loader(), epochs=2, verbose=0)
    assert resumed.global_batch == 8
    for name, value in whole.get_weights().items():
        np.testing.assert_array_equal(resumed.get_weights()[name], value)


def test_fit_splits_padded_rows() -> None:
    trainer = Trainer(transformer(), loss=LOSS)
    history = trainer.fit(Bucket(NAMED, batch_size=3), validation_split=0.2, verbose=0).history
    assert trainer.samples_seen == 8
    expected = trainer.evaluate(Pad(NAMED[8:]))["loss"]
    assert history["val_loss"] == pytest.approx([expected], rel=1e-5)
    training, validation = Pad(NAMED, drop_last=False).split(0.3)
    assert (training.rows, validation.rows, validation.shuffle) == (7, 3, False)


def test_a_batch_size_can_be_changed() -> None:
    trainer = Trainer(transformer(), loss=LOSS)
    resize = LambdaCallback(on_train_begin=lambda logs: setattr(trainer, "batch_size", 5))
    loader = Bucket(NAMED, batch_size=3)
    trainer.fit(loader, callbacks=resize, verbose=0)
    assert (trainer.global_batch, loader.batch_size) == (2, 3)


def test_a_mask_is_made_where_the_model_has_one_alone() -> None:
    masked, plain = Trainer(transformer(), loss=LOSS), Trainer(transformer(False), loss=LOSS)
    for rows in (ROWS, {"input_ids": ROWS}):
        assert masked.predict(Pad(rows)).shape == (10, 7, 3)
        assert plain.predict(Pad(rows)).shape == (10, 7, 3)
    given = {"input_ids": ROWS, "attention_mask": [[1] * length for length in LENGTHS]}
    np.testing.assert_array_equal(masked.predict(Pad(given)), masked.predict(Pad(ROWS)))
    with pytest.raises(DataError, match="Not inputs of the model: 'attention_mask'"):
        plain.predict(Pad(given))


@pytest.mark.parametrize("loader", [Pad, Bucket])
def test_positions_are_made_where_the_model_has_them_alone(loader: Any) -> None:
    """They count the tokens of a row. A row alone has the same outputs as in a batch."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        g (int32[N, T] input_ids, int32[N, T] position_ids) => (float[N, T, 3] y)
        { p = Gather(places, position_ids)  e = Gather(tokens, input_ids)  y = Add(p, e) }"""
    )
    tokens, places = RNG.normal(size=(2, 9, 3)).astype(np.float32)
    for name, array in {"tokens": tokens, "places": places}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    trainer = Trainer(model, loss=LOSS)
    for rows in (ROWS, {"input_ids": ROWS}):
        outputs = [y for batch in trainer.predict(loader(rows, batch_size=3)) for y in batch]
        for row, output in zip(ROWS, outputs):
            np.testing.assert_allclose(
                output[: len(row)], tokens[row] + places[: len(row)], rtol=1e-5, atol=1e-6
            )
    expected = trainer.evaluate(Pad(NAMED, batch_size=1))["loss"]
    assert trainer.evaluate(loader(NAMED, batch_size=4))["loss"] == pytest.approx(expected)
    given = {"input_ids": ROWS, "position_ids": [[2] * len(row) for row in ROWS]}
    (first, *_) = trainer.predict(loader(given, batch_size=1))
    np.testing.assert_allclose(first[0], tokens[ROWS[0]] + places[2], rtol=1e-5, atol=1e-6)


def test_positions_leave_out_tokens_that_the_mask_marks() -> None:
    """As in transformers, whose decoders pad rows on the left."""
    inputs = [
        TensorSpec(name, np.dtype(np.int64), ("N", "T"))
        for name in ("input_ids", "attention_mask", "position_ids")
    ]
    rows = {"input_ids": [[0, 0, 5, 6], [7, 8]], "attention_mask": [[0, 0, 1, 1], [1, 1]]}
    adapter = DataAdapter(inputs, {}, purpose="prediction")
    (batch,) = adapter.source(Pad(rows), batch_size=2).batches(0)
    assert batch.arrays()["position_ids"].tolist() == [[0, 0, 0, 1], [0, 1, 0, 0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), r"is empty: it has 0 rows\."),
        (([1, 2],), "rows that are sequences"),
        ((3,), "list of rows or a dict of lists, got int"),
        (({"input_ids": 3},), r"input_ids is a single value\. Expected one"),
        ((["text"],), "text"),
        (([[1], [[1, 2]]],), r"shape \(1,\) in one row and \(1, 2\) in row 1"),
        (([np.ones((2, 3)), np.ones((2, 4))],), r"shape \(2, 3\) in one row and \(2, 4\) in row 1"),
        (([{"a": [1]}, {"b": [1]}],), r"Row 1 has 'b', but row 0 has 'a'\."),
        ((ROWS, [1, 2]), "the same number of rows"),
        ((ROWS, [[0.5] * length for length in LENGTHS]), "sequences of floats.*sample_weight"),
    ],
)
def test_rows_that_cannot_be_padded_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Pad(*arguments)


def test_impossible_settings_of_padding() -> None:
    with pytest.raises(SettingError, match=r"pad_to_multiple_of must be from 1 to 65536, got 0\."):
        Pad(ROWS, pad_to_multiple_of=0)
    with pytest.raises(SettingError, match="pool >= 1, got 0"):
        Bucket(ROWS, pool=0)
    with pytest.raises(SettingError, match="Pad needs batch_size"):
        onnxfit.Pad(ROWS, batch_size="many")
